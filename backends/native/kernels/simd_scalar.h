// Sixteen lanes in plain C++: what every other simd_*.h must equal, bit for bit.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/float16.h"

#define EI_ISA_NAME "scalar"
#define EI_INLINE inline

namespace {

// Columns of a matrix product, rows of attention, pieces of 16 numbers of a value, and row groups of a product: several, as
// on AVX-512, so that every machine tests them, but no more than compile in half a minute.
constexpr int kColumnsAtOnce = 2, kRowsAtOnce = 2, kValuesAtOnce = 2;
#ifdef EI_FEW_AT_ONCE
constexpr int kGroupsAtOnce = 1;
#else
constexpr int kGroupsAtOnce = 2;
#endif

struct F32 {
    float v[16];
};
struct I32 {
    int32_t v[16];
};
struct I16 {  // 16 lanes of two
    int16_t v[32];
};
struct U8 {  // 16 lanes of four
    uint8_t v[64];
};

// Applies an operation to each lane of the arguments.
template <class R, class Op, class... A>
EI_INLINE R map(Op op, const A&... a) {
    R r;
    for (int i = 0; i < static_cast<int>(sizeof(r.v) / sizeof(r.v[0])); i++) r.v[i] = op(a.v[i]...);
    return r;
}

EI_INLINE F32 load_f32(const float* p) {
    F32 r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
EI_INLINE void store_f32(float* p, F32 v) { std::memcpy(p, v.v, sizeof v.v); }
EI_INLINE F32 set_f32(float v) {
    F32 r;
    for (float& lane : r.v) lane = v;
    return r;
}
EI_INLINE F32 add_f32(F32 a, F32 b) {
    return map<F32>([](float x, float y) { return x + y; }, a, b);
}
EI_INLINE F32 sub_f32(F32 a, F32 b) {
    return map<F32>([](float x, float y) { return x - y; }, a, b);
}
EI_INLINE F32 mul_f32(F32 a, F32 b) {
    return map<F32>([](float x, float y) { return x * y; }, a, b);
}
EI_INLINE F32 div_f32(F32 a, F32 b) {
    return map<F32>([](float x, float y) { return x / y; }, a, b);
}
// a * b + c, rounded once.
EI_INLINE F32 fma_f32(F32 a, F32 b, F32 c) {
    return map<F32>([](float x, float y, float z) { return __builtin_fmaf(x, y, z); }, a, b, c);
}
// c - a * b, rounded once.
EI_INLINE F32 fnma_f32(F32 a, F32 b, F32 c) {
    return map<F32>([](float x, float y, float z) { return __builtin_fmaf(-x, y, z); }, a, b, c);
}
// The second where either is not a number, so that a constant first argument lets NaN through.
EI_INLINE F32 max_f32(F32 a, F32 b) {
    return map<F32>([](float x, float y) { return x > y ? x : y; }, a, b);
}
EI_INLINE F32 min_f32(F32 a, F32 b) {
    return map<F32>([](float x, float y) { return x < y ? x : y; }, a, b);
}
EI_INLINE F32 load_f16(const void* p) {
    uint16_t h[16];
    std::memcpy(h, p, sizeof h);
    F32 r;
    for (int i = 0; i < 16; i++) r.v[i] = f16_to_f32(h[i]);
    return r;
}
EI_INLINE void store_f16(void* p, F32 v) {
    uint16_t h[16];
    for (int i = 0; i < 16; i++) h[i] = f32_to_f16(v.v[i]);
    std::memcpy(p, h, sizeof h);
}
EI_INLINE F32 load_bf16(const void* p) {
    uint16_t h[16];
    std::memcpy(h, p, sizeof h);
    F32 r;
    for (int i = 0; i < 16; i++) r.v[i] = std::bit_cast<float>(static_cast<uint32_t>(h[i]) << 16);
    return r;
}

EI_INLINE I32 set_i32(int32_t v) {
    I32 r;
    for (int32_t& lane : r.v) lane = v;
    return r;
}
EI_INLINE I32 add_i32(I32 a, I32 b) {
    return map<I32>(
        [](int32_t x, int32_t y) { return static_cast<int32_t>(static_cast<uint32_t>(x) + static_cast<uint32_t>(y)); },
        a, b);
}
EI_INLINE I32 sub_i32(I32 a, I32 b) {
    return map<I32>(
        [](int32_t x, int32_t y) { return static_cast<int32_t>(static_cast<uint32_t>(x) - static_cast<uint32_t>(y)); },
        a, b);
}
EI_INLINE I32 mul_i32(I32 a, I32 b) {
    return map<I32>([](int32_t x, int32_t y) { return x * y; }, a, b);
}
EI_INLINE I32 max_i32(I32 a, I32 b) {
    return map<I32>([](int32_t x, int32_t y) { return x > y ? x : y; }, a, b);
}
EI_INLINE I32 and_i32(I32 a, I32 b) {
    return map<I32>([](int32_t x, int32_t y) { return x & y; }, a, b);
}
EI_INLINE I32 shl_i32(I32 a, int n) {
    return map<I32>([n](int32_t x) { return static_cast<int32_t>(static_cast<uint32_t>(x) << n); }, a);
}
EI_INLINE F32 to_f32(I32 v) {
    return map<F32>([](int32_t x) { return static_cast<float>(x); }, v);
}
EI_INLINE I32 bits_of(F32 v) {
    return map<I32>([](float x) { return std::bit_cast<int32_t>(x); }, v);
}
EI_INLINE F32 as_f32(I32 v) {
    return map<F32>([](int32_t x) { return std::bit_cast<float>(x); }, v);
}
// The low byte of each lane.
EI_INLINE void store_i8(int8_t* p, I32 v) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(static_cast<uint8_t>(v.v[i] & 0xff));
}
// The sum of all lanes; may wrap around.
EI_INLINE int32_t sum_of(I32 v) {
    uint32_t r = 0;
    for (int32_t lane : v.v) r += static_cast<uint32_t>(lane);
    return static_cast<int32_t>(r);
}
EI_INLINE int32_t max_of(I32 v) {
    int32_t r = v.v[0];
    for (int32_t lane : v.v) r = lane > r ? lane : r;
    return r;
}
EI_INLINE I32 load_u8_as_i32(const uint8_t* p) {
    I32 r;
    for (int i = 0; i < 16; i++) r.v[i] = p[i];
    return r;
}
EI_INLINE I32 load_i8_as_i32(const uint8_t* p) {
    I32 r;
    for (int i = 0; i < 16; i++) r.v[i] = static_cast<int8_t>(p[i]);
    return r;
}
EI_INLINE I16 load_u8_as_i16(const uint8_t* p) {
    I16 r;
    for (int i = 0; i < 32; i++) r.v[i] = p[i];
    return r;
}
EI_INLINE I16 load_i8_as_i16(const uint8_t* p) {
    I16 r;
    for (int i = 0; i < 32; i++) r.v[i] = static_cast<int8_t>(p[i]);
    return r;
}
EI_INLINE I32 even_i16(I16 v) {
    I32 r;
    for (int i = 0; i < 16; i++) r.v[i] = v.v[2 * i];
    return r;
}
EI_INLINE I32 odd_i16(I16 v) {
    I32 r;
    for (int i = 0; i < 16; i++) r.v[i] = v.v[2 * i + 1];
    return r;
}

EI_INLINE U8 load_u8(const uint8_t* p) {
    U8 r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
EI_INLINE void store_u8(uint8_t* p, U8 v) { std::memcpy(p, v.v, sizeof v.v); }
EI_INLINE U8 and_u8(U8 v, uint8_t mask) {
    return map<U8>([mask](uint8_t x) { return static_cast<uint8_t>(x & mask); }, v);
}
EI_INLINE U8 or_u8(U8 a, U8 b) {
    return map<U8>([](uint8_t x, uint8_t y) { return static_cast<uint8_t>(x | y); }, a, b);
}
// Shifts of bytes: what a shift of wider lanes carries across a byte's edge must be masked away by the caller.
template <int N>
EI_INLINE U8 shr_u16(U8 v) {
    return map<U8>([](uint8_t x) { return static_cast<uint8_t>(x >> N); }, v);
}
template <int N>
EI_INLINE U8 shl_u16(U8 v) {
    return map<U8>([](uint8_t x) { return static_cast<uint8_t>(x << N); }, v);
}

// table[i] of 16 bytes for each byte i, which must be below 16.
EI_INLINE U8 look_up(U8 index, const uint8_t* table) {
    return map<U8>([table](uint8_t i) { return table[i]; }, index);
}

// Bytes of five ternary weights in base three, sign and magnitude: calls f<J>(codes) for J = 0..4 in any order, with the
// codes, one above the weights, that count 3^J.
template <class F>
EI_INLINE void unpack_base_three(U8 stored, const F& f) {
    U8 codes[5];
    for (int i = 0; i < 64; i++) {
        const int magnitude = stored.v[i] & 127;
        int value = 121 + (stored.v[i] > 127 ? -magnitude : magnitude);  // of the codes
        for (U8& each : codes) {
            each.v[i] = static_cast<uint8_t>(value % 3);
            value /= 3;
        }
    }
    f.template operator()<0>(codes[0]);
    f.template operator()<1>(codes[1]);
    f.template operator()<2>(codes[2]);
    f.template operator()<3>(codes[3]);
    f.template operator()<4>(codes[4]);
}

// sum + the dot product of each lane's four unsigned codes, up to 127, with the four signed activations at a.
EI_INLINE I32 dot4(I32 sum, U8 codes, const int8_t* a) {
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < 4; j++) sum.v[i] += codes.v[4 * i + j] * a[j];
    }
    return sum;
}
// sum + the dot product of each lane's two 16-bit numbers with the two at a.
EI_INLINE I32 dot2(I32 sum, I16 pairs, const int16_t* a) {
    for (int i = 0; i < 16; i++) sum.v[i] += pairs.v[2 * i] * a[0] + pairs.v[2 * i + 1] * a[1];
    return sum;
}

}  // namespace

// Dot: sums of products of codes and activations, in whatever the instructions give. One takes kDots<BITS> times dot()
// with codes of so many bits, or, begun by dot_from() with the centre_16 of its 16 activations, which takes off what the
// codes stand above the true ones, four times with codes of 6 bits, or with centre_32 eight times with the integers of
// MXFP4; add_dot and add_dot_times make it part of a sum in 32 bits.
#include "kernels/simd_dot32.h"

namespace {

// Codes of 8 bits, stored 128 above the true ones: what dot8 wants of them, and by how much it takes them too high.
constexpr int kOffset8 = 128;
EI_INLINE U8 codes8(U8 stored) { return stored; }
EI_INLINE Dot dot8(Dot d, U8 codes, const int8_t* a) { return dot4(d, codes, a); }

}  // namespace

// What is made of tiles whose dot products all fit into 16 bits. Singles: add_int16_times, with the scales that
// load_scale, even_low and odd_low give. Pairs: add_pair_times, of two dots with the scales that load_scale_pair gives, of
// 16 rows those of one block, then of the next, or with pairs of one row. all_fit_int16: whether no 16 of 256 activations
// have magnitudes that add up to more than kMostOf16.
namespace {

constexpr Int16Scaling kInt16Scaling = Int16Scaling::Singles;
EI_INLINE bool all_fit_int16(const int8_t* a) {
    bool all = true;
    for (int i = 0; i < 256; i += 16) {
        int sum = 0;
        for (int j = 0; j < 16; j++) sum += a[i + j] < 0 ? -a[i + j] : a[i + j];
        all = all && sum <= kMostOf16;
    }
    return all;
}
EI_INLINE I32 add_int16_times(I32 sum, Dot d, Scale scale) {
    for (int i = 0; i < 16; i++) sum.v[i] += static_cast<int16_t>(d.v[i]) * scale.v[i];
    return sum;
}
EI_INLINE Scale even_low(I16 v) { return even_i16(v); }
EI_INLINE Scale odd_low(I16 v) { return odd_i16(v); }

}  // namespace
