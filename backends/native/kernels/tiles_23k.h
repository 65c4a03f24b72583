// Products with Q2_K and Q3_K; part of kernels.cpp. matrix.h draws the tiles.
//
// Scales belong to 16 inputs, as in Q6_K. A dot product of 16 codes of two bits always fits into 16 bits.
#pragma once

namespace {

// 256 scales of four bits, then 256 minimums, a byte each, out of 256 bytes.
EI_INLINE void unpack_nibbles(const uint8_t* packed, uint8_t* numbers) {
    for (int i = 0; i < 256; i += 64) {
        const U8 both = load_u8(packed + i);
        store_u8(numbers + i, and_u8(both, 0x0f));
        store_u8(numbers + 256 + i, and_u8(shr_u16<4>(both), 0x0f));
    }
}

struct Tiles2K {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kStreamsAtOnce, kColumns = kFewerColumns;
    static constexpr size_t kLines = 320, kTile = kLines + 16 * 64, kNumbers = 512;

    template <int NC, int G>
    static EI_INLINE void strip(At<G> tile, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        const int n_tiles = x.n_in / 256;
        const int8_t* a[NC];
        const float* ad[NC];
        const int16_t* as[NC];
        columns_by_256<NC>(x, at, x.sums16, 16, a, ad, as);
        for (int c = 0; c < NC; c++) f[c] = set_f32(0.0f);
        for (int b = 0; b < n_tiles; b++) {
            prefetch<Work::Hard>(tile, 5, ahead);
            alignas(64) uint8_t of_groups[G * kNumbers];
            for (int g = 0; g < G; g++) unpack_nibbles(of_group(tile, g) + 64, of_groups + g * kNumbers);
            const At<G> scales = places<G>(of_groups, kNumbers);
            Of<I32, G> total[NC], mins[NC];
            for (int c = 0; c < NC; c++) total[c] = mins[c] = set_i32(0);
            products<NC, G>(tile + kLines, scales, a, ahead, total);
            for (int p = 0; p < 8; p++) {
                const auto min = load_u8_as_i16(scales + (256 + 32 * p));
                for (int c = 0; c < NC; c++) mins[c] = dot2(mins[c], min, as[c] + 2 * p);
            }
            const auto d = load_f16(tile), dmin = load_f16(tile + 32);
            for (int c = 0; c < NC; c++) {
                const auto t = fnma_f32(to_f32(mins[c]), dmin, mul_f32(to_f32(total[c]), d));
                f[c] = fma_f32(t, set_f32(ad[c][b]), f[c]);
                a[c] += 256;
                as[c] += 16;
            }
            tile += kTile;
        }
    }

    // Dot products times scales, of the 256 inputs of a tile.
    template <int NC, int G>
    static EI_INLINE void products(At<G> lines, const At<G>& scales, const int8_t* const (&a)[NC], const Ahead& ahead,
                                   Of<I32, G> (&total)[NC]) {
        for (int p = 0; p < 8; p++) {
            prefetch<Work::Hard>(lines, 2, ahead);
            const auto of_pair = load_u8_as_i16(scales + 32 * p);
            Of<Dot, G> even[NC], odd[NC];
            block<NC, G>(lines, a, 32 * p, even);
            if constexpr (kInt16Scaling == Int16Scaling::Pairs) {
                block<NC, G>(lines + 64, a, 32 * p + 16, odd);
                for (int c = 0; c < NC; c++) total[c] = add_pair_times(total[c], even[c], odd[c], of_pair);
            } else if constexpr (kInt16Scaling == Int16Scaling::Singles) {
                for (int c = 0; c < NC; c++) total[c] = add_int16_times(total[c], even[c], even_low(of_pair));
                block<NC, G>(lines + 64, a, 32 * p + 16, odd);
                for (int c = 0; c < NC; c++) total[c] = add_int16_times(total[c], odd[c], odd_low(of_pair));
            } else {
                for (int c = 0; c < NC; c++) total[c] = add_dot_times(total[c], even[c], even_scale(of_pair));
                block<NC, G>(lines + 64, a, 32 * p + 16, odd);
                for (int c = 0; c < NC; c++) total[c] = add_dot_times(total[c], odd[c], odd_scale(of_pair));
            }
            lines += 128;
        }
    }

    // Dot products of a line, the 16 inputs from k on.
    template <int NC, int G>
    static EI_INLINE void block(const At<G>& lines, const int8_t* const (&a)[NC], int k, Of<Dot, G> (&d)[NC]) {
        const auto line = load_u8(lines);
        for (int c = 0; c < NC; c++) d[c] = dot_zero();
        const auto quarter = [&]<int U>() {
            const auto codes = and_u8(shr_u16<2 * U>(line), 0x03);
            for (int c = 0; c < NC; c++) d[c] = dot(d[c], codes, a[c] + k + 4 * U);
        };
        for_each<4>(quarter);
    }
};

// 256 scales of six bits, four times as large, so that their signs are those of bytes, out of 192 bytes.
EI_INLINE void unpack_high_six_bits(const uint8_t* packed, uint8_t* numbers) {
    const U8 a = load_u8(packed), b = load_u8(packed + 64), c = load_u8(packed + 128);
    store_u8(numbers, and_u8(a, 0xfc));
    store_u8(numbers + 64, and_u8(b, 0xfc));
    store_u8(numbers + 128, and_u8(c, 0xfc));
    const U8 low = or_u8(and_u8(shl_u16<2>(a), 0x0c), and_u8(shl_u16<4>(b), 0x30));
    store_u8(numbers + 192, or_u8(low, and_u8(shl_u16<6>(c), 0xc0)));
}

// Codes are unpacked eight times as large: they need a shift less, and stand as far above the true ones as those of Q6_K.
struct Tiles3K {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kStreamsAtOnce, kColumns = kColumnsAtOnce;
    static constexpr size_t kLines = 192, kTile = kLines + 8 * 192, kNumbers = 256;
    static constexpr float kOnce = 1.0f / 32;  // eight times the codes, four times the scales

    template <int NC, int G>
    static EI_INLINE void strip(At<G> tile, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        const int n_tiles = x.n_in / 256;
        const int8_t* a[NC];
        const float* ad[NC];
        const int32_t* centre[NC];
        columns_by_256<NC>(x, at, x.centre16, 16, a, ad, centre);
        for (int c = 0; c < NC; c++) f[c] = set_f32(0.0f);
        At<G> factors = tile;
        for (int b = 0; b < n_tiles; b++) {
            if (b % 2 == 0) {
                prefetch<Work::Hard>(tile, 1, ahead);
                factors = tile;
                tile += 64;
            } else {
                factors += 32;
            }
            prefetch<Work::Hard>(tile, 3, ahead);
            alignas(64) uint8_t of_groups[G * kNumbers];
            for (int g = 0; g < G; g++) unpack_high_six_bits(of_group(tile, g), of_groups + g * kNumbers);
            const At<G> scales = places<G>(of_groups, kNumbers);
            Of<I32, G> total[NC];
            for (int c = 0; c < NC; c++) total[c] = set_i32(0);
            if (!in_16_bits<NC>(x, at, b)) {
                products<NC, G, Int16Scaling::None>(tile + kLines, scales, a, centre, ahead, total);
            } else {
                products<NC, G, kInt16Scaling>(tile + kLines, scales, a, centre, ahead, total);
            }
            const auto d = load_f16(factors);
            for (int c = 0; c < NC; c++) {
                f[c] = fma_f32(to_f32(total[c]), mul_f32(d, set_f32(kOnce * ad[c][b])), f[c]);
                a[c] += 256;
                centre[c] += 16;
            }
            tile += kTile;
        }
    }

    // Dot products times scales, of the 256 inputs of a tile. HOW: None, or all dot products fit into 16 bits, as those of
    // Q6_K do.
    template <int NC, int G, Int16Scaling HOW>
    static EI_INLINE void products(At<G> lines, const At<G>& scales, const int8_t* const (&a)[NC],
                                   const int32_t* const (&centre)[NC], const Ahead& ahead, Of<I32, G> (&total)[NC]) {
        for (int p = 0; p < 8; p++) {
            prefetch<Work::Hard>(lines, 3, ahead);
            const auto of_pair = load_i8_as_i16(scales + 32 * p);
            Of<Dot, G> even[NC], odd[NC];
            first<NC, G>(lines, a, centre, p, even);
            if constexpr (HOW == Int16Scaling::Pairs) {
                second<NC, G>(lines, a, centre, p, odd);
                for (int c = 0; c < NC; c++) total[c] = add_pair_times(total[c], even[c], odd[c], of_pair);
            } else if constexpr (HOW == Int16Scaling::Singles) {
                for (int c = 0; c < NC; c++) total[c] = add_int16_times(total[c], even[c], even_low(of_pair));
                second<NC, G>(lines, a, centre, p, odd);
                for (int c = 0; c < NC; c++) total[c] = add_int16_times(total[c], odd[c], odd_low(of_pair));
            } else {
                for (int c = 0; c < NC; c++) total[c] = add_dot_times(total[c], even[c], even_scale(of_pair));
                second<NC, G>(lines, a, centre, p, odd);
                for (int c = 0; c < NC; c++) total[c] = add_dot_times(total[c], odd[c], odd_scale(of_pair));
            }
            lines += 192;
        }
    }

    // Dot products of the first 16 of the 32 inputs p of a tile.
    template <int NC, int G>
    static EI_INLINE void first(const At<G>& lines, const int8_t* const (&a)[NC], const int32_t* const (&centre)[NC],
                                int p, Of<Dot, G> (&d)[NC]) {
        const auto l0 = load_u8(lines), l1 = load_u8(lines + 64);
        four<NC, G>(and_u8(l0, 0x38), and_u8(shl_u16<3>(l0), 0x38), and_u8(l1, 0x38), and_u8(shl_u16<3>(l1), 0x38), a,
                    centre, 2 * p, d);
    }

    // Of the second 16.
    template <int NC, int G>
    static EI_INLINE void second(const At<G>& lines, const int8_t* const (&a)[NC], const int32_t* const (&centre)[NC],
                                 int p, Of<Dot, G> (&d)[NC]) {
        const auto l0 = load_u8(lines), l1 = load_u8(lines + 64), l2 = load_u8(lines + 128);
        four<NC, G>(and_u8(l2, 0x38), and_u8(shl_u16<3>(l2), 0x38),
                    or_u8(and_u8(shr_u16<2>(l0), 0x30), and_u8(shr_u16<3>(l2), 0x08)),
                    or_u8(and_u8(shr_u16<2>(l1), 0x30), and_u8(shr_u16<4>(l2), 0x08)), a, centre, 2 * p + 1, d);
    }

    template <int NC, int G, class U>
    static EI_INLINE void four(const U& v0, const U& v1, const U& v2, const U& v3, const int8_t* const (&a)[NC],
                               const int32_t* const (&centre)[NC], int j, Of<Dot, G> (&d)[NC]) {
        for (int c = 0; c < NC; c++) {
            const int8_t* at = a[c] + 16 * j;
            const auto half = dot(dot(Of<Dot, G>(dot_from(centre[c] + j)), v0, at), v1, at + 4);
            d[c] = dot(dot(half, v2, at + 8), v3, at + 12);
        }
    }
};

}  // namespace
