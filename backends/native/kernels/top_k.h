// The most probable tokens of a row of logits, for drafts: sampling.py draws the text's.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace {

constexpr int kGroups = 1024;
constexpr float kNegligible = 20.0f;  // logits below the largest

// (id, probability) of about the k most probable of n logits, most probable first, but at -infinity the first at most. In a
// large vocabulary only the best of each of 1024 groups is looked at: one in some hundred of the ids is missed, and
// probabilities are a little too large; so the row is read once, at the speed of the cache. The probabilities are NaN
// where a logit is, and where the largest is infinite.
inline std::vector<std::pair<int, double>> top_k(const float* logits, int n, int k) {
    const int n_groups = n >= 8 * kGroups ? kGroups : n;
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    std::vector<float> best(static_cast<size_t>(n_groups), kNone);
    int n_nan = 0;
    for (int first = 0; first < n; first += n_groups) {
        const int size = std::min(n_groups, n - first);
        float* __restrict to = best.data();
        const float* __restrict from = logits + first;
        for (int i = 0; i < size; i++) {
            to[i] = from[i] > to[i] ? from[i] : to[i];
            n_nan += from[i] != from[i];
        }
    }
    const float largest = *std::max_element(best.begin(), best.end());
    double total = n_nan ? std::numeric_limits<double>::quiet_NaN() : 0.0;
    for (const float each : best) {
        if (!(each < largest - kNegligible)) total += std::exp(each - largest);
    }
    std::vector<std::pair<int, double>> found;
    for (int rank = 0; rank < std::min(k, n_groups); rank++) {
        const int group = static_cast<int>(std::max_element(best.begin(), best.end()) - best.begin());
        if (rank && best[group] == kNone) break;
        int id = group;
        while (id + n_groups < n && logits[id] != best[group]) id += n_groups;
        found.emplace_back(id, std::exp(best[group] - largest) / total);
        best[group] = kNone;
    }
    return found;
}

}  // namespace
