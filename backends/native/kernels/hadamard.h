// The Walsh-Hadamard transform, which spreads what stands out in one number over all: few bits hold what it gives with
// less error (QuaRot, Ashkboos et al., arXiv:2404.00456).
#pragma once

#include <bit>

// Blocks of a head that are transformed: of the largest power of two that divides its size.
constexpr int hadamard_block(int n) { return n & -n; }

// A power of two near 1 / sqrt(block), with which numbers keep about their size.
constexpr float hadamard_scale(int block) {
    return 1.0f / static_cast<float>(1 << (std::bit_width(static_cast<unsigned>(block)) - 1) / 2);
}

// x = factor * H x in each block. H H = block, so that H q and H k, or H twice, need factors whose product is 1 / block.
inline void hadamard(float* x, int n, float factor) {
    const int block = hadamard_block(n);
    for (int first = 0; first < n; first += block) {
        float* y = x + first;
        for (int half = 1; half < block; half *= 2) {
            for (int i = 0; i < block; i += 2 * half) {
                for (int j = i; j < i + half; j++) {
                    const float a = y[j], b = y[j + half];
                    y[j] = a + b;
                    y[j + half] = a - b;
                }
            }
        }
        for (int i = 0; i < block; i++) y[i] *= factor;
    }
}

// Of keys and values as they are stored, and of what is taken back to them: queries and weighted sums of values.
inline void hadamard_in(float* x, int n) { hadamard(x, n, hadamard_scale(hadamard_block(n))); }
inline void hadamard_back(float* x, int n) {
    const int block = hadamard_block(n);
    hadamard(x, n, 1.0f / (static_cast<float>(block) * hadamard_scale(block)));
}
