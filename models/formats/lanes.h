// Numbers of several blocks side by side, a lane each. Every lane is computed by the same operations in the same order as
// one block alone would be, so neither the instruction set nor what stands in the other lanes can change a bit.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#define EI_INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr float kLargestFloat = 0x1.fffffep127f;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

EI_INLINE Floats all(float value) { return value - Floats{}; }
EI_INLINE Floats choose(Ints where, Floats yes, Floats no) { return where ? yes : no; }
// b if it is less (greater), else a, also where one is no number. GCC makes more of it where one is a constant.
#if defined(__AVX__)
EI_INLINE Floats least(Floats a, Floats b) { return _mm256_min_ps(b, a); }
EI_INLINE Floats most(Floats a, Floats b) { return _mm256_max_ps(b, a); }
#elif defined(__SSE__)
EI_INLINE Floats least(Floats a, Floats b) { return _mm_min_ps(b, a); }
EI_INLINE Floats most(Floats a, Floats b) { return _mm_max_ps(b, a); }
#else
EI_INLINE Floats least(Floats a, Floats b) { return b < a ? b : a; }
EI_INLINE Floats most(Floats a, Floats b) { return b > a ? b : a; }
#endif
EI_INLINE Floats magnitude(Floats v) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(v) & 0x7fffffff); }

EI_INLINE Floats root(Floats v) {
    for (int lane = 0; lane < kLanes; lane++) v[lane] = __builtin_sqrtf(v[lane]);
    return v;
}

EI_INLINE bool any(Ints where) {
    int32_t found = 0;
    for (int lane = 0; lane < kLanes; lane++) found |= where[lane];
    return found;
}

// To the nearest whole number, of two as near the even one; exact below 2^22.
EI_INLINE Floats rounded(Floats v) {
    constexpr float kShift = 0x1.8p23f;
    return (v + kShift) - kShift;
}

// Rounded, then into low..high. What is no number becomes low.
EI_INLINE Floats code(Floats v, float low, float high) { return least(most(all(low), rounded(v)), all(high)); }

// The bits of the nearest float16 that is finite, of two as near the even one. What is no number becomes 0.
EI_INLINE Ints half_bits(Floats v) {
    constexpr float kLargest = 65504, kLeastNormal = 0x1p-14f;
    const Ints sign = reinterpret_cast<Ints>(v) >> 16 & 0x8000;
    const Floats size = least(most(all(0), magnitude(v)), all(kLargest));
    const Ints bits = reinterpret_cast<Ints>(size);
    const Ints normal = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    const Ints tiny = reinterpret_cast<Ints>(size + 0.5f) - 0x3f000000;  // the adder rounds to 2^-24
    return sign | (size < kLeastNormal ? tiny : normal);
}

// The same as a float.
EI_INLINE Floats as_half(Floats v) {
    const Ints bits = half_bits(v), size = bits & 0x7fff, sign = (bits & 0x8000) << 16;
    const Floats normal = reinterpret_cast<Floats>((size << 13) + 0x38000000);
    const Floats tiny = __builtin_convertvector(size, Floats) * 0x1p-24f;
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(choose(size < 0x400, tiny, normal)) | sign);
}

// Number k of each run.
EI_INLINE Floats column(const float* const (&from)[kLanes], int64_t k) {
#if defined(__AVX__)
    return Floats{from[0][k], from[1][k], from[2][k], from[3][k], from[4][k], from[5][k], from[6][k], from[7][k]};
#else
    return Floats{from[0][k], from[1][k], from[2][k], from[3][k]};
#endif
}

// Runs of n numbers, transposed: to[k] has number k of each.
template <int n>
EI_INLINE void load(Floats (&to)[n], const float* const (&from)[kLanes]) {
    for (int k = 0; k < n; k++) to[k] = column(from, k);
}

// Of runs that follow each other.
template <int n>
EI_INLINE void load(Floats (&to)[n], const float* first) {
    const float* from[kLanes];
    for (int lane = 0; lane < kLanes; lane++) from[lane] = first + n * lane;
    load(to, from);
}

// Of n numbers each, added up one after the other.
EI_INLINE Floats sums_of_squares(const float* const (&from)[kLanes], int64_t n) {
    Floats sum{};
    for (int64_t k = 0; k < n; k++) {
        const Floats x = column(from, k);
        sum += x * x;
    }
    return sum;
}

// Codes 0..255, transposed back: lane i has those from to + n i on.
template <int n>
EI_INLINE void store(uint8_t* to, const Floats (&codes)[n]) {
    for (int k = 0; k < n; k++) {
        const Ints whole = __builtin_convertvector(codes[k], Ints);
        for (int lane = 0; lane < kLanes; lane++) to[lane * n + k] = static_cast<uint8_t>(whole[lane]);
    }
}

}  // namespace
