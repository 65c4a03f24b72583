// Q4_K and Q5_K.
#pragma once

#include <cstring>

#include "super_blocks.h"

namespace {

struct RunsOf32 {
    static constexpr int kRun = 32;
    static constexpr float kLargestScale = 63, kSquares = 2;

    // The root of the run's mean square, plus the weight's size.
    static EI_INLINE void importance_of(const Floats (&x)[kRun], Floats (&importance)[kRun]) {
        Floats sum{};
        for (const Floats& weights : x) sum += weights * weights;
        const Floats size = root(sum / static_cast<float>(kRun));
        for (int k = 0; k < kRun; k++) importance[k] = size + magnitude(x[k]);
    }
};

// d, dmin and 12 bytes with six bits of each scale and minimum.
EI_INLINE void write_scales(uint8_t* to, const AffineRuns<32>& runs) {
    write_half(to, runs.d);
    write_half(to + 2, runs.dmin);
    uint8_t *first = to + 4, *second = to + 8, *third = to + 12;
    for (int j = 0; j < 4; j++) {
        const unsigned scale = static_cast<unsigned>(runs.scale_codes[j]),
                       minimum = static_cast<unsigned>(runs.minimum_codes[j]);
        const unsigned later_scale = static_cast<unsigned>(runs.scale_codes[j + 4]);
        const unsigned later_minimum = static_cast<unsigned>(runs.minimum_codes[j + 4]);
        first[j] = static_cast<uint8_t>(scale | later_scale >> 4 << 6);
        second[j] = static_cast<uint8_t>(minimum | later_minimum >> 4 << 6);
        third[j] = static_cast<uint8_t>((later_scale & 15) | (later_minimum & 15) << 4);
    }
}

// 4 x 32 bytes with four bits of each code.
EI_INLINE void write_paired_nibbles(uint8_t* to, const uint8_t* codes) {
    for (int pair = 0; pair < 4; pair++) {
        for (int i = 0; i < 32; i++) {
            to[32 * pair + i] = static_cast<uint8_t>((codes[64 * pair + i] & 15) | codes[64 * pair + 32 + i] << 4);
        }
    }
}

struct Q4K : RunsOf32 {
    static constexpr float kLargest = 15;

    static EI_INLINE Affine fit(const Floats (&x)[kRun], const Floats (&importance)[kRun]) {
        return affine(x, importance, kLargest, Steps{-1, 0.1f, 20}, squared);
    }
    static EI_INLINE void write(uint8_t* to, const AffineRuns<kRun>& runs, const uint8_t* codes) {
        write_scales(to, runs);
        write_paired_nibbles(to + 16, codes);
    }
};

struct Q5K : RunsOf32 {
    static constexpr float kLargest = 31;

    static EI_INLINE Affine fit(const Floats (&x)[kRun], const Floats (&importance)[kRun]) {
        return affine(x, importance, kLargest, Steps{-0.5f, 0.1f, 15}, squared);
    }
    static EI_INLINE void write(uint8_t* to, const AffineRuns<kRun>& runs, const uint8_t* codes) {
        write_scales(to, runs);
        for (int i = 0; i < 32; i++) {
            unsigned bits = 0;
            for (int j = 0; j < 8; j++) bits |= (codes[32 * j + i] >> 4 & 1u) << j;
            to[16 + i] = static_cast<uint8_t>(bits);
        }
        write_paired_nibbles(to + 48, codes);
    }
};

void q4_k_plain(const Rows& rows) {
    each_super_block<144>(rows, [](const float* x, const float*, uint8_t* to) { plain_affine<Q4K>(x, to); });
}
void q4_k_weighted(const Rows& rows) { each_with_squares<144>(rows, weighted_affine<Q4K>); }
void q5_k_plain(const Rows& rows) {
    each_super_block<176>(rows, [](const float* x, const float*, uint8_t* to) { plain_affine<Q5K>(x, to); });
}
void q5_k_weighted(const Rows& rows) { each_with_squares<176>(rows, weighted_affine<Q5K>); }

}  // namespace
