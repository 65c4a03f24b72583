// What Python calls to run the kernels (csim.py). Arrays are those of numpy, C-contiguous and little-endian.
#include <cstring>
#include <exception>
#include <string>

#include "../src/ei_tlmm_top.cpp"
#include "words.hpp"

namespace {

using E = ei::Configured;

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
    hls::stream<E::Group> groups("x");
    hls::stream<E::Beat> beats("w");
    hls::stream<E::Tile> tiles("y");
    const int n_steps = E::n_steps(n_in), n_tiles = E::n_tiles(n_out);
    ei_tb::write_inputs<E>(x, n_in, groups);
    ei_tb::write_words<E::Beat>(stream, n_steps * n_tiles, beats);
    std::uint64_t geometry = 0;
    ei_tlmm_top(groups, beats, tiles, n_steps, n_tiles, &geometry);
    ei_tb::read_rows<E>(tiles, n_out, y);
    ei_tb::check_empty(groups, "activations");
    ei_tb::check_empty(beats, "weights");
    ei_tb::check_empty(tiles, "sums");
}

}  // namespace

extern "C" {

const char* ei_csim_error() { return error().c_str(); }

std::uint64_t ei_csim_geometry() { return ei::kGeometryHash; }

// x: (n_in,). stream: bytes of hls/packing.py. y: (n_out,).
int ei_csim_product(const std::int8_t* x, const std::uint8_t* stream, int n_out, int n_in, std::int32_t* y) {
    return caught([&] { product(x, stream, n_out, n_in, y); });
}
}
