// Sixteen lanes on AVX2 and FMA, as two halves. The same names as simd_scalar.h, which says what each one does.
// A dot product of bytes is vpmaddubsw and vpmaddwd; with AVX-VNNI it is one vpdpbusd.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifdef __AVXVNNI__
#define EI_ISA_NAME "avxvnni"
#else
#define EI_ISA_NAME "avx2"
#endif
#define EI_INLINE inline __attribute__((always_inline))

namespace {

constexpr int kRowsAtOnce = 2;    // of attention: their sums stay in registers
constexpr int kValuesAtOnce = 2;  // pieces of 16 numbers of a value, likewise

struct F32 {
    __m256 a, b;
};
struct Ints {
    __m256i a, b;
};
using I32 = Ints;
using I16 = Ints;
using U8 = Ints;

EI_INLINE __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
EI_INLINE __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

EI_INLINE F32 load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
EI_INLINE void store_f32(float* p, F32 v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
EI_INLINE F32 set_f32(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
EI_INLINE F32 add_f32(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
EI_INLINE F32 sub_f32(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
EI_INLINE F32 mul_f32(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
EI_INLINE F32 div_f32(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
EI_INLINE F32 fma_f32(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
EI_INLINE F32 fnma_f32(F32 x, F32 y, F32 z) {
    return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
EI_INLINE F32 max_f32(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
EI_INLINE F32 min_f32(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
EI_INLINE F32 load_f16(const void* p) {
    const uint16_t* h = static_cast<const uint16_t*>(p);
    return {_mm256_cvtph_ps(load_128(h)), _mm256_cvtph_ps(load_128(h + 8))};
}
EI_INLINE void store_f16(void* p, F32 v) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    __m128i* h = static_cast<__m128i*>(p);
    _mm_storeu_si128(h, _mm256_cvtps_ph(v.a, kNearest));
    _mm_storeu_si128(h + 1, _mm256_cvtps_ph(v.b, kNearest));
}
EI_INLINE F32 load_bf16(const void* p) {
    const uint16_t* h = static_cast<const uint16_t*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(h)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(h + 8)), 16))};
}

EI_INLINE I32 set_i32(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
EI_INLINE I32 add_i32(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
EI_INLINE I32 sub_i32(I32 x, I32 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
EI_INLINE I32 mul_i32(I32 x, I32 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
EI_INLINE I32 max_i32(I32 x, I32 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
EI_INLINE I32 and_i32(I32 x, I32 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
EI_INLINE I32 shl_i32(I32 x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
EI_INLINE F32 to_f32(I32 v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
EI_INLINE I32 bits_of(F32 v) { return {_mm256_castps_si256(v.a), _mm256_castps_si256(v.b)}; }
EI_INLINE F32 as_f32(I32 v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
EI_INLINE void store_i8(int8_t* p, I32 v) {
    // The low byte of each 32-bit lane to the front of its 128 bits, then the four pieces side by side.
    const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                                          -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1);
    const __m256i low = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(v.a, pick), order);
    const __m256i high = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(v.b, pick), order);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_unpacklo_epi64(_mm256_castsi256_si128(low), _mm256_castsi256_si128(high)));
}
EI_INLINE int32_t max_of(I32 v) {
    alignas(32) int32_t lane[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane), _mm256_max_epi32(v.a, v.b));
    int32_t most = lane[0];
    for (int i = 1; i < 8; i++) most = lane[i] > most ? lane[i] : most;
    return most;
}

EI_INLINE I32 load_u8_as_i32(const uint8_t* p) {
    const __m128i bytes = load_128(p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
EI_INLINE I32 load_i8_as_i32(const uint8_t* p) {
    const __m128i bytes = load_128(p);
    return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
EI_INLINE I16 load_u8_as_i16(const uint8_t* p) {
    return {_mm256_cvtepu8_epi16(load_128(p)), _mm256_cvtepu8_epi16(load_128(p + 16))};
}
EI_INLINE I16 load_i8_as_i16(const uint8_t* p) {
    return {_mm256_cvtepi8_epi16(load_128(p)), _mm256_cvtepi8_epi16(load_128(p + 16))};
}
EI_INLINE I32 odd_i16(I16 v) { return {_mm256_srai_epi32(v.a, 16), _mm256_srai_epi32(v.b, 16)}; }
EI_INLINE I32 even_i16(I16 v) { return odd_i16({_mm256_slli_epi32(v.a, 16), _mm256_slli_epi32(v.b, 16)}); }

EI_INLINE U8 load_u8(const uint8_t* p) { return {load_256(p), load_256(p + 32)}; }
EI_INLINE U8 and_u8(U8 v, uint8_t mask) {
    const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
    return {_mm256_and_si256(v.a, m), _mm256_and_si256(v.b, m)};
}
EI_INLINE U8 or_u8(U8 x, U8 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int N>
EI_INLINE U8 shr_u16(U8 v) {
    return {_mm256_srli_epi16(v.a, N), _mm256_srli_epi16(v.b, N)};
}
template <int N>
EI_INLINE U8 shl_u16(U8 v) {
    return {_mm256_slli_epi16(v.a, N), _mm256_slli_epi16(v.b, N)};
}

#ifdef __AVXVNNI__
EI_INLINE I32 dot4(I32 sum, U8 codes, const int8_t* a) {
    int32_t four;
    std::memcpy(&four, a, 4);
    const __m256i all = _mm256_set1_epi32(four);
    return {_mm256_dpbusd_avx_epi32(sum.a, codes.a, all), _mm256_dpbusd_avx_epi32(sum.b, codes.b, all)};
}
EI_INLINE I32 dot4_wide(I32 sum, U8 codes, const int8_t* a) { return dot4(sum, codes, a); }
using Narrow = I32;
constexpr int kNarrowChains = 4;
constexpr int kNarrowColumns = 8;
EI_INLINE Narrow zero_narrow() { return set_i32(0); }
EI_INLINE Narrow dot4_narrow(Narrow sum, U8 codes, const int8_t* a) { return dot4(sum, codes, a); }
EI_INLINE I32 widen(I32 sum, Narrow narrow) { return add_i32(sum, narrow); }
#else
EI_INLINE __m256i dot4_half(__m256i codes, __m256i four) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, four), _mm256_set1_epi16(1));
}
// Codes up to 127: two products of a code and an activation fit into 16 bits.
EI_INLINE I32 dot4(I32 sum, U8 codes, const int8_t* a) {
    int32_t four;
    std::memcpy(&four, a, 4);
    const __m256i all = _mm256_set1_epi32(four);
    return {_mm256_add_epi32(sum.a, dot4_half(codes.a, all)), _mm256_add_epi32(sum.b, dot4_half(codes.b, all))};
}
// Codes up to 255, in two parts that fit.
EI_INLINE I32 dot4_wide(I32 sum, U8 codes, const int8_t* a) {
    return dot4(dot4(sum, and_u8(codes, 0x7f), a), and_u8(codes, 0x80), a);
}
// 16-bit sums: 64 times 2 * 2 * 127 is 32512.
using Narrow = Ints;
constexpr int kNarrowChains = 1;
constexpr int kNarrowColumns = 6;
EI_INLINE Narrow zero_narrow() { return set_i32(0); }
EI_INLINE Narrow dot4_narrow(Narrow sum, U8 codes, const int8_t* a) {
    int32_t four;
    std::memcpy(&four, a, 4);
    const __m256i all = _mm256_set1_epi32(four);
    sum.a = _mm256_add_epi16(sum.a, _mm256_maddubs_epi16(codes.a, all));
    sum.b = _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(codes.b, all));
    asm("" : "+x"(sum.a), "+x"(sum.b));  // or GCC adds up the products first, for which there are no registers
    return sum;
}
EI_INLINE I32 widen(I32 sum, Narrow narrow) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(narrow.a, one)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(narrow.b, one))};
}
#endif
EI_INLINE I32 dot2(I32 sum, I16 pairs, const int16_t* a) {
    int32_t two;
    std::memcpy(&two, a, 4);
    const __m256i all = _mm256_set1_epi32(two);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, all)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, all))};
}

}  // namespace
