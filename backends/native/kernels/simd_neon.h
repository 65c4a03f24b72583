// Sixteen lanes on NEON with the dot-product instructions, as four quarters. The same names as simd_scalar.h, which says
// what each one does. With i8mm, a dot product of unsigned codes and signed activations is one usdot.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#ifdef __ARM_FEATURE_MATMUL_INT8
#define EI_ISA_NAME "neon_i8mm"
#else
#define EI_ISA_NAME "neon"
#endif
#define EI_INLINE inline __attribute__((always_inline))

namespace {

constexpr int kColumnsAtOnce = 4;  // of a matrix product: their sums stay in registers
constexpr int kGroupsAtOnce = 1;   // row groups that share the loading of an activation
constexpr int kRowsAtOnce = 2;     // of attention, likewise
constexpr int kValuesAtOnce = 2;   // pieces of 16 numbers of a value, likewise

struct F32 {
    float32x4_t q[4];
};
struct I32 {
    int32x4_t q[4];
};
struct I16 {
    int16x8_t q[4];
};
struct U8 {
    uint8x16_t q[4];
};

// Applies an operation to each quarter of the arguments.
template <class R, class Op, class... A>
EI_INLINE R map(Op op, const A&... a) {
    return {{op(a.q[0]...), op(a.q[1]...), op(a.q[2]...), op(a.q[3]...)}};
}

EI_INLINE F32 load_f32(const float* p) {
    return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
EI_INLINE void store_f32(float* p, F32 v) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v.q[i]);
}
EI_INLINE F32 set_f32(float v) { return {{vdupq_n_f32(v), vdupq_n_f32(v), vdupq_n_f32(v), vdupq_n_f32(v)}}; }
EI_INLINE F32 add_f32(F32 a, F32 b) {
    return map<F32>([](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); }, a, b);
}
EI_INLINE F32 sub_f32(F32 a, F32 b) {
    return map<F32>([](float32x4_t x, float32x4_t y) { return vsubq_f32(x, y); }, a, b);
}
EI_INLINE F32 mul_f32(F32 a, F32 b) {
    return map<F32>([](float32x4_t x, float32x4_t y) { return vmulq_f32(x, y); }, a, b);
}
EI_INLINE F32 div_f32(F32 a, F32 b) {
    return map<F32>([](float32x4_t x, float32x4_t y) { return vdivq_f32(x, y); }, a, b);
}
EI_INLINE F32 fma_f32(F32 a, F32 b, F32 c) {
    return map<F32>([](float32x4_t x, float32x4_t y, float32x4_t z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
EI_INLINE F32 fnma_f32(F32 a, F32 b, F32 c) {
    return map<F32>([](float32x4_t x, float32x4_t y, float32x4_t z) { return vfmsq_f32(z, x, y); }, a, b, c);
}
// Not vmaxq, which would give NaN where either is one: see simd_scalar.h.
EI_INLINE F32 max_f32(F32 a, F32 b) {
    return map<F32>([](float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }, a, b);
}
EI_INLINE F32 min_f32(F32 a, F32 b) {
    return map<F32>([](float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }, a, b);
}
EI_INLINE F32 load_f16(const void* p) {
    const uint16_t* h = static_cast<const uint16_t*>(p);
    F32 r;
    for (int i = 0; i < 4; i++) r.q[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + 4 * i)));
    return r;
}
EI_INLINE void store_f16(void* p, F32 v) {
    uint16_t* h = static_cast<uint16_t*>(p);
    for (int i = 0; i < 4; i++) vst1_u16(h + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(v.q[i])));
}
EI_INLINE F32 load_bf16(const void* p) {
    const uint16_t* h = static_cast<const uint16_t*>(p);
    F32 r;
    for (int i = 0; i < 4; i++) r.q[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(h + 4 * i), 16));
    return r;
}

EI_INLINE I32 set_i32(int32_t v) { return {{vdupq_n_s32(v), vdupq_n_s32(v), vdupq_n_s32(v), vdupq_n_s32(v)}}; }
EI_INLINE I32 add_i32(I32 a, I32 b) {
    return map<I32>([](int32x4_t x, int32x4_t y) { return vaddq_s32(x, y); }, a, b);
}
EI_INLINE I32 sub_i32(I32 a, I32 b) {
    return map<I32>([](int32x4_t x, int32x4_t y) { return vsubq_s32(x, y); }, a, b);
}
EI_INLINE I32 mul_i32(I32 a, I32 b) {
    return map<I32>([](int32x4_t x, int32x4_t y) { return vmulq_s32(x, y); }, a, b);
}
EI_INLINE I32 max_i32(I32 a, I32 b) {
    return map<I32>([](int32x4_t x, int32x4_t y) { return vmaxq_s32(x, y); }, a, b);
}
EI_INLINE I32 and_i32(I32 a, I32 b) {
    return map<I32>([](int32x4_t x, int32x4_t y) { return vandq_s32(x, y); }, a, b);
}
EI_INLINE I32 shl_i32(I32 a, int n) {
    return map<I32>([n](int32x4_t x) { return vshlq_s32(x, vdupq_n_s32(n)); }, a);
}
EI_INLINE F32 to_f32(I32 v) {
    return map<F32>([](int32x4_t x) { return vcvtq_f32_s32(x); }, v);
}
EI_INLINE I32 bits_of(F32 v) {
    return map<I32>([](float32x4_t x) { return vreinterpretq_s32_f32(x); }, v);
}
EI_INLINE F32 as_f32(I32 v) {
    return map<F32>([](int32x4_t x) { return vreinterpretq_f32_s32(x); }, v);
}
EI_INLINE void store_i8(int8_t* p, I32 v) {
    const int16x8_t low = vcombine_s16(vmovn_s32(v.q[0]), vmovn_s32(v.q[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(v.q[2]), vmovn_s32(v.q[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
EI_INLINE int32_t sum_of(I32 v) { return vaddvq_s32(vaddq_s32(vaddq_s32(v.q[0], v.q[1]), vaddq_s32(v.q[2], v.q[3]))); }
EI_INLINE int32_t max_of(I32 v) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(v.q[0], v.q[1]), vmaxq_s32(v.q[2], v.q[3]))); }

EI_INLINE I32 load_u8_as_i32(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
             vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
EI_INLINE I32 load_i8_as_i32(const uint8_t* p) {
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
             vmovl_s16(vget_high_s16(high))}};
}
EI_INLINE I16 load_u8_as_i16(const uint8_t* p) {
    I16 r;
    for (int i = 0; i < 4; i++) r.q[i] = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 8 * i)));
    return r;
}
EI_INLINE I16 load_i8_as_i16(const uint8_t* p) {
    I16 r;
    for (int i = 0; i < 4; i++) r.q[i] = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p + 8 * i)));
    return r;
}
EI_INLINE I32 even_i16(I16 v) {
    return map<I32>([](int16x8_t x) { return vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s16(x), 16), 16); }, v);
}
EI_INLINE I32 odd_i16(I16 v) {
    return map<I32>([](int16x8_t x) { return vshrq_n_s32(vreinterpretq_s32_s16(x), 16); }, v);
}

EI_INLINE U8 load_u8(const uint8_t* p) { return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}}; }
EI_INLINE void store_u8(uint8_t* p, U8 v) {
    for (int i = 0; i < 4; i++) vst1q_u8(p + 16 * i, v.q[i]);
}
EI_INLINE U8 and_u8(U8 v, uint8_t mask) {
    return map<U8>([mask](uint8x16_t x) { return vandq_u8(x, vdupq_n_u8(mask)); }, v);
}
EI_INLINE U8 or_u8(U8 a, U8 b) {
    return map<U8>([](uint8x16_t x, uint8x16_t y) { return vorrq_u8(x, y); }, a, b);
}
template <int N>
EI_INLINE U8 shr_u16(U8 v) {
    if constexpr (N == 0) {
        return v;
    } else {
        return map<U8>([](uint8x16_t x) { return vshrq_n_u8(x, N); }, v);
    }
}
template <int N>
EI_INLINE U8 shl_u16(U8 v) {
    return map<U8>([](uint8x16_t x) { return vshlq_n_u8(x, N); }, v);
}

EI_INLINE U8 look_up(U8 index, const uint8_t* table) {
    const uint8x16_t all = vld1q_u8(table);
    return map<U8>([all](uint8x16_t i) { return vqtbl1q_u8(all, i); }, index);
}

// The highest digit by comparing, the two pairs of others by a division and tables.
template <class F>
EI_INLINE void unpack_base_three(U8 stored, const F& f) {
    constexpr uint8_t kFirst[16] = {0, 1, 2, 0, 1, 2, 0, 1, 2}, kSecond[16] = {0, 0, 0, 1, 1, 1, 2, 2, 2};
    const uint8x16_t first = vld1q_u8(kFirst), second = vld1q_u8(kSecond);
    const auto in = [](uint8x16_t table, U8 index) {
        return map<U8>([table](uint8x16_t i) { return vqtbl1q_u8(table, i); }, index);
    };
    const U8 value = map<U8>(  // of the codes, which are one above the weights: 0..242
        [](uint8x16_t v) {
            const uint8x16_t magnitude = vandq_u8(v, vdupq_n_u8(0x7f)), none = vdupq_n_u8(121);
            return vbslq_u8(vcgtq_u8(v, vdupq_n_u8(0x7f)), vsubq_u8(none, magnitude), vaddq_u8(none, magnitude));
        },
        stored);
    const U8 highest = map<U8>(
        [](uint8x16_t v) {
            const uint8x16_t two = vcgtq_u8(v, vdupq_n_u8(161)), one = vcgtq_u8(v, vdupq_n_u8(80));
            return vsubq_u8(vdupq_n_u8(0), vaddq_u8(two, one));
        },
        value);
    f.template operator()<4>(highest);
    const U8 rest = map<U8>([](uint8x16_t v, uint8x16_t h) { return vmlsq_u8(v, h, vdupq_n_u8(81)); }, value, highest);
    const U8 upper = map<U8>(  // ninths: 57 / 512 of what is below 81
        [](uint8x16_t v) {
            const uint16x8_t low = vmull_u8(vget_low_u8(v), vdup_n_u8(57)), high = vmull_high_u8(v, vdupq_n_u8(57));
            return vshrq_n_u8(vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), 1);
        },
        rest);
    f.template operator()<3>(in(second, upper));
    f.template operator()<2>(in(first, upper));
    const U8 lower = map<U8>([](uint8x16_t v, uint8x16_t u) { return vmlsq_u8(v, u, vdupq_n_u8(9)); }, rest, upper);
    f.template operator()<1>(in(second, lower));
    f.template operator()<0>(in(first, lower));
}

EI_INLINE int8x16_t broadcast_4_bytes(const int8_t* a) {
    int32_t four;
    std::memcpy(&four, a, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
// Codes up to 127 are the same as signed ones.
EI_INLINE I32 dot4(I32 sum, U8 codes, const int8_t* a) {
    const int8x16_t all = broadcast_4_bytes(a);
    return map<I32>([all](int32x4_t s, uint8x16_t c) { return vdotq_s32(s, vreinterpretq_s8_u8(c), all); }, sum, codes);
}
EI_INLINE I32 dot2(I32 sum, I16 pairs, const int16_t* a) {
    int32_t two;
    std::memcpy(&two, a, 4);
    const int16x8_t all = vreinterpretq_s16_s32(vdupq_n_s32(two));
    return map<I32>(
        [all](int32x4_t s, int16x8_t p) {
            const int32x4_t low = vmull_s16(vget_low_s16(p), vget_low_s16(all));
            const int32x4_t high = vmull_high_s16(p, all);
            return vaddq_s32(s, vpaddq_s32(low, high));
        },
        sum, pairs);
}

}  // namespace

#include "kernels/simd_dot32.h"

namespace {

constexpr int kOffset8 = 0;
EI_INLINE U8 codes8(U8 stored) {
    return map<U8>([](uint8x16_t c) { return veorq_u8(c, vdupq_n_u8(0x80)); }, stored);
}
EI_INLINE Dot dot8(Dot d, U8 codes, const int8_t* a) { return dot4(d, codes, a); }

}  // namespace

#include "kernels/simd_no_int16_scaling.h"
