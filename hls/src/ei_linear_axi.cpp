#include "ei_linear_axi.hpp"

namespace {

using E = ei::Configured;
constexpr int kGroupBits = ei::kPorts * ei::kLaneBits;

// Lanes of each port that hold the beats of a matrix: `stream_bytes` of hls/geometry.py.
int port_lanes(int n_in, int n_out) {
    const std::int64_t bits = static_cast<std::int64_t>(E::n_steps(n_in)) * E::n_tiles(n_out) * E::Beat::width;
    return static_cast<int>((bits + kGroupBits - 1) / kGroupBits);
}

void gather_beats(hls::stream<ei::Lane> (&ports)[ei::kPorts], int n_tokens, int n_in, int n_out,
                  hls::stream<ap_uint<kGroupBits>>& groups) {
tokens:
    for (int token = 0; token < n_tokens; token++) ei::gather<ei::kPorts>(ports, port_lanes(n_in, n_out), groups);
}

void cut_beats(hls::stream<ap_uint<kGroupBits>>& groups, int n_tokens, int n_in, int n_out,
               hls::stream<E::Beat>& beats) {
tokens:
    for (int token = 0; token < n_tokens; token++) {
        ei::change_width(groups, port_lanes(n_in, n_out), beats, E::n_steps(n_in) * E::n_tiles(n_out));
    }
}

// All stages at once: each is a process, and streams hold them together.
void run(EI_PORT_PARAMETERS, const ei::Lane* x, const ei::Lane* scales, ei::Lane* y, int n_tokens, int n_in,
         int n_out) {
#pragma HLS DATAFLOW
    hls::stream<ei::Lane> ports[ei::kPorts];
    hls::stream<ap_uint<kGroupBits>> groups("weights of all ports");
    hls::stream<E::Beat> beats("weights");
    hls::stream<ei::Lane> x_lanes("x"), scale_lanes("scales"), y_lanes("y");
    hls::stream<ei::Quarter> q("activations");
    hls::stream<float> x_scale("scales of activations");
#pragma HLS STREAM variable = ports depth = 512
#pragma HLS STREAM variable = groups depth = 16
#pragma HLS STREAM variable = beats depth = 16
#pragma HLS STREAM variable = scale_lanes depth = 512
    const int n_lanes = port_lanes(n_in, n_out);
    ei::read_again(port0, n_lanes, n_tokens, ports[0]);
#if EI_PORTS > 1
    ei::read_again(port1, n_lanes, n_tokens, ports[1]);
#endif
#if EI_PORTS > 2
    ei::read_again(port2, n_lanes, n_tokens, ports[2]);
#endif
#if EI_PORTS > 3
    ei::read_again(port3, n_lanes, n_tokens, ports[3]);
#endif
    gather_beats(ports, n_tokens, n_in, n_out, groups);
    cut_beats(groups, n_tokens, n_in, n_out, beats);
    ei::read_lanes(x, n_tokens * ei::n_lanes(n_in), x_lanes);
    ei::read_again(scales, ei::n_lanes(n_out), n_tokens, scale_lanes);
    ei::quantise<E::kMaxIn>(x_lanes, n_tokens, n_in, q, x_scale);
    ei::linear<E>(q, x_scale, beats, scale_lanes, n_tokens, n_in, n_out, y_lanes);
    ei::write_lanes(y_lanes, n_tokens * ei::n_lanes(n_out), y);
}

}  // namespace

void ei_linear_axi(EI_PORT_PARAMETERS, const ei::Lane* x, const ei::Lane* scales, ei::Lane* y, int n_tokens, int n_in,
                   int n_out, std::uint64_t geometry_of_weights, std::uint64_t* geometry, std::uint32_t* status) {
#pragma HLS INTERFACE mode = m_axi port = port0 bundle = weights0 offset = slave max_read_burst_length = 256
#if EI_PORTS > 1
#pragma HLS INTERFACE mode = m_axi port = port1 bundle = weights1 offset = slave max_read_burst_length = 256
#endif
#if EI_PORTS > 2
#pragma HLS INTERFACE mode = m_axi port = port2 bundle = weights2 offset = slave max_read_burst_length = 256
#endif
#if EI_PORTS > 3
#pragma HLS INTERFACE mode = m_axi port = port3 bundle = weights3 offset = slave max_read_burst_length = 256
#endif
#pragma HLS INTERFACE mode = m_axi port = x bundle = activations offset = slave max_read_burst_length = 256
#pragma HLS INTERFACE mode = m_axi port = scales bundle = scales offset = slave max_read_burst_length = 256
#pragma HLS INTERFACE mode = m_axi port = y bundle = activations offset = slave max_write_burst_length = 256
#pragma HLS INTERFACE mode = s_axilite port = n_tokens
#pragma HLS INTERFACE mode = s_axilite port = n_in
#pragma HLS INTERFACE mode = s_axilite port = n_out
#pragma HLS INTERFACE mode = s_axilite port = geometry_of_weights
#pragma HLS INTERFACE mode = s_axilite port = geometry
#pragma HLS INTERFACE mode = s_axilite port = status
#pragma HLS INTERFACE mode = s_axilite port = return
    *geometry = ei::kGeometryHash;
    if (geometry_of_weights != ei::kGeometryHash) {
        *status = ei::kWrongGeometry;
        return;
    }
    if (n_in < 1 || n_in > E::kMaxIn || n_out < 1 || n_out > E::kMaxOut) {  // without inputs it would wait for ever
        *status = ei::kWrongSize;
        return;
    }
    run(EI_PORT_NAMES, x, scales, y, n_tokens, n_in, n_out);
    *status = ei::kDone;
}
