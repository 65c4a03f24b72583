// Formats of super-blocks: 256 weights in runs whose scales are quantised too. A lane is a run of one super-block.
#pragma once

#include "floats.h"
#include "searches.h"

namespace {

constexpr int kSuper = 256;

// quantize(weights, importance, to) of each super-block, importance as far as there is one.
template <int bytes, class One>
EI_INLINE void each_super_block(const Rows& rows, One quantize) {
    const int64_t a_row = rows.n_in / kSuper;
    for (int64_t i = 0; i < rows.n_rows * a_row; i++) {
        const float* importance = rows.importance ? rows.importance + kSuper * (i % a_row) : nullptr;
        quantize(rows.weights + kSuper * i, importance, rows.bytes + bytes * i);
    }
}

// The same with the sum of the squares of the super-block's weights.
template <int bytes, class One>
EI_INLINE void each_with_squares(const Rows& rows, One quantize) {
    const int64_t a_row = rows.n_in / kSuper, n = rows.n_rows * a_row;
    for (int64_t first = 0; first < n; first += kLanes) {
        const float* from[kLanes];
        for (int lane = 0; lane < kLanes; lane++)
            from[lane] = rows.weights + kSuper * (first + lane < n ? first + lane : n - 1);
        const Floats squares = sums_of_squares(from, kSuper);
        for (int64_t i = first; i < n && i < first + kLanes; i++) {
            const float* importance = rows.importance + kSuper * (i % a_row);
            quantize(from[i - first], importance, squares[i - first], rows.bytes + bytes * i);
        }
    }
}

// Importance of the weights of some runs: that of the column times the root of w^2 + square.
template <int n>
EI_INLINE void with_sizes(Floats (&importance)[n], const Floats (&x)[n], const float* columns, float square) {
    load(importance, columns);
    for (int k = 0; k < n; k++) importance[k] *= root(square + x[k] * x[k]);
}

// ---- w = d sc q - dmin m: Q2_K, Q4_K, Q5_K -------------------------------------------------------------------------

// The runs of a super-block, some side by side in each group.
template <int run>
struct AffineRuns {
    static constexpr int kRuns = kSuper / run, kGroups = kRuns / kLanes;
    Floats x[kGroups][run];
    Affine found[kGroups];
    // Codes of scales and of minimums, which are minus the least of a run; d and dmin as float16.
    float scale_codes[kRuns], minimum_codes[kRuns], d, dmin;
};

EI_INLINE float largest_of(const float* values, int n) {
    float largest = 0;
    for (int i = 0; i < n; i++) largest = values[i] > largest ? values[i] : largest;
    return largest;
}

// Values as codes 0..largest times the result, the largest of them with the last code.
EI_INLINE float rounded_fractions(const float* values, float* codes, int n, float largest) {
    const float high = largest_of(values, n), inverse = largest / high;
    const bool is_zero = !(inverse <= kLargestFloat);
    for (int i = 0; i < n; i++) codes[i] = code(all((is_zero ? 0 : inverse) * values[i]), 0, largest)[0];
    return to_half(high / largest);
}

template <int run>
EI_INLINE void round_scales(AffineRuns<run>& runs, float largest) {
    constexpr int n = AffineRuns<run>::kRuns;
    float scales[n], minimums[n];
    for (int i = 0; i < n; i++) {
        scales[i] = runs.found[i / kLanes].scale[i % kLanes];
        minimums[i] = -runs.found[i / kLanes].minimum[i % kLanes];
    }
    runs.d = rounded_fractions(scales, runs.scale_codes, n, largest);
    runs.dmin = rounded_fractions(minimums, runs.minimum_codes, n, largest);
}

// Scales in the first lane and minimums in the second are searched at once.
template <int run>
EI_INLINE void search_scales(AffineRuns<run>& runs, float largest) {
    constexpr int n = AffineRuns<run>::kRuns;
    Floats values[n], importance[n], codes[n];
    for (int i = 0; i < n; i++) {
        const Affine& found = runs.found[i / kLanes];
        const int lane = i % kLanes;
        values[i] = Floats{found.scale[lane], -found.minimum[lane]};
        importance[i] = all(found.sum_of_importance[lane]);
    }
    const Floats steps = as_half(positive(values, importance, codes, largest));
    runs.d = steps[0];
    runs.dmin = steps[1];
    for (int i = 0; i < n; i++) {
        runs.scale_codes[i] = codes[i][0];
        runs.minimum_codes[i] = codes[i][1];
    }
}

// Codes for the scales as they are stored; those of the search where that scale is 0.
template <int run>
EI_INLINE void final_codes(const AffineRuns<run>& runs, float largest, uint8_t* to) {
    for (int group = 0; group < AffineRuns<run>::kGroups; group++) {
        Floats scale, minimum, codes[run];
        for (int lane = 0; lane < kLanes; lane++) {
            scale[lane] = runs.d * runs.scale_codes[kLanes * group + lane];
            minimum[lane] = runs.dmin * runs.minimum_codes[kLanes * group + lane];
        }
        for (int k = 0; k < run; k++) {
            const Floats x = runs.x[group][k], again = code((x + minimum) / scale, 0, largest);
            codes[k] = choose(scale == 0, runs.found[group].code_of(x, largest), again);
        }
        store(to + kLanes * run * group, codes);
    }
}

constexpr Steps kFineSteps{-0.9f, 0.05f, 36};

// Format::kRun, kLargest, kLargestScale; importance_of(weights, importance) and fit(weights, importance) of the plain
// search, kSquares of the weighted one; write(to, runs, codes).
template <class Format>
EI_INLINE void plain_affine(const float* weights, uint8_t* to) {
    AffineRuns<Format::kRun> runs;
    for (int group = 0; group < runs.kGroups; group++) {
        Floats importance[Format::kRun];
        load(runs.x[group], weights + kLanes * Format::kRun * group);
        Format::importance_of(runs.x[group], importance);
        runs.found[group] = Format::fit(runs.x[group], importance);
    }
    round_scales(runs, Format::kLargestScale);
    uint8_t codes[kSuper];
    final_codes(runs, Format::kLargest, codes);
    Format::write(to, runs, codes);
}

template <class Format>
EI_INLINE void weighted_affine(const float* weights, const float* columns, float squares, uint8_t* to) {
    AffineRuns<Format::kRun> runs;
    for (int group = 0; group < runs.kGroups; group++) {
        const int first = kLanes * Format::kRun * group;
        Floats importance[Format::kRun];
        load(runs.x[group], weights + first);
        with_sizes(importance, runs.x[group], columns + first, Format::kSquares * squares / kSuper);
        runs.found[group] = affine(runs.x[group], importance, Format::kLargest, kFineSteps, squared);
    }
    search_scales(runs, Format::kLargestScale);
    uint8_t codes[kSuper];
    final_codes(runs, Format::kLargest, codes);
    Format::write(to, runs, codes);
}

// ---- w = d sc (q - n_negative): Q3_K, Q6_K -------------------------------------------------------------------------

constexpr int kSixteen = 16, kGroups = kSixteen / kLanes;  // 16 runs of 16, some side by side in each group

// Scales (16,) as codes -n_negative..n_negative - 1 times the result, the largest of them with code -n_negative.
EI_INLINE float signed_fractions(const float* scales, float* codes, float n_negative) {
    float size = 0, largest = 0;
    for (int i = 0; i < kSixteen; i++) {
        if (__builtin_fabsf(scales[i]) > size) size = __builtin_fabsf(largest = scales[i]);
    }
    const float inverse = -n_negative / largest;
    for (int i = 0; i < kSixteen; i++) codes[i] = code(all(inverse * scales[i]), -n_negative, n_negative - 1)[0];
    return to_half(1 / inverse);
}

// Codes of some runs for the scales as they are stored; where that scale is 0 they stay.
EI_INLINE void again(Floats (&codes)[kSixteen], const Floats (&x)[kSixteen], float d, const float* scales,
                     float n_negative) {
    Floats scale;
    for (int lane = 0; lane < kLanes; lane++) scale[lane] = d * scales[lane];
    for (int k = 0; k < kSixteen; k++) {
        codes[k] = choose(scale == 0, codes[k], code(x[k] / scale, -n_negative, n_negative - 1) + n_negative);
    }
}

}  // namespace
