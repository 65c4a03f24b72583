// What Python calls to run the kernels (csim.py). Arrays are those of numpy, C-contiguous and little-endian.
#include <exception>
#include <string>
#include <vector>

#include "../src/ei_norm_top.cpp"
#include "../src/ei_tlmm_top.cpp"
#include "words.hpp"
#if EI_PORTS <= 4
#include "../src/ei_linear_axi.cpp"
#if EI_PORTS == 1
#define EI_PORT_DATA(ports) ports[0].data()
#elif EI_PORTS == 2
#define EI_PORT_DATA(ports) ports[0].data(), ports[1].data()
#elif EI_PORTS == 3
#define EI_PORT_DATA(ports) ports[0].data(), ports[1].data(), ports[2].data()
#else
#define EI_PORT_DATA(ports) ports[0].data(), ports[1].data(), ports[2].data(), ports[3].data()
#endif
#endif

namespace {

using Engine = ei::Configured;

std::string& error() {
    static std::string text;
    return text;
}

// 0, or 1 with an error: exceptions do not pass through C.
template <class Run>
int caught(const Run& run) {
    try {
        run();
        return 0;
    } catch (const std::exception& e) {
        error() = e.what();
        return 1;
    }
}

void product(const std::int8_t* x, const std::uint8_t* stream, int n_out, int n_in, std::int32_t* y) {
    hls::stream<Engine::Group> groups("x");
    hls::stream<Engine::Beat> beats("w");
    hls::stream<Engine::Tile> tiles("y");
    const int n_steps = Engine::n_steps(n_in), n_tiles = Engine::n_tiles(n_out);
    ei_tb::write_inputs<Engine>(x, n_in, groups);
    ei_tb::write_words<Engine::Beat>(stream, n_steps * n_tiles, beats);
    std::uint64_t geometry = 0;
    ei_tlmm_top(groups, beats, tiles, n_steps, n_tiles, &geometry);
    ei_tb::read_rows<Engine>(tiles, n_out, y);
    ei_tb::check_empty(groups, "activations");
    ei_tb::check_empty(beats, "weights");
    ei_tb::check_empty(tiles, "sums");
}

// n_tokens rows of n floats, each padded to whole lanes.
std::vector<ei::Lane> lanes_of(const float* values, int n_tokens, int n) {
    std::vector<ei::Lane> lanes;
    for (int token = 0; token < n_tokens; token++, values += n) {
        for (int i = 0; i < ei::n_lanes(n); i++) {
            ei::Lane lane = 0;
            for (int j = 0; j < ei::kFloats; j++) {
                const float value = ei::kFloats * i + j < n ? values[ei::kFloats * i + j] : 0.0f;
                lane.range(32 * j + 31, 32 * j) = ap_uint<32>(ei::bits_of_float(value));
            }
            lanes.push_back(lane);
        }
    }
    return lanes;
}

void norm(const float* x, const float* weight, float epsilon, int n_tokens, int n, std::int8_t* q, float* scales) {
    hls::stream<ei::Lane> rows("x"), weights("weight");
    hls::stream<ei::Quarter> quarters("q");
    hls::stream<float> of_tokens("scale");
    for (const ei::Lane& lane : lanes_of(x, n_tokens, n)) rows.write(lane);
    for (const ei::Lane& lane : lanes_of(weight, 1, n)) weights.write(lane);
    ei_norm_top(rows, weights, epsilon, n_tokens, n, quarters, of_tokens);
    for (int token = 0; token < n_tokens; token++, q += n) {
        scales[token] = of_tokens.read();
        for (int i = 0; i < ei::n_lanes(n); i++) {
            const ei::Quarter quarter = quarters.read();
            for (int j = 0; j < ei::kFloats && ei::kFloats * i + j < n; j++) {
                const ap_int<8> one = ap_uint<8>(quarter.range(8 * j + 7, 8 * j));
                q[ei::kFloats * i + j] = static_cast<std::int8_t>(one.to_int());
            }
        }
    }
    ei_tb::check_empty(rows, "x");
    ei_tb::check_empty(quarters, "activations");
}

#if EI_PORTS <= 4
std::vector<ei::Lane> lanes_of_bytes(const std::uint8_t* bytes, std::size_t n_bytes) {
    std::vector<ei::Lane> lanes(n_bytes / 16);
    for (std::size_t i = 0; i < n_bytes; i++) {
        const int low = 8 * static_cast<int>(i % 16);
        lanes[i / 16].range(low + 7, low) = ap_uint<8>(bytes[i]);
    }
    return lanes;
}

std::uint32_t linear(const float* x, const std::uint8_t* ports, std::size_t port_bytes, const float* scales,
                     int n_tokens, int n_in, int n_out, std::uint64_t geometry, float* y) {
    std::vector<ei::Lane> weights[ei::kPorts];
    for (int p = 0; p < ei::kPorts; p++) {
        weights[p] = lanes_of_bytes(ports + static_cast<std::size_t>(p) * port_bytes, port_bytes);
    }
    const std::vector<ei::Lane> rows = lanes_of(x, n_tokens, n_in), factors = lanes_of(scales, 1, n_out);
    const int n = ei::n_lanes(n_out);
    std::vector<ei::Lane> results(static_cast<std::size_t>(n_tokens * n));
    std::uint64_t of_engine = 0;
    std::uint32_t status = 0;
    ei_linear_axi(EI_PORT_DATA(weights), rows.data(), factors.data(), results.data(), n_tokens, n_in, n_out, geometry,
                  &of_engine, &status);
    for (int i = 0; status == ei::kDone && i < n_tokens * n_out; i++) {
        const int row = i % n_out;
        y[i] = ei::float_at(results[static_cast<std::size_t>(i / n_out * n + row / ei::kFloats)], row % ei::kFloats);
    }
    return status;
}
#endif

}  // namespace

extern "C" {

const char* ei_csim_error() { return error().c_str(); }

std::uint64_t ei_csim_geometry() { return ei::kGeometryHash; }

// x: (n_in,). stream: bytes of hls/packing.py. y: (n_out,).
int ei_csim_product(const std::int8_t* x, const std::uint8_t* stream, int n_out, int n_in, std::int32_t* y) {
    return caught([&] { product(x, stream, n_out, n_in, y); });
}

// x: (n_tokens, n). weight: (n,). q: (n_tokens, n). scales: (n_tokens,).
int ei_csim_norm(const float* x, const float* weight, float epsilon, int n_tokens, int n, std::int8_t* q,
                 float* scales) {
    return caught([&] { norm(x, weight, epsilon, n_tokens, n, q, scales); });
}

#if EI_PORTS <= 4
// x: (n_tokens, n_in). ports: (n_ports, port_bytes). scales: (n_out,). y: (n_tokens, n_out). status: ei::Status.
int ei_csim_linear(const float* x, const std::uint8_t* ports, std::size_t port_bytes, const float* scales, int n_tokens,
                   int n_in, int n_out, std::uint64_t geometry, float* y, std::uint32_t* status) {
    return caught([&] { *status = linear(x, ports, port_bytes, scales, n_tokens, n_in, n_out, geometry, y); });
}
#endif
}
