// The types of the kernels: ap_int, ap_uint and hls::stream, and numbers that follow from a geometry (hls/geometry.py).
//
// EI_VENDOR_TYPES takes them from ap_int.h and hls_stream.h on the include path, as synthesis does; else they come from
// shim/, which has no more than what is used here, and computes the same.
#pragma once

#include <cstdint>

#if defined(EI_VENDOR_TYPES) || defined(__SYNTHESIS__) || defined(__VITIS_HLS__)
#ifndef AP_INT_MAX_W
#define AP_INT_MAX_W 4096  // bits of a beat of weights and what a gearbox adds to it
#endif
#include <ap_int.h>
#include <hls_stream.h>
#else
#include "shim/ap_int.hpp"
#include "shim/hls_stream.hpp"
#endif

namespace ei {

constexpr int kLaneBits = 128;  // of a memory port
using Lane = ap_uint<kLaneBits>;

constexpr int divided_up(int n, int by) { return (n + by - 1) / by; }
constexpr int largest_of(int a, int b) { return a > b ? a : b; }

// Bits of the numbers 0..n: the length of n.
constexpr int bit_length(std::uint64_t n) { return n == 0 ? 0 : 1 + bit_length(n >> 1); }
// Bits of a signed number that holds -magnitude..magnitude.
constexpr int signed_bits(std::uint64_t magnitude) { return bit_length(magnitude) + 1; }
// Bits of the sum of n_in activations of -128..127 with weights -1, 0, 1.
constexpr int accumulator_bits(int n_in) { return signed_bits(static_cast<std::uint64_t>(n_in) * 128); }

}  // namespace ei
