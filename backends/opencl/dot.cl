// DOT4(codes, numbers, sum): sum + the four products of unsigned bytes of one word and signed bytes of the other.
// DOT4_SIGNED: both are signed.

#if INTEGER_DOT
#pragma OPENCL EXTENSION cl_khr_integer_dot_product : enable
#define DOT4(codes, numbers, sum) ((sum) + dot_4x8packed_us_int(codes, numbers))
#define DOT4_SIGNED(codes, numbers, sum) ((sum) + dot_4x8packed_ss_int(codes, numbers))
#else
int products_of_bytes(int4 a, int4 b) {
    int4 products = a * b;
    return (products.x + products.y) + (products.z + products.w);
}
#define DOT4(codes, numbers, sum) \
    ((sum) + products_of_bytes(convert_int4(as_uchar4(codes)), convert_int4(as_char4(numbers))))
#define DOT4_SIGNED(codes, numbers, sum) \
    ((sum) + products_of_bytes(convert_int4(as_char4(codes)), convert_int4(as_char4(numbers))))
#endif
