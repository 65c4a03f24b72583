// Q6_K.
#pragma once

#include <cstring>

#include "super_blocks.h"

namespace {

constexpr int kQ6KBytes = 210;

EI_INLINE void write_q6_k(uint8_t* to, const uint8_t* codes, const float* scales, float d) {
    for (int half = 0; half < 2; half++) {
        const uint8_t* of = codes + 128 * half;
        uint8_t *low = to + 64 * half, *high = to + 128 + 32 * half;
        for (int i = 0; i < 32; i++) {
            low[i] = static_cast<uint8_t>((of[i] & 15) | of[i + 64] << 4);
            low[i + 32] = static_cast<uint8_t>((of[i + 32] & 15) | of[i + 96] << 4);
            high[i] =
                static_cast<uint8_t>(of[i] >> 4 | of[i + 32] >> 4 << 2 | of[i + 64] >> 4 << 4 | of[i + 96] >> 4 << 6);
        }
    }
    for (int j = 0; j < kSixteen; j++) to[192 + j] = static_cast<uint8_t>(static_cast<int>(scales[j]));
    write_half(to + 208, d);
}

// importance_of(group, weights, importance) of each group of runs.
template <class Importance>
EI_INLINE void quantize_q6_k(const float* weights, uint8_t* to, Importance importance_of) {
    constexpr float kNegative = 32, kNegativeScale = 128;
    Floats x[kGroups][kSixteen], codes[kGroups][kSixteen];
    float scales[kSixteen], scale_codes[kSixteen], size = 0;
    for (int group = 0; group < kGroups; group++) {
        Floats importance[kSixteen];
        load(x[group], weights + kLanes * kSixteen * group);
        importance_of(group, x[group], importance);
        const Symmetric found = symmetric(x[group], importance, kNegative);
        for (int k = 0; k < kSixteen; k++) codes[group][k] = found.code_of(x[group][k], kNegative);
        for (int lane = 0; lane < kLanes; lane++) scales[kLanes * group + lane] = found.scale[lane];
    }
    for (const float scale : scales) size = __builtin_fabsf(scale) > size ? __builtin_fabsf(scale) : size;
    if (size < kNothing) {
        std::memset(to, 0, kQ6KBytes);
        return;
    }
    const float d = signed_fractions(scales, scale_codes, kNegativeScale);
    uint8_t whole[kSuper];
    for (int group = 0; group < kGroups; group++) {
        again(codes[group], x[group], d, scale_codes + kLanes * group, kNegative);
        store(whole + kLanes * kSixteen * group, codes[group]);
    }
    write_q6_k(to, whole, scale_codes, d);
}

void q6_k_plain(const Rows& rows) {
    each_super_block<kQ6KBytes>(rows, [](const float* weights, const float*, uint8_t* to) {
        quantize_q6_k(weights, to, [](int, const Floats(&x)[kSixteen], Floats(&importance)[kSixteen]) {
            for (int k = 0; k < kSixteen; k++) importance[k] = x[k] * x[k];
        });
    });
}
void q6_k_weighted(const Rows& rows) {
    each_super_block<kQ6KBytes>(rows, [](const float* weights, const float* columns, uint8_t* to) {
        quantize_q6_k(weights, to, [&](int group, const Floats(&)[kSixteen], Floats(&importance)[kSixteen]) {
            load(importance, columns + kLanes * kSixteen * group);
        });
    });
}

}  // namespace
