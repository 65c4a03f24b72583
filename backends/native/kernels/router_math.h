// What routers make of their products, and the sum over experts. Part of kernels.cpp.
#pragma once

namespace {

// e^(x - max) times 1 / their sum.
void softmax(float* x, int n) {
    const F32 inverse = set_f32(soft_max(x, n, nullptr));
    for (int i = 0; i < n; i += 16) store_f32(x + i, mul_f32(load_f32(x + i), inverse));
}

void sigmoid(float* x, int n) {
    for (int i = 0; i < n; i += 16) store_f32(x + i, times_sigmoid(set_f32(1.0f), load_f32(x + i)));
}

// ln(1 + t) for t in 0..1: twice the series of atanh(s), s = t / (2 + t), up to s^15.
EI_INLINE F32 log_of_1_and(F32 t) {
    const F32 s = div_f32(t, add_f32(set_f32(2.0f), t)), square = mul_f32(s, s);
    F32 p = set_f32(1.0f / 15.0f);
    for (int k = 13; k >= 1; k -= 2) p = fma_f32(p, square, set_f32(1.0f / static_cast<float>(k)));
    return mul_f32(mul_f32(set_f32(2.0f), s), p);
}

// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|)
EI_INLINE F32 softplus(F32 x) {
    const F32 positive = max_f32(set_f32(0.0f), x);
    const F32 magnitude = as_f32(and_i32(bits_of(x), set_i32(0x7fffffff)));
    return add_f32(positive, log_of_1_and(exp_f32(sub_f32(set_f32(0.0f), magnitude))));
}

void sqrt_softplus(float* x, int n) {
    for (int i = 0; i < n; i += 16) store_f32(x + i, softplus(load_f32(x + i)));
    for (int i = 0; i < n; i++) x[i] = __builtin_sqrtf(x[i]);
}

void softplus(float* x, int n) {
    for (int i = 0; i < n; i += 16) store_f32(x + i, softplus(load_f32(x + i)));
}

void weighted_sum(const float* const* rows, const float* weights, int k, int n, float* out) {
    for (int i = 0; i < n; i += 16) {
        F32 sum = set_f32(0.0f);
        for (int j = 0; j < k; j++) sum = fma_f32(set_f32(weights[j]), load_f32(rows[j] + i), sum);
        store_f32(out + i, sum);
    }
}

}  // namespace
