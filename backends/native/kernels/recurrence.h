// What recurrent layers compute: convolutions over time, and the states of gated delta nets and Mamba2. Part of
// kernels.cpp.
//
// A state is S (n rows of keys, columns of values) in blocks of columns, a row of a block after the other. Columns never
// meet: each sum runs down the rows by FMA, one lane a column, so the width of a block changes no bit.
#pragma once

#include "kernels/router_math.h"

namespace {

// out = bias + the sum over j of rows[j] weights[j], by FMA from the oldest row to the newest; then x sigmoid(x) of it,
// where asked for.
void convolve(const float* const* rows, const float* weights, size_t ld, const float* bias, int n_rows, int n,
              bool is_silu, float* out) {
    for (int i = 0; i < n; i += 16) {
        F32 sum = bias ? load_f32(bias + i) : set_f32(0.0f);
        for (int j = 0; j < n_rows; j++)
            sum = fma_f32(load_f32(rows[j] + i), load_f32(weights + static_cast<size_t>(j) * ld + i), sum);
        store_f32(out + i, is_silu ? times_sigmoid(sum, sum) : sum);
    }
}

float dot_product(const float* a, const float* b, int n) {
    F32 sum = set_f32(0.0f);
    for (int i = 0; i < n; i += 16) sum = fma_f32(load_f32(a + i), load_f32(b + i), sum);
    return sum_lanes(sum);
}

void unit_length(float* x, int n, float epsilon, float scale) {
    F32 squares = set_f32(0.0f);
    for (int i = 0; i < n; i += 16) {
        const F32 v = load_f32(x + i);
        squares = fma_f32(v, v, squares);
    }
    const F32 factor = set_f32(scale / __builtin_sqrtf(sum_lanes(squares) + epsilon));
    for (int i = 0; i < n; i += 16) store_f32(x + i, mul_f32(load_f32(x + i), factor));
}

void decays(float* x, const float* bias, const float* rate, int n) {
    for (int i = 0; i < n; i += 16) {
        const F32 steps = softplus(add_f32(load_f32(x + i), load_f32(bias + i)));
        store_f32(x + i, exp_f32(mul_f32(load_f32(rate + i), steps)));
    }
}

template <int W, bool HAS_K>
EI_INLINE void read_state(const float* s, int n, const float* k, const float* q, float* u, float* w) {
    F32 of_k[W], of_q[W];
    for (int j = 0; j < W; j++) of_k[j] = of_q[j] = set_f32(0.0f);
    for (int i = 0; i < n; i++) {
        const F32 qi = set_f32(q[i]);
        for (int j = 0; j < W; j++) {
            const F32 x = load_f32(s + 16 * (W * i + j));
            if constexpr (HAS_K) of_k[j] = fma_f32(set_f32(k[i]), x, of_k[j]);
            of_q[j] = fma_f32(qi, x, of_q[j]);
        }
    }
    for (int j = 0; j < W; j++) {
        if constexpr (HAS_K) store_f32(u + 16 * j, of_k[j]);
        store_f32(w + 16 * j, of_q[j]);
    }
}

void delta_read(const float* s, int n, int width, const float* k, const float* q, float* u, float* w) {
    if (width == 32) return k ? read_state<2, true>(s, n, k, q, u, w) : read_state<2, false>(s, n, k, q, u, w);
    k ? read_state<1, true>(s, n, k, q, u, w) : read_state<1, false>(s, n, k, q, u, w);
}

// What is read of the new state.
enum class Reads { Nothing, Query, KeyAndQuery };

template <int W, Reads READS>
EI_INLINE void update_state(const float* s, float* out, int n, const float* k, const float* d, float decay,
                            const float* next_k, const float* next_q, float* u, float* w) {
    F32 change[W], of_k[W], of_q[W];
    for (int j = 0; j < W; j++) {
        change[j] = load_f32(d + 16 * j);
        of_k[j] = of_q[j] = set_f32(0.0f);
    }
    const F32 e = set_f32(decay);
    for (int i = 0; i < n; i++) {
        const F32 ki = set_f32(k[i]);
        for (int j = 0; j < W; j++) {
            const F32 x = fma_f32(ki, change[j], mul_f32(e, load_f32(s + 16 * (W * i + j))));
            store_f32(out + 16 * (W * i + j), x);
            if constexpr (READS == Reads::KeyAndQuery) of_k[j] = fma_f32(set_f32(next_k[i]), x, of_k[j]);
            if constexpr (READS != Reads::Nothing) of_q[j] = fma_f32(set_f32(next_q[i]), x, of_q[j]);
        }
    }
    for (int j = 0; READS != Reads::Nothing && j < W; j++) {
        if constexpr (READS == Reads::KeyAndQuery) store_f32(u + 16 * j, of_k[j]);
        store_f32(w + 16 * j, of_q[j]);
    }
}

template <int W>
EI_INLINE void update_and_read(const float* s, float* out, int n, const float* k, const float* d, float decay,
                               const float* next_k, const float* next_q, float* u, float* w) {
    if (next_k) return update_state<W, Reads::KeyAndQuery>(s, out, n, k, d, decay, next_k, next_q, u, w);
    if (next_q) return update_state<W, Reads::Query>(s, out, n, k, d, decay, nullptr, next_q, nullptr, w);
    update_state<W, Reads::Nothing>(s, out, n, k, d, decay, nullptr, nullptr, nullptr, nullptr);
}

void delta_update(const float* s, float* out, int n, int width, const float* k, const float* d, float decay,
                  const float* next_k, const float* next_q, float* u, float* w) {
    if (width == 32) return update_and_read<2>(s, out, n, k, d, decay, next_k, next_q, u, w);
    update_and_read<1>(s, out, n, k, d, decay, next_k, next_q, u, w);
}

void delta_values(int width, const float* u, const float* w, const float* v, float decay, float beta, float kq,
                  float* d, float* out) {
    for (int j = 0; j < width; j += 16) {
        const F32 rest = fnma_f32(set_f32(decay), load_f32(u + j), load_f32(v + j));
        const F32 change = mul_f32(set_f32(beta), rest);
        store_f32(d + j, change);
        store_f32(out + j, fma_f32(set_f32(kq), change, mul_f32(set_f32(decay), load_f32(w + j))));
    }
}

void mamba_steps(float* step, float* decay, const float* bias, const float* rate, int n) {
    for (int i = 0; i < n; i += 16) {
        const F32 steps = softplus(add_f32(load_f32(step + i), load_f32(bias + i)));
        store_f32(step + i, steps);
        store_f32(decay + i, exp_f32(mul_f32(load_f32(rate + i), steps)));
    }
}

void mamba_values(int width, const float* w, const float* v, float decay, float step, float kq, float skip, float* d,
                  float* out) {
    for (int j = 0; j < width; j += 16) {
        const F32 value = load_f32(v + j), change = mul_f32(set_f32(step), value);
        store_f32(d + j, change);
        const F32 read = fma_f32(set_f32(kq), change, mul_f32(set_f32(decay), load_f32(w + j)));
        store_f32(out + j, fma_f32(set_f32(skip), value, read));
    }
}

}  // namespace
