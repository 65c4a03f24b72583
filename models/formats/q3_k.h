// Q3_K.
#pragma once

#include "q2_k.h"
#include "super_blocks.h"

namespace {

constexpr float kQ3KNegative = 4, kQ3KNegativeScale = 32;
constexpr int kQ3KBytes = 110;

struct Q3KRuns {
    Floats x[kGroups][kSixteen], codes[kGroups][kSixteen];
    float scales[kSixteen];
};

// scale_codes: -32..31, stored with 32 added: bits 0-3 of two in each of 8 bytes, bits 4-5 of four in each of 4 more.
EI_INLINE void write_q3_k(uint8_t* to, Q3KRuns& runs, const float* scale_codes, float d) {
    uint8_t codes[kSuper];
    for (int group = 0; group < kGroups; group++) {
        again(runs.codes[group], runs.x[group], d, scale_codes + kLanes * group, kQ3KNegative);
        store(codes + kLanes * kSixteen * group, runs.codes[group]);
    }
    for (int i = 0; i < 32; i++) {
        unsigned bits = 0;
        for (int j = 0; j < 8; j++) bits |= (codes[32 * j + i] >> 2 & 1u) << j;
        to[i] = static_cast<uint8_t>(bits);
    }
    write_quarters(to + 32, codes);
    unsigned scales[kSixteen];
    for (int j = 0; j < kSixteen; j++) scales[j] = static_cast<unsigned>(scale_codes[j] + kQ3KNegativeScale);
    for (int j = 0; j < 8; j++) to[96 + j] = static_cast<uint8_t>((scales[j] & 15) | (scales[j + 8] & 15) << 4);
    for (int j = 0; j < 4; j++) {
        to[104 + j] = static_cast<uint8_t>(scales[j] >> 4 | scales[j + 4] >> 4 << 2 | scales[j + 8] >> 4 << 4 |
                                           scales[j + 12] >> 4 << 6);
    }
    write_half(to + 108, d);
}

EI_INLINE void plain_q3_k(const float* weights, uint8_t* to) {
    Q3KRuns runs;
    bool is_zero = true;
    for (int group = 0; group < kGroups; group++) {
        load(runs.x[group], weights + kLanes * kSixteen * group);
        const Floats scale = descend(runs.x[group], runs.codes[group], kQ3KNegative);
        for (Floats& codes : runs.codes[group]) codes += kQ3KNegative;
        for (int lane = 0; lane < kLanes; lane++) {
            runs.scales[kLanes * group + lane] = scale[lane];
            is_zero &= scale[lane] == 0;
        }
    }
    float scale_codes[kSixteen];
    float d = signed_fractions(runs.scales, scale_codes, kQ3KNegativeScale);
    if (is_zero) {
        d = 0;
        for (float& scale : scale_codes) scale = -kQ3KNegativeScale;
    }
    write_q3_k(to, runs, scale_codes, d);
}

EI_INLINE void weighted_q3_k(const float* weights, const float* columns, float squares, uint8_t* to) {
    Q3KRuns runs;
    Floats scales[kSixteen], sums[kSixteen];
    for (int group = 0; group < kGroups; group++) {
        const int first = kLanes * kSixteen * group;
        Floats importance[kSixteen], sum{};
        load(runs.x[group], weights + first);
        with_sizes(importance, runs.x[group], columns + first, 2 * squares / kSuper);
        for (const Floats& w : importance) sum += w;
        const Symmetric found = symmetric(runs.x[group], importance, kQ3KNegative);
        for (int k = 0; k < kSixteen; k++) runs.codes[group][k] = found.code_of(runs.x[group][k], kQ3KNegative);
        for (int lane = 0; lane < kLanes; lane++) {
            scales[kLanes * group + lane] = all(found.scale[lane]);
            sums[kLanes * group + lane] = all(sum[lane]);
        }
    }
    // The scales of a super-block are quantised as weights are, in every lane the same.
    const Symmetric found = symmetric(scales, sums, kQ3KNegativeScale);
    float scale_codes[kSixteen];
    for (int j = 0; j < kSixteen; j++)
        scale_codes[j] = found.code_of(scales[j], kQ3KNegativeScale)[0] - kQ3KNegativeScale;
    write_q3_k(to, runs, scale_codes, to_half(found.scale[0]));
}

void q3_k_plain(const Rows& rows) {
    each_super_block<kQ3KBytes>(rows, [](const float* x, const float*, uint8_t* to) { plain_q3_k(x, to); });
}
void q3_k_weighted(const Rows& rows) { each_with_squares<kQ3KBytes>(rows, weighted_q3_k); }

}  // namespace
