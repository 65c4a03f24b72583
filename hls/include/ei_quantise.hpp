// Activations rounded to int8 with one scale a token, as BitNet b1.58 has them: bit for bit what quantize_token of
// backends/native computes. Floats come in lanes of four.
//
// Hardware takes numbers below 2^-126 for 0, which this simulation does not; the smallest scale is far above.
#pragma once

#include "ei_math.hpp"
#include "ei_streams.hpp"

namespace ei {

constexpr int kFloats = kLaneBits / 32;  // in a lane
using Quarter = ap_uint<8 * kFloats>;    // the activations of a lane
inline int n_lanes(int n) { return divided_up(n, kFloats); }

inline float float_at(Lane lane, int i) {
#pragma HLS INLINE
    return float_of_bits(ap_uint<32>(lane.range(32 * i + 31, 32 * i)).to_uint());
}

// The largest magnitude, as bits: those of a NaN are larger than those of any number, so that none is lost.
struct Magnitude {
    std::uint32_t bits = 0;

    void add(float value) {
#pragma HLS INLINE
        const std::uint32_t magnitude = bits_of_float(value) & 0x7fffffffu;
        if (magnitude > bits) bits = magnitude;
    }
};

struct TokenScale {
    float scale;    // of an activation of 1
    float inverse;  // what activations are multiplied by

    // 1e-5 at least, as BitNet has it.
    explicit TokenScale(Magnitude magnitude) {
        const float found = float_of_bits(magnitude.bits);
        const float most = found < 1e-5f ? 1e-5f : found;
        scale = most / 127.0f;
        inverse = 127.0f / most;
    }
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even: it is in the low bits.
    ap_uint<8> round(float value) const {
#pragma HLS INLINE
        const float product = value * inverse;
        const float shifted = product + 12582912.0f;
        return bits_of_float(shifted) & 0xffu;
    }
};

// Gives out the activations of n floats that are held, past n zeros.
inline void round_all(const Lane* held, int n, TokenScale by, hls::stream<Quarter>& q) {
#pragma HLS INLINE
rounding:
    for (int i = 0; i < n_lanes(n); i++) {
#pragma HLS PIPELINE II = 1
        Quarter rounded = 0;
        for (int j = 0; j < kFloats; j++) {
#pragma HLS UNROLL
            if (kFloats * i + j < n) rounded.range(8 * j + 7, 8 * j) = by.round(float_at(held[i], j));
        }
        q.write(rounded);
    }
}

// n_tokens rows of n floats, each in whole lanes, as int8 and a scale.
template <int MAX_IN>
void quantise(hls::stream<Lane>& x, int n_tokens, int n, hls::stream<Quarter>& q, hls::stream<float>& scale) {
    Lane held[divided_up(MAX_IN, kFloats)];
tokens:
    for (int token = 0; token < n_tokens; token++) {
        Magnitude most;
    measuring:
        for (int i = 0; i < n_lanes(n); i++) {
#pragma HLS PIPELINE II = 1
            held[i] = x.read();
            for (int j = 0; j < kFloats; j++) {
#pragma HLS UNROLL
                if (kFloats * i + j < n) most.add(float_at(held[i], j));
            }
        }
        const TokenScale by(most);
        scale.write(by.scale);
        round_all(held, n, by, q);
    }
}

}  // namespace ei
