// RMS norm and rounding to int8, with AXI streams.
#pragma once

#include "ei_config.hpp"
#include "ei_norm.hpp"

// x: n_tokens rows of n floats, each padded to whole lanes of four. weight: (n,), once. q: int8 in the same lanes of four,
// scale: one a token.
void ei_norm_top(hls::stream<ei::Lane>& x, hls::stream<ei::Lane>& weight, float epsilon, int n_tokens, int n,
                 hls::stream<ei::Quarter>& q, hls::stream<float>& scale);
