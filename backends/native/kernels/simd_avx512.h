// Sixteen lanes on AVX-512 (F, BW, VL, DQ). The same names as simd_scalar.h, which says what each one does.
// A dot product of bytes is vpmaddubsw and vpmaddwd; with VNNI it is one vpdpbusd. With VBMI too, a table may have 128
// bytes. With EI_ZEN4 for CPUs that do one such product a cycle and not two.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(EI_ZEN4)
#define EI_ISA_NAME "avx512zen4"
#elif defined(__AVX512VBMI__)
#define EI_ISA_NAME "avx512vbmi"
#elif defined(__AVX512VNNI__)
#define EI_ISA_NAME "avx512vnni"
#else
#define EI_ISA_NAME "avx512"
#endif
#define EI_INLINE inline __attribute__((always_inline))

namespace {

// Of a matrix product: the sums of so many columns of so many row groups stay in registers. Where two dot products are
// done in a cycle, an activation can be loaded but once for two of them. In 16 bits they leave fewer registers.
#if defined(EI_FEW_AT_ONCE)
constexpr int kColumnsAtOnce = 2;
#elif defined(__AVX512VNNI__)
constexpr int kColumnsAtOnce = 8;
#else
constexpr int kColumnsAtOnce = 4;
#endif
#if defined(__AVX512VNNI__) && !defined(EI_ZEN4) && (defined(__AVX512VBMI__) || !defined(EI_FEW_AT_ONCE))
constexpr int kGroupsAtOnce = 2;
#else
constexpr int kGroupsAtOnce = 1;
#endif
#if defined(EI_FEW_AT_ONCE)
constexpr int kRowsAtOnce = 2, kValuesAtOnce = 2;
#else
constexpr int kRowsAtOnce = 6;    // of attention, likewise
constexpr int kValuesAtOnce = 4;  // pieces of 16 numbers of a value, likewise
#endif

using F32 = __m512;
using I32 = __m512i;
using I16 = __m512i;
using U8 = __m512i;

EI_INLINE F32 load_f32(const float* p) { return _mm512_loadu_ps(p); }
EI_INLINE void store_f32(float* p, F32 v) { _mm512_storeu_ps(p, v); }
EI_INLINE F32 set_f32(float v) { return _mm512_set1_ps(v); }
EI_INLINE F32 add_f32(F32 a, F32 b) { return _mm512_add_ps(a, b); }
EI_INLINE F32 sub_f32(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
EI_INLINE F32 mul_f32(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
EI_INLINE F32 div_f32(F32 a, F32 b) { return _mm512_div_ps(a, b); }
EI_INLINE F32 fma_f32(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
EI_INLINE F32 fnma_f32(F32 a, F32 b, F32 c) { return _mm512_fnmadd_ps(a, b, c); }
EI_INLINE F32 max_f32(F32 a, F32 b) { return _mm512_max_ps(a, b); }
EI_INLINE F32 min_f32(F32 a, F32 b) { return _mm512_min_ps(a, b); }
EI_INLINE F32 load_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
EI_INLINE void store_f16(void* p, F32 v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
EI_INLINE F32 load_bf16(const void* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))), 16));
}

EI_INLINE I32 set_i32(int32_t v) { return _mm512_set1_epi32(v); }
EI_INLINE I32 add_i32(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
EI_INLINE I32 sub_i32(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
EI_INLINE I32 mul_i32(I32 a, I32 b) { return _mm512_mullo_epi32(a, b); }
EI_INLINE I32 max_i32(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
EI_INLINE I32 and_i32(I32 a, I32 b) { return _mm512_and_si512(a, b); }
EI_INLINE I32 shl_i32(I32 a, int n) { return _mm512_slli_epi32(a, n); }
EI_INLINE F32 to_f32(I32 v) { return _mm512_cvtepi32_ps(v); }
EI_INLINE I32 bits_of(F32 v) { return _mm512_castps_si512(v); }
EI_INLINE F32 as_f32(I32 v) { return _mm512_castsi512_ps(v); }
EI_INLINE void store_i8(int8_t* p, I32 v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
EI_INLINE int32_t max_of(I32 v) { return _mm512_reduce_max_epi32(v); }
EI_INLINE int32_t sum_of(I32 v) {
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x0e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0x01)));
}

EI_INLINE I32 load_u8_as_i32(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
EI_INLINE I32 load_i8_as_i32(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
EI_INLINE I16 load_u8_as_i16(const uint8_t* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
EI_INLINE I16 load_i8_as_i16(const uint8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
EI_INLINE I32 even_i16(I16 v) { return _mm512_srai_epi32(_mm512_slli_epi32(v, 16), 16); }
EI_INLINE I32 odd_i16(I16 v) { return _mm512_srai_epi32(v, 16); }

EI_INLINE U8 load_u8(const uint8_t* p) { return _mm512_loadu_si512(p); }
EI_INLINE void store_u8(uint8_t* p, U8 v) { _mm512_storeu_si512(p, v); }
EI_INLINE U8 and_u8(U8 v, uint8_t mask) { return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(mask))); }
EI_INLINE U8 or_u8(U8 a, U8 b) { return _mm512_or_si512(a, b); }
template <int N>
EI_INLINE U8 shr_u16(U8 v) {
    return _mm512_srli_epi16(v, N);
}
template <int N>
EI_INLINE U8 shl_u16(U8 v) {
    return _mm512_slli_epi16(v, N);
}

EI_INLINE U8 look_up(U8 index, const uint8_t* table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}

#ifdef __AVX512VBMI__
// What a magnitude 0..121 stands for: the codes of four weights in two bits each, and of the fifth.
struct BaseThreeTables {
    alignas(64) uint8_t four[128] = {}, fifth[128] = {};

    constexpr BaseThreeTables() {
        for (int magnitude = 0; magnitude < 122; magnitude++) {
            int value = 121 + magnitude;
            for (int j = 0; j < 4; j++, value /= 3) four[magnitude] |= static_cast<uint8_t>(value % 3 << 2 * j);
            fifth[magnitude] = static_cast<uint8_t>(value);
        }
    }
};
constexpr BaseThreeTables kBaseThree;

template <class F>
EI_INLINE void unpack_base_three(U8 stored, const F& f) {
    const auto in = [stored](const uint8_t* table) {  // bit 7 of an index is left alone
        return _mm512_permutex2var_epi8(_mm512_load_si512(table), stored, _mm512_load_si512(table + 64));
    };
    // The codes of -v are 2 without those of v, which borrows nothing.
    const __mmask64 negative = _mm512_movepi8_mask(stored);
    const auto turned = [negative](__m512i codes, uint8_t twos) {
        return _mm512_mask_sub_epi8(codes, negative, _mm512_set1_epi8(static_cast<char>(twos)), codes);
    };
    const U8 four = turned(in(kBaseThree.four), 0xaa);
    f.template operator()<0>(and_u8(four, 3));
    f.template operator()<1>(and_u8(shr_u16<2>(four), 3));
    f.template operator()<2>(and_u8(shr_u16<4>(four), 3));
    f.template operator()<3>(and_u8(shr_u16<6>(four), 3));
    f.template operator()<4>(turned(in(kBaseThree.fifth), 0x02));
}
#else
// Of numbers below 81, how often 9 goes into each: 57 / 512 of them, even and odd bytes apart.
EI_INLINE __m512i ninths(__m512i v) {
    const __m512i share = _mm512_set1_epi16(57 << 7), upper = _mm512_set1_epi16(static_cast<short>(0xff00));
    const __m512i even = _mm512_mulhi_epu16(_mm512_andnot_si512(upper, v), share);
    return _mm512_or_si512(even, _mm512_and_si512(upper, _mm512_mulhi_epu16(v, share)));
}
// As with AVX2: the highest digit by comparing, the two pairs of others by a division and tables.
template <class F>
EI_INLINE void unpack_base_three(U8 stored, const F& f) {
    const auto table = [](__m128i bytes) { return _mm512_broadcast_i32x4(bytes); };
    const __m512i first = table(_mm_setr_epi8(0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0));
    const __m512i second = table(_mm_setr_epi8(0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0));
    const __m512i nines = table(_mm_setr_epi8(0, 9, 18, 27, 36, 45, 54, 63, 72, 0, 0, 0, 0, 0, 0, 0));
    // 121, as all codes are one above the weights, without 81 times the highest code.
    const __m512i without = table(_mm_setr_epi8(121, 40, -41, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m512i magnitude = _mm512_and_si512(stored, _mm512_set1_epi8(0x7f)), one = _mm512_set1_epi8(1);
    const __m512i value =
        _mm512_mask_sub_epi8(magnitude, _mm512_movepi8_mask(stored), _mm512_setzero_si512(), magnitude);
    const __m512i above = _mm512_maskz_mov_epi8(_mm512_cmpgt_epi8_mask(value, _mm512_set1_epi8(-41)), one);
    const __m512i highest =
        _mm512_mask_add_epi8(above, _mm512_cmpgt_epi8_mask(value, _mm512_set1_epi8(40)), above, one);
    f.template operator()<4>(highest);
    const __m512i rest = _mm512_add_epi8(value, _mm512_shuffle_epi8(without, highest)), upper = ninths(rest);
    f.template operator()<3>(_mm512_shuffle_epi8(second, upper));
    f.template operator()<2>(_mm512_shuffle_epi8(first, upper));
    const __m512i lower = _mm512_sub_epi8(rest, _mm512_shuffle_epi8(nines, upper));
    f.template operator()<1>(_mm512_shuffle_epi8(second, lower));
    f.template operator()<0>(_mm512_shuffle_epi8(first, lower));
}
#endif

EI_INLINE __m512i broadcast_4_bytes(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
EI_INLINE I32 dot2(I32 sum, I16 pairs, const int16_t* a) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, pairs, broadcast_4_bytes(a));
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, broadcast_4_bytes(a)));
#endif
}

}  // namespace

#ifdef __AVX512VNNI__
namespace {

EI_INLINE I32 dot4(I32 sum, U8 codes, const int8_t* a) { return _mm512_dpbusd_epi32(sum, codes, broadcast_4_bytes(a)); }

}  // namespace

#include "kernels/simd_dot32.h"

namespace {

constexpr int kOffset8 = 128;
EI_INLINE U8 codes8(U8 stored) { return stored; }
EI_INLINE Dot dot8(Dot d, U8 codes, const int8_t* a) { return dot4(d, codes, a); }

// vpmulld shares its units with vpdpbusd: a product with two scales counts once in their place, and on Zen 4 one with four.
#if defined(EI_ZEN4)
constexpr Int16Scaling kInt16Scaling = Int16Scaling::Pairs;
#else
constexpr Int16Scaling kInt16Scaling = Int16Scaling::Singles;
#endif
EI_INLINE bool all_fit_int16(const int8_t* a) {
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < 256; i += 64) {
        const __m512i eights = _mm512_sad_epu8(_mm512_abs_epi8(_mm512_loadu_si512(a + i)), _mm512_setzero_si512());
        most = _mm512_max_epu32(most, _mm512_add_epi32(eights, _mm512_shuffle_epi32(eights, _MM_PERM_BADC)));
    }
    return _mm512_cmpgt_epu32_mask(most, _mm512_set1_epi32(kMostOf16)) == 0;
}
EI_INLINE I32 add_int16_times(I32 sum, Dot d, Scale scale) { return _mm512_dpwssd_epi32(sum, d, scale); }
EI_INLINE Scale even_low(I16 v) { return _mm512_and_si512(v, _mm512_set1_epi32(0xffff)); }
EI_INLINE Scale odd_low(I16 v) { return _mm512_srli_epi32(v, 16); }
EI_INLINE I16 pair_i16(I32 low, I32 high) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16));
}
EI_INLINE I16 load_scale_pair(const uint8_t* p) { return pair_i16(load_u8_as_i32(p), load_u8_as_i32(p + 16)); }
EI_INLINE I32 add_pair_times(I32 sum, Dot even, Dot odd, I16 scales) {
    return _mm512_dpwssd_epi32(sum, pair_i16(even, odd), scales);
}

}  // namespace
#else
#include "kernels/simd_dot16.h"

namespace {

using Dot = __m512i;  // 32 lanes of 16 bits
using Scale = __m512i;

EI_INLINE Dot dot_zero() { return _mm512_setzero_si512(); }
EI_INLINE Dot dot_from(const int32_t* centre) { return _mm512_set1_epi32(*centre); }
EI_INLINE Dot dot(Dot d, U8 codes, const int8_t* a) {
    return _mm512_add_epi16(d, _mm512_maddubs_epi16(codes, broadcast_4_bytes(a)));
}
EI_INLINE I32 add_dot(I32 sum, Dot d) { return _mm512_add_epi32(sum, _mm512_madd_epi16(d, _mm512_set1_epi16(1))); }
EI_INLINE I32 add_dot_times(I32 sum, Dot d, Scale scale) { return _mm512_add_epi32(sum, _mm512_madd_epi16(d, scale)); }
EI_INLINE Scale load_scale(const uint8_t* p) {
    const __m512i v = load_u8_as_i32(p);
    return _mm512_or_si512(v, _mm512_slli_epi32(v, 16));
}
EI_INLINE Scale even_scale(I16 v) { return _mm512_shufflelo_epi16(_mm512_shufflehi_epi16(v, 0xa0), 0xa0); }
EI_INLINE Scale odd_scale(I16 v) { return _mm512_shufflelo_epi16(_mm512_shufflehi_epi16(v, 0xf5), 0xf5); }

// |w| times a with the sign of w: both fit where w is signed.
constexpr int kOffset8 = 0;
EI_INLINE U8 codes8(U8 stored) { return _mm512_xor_si512(stored, _mm512_set1_epi8(static_cast<char>(0x80))); }
EI_INLINE Dot dot8(Dot d, U8 codes, const int8_t* a) {
    const __m512i all = broadcast_4_bytes(a);
    const __m512i turned = _mm512_mask_sub_epi8(all, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), all);
    return _mm512_add_epi16(d, _mm512_maddubs_epi16(_mm512_abs_epi8(codes), turned));
}

}  // namespace

#include "kernels/simd_no_int16_scaling.h"
#endif
