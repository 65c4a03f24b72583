// Float arithmetic of the kernels that an FPGA and a CPU do alike: each operation is rounded to float32 by itself.
#pragma once

#include <cstdint>

namespace ei {

// The same 32 bits as a float and as a number. A union, which synthesis takes for a wire.
union FloatBits {
    float value;
    uint32_t bits;
};

inline float float_of_bits(uint32_t bits) {
    FloatBits both;
    both.bits = bits;
    return both.value;
}

inline uint32_t bits_of_float(float value) {
    FloatBits both;
    both.value = value;
    return both.bits;
}

// The float of the bits of a float16 number. Exact; infinities and NaN do not occur in a KV cache.
inline float float_of_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t magnitude = half & 0x7fff;
    if (magnitude < 0x400) {  // zero and subnormal numbers: multiples of 2^-24
        const float value = static_cast<float>(magnitude) * float_of_bits((127u - 24) << 23);
        return sign ? -value : value;
    }
    return float_of_bits(sign | ((magnitude << 13) + ((127u - 15) << 23)));
}

// e^x for x <= 0: 2^n times a polynomial of degree 6 of what is left, |r| <= ln(2) / 2. Within 2 units in the last place;
// 0 below -87, where float32 ends.
inline float exp_of_negative(float x) {
    if (x < -87.0f) return 0.0f;
    const float scaled = x * 1.44269504f;
    const int n = static_cast<int>(scaled - 0.5f);  // to the nearest, as x <= 0
    const float whole = static_cast<float>(n);
    const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * float_of_bits(static_cast<uint32_t>(n + 127) << 23);
}

constexpr int next_power_of_two(int n) { return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2); }

// The sum of N numbers, N a power of two, as a tree: neighbours first. Adders in log2(N) stages.
template <int N>
struct Tree {
    static float sum(const float* x) {
#pragma HLS INLINE
        return Tree<N / 2>::sum(x) + Tree<N / 2>::sum(x + N / 2);
    }
};

template <>
struct Tree<1> {
    static float sum(const float* x) { return x[0]; }
};

}  // namespace ei
