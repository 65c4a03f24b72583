// Compiled once for each instruction set, with ISA_HEADER naming its simd_*.h and KERNELS its table. Everything else
// has internal linkage: an inline function with external linkage, built for a newer CPU, could be the one that the
// linker keeps for all.
#include "kernels/kernels.h"

#include <algorithm>
#include <climits>
#include <type_traits>
#include <utility>

#include ISA_HEADER
#include "kernels/groups.h"

namespace {

// ---- matrix products -------------------------------------------------------------------------------------------

// f<0>(), f<1>(), ... f<N - 1>()
template <int N, class F>
EI_INLINE void for_each(const F& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
        (f.template operator()<I>(), ...);
    }(std::make_integer_sequence<int, N>());
}

// Which of n columns a strip multiplies: its c-th is column first + c or, past the last one, that again, and dropped.
// which: see Inputs::columns.
struct Columns {
    int first, last;
    const int32_t* which;

    EI_INLINE size_t of(int c) const {
        const int column = c && first + c > last ? last : first + c;
        return static_cast<size_t>(which ? which[column] : column);
    }
};

// Where the lines are that a strip has asked for before it comes to them: so many bytes further on or, where that is past
// the end, so many more.
struct Ahead {
    const uint8_t* end;
    ptrdiff_t past_end;
    size_t bytes;
    bool easy;  // see Prefetch
    Hint hint;
};

enum class Work { Easy, Hard };  // of a line, see Prefetch::easy

template <Work WORK = Work::Easy, class Lines>
EI_INLINE void prefetch(const Lines& at, int n_lines, const Ahead& ahead) {
    if (WORK == Work::Easy ? !ahead.easy : !ahead.bytes) return;
    const size_t n = ahead.bytes;
    const ptrdiff_t more = of_group(at, 0) + n < ahead.end ? 0 : ahead.past_end;
    for (int g = 0; g < kGroups<Lines>; g++) {
        const uint8_t* lines = of_group(at, g) + n + more;
        if (ahead.hint == Hint::AroundL3) {
            for (int i = 0; i < n_lines; i++) __builtin_prefetch(lines + 64 * i, 0, 0);
        } else if (ahead.hint == Hint::FromL2) {
            for (int i = 0; i < n_lines; i++) __builtin_prefetch(lines + 64 * i, 0, 2);
        } else {
            for (int i = 0; i < n_lines; i++) __builtin_prefetch(lines + 64 * i);
        }
    }
}

// A lambda, not a function: one that is handed on is called, and not inlined.
constexpr auto from_zero = [](int) { return dot_zero(); };

// 32 codes of 4, 5, 6 or 8 bits for 16 rows against NC columns; a[c] points at the 32 activations of column c. The
// first sums of column c begin with begin(c). Calls add(c, dot) with them, once or a few times.
template <int BITS, int NC, int G, class Begin, class Add>
EI_INLINE void dot32(const At<G>& lines, const int8_t* const (&a)[NC], const Begin& begin, const Add& add) {
    using Sum = Of<Dot, G>;
    using Codes = Of<U8, G>;
    Sum d[NC];
    const auto line = [&]<int I>(const auto& one) {  // the Ith of eight
        for (int c = 0; c < NC; c++) {
            d[c] = one(I == 0 ? Sum(begin(c)) : I % kDots<BITS> ? d[c] : Sum(dot_zero()), c);
            if ((I + 1) % kDots<BITS> == 0) add(c, d[c]);
        }
    };
    if constexpr (BITS == 8) {
        const auto of_bytes = [&]<int I>() {
            const Codes q = codes8(load_u8(lines + 64 * I));
            line.template operator()<I>([&](const Sum& sum, int c) { return dot8(sum, q, a[c] + 4 * I); });
        };
        for_each<8>(of_bytes);
    } else if constexpr (BITS == 5) {
        const auto codes = [&]<int I>(const Codes& q) {
            line.template operator()<I>([&](const Sum& sum, int c) { return dot(sum, q, a[c] + 4 * I); });
        };
        const auto from_two = [](const Codes& low, const Codes& high) {
            return or_u8(and_u8(shr_u16<5>(low), 0x07), and_u8(shr_u16<2>(high), 0x18));
        };
        const Codes l0 = load_u8(lines), l1 = load_u8(lines + 64);
        codes.template operator()<0>(and_u8(l0, 0x1f));
        codes.template operator()<1>(and_u8(l1, 0x1f));
        codes.template operator()<2>(from_two(l0, l1));
        const Codes l2 = load_u8(lines + 128), l3 = load_u8(lines + 192);
        codes.template operator()<3>(and_u8(l2, 0x1f));
        codes.template operator()<4>(and_u8(l3, 0x1f));
        codes.template operator()<5>(from_two(l2, l3));
        const Codes l4 = load_u8(lines + 256);
        codes.template operator()<6>(and_u8(l4, 0x1f));
        const Codes high = or_u8(and_u8(shr_u16<4>(l1), 0x08), and_u8(shr_u16<3>(l3), 0x10));
        codes.template operator()<7>(or_u8(and_u8(shr_u16<5>(l4), 0x07), high));
    } else if constexpr (BITS == 6) {
        const auto of_half = [&]<int HALF>() {
            const Codes top = load_u8(lines + 64 * (4 + HALF));
            const auto codes = [&]<int I>(const Codes& high) {
                const Codes all = load_u8(lines + 64 * I);
                const Codes q = or_u8(and_u8(HALF ? shr_u16<4>(all) : all, 0x0f), and_u8(high, 0x30));
                line.template operator()<4 * HALF + I>(
                    [&](const Sum& sum, int c) { return dot(sum, q, a[c] + 16 * HALF + 4 * I); });
            };
            codes.template operator()<0>(shl_u16<4>(top));
            codes.template operator()<1>(shl_u16<2>(top));
            codes.template operator()<2>(top);
            codes.template operator()<3>(shr_u16<2>(top));
        };
        for_each<2>(of_half);
    } else {
        const auto of_nibbles = [&]<int I>() {
            const Codes q = load_u8(lines + 64 * I), low = and_u8(q, 0x0f), high = and_u8(shr_u16<4>(q), 0x0f);
            line.template operator()<2 * I>([&](const Sum& sum, int c) { return dot(sum, low, a[c] + 4 * I); });
            line.template operator()<2 * I + 1>(
                [&](const Sum& sum, int c) { return dot(sum, high, a[c] + 16 + 4 * I); });
        };
        for_each<4>(of_nibbles);
    }
}

template <int BITS>
constexpr size_t kLines32 = BITS == 8   ? 512
                            : BITS == 5 ? 320
                                        : 256;  // bytes of 32 codes of 16 rows

// With one column, more row groups at once are as many streams, for CPUs that read one too slowly.
#if defined(__SANITIZE_ADDRESS__)  // which would compile for many minutes
constexpr int kStreamsAtOnce = kGroupsAtOnce;
#else
constexpr int kStreamsAtOnce = kGroupsAtOnce > 1 ? 4 : 2;
#endif

// With several row groups at once, the sums of fewer columns stay in registers: better where rows come out of a cache.
constexpr int kFewerColumns = kGroupsAtOnce > 1 && kColumnsAtOnce > 6 ? 6 : kColumnsAtOnce;
constexpr int kStillFewer = kGroupsAtOnce > 1 && kColumnsAtOnce > 4 ? 4 : kColumnsAtOnce;

// Where the columns have their activations by 32: codes, scales and one of sums or centres.
template <int NC>
EI_INLINE void columns_by_32(const Inputs& x, Columns at, const int32_t* sums, const int8_t* (&a)[NC],
                             const float* (&ad)[NC], const int32_t* (&as)[NC]) {
    const size_t n_in = static_cast<size_t>(x.n_in), n_blocks = n_in / 32;
    for (int c = 0; c < NC; c++) {
        a[c] = x.q32 + at.of(c) * n_in;
        ad[c] = x.scale32 + at.of(c) * n_blocks;
        as[c] = sums + at.of(c) * n_blocks;
    }
}

// The formats with blocks of 32. OFFSET is what the stored codes are above the true ones.
template <int BITS, int OFFSET, bool MIN>
struct Blocks32 {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kStreamsAtOnce,
                         kColumns = MIN ? kColumnsAtOnce : kFewerColumns;

    template <int NC, int G>
    static EI_INLINE void strip(At<G> group, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        const int n_blocks = x.n_in / 32;
        At<G> scales = group;
        const int8_t* a[NC];
        const float* ad[NC];
        const int32_t* as[NC];
        columns_by_32<NC>(x, at, x.sum32, a, ad, as);
        for (int c = 0; c < NC; c++) f[c] = set_f32(0.0f);
        for (int b = 0; b < n_blocks; b++) {
            if (MIN || b % 2 == 0) {
                scales = group;
                prefetch(group, 1, ahead);
                group += 64;
            } else {
                scales += 32;
            }
            Of<I32, G> sum[NC];
            const auto offset = [&](int c) { return set_i32(-OFFSET * as[c][b]); };
            prefetch(group, static_cast<int>(kLines32<BITS> / 64), ahead);
            if constexpr (kDots<8> > 1) {  // dots of 32 bits can begin with it
                dot32<BITS, NC, G>(group, a, offset, [&](int c, const auto& d) { sum[c] = d; });
            } else {
                for (int c = 0; c < NC; c++) sum[c] = offset(c);
                dot32<BITS, NC, G>(group, a, from_zero, [&](int c, const auto& d) { sum[c] = add_dot(sum[c], d); });
            }
            const auto d = load_f16(scales);
            Of<F32, G> m;
            if constexpr (MIN) m = load_f16(scales + 32);
            for (int c = 0; c < NC; c++) {
                auto t = mul_f32(to_f32(sum[c]), d);
                if constexpr (MIN) t = fma_f32(to_f32(set_i32(as[c][b])), m, t);
                f[c] = fma_f32(t, set_f32(ad[c][b]), f[c]);
                a[c] += 32;
            }
            group += kLines32<BITS>;
        }
    }
};

// Where the columns have their activations by 256: codes, scales, and n_sums sums a tile.
template <int NC, class Sum>
EI_INLINE void columns_by_256(const Inputs& x, Columns at, const Sum* sums, int n_sums, const int8_t* (&a)[NC],
                              const float* (&ad)[NC], const Sum* (&as)[NC]) {
    const size_t n_in = static_cast<size_t>(x.n_in), n_tiles = n_in / 256;
    for (int c = 0; c < NC; c++) {
        const size_t column = at.of(c);
        a[c] = x.q256 + column * n_in;
        ad[c] = x.scale256 + column * n_tiles;
        as[c] = sums + column * n_tiles * static_cast<size_t>(n_sums);
    }
}

// Whether to multiply tile b with these columns in the way that takes dot products of 16 bits. In pairs, the first columns
// wait for the tile to come from memory, and get it sooner when blocks are finished one by one; few do not wait for
// multiplications.
template <int NC>
EI_INLINE bool in_16_bits(const Inputs& x, Columns at, int b) {
    if (kInt16Scaling == Int16Scaling::None || NC < 3) return false;
    if (kInt16Scaling == Int16Scaling::Pairs && (NC < kColumnsAtOnce || at.first == 0)) return false;
    const size_t n_tiles = static_cast<size_t>(x.n_in) / 256;
    uint8_t all = 1;
    for (int c = 0; c < NC; c++) all &= x.fits_int16[at.of(c) * n_tiles + static_cast<size_t>(b)];
    return all;
}

// 256 numbers of six bits, a byte each, out of 192 bytes.
EI_INLINE void unpack_six_bits(const uint8_t* packed, uint8_t* numbers) {
    const U8 a = load_u8(packed), b = load_u8(packed + 64), c = load_u8(packed + 128);
    store_u8(numbers, and_u8(a, 0x3f));
    store_u8(numbers + 64, and_u8(b, 0x3f));
    store_u8(numbers + 128, and_u8(c, 0x3f));
    const U8 top = or_u8(and_u8(shr_u16<6>(a), 0x03), and_u8(shr_u16<4>(b), 0x0c));
    store_u8(numbers + 192, or_u8(top, and_u8(shr_u16<2>(c), 0x30)));
}

// Q4_K and Q5_K.
template <int BITS>
struct Tiles45K {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kStreamsAtOnce, kColumns = kFewerColumns;
    static constexpr size_t kTile = 256 + 8 * kLines32<BITS>, kScales = 256;

    template <int NC, int G>
    static EI_INLINE void strip(At<G> tile, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        const int n_tiles = x.n_in / 256;
        const int8_t* a[NC];
        const float* ad[NC];
        const int16_t* as[NC];
        columns_by_256<NC>(x, at, x.sums32, 8, a, ad, as);
        for (int c = 0; c < NC; c++) f[c] = set_f32(0.0f);
        for (int b = 0; b < n_tiles; b++) {
            Of<I32, G> total[NC];
            for (int c = 0; c < NC; c++) total[c] = set_i32(0);
            prefetch(tile, 4, ahead);
            alignas(64) uint8_t of_groups[G * kScales];
            for (int g = 0; g < G; g++) unpack_six_bits(of_group(tile, g) + 64, of_groups + g * kScales);
            const At<G> scales = places<G>(of_groups, kScales);
            if (BITS != 4 || !in_16_bits<NC>(x, at, b)) {
                one_by_one<NC, G, false>(tile, scales, a, ahead, total);
            } else if constexpr (kInt16Scaling == Int16Scaling::Pairs) {
                in_pairs<NC, G>(tile, scales, a, total);
            } else if constexpr (kInt16Scaling == Int16Scaling::Singles) {
                one_by_one<NC, G, true>(tile, scales, a, ahead, total);
            }
            Of<I32, G> mins[NC];
            for (int c = 0; c < NC; c++) mins[c] = set_i32(0);
            for (int p = 0; p < 4; p++) {
                const auto m = load_u8_as_i16(scales + 128 + 32 * p);
                for (int c = 0; c < NC; c++) mins[c] = dot2(mins[c], m, as[c] + 2 * p);
            }
            const auto d = load_f16(tile), dmin = load_f16(tile + 32);
            for (int c = 0; c < NC; c++) {
                const auto t = fnma_f32(to_f32(mins[c]), dmin, mul_f32(to_f32(total[c]), d));
                f[c] = fma_f32(t, set_f32(ad[c][b]), f[c]);
                as[c] += 8;
            }
            tile += kTile;
        }
    }

    // Dot products times scales, of the 256 inputs of a tile; moves a after them. INT16: all dot products fit into 16
    // bits: one of 32 codes of 4 bits is at most 15 * 2 * kMostOf16.
    template <int NC, int G, bool INT16>
    static EI_INLINE void one_by_one(const At<G>& tile, const At<G>& scales, const int8_t* (&a)[NC], const Ahead& ahead,
                                     Of<I32, G> (&total)[NC]) {
        At<G> lines = tile + 256;
        for (int j = 0; j < 8; j++) {
            prefetch(lines, static_cast<int>(kLines32<BITS> / 64), ahead);
            const auto scale = load_scale(scales + 16 * j);
            dot32<BITS, NC, G>(lines, a, from_zero, [&](int c, const auto& d) {
                if constexpr (INT16) {
                    total[c] = add_int16_times(total[c], d, scale);
                } else {
                    total[c] = add_dot_times(total[c], d, scale);
                }
            });
            for (int c = 0; c < NC; c++) a[c] += 32;
            lines += kLines32<BITS>;
        }
    }

    // The same where they are INT16, two at a time.
    template <int NC, int G>
    static EI_INLINE void in_pairs(const At<G>& tile, const At<G>& scales, const int8_t* (&a)[NC],
                                   Of<I32, G> (&total)[NC]) {
        At<G> lines = tile + 256;
        for (int p = 0; p < 4; p++) {
            Of<Dot, G> even[NC], odd[NC];
            dot32<BITS, NC, G>(lines, a, from_zero, [&](int c, const auto& d) { even[c] = d; });
            for (int c = 0; c < NC; c++) a[c] += 32;
            dot32<BITS, NC, G>(lines + 256, a, from_zero, [&](int c, const auto& d) { odd[c] = d; });
            const auto pair = load_scale_pair(scales + 32 * p);
            for (int c = 0; c < NC; c++) {
                total[c] = add_pair_times(total[c], even[c], odd[c], pair);
                a[c] += 32;
            }
            lines += 512;
        }
    }
};

struct Tiles6K {
    static constexpr int kTogether = kGroupsAtOnce, kStreams = kStreamsAtOnce, kColumns = kColumnsAtOnce;
    static constexpr size_t kTile = 3392;

    template <int NC, int G>
    static EI_INLINE void strip(At<G> tile, const Inputs& x, Columns at, const Ahead& ahead, Of<F32, G> (&f)[NC]) {
        const int n_tiles = x.n_in / 256;
        const int8_t* a[NC];
        const float* ad[NC];
        const int32_t* centre[NC];
        columns_by_256<NC>(x, at, x.centre16, 16, a, ad, centre);
        for (int c = 0; c < NC; c++) f[c] = set_f32(0.0f);
        for (int b = 0; b < n_tiles; b++) {
            Of<I32, G> total[NC];
            for (int c = 0; c < NC; c++) total[c] = set_i32(0);
            prefetch(tile, 5, ahead);
            if (!in_16_bits<NC>(x, at, b)) {
                one_by_one<NC, G, false>(tile, a, centre, ahead, total);
            } else if constexpr (kInt16Scaling == Int16Scaling::Pairs) {
                in_pairs<NC, G>(tile, a, centre, total);
            } else if constexpr (kInt16Scaling == Int16Scaling::Singles) {
                one_by_one<NC, G, true>(tile, a, centre, ahead, total);
            }
            const auto d = load_f16(tile);
            for (int c = 0; c < NC; c++) {
                f[c] = fma_f32(to_f32(total[c]), mul_f32(d, set_f32(ad[c][b])), f[c]);
                a[c] += 256;
                centre[c] += 16;
            }
            tile += kTile;
        }
    }

    // Dot products times scales, of the 256 inputs of a tile. INT16: all dot products fit into 16 bits: one of 16 weights
    // of 6 bits is at most 32 * kMostOf16.
    template <int NC, int G, bool INT16>
    static EI_INLINE void one_by_one(const At<G>& tile, const int8_t* const (&a)[NC],
                                     const int32_t* const (&centre)[NC], const Ahead& ahead, Of<I32, G> (&total)[NC]) {
        const auto times = [&](const auto& scale) {
            return [&, scale](int c, const auto& d) {
                if constexpr (INT16) {
                    total[c] = add_int16_times(total[c], d, scale);
                } else {
                    total[c] = add_dot_times(total[c], d, scale);
                }
            };
        };
        for (int p = 0; p < 8; p++) {
            const auto scales = load_i8_as_i16(tile + 64 + 32 * p);
            prefetch(tile + 320 + 384 * p, 6, ahead);
            if constexpr (INT16) {
                half<NC, G>(tile, 2 * p, a, centre, times(even_low(scales)));
                half<NC, G>(tile, 2 * p + 1, a, centre, times(odd_low(scales)));
            } else {
                half<NC, G>(tile, 2 * p, a, centre, times(even_scale(scales)));
                half<NC, G>(tile, 2 * p + 1, a, centre, times(odd_scale(scales)));
            }
        }
    }

    // The same where they are INT16, two at a time.
    template <int NC, int G>
    static EI_INLINE void in_pairs(const At<G>& tile, const int8_t* const (&a)[NC], const int32_t* const (&centre)[NC],
                                   Of<I32, G> (&total)[NC]) {
        for (int p = 0; p < 8; p++) {
            Of<Dot, G> even[NC], odd[NC];
            half<NC, G>(tile, 2 * p, a, centre, [&](int c, const auto& d) { even[c] = d; });
            half<NC, G>(tile, 2 * p + 1, a, centre, [&](int c, const auto& d) { odd[c] = d; });
            const auto scales = load_i8_as_i16(tile + 64 + 32 * p);
            for (int c = 0; c < NC; c++) total[c] = add_pair_times(total[c], even[c], odd[c], scales);
        }
    }

    // Calls add(c, dot) with the dot products of the 16 inputs j of a tile.
    template <int NC, int G, class Add>
    static EI_INLINE void half(const At<G>& tile, int j, const int8_t* const (&a)[NC],
                               const int32_t* const (&centre)[NC], const Add& add) {
        const At<G> lines = tile + (320 + 192 * static_cast<size_t>(j));
        const auto l0 = load_u8(lines), l1 = load_u8(lines + 64), l2 = load_u8(lines + 128);
        const auto v0 = and_u8(l0, 0x3f), v1 = and_u8(l1, 0x3f), v2 = and_u8(l2, 0x3f);
        const auto low = or_u8(and_u8(shr_u16<6>(l0), 0x03), and_u8(shr_u16<4>(l1), 0x0c));
        const auto v3 = or_u8(low, and_u8(shr_u16<2>(l2), 0x30));
        for (int c = 0; c < NC; c++) {
            const int8_t* at = a[c] + 16 * j;
            const auto d = dot(dot(dot_from(centre[c] + j), v0, at), v1, at + 4);
            add(c, dot(dot(d, v2, at + 8), v3, at + 12));
        }
    }
};

// Float weights: four sums, of the inputs k = 0, 1, 2, 3 modulo 4, because one chain of FMAs would wait for each other.
template <int BYTES, F32 (*LOAD)(const void*)>
struct Floats {
    static constexpr int kTogether = 1, kStreams = 1, kColumns = kColumnsAtOnce;

    template <int NC, int G>
    static EI_INLINE void strip(const uint8_t* w, const Inputs& x, Columns at, const Ahead&, F32 (&f)[NC]) {
        F32 part[4][NC];
        for (auto& sums : part) {
            for (F32& sum : sums) sum = set_f32(0.0f);
        }
        const float* column[NC];
        for (int c = 0; c < NC; c++) column[c] = x.x + at.of(c) * x.ldx;
        int k = 0;
        for (; k + 4 <= x.n_in; k += 4) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const F32 row = LOAD(w + static_cast<size_t>(k + i) * (kRows * BYTES));
                for (int c = 0; c < NC; c++) {
                    part[i][c] = fma_f32(row, set_f32(column[c][k + i]), part[i][c]);
                }
            }
        }
        for (int i = 0; k + i < x.n_in; i++) {
            const F32 row = LOAD(w + static_cast<size_t>(k + i) * (kRows * BYTES));
            for (int c = 0; c < NC; c++) {
                part[i][c] = fma_f32(row, set_f32(column[c][k + i]), part[i][c]);
            }
        }
        for (int c = 0; c < NC; c++) f[c] = add_f32(add_f32(part[0][c], part[1][c]), add_f32(part[2][c], part[3][c]));
    }
};

EI_INLINE F32 load_row_f32(const void* p) { return load_f32(static_cast<const float*>(p)); }
EI_INLINE F32 load_row_f16(const void* p) { return load_f16(p); }
EI_INLINE F32 load_row_bf16(const void* p) { return load_bf16(p); }

}  // namespace

#include "kernels/mxfp4.h"
#include "kernels/ternary.h"
#include "kernels/tiles_23k.h"

namespace {

EI_INLINE void store_rows(float* y, F32 v, int n_rows) {
    if (n_rows >= kRows) {
        store_f32(y, v);
    } else {
        float rows[kRows];
        store_f32(rows, v);
        std::memcpy(y, rows, sizeof(float) * static_cast<size_t>(n_rows));
    }
}

// Columns c0.. of n; those past the last one have no place in y.
template <class FORMAT, int NC, int G>
void columns(const Matrix& w, const uint8_t* group, int row, const Inputs& x, int c0, int n, const Ahead& ahead,
             float* y, size_t ldy) {
    Of<F32, G> f[NC];
    // Stores become visible in order: those of sums that do not fit into registers would wait for lines of y to come.
    for (int c = 0; c0 > 0 && c < NC; c++) {
        for (int g = 0; g < G; g++) __builtin_prefetch(y + static_cast<size_t>(c0 + c) * ldy + row + g * kRows, 1);
    }
    const Columns which{c0 < n ? c0 : n - 1, n - 1, x.columns};
    FORMAT::template strip<NC, G>(places<G>(group, w.group_bytes), x, which, ahead, f);
    for (int c = 0; c < NC && c0 + c < n; c++) {
        for (int g = 0; g < G; g++) {
            const int at = row + g * kRows;
            store_rows(y + static_cast<size_t>(c0 + c) * ldy + at, of_group(f[c], g), w.n_out - at);
        }
    }
}

// NC of the columns from c on or, where there are fewer, `count`.
template <class FORMAT, int NC, int G>
void some_columns(const Matrix& w, const uint8_t* group, int row, const Inputs& x, int c, int count, int n,
                  const Ahead& ahead, float* y, size_t ldy) {
    if constexpr (NC > 1) {
        if (count < NC) return some_columns<FORMAT, NC - 1, G>(w, group, row, x, c, count, n, ahead, y, ldy);
    }
    columns<FORMAT, NC, G>(w, group, row, x, c, n, ahead, y, ldy);
}

// Columns c..end-1, MOST at once, in parts that are as large as each other. Where there are few, the first wait for the rows
// to come from memory, and are as many as there is room for.
template <class FORMAT, int G, int MOST>
EI_INLINE void all_columns(const Matrix& w, const uint8_t* group, int row, const Inputs& x, int c, int end, int n,
                           const Ahead& ahead, float* y, size_t ldy) {
    constexpr int kLater = FORMAT::kColumns < MOST ? FORMAT::kColumns : MOST;
    if (end <= 2 * kColumnsAtOnce) {
        some_columns<FORMAT, MOST, G>(w, group, row, x, c, end, n, ahead, y, ldy);
        c = MOST;
    }
    for (int parts = (end - c + kLater - 1) / kLater; parts > 0; parts--) {
        const int count = (end - c + parts - 1) / parts;
        some_columns<FORMAT, kLater, G>(w, group, row, x, c, count, n, ahead, y, ldy);
        c += count;
    }
}

// The product with at most MOST columns at once, first of G row groups side by side, then of single ones that are left.
template <class FORMAT, int G, int MOST>
void matmul_side_by_side(const Matrix& w, const Inputs& x, int n, int first, int last, const uint8_t* next, float* y,
                         size_t ldy) {
    const Prefetch& prefetch = prefetch_of(w, n);
    const size_t bytes = static_cast<size_t>(prefetch.ahead);
    const Hint hint = prefetch.hint == Hint::AroundL3 && w.is_kept ? Hint::All : prefetch.hint;
    const auto group = [&](int g) { return w.data + static_cast<size_t>(g) * w.group_bytes; };
    const auto ahead = [&](const uint8_t* end, ptrdiff_t past_end) {
        return Ahead{end, past_end, bytes, prefetch.easy && bytes, hint};
    };
    // After `end` comes what is read next or, if that is not known, what is being read.
    const auto ahead_of = [&](const uint8_t* end) {
        return ahead(end, next ? next - end : -static_cast<ptrdiff_t>(bytes));
    };
    // What comes before the first lines that strips prefetch.
    for (int g = first; prefetch.eager && g < first + (first + G <= last ? G : 1); g++) {
        for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(group(g) + at);
    }
    for (int c = 0; c < n; c += kTokensTogether) {
        const int some = n - c < kTokensTogether ? n : c + kTokensTogether;
        const int end = n < prefetch.tokens ? prefetch.tokens : some;
        int g = first;
        if constexpr (G > 1) {
            for (; g + G <= last; g += G) {
                const ptrdiff_t others = static_cast<ptrdiff_t>((G - 1) * w.group_bytes);
                const Ahead of_groups = g + G < last ? ahead(group(g + 1), others) : ahead_of(group(g + 1));
                all_columns<FORMAT, G, MOST>(w, group(g), g * kRows, x, c, end, n, of_groups, y, ldy);
            }
        }
        const Ahead of_one = ahead_of(group(last));
        for (; g < last; g++) all_columns<FORMAT, 1, MOST>(w, group(g), g * kRows, x, c, end, n, of_one, y, ldy);
    }
}

template <class FORMAT>
void matmul_as(const Matrix& w, const Inputs& x, int n, int first, int last, const uint8_t* next, float* y,
               size_t ldy) {
    constexpr int G = FORMAT::kTogether;
    const Prefetch& prefetch = prefetch_of(w, n);
    if constexpr (FORMAT::kStreams > G) {
        if (prefetch.at_once > G && (n > prefetch.tokens ? n : prefetch.tokens) <= kFewestTokens) {
            return matmul_side_by_side<FORMAT, FORMAT::kStreams, kFewestTokens>(w, x, n, first, last, next, y, ldy);
        }
    }
    if (G > 1 && prefetch.at_once > 1) {
        return matmul_side_by_side<FORMAT, G, kColumnsAtOnce>(w, x, n, first, last, next, y, ldy);
    }
    matmul_side_by_side<FORMAT, 1, kColumnsAtOnce>(w, x, n, first, last, next, y, ldy);
}

void matmul(const Matrix& w, const Inputs& x, int n, int first, int last, const uint8_t* next, float* y, size_t ldy) {
    switch (w.format) {
        case Format::F32: return matmul_as<Floats<4, load_row_f32>>(w, x, n, first, last, next, y, ldy);
        case Format::F16: return matmul_as<Floats<2, load_row_f16>>(w, x, n, first, last, next, y, ldy);
        case Format::BF16: return matmul_as<Floats<2, load_row_bf16>>(w, x, n, first, last, next, y, ldy);
        case Format::Q8_0: return matmul_as<Blocks32<8, kOffset8, false>>(w, x, n, first, last, next, y, ldy);
        case Format::Q4_0: return matmul_as<Blocks32<4, 8, false>>(w, x, n, first, last, next, y, ldy);
        case Format::Q4_1: return matmul_as<Blocks32<4, 0, true>>(w, x, n, first, last, next, y, ldy);
        case Format::Q5_0: return matmul_as<Blocks32<5, 16, false>>(w, x, n, first, last, next, y, ldy);
        case Format::Q5_1: return matmul_as<Blocks32<5, 0, true>>(w, x, n, first, last, next, y, ldy);
        case Format::Q2_K: return matmul_as<Tiles2K>(w, x, n, first, last, next, y, ldy);
        case Format::Q3_K: return matmul_as<Tiles3K>(w, x, n, first, last, next, y, ldy);
        case Format::Q4_K: return matmul_as<Tiles45K<4>>(w, x, n, first, last, next, y, ldy);
        case Format::Q5_K: return matmul_as<Tiles45K<5>>(w, x, n, first, last, next, y, ldy);
        case Format::Q6_K: return matmul_as<Tiles6K>(w, x, n, first, last, next, y, ldy);
        case Format::TQ1_0:
        case Format::TQ2_0: return matmul_as<TernaryTiles<TwoBits>>(w, x, n, first, last, next, y, ldy);
        case Format::TQ_BASE_THREE: return matmul_as<TernaryTiles<BaseThree>>(w, x, n, first, last, next, y, ldy);
        case Format::I2_S: return matmul_as<TernaryRows<TwoBits>>(w, x, n, first, last, next, y, ldy);
        case Format::I2_S_BASE_THREE: return matmul_as<TernaryRows<BaseThree>>(w, x, n, first, last, next, y, ldy);
        case Format::Q2_0: return matmul_as<TernaryBlocks>(w, x, n, first, last, next, y, ldy);
        case Format::MXFP4: return matmul_as<BlocksMxfp4>(w, x, n, first, last, next, y, ldy);
    }
}

// ---- activations -----------------------------------------------------------------------------------------------

// The bits of the largest |x|. As integers, a NaN is larger than every number and cannot be lost.
EI_INLINE float largest_magnitude(const float* x, int n) {
    I32 most = set_i32(0);
    for (int i = 0; i < n; i += 16) most = max_i32(most, and_i32(bits_of(load_f32(x + i)), set_i32(0x7fffffff)));
    const int32_t bits = max_of(most);
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    return magnitude;
}

// Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, in every ISA alike; the low bits are that integer.
constexpr float kRound = 12582912.0f;

EI_INLINE I32 round_to_i32(F32 v) { return sub_i32(bits_of(add_f32(v, set_f32(kRound))), bits_of(set_f32(kRound))); }

// Of 16 q; of what became of a NaN, something that fits too.
EI_INLINE int16_t short_sum(I32 q) { return static_cast<int16_t>(sum_of(q)); }

// q = round(x * 127 / max|x|), 16 at a time; gives the scale. Sums of 16 q go to sums.
template <int N>
EI_INLINE float quantize(const float* x, int8_t* q, int32_t (&sums)[N / 16]) {
    const float most = largest_magnitude(x, N);
    const bool zero = most < 1e-30f;  // false for NaN
    const F32 inverse = set_f32(zero ? 0.0f : 127.0f / most);
    for (int i = 0; i < N / 16; i++) {
        const I32 v = round_to_i32(mul_f32(load_f32(x + 16 * i), inverse));
        store_i8(q + 16 * i, v);
        sums[i] = short_sum(v);
    }
    return zero ? 0.0f : most / 127.0f;
}

void quantize32(const Inputs& x, int c) {
    const size_t n_blocks = static_cast<size_t>(x.n_in) / 32, column = static_cast<size_t>(c);
    const float* in = x.x + column * x.ldx;
    for (size_t b = 0; b < n_blocks; b++) {
        int32_t sums[2];
        x.scale32[column * n_blocks + b] =
            quantize<32>(in + 32 * b, x.q32 + column * static_cast<size_t>(x.n_in) + 32 * b, sums);
        x.sum32[column * n_blocks + b] = sums[0] + sums[1];
        x.centre32[column * n_blocks + b] =
            centre_32(x.q32 + column * static_cast<size_t>(x.n_in) + 32 * b, sums[0] + sums[1]);
    }
}

void quantize256(const Inputs& x, int c) {
    const size_t n_blocks = static_cast<size_t>(x.n_in) / 256, column = static_cast<size_t>(c);
    const float* in = x.x + column * x.ldx;
    for (size_t b = 0; b < n_blocks; b++) {
        int32_t sums[16];
        x.scale256[column * n_blocks + b] =
            quantize<256>(in + 256 * b, x.q256 + column * static_cast<size_t>(x.n_in) + 256 * b, sums);
        int32_t* centre = x.centre16 + (column * n_blocks + b) * 16;
        int16_t* sums16 = x.sums16 + (column * n_blocks + b) * 16;
        int16_t* sums32 = x.sums32 + (column * n_blocks + b) * 8;
        for (int i = 0; i < 16; i++) centre[i] = centre_16(x.q256 + (column * n_blocks + b) * 256 + 16 * i, sums[i]);
        for (int i = 0; i < 16; i++) sums16[i] = static_cast<int16_t>(sums[i]);
        for (int i = 0; i < 8; i++) sums32[i] = static_cast<int16_t>(sums[2 * i] + sums[2 * i + 1]);
        x.fits_int16[column * n_blocks + b] =
            kInt16Scaling != Int16Scaling::None && all_fit_int16(x.q256 + (column * n_blocks + b) * 256);
    }
}

// As BitNet does it, which takes 1e-5 for the largest |x| where that is smaller.
void quantize_token(const Inputs& x, int c) {
    const size_t n_in = static_cast<size_t>(x.n_in), column = static_cast<size_t>(c);
    const float* in = x.x + column * x.ldx;
    int8_t* q = x.q_token + column * n_in;
    const float largest = largest_magnitude(in, x.n_in);
    const float most = largest < 1e-5f ? 1e-5f : largest;  // NaN stays
    const F32 inverse = set_f32(127.0f / most);
    int32_t sum = 0;
    for (size_t i = 0; i < n_in; i += 16) {
        const I32 v = round_to_i32(mul_f32(load_f32(in + i), inverse));
        store_i8(q + i, v);
        sum += short_sum(v);
    }
    x.scale_token[column] = most / 127.0f;
    x.sum_token[column] = sum;
}

// ---- the rest of a layer ---------------------------------------------------------------------------------------

// The one order in which 16 lanes are summed: 8 pairs a distance of 8 apart, then 4, 2, 1.
EI_INLINE float sum_lanes(F32 v) {
    float lane[16];
    store_f32(lane, v);
    for (int width = 8; width >= 1; width /= 2) {
        for (int i = 0; i < width; i++) lane[i] = lane[i] + lane[i + width];
    }
    return lane[0];
}

// e^x to 1 ulp or so; x is held within -86 .. 88, where the result is a normal number.
EI_INLINE F32 exp_f32(F32 x) {
    x = min_f32(set_f32(88.0f), max_f32(set_f32(-86.0f), x));
    const F32 shifted = fma_f32(x, set_f32(1.44269504f), set_f32(kRound));
    const F32 n = sub_f32(shifted, set_f32(kRound));
    F32 r = fnma_f32(n, set_f32(0.693145752f), x);  // ln 2 in two parts (Cody and Waite)
    r = fnma_f32(n, set_f32(1.42860677e-6f), r);
    F32 p = set_f32(1.98756915e-4f);
    p = fma_f32(p, r, set_f32(1.39819995e-3f));
    p = fma_f32(p, r, set_f32(8.33345190e-3f));
    p = fma_f32(p, r, set_f32(4.16657959e-2f));
    p = fma_f32(p, r, set_f32(1.66666657e-1f));
    p = fma_f32(p, r, set_f32(5.00000000e-1f));
    const F32 y = add_f32(fma_f32(p, mul_f32(r, r), r), set_f32(1.0f));
    return as_f32(add_i32(bits_of(y), shl_i32(sub_i32(bits_of(shifted), bits_of(set_f32(kRound))), 23)));
}

void rms_norm(const float* x, const float* w, int n, float epsilon, float* out) {
    F32 squares = set_f32(0.0f);
    for (int i = 0; i < n; i += 16) {
        const F32 v = load_f32(x + i);
        squares = fma_f32(v, v, squares);
    }
    const F32 scale = set_f32(1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(n) + epsilon));
    for (int i = 0; i < n; i += 16) store_f32(out + i, mul_f32(mul_f32(load_f32(x + i), scale), load_f32(w + i)));
}

// y sigmoid(x)
EI_INLINE F32 times_sigmoid(F32 y, F32 x) {
    return div_f32(y, add_f32(set_f32(1.0f), exp_f32(sub_f32(set_f32(0.0f), x))));
}

void swiglu(float* gate, const float* up, int n) {
    for (int i = 0; i < n; i += 16) {
        const F32 g = load_f32(gate + i);
        store_f32(gate + i, mul_f32(times_sigmoid(g, g), load_f32(up + i)));
    }
}

void add_scaled(float* x, const float* y, int n, float scale) {
    for (int i = 0; i < n; i += 16) {
        store_f32(x + i, add_f32(load_f32(x + i), mul_f32(set_f32(scale), load_f32(y + i))));
    }
}

void silu(float* x, int n) {
    for (int i = 0; i < n; i += 16) store_f32(x + i, times_sigmoid(load_f32(x + i), load_f32(x + i)));
}

void blend(const float* z, const float* a, const float* b, int n, float* out) {
    for (int i = 0; i < n; i += 16) {
        const F32 s = times_sigmoid(set_f32(1.0f), load_f32(z + i));
        const F32 rest = mul_f32(sub_f32(set_f32(1.0f), s), load_f32(b + i));
        store_f32(out + i, add_f32(mul_f32(s, load_f32(a + i)), rest));
    }
}

// x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is x (1 + tanh(half of that)) / 2.
void geglu(float* gate, const float* up, int n) {
    for (int i = 0; i < n; i += 16) {
        const F32 g = load_f32(gate + i);
        const F32 slope = fma_f32(mul_f32(g, g), set_f32(7.13548139e-2f), set_f32(1.59576912f));
        const F32 e = exp_f32(mul_f32(sub_f32(set_f32(0.0f), g), slope));
        store_f32(gate + i, mul_f32(div_f32(g, add_f32(set_f32(1.0f), e)), load_f32(up + i)));
    }
}

void relu2_glu(float* gate, const float* up, int n) {
    for (int i = 0; i < n; i += 16) {
        const F32 g = max_f32(set_f32(0.0f), load_f32(gate + i));
        store_f32(gate + i, mul_f32(mul_f32(g, g), load_f32(up + i)));
    }
}

void relu2(float* x, int n) {
    for (int i = 0; i < n; i += 16) {
        const F32 g = max_f32(set_f32(0.0f), load_f32(x + i));
        store_f32(x + i, mul_f32(g, g));
    }
}

void clamped_swiglu(float* gate, const float* up, int n) {
    const F32 most = set_f32(7.0f), one = set_f32(1.0f);
    for (int i = 0; i < n; i += 16) {
        const F32 g = min_f32(most, load_f32(gate + i));
        const F32 u = max_f32(set_f32(-7.0f), min_f32(most, load_f32(up + i)));
        store_f32(gate + i, mul_f32(times_sigmoid(g, mul_f32(g, set_f32(1.702f))), add_f32(u, one)));
    }
}

// cap * tanh(x / cap), with tanh(y) = (1 - t) / (1 + t) for t = exp(-2 |y|), and the sign of y.
EI_INLINE F32 soft_cap(F32 x, F32 inverse, F32 cap) {
    const I32 sign_bit = set_i32(static_cast<int32_t>(0x80000000u));
    const F32 y = mul_f32(x, inverse);
    const I32 sign = and_i32(bits_of(y), sign_bit);
    const F32 magnitude = as_f32(and_i32(bits_of(y), set_i32(0x7fffffff)));
    const F32 t = exp_f32(mul_f32(magnitude, set_f32(-2.0f)));
    const F32 tanh = div_f32(sub_f32(set_f32(1.0f), t), add_f32(set_f32(1.0f), t));
    return mul_f32(as_f32(add_i32(bits_of(tanh), sign)), cap);  // the sign bit of tanh is 0: adding sets it
}

void scale_and_cap(float* x, int n, float scale, float cap) {
    for (int i = 0; i < n; i += 16) {
        float lane[16] = {};
        const size_t n_bytes = sizeof(float) * static_cast<size_t>(n - i < 16 ? n - i : 16);
        std::memcpy(lane, x + i, n_bytes);
        F32 v = mul_f32(load_f32(lane), set_f32(scale));
        if (cap != 0.0f) v = soft_cap(v, set_f32(1.0f / cap), set_f32(cap));
        store_f32(lane, v);
        std::memcpy(x + i, lane, n_bytes);
    }
}

}  // namespace

#include "kernels/attention.h"
#include "kernels/recurrence.h"
#include "kernels/router_math.h"

namespace {

// ---- what this machine can do at most --------------------------------------------------------------------------

int32_t read(const uint8_t* p, size_t n) {
    const Prefetch& known = known_policy.plain[1];
    const Ahead of_stream{p + n, 0, static_cast<size_t>(known.ahead), known.easy, known.hint};
    U8 seen[4];
    for (int i = 0; i < 4; i++) seen[i] = load_u8(p);
    for (size_t at = 0; at < n; at += 256) {
        prefetch(p + at, 4, of_stream);
        for (int i = 0; i < 4; i++) seen[i] = or_u8(seen[i], load_u8(p + at + 64 * static_cast<size_t>(i)));
    }
    const int8_t ones[4] = {1, 1, 1, 1};
    return max_of(add_dot(set_i32(0), dot(dot_zero(), or_u8(or_u8(seen[0], seen[1]), or_u8(seen[2], seen[3])), ones)));
}

// With as many sums at once as a matrix product has, taken out of 16 bits where dot products have no more.
int32_t multiply_adds(const uint8_t* p, int n_rounds) {
    constexpr int kSums = kColumnsAtOnce * kGroupsAtOnce, kDotsEach = kMultiplyAdds / 64 / kSums;
    constexpr int kChain = kDotsEach < 8 ? kDotsEach : 8;
    constexpr bool kInt16Dots = kDots<8> == 1;
    static_assert(kSums * kDotsEach * 64 == kMultiplyAdds && kDotsEach % kChain == 0);
    const int8_t* a = reinterpret_cast<const int8_t*>(p) + 512;
    Of<Dot, kGroupsAtOnce> d[kColumnsAtOnce];
    Of<I32, kGroupsAtOnce> sum[kColumnsAtOnce];
    for (int c = 0; c < kColumnsAtOnce; c++) d[c] = dot_zero(), sum[c] = set_i32(0);
    for (int round = 0; round < n_rounds; round++) {
        const auto codes = and_u8(load_u8(places<kGroupsAtOnce>(p + 64 * (round % 4), 64)), 0x0f);
        for (int chain = 0; chain < kDotsEach / kChain; chain++) {
#pragma GCC unroll 8
            for (int i = 0; i < kChain; i++) {
                // Or else GCC makes the same few products beforehand, and keeps them in memory.
                if constexpr (kInt16Dots) __asm__ volatile("" : "+r"(a));
                for (int c = 0; c < kColumnsAtOnce; c++) d[c] = dot(d[c], codes, a + 32 * c + 4 * i);
            }
            for (int c = 0; kInt16Dots && c < kColumnsAtOnce; c++) {
                sum[c] = add_dot(sum[c], d[c]);
                d[c] = dot_zero();
            }
        }
    }
    I32 most = set_i32(0);
    for (int c = 0; c < kColumnsAtOnce; c++) {
        sum[c] = add_dot(sum[c], d[c]);
        for (int g = 0; g < kGroupsAtOnce; g++) most = max_i32(most, of_group(sum[c], g));
    }
    return max_of(most);
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS = {
    EI_ISA_NAME,     kGroupsAtOnce, kStreamsAtOnce, matmul,       quantize32,     quantize256, quantize_token,
    rms_norm,        swiglu,        geglu,          relu2_glu,    clamped_swiglu, add_scaled,  silu,
    blend,           scale_and_cap, softmax,        sigmoid,      sqrt_softplus,  softplus,    weighted_sum,
    store_key_value, attention,     convolve,       dot_product,  unit_length,    decays,      delta_read,
    delta_update,    delta_values,  mamba_steps,    mamba_values, relu2,          read,        multiply_adds};
