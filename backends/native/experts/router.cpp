#include "experts/router.h"

#include <algorithm>
#include <limits>

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kLeastSum = 1.0f / 16384;  // of the weights, before they are divided by it

// The k largest of n scores in descending order, of equal ones the lower index first. A NaN is no larger than -infinity.
// Overwrites the scores: those that were chosen become NaN.
void choose_largest(float* scores, int n, int k, int32_t* chosen) {
    for (int i = 0; i < n; i++) scores[i] = scores[i] >= kNone ? scores[i] : kNone;
    for (int rank = 0; rank < k; rank++) {
        int best = 0;
        while (scores[best] != scores[best]) best++;
        for (int i = best + 1; i < n; i++) best = scores[i] > scores[best] ? i : best;
        chosen[rank] = best;
        scores[best] = std::numeric_limits<float>::quiet_NaN();
    }
}

// The two largest of n scores, added up, or the largest alone.
float score_of_group(const float* scores, int n, bool is_largest) {
    float first = kNone, second = kNone;
    for (int i = 0; i < n; i++) {
        if (scores[i] > first) {
            second = first, first = scores[i];
        } else if (scores[i] > second) {
            second = scores[i];
        }
    }
    return n > 1 && !is_largest ? first + second : first;
}

// Scores of -infinity for all groups but the n_used_groups whose two largest scores add up to most, or whose largest is.
void keep_best_groups(const ExpertsConfig& config, float* scores) {
    const int n_each = config.n_experts / config.n_groups;
    float of_groups[kMostExpertGroups];
    int32_t kept[kMostExpertGroups];
    for (int g = 0; g < config.n_groups; g++) {
        const float* group = scores + g * n_each;
        of_groups[g] = score_of_group(group, n_each, config.groups_by_best);
    }
    choose_largest(of_groups, config.n_groups, config.n_used_groups, kept);
    for (int g = 0; g < config.n_groups; g++) {
        if (std::find(kept, kept + config.n_used_groups, g) != kept + config.n_used_groups) continue;
        std::fill(scores + g * n_each, scores + (g + 1) * n_each, kNone);
    }
}

}  // namespace

void route(const ExpertsConfig& config, const Kernels& kernels, float* products, const float* selection_bias,
           float* scores, int32_t* chosen, float* weights) {
    const int n = config.n_experts, k = config.n_used;
    switch (config.function) {
        case RouterFunction::Softmax: kernels.softmax(products, n); break;
        case RouterFunction::Sigmoid: kernels.sigmoid(products, n); break;
        case RouterFunction::SqrtSoftplus: kernels.sqrt_softplus(products, n); break;
        case RouterFunction::SoftmaxOfTopK: break;
    }
    for (int i = 0; i < n; i++) scores[i] = selection_bias ? products[i] + selection_bias[i] : products[i];
    if (config.n_groups > 1) keep_best_groups(config, scores);
    choose_largest(scores, n, k, chosen);
    for (int i = 0; i < k; i++) weights[i] = products[chosen[i]];
    if (config.function == RouterFunction::SoftmaxOfTopK) kernels.softmax(weights, k);
    if (config.is_normalised) {
        float sum = 0;
        for (int i = 0; i < k; i++) sum += weights[i];
        const float divisor = sum > kLeastSum ? sum : kLeastSum;
        for (int i = 0; i < k; i++) weights[i] /= divisor;
    }
    for (int i = 0; i < k; i++) weights[i] *= config.weight_scale;
}

float dot_product(const float* a, const float* b, int n) {
    constexpr int kLanes = 16;
    float lanes[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int j = 0; j < kLanes; j++) lanes[j] += a[i + j] * b[i + j];
    }
    for (int j = 0; i + j < n; j++) lanes[j] += a[i + j] * b[i + j];
    for (int width = kLanes / 2; width >= 1; width /= 2) {
        for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
    }
    return lanes[0];
}
