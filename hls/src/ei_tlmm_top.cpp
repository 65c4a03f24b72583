#include "ei_tlmm_top.hpp"

void ei_tlmm_top(hls::stream<ei::Configured::Group>& x, hls::stream<ei::Configured::Beat>& w,
                 hls::stream<ei::Configured::Tile>& y, int n_steps, int n_tiles, std::uint64_t* geometry) {
#pragma HLS INTERFACE mode = axis port = x
#pragma HLS INTERFACE mode = axis port = w
#pragma HLS INTERFACE mode = axis port = y
#pragma HLS INTERFACE mode = s_axilite port = n_steps
#pragma HLS INTERFACE mode = s_axilite port = n_tiles
#pragma HLS INTERFACE mode = s_axilite port = geometry
#pragma HLS INTERFACE mode = s_axilite port = return
    *geometry = ei::kGeometryHash;
    ei::tlmm<ei::Configured>(x, w, y, n_steps, n_tiles);
}
