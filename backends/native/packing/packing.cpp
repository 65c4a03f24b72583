#include "packing/packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/float16.h"
#include "packing/tile_layout.h"

namespace {

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Writes them into the lines of a block of 32.
void place_codes(int bits, const Codes& codes, int row, uint8_t* lines) {
    const auto place = [&](uint32_t word) {
        std::memcpy(lines + 4 * row, &word, 4);
        lines += 64;
    };
    if (bits == 8) {
        for (const uint32_t word : codes) place(word);
        return;
    }
    if (bits == 5) {
        const auto low = [&](int i) { return (codes[i] & 0x07070707) << 5; };
        const auto high = [&](int i) { return (codes[i] & 0x18181818) << 2; };
        place(codes[0] | low(2));
        place(codes[1] | high(2) | (codes[7] & 0x08080808) << 4);
        place(codes[3] | low(5));
        place(codes[4] | high(5) | (codes[7] & 0x10101010) << 3);
        place(codes[6] | low(7));
        return;
    }
    for (int i = 0; i < 4; i++) place((codes[i] & 0x0f0f0f0f) | (codes[4 + i] & 0x0f0f0f0f) << 4);
}

// 16 bytes: low nibbles 0..15, high nibbles 16..31.
void codes_of_nibbles(const uint8_t* stored, Codes& codes) {
    for (int i = 0; i < 4; i++) {
        codes[i] = word_at(stored + 4 * i) & 0x0f0f0f0f;
        codes[4 + i] = word_at(stored + 4 * i) >> 4 & 0x0f0f0f0f;
    }
}

void codes_of_block32(const Block32& layout, const uint8_t* block, Codes& codes) {
    const uint8_t* stored = block + layout.codes_at();
    if (layout.bits == 8) {
        for (int i = 0; i < 8; i++) codes[i] = word_at(stored + 4 * i) ^ 0x80808080;  // signed to 128 above
        return;
    }
    codes_of_nibbles(stored, codes);
    if (layout.bits == 5) {
        const uint32_t high = word_at(block + layout.high_at());
        for (int i = 0; i < 8; i++) codes[i] |= ((high >> 4 * i & 15) * 0x00204081 & 0x01010101) << 4;  // a bit a byte
    }
}

void pack_row_block32(const Block32& layout, const uint8_t* source, int n_in, int row, uint8_t* group) {
    for (size_t b = 0; b < static_cast<size_t>(n_in) / 32; b++) {
        Codes codes;
        codes_of_block32(layout, source, codes);
        place_codes(layout.bits, codes, row, group + layout.lines_at(b));
        uint8_t* scales = group + layout.scales_at(b);
        std::memcpy(scales + 2 * row, source, 2);
        if (layout.min) std::memcpy(scales + 32 + 2 * row, source + 2, 2);
        source += layout.n_bytes();
    }
}

void pack_row_mxfp4(const uint8_t* source, int n_in, int row, uint8_t* group) {
    for (size_t b = 0; b < static_cast<size_t>(n_in) / 32; b++) {
        Codes codes;
        codes_of_nibbles(source + 1, codes);
        uint8_t* exponents = group + b / kMxfp4Together * kGroupMxfp4;
        exponents[b % kMxfp4Together * kRows + static_cast<size_t>(row)] = source[0];
        place_codes(4, codes, row, exponents + 64 + b % kMxfp4Together * kLinesMxfp4);
        source += kBytesMxfp4;
    }
}

size_t group_bytes_of_mxfp4(size_t n_in) {
    const size_t n_blocks = n_in / 32;
    return (n_blocks + kMxfp4Together - 1) / kMxfp4Together * 64 + n_blocks * kLinesMxfp4;
}

// GGUF's Q4_K and Q5_K: f16 d, f16 dmin, 12 bytes of 6-bit scales and mins, 32 bytes of fifth bits (Q5_K), 128 nibbles.
constexpr size_t kBytes4K = 144, kBytes5K = 176, kBytes6K = 210;

void scale_and_min(const uint8_t* packed, int j, uint8_t& scale, uint8_t& min) {
    if (j < 4) {
        scale = packed[j] & 63;
        min = packed[j + 4] & 63;
    } else {
        scale = static_cast<uint8_t>((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4);
        min = static_cast<uint8_t>((packed[j + 4] >> 4) | (packed[j] >> 6) << 4);
    }
}

// The 32 codes of sub-block j.
void codes_of_block45k(int bits, const uint8_t* block, int j, Codes& codes) {
    const uint8_t* nibbles = block + (bits == 5 ? 48 : 16) + 32 * (j / 2);
    for (int i = 0; i < 8; i++) {
        codes[i] = word_at(nibbles + 4 * i) >> (j % 2 ? 4 : 0) & 0x0f0f0f0f;
        if (bits == 5) codes[i] |= (word_at(block + 16 + 4 * i) >> j & 0x01010101) << 4;
    }
}

void put_bits(uint8_t& byte, int at, int n_bits, int value) {
    const int mask = ((1 << n_bits) - 1) << at;
    byte = static_cast<uint8_t>((byte & ~mask) | (value << at & mask));
}

// Six bits of the ith of 256 scales and mins that are kept in 192 bytes.
void place_six_bits(uint8_t value, int i, uint8_t* lines) {
    if (i < 192) return put_bits(lines[i], 0, 6, value);
    for (int u = 0; u < 3; u++) put_bits(lines[64 * u + i - 192], 6, 2, value >> 2 * u);
}

void pack_row_45k(int bits, const uint8_t* source, int n_in, int row, uint8_t* tile) {
    const size_t lines = bits == 5 ? 320 : 256;
    for (int b = 0; b < n_in / 256; b++) {
        std::memcpy(tile + 2 * row, source, 2);
        std::memcpy(tile + 32 + 2 * row, source + 2, 2);
        for (int j = 0; j < 8; j++) {
            uint8_t scale, min;
            scale_and_min(source + 4, j, scale, min);
            place_six_bits(scale, 16 * j + row, tile + 64);
            place_six_bits(min, 128 + 32 * (j / 2) + 2 * row + j % 2, tile + 64);
            Codes codes;
            codes_of_block45k(bits, source, j, codes);
            place_codes(bits, codes, row, tile + 256 + lines * static_cast<size_t>(j));
        }
        source += bits == 5 ? kBytes5K : kBytes4K;
        tile += tile_bytes_45k(bits);
    }
}

// GGUF's Q2_K: 16 bytes of 4-bit scales and mins, 64 bytes of codes, f16 d, f16 dmin. Q3_K: 32 bytes of third bits, 64 bytes
// of codes, 12 bytes of 6-bit scales, f16 d.
constexpr size_t kBytes2K = 84, kBytes3K = 110;

// The low two bits of four codes from input k on, a multiple of 4, a byte each.
uint32_t two_bits_at(const uint8_t* codes, int k) {
    return word_at(codes + 32 * (k / 128) + k % 32) >> (k % 128 / 32 * 2) & 0x03030303;
}

uint32_t codes_of_block3k(const uint8_t* block, int k) {
    return two_bits_at(block + 32, k) | (word_at(block + k % 32) >> (k / 32) & 0x01010101) << 2;
}

// Scale j of Q3_K, signed.
int scale_of_block3k(const uint8_t* block, int j) {
    const uint8_t* packed = block + 96;
    return ((packed[j % 8] >> (j / 8 * 4) & 15) | (packed[8 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32;
}

void pack_row_2k(const uint8_t* source, int n_in, int row, uint8_t* tile) {
    for (int b = 0; b < n_in / 256; b++) {
        std::memcpy(tile + 2 * row, source + 80, 2);
        std::memcpy(tile + 32 + 2 * row, source + 82, 2);
        for (int j = 0; j < 16; j++) {
            tile[64 + 32 * (j / 2) + 2 * row + j % 2] = source[j];
            uint32_t line = 0;
            for (int u = 0; u < 4; u++) line |= two_bits_at(source + 16, 16 * j + 4 * u) << 2 * u;
            std::memcpy(tile + 320 + 64 * j + 4 * row, &line, 4);
        }
        source += kBytes2K;
        tile += kTileBytes2K;
    }
}

// The ith of 256 signed scales that are kept in 192 bytes.
void place_high_six_bits(int scale, int i, uint8_t* lines) {
    if (i < 192) return put_bits(lines[i], 2, 6, scale);
    for (int u = 0; u < 3; u++) put_bits(lines[64 * u + i - 192], 0, 2, scale >> 2 * u);
}

void pack_row_3k(const uint8_t* source, int n_in, int row, uint8_t* group) {
    for (size_t b = 0; b < static_cast<size_t>(n_in) / 256; b++) {
        std::memcpy(group + factor_at_3k(b) + 2 * row, source + 108, 2);
        uint8_t* tile = group + tile_at_3k(b);
        for (int j = 0; j < 16; j++) {
            place_high_six_bits(scale_of_block3k(source, j), 32 * (j / 2) + 2 * row + j % 2, tile);
        }
        for (int p = 0; p < 8; p++) {
            const auto code = [&](int i) { return codes_of_block3k(source, 32 * p + 4 * i); };
            const uint32_t low = (code(6) & 0x01010101) << 6 | (code(7) & 0x01010101) << 7;
            const uint32_t last[3] = {(code(6) & 0x06060606) << 5, (code(7) & 0x06060606) << 5, low};
            for (int u = 0; u < 3; u++) {
                const uint32_t line = code(2 * u) << 3 | code(2 * u + 1) | last[u];
                std::memcpy(tile + 192 + 192 * p + 64 * u + 4 * row, &line, 4);
            }
        }
        source += kBytes3K;
    }
}

// GGUF's Q6_K: 128 bytes of low nibbles, 64 of top bits, 16 int8 scales, f16 d. Four codes from input k on, a multiple of
// 4, a byte each; they are 32 above the true ones.
uint32_t codes_of_block6k(const uint8_t* block, int k) {
    const int n = k / 128, g = k % 128 / 32, i = k % 32;
    const uint32_t low = word_at(block + 64 * n + 32 * (g & 1) + i) >> (g < 2 ? 0 : 4) & 0x0f0f0f0f;
    return low | (word_at(block + 128 + 32 * n + i) >> (2 * g) & 0x03030303) << 4;
}

void pack_row_6k(const uint8_t* source, int n_in, int row, uint8_t* tile) {
    for (int b = 0; b < n_in / 256; b++) {
        std::memcpy(tile + 2 * row, source + 208, 2);
        for (int j = 0; j < 16; j++) {
            tile[64 + 32 * (j / 2) + 2 * row + j % 2] = source[192 + j];
            const uint32_t last = codes_of_block6k(source, 16 * j + 12);
            for (int u = 0; u < 3; u++) {
                const uint32_t line = codes_of_block6k(source, 16 * j + 4 * u) | (last >> 2 * u & 0x03030303) << 6;
                std::memcpy(tile + 320 + 192 * j + 64 * u + 4 * row, &line, 4);
            }
        }
        source += kBytes6K;
        tile += kTileBytes6K;
    }
}

// Ternary codes, one above the weights. I2_S: runs of 128 in 32 bytes, the first in the top bits. TQ2_0: runs of 128 in 32
// bytes, the first in the low bits; behind each 256 their f16 d. TQ1_0: five digits of base three in each of 32 and then of
// 16 bytes, four in each of 4, f16 d; a byte is ceil(256 v / 243), so multiplying by 3 carries the first digit out. Q2_0:
// before each 64 their f16 d, then four to a byte, the first in the low bits.
constexpr size_t kBytesTQ1 = 54, kBytesTQ2 = 66, kBytesI2 = 32, kBytesQ2 = 18;

uint8_t digit_of_byte(uint8_t byte, int n) {
    constexpr int kPowers[5] = {1, 3, 9, 27, 81};
    return static_cast<uint8_t>((static_cast<uint8_t>(byte * kPowers[n]) * 3) >> 8);
}

uint8_t code_of_tq1(const uint8_t* block, int k) {
    if (k < 160) return digit_of_byte(block[k % 32], k / 32);
    if (k < 240) return digit_of_byte(block[32 + k % 16], (k - 160) / 16);
    return digit_of_byte(block[48 + k % 4], (k - 240) / 4);
}

uint8_t code_of_tq2(const uint8_t* block, int k) { return (block[32 * (k / 128) + k % 32] >> (k % 128 / 32 * 2)) & 3; }

uint8_t code_of_q2(const uint8_t* block, int k) { return (block[2 + k / 4] >> (k % 4 * 2)) & 3; }

uint8_t code_of_i2(const uint8_t* row, int k) { return (row[32 * (k / 128) + k % 32] >> (6 - k % 128 / 32 * 2)) & 3; }

// Writes n codes of one row, a multiple of 16, in two bits.
template <class CodeAt>
void place_two_bits(int n, const CodeAt& code_at, int row, uint8_t* lines) {
    for (int first = 0; first < n; first += 16, lines += 64) {
        for (int k = first; k < first + 4; k++) {
            lines[4 * row + k - first] =
                static_cast<uint8_t>(code_at(k) | code_at(k + 4) << 2 | code_at(k + 8) << 4 | code_at(k + 12) << 6);
        }
    }
}

// Writes n codes of one row in base three. Those behind the last one are 0.
template <class CodeAt>
void place_base_three(int n, const CodeAt& code_at, int row, uint8_t* lines) {
    for (int first = 0; first < n; first += kBaseThreeInputs, lines += 64) {
        for (int c = 0; c < 4; c++) {
            int value = 0;
            for (int k = first + 16 + c; k >= first; k -= 4) value = 3 * value + (k < n ? code_at(k) : 0);
            value -= kBaseThreeCentre;
            lines[4 * row + c] = static_cast<uint8_t>(value < 0 ? 0x80 | -value : value);
        }
    }
}

// Where blocks of ternary weights keep things, and where row groups do.
struct TernaryBlock {
    TernaryTiles tiles;
    size_t n_bytes, scale_at;
    uint8_t (*code_of)(const uint8_t* block, int k);
};

TernaryBlock ternary_block(Format of, Format as) {
    const TernaryTiles tiles = ternary_tiles(as);
    switch (of) {
        case Format::TQ1_0: return {tiles, kBytesTQ1, kBytesTQ1 - 2, code_of_tq1};
        case Format::TQ2_0: return {tiles, kBytesTQ2, kBytesTQ2 - 2, code_of_tq2};
        default: return {tiles, kBytesQ2, 0, code_of_q2};
    }
}

void pack_row_ternary(const TernaryBlock& layout, const uint8_t* source, int n_in, int row, uint8_t* group) {
    const TernaryTiles& tiles = layout.tiles;
    for (size_t b = 0; b < static_cast<size_t>(n_in / tiles.n_inputs); b++) {
        std::memcpy(group + tiles.scales_at(b) + 2 * row, source + layout.scale_at, 2);
        uint8_t* lines = group + tiles.lines_at(b);
        const auto code_at = [&](int k) { return layout.code_of(source, k); };
        if (tiles.base_three) {
            place_base_three(tiles.n_inputs, code_at, row, lines);
        } else {
            place_two_bits(tiles.n_inputs, code_at, row, lines);
        }
        source += layout.n_bytes;
    }
}

// The scale once a row; rows past n_out have weights of 0.
void pack_group_i2(Format as, const uint8_t* source, float scale, int n_out, int n_in, int g, uint8_t* group) {
    const bool base_three = as == Format::I2_S_BASE_THREE;
    const size_t row_bytes = static_cast<size_t>(n_in) / 4;
    std::memset(group, 0, 64);
    std::memset(group + 64, base_three ? 0 : 0x55, packed_group_bytes(as, n_in) - 64);
    for (int r = 0; r < kRows && g * kRows + r < n_out; r++) {
        const uint8_t* row = source + static_cast<size_t>(g * kRows + r) * row_bytes;
        std::memcpy(group + 4 * r, &scale, 4);
        const auto code_at = [row](int k) { return code_of_i2(row, k); };
        if (base_three) {
            place_base_three(n_in, code_at, r, group + 64);
        } else {
            place_two_bits(n_in, code_at, r, group + 64);
        }
    }
}

void pack_row_floats(size_t width, const uint8_t* source, int n_in, int row, uint8_t* group) {
    for (int k = 0; k < n_in; k++) {
        std::memcpy(group + (static_cast<size_t>(k) * kRows + static_cast<size_t>(row)) * width, source, width);
        source += width;
    }
}

void pack_row(Format of, Format as, const uint8_t* source, int n_in, int row, uint8_t* group) {
    switch (of) {
        case Format::F32: return pack_row_floats(4, source, n_in, row, group);
        case Format::F16:
        case Format::BF16: return pack_row_floats(2, source, n_in, row, group);
        case Format::Q2_K: return pack_row_2k(source, n_in, row, group);
        case Format::Q3_K: return pack_row_3k(source, n_in, row, group);
        case Format::Q4_K: return pack_row_45k(4, source, n_in, row, group);
        case Format::Q5_K: return pack_row_45k(5, source, n_in, row, group);
        case Format::Q6_K: return pack_row_6k(source, n_in, row, group);
        case Format::TQ1_0:
        case Format::TQ2_0:
        case Format::Q2_0: return pack_row_ternary(ternary_block(of, as), source, n_in, row, group);
        case Format::MXFP4: return pack_row_mxfp4(source, n_in, row, group);
        default: return pack_row_block32(block32(of), source, n_in, row, group);
    }
}

size_t row_bytes(Format format, int n_in) {
    int n_inputs = 1;
    size_t n_bytes = 0;
    block_size(static_cast<int>(format), n_inputs, n_bytes);
    return n_bytes * static_cast<size_t>(n_in / n_inputs);
}

void dequantize_45k(int bits, const uint8_t* block, int n_in, float* out) {
    for (int b = 0; b < n_in / 256; b++) {
        const float d = read_f16(block), dmin = read_f16(block + 2);
        for (int j = 0; j < 8; j++) {
            uint8_t scale, min;
            Codes codes;
            scale_and_min(block + 4, j, scale, min);
            codes_of_block45k(bits, block, j, codes);
            out = weights_of_45k(d, dmin, scale, min, codes, out);
        }
        block += bits == 5 ? kBytes5K : kBytes4K;
    }
}

void dequantize_6k(const uint8_t* block, int n_in, float* out) {
    for (int b = 0; b < n_in / 256; b++) {
        const float d = read_f16(block + 208);
        for (int k = 0; k < 256; k += 4) out = weights_of_6k(d, block[192 + k / 16], codes_of_block6k(block, k), out);
        block += kBytes6K;
    }
}

void dequantize_2k(const uint8_t* block, int n_in, float* out) {
    for (int b = 0; b < n_in / 256; b++) {
        const float d = read_f16(block + 80), dmin = read_f16(block + 82);
        for (int k = 0; k < 256; k += 4) {
            out = weights_of_2k(d, dmin, block[k / 16], two_bits_at(block + 16, k), out);
        }
        block += kBytes2K;
    }
}

void dequantize_3k(const uint8_t* block, int n_in, float* out) {
    for (int b = 0; b < n_in / 256; b++) {
        const float d = read_f16(block + 108);
        for (int k = 0; k < 256; k += 4) {
            out = weights_of_3k(d, scale_of_block3k(block, k / 16), codes_of_block3k(block, k), out);
        }
        block += kBytes3K;
    }
}

void dequantize_mxfp4(const uint8_t* block, int n_in, float* out) {
    for (int b = 0; b < n_in / 32; b++) {
        Codes codes;
        codes_of_nibbles(block + 1, codes);
        out = weights_of_mxfp4(block[0], codes, out);
        block += kBytesMxfp4;
    }
}

void dequantize_ternary(const TernaryBlock& layout, const uint8_t* block, int n_in, float* out) {
    for (int b = 0; b < n_in / layout.tiles.n_inputs; b++) {
        const float d = read_f16(block + layout.scale_at);
        for (int k = 0; k < layout.tiles.n_inputs; k++) *out++ = ternary_weight(d, layout.code_of(block, k));
        block += layout.n_bytes;
    }
}

float largest_of(const float* weights) {
    float largest = weights[0];
    for (int i = 1; i < 32; i++) {
        if (std::abs(weights[i]) > std::abs(largest)) largest = weights[i];
    }
    return largest;
}

// 32 weights as d * (code - 8), as ggml rounds: d takes the largest one to -8, which has no counterpart.
void round_to_q4_0(const float* weights, uint8_t* block) {
    const float largest = largest_of(weights);
    const float each = largest / -8.0f, inverse = each ? 1.0f / each : 0.0f;
    const uint16_t d = f32_to_f16(each);
    const auto code = [&](int i) {
        const float x = weights[i] * inverse + 8.5f;
        return x > 0.0f ? static_cast<int>(std::min(x, 15.0f)) : 0;  // what is not a number too
    };
    std::memcpy(block, &d, sizeof d);
    for (int i = 0; i < 16; i++) block[2 + i] = static_cast<uint8_t>(code(i) | code(16 + i) << 4);
}

// 32 weights as codes times each, with the least and the most that a code can be; gives the squared error.
float fit_codes(const float* weights, float each, float least, float most, float* codes) {
    constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: what is added to it keeps no fraction, rounded to even
    const float divisor = each != 0.0f ? each : std::numeric_limits<float>::infinity();
    float errors[8] = {};
    for (int first = 0; first < 32; first += 8) {
        for (int i = 0; i < 8; i++) {
            const float weight = weights[first + i], code = std::min(most, std::max(least, weight / divisor));
            const float whole = (code + kToInteger) - kToInteger, error = whole * each - weight;
            codes[first + i] = whole;
            errors[i] += error * error;
        }
    }
    return std::accumulate(errors, errors + 8, 0.0f);
}

// The same as above with that one of some scales that has the smallest squared error, in more than ten times as long:
// models/formats/q4_0.h.
void fit_q4_0(const float* weights, uint8_t* block) {
    const float largest = largest_of(weights) / -8.0f;
    float codes[32], best[32] = {}, least = std::numeric_limits<float>::infinity();
    uint16_t d = 0;
    for (int step = 0; step < 13; step++) {
        const uint16_t tried = f32_to_f16(largest * static_cast<float>(0.82 + 0.02 * step));
        const float error = fit_codes(weights, f16_to_f32(tried), -8.0f, 7.0f, codes);
        if (error < least) {
            least = error, d = tried;
            std::memcpy(best, codes, sizeof best);
        }
    }
    const auto code = [&](int i) { return static_cast<int>(best[i]) + 8; };
    std::memcpy(block, &d, sizeof d);
    for (int i = 0; i < 16; i++) block[2 + i] = static_cast<uint8_t>(code(i) | code(16 + i) << 4);
}

// As models/formats/q8_0.h.
void fit_q8_0(const float* weights, uint8_t* block) {
    const float each = std::abs(largest_of(weights)) / 127.0f;
    const float inverse = 1.0f / each <= std::numeric_limits<float>::max() ? 1.0f / each : 0.0f;
    const uint16_t d = f32_to_f16(each);
    std::memcpy(block, &d, sizeof d);
    for (int i = 0; i < 32; i++) {
        const float place = std::min(127.0f, std::max(-127.0f, weights[i] * inverse));
        block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::round(place)));
    }
}

void dequantize_block32(const Block32& layout, const uint8_t* block, int n_in, float* out) {
    for (int b = 0; b < n_in / 32; b++) {
        Codes codes;
        codes_of_block32(layout, block, codes);
        out = layout.weights(read_f16(block), layout.min ? read_f16(block + 2) : 0.0f, codes, out);
        block += layout.n_bytes();
    }
}

}  // namespace

bool block_size(int ggml_type, int& n_inputs, size_t& n_bytes) {
    const Format format = static_cast<Format>(ggml_type);
    switch (format) {
        case Format::F32: n_inputs = 1, n_bytes = 4; return true;
        case Format::F16:
        case Format::BF16: n_inputs = 1, n_bytes = 2; return true;
        case Format::Q8_0:
        case Format::Q4_0:
        case Format::Q4_1:
        case Format::Q5_0:
        case Format::Q5_1: n_inputs = 32, n_bytes = block32(format).n_bytes(); return true;
        case Format::Q2_K: n_inputs = 256, n_bytes = kBytes2K; return true;
        case Format::Q3_K: n_inputs = 256, n_bytes = kBytes3K; return true;
        case Format::Q4_K: n_inputs = 256, n_bytes = kBytes4K; return true;
        case Format::Q5_K: n_inputs = 256, n_bytes = kBytes5K; return true;
        case Format::Q6_K: n_inputs = 256, n_bytes = kBytes6K; return true;
        case Format::TQ1_0: n_inputs = 256, n_bytes = kBytesTQ1; return true;
        case Format::TQ2_0: n_inputs = 256, n_bytes = kBytesTQ2; return true;
        case Format::I2_S: n_inputs = 128, n_bytes = kBytesI2; return true;
        case Format::Q2_0: n_inputs = 64, n_bytes = kBytesQ2; return true;
        case Format::MXFP4: n_inputs = 32, n_bytes = kBytesMxfp4; return true;
        case Format::TQ_BASE_THREE:
        case Format::I2_S_BASE_THREE: return false;
    }
    return false;
}

bool packed_block(int format, int& n_inputs) {
    size_t n_bytes = 0;
    switch (static_cast<Format>(format)) {
        case Format::TQ_BASE_THREE: n_inputs = 256; return true;
        case Format::I2_S_BASE_THREE: n_inputs = 128; return true;
        default: return block_size(format, n_inputs, n_bytes);
    }
}

bool can_pack(Format of, Format as) {
    switch (as) {
        case Format::Q4_0: return of != Format::I2_S;
        case Format::TQ_BASE_THREE: return of == Format::TQ1_0 || of == Format::TQ2_0;
        case Format::I2_S_BASE_THREE: return of == Format::I2_S;
        default: return of == as;
    }
}

size_t packed_group_bytes(Format format, int n_in) {
    const size_t n = static_cast<size_t>(n_in);
    switch (format) {
        case Format::F32: return n * kRows * 4;
        case Format::F16:
        case Format::BF16: return round_up(n * kRows * 2, 64);
        case Format::Q2_K: return n / 256 * kTileBytes2K;
        case Format::Q3_K: return tile_at_3k(n / 256 - 1) + kTileBytes3K;
        case Format::Q4_K: return n / 256 * tile_bytes_45k(4);
        case Format::Q5_K: return n / 256 * tile_bytes_45k(5);
        case Format::Q6_K: return n / 256 * kTileBytes6K;
        case Format::TQ1_0:
        case Format::TQ2_0:
        case Format::TQ_BASE_THREE:
        case Format::Q2_0: {
            const TernaryTiles tiles = ternary_tiles(format);
            return tiles.lines_at(n / static_cast<size_t>(tiles.n_inputs) - 1) + tiles.lines();
        }
        case Format::I2_S: return 64 + 4 * n;
        case Format::MXFP4: return group_bytes_of_mxfp4(n);
        case Format::I2_S_BASE_THREE: return 64 + base_three_bytes(n_in);
        default: {
            const Block32 layout = block32(format);
            return layout.lines_at(n / 32 - 1) + layout.lines();
        }
    }
}

void pack_group(Format of, Format as, const uint8_t* source, float scale, int n_out, int n_in, int g, uint8_t* group) {
    if (of == Format::I2_S) return pack_group_i2(as, source, scale, n_out, n_in, g, group);
    const bool rounded = as == Format::Q4_0 && of != as;
    const size_t stride = row_bytes(of, n_in);
    const int first = g * kRows;
    std::vector<float> weights(rounded ? static_cast<size_t>(n_in) : 0);
    std::vector<uint8_t> blocks(rounded ? row_bytes(as, n_in) : 0);
    if (first + kRows > n_out) std::memset(group, 0, packed_group_bytes(as, n_in));
    for (int r = 0; r < kRows && first + r < n_out; r++) {
        const uint8_t* row = source + static_cast<size_t>(first + r) * stride;
        if (rounded) {
            dequantize_row(of, row, n_in, weights.data());
            for (int b = 0; b < n_in / 32; b++) round_to_q4_0(weights.data() + 32 * b, blocks.data() + 18 * b);
            row = blocks.data();
        }
        pack_row(rounded ? as : of, as, row, n_in, r, group);
    }
}

bool can_write(Format as) { return as == Format::F16 || as == Format::Q8_0 || as == Format::Q4_0; }

void write_rows(Format of, const uint8_t* source, size_t n_rows, int n_in, Format as, uint8_t* out) {
    std::vector<float> weights(static_cast<size_t>(n_in));
    for (size_t r = 0; r < n_rows; r++) {
        dequantize_row(of, source + r * row_bytes(of, n_in), n_in, weights.data());
        if (as == Format::F16) {
            for (const float weight : weights) {
                const uint16_t half = f32_to_f16(weight);
                std::memcpy(out, &half, sizeof half);
                out += sizeof half;
            }
            continue;
        }
        for (int k = 0; k < n_in; k += 32, out += row_bytes(as, 32)) {
            (as == Format::Q4_0 ? fit_q4_0 : fit_q8_0)(weights.data() + k, out);
        }
    }
}

void dequantize_row(Format format, const uint8_t* row, int n_in, float* out) {
    switch (format) {
        case Format::F32: std::memcpy(out, row, 4 * static_cast<size_t>(n_in)); return;
        case Format::F16:
            for (int k = 0; k < n_in; k++) out[k] = read_f16(row + 2 * k);
            return;
        case Format::BF16:
            for (int k = 0; k < n_in; k++) out[k] = read_bf16(row + 2 * k);
            return;
        case Format::Q2_K: return dequantize_2k(row, n_in, out);
        case Format::Q3_K: return dequantize_3k(row, n_in, out);
        case Format::Q4_K: return dequantize_45k(4, row, n_in, out);
        case Format::Q5_K: return dequantize_45k(5, row, n_in, out);
        case Format::Q6_K: return dequantize_6k(row, n_in, out);
        case Format::TQ1_0:
        case Format::TQ2_0:
        case Format::Q2_0: return dequantize_ternary(ternary_block(format, format), row, n_in, out);
        case Format::MXFP4: return dequantize_mxfp4(row, n_in, out);
        default: return dequantize_block32(block32(format), row, n_in, out);
    }
}

bool holds_trits(Format format, const uint8_t* source, size_t n_bytes) {
    if (format == Format::TQ1_0) return true;  // every byte stands for digits
    const size_t period = format == Format::I2_S ? kBytesI2 : ternary_block(format, format).n_bytes;
    const size_t first = format == Format::Q2_0 ? 2 : 0, last = format == Format::TQ2_0 ? period - 2 : period;
    uint8_t threes = 0;
    for (size_t at = 0; at + period <= n_bytes; at += period) {
        for (size_t i = first; i < last; i++) {
            const uint8_t byte = source[at + i];
            threes |= static_cast<uint8_t>(byte & (byte >> 1) & 0x55);
        }
    }
    return !threes;
}
