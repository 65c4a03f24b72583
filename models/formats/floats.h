// F16 and BF16, and numbers of the blocks of other formats.
#pragma once

#include <bit>
#include <cstring>

#include "lanes.h"
#include "quantizers.h"

static_assert(std::endian::native == std::endian::little, "numbers of a model file are written as they are in memory");

namespace {

EI_INLINE float to_half(float value) { return as_half(all(value))[0]; }

EI_INLINE void write_half(uint8_t* to, float value) {
    const uint16_t bits = static_cast<uint16_t>(half_bits(all(value))[0]);
    std::memcpy(to, &bits, sizeof bits);
}

// bits_of(weights) of all, 16 bits each.
template <class Bits>
EI_INLINE void write_sixteen_bits(const Rows& rows, Bits bits_of) {
    constexpr int64_t kPiece = 256;
    const int64_t n = rows.n_rows * rows.n_in;
    for (int64_t first = 0; first < n; first += kPiece) {
        const size_t n_used = static_cast<size_t>(n - first < kPiece ? n - first : kPiece);
        Floats weights[kPiece / kLanes]{};
        uint32_t bits[kPiece];
        uint16_t to[kPiece];
        std::memcpy(weights, rows.weights + first, n_used * sizeof(float));
        for (int i = 0; i < kPiece / kLanes; i++) {
            const Ints of = bits_of(weights[i]);
            std::memcpy(bits + kLanes * i, &of, sizeof of);
        }
        for (int k = 0; k < kPiece; k++) to[k] = static_cast<uint16_t>(bits[k]);
        std::memcpy(rows.bytes + 2 * first, to, n_used * sizeof(uint16_t));
    }
}

void f16(const Rows& rows) { write_sixteen_bits(rows, half_bits); }

// The upper half of a float32, rounded to nearest even.
void bf16(const Rows& rows) {
    write_sixteen_bits(rows, [](Floats weights) {
        const Ints bits = reinterpret_cast<Ints>(weights);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    });
}

}  // namespace
