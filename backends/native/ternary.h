// Products with ternary matrices; part of kernels.cpp. matrix.h draws the tiles.
//
// The codes are one above the weights, so the sum of the activations is taken off. Integer sums are exact in any order:
// they may be cut into as many parts as keep the arithmetic busy.
#pragma once

namespace {

// 64 sums of two codes times two activations, at most 508 each, fit into 16 bits.
constexpr int kTritLines = 16;

// Adds the products of up to kTritLines lines of 16 inputs with NC columns; a[c] points at the activations of column c.
template <int NC>
EI_INLINE void dot_trits(const uint8_t* lines, int n_lines, const int8_t* const (&a)[NC], I32 (&sum)[NC]) {
    constexpr int kParts = kDots<8> == 1 || NC >= 4 ? 1 : 4 / NC;  // where a sum waits some cycles for the one before
    Dot part[kParts][NC];
    for (auto& sums : part) {
        for (Dot& s : sums) s = dot_zero();
    }
    for (int i = 0; i < n_lines; i++) {
        prefetch<NC>(lines + 64 * i, 1);
        const U8 line = load_u8(lines + 64 * i);
        const auto quarter = [&]<int J>() {
            const U8 codes = and_u8(shr_u16<2 * J>(line), 3);
            for (int c = 0; c < NC; c++) {
                Dot& s = part[J % kParts][c];
                s = dot(s, codes, a[c] + 16 * i + 4 * J);
            }
        };
        for_each<4>(quarter);
    }
    for (const auto& sums : part) {
        for (int c = 0; c < NC; c++) sum[c] = add_dot(sum[c], sums[c]);
    }
}

// I2_S: a scale a row, and activations with a scale a token.
struct TernaryRows {
    template <int NC>
    static EI_INLINE void strip(const uint8_t* group, const Inputs& x, int c0, F32 (&f)[NC]) {
        const int8_t* a[NC];
        I32 sum[NC];
        for (int c = 0; c < NC; c++) {
            a[c] = x.q_token + static_cast<size_t>(c0 + c) * static_cast<size_t>(x.n_in);
            sum[c] = set_i32(-x.sum_token[c0 + c]);
        }
        const uint8_t* lines = group + 64;
        for (int left = x.n_in / 16; left > 0; left -= kTritLines) {
            dot_trits<NC>(lines, left < kTritLines ? left : kTritLines, a, sum);
            lines += 64 * kTritLines;
            for (int c = 0; c < NC; c++) a[c] += 16 * kTritLines;
        }
        const F32 scale = load_f32(reinterpret_cast<const float*>(group));
        for (int c = 0; c < NC; c++) f[c] = mul_f32(mul_f32(to_f32(sum[c]), scale), set_f32(x.scale_token[c0 + c]));
    }
};

// TQ1_0 and TQ2_0: scales of 256 inputs on both sides.
struct TernaryTiles {
    template <int NC>
    static EI_INLINE void strip(const uint8_t* tile, const Inputs& x, int c0, F32 (&f)[NC]) {
        const int n_tiles = x.n_in / 256;
        const int8_t* a[NC];
        const float* ad[NC];
        const int16_t* as[NC];
        columns_by_256<NC>(x, c0, x.sums32, 8, a, ad, as);
        for (int c = 0; c < NC; c++) f[c] = set_f32(0.0f);
        const uint8_t* scales = tile;
        for (int b = 0; b < n_tiles; b++) {
            if (b % 2 == 0) {
                scales = tile;
                tile += 64;
            } else {
                scales += 32;
            }
            I32 sum[NC];
            for (int c = 0; c < NC; c++) {
                int32_t of_tile = 0;
                for (int j = 0; j < 8; j++) of_tile += as[c][j];
                sum[c] = set_i32(-of_tile);
                as[c] += 8;
            }
            dot_trits<NC>(tile, kTritLines, a, sum);
            const F32 d = load_f16(scales);
            for (int c = 0; c < NC; c++) {
                f[c] = fma_f32(mul_f32(to_f32(sum[c]), d), set_f32(ad[c][b]), f[c]);
                a[c] += 256;
            }
            tile += 64 * kTritLines;
        }
    }
};

}  // namespace
