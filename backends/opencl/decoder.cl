// What a decoder does between its matrix products and beside attention, after common.cl.

#define RUN 32  // activations that share a scale

// RMS norm of runs of n numbers: run g of token t begins at t * stride + first + g * n, in `in` as in `out`, which may be
// the same. Groups: (1, runs of a token, tokens).
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void rms_norm(global const float* in, int in_first,
                                                                        int in_stride, global float* out, int out_first,
                                                                        int out_stride,
                                                                        global const float* restrict weight, int n,
                                                                        float epsilon) {
    local float parts[GROUP];
    int run = get_group_id(1), token = get_group_id(2);
    global const float* from = in + (size_t)token * in_stride + in_first + run * n;
    global float* to = out + (size_t)token * out_stride + out_first + run * n;
    float squares = 0;
    for (int i = get_local_id(0); i < n; i += GROUP) squares += from[i] * from[i];
    float root = sqrt(sum_of_group(squares, parts) / n + epsilon);
    for (int i = get_local_id(0); i < n; i += GROUP) to[i] = from[i] / root * weight[i];
}

// Each RUN of values (n_tokens, n) rounded to 8 bits, with its scale and the sum of its codes. Items: (runs, tokens).
kernel void quantise(global const float* restrict values, global char* restrict codes, global float* restrict scales,
                     global int* restrict sums, int n) {
    int run = get_global_id(0), n_runs = n / RUN;
    if (run >= n_runs) return;
    size_t at = (size_t)get_global_id(1) * n_runs + run;
    global const float* from = values + at * RUN;
    float largest = 0;
    for (int i = 0; i < RUN; i++) largest = fmax(largest, fabs(from[i]));
    float inverse = largest >= 1e-30f ? 127 / largest : 0;
    int sum = 0;
    for (int i = 0; i < RUN; i++) {
        int code = convert_int_rte(from[i] * inverse);
        codes[at * RUN + i] = code;
        sum += code;
    }
    scales[at] = largest / 127;
    sums[at] = sum;
}

// A draft head's gate, of pairs (n_tokens, 2 n): silu of the second half of each, in place. Items: (n, tokens).
kernel void silu(global float* restrict pairs, int n) {
    int i = get_global_id(0);
    if (i >= n) return;
    size_t at = (size_t)get_global_id(1) * 2 * n + n + i;
    pairs[at] /= 1 + exp(-pairs[at]);
}

// Both halves blended by the sigmoid of mix (n_tokens, n): out (n_tokens, n). Items: (n, tokens).
kernel void blend(global const float* restrict pairs, global const float* restrict mix, global float* restrict out,
                  int n) {
    int i = get_global_id(0);
    if (i >= n) return;
    size_t token = get_global_id(1);
    float share = 1 / (1 + exp(-mix[token * n + i]));
    out[token * n + i] = share * pairs[token * 2 * n + i] + (1 - share) * pairs[token * 2 * n + n + i];
}

// x += factor * y. Items: (n,).
kernel void add(global float* restrict x, global const float* restrict y, float factor, int n) {
    int i = get_global_id(0);
    if (i < n) x[i] += factor * y[i];
}

// Rows of in (., n), one below the other: out (n_rows, n). Items: (n, n_rows).
kernel void take_rows(global const float* restrict in, global const int* restrict rows, global float* restrict out,
                      int n) {
    int i = get_global_id(0), row = get_global_id(1);
    if (i < n) out[(size_t)row * n + i] = in[(size_t)rows[row] * n + i];
}

// As take_rows, of the rows of the nodes that nodes `first`, first + 1, ... follow: that of node p is p - before.
// Items: (n, nodes).
kernel void take_parents(global const float* restrict in, global const int* restrict parents,
                         global float* restrict out, int n, int first, int before) {
    int i = get_global_id(0), row = get_global_id(1);
    if (i < n) out[(size_t)row * n + i] = in[(size_t)(parents[first + row] - before) * n + i];
}

kernel void cap_logits(global float* restrict logits, float cap, int n) {
    int i = get_global_id(0);
    if (i < n) logits[i] = capped(logits[i], cap);
}
