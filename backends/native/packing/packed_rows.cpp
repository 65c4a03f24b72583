#include "packing/packed_rows.h"

#include "packing/tile_layout.h"

namespace {

// The codes of a block of 32 in its lines; the counterpart of place_codes in packing.cpp.
void codes_of_lines(int bits, const uint8_t* lines, int row, Codes& codes) {
    const auto line = [&](int i) { return word_at(lines + 64 * i + 4 * row); };
    if (bits == 8) {
        for (int i = 0; i < 8; i++) codes[i] = line(i);
        return;
    }
    if (bits == 4) {
        for (int i = 0; i < 4; i++) {
            codes[i] = line(i) & 0x0f0f0f0f;
            codes[4 + i] = line(i) >> 4 & 0x0f0f0f0f;
        }
        return;
    }
    constexpr uint32_t kFive = 0x1f1f1f1f, kLow = 0x07070707, kHigh = 0x18181818;
    codes[0] = line(0) & kFive;
    codes[1] = line(1) & kFive;
    codes[2] = (line(0) >> 5 & kLow) | (line(1) >> 2 & kHigh);
    codes[3] = line(2) & kFive;
    codes[4] = line(3) & kFive;
    codes[5] = (line(2) >> 5 & kLow) | (line(3) >> 2 & kHigh);
    codes[6] = line(4) & kFive;
    codes[7] = (line(4) >> 5 & kLow) | (line(1) >> 4 & 0x08080808) | (line(3) >> 3 & 0x10101010);
}

void row_of_block32(const Block32& layout, const uint8_t* group, int row, int n_in, float* out) {
    for (size_t b = 0; b < static_cast<size_t>(n_in) / 32; b++) {
        const uint8_t* scales = group + layout.scales_at(b) + 2 * row;
        Codes codes;
        codes_of_lines(layout.bits, group + layout.lines_at(b), row, codes);
        out = layout.weights(read_f16(scales), layout.min ? read_f16(scales + 32) : 0.0f, codes, out);
    }
}

void row_of_mxfp4(const uint8_t* group, int row, int n_in, float* out) {
    for (size_t b = 0; b < static_cast<size_t>(n_in) / 32; b++) {
        const size_t i = b % kMxfp4Together;
        const uint8_t* exponents = group + b / kMxfp4Together * kGroupMxfp4;
        Codes codes;
        codes_of_lines(4, exponents + 64 + i * kLinesMxfp4, row, codes);
        out = weights_of_mxfp4(exponents[i * kRows + static_cast<size_t>(row)], codes, out);
    }
}

// The ith of 256 scales and mins that are kept in 192 bytes.
uint8_t six_bits_at(const uint8_t* lines, int i) {
    if (i < 192) return lines[i] & 63;
    int value = 0;
    for (int u = 0; u < 3; u++) value |= lines[64 * u + i - 192] >> 6 << 2 * u;
    return static_cast<uint8_t>(value);
}

void row_of_2k(const uint8_t* tile, int row, int n_in, float* out) {
    for (int b = 0; b < n_in / 256; b++) {
        const float d = read_f16(tile + 2 * row), dmin = read_f16(tile + 32 + 2 * row);
        for (int j = 0; j < 16; j++) {
            const uint8_t scale = tile[64 + 32 * (j / 2) + 2 * row + j % 2];
            const uint32_t line = word_at(tile + 320 + 64 * j + 4 * row);
            for (int u = 0; u < 4; u++) out = weights_of_2k(d, dmin, scale, line >> 2 * u & 0x03030303, out);
        }
        tile += kTileBytes2K;
    }
}

// The ith of 256 signed scales that are kept in 192 bytes.
int high_six_bits_at(const uint8_t* lines, int i) {
    if (i < 192) return static_cast<int8_t>(lines[i] & 0xfc) / 4;
    int value = 0;
    for (int u = 0; u < 3; u++) value |= (lines[64 * u + i - 192] & 3) << (2 + 2 * u);
    return static_cast<int8_t>(value) / 4;
}

void row_of_3k(const uint8_t* group, int row, int n_in, float* out) {
    for (size_t b = 0; b < static_cast<size_t>(n_in) / 256; b++) {
        const float d = read_f16(group + factor_at_3k(b) + 2 * row);
        const uint8_t* tile = group + tile_at_3k(b);
        for (int p = 0; p < 8; p++) {
            uint32_t line[3];
            for (int u = 0; u < 3; u++) line[u] = word_at(tile + 192 + 192 * p + 64 * u + 4 * row);
            constexpr uint32_t kThree = 0x07070707, kHigh = 0x06060606, kLow = 0x01010101;
            const uint32_t last[2] = {(line[0] >> 5 & kHigh) | (line[2] >> 6 & kLow),
                                      (line[1] >> 5 & kHigh) | (line[2] >> 7 & kLow)};
            for (int i = 0; i < 8; i++) {
                const int scale = high_six_bits_at(tile, 32 * p + 2 * row + i / 4);
                const uint32_t codes = i < 6 ? line[i / 2] >> (i % 2 ? 0 : 3) & kThree : last[i - 6];
                out = weights_of_3k(d, scale, codes, out);
            }
        }
    }
}

void row_of_45k(int bits, const uint8_t* tile, int row, int n_in, float* out) {
    const size_t lines = bits == 5 ? 320 : 256;
    for (int b = 0; b < n_in / 256; b++) {
        const float d = read_f16(tile + 2 * row), dmin = read_f16(tile + 32 + 2 * row);
        for (int j = 0; j < 8; j++) {
            const uint8_t scale = six_bits_at(tile + 64, 16 * j + row);
            const uint8_t min = six_bits_at(tile + 64, 128 + 32 * (j / 2) + 2 * row + j % 2);
            Codes codes;
            codes_of_lines(bits, tile + 256 + lines * static_cast<size_t>(j), row, codes);
            out = weights_of_45k(d, dmin, scale, min, codes, out);
        }
        tile += tile_bytes_45k(bits);
    }
}

void row_of_6k(const uint8_t* tile, int row, int n_in, float* out) {
    for (int b = 0; b < n_in / 256; b++) {
        const float d = read_f16(tile + 2 * row);
        for (int j = 0; j < 16; j++) {
            const uint8_t scale = tile[64 + 32 * (j / 2) + 2 * row + j % 2];
            uint32_t last = 0;
            for (int u = 0; u < 3; u++) {
                const uint32_t line = word_at(tile + 320 + 192 * j + 64 * u + 4 * row);
                last |= (line >> 6 & 0x03030303) << 2 * u;
                out = weights_of_6k(d, scale, line & 0x3f3f3f3f, out);
            }
            out = weights_of_6k(d, scale, last, out);
        }
        tile += kTileBytes6K;
    }
}

// The code of input k of a block: two bits, or a digit of base three.
int ternary_code_at(const TernaryTiles& layout, const uint8_t* lines, int row, int k) {
    const int each = layout.base_three ? kBaseThreeInputs : 16, line = k / each, j = k % each / 4;
    const int byte = lines[64 * line + 4 * row + k % 4];
    if (!layout.base_three) return byte >> 2 * j & 3;
    constexpr int kPowers[5] = {1, 3, 9, 27, 81};
    const int sum = kBaseThreeCentre + (byte & 0x80 ? -(byte & 0x7f) : byte);
    return sum / kPowers[j] % 3;
}

void row_of_ternary(const TernaryTiles& layout, const uint8_t* group, int row, int n_in, float* out) {
    for (size_t b = 0; b < static_cast<size_t>(n_in / layout.n_inputs); b++) {
        const float d = read_f16(group + layout.scales_at(b) + 2 * row);
        const uint8_t* lines = group + layout.lines_at(b);
        for (int k = 0; k < layout.n_inputs; k++) *out++ = ternary_weight(d, ternary_code_at(layout, lines, row, k));
    }
}

// Calls read(bytes) for each weight of a row of floats of so many bytes.
template <class Read>
void row_of_floats(size_t width, const uint8_t* group, int row, int n_in, float* out, const Read& read) {
    for (int k = 0; k < n_in; k++) out[k] = read(group + (static_cast<size_t>(k) * kRows + row) * width);
}

}  // namespace

bool has_packed_rows(Format format) { return format != Format::I2_S && format != Format::I2_S_BASE_THREE; }

void dequantize_packed_row(const Matrix& matrix, int row, float* out) {
    const uint8_t* group = matrix.data + static_cast<size_t>(row / kRows) * matrix.group_bytes;
    const int n_in = matrix.n_in, r = row % kRows;
    switch (matrix.format) {
        case Format::F32:
            return row_of_floats(4, group, r, n_in, out, [](const uint8_t* p) {
                float value;
                std::memcpy(&value, p, sizeof value);
                return value;
            });
        case Format::F16: return row_of_floats(2, group, r, n_in, out, read_f16);
        case Format::BF16: return row_of_floats(2, group, r, n_in, out, read_bf16);
        case Format::Q2_K: return row_of_2k(group, r, n_in, out);
        case Format::Q3_K: return row_of_3k(group, r, n_in, out);
        case Format::Q4_K: return row_of_45k(4, group, r, n_in, out);
        case Format::Q5_K: return row_of_45k(5, group, r, n_in, out);
        case Format::Q6_K: return row_of_6k(group, r, n_in, out);
        case Format::TQ1_0:
        case Format::TQ2_0:
        case Format::TQ_BASE_THREE:
        case Format::Q2_0: return row_of_ternary(ternary_tiles(matrix.format), group, r, n_in, out);
        case Format::MXFP4: return row_of_mxfp4(group, r, n_in, out);
        default: return row_of_block32(block32(matrix.format), group, r, n_in, out);
    }
}
