// Q4_0 and Q5_0: w = scale (q - n_negative).
#pragma once

#include "blocks_of_32.h"

namespace {

// The largest weight gets code 0, the others are rounded.
template <int n_negative>
EI_INLINE void rounded_symmetric(const Floats (&x)[kBlock], Fit& fit) {
    fit.scale = signed_largest(x) / static_cast<float>(-n_negative);
    const Floats inverse = inverse_of(fit.scale);
    for (int k = 0; k < kBlock; k++) {
        const Floats place = x[k] * inverse + (n_negative + 0.5f);
        fit.codes[k] = least(most(all(0), place), all(2 * n_negative - 1));
    }
}

template <int n_negative>
EI_INLINE void searched_symmetric(const Floats (&x)[kBlock], const Floats (&importance)[kBlock], Fit& fit) {
    const Symmetric found = symmetric(x, importance, n_negative);
    fit.scale = found.scale;
    for (int k = 0; k < kBlock; k++) fit.codes[k] = found.code_of(x[k], n_negative);
}

// The scale of the smallest squared error, of 13 from 0.82 to 1.06 times that at which the largest weight has code 0.
// Scales are tried as the float16 that they become. Errors are summed as in backends/native/packing/packing.cpp, in eight parts.
EI_INLINE void least_squares_q4_0(const Floats (&x)[kBlock], Fit& fit) {
    const Floats largest = signed_largest(x), full = choose(largest == 0, x[0], largest) / -8.0f;  // of -0 another 0
    Floats smallest = all(kLargestFloat);
    fit.scale = Floats{};
    for (int i = 0; i < 13; i++) {
        const Floats tried = as_half(full * static_cast<float>(0.82 + 0.02 * i));
        const Ints is_zero = tried == 0;
        Floats errors[8]{}, error{};
        for (int k = 0; k < kBlock; k++) {
            errors[k % 8] += squared(choose(is_zero, all(0), code(x[k] / tried, -8, 7)) * tried - x[k]);
        }
        for (const Floats& part : errors) error += part;
        const Ints better = error < smallest;
        smallest = choose(better, error, smallest);
        fit.scale = choose(better, tried, fit.scale);
    }
    for (int k = 0; k < kBlock; k++) fit.codes[k] = choose(fit.scale == 0, all(0), code(x[k] / fit.scale, -8, 7)) + 8;
}

EI_INLINE void write_q4_0(uint8_t* to, float scale, float, const uint8_t* codes) {
    write_half(to, scale);
    write_nibbles(to + 2, codes);
}

EI_INLINE void write_q5_0(uint8_t* to, float scale, float, const uint8_t* codes) {
    write_half(to, scale);
    write_fifth_bits(to + 2, codes);
    write_nibbles(to + 6, codes);
}

void q4_0_plain(const Rows& rows) {
    plain_blocks<18>(rows, [](const auto& x, Fit& fit) { rounded_symmetric<8>(x, fit); }, write_q4_0);
}
void q4_0_least_squares(const Rows& rows) {
    plain_blocks<18>(rows, [](const auto& x, Fit& fit) { least_squares_q4_0(x, fit); }, write_q4_0);
}
void q4_0_weighted(const Rows& rows) {
    weighted_blocks<18>(
        rows, [](const auto& x, const auto& w, Fit& fit) { searched_symmetric<8>(x, w, fit); }, write_q4_0);
}
void q5_0_plain(const Rows& rows) {
    plain_blocks<22>(rows, [](const auto& x, Fit& fit) { rounded_symmetric<16>(x, fit); }, write_q5_0);
}
void q5_0_weighted(const Rows& rows) {
    weighted_blocks<22>(
        rows, [](const auto& x, const auto& w, Fit& fit) { searched_symmetric<16>(x, w, fit); }, write_q5_0);
}

}  // namespace
