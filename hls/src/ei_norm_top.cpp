#include "ei_norm_top.hpp"

void ei_norm_top(hls::stream<ei::Lane>& x, hls::stream<ei::Lane>& weight, float epsilon, int n_tokens, int n,
                 hls::stream<ei::Quarter>& q, hls::stream<float>& scale) {
#pragma HLS INTERFACE mode = axis port = x
#pragma HLS INTERFACE mode = axis port = weight
#pragma HLS INTERFACE mode = axis port = q
#pragma HLS INTERFACE mode = axis port = scale
#pragma HLS INTERFACE mode = s_axilite port = epsilon
#pragma HLS INTERFACE mode = s_axilite port = n_tokens
#pragma HLS INTERFACE mode = s_axilite port = n
#pragma HLS INTERFACE mode = s_axilite port = return
    ei::norm_and_quantise<ei::Configured::kMaxIn>(x, weight, epsilon, n_tokens, n, q, scale);
}
