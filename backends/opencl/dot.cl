// DOT4(codes, numbers, sum): sum + the four products of unsigned bytes of one word and signed bytes of the other.
// DOT4_SIGNED: both are signed.

#if INTEGER_DOT
#define DOT4(codes, numbers, sum) ((sum) + dot_4x8packed_us_int(codes, numbers))
#define DOT4_SIGNED(codes, numbers, sum) ((sum) + dot_4x8packed_ss_int(codes, numbers))
#else
// In shifts, and not as char4: PoCL makes vectors of these across work-items, and takes a third of the time.
int unsigned_byte(uint word, int i) { return word >> 8 * i & 255u; }
int signed_byte(uint word, int i) { return (int)(word << (24 - 8 * i)) >> 24; }

int dot4(uint codes, uint numbers, int sum) {
    return sum +
           (unsigned_byte(codes, 0) * signed_byte(numbers, 0) + unsigned_byte(codes, 1) * signed_byte(numbers, 1)) +
           (unsigned_byte(codes, 2) * signed_byte(numbers, 2) + unsigned_byte(codes, 3) * signed_byte(numbers, 3));
}

int dot4_signed(uint codes, uint numbers, int sum) {
    return sum + (signed_byte(codes, 0) * signed_byte(numbers, 0) + signed_byte(codes, 1) * signed_byte(numbers, 1)) +
           (signed_byte(codes, 2) * signed_byte(numbers, 2) + signed_byte(codes, 3) * signed_byte(numbers, 3));
}
#define DOT4 dot4
#define DOT4_SIGNED dot4_signed
#endif
