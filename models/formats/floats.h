// F16 and BF16, and numbers of the blocks of other formats.
#pragma once

#include <bit>
#include <cstring>

#include "float16.h"
#include "lanes.h"
#include "quantizers.h"

namespace {

EI_INLINE void write_u16(uint8_t* to, uint16_t value) {
    to[0] = static_cast<uint8_t>(value);
    to[1] = static_cast<uint8_t>(value >> 8);
}

EI_INLINE float to_half(float value) { return as_half(all(value))[0]; }
EI_INLINE void write_half(uint8_t* to, float value) { write_u16(to, f32_to_f16(to_half(value))); }

void f16(const Rows& rows) {
    for (int64_t i = 0; i < rows.n_rows * rows.n_in; i++) write_u16(rows.bytes + 2 * i, f32_to_f16(rows.weights[i]));
}

// The upper half of a float32, rounded to nearest even.
void bf16(const Rows& rows) {
    for (int64_t i = 0; i < rows.n_rows * rows.n_in; i++) {
        const uint32_t bits = std::bit_cast<uint32_t>(rows.weights[i]);
        write_u16(rows.bytes + 2 * i, static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
    }
}

}  // namespace
