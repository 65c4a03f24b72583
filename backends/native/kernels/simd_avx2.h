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

#if defined(EI_FEW_AT_ONCE)
constexpr int kColumnsAtOnce = 2;
#else
constexpr int kColumnsAtOnce = 4;  // of a matrix product: their sums stay in registers
#endif
constexpr int kGroupsAtOnce = 1;  // row groups that share the loading of an activation
constexpr int kRowsAtOnce = 2;    // of attention, likewise
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
EI_INLINE int32_t sum_of(I32 v) {
    const __m256i eight = _mm256_add_epi32(v.a, v.b);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x0e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0x01)));
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
EI_INLINE void store_u8(uint8_t* p, U8 v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), v.b);
}
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

EI_INLINE __m256i table_256(__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); }
EI_INLINE U8 look_up(U8 index, const uint8_t* table) {
    const __m256i twice = table_256(load_128(table));
    return {_mm256_shuffle_epi8(twice, index.a), _mm256_shuffle_epi8(twice, index.b)};
}
// Of numbers below 81, how often 9 goes into each: 57 / 512 of them, even and odd bytes apart.
EI_INLINE __m256i ninths(__m256i v) {
    const __m256i share = _mm256_set1_epi16(57 << 7), upper = _mm256_set1_epi16(static_cast<short>(0xff00));
    const __m256i even = _mm256_mulhi_epu16(_mm256_andnot_si256(upper, v), share);
    return _mm256_or_si256(even, _mm256_and_si256(upper, _mm256_mulhi_epu16(v, share)));
}
// The highest digit by comparing, the two pairs of others by a division and tables.
template <class F>
EI_INLINE void unpack_base_three(U8 stored, const F& f) {
    const auto both = [](const auto& op, const auto&... v) { return U8{op(v.a...), op(v.b...)}; };
    const __m256i first = table_256(_mm_setr_epi8(0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0));
    const __m256i second = table_256(_mm_setr_epi8(0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0));
    const __m256i nines = table_256(_mm_setr_epi8(0, 9, 18, 27, 36, 45, 54, 63, 72, 0, 0, 0, 0, 0, 0, 0));
    // 121, as all codes are one above the weights, without 81 times the highest code.
    const __m256i without = table_256(_mm_setr_epi8(121, 40, -41, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    const auto in = [&both](__m256i table, U8 index) {
        return both([table](__m256i i) { return _mm256_shuffle_epi8(table, i); }, index);
    };
    const U8 value =
        both([](__m256i v) { return _mm256_sign_epi8(_mm256_and_si256(v, _mm256_set1_epi8(0x7f)), v); }, stored);
    const U8 highest = both(
        [](__m256i v) {
            const __m256i below_two = _mm256_cmpgt_epi8(_mm256_set1_epi8(41), v);
            const __m256i below_one = _mm256_cmpgt_epi8(_mm256_set1_epi8(-40), v);
            return _mm256_add_epi8(_mm256_add_epi8(_mm256_set1_epi8(2), below_two), below_one);
        },
        value);
    f.template operator()<4>(highest);
    const U8 rest = both([](__m256i v, __m256i w) { return _mm256_add_epi8(v, w); }, value, in(without, highest));
    const U8 upper = both([](__m256i v) { return ninths(v); }, rest);
    f.template operator()<3>(in(second, upper));
    f.template operator()<2>(in(first, upper));
    const U8 lower = both([](__m256i v, __m256i w) { return _mm256_sub_epi8(v, w); }, rest, in(nines, upper));
    f.template operator()<1>(in(second, lower));
    f.template operator()<0>(in(first, lower));
}

EI_INLINE __m256i broadcast_4_bytes(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
EI_INLINE I32 dot2(I32 sum, I16 pairs, const int16_t* a) {
    const __m256i all = broadcast_4_bytes(a);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs.a, all)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs.b, all))};
}

}  // namespace

#ifdef __AVXVNNI__
namespace {

EI_INLINE I32 dot4(I32 sum, U8 codes, const int8_t* a) {
    const __m256i all = broadcast_4_bytes(a);
    return {_mm256_dpbusd_avx_epi32(sum.a, codes.a, all), _mm256_dpbusd_avx_epi32(sum.b, codes.b, all)};
}

}  // namespace

#include "kernels/simd_dot32.h"

namespace {

constexpr int kOffset8 = 128;
EI_INLINE U8 codes8(U8 stored) { return stored; }
EI_INLINE Dot dot8(Dot d, U8 codes, const int8_t* a) { return dot4(d, codes, a); }

}  // namespace
#else
#include "kernels/simd_dot16.h"

namespace {

using Dot = Ints;  // 32 lanes of 16 bits
using Scale = Ints;

// The sums, here and now: left to itself, GCC makes all products first, and has no registers to keep them in.
EI_INLINE Ints now(Ints sums) {
    __asm__ volatile("" : "+x"(sums.a), "+x"(sums.b));
    return sums;
}

EI_INLINE Dot dot_from(const int32_t* centre) {
    const __m256i all = _mm256_set1_epi32(*centre);
    return {all, all};
}
EI_INLINE Dot dot_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
EI_INLINE Dot add_products(Dot d, __m256i a, __m256i b) {
    return now({_mm256_add_epi16(d.a, a), _mm256_add_epi16(d.b, b)});
}
EI_INLINE Dot dot(Dot d, U8 codes, const int8_t* a) {
    const __m256i all = broadcast_4_bytes(a);
    return add_products(d, _mm256_maddubs_epi16(codes.a, all), _mm256_maddubs_epi16(codes.b, all));
}
EI_INLINE I32 add_dot_times(I32 sum, Dot d, Scale scale) {
    return now({_mm256_add_epi32(sum.a, _mm256_madd_epi16(d.a, scale.a)),
                _mm256_add_epi32(sum.b, _mm256_madd_epi16(d.b, scale.b))});
}
EI_INLINE I32 add_dot(I32 sum, Dot d) {
    const __m256i one = _mm256_set1_epi16(1);
    return add_dot_times(sum, d, {one, one});
}
EI_INLINE Scale load_scale(const uint8_t* p) {
    const I32 v = load_u8_as_i32(p), high = shl_i32(v, 16);
    return {_mm256_or_si256(v.a, high.a), _mm256_or_si256(v.b, high.b)};
}
EI_INLINE Scale even_scale(I16 v) {
    return {_mm256_shufflelo_epi16(_mm256_shufflehi_epi16(v.a, 0xa0), 0xa0),
            _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(v.b, 0xa0), 0xa0)};
}
EI_INLINE Scale odd_scale(I16 v) {
    return {_mm256_shufflelo_epi16(_mm256_shufflehi_epi16(v.a, 0xf5), 0xf5),
            _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(v.b, 0xf5), 0xf5)};
}

// |w| times a with the sign of w: both fit where w is signed.
constexpr int kOffset8 = 0;
EI_INLINE U8 codes8(U8 stored) {
    const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
    return {_mm256_xor_si256(stored.a, top), _mm256_xor_si256(stored.b, top)};
}
EI_INLINE Dot dot8(Dot d, U8 codes, const int8_t* a) {
    const __m256i all = broadcast_4_bytes(a);
    const auto products = [all](__m256i w) {
        return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(all, w));
    };
    return add_products(d, products(codes.a), products(codes.b));
}

}  // namespace
#endif
#include "kernels/simd_no_int16_scaling.h"
