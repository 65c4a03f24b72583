// Products with MXFP4; part of kernels.cpp. matrix.h draws the tiles.
//
// Codes become integers above zero by a byte shuffle; what they stand above the true ones is taken off by the sum of the
// activations. Scales are powers of two: nothing but the sum over blocks is rounded.
#pragma once

namespace {

struct BlocksMxfp4 {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kStreamsAtOnce, kColumns = kFewerColumns;
    static constexpr int kBits = 5;  // of a code

    template <int NC, int G>
    static EI_INLINE void strip(At<G> group, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        const int n_blocks = x.n_in / 32;
        At<G> exponents = group;
        const int8_t* a[NC];
        const float* ad[NC];
        const int32_t* as[NC];
        columns_by_32<NC>(x, at, a, ad, as);
        for (int c = 0; c < NC; c++) f[c] = set_f32(0.0f);
        for (int b = 0; b < n_blocks; b++) {
            if (b % kMxfp4Together == 0) {
                exponents = group;
                prefetch(group, 1, ahead);
                group += 64;
            } else {
                exponents += 16;
            }
            Of<I32, G> sum[NC];
            const auto offset = [&](int c) { return set_i32(-kMxfp4Offset * as[c][b]); };
            prefetch(group, 4, ahead);
            if constexpr (kDots<8> > 1) {  // dots of 32 bits can begin with it
                dot_lines<NC, G>(group, a, offset, [&](int c, const auto& d) { sum[c] = d; });
            } else {
                for (int c = 0; c < NC; c++) sum[c] = offset(c);
                dot_lines<NC, G>(group, a, from_zero, [&](int c, const auto& d) { sum[c] = add_dot(sum[c], d); });
            }
            const auto scale = load_mxfp4_scales(exponents);
            for (int c = 0; c < NC; c++) {
                f[c] = fma_f32(mul_f32(to_f32(sum[c]), scale), set_f32(ad[c][b]), f[c]);
                a[c] += 32;
            }
            group += 256;
        }
    }

    // As dot32 with codes of 4 bits.
    template <int NC, int G, class Begin, class Add>
    static EI_INLINE void dot_lines(const At<G>& lines, const int8_t* const (&a)[NC], const Begin& begin,
                                    const Add& add) {
        using Sum = Of<Dot, G>;
        Sum d[NC];
        const auto codes = [&]<int I>(const Of<U8, G>& nibbles, int k) {  // the Ith of eight
            const auto integers = mxfp4_codes(nibbles);
            for (int c = 0; c < NC; c++) {
                const Sum before = I == 0 ? Sum(begin(c)) : I % kDots<kBits> ? d[c] : Sum(dot_zero());
                d[c] = dot(before, integers, a[c] + k);
                if ((I + 1) % kDots<kBits> == 0) add(c, d[c]);
            }
        };
        const auto line = [&]<int I>() {
            const auto q = load_u8(lines + 64 * I);
            codes.template operator()<2 * I>(and_u8(q, 0x0f), 4 * I);
            codes.template operator()<2 * I + 1>(and_u8(shr_u16<4>(q), 0x0f), 16 + 4 * I);
        };
        for_each<4>(line);
    }
};

}  // namespace
