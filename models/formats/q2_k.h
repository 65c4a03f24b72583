// Q2_K.
#pragma once

#include "super_blocks.h"

namespace {

// 2 x 32 bytes with two bits of each code: byte i of a half has those of weights i, 32 + i, 64 + i and 96 + i of it.
EI_INLINE void write_quarters(uint8_t* to, const uint8_t* codes) {
    for (int half = 0; half < 2; half++) {
        const uint8_t* of = codes + 128 * half;
        for (int i = 0; i < 32; i++) {
            to[32 * half + i] = static_cast<uint8_t>((of[i] & 3) | (of[i + 32] & 3) << 2 | (of[i + 64] & 3) << 4 |
                                                     (of[i + 96] & 3) << 6);
        }
    }
}

struct Q2K {
    static constexpr int kRun = 16;
    static constexpr float kLargest = 3, kLargestScale = 15, kSquares = 1;

    static EI_INLINE void importance_of(const Floats (&x)[kRun], Floats (&importance)[kRun]) {
        for (int k = 0; k < kRun; k++) importance[k] = magnitude(x[k]);
    }
    static EI_INLINE Affine fit(const Floats (&x)[kRun], const Floats (&importance)[kRun]) {
        return affine(x, importance, kLargest, Steps{-0.5f, 0.1f, 15}, magnitude);
    }
    static EI_INLINE void write(uint8_t* to, const AffineRuns<kRun>& runs, const uint8_t* codes) {
        for (int j = 0; j < 16; j++) {
            to[j] = static_cast<uint8_t>(static_cast<unsigned>(runs.scale_codes[j]) |
                                         static_cast<unsigned>(runs.minimum_codes[j]) << 4);
        }
        write_quarters(to + 16, codes);
        write_half(to + 80, runs.d);
        write_half(to + 82, runs.dmin);
    }
};

void q2_k_plain(const Rows& rows) {
    each_super_block<84>(rows, [](const float* x, const float*, uint8_t* to) { plain_affine<Q2K>(x, to); });
}
void q2_k_weighted(const Rows& rows) { each_with_squares<84>(rows, weighted_affine<Q2K>); }

}  // namespace
