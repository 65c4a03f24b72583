// Part of the simd_*.h whose dot product of bytes, vpmaddubsw, sums in 16 bits.
#pragma once

namespace {

// Two products of a code and an activation, 2 * 127 * the largest code, as often as 16 bits hold them.
template <int BITS>
constexpr int kDots = BITS == 8 ? 1 : 128 >> BITS;

// Of 16 activations, those in each of a lane's two sums, the first in the low half. Four dots of codes that stand 32 above
// the true ones may wrap around, but with this taken off they end within 16 bits: 8 * 32 * 127.
EI_INLINE int32_t centre_16(const int8_t* a, int32_t sum) {
    int second = 0;
    for (int i = 0; i < 16; i += 4) second += a[i + 2] + a[i + 3];
    const int first = sum - second;
    return static_cast<int32_t>(static_cast<uint32_t>(-32 * second) << 16 |
                                (static_cast<uint32_t>(-32 * first) & 0xffff));
}

// The same of 32 activations and codes that stand kMxfp4Offset above: 16 * 12 * 127.
EI_INLINE int32_t centre_32(const int8_t* a, int32_t) {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i products = _mm256_maddubs_epi16(_mm256_set1_epi8(kMxfp4Offset), all);
    const __m128i four = _mm_add_epi16(_mm256_castsi256_si128(products), _mm256_extracti128_si256(products, 1));
    const __m128i two = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0x0e));
    const __m128i one = _mm_add_epi16(two, _mm_shuffle_epi32(two, 0x01));
    return _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), one));
}

}  // namespace
