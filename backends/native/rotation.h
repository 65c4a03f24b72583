// Rotary embeddings of single heads (Su et al., arXiv:2104.09864).
#pragma once

#include <cstddef>

// Turns the pairs of one head: (i, i + n_pairs) with halves, else (2i, 2i + 1).
inline void rotate_head(float* x, const float* cosine, const float* sine, size_t n_pairs, bool halves) {
    for (size_t i = 0; i < n_pairs; i++) {
        float& first = x[halves ? i : 2 * i];
        float& second = x[halves ? i + n_pairs : 2 * i + 1];
        const float a = first, b = second;
        first = a * cosine[i] - b * sine[i];
        second = a * sine[i] + b * cosine[i];
    }
}
