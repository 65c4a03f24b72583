// A weight matrix in the layout that the kernels read: tiles of 16 output rows, so that one 64-byte line holds the same
// few inputs k of 16 rows and each vector lane sums one row. No horizontal sums, and the same bytes serve every ISA.
//
// A row group is 16 rows and one contiguous stream; groups stand one after the other. Rows past n_out are zero.
// "line i: byte 4*row + c" below means 64 bytes, 4 for each of the 16 rows.
//
// Everything stands in the order in which it is read: the hardware's prefetchers follow one stream, and two or three
// interleaved ones cost half of the bandwidth.
//
// Blocks of 32 inputs (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1)
//   Q4_1, Q5_1:        for each block  f16 d[16] | f16 m[16] | codes
//   Q8_0, Q4_0, Q5_0:  for each two blocks  f16 d[16] of the first | f16 d[16] of the second | codes | codes
//   codes, 4 bits: 4 lines; line i, byte 4*row + c: low nibble  = code at k = 4i + c
//                                                   high nibble = code at k = 16 + 4i + c            (i, c = 0..3)
//   codes, 5 bits: 5 lines; byte 4*row + c, code w_i at k = 4i + c                                  (i = 0..7)
//                  bits 0..4 of lines 0..4 = w_0, w_1, w_3, w_4, w_6
//                  bits 5..7 of lines 0, 2, 4 = low bits of w_2, w_5, w_7; bits 5, 6 of lines 1, 3 = high bits of w_2, w_5
//                  bit 7 of line 1 = bit 3 of w_7, bit 7 of line 3 = bit 4 of w_7
//   codes, 8 bits: 8 lines; line i, byte 4*row + c = 128 + code at k = 4i + c                       (i = 0..7)
//   MXFP4:             for each four blocks  u8 e[4][16], e[b][row] = exponent of block b | four times codes, 4 bits
//                      (Rouhani et al., arXiv:2310.10537). The last ones may be fewer than four, under a whole line of e.
//                      A weight is (kMxfp4Codes[code] - kMxfp4Offset) * 2^(e - 128): its scale is half of the format's,
//                      its integer twice the format's number. 2^-128 and 2^-127 are subnormal floats.
//
// Tiles of 256 inputs (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)
//   Q2_K:        0 f16 d[16] | 32 f16 dmin[16] | 64 u8 s[8][32], s[p][2*row + h] of the 16 inputs 2p+h: low nibble = scale,
//                high nibble = min
//                320: 16 lines; line j, byte 4*row + c: bits 2u, 2u+1 = code at k = 16j + 4u + c          (u, c = 0..3)
//   Q3_K:        for each two tiles  f16 d[16] of the first | f16 d[16] of the second | tile | tile
//                tile: 0 six bits each of 256 scales s[8][32], less 32: s[p][2*row + h] of the 16 inputs 2p+h; byte i of
//                line u = 0, 1, 2:
//                  bits 2..7 = s[64u + i], bits 0, 1 = bits 2u, 2u+1 of s[192 + i]
//                192: for each 32 inputs p = 0..7 three lines; byte 4*row + c, code w_i at k = 32p + 4i + c
//                  bits 3..5 of lines 0, 1, 2 = w_0, w_2, w_4; bits 0..2 = w_1, w_3, w_5
//                  bits 6, 7 of lines 0, 1 = high bits of w_6, w_7; bits 6, 7 of line 2 = bit 0 of w_6, of w_7
//   Q4_K, Q5_K:  0 f16 d[16] | 32 f16 dmin[16] | 64 the six bits each of 256 scales and mins s: sc[8][16] | m[4][32],
//                m[p][2*row + h] = min of block 2p+h; byte i of line u = 0, 1, 2:
//                  bits 0..5 = s[64u + i], bits 6, 7 = bits 2u, 2u+1 of s[192 + i]
//                256: 8 blocks of 32 codes, 4 or 5 bits as above
//   Q6_K:        0 f16 d[16], 32 bytes free | 64 i8 sc[8][32], sc[p][2*row + h] = scale of the 16 inputs 2p+h
//                320: for each 16 inputs j = 0..15 three lines; byte 4*row + c of line u = 0, 1, 2:
//                  bits 0..5 = code at k = 16j + 4u + c, bits 6, 7 = bits 2u, 2u+1 of the code at k = 16j + 12 + c
//
// Ternary, codes one above the weights, lines of 16 inputs
//   line i, byte 4*row + c: bits 2j, 2j+1 = code at k = 16i + 4j + c                                  (j, c = 0..3)
//   I2_S:          f32 scale[16] | lines (edgeinfer.models.formats.ternary_packing, two bits)
//   TQ1_0, TQ2_0:  for each two tiles of 256 inputs  f16 d[16] of the first | f16 d[16] of the second | 16 lines | 16
//                  lines
//   Q2_0:          for each two blocks of 64 inputs  f16 d[16] of the first | f16 d[16] of the second | 4 lines | 4 lines
//
// Ternary in base three, lines of 20 inputs, five weights a byte, v = their sum times 1, 3, 9, 27, 81
//   line i, byte 4*row + c: bit 7 = v < 0, bits 0..6 = |v|, the weights at k = 20i + 4j + c            (j = 0..4, c = 0..3)
//   I2_S:          f32 scale[16] | lines (edgeinfer.models.formats.ternary_packing)
//   TQ1_0, TQ2_0:  for each two tiles of 256 inputs  f16 d[16] of the first | f16 d[16] of the second | 13 lines | 13
//                  lines
//   Inputs behind the last one have weights of -1, whose code is 0: it does not matter what their activations are.
//
// F32, F16, BF16: row group = for each k the 16 rows' values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

// The formats of a weight matrix, with ggml's numbers; what only packed weights have stands 1000 above its source.
enum class Format : int {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    I2_S = 36,
    MXFP4 = 39,
    Q2_0 = 42,
    TQ_BASE_THREE = 1034,  // of TQ1_0 and TQ2_0
    I2_S_BASE_THREE = 1036
};

// What a matrix wants its inputs as.
enum class InputKind : int { Float, Int8By32, Int8By256, Int8ByToken };

constexpr int kRows = 16;  // of a row group

// What the sixteen codes of MXFP4 stand for, doubled and above zero: 0, 1/2, 1, 3/2, 2, 3, 4, 6, then the same negative.
constexpr int kMxfp4Offset = 12;
constexpr uint8_t kMxfp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int kMxfp4Together = 4;  // blocks under one line of exponents

// Up to so many tokens, products are tuned for each number of them.
constexpr int kFewTokens = 8;
constexpr int kFewestTokens = 1;  // for which there are kernels with still more row groups at once

// Caches to prefetch into: all, L2 and outwards, or all but the outer ones, for what is read once.
enum class Hint : int { All, FromL2, AroundL3 };

// How a product with a few tokens reads its matrix. The choice changes the time, not the bits.
struct Prefetch {
    int ahead = 0;     // prefetch distance in bytes, a multiple of 64; 0: no prefetches
    bool easy = true;  // also for lines that take little work, where the CPU's own prefetchers might keep up
    Hint hint = Hint::All;
    int at_once = 1;     // row groups read side by side, if the kernels have as many
    int tokens = 1;      // that the kernel multiplies at least; those past the last one are copies of it, and dropped
    int task = 0;        // bytes of a task; 0 where the product is bound by arithmetic: many small tasks
    int tasks_each = 1;  // that a thread gets at least, of a small matrix
    bool eager = false;  // a task begins by prefetching its first lines, and the last tasks are shorter
};

// By number of tokens; index 0 is for more than kFewTokens.
struct PrefetchPolicy {
    Prefetch plain[kFewTokens + 1], ternary[kFewTokens + 1];
};
extern const PrefetchPolicy known_policy;  // measured on CPUs like this one

static constexpr bool is_ternary(Format format) {
    switch (format) {
        case Format::TQ1_0:
        case Format::TQ2_0:
        case Format::TQ_BASE_THREE:
        case Format::I2_S:
        case Format::I2_S_BASE_THREE:
        case Format::Q2_0: return true;
        default: return false;
    }
}

class ProductDevice;

struct Matrix {
    Format format = Format::F32;
    int n_out = 0, n_in = 0;
    size_t group_bytes = 0;
    const uint8_t* data = nullptr;
    bool is_kept = false;  // in the outer caches from pass to pass, as far as they have room
    const PrefetchPolicy* policy = &known_policy;
    ProductDevice* device = nullptr;  // that multiplies with it as its matrix `number`; null for the kernels
    int number = 0;

    int n_groups() const { return (n_out + kRows - 1) / kRows; }
    size_t n_bytes() const { return group_bytes * static_cast<size_t>(n_groups()); }

    // Its row groups from `first` on.
    Matrix from(int first) const {
        Matrix rest = *this;
        rest.n_out -= first * kRows;
        rest.data += static_cast<size_t>(first) * group_bytes;
        return rest;
    }
};

// How its product with n tokens reads it.
static inline const Prefetch& prefetch_of(const Matrix& w, int n) {
    const PrefetchPolicy& policy = *w.policy;
    return (is_ternary(w.format) ? policy.ternary : policy.plain)[n > kFewTokens ? 0 : n];
}

// Inputs of so many tokens, and what is made of them, stay in a core's cache while all row groups of a task go by.
constexpr int kTokensTogether = 64;

// How many row groups one task of a matrix product with n tokens takes, a multiple of those that are read side by side. A
// task of a stream is long enough for the prefetchers to be worth starting. With many tokens it is read again for each
// kTokensTogether, from the core's cache.
inline int groups_of_task(const Matrix& w, int n, int n_threads, int together) {
    constexpr size_t kInCache = size_t{192} << 10;
    const Prefetch& prefetch = prefetch_of(w, n);
    const int n_groups = w.n_groups(), small = n_groups / (16 * n_threads);
    const auto of_bytes = [&](size_t bytes) { return static_cast<int>(bytes / w.group_bytes) + 1; };
    const auto whole = [&](int groups) { return (std::max(1, groups) + together - 1) / together * together; };
    if (!prefetch.task) return whole(n > kTokensTogether ? std::min(small, of_bytes(kInCache)) : small);
    const int large = n_groups / (prefetch.tasks_each * n_threads);
    return whole(std::clamp(of_bytes(static_cast<size_t>(prefetch.task)), small, std::max(small, large)));
}

// A matrix product cut into tasks of some row groups each. Those that come last are smaller: of two threads, one waits for
// the other's last task. Only for a stream, where one thread gets what another leaves of the memory's rate, long ones are
// better on some CPUs. A device gets its matrix whole.
struct Tasks {
    int n_groups, groups_each, n_whole, groups_of_rest, n_threads;

    // most_at_once: row groups that the kernels can take side by side.
    Tasks(const Matrix& w, int n, int n_threads, int most_at_once) : n_groups(w.n_groups()), n_threads(n_threads) {
        const Prefetch& prefetch = prefetch_of(w, n);
        const int least = std::min(prefetch.at_once, most_at_once);
        groups_each = groups_of_task(w, n, n_threads, least);
        const bool cut = n_threads > 1 && (!prefetch.task || prefetch.eager);
        const int rest = cut ? std::min(n_groups, n_threads * groups_each) : 0;
        n_whole = (n_groups - rest) / groups_each;
        groups_of_rest = rest ? std::max(least, groups_each / 4 / least * least) : groups_each;
        if (w.device) n_whole = 1, groups_each = groups_of_rest = n_groups;
    }
    int count() const { return n_whole + (n_groups - n_whole * groups_each + groups_of_rest - 1) / groups_of_rest; }
    int first(int task) const {
        const int whole = std::min(task, n_whole);
        return std::min(n_groups, whole * groups_each + (task - whole) * groups_of_rest);
    }
    int last(int task) const { return first(task + 1); }
    // What the thread that does a task will probably read next, or null.
    const uint8_t* behind(const Matrix& w, int task) const {
        const int next = task + n_threads;
        return next < count() ? w.data + static_cast<size_t>(first(next)) * w.group_bytes : nullptr;
    }
};

// The inputs of a matrix product: columns of n_in numbers, in the kinds that were prepared.
// Int8By32: x = scale * q for each 32; sum = the sum of the 32 q; centre = what a dot product with the integers of MXFP4
// begins with, as they stand kMxfp4Offset above the true ones.  Int8By256: likewise for each 256, with the sums of
// each 16 and each 32 q; for each 16 what a dot product with codes that stand 32 above the true ones begins with, in the
// form of the instruction set (centre_16 in simd_*.h); and whether dot products fit into 16 bits, because the magnitudes
// of no 16 add up to more than kMostOf16.  Int8ByToken: likewise for a whole column. Distances between columns are those
// of the arrays' element type. Behind the last q256 and q_token kBehindInputs bytes are read.
constexpr int kBehindInputs = 16;
constexpr int kMostOf16 = 1023;
enum class Int16Scaling { None, Singles, Pairs };  // how an instruction set uses that, see simd_scalar.h

struct Inputs {
    int n_in = 0;
    const float* x = nullptr;  // (n, ldx)
    const int32_t* columns =
        nullptr;  // null, or which columns those of a product are: a product of some rows of a pass
    size_t ldx = 0;
    int8_t* q32 = nullptr;          // (n, n_in)
    float* scale32 = nullptr;       // (n, n_in / 32)
    int32_t* sum32 = nullptr;       // (n, n_in / 32)
    int32_t* centre32 = nullptr;    // (n, n_in / 32)
    int8_t* q256 = nullptr;         // (n, n_in)
    float* scale256 = nullptr;      // (n, n_in / 256)
    int32_t* centre16 = nullptr;    // (n, n_in / 16)
    int16_t* sums16 = nullptr;      // (n, n_in / 16)
    int16_t* sums32 = nullptr;      // (n, n_in / 32)
    uint8_t* fits_int16 = nullptr;  // (n, n_in / 256)
    int8_t* q_token = nullptr;      // (n, n_in)
    float* scale_token = nullptr;   // (n,)
    int32_t* sum_token = nullptr;   // (n,)

    // These columns of them, wherever they are.
    Inputs of(const int32_t* which) const {
        Inputs some = *this;
        some.columns = which;
        return some;
    }

    // The columns from c on; all arrays must be there.
    Inputs from(int c) const {
        const size_t column = static_cast<size_t>(c), n = static_cast<size_t>(n_in);
        Inputs rest = *this;
        rest.x += column * ldx;
        rest.q32 += column * n;
        rest.scale32 += column * (n / 32);
        rest.sum32 += column * (n / 32);
        rest.centre32 += column * (n / 32);
        rest.q256 += column * n;
        rest.scale256 += column * (n / 256);
        rest.centre16 += column * (n / 16);
        rest.sums16 += column * (n / 16);
        rest.sums32 += column * (n / 32);
        rest.fits_int16 += column * (n / 256);
        rest.q_token += column * n;
        rest.scale_token += column;
        rest.sum_token += column;
        return rest;
    }
};

constexpr InputKind input_kind(Format format) {
    switch (format) {
        case Format::Q2_K:
        case Format::Q3_K:
        case Format::Q4_K:
        case Format::Q5_K:
        case Format::Q6_K:
        case Format::TQ1_0:
        case Format::TQ2_0:
        case Format::TQ_BASE_THREE: return InputKind::Int8By256;
        case Format::I2_S:
        case Format::I2_S_BASE_THREE: return InputKind::Int8ByToken;
        case Format::F32:
        case Format::F16:
        case Format::BF16: return InputKind::Float;
        default: return InputKind::Int8By32;
    }
}
