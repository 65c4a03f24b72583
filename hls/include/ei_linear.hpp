// A ternary linear of BitNet b1.58: activations rounded to int8, the product, and its scales. All streams and memory have
// floats in lanes of four; a row of a token is padded to whole lanes.
#pragma once

#include "ei_quantise.hpp"
#include "ei_tlmm.hpp"

namespace ei {

// Activations as the engine reads them, in groups of G, padded with 0 to whole steps.
template <class E>
void group(hls::stream<Quarter>& q, int n_tokens, int n_in, hls::stream<typename E::Group>& x) {
tokens:
    for (int token = 0; token < n_tokens; token++) {
        change_width(q, n_lanes(n_in), x, E::n_steps(n_in) * E::kTables);
    }
}

template <class E>
void multiply(hls::stream<typename E::Group>& x, hls::stream<typename E::Beat>& w, int n_tokens, int n_in, int n_out,
              hls::stream<typename E::Tile>& y) {
tokens:
    for (int token = 0; token < n_tokens; token++) tlmm<E>(x, w, y, E::n_steps(n_in), E::n_tiles(n_out));
}

// The scales of R rows.
template <class E>
using RowScales = ap_uint<32 * E::kRows>;

template <class E>
void group_scales(hls::stream<Lane>& lanes, int n_tokens, int n_out, hls::stream<RowScales<E>>& scales) {
tokens:
    for (int token = 0; token < n_tokens; token++) {
        change_width(lanes, n_lanes(n_out), scales, E::n_tiles(n_out));
    }
}

// (float(y) * scale[row]) * x_scale, R rows a cycle.
template <class E>
void rescale(hls::stream<typename E::Tile>& sums, hls::stream<RowScales<E>>& scales, hls::stream<float>& x_scale,
             int n_tokens, int n_out, hls::stream<RowScales<E>>& y) {
tokens:
    for (int token = 0; token < n_tokens; token++) {
        const float of_token = x_scale.read();
    tiles:
        for (int tile = 0; tile < E::n_tiles(n_out); tile++) {
#pragma HLS PIPELINE II = 1
            const typename E::Tile of_rows = sums.read();
            const RowScales<E> factors = scales.read();
            RowScales<E> results = 0;
            for (int r = 0; r < E::kRows; r++) {
#pragma HLS UNROLL
                const typename E::Sum sum =
                    ap_uint<E::kSumBits>(of_rows.range((r + 1) * E::kSumBits - 1, r * E::kSumBits));
                const float factor = float_of_bits(ap_uint<32>(factors.range(32 * r + 31, 32 * r)).to_uint());
                const float of_row = static_cast<float>(sum.to_int()) * factor;
                results.range(32 * r + 31, 32 * r) = ap_uint<32>(bits_of_float(of_row * of_token));
            }
            y.write(results);
        }
    }
}

template <class E>
void ungroup(hls::stream<RowScales<E>>& rows, int n_tokens, int n_out, hls::stream<Lane>& y) {
tokens:
    for (int token = 0; token < n_tokens; token++) {
        change_width(rows, E::n_tiles(n_out), y, n_lanes(n_out));
    }
}

// q and x_scale: of quantise, or of a norm. w: the stream of the matrix, once a token. scales: (n_out,), once a token.
// The tokens pass one after another, and the stages work on different ones.
template <class E>
void linear(hls::stream<Quarter>& q, hls::stream<float>& x_scale, hls::stream<typename E::Beat>& w,
            hls::stream<Lane>& scales, int n_tokens, int n_in, int n_out, hls::stream<Lane>& y) {
#pragma HLS INLINE
    hls::stream<typename E::Group> x("groups of activations");
    hls::stream<typename E::Tile> sums("sums");
    hls::stream<RowScales<E>> factors("scales of rows"), results("results of rows");
#pragma HLS STREAM variable = x depth = 256
#pragma HLS STREAM variable = sums depth = 64
#pragma HLS STREAM variable = factors depth = 16
#pragma HLS STREAM variable = results depth = 16
    group<E>(q, n_tokens, n_in, x);
    multiply<E>(x, w, n_tokens, n_in, n_out, sums);
    group_scales<E>(scales, n_tokens, n_out, factors);
    rescale<E>(sums, factors, x_scale, n_tokens, n_out, results);
    ungroup<E>(results, n_tokens, n_out, y);
}

}  // namespace ei
