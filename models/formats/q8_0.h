// Q8_0, a block at a time: its codes are a plain rounding.
#pragma once

#include <cstring>

#include "floats.h"

namespace {

// To the nearest whole number, of two as near the larger in magnitude; below 2^22.
EI_INLINE Floats rounded_away(Floats v) {
    const Floats even = rounded(v), over = v - even;
    return even + choose((over == 0.5f) & (v > 0), all(1), all(0)) - choose((over == -0.5f) & (v < 0), all(1), all(0));
}

void q8_0(const Rows& rows) {
    constexpr int kBlock = 32, kBytes = 34, kParts = kBlock / kLanes;
    for (int64_t block = 0; block < rows.n_rows * (rows.n_in / kBlock); block++) {
        Floats x[kParts], sizes{};
        std::memcpy(x, rows.weights + kBlock * block, sizeof x);
        for (const Floats& part : x) sizes = most(sizes, magnitude(part));
        float size = 0;
        for (int lane = 0; lane < kLanes; lane++) size = sizes[lane] > size ? sizes[lane] : size;

        uint8_t* to = rows.bytes + kBytes * block;
        const float scale = size / 127, inverse = 1 / scale;
        const bool is_zero = !(inverse <= kLargestFloat);  // or too small for float16 by far
        write_half(to, scale);
        int32_t codes[kBlock];
        for (int part = 0; part < kParts; part++) {
            const Ints of = __builtin_convertvector(rounded_away(x[part] * (is_zero ? 0 : inverse)), Ints);
            std::memcpy(codes + kLanes * part, &of, sizeof of);
        }
        for (int k = 0; k < kBlock; k++) to[2 + k] = static_cast<uint8_t>(codes[k]);
    }
}

}  // namespace
