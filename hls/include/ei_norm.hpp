// RMS norm (Zhang and Sennrich, arXiv:1910.07467) and the rounding of its result to int8, for the linears after it.
//
// out = (x * (1 / sqrt(sum(x^2) / n + epsilon))) * weight, each operation rounded to float32. Squares are added up in 32
// sums, x[i] in sum i % 32, in the order of i; then the sums in pairs 16, 8, 4, 2, 1 apart. Eight lanes, one a
// cycle, go by before a sum is used again, which is as long as an adder takes. `rms_norm` of hls/arithmetic.py is the same.
#pragma once

#include <cmath>

#include "ei_quantise.hpp"

namespace ei {

constexpr int kSquares = 32;

inline float sum_of_squares(float (&squares)[kSquares]) {
#pragma HLS INLINE
    for (int apart = kSquares / 2; apart > 0; apart /= 2) {
        for (int i = 0; i < apart; i++) squares[i] += squares[i + apart];
    }
    return squares[0];
}

// n_tokens rows of n floats, each in whole lanes. weight: (n,), in lanes, once for all tokens.
template <int MAX_IN>
void norm_and_quantise(hls::stream<Lane>& x, hls::stream<Lane>& weight, float epsilon, int n_tokens, int n,
                       hls::stream<Quarter>& q, hls::stream<float>& scale) {
    constexpr int kMost = divided_up(MAX_IN, kFloats);
    Lane held[kMost], weights[kMost];
weights:
    for (int i = 0; i < n_lanes(n); i++) {
#pragma HLS PIPELINE II = 1
        weights[i] = weight.read();
    }
tokens:
    for (int token = 0; token < n_tokens; token++) {
        float squares[kSquares];
#pragma HLS ARRAY_PARTITION variable = squares complete
        for (int i = 0; i < kSquares; i++) {
#pragma HLS UNROLL
            squares[i] = 0.0f;
        }
    squaring:
        for (int i = 0; i < n_lanes(n); i++) {
#pragma HLS PIPELINE II = 1
#pragma HLS DEPENDENCE variable = squares type = inter direction = RAW distance = 8 dependent = true
            held[i] = x.read();
            for (int j = 0; j < kFloats; j++) {
#pragma HLS UNROLL
                const float value = kFloats * i + j < n ? float_at(held[i], j) : 0.0f;
                const float square = value * value;
                squares[(kFloats * i + j) % kSquares] += square;
            }
        }
        const float mean = sum_of_squares(squares) / static_cast<float>(n);
        const float factor = 1.0f / std::sqrt(mean + epsilon);
        Magnitude most;
    scaling:
        for (int i = 0; i < n_lanes(n); i++) {
#pragma HLS PIPELINE II = 1
            Lane scaled = 0;
            for (int j = 0; j < kFloats; j++) {
#pragma HLS UNROLL
                const float value = float_at(held[i], j) * factor;
                const float weighed = value * float_at(weights[i], j);
                scaled.range(32 * j + 31, 32 * j) = ap_uint<32>(bits_of_float(weighed));
                if (kFloats * i + j < n) most.add(weighed);
            }
            held[i] = scaled;
        }
        const TokenScale by(most);
        scale.write(by.scale);
        round_all(held, n, by, q);
    }
}

}  // namespace ei
