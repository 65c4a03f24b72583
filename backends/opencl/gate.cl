// The middle of a feed-forward network.
//
// Macros: ACTIVATION, 0 silu, 1 gelu_tanh, 2 relu2, 3 clamped_swiglu. PLAIN: 1 for a network without a gate, else 0 or
// nothing.

// activation(gate) * up: in (n_tokens, 2 n), out (n_tokens, n). Items: (n, tokens). Of a plain one in is (n_tokens, n),
// and out activation(in).
kernel void gate(global const float* restrict in, global float* restrict out, int n) {
    int i = get_global_id(0);
    if (i >= n) return;
    size_t token = get_global_id(1);
#if PLAIN
    float x = in[token * n + i], up = 1;
#else
    float x = in[token * 2 * n + i], up = in[token * 2 * n + n + i];
#endif
#if ACTIVATION == 0
    x = x / (1 + exp(-x));
#elif ACTIVATION == 1
    x = x / (1 + exp(-x * (1.5957691216057308f + 0.07135481627260025f * x * x)));
#elif ACTIVATION == 2
    x = x > 0 ? x * x : 0;
#else
    x = fmin(x, 7);
    x = x / (1 + exp(-1.702f * x));
    up = fmax(fmin(up, 7), -7) + 1;
#endif
    out[token * n + i] = x * up;
}
