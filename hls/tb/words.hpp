// Bytes of files and arrays as the streams of the tops, and back.
#pragma once

#include <stdexcept>
#include <string>

#include "ei_types.hpp"

namespace ei_tb {

// n words of whole bytes, the first byte lowest.
template <class Word>
void write_words(const std::uint8_t* bytes, int n, hls::stream<Word>& to) {
    constexpr int kBytes = Word::width / 8;
    static_assert(Word::width % 8 == 0, "words of whole bytes");
    for (int i = 0; i < n; i++, bytes += kBytes) {
        Word word = 0;
        for (int b = 0; b < kBytes; b++) word.range(8 * b + 7, 8 * b) = ap_uint<8>(bytes[b]);
        to.write(word);
    }
}

// The activations of a token, in groups of G, padded with 0 to whole steps.
template <class E>
void write_inputs(const std::int8_t* x, int n_in, hls::stream<typename E::Group>& to) {
    for (int first = 0; first < E::n_steps(n_in) * E::kStepInputs; first += E::kTrits) {
        typename E::Group group = 0;
        for (int j = 0; j < E::kTrits; j++) {
            const int value = first + j < n_in ? x[first + j] : 0;
            group.range(8 * j + 7, 8 * j) = ap_uint<8>(value);
        }
        to.write(group);
    }
}

// The sums of n_out rows, from tiles of R.
template <class E>
void read_rows(hls::stream<typename E::Tile>& from, int n_out, std::int32_t* y) {
    for (int tile = 0; tile < E::n_tiles(n_out); tile++) {
        const typename E::Tile sums = from.read();
        for (int r = 0; r < E::kRows && tile * E::kRows + r < n_out; r++) {
            const typename E::Sum sum = ap_uint<E::kSumBits>(sums.range((r + 1) * E::kSumBits - 1, r * E::kSumBits));
            y[tile * E::kRows + r] = sum.to_int();
        }
    }
}

template <class T>
void check_empty(hls::stream<T>& stream, const std::string& what) {
    if (!stream.empty()) throw std::runtime_error("the kernel left " + what + " unread");
}

}  // namespace ei_tb
