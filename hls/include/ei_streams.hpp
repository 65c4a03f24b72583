// Streams of words of one width made into words of another, and of memory.
#pragma once

#include "ei_types.hpp"

namespace ei {

// In bursts of 4 KiB, the longest that AXI allows, where the interface says max_read_burst_length = 256.
inline void read_lanes(const Lane* from, int n, hls::stream<Lane>& to) {
lanes:
    for (int i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 1
        to.write(from[i]);
    }
}

// The same lanes n_times over.
inline void read_again(const Lane* from, int n, int n_times, hls::stream<Lane>& to) {
times:
    for (int time = 0; time < n_times; time++) read_lanes(from, n, to);
}

inline void write_lanes(hls::stream<Lane>& from, int n, Lane* to) {
lanes:
    for (int i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 1
        to[i] = from.read();
    }
}

// A lane of each port side by side, port 0 lowest: the stream as it was before it was dealt to the ports.
template <int PORTS>
void gather(hls::stream<Lane> (&ports)[PORTS], int n, hls::stream<ap_uint<PORTS * kLaneBits>>& to) {
lanes:
    for (int i = 0; i < n; i++) {
#pragma HLS PIPELINE II = 1
        ap_uint<PORTS * kLaneBits> group = 0;
        for (int p = 0; p < PORTS; p++) {
#pragma HLS UNROLL
            group.range((p + 1) * kLaneBits - 1, p * kLaneBits) = ports[p].read();
        }
        to.write(group);
    }
}

// The bits of n_in words as n_out words of another width, the lowest bits first. Zeros follow the last. Takes in and gives
// out a word in a cycle. n_out words must not need less than all n_in.
template <int IN, int OUT>
void change_width(hls::stream<ap_uint<IN>>& in, int n_in, hls::stream<ap_uint<OUT>>& out, int n_out) {
    ap_uint<IN + OUT> held = 0;  // below OUT bits when a word comes
    int n_held = 0, n_read = 0, n_written = 0;
words:
    while (n_written < n_out) {
#pragma HLS PIPELINE II = 1
        if (n_held < OUT) {
            if (n_read < n_in) held.range(n_held + IN - 1, n_held) = in.read();
            n_read++;
            n_held += IN;
        }
        if (n_held >= OUT) {
            out.write(ap_uint<OUT>(held.range(OUT - 1, 0)));
            held >>= OUT;
            n_held -= OUT;
            n_written++;
        }
    }
}

// Words that keep their width, without the shifter.
template <int W>
void change_width(hls::stream<ap_uint<W>>& in, int n_in, hls::stream<ap_uint<W>>& out, int n_out) {
words:
    for (int i = 0; i < n_out; i++) {
#pragma HLS PIPELINE II = 1
        out.write(i < n_in ? in.read() : ap_uint<W>(0));
    }
}

}  // namespace ei
