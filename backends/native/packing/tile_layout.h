// Where the tiles of matrix.h keep things, and the numbers that their codes and scales stand for: what packing and reading
// rows have in common. The same functions make floats of GGUF's blocks and of tiles, so that both give the same bits.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/float16.h"
#include "kernels/matrix.h"

inline float read_f16(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, sizeof h);
    return f16_to_f32(h);
}

inline float read_bf16(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, sizeof h);
    return std::bit_cast<float>(static_cast<uint32_t>(h) << 16);
}

static_assert(std::endian::native == std::endian::little);  // of words, the first byte is the first code

inline uint32_t word_at(const uint8_t* p) {
    uint32_t word;
    std::memcpy(&word, p, 4);
    return word;
}

// 32 codes of one row, four a word, a byte each.
using Codes = uint32_t[8];

inline int code_at(const Codes& codes, int i) { return static_cast<int>(codes[i / 4] >> 8 * (i % 4) & 255); }

// ---- blocks of 32 --------------------------------------------------------------------------------------------------

// Where GGUF's blocks of 32 keep things: f16 d, f16 m (if any), 32 bits of fifth bits (if any), codes.
struct Block32 {
    int bits;
    int offset;  // of the stored code above the weight's
    bool min;

    size_t high_at() const { return min ? 4 : 2; }
    size_t codes_at() const { return high_at() + (bits == 5 ? 4 : 0); }
    size_t n_bytes() const { return codes_at() + (bits == 8 ? 32 : 16); }
    size_t lines() const { return bits == 8 ? 512 : bits == 5 ? 320 : 256; }
    // Where block b of a row group has its scales and its codes, when packed.
    size_t scales_at(size_t b) const { return min ? b * (64 + lines()) : b / 2 * (64 + 2 * lines()) + b % 2 * 32; }
    size_t lines_at(size_t b) const {
        return 64 + (min ? b * (64 + lines()) : b / 2 * (64 + 2 * lines()) + b % 2 * lines());
    }

    // Its 32 weights. m: 0 where it has none.
    float* weights(float d, float m, const Codes& codes, float* out) const {
        for (int i = 0; i < 32; i++) {
            const float value = d * static_cast<float>(code_at(codes, i) - offset);
            *out++ = min ? value + m : value;
        }
        return out;
    }
};

inline Block32 block32(Format format) {
    switch (format) {
        case Format::Q4_0: return {4, 8, false};
        case Format::Q4_1: return {4, 0, true};
        case Format::Q5_0: return {5, 16, false};
        case Format::Q5_1: return {5, 0, true};
        default: return {8, 128, false};
    }
}

// GGUF's MXFP4: the exponent, 16 bytes of codes as in Q4_0.
constexpr size_t kBytesMxfp4 = 17, kLinesMxfp4 = 256, kGroupMxfp4 = 64 + kMxfp4Together * kLinesMxfp4;

inline float* weights_of_mxfp4(uint8_t e, const Codes& codes, float* out) {
    const float scale = std::bit_cast<float>(e < 2 ? uint32_t{0x00200000} << e : static_cast<uint32_t>(e - 1) << 23);
    for (int i = 0; i < 32; i++) *out++ = scale * static_cast<float>(kMxfp4Codes[code_at(codes, i)] - kMxfp4Offset);
    return out;
}

// ---- tiles of 256 --------------------------------------------------------------------------------------------------

constexpr size_t tile_bytes_45k(int bits) { return bits == 5 ? 256 + 8 * 320 : 256 + 8 * 256; }
constexpr size_t kTileBytes6K = 3392, kTileBytes2K = 1344, kTileBytes3K = 1728;

// Where row groups keep tile b of Q3_K, and its d.
constexpr size_t tile_at_3k(size_t b) { return b / 2 * (64 + 2 * kTileBytes3K) + 64 + b % 2 * kTileBytes3K; }
constexpr size_t factor_at_3k(size_t b) { return b / 2 * (64 + 2 * kTileBytes3K) + b % 2 * 32; }

// Four weights of Q2_K. scale: low four bits scale, high four min.
inline float* weights_of_2k(float d, float dmin, uint8_t scale, uint32_t codes, float* out) {
    const float step = d * static_cast<float>(scale & 15), min = dmin * static_cast<float>(scale >> 4);
    for (int i = 0; i < 32; i += 8) *out++ = step * static_cast<float>(codes >> i & 3) - min;
    return out;
}

// Four weights of Q3_K, whose codes stand 4 above the true ones.
inline float* weights_of_3k(float d, int scale, uint32_t codes, float* out) {
    const float step = d * static_cast<float>(scale);
    for (int i = 0; i < 32; i += 8) *out++ = step * static_cast<float>(static_cast<int>(codes >> i & 7) - 4);
    return out;
}

// The 32 weights of a sub-block of Q4_K and Q5_K.
inline float* weights_of_45k(float d, float dmin, uint8_t scale, uint8_t min, const Codes& codes, float* out) {
    for (int i = 0; i < 32; i++) *out++ = d * scale * code_at(codes, i) - dmin * min;
    return out;
}

// Four weights of Q6_K, whose codes stand 32 above the true ones.
inline float* weights_of_6k(float d, uint8_t scale_byte, uint32_t codes, float* out) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(scale_byte));
    for (int i = 0; i < 32; i += 8) *out++ = scale * static_cast<float>(static_cast<int>(codes >> i & 63) - 32);
    return out;
}

// ---- ternary -------------------------------------------------------------------------------------------------------

constexpr int kBaseThreeInputs = 20;   // of a line
constexpr int kBaseThreeCentre = 121;  // of the sums of five codes, which stand one above the weights

constexpr size_t base_three_bytes(int n_inputs) {
    return static_cast<size_t>((n_inputs + kBaseThreeInputs - 1) / kBaseThreeInputs) * 64;
}

// Where row groups keep blocks of ternary weights.
struct TernaryTiles {
    int n_inputs;  // of a block
    bool base_three;

    size_t lines() const { return base_three ? base_three_bytes(n_inputs) : 4 * static_cast<size_t>(n_inputs); }
    size_t scales_at(size_t b) const { return b / 2 * (64 + 2 * lines()) + b % 2 * 32; }
    size_t lines_at(size_t b) const { return b / 2 * (64 + 2 * lines()) + 64 + b % 2 * lines(); }
};

inline TernaryTiles ternary_tiles(Format format) {
    return {format == Format::Q2_0 ? 64 : 256, format == Format::TQ_BASE_THREE};
}

// code: one above the weight.
inline float ternary_weight(float d, int code) { return d * static_cast<float>(code - 1); }
