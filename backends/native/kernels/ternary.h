// Products with ternary matrices; part of kernels.cpp. matrix.h draws the tiles.
//
// The codes are one above the weights, so the sum of the activations is taken off. Integer sums are exact in any order:
// they may be cut into as many parts as keep the arithmetic busy.
#pragma once

namespace {

// What a dot product of few columns has several sums for: each waits four cycles for the one before. With one or two
// columns it is unpacking that takes the time.
template <int NC, int G>
constexpr int kParts = kDots<8> == 1 || NC * G > 8 ? 1
                       : NC >= 3                   ? 2
                                                   : 4 / NC;

template <int NC, int G>
struct Parts {
    // From the total, where sums have 32 bits and there are enough of them that none waits for another.
    static constexpr bool kGoesOn = NC * G >= 8 && kDots<8> > 1;
    Of<Dot, G> sum[kParts<NC, G>][NC];

    EI_INLINE explicit Parts(const Of<I32, G> (&total)[NC]) {
        for (auto& part : sum) {
            for (auto& s : part) s = dot_zero();
        }
        if constexpr (kGoesOn) {
            for (int c = 0; c < NC; c++) sum[0][c] = total[c];
        }
    }
    // Codes of four inputs a row, the jth of a line; their activations stand at a[c] + k.
    EI_INLINE void add(int j, const Of<U8, G>& codes, const int8_t* const (&a)[NC], int k) {
        for (int c = 0; c < NC; c++) {
            auto& s = sum[j % kParts<NC, G>][c];
            s = dot(s, codes, a[c] + k);
        }
    }
    EI_INLINE void put_into(Of<I32, G> (&total)[NC]) const {
        for (int part = 0; part < kParts<NC, G>; part++) {
            for (int c = 0; c < NC; c++) {
                if constexpr (kGoesOn) {
                    total[c] = part == 0 ? sum[0][c] : add_i32(total[c], sum[part][c]);
                } else {
                    total[c] = add_dot(total[c], sum[part][c]);
                }
            }
        }
    }
};

// Two bits a weight, lines of 16 inputs.
struct TwoBits {
    // 64 sums of two codes times two activations, at most 508 each, fit into 16 bits; of codes that stand two bits up, 16.
    static constexpr int kInputs = 16, kLines = 16, kUnshiftedLines = 8;

    // How often dot_lines counts each product.
    template <int NC>
    static constexpr int kCounted = kDots<8> == 1 && NC <= 2 ? 4 : 1;

    // Adds the products of up to kLines lines with NC columns; a[c] points at the activations of column c.
    template <int NC, int G>
    static EI_INLINE void dot_lines(const At<G>& lines, int n_lines, const int8_t* const (&a)[NC], const Ahead& ahead,
                                    Of<I32, G> (&sum)[NC]) {
        if constexpr (kCounted<NC> == 4) return dot_unshifted<NC, G>(lines, n_lines, a, ahead, sum);
        Parts<NC, G> parts(sum);
        for (int i = 0; i < n_lines; i++) {
            prefetch(lines + 64 * i, 1, ahead);
            const auto line = load_u8(lines + 64 * i);
            const auto quarter = [&]<int J>() {
                parts.add(J, and_u8(shr_u16<2 * J>(line), 3), a, kInputs * i + 4 * J);
            };
            for_each<4>(quarter);
        }
        parts.put_into(sum);
    }

    // Every second code is left where it stands, four times as large: with few columns, unpacking takes much of the time.
    // And enough of it that the hardware's prefetchers, left alone, would not keep up with two threads.
    template <int NC, int G>
    static EI_INLINE void dot_unshifted(const At<G>& lines, int n_lines, const int8_t* const (&a)[NC],
                                        const Ahead& ahead, Of<I32, G> (&sum)[NC]) {
        for (int first = 0; first < n_lines; first += kUnshiftedLines) {
            Of<Dot, G> once[NC], fourfold[NC];
            for (int c = 0; c < NC; c++) once[c] = fourfold[c] = dot_zero();
            for (int i = first; i < n_lines && i < first + kUnshiftedLines; i++) {
                prefetch<Work::Hard>(lines + 64 * i, 1, ahead);
                const auto line = load_u8(lines + 64 * i), upper = shr_u16<4>(line);
                for (int c = 0; c < NC; c++) once[c] = dot(once[c], and_u8(line, 0x03), a[c] + 16 * i);
                for (int c = 0; c < NC; c++) fourfold[c] = dot(fourfold[c], and_u8(line, 0x0c), a[c] + 16 * i + 4);
                for (int c = 0; c < NC; c++) once[c] = dot(once[c], and_u8(upper, 0x03), a[c] + 16 * i + 8);
                for (int c = 0; c < NC; c++) fourfold[c] = dot(fourfold[c], and_u8(upper, 0x0c), a[c] + 16 * i + 12);
            }
            for (int c = 0; c < NC; c++) {
                sum[c] = add_i32(sum[c], shl_i32(add_dot(Of<I32, G>(set_i32(0)), once[c]), 2));
                sum[c] = add_dot(sum[c], fourfold[c]);
            }
        }
    }
};

// Five weights a byte, lines of 20 inputs. A fifth less to read, and more to unpack.
struct BaseThree {
    static constexpr int kInputs = 20, kLines = 12;  // 60 sums fit into 16 bits, and 64 do

    template <int NC>
    static constexpr int kCounted = 1;

    template <int NC, int G>
    static EI_INLINE void dot_lines(const At<G>& lines, int n_lines, const int8_t* const (&a)[NC], const Ahead& ahead,
                                    Of<I32, G> (&sum)[NC]) {
        Parts<NC, G> parts(sum);
        for (int i = 0; i < n_lines; i++) {
            prefetch<Work::Hard>(lines + 64 * i, 1, ahead);
            Of<U8, G> codes[5];
            if constexpr (G == 1) {
                unpack_base_three(load_u8(lines + 64 * i), [&]<int J>(U8 one) { codes[J] = one; });
            } else {
                for (int g = 0; g < G; g++) {
                    unpack_base_three(load_u8(of_group(lines, g) + 64 * i),
                                      [&]<int J>(U8 one) { codes[J].of[g] = one; });
                }
            }
            for_each<5>([&]<int J>() { parts.add(J, codes[J], a, kInputs * i + 4 * J); });
        }
        parts.put_into(sum);
    }
};

template <class Trits, int NC, class Sum>
EI_INLINE auto counted_once(const Sum& sum) {
    constexpr int kCounted = Trits::template kCounted<NC>;
    if constexpr (kCounted == 1) {
        return to_f32(sum);
    } else {
        return mul_f32(to_f32(sum), set_f32(1.0f / kCounted));
    }
}

// I2_S: a scale a row, and activations with a scale a token.
template <class Trits>
struct TernaryRows {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kGroupsAtOnce, kColumns = kColumnsAtOnce;

    template <int NC, int G>
    static EI_INLINE void strip(At<G> group, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        const int8_t* a[NC];
        Of<I32, G> sum[NC];
        for (int c = 0; c < NC; c++) {
            a[c] = x.q_token + at.of(c) * static_cast<size_t>(x.n_in);
            sum[c] = set_i32(-Trits::template kCounted<NC> * x.sum_token[at.of(c)]);
        }
        prefetch<Work::Hard>(group, 1, ahead);
        At<G> lines = group + 64;
        for (int left = (x.n_in + Trits::kInputs - 1) / Trits::kInputs; left > 0; left -= Trits::kLines) {
            Trits::template dot_lines<NC, G>(lines, left < Trits::kLines ? left : Trits::kLines, a, ahead, sum);
            lines += 64 * Trits::kLines;
            for (int c = 0; c < NC; c++) a[c] += Trits::kInputs * Trits::kLines;
        }
        const auto scale = load_row_scales(group);
        for (int c = 0; c < NC; c++) {
            const auto product = mul_f32(counted_once<Trits, NC>(sum[c]), scale);
            f[c] = mul_f32(product, set_f32(x.scale_token[at.of(c)]));
        }
    }
};

// Q2_0: scales of 64 inputs, and of 32 activations.
struct TernaryBlocks {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kGroupsAtOnce, kColumns = kStillFewer;

    template <int NC, int G>
    static EI_INLINE void strip(At<G> group, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        const size_t n_blocks = static_cast<size_t>(x.n_in) / 32;
        const int8_t* a[NC];
        const float* ad[NC];
        const int32_t* as[NC];
        for (int c = 0; c < NC; c++) {
            a[c] = x.q32 + at.of(c) * static_cast<size_t>(x.n_in);
            ad[c] = x.scale32 + at.of(c) * n_blocks;
            as[c] = x.sum32 + at.of(c) * n_blocks;
            f[c] = set_f32(0.0f);
        }
        At<G> scales = group;
        for (size_t b = 0; b < n_blocks; b++) {
            if (b % 4 == 0) {
                prefetch<Work::Hard>(group, 1, ahead);
                scales = group;
                group += 64;
            }
            const auto d = load_f16(scales + b % 4 / 2 * 32);
            Of<I32, G> sum[NC];
            for (int c = 0; c < NC; c++) sum[c] = set_i32(-TwoBits::kCounted<NC> * as[c][b]);
            TwoBits::dot_lines<NC, G>(group, 2, a, ahead, sum);
            for (int c = 0; c < NC; c++) {
                f[c] = fma_f32(mul_f32(counted_once<TwoBits, NC>(sum[c]), d), set_f32(ad[c][b]), f[c]);
                a[c] += 32;
            }
            group += 2 * 64;
        }
    }
};

// TQ1_0 and TQ2_0: scales of 256 inputs on both sides.
template <class Trits>
struct TernaryTiles {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kGroupsAtOnce, kColumns = kColumnsAtOnce;

    template <int NC, int G>
    static EI_INLINE void strip(At<G> tile, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        constexpr int kTileLines = (256 + Trits::kInputs - 1) / Trits::kInputs;
        const int n_tiles = x.n_in / 256;
        const int8_t* a[NC];
        const float* ad[NC];
        const int16_t* as[NC];
        columns_by_256<NC>(x, at, x.sums32, 8, a, ad, as);
        for (int c = 0; c < NC; c++) f[c] = set_f32(0.0f);
        At<G> scales = tile;
        for (int b = 0; b < n_tiles; b++) {
            if (b % 2 == 0) {
                prefetch<Work::Hard>(tile, 1, ahead);
                scales = tile;
                tile += 64;
            } else {
                scales += 32;
            }
            Of<I32, G> sum[NC];
            for (int c = 0; c < NC; c++) {
                int32_t of_tile = 0;
                for (int j = 0; j < 8; j++) of_tile += as[c][j];
                sum[c] = set_i32(-Trits::template kCounted<NC> * of_tile);
                as[c] += 8;
            }
            Trits::template dot_lines<NC, G>(tile, kTileLines, a, ahead, sum);
            const auto d = load_f16(scales);
            for (int c = 0; c < NC; c++) {
                f[c] = fma_f32(mul_f32(counted_once<Trits, NC>(sum[c]), d), set_f32(ad[c][b]), f[c]);
                a[c] += 256;
            }
            tile += 64 * kTileLines;
        }
    }
};

}  // namespace
