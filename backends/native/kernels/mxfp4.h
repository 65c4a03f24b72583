// Products with MXFP4; part of kernels.cpp. matrix.h draws the tiles.
//
// Codes become integers above zero by a byte shuffle; what they stand above the true ones is taken off by what the sums
// begin with. Scales are powers of two: nothing but the sum over blocks is rounded.
#pragma once

namespace {

struct BlocksMxfp4 {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kStreamsAtOnce, kColumns = kFewerColumns;

    template <int NC, int G>
    static EI_INLINE void strip(At<G> group, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        const int n_blocks = x.n_in / 32;
        At<G> exponents = group;
        const int8_t* a[NC];
        const float* ad[NC];
        const int32_t* centre[NC];
        columns_by_32<NC>(x, at, x.centre32, a, ad, centre);
        for (int c = 0; c < NC; c++) f[c] = set_f32(0.0f);
        for (int b = 0; b < n_blocks; b++) {
            if (b % kMxfp4Together == 0) {
                exponents = group;
                prefetch(group, 1, ahead);
                group += 64;
            } else {
                exponents += 16;
            }
            prefetch(group, 4, ahead);
            Of<Dot, G> d[NC];
            for (int c = 0; c < NC; c++) d[c] = dot_from(centre[c] + b);
            dot_lines<NC, G>(group, a, d);
            const auto scale = load_mxfp4_scales(exponents);
            for (int c = 0; c < NC; c++) {
                const auto sum = add_dot(Of<I32, G>(set_i32(0)), d[c]);
                f[c] = fma_f32(mul_f32(to_f32(sum), scale), set_f32(ad[c][b]), f[c]);
                a[c] += 32;
            }
            group += 256;
        }
    }

    // As dot32 with codes of 4 bits.
    template <int NC, int G>
    static EI_INLINE void dot_lines(const At<G>& lines, const int8_t* const (&a)[NC], Of<Dot, G> (&d)[NC]) {
        const auto of_nibbles = [&]<int I>() {
            const auto q = load_u8(lines + 64 * I);
            const auto low = mxfp4_codes(and_u8(q, 0x0f)), high = mxfp4_codes(and_u8(shr_u16<4>(q), 0x0f));
            for (int c = 0; c < NC; c++) d[c] = dot(d[c], low, a[c] + 4 * I);
            for (int c = 0; c < NC; c++) d[c] = dot(d[c], high, a[c] + 16 + 4 * I);
        };
        for_each<4>(of_nibbles);
    }
};

}  // namespace
