// The product alone, with AXI streams: what ei_engine_* of hls/rtl is in Verilog.
#pragma once

#include "ei_config.hpp"

// x: n_steps * T groups of G activations. w: n_steps * n_tiles beats. y: n_tiles tiles of sums.
// geometry: the hash of the geometry, which the host compares with that of its files.
void ei_tlmm_top(hls::stream<ei::Configured::Group>& x, hls::stream<ei::Configured::Beat>& w,
                 hls::stream<ei::Configured::Tile>& y, int n_steps, int n_tiles, std::uint64_t* geometry);
