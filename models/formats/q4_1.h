// Q4_1 and Q5_1: w = scale q + minimum.
#pragma once

#include "blocks_of_32.h"

namespace {

// The least and the largest weight get the first and the last code, the others are rounded.
template <int largest>
EI_INLINE void rounded_affine(const Floats (&x)[kBlock], Fit& fit) {
    Floats low = x[0], high = x[0];
    for (const Floats& weights : x) {
        low = least(low, weights);
        high = most(high, weights);
    }
    fit.scale = (high - low) / static_cast<float>(largest);
    fit.minimum = low;
    const Floats inverse = inverse_of(fit.scale);
    for (int k = 0; k < kBlock; k++) {
        fit.codes[k] = least(most(all(0), (x[k] - low) * inverse + 0.5f), all(largest));
    }
}

template <int largest>
EI_INLINE void searched_affine(const Floats (&x)[kBlock], const Floats (&importance)[kBlock], Fit& fit) {
    const Affine found = affine(x, importance, largest, Steps{-0.9f, 0.05f, 36}, squared);
    fit.scale = found.scale;
    fit.minimum = found.minimum;
    for (int k = 0; k < kBlock; k++) fit.codes[k] = found.code_of(x[k], largest);
}

EI_INLINE void write_q4_1(uint8_t* to, float scale, float minimum, const uint8_t* codes) {
    write_half(to, scale);
    write_half(to + 2, minimum);
    write_nibbles(to + 4, codes);
}

EI_INLINE void write_q5_1(uint8_t* to, float scale, float minimum, const uint8_t* codes) {
    write_half(to, scale);
    write_half(to + 2, minimum);
    write_fifth_bits(to + 4, codes);
    write_nibbles(to + 8, codes);
}

void q4_1_plain(const Rows& rows) {
    plain_blocks<20>(rows, [](const auto& x, Fit& fit) { rounded_affine<15>(x, fit); }, write_q4_1);
}
void q4_1_weighted(const Rows& rows) {
    weighted_blocks<20>(
        rows, [](const auto& x, const auto& w, Fit& fit) { searched_affine<15>(x, w, fit); }, write_q4_1);
}
void q5_1_plain(const Rows& rows) {
    plain_blocks<24>(rows, [](const auto& x, Fit& fit) { rounded_affine<31>(x, fit); }, write_q5_1);
}
void q5_1_weighted(const Rows& rows) {
    weighted_blocks<24>(
        rows, [](const auto& x, const auto& w, Fit& fit) { searched_affine<31>(x, w, fit); }, write_q5_1);
}

}  // namespace
