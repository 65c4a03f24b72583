// The product of a ternary matrix with int8 activations by look-up in tables (Qiao et al., arXiv:2510.15926). Exact.
//
// In a step the sums of all ternary weights of G activations are put into each of T tables, and then every row of the
// matrix costs one look-up a table; R rows are looked up in a clock cycle. Tables have two banks: those of the next step
// are filled while this step's are read, and the activations of the step after that come in. hls/packing.py draws the
// stream of weights. Rows have a sum in memory, so that the weights of a step need not wait for another.
#pragma once

#include "ei_types.hpp"

namespace ei {

// How the weights of a table are stored: G trits, the lowest first, as sum of (w[j] + 1) * 3^j.
template <int G>
struct Encoding;
template <>
struct Encoding<5> {  // base3
    static constexpr int kBits = 8, kEntries = 243;
};
template <>
struct Encoding<3> {  // g3x5
    static constexpr int kBits = 5, kEntries = 27;
};
template <>
struct Encoding<1> {  // 2bit
    static constexpr int kBits = 2, kEntries = 3;
};

// An engine, for matrices of up to MAX_OUT rows and MAX_IN columns.
template <int G, int R, int T, int MAX_IN, int MAX_OUT>
struct Engine {
    static constexpr int kTrits = G, kRows = R, kTables = T, kMaxIn = MAX_IN, kMaxOut = MAX_OUT;
    static constexpr int kIndexBits = Encoding<G>::kBits, kEntries = Encoding<G>::kEntries;
    static constexpr int kSpan = 1 << kIndexBits;  // addresses of a bank
    static constexpr int kStepInputs = T * G, kMaxTiles = divided_up(MAX_OUT, R);
    static constexpr int kSumBits = accumulator_bits(MAX_IN);

    using Group = ap_uint<8 * G>;              // activations of a table
    using Beat = ap_uint<R * T * kIndexBits>;  // weights of a cycle: index (r, t) from bit kIndexBits * (r * T + t) on
    using Index = ap_uint<kIndexBits>;         // of an entry
    using Entry = ap_int<signed_bits(128 * G)>;  // of a table
    using Sum = ap_int<kSumBits>;                // of a row
    using Tile = ap_uint<R * kSumBits>;          // sums of R rows, the first lowest

    static int n_steps(int n_in) { return divided_up(n_in, kStepInputs); }
    static int n_tiles(int n_out) { return divided_up(n_out, kRows); }
};

// x times the weight code - 1.
inline ap_int<9> weighted(ap_int<8> x, ap_uint<2> code) {
#pragma HLS INLINE
    ap_int<9> product = 0;
    if (code == 0) product = -x;
    if (code == 2) product = x;
    return product;
}

// The digits of a number in base 3, lowest first, which counts up. No divider, and no table of digits.
template <int G>
struct Digits {
    ap_uint<2> digit[G];

    void reset() {
#pragma HLS INLINE
        for (int j = 0; j < G; j++) {
#pragma HLS UNROLL
            digit[j] = 0;
        }
    }
    void count() {
#pragma HLS INLINE
        bool carry = true;
        for (int j = 0; j < G; j++) {
#pragma HLS UNROLL
            const bool wraps = digit[j] == 2;
            if (carry) digit[j] = wraps ? ap_uint<2>(0) : ap_uint<2>(digit[j] + 1);
            carry = carry && wraps;
        }
    }
};

// The activations of a step, G a table. They come in as a shift register: the first is in place when all T are there.
template <class E>
struct StepInputs {
    ap_int<8> x[E::kTables][E::kTrits];

    void shift_in(typename E::Group group) {
#pragma HLS INLINE
        for (int t = 0; t + 1 < E::kTables; t++) {
#pragma HLS UNROLL
            for (int j = 0; j < E::kTrits; j++) {
#pragma HLS UNROLL
                x[t][j] = x[t + 1][j];
            }
        }
        for (int j = 0; j < E::kTrits; j++) {
#pragma HLS UNROLL
            x[E::kTables - 1][j] = ap_uint<8>(group.range(8 * j + 7, 8 * j));
        }
    }
};

// What sums of rows are kept in: sum `row` of a tile adds up over the steps.
template <class E>
using Sums = typename E::Sum[E::kMaxTiles][E::kRows];

// Adds a tile's sums of a step, and gives out those of the last.
template <class E, class Partial>
void add_tile(Sums<E>& sums, int tile, const Partial (&partial)[E::kRows], bool first, bool last,
              hls::stream<typename E::Tile>& y) {
#pragma HLS INLINE
    typename E::Tile done = 0;
    for (int r = 0; r < E::kRows; r++) {
#pragma HLS UNROLL
        typename E::Sum sum = partial[r];
        if (!first) sum += sums[tile][r];
        sums[tile][r] = sum;
        done.range((r + 1) * E::kSumBits - 1, r * E::kSumBits) = ap_uint<E::kSumBits>(sum);
    }
    if (last) y.write(done);
}

// The sums of R rows by the tables of a bank. Each row has a copy of the tables, or all share one.
template <class E, int COPIES>
void look_up(const typename E::Entry (&table)[COPIES][E::kTables][2 * E::kSpan], int bank, typename E::Beat beat,
             ap_int<signed_bits(128 * E::kStepInputs)> (&partial)[E::kRows]) {
#pragma HLS INLINE
    for (int r = 0; r < E::kRows; r++) {
#pragma HLS UNROLL
        partial[r] = 0;
        for (int t = 0; t < E::kTables; t++) {
#pragma HLS UNROLL
            const int low = E::kIndexBits * (r * E::kTables + t);
            const typename E::Index index = beat.range(low + E::kIndexBits - 1, low);
            partial[r] += table[COPIES == 1 ? 0 : r][t][bank * E::kSpan + index.to_int()];
        }
    }
}

// Entry `at` of all tables of a bank, whose digits are given.
template <class E, int COPIES>
void fill(typename E::Entry (&table)[COPIES][E::kTables][2 * E::kSpan], int bank, int at,
          const Digits<E::kTrits>& digits, const StepInputs<E>& inputs) {
#pragma HLS INLINE
    for (int t = 0; t < E::kTables; t++) {
#pragma HLS UNROLL
        typename E::Entry entry = 0;
        for (int j = 0; j < E::kTrits; j++) {
#pragma HLS UNROLL
            entry += weighted(inputs.x[t][j], digits.digit[j]);
        }
        for (int copy = 0; copy < COPIES; copy++) {
#pragma HLS UNROLL
            table[copy][t][bank * E::kSpan + at] = entry;
        }
    }
}

// One loop that does three things at once in each step: reads the activations of step + 2, fills the tables of step + 1,
// and looks up the weights of step. So a step takes as long as the longest of them.
template <class E, int COPIES>
void run_steps(typename E::Entry (&table)[COPIES][E::kTables][2 * E::kSpan], Sums<E>& sums,
               hls::stream<typename E::Group>& x, hls::stream<typename E::Beat>& w, hls::stream<typename E::Tile>& y,
               int n_steps, int n_tiles) {
#pragma HLS INLINE
    StepInputs<E> coming, current;
#pragma HLS ARRAY_PARTITION variable = coming.x complete dim = 0
#pragma HLS ARRAY_PARTITION variable = current.x complete dim = 0
    Digits<E::kTrits> digits;
#pragma HLS ARRAY_PARTITION variable = digits.digit complete
steps:
    for (int step = -2; step < n_steps; step++) {
#pragma HLS LOOP_FLATTEN off
        const bool reads = step + 2 < n_steps, fills = step >= -1 && step + 1 < n_steps, looks_up = step >= 0;
        const int bank = step & 1, next_bank = bank ^ 1;
        const int n_cycles =
            largest_of(reads ? E::kTables : 0, largest_of(fills ? E::kEntries : 0, looks_up ? n_tiles : 0));
        digits.reset();
    cycles:
        for (int c = 0; c < n_cycles; c++) {
#pragma HLS PIPELINE II = 1
#pragma HLS DEPENDENCE variable = table type = inter dependent = false
#pragma HLS DEPENDENCE variable = sums type = inter dependent = false
            if (reads && c < E::kTables) coming.shift_in(x.read());
            if (fills && c < E::kEntries) fill<E, COPIES>(table, next_bank, c, digits, current);
            digits.count();
            if (looks_up && c < n_tiles) {
                ap_int<signed_bits(128 * E::kStepInputs)> partial[E::kRows];
#pragma HLS ARRAY_PARTITION variable = partial complete
                look_up<E, COPIES>(table, bank, w.read(), partial);
                add_tile<E>(sums, c, partial, step == 0, step + 1 == n_steps, y);
            }
        }
        current = coming;
    }
}

// The product, by the storage that fits the encoding. x: n_steps * T groups, padded with 0; w: n_steps * n_tiles beats;
// y: n_tiles tiles.
template <int G>
struct Product;

// 243 of 256 entries in two banks are a block RAM of 18 Kb, with one port to write and one to read: a copy for each row.
template <>
struct Product<5> {
    template <class E>
    static void run(hls::stream<typename E::Group>& x, hls::stream<typename E::Beat>& w,
                    hls::stream<typename E::Tile>& y, int n_steps, int n_tiles) {
        static typename E::Entry table[E::kRows][E::kTables][2 * E::kSpan];
#pragma HLS ARRAY_PARTITION variable = table complete dim = 1
#pragma HLS ARRAY_PARTITION variable = table complete dim = 2
#pragma HLS BIND_STORAGE variable = table type = ram_s2p impl = bram
        static Sums<E> sums;
#pragma HLS ARRAY_PARTITION variable = sums complete dim = 2
#pragma HLS BIND_STORAGE variable = sums type = ram_s2p impl = bram
        run_steps<E, E::kRows>(table, sums, x, w, y, n_steps, n_tiles);
    }
};

// 27 of 32 entries in two banks are one RAM64 a bit, and seven rows read the same one.
template <>
struct Product<3> {
    template <class E>
    static void run(hls::stream<typename E::Group>& x, hls::stream<typename E::Beat>& w,
                    hls::stream<typename E::Tile>& y, int n_steps, int n_tiles) {
        static typename E::Entry table[1][E::kTables][2 * E::kSpan];
#pragma HLS ARRAY_PARTITION variable = table complete dim = 1
#pragma HLS ARRAY_PARTITION variable = table complete dim = 2
#pragma HLS BIND_STORAGE variable = table type = ram_1wnr impl = lutram
        static Sums<E> sums;
#pragma HLS ARRAY_PARTITION variable = sums complete dim = 2
#pragma HLS BIND_STORAGE variable = sums type = ram_s2p impl = lutram
        run_steps<E, 1>(table, sums, x, w, y, n_steps, n_tiles);
    }
};

// Without tables: each weight is applied to its activation, as other designs do it.
template <>
struct Product<1> {
    template <class E>
    static void run(hls::stream<typename E::Group>& x, hls::stream<typename E::Beat>& w,
                    hls::stream<typename E::Tile>& y, int n_steps, int n_tiles) {
        static Sums<E> sums;
#pragma HLS ARRAY_PARTITION variable = sums complete dim = 2
        StepInputs<E> coming, current;
#pragma HLS ARRAY_PARTITION variable = coming.x complete dim = 0
#pragma HLS ARRAY_PARTITION variable = current.x complete dim = 0
    steps:
        for (int step = -1; step < n_steps; step++) {
#pragma HLS LOOP_FLATTEN off
            const bool reads = step + 1 < n_steps, multiplies = step >= 0;
            const int n_cycles = largest_of(reads ? E::kTables : 0, multiplies ? n_tiles : 0);
        cycles:
            for (int c = 0; c < n_cycles; c++) {
#pragma HLS PIPELINE II = 1
#pragma HLS DEPENDENCE variable = sums type = inter dependent = false
                if (reads && c < E::kTables) coming.shift_in(x.read());
                if (multiplies && c < n_tiles) {
                    ap_int<signed_bits(128 * E::kStepInputs)> partial[E::kRows];
#pragma HLS ARRAY_PARTITION variable = partial complete
                    multiply<E>(w.read(), current, partial);
                    add_tile<E>(sums, c, partial, step == 0, step + 1 == n_steps, y);
                }
            }
            current = coming;
        }
    }

private:
    template <class E>
    static void multiply(typename E::Beat beat, const StepInputs<E>& inputs,
                         ap_int<signed_bits(128 * E::kStepInputs)> (&partial)[E::kRows]) {
#pragma HLS INLINE
        for (int r = 0; r < E::kRows; r++) {
#pragma HLS UNROLL
            partial[r] = 0;
            for (int t = 0; t < E::kTables; t++) {
#pragma HLS UNROLL
                const int low = 2 * (r * E::kTables + t);
                partial[r] += weighted(inputs.x[t][0], ap_uint<2>(beat.range(low + 1, low)));
            }
        }
    }
};

template <class E>
void tlmm(hls::stream<typename E::Group>& x, hls::stream<typename E::Beat>& w, hls::stream<typename E::Tile>& y,
          int n_steps, int n_tiles) {
    Product<E::kTrits>::template run<E>(x, w, y, n_steps, n_tiles);
}

}  // namespace ei
