// Formats whose blocks are 32 weights with scales of their own: Q4_0, Q4_1, Q5_0, Q5_1. A lane is a row.
#pragma once

#include "floats.h"
#include "searches.h"

namespace {

constexpr int kBlock = 32;

// What some blocks become; the codes are written as they are, cut to whole numbers.
struct Fit {
    Floats scale, minimum{}, codes[kBlock];
};

// Where some rows begin. Past the last one they are that again, and dropped.
struct RowGroup {
    const float* rows[kLanes];
    int n_used;

    RowGroup(const Rows& matrix, int64_t first)
        : n_used(static_cast<int>(matrix.n_rows - first < kLanes ? matrix.n_rows - first : kLanes)) {
        for (int lane = 0; lane < kLanes; lane++) {
            rows[lane] = matrix.weights + matrix.n_in * (first + (lane < n_used ? lane : n_used - 1));
        }
    }
};

template <class Write>
EI_INLINE void write_blocks(const Fit& fit, int n_used, uint8_t* to, int64_t row_bytes, Write write) {
    uint8_t codes[kLanes][kBlock];
    store(codes[0], fit.codes);
    for (int lane = 0; lane < n_used; lane++)
        write(to + row_bytes * lane, fit.scale[lane], fit.minimum[lane], codes[lane]);
}

// fit(weights, Fit&) of the blocks of some rows, then write(to, scale, minimum, codes) of each.
template <int bytes, class MakeFit, class Write>
EI_INLINE void plain_blocks(const Rows& matrix, MakeFit make_fit, Write write) {
    const int64_t n_blocks = matrix.n_in / kBlock;
    for (int64_t first = 0; first < matrix.n_rows; first += kLanes) {
        const RowGroup group(matrix, first);
        for (int64_t block = 0; block < n_blocks; block++) {
            const float* from[kLanes];
            for (int lane = 0; lane < kLanes; lane++) from[lane] = group.rows[lane] + kBlock * block;
            Floats x[kBlock];
            load(x, from);
            Fit fit;
            make_fit(x, fit);
            write_blocks(fit, group.n_used, matrix.bytes + bytes * (n_blocks * first + block), bytes * n_blocks, write);
        }
    }
}

// The same with fit(weights, importance, Fit&), where importance is that of the column times the root of w^2 plus the mean
// square of the row.
template <int bytes, class MakeFit, class Write>
EI_INLINE void weighted_blocks(const Rows& matrix, MakeFit make_fit, Write write) {
    const int64_t n_blocks = matrix.n_in / kBlock;
    for (int64_t first = 0; first < matrix.n_rows; first += kLanes) {
        const RowGroup group(matrix, first);
        const Floats mean = sums_of_squares(group.rows, matrix.n_in) / static_cast<float>(matrix.n_in);
        for (int64_t block = 0; block < n_blocks; block++) {
            const float* from[kLanes];
            for (int lane = 0; lane < kLanes; lane++) from[lane] = group.rows[lane] + kBlock * block;
            Floats x[kBlock], importance[kBlock];
            load(x, from);
            for (int k = 0; k < kBlock; k++)
                importance[k] = matrix.importance[kBlock * block + k] * root(mean + x[k] * x[k]);
            Fit fit;
            make_fit(x, importance, fit);
            write_blocks(fit, group.n_used, matrix.bytes + bytes * (n_blocks * first + block), bytes * n_blocks, write);
        }
    }
}

// 1 / scale, 0 for 0, and no number where that is too large; the codes are 0 then, and the scale is 0 in float16.
EI_INLINE Floats inverse_of(Floats scale) {
    const Floats inverse = 1 / scale, none = all(__builtin_nanf(""));
    return choose(scale == 0, all(0), choose(magnitude(inverse) <= kLargestFloat, inverse, none));
}

// 16 bytes with four bits of each code.
EI_INLINE void write_nibbles(uint8_t* to, const uint8_t* codes) {
    for (int i = 0; i < 16; i++) to[i] = static_cast<uint8_t>((codes[i] & 15) | codes[i + 16] << 4);
}

// 4 bytes with bit 4 of each code.
EI_INLINE void write_fifth_bits(uint8_t* to, const uint8_t* codes) {
    for (int i = 0; i < 4; i++) {
        unsigned bits = 0;
        for (int k = 0; k < 8; k++) bits |= (codes[8 * i + k] >> 4 & 1u) << k;
        to[i] = static_cast<uint8_t>(bits);
    }
}

}  // namespace
