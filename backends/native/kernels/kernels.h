// The kernels of one instruction set, as a table. They check nothing, allocate nothing and use no containers.
//
// Contract: each result is computed by the same floating-point operations in the same order in every ISA, whatever the
// number of columns, the split over threads or the place in a buffer. Dot products of integers are exact in any order;
// float sums over blocks run upwards in k, one lane a row; sums across a vector take 16 lanes and then one fixed tree.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kv_head.h"
#include "kernels/matrix.h"

// One query head of one token. Slots 0..n_past-1 hold the positions before it in order; path names the slots of those
// that follow, ascending; null for none. Positions before first are not seen.
struct AttentionRow {
    const float* q;  // (head_dim,), already scaled; of rows that are both a multiple of 16
    const int8_t*
        codes;  // of keys of Q8_0 the same in blocks of 32, of K6V4 H q in one: codes, scales, sums of the codes
    const float* scales;
    const int32_t* sums;
    const float* offset;  // of K6V4: what the bias of the keys adds to scores, see RopeTables; null for none
    int first, n_past;
    const int32_t* path;
    int n_path;
    const float* sink;  // one more score, that has no value; null for none
    float* scores;      // scratch, 16 more than the number of slots
    float* sum;         // scratch, head_dim rounded up to 16
    float* out;         // (n_value,)
};

constexpr int kTaskRows = 12;

// Angles of the positions of keys. The rotated bias adds c + sum over pairs m of a[m] cos(p t[m]) + b[m] sin(p t[m]) to
// the score of position p, where the offset of a row is a (ld,), b (ld,), c, and t[m] radians a position. Position p is
// 16 tile + lane.
struct RopeTables {
    int ld = 0;                     // pairs, rounded up to 16
    const float* tiles = nullptr;   // (tile, 2, ld): cosines and sines of 16 tile t
    const float* within = nullptr;  // (ld, 2, 16 lanes): those of lane t
};

struct Attention {
    KvHead kv;
    RopeTables rope;
    float soft_cap;  // of the scores, 0 for none
    int n_rows;      // 1..kTaskRows
    AttentionRow rows[kTaskRows];
};

constexpr int kMultiplyAdds = 64 * 64;

struct Kernels {
    const char* name;
    // Row groups that a product takes side by side at most, and one with kFewestTokens.
    int groups_at_once, streams_at_once;
    // y[c * ldy + row] = sum over k of w[row][k] * x[c][k], for the rows of groups first..last-1 and n columns. next: row
    // groups that this thread will probably read then, or null.
    void (*matmul)(const Matrix& w, const Inputs& x, int n, int first, int last, const uint8_t* next, float* y,
                   size_t ldy);
    // Prepares column c of the inputs. x.n_in must be a multiple of 32, or 256.
    void (*quantize32)(const Inputs& x, int c);
    void (*quantize256)(const Inputs& x, int c);
    // The whole column as one block; x.n_in must be a multiple of 16.
    void (*quantize_token)(const Inputs& x, int c);
    // out = x / sqrt(mean(x^2) + epsilon) * w (Zhang and Sennrich, arXiv:1910.07467). Arrays padded with 0 to 16.
    void (*rms_norm)(const float* x, const float* w, int n, float epsilon, float* out);
    // gate = silu(gate) * up (Shazeer, arXiv:2002.05202). Arrays padded to 16.
    void (*swiglu)(float* gate, const float* up, int n);
    // gate = gelu(gate) * up with the tanh approximation (Hendrycks and Gimpel, arXiv:1606.08415). Arrays padded to 16.
    void (*geglu)(float* gate, const float* up, int n);
    // gate = max(gate, 0)^2 * up (So et al., arXiv:2109.08668). Arrays padded to 16.
    void (*relu2_glu)(float* gate, const float* up, int n);
    // gate = g sigmoid(1.702 g) (u + 1), g = min(gate, 7), u = up within -7 .. 7 (gpt-oss, arXiv:2508.10925). Arrays
    // padded to 16.
    void (*clamped_swiglu)(float* gate, const float* up, int n);
    // x += scale * y. Arrays padded to 16.
    void (*add_scaled)(float* x, const float* y, int n, float scale);
    // x = x sigmoid(x). Arrays padded to 16.
    void (*silu)(float* x, int n);
    // out = s a + (1 - s) b with s = sigmoid(z). Arrays padded to 16.
    void (*blend)(const float* z, const float* a, const float* b, int n, float* out);
    // x = soft_cap(scale * x), cap * tanh(x / cap) or no cap where it is 0 (Bello et al., arXiv:1611.09940).
    void (*scale_and_cap)(float* x, int n, float scale, float cap);
    // What routers make of their n products: softmax(x), 1 / (1 + e^-x), sqrt(ln(1 + e^x)); and what gates do, ln(1 + e^x).
    // Arrays padded to 16.
    void (*softmax)(float* x, int n);
    void (*sigmoid)(float* x, int n);
    void (*sqrt_softplus)(float* x, int n);
    void (*softplus)(float* x, int n);
    // out = the sum of weights[i] rows[i] over k rows, added in their order by FMA. Arrays padded to 16.
    void (*weighted_sum)(const float* const* rows, const float* weights, int k, int n, float* out);
    // Writes a key and a value (head_dim,) into a slot; of rows that are both, the key.
    void (*store_key_value)(const KvHead& kv, int slot, const float* key, const float* value);
    // out = softmax(q keys) values for each row (Vaswani et al., arXiv:1706.03762); a sink takes its share of the softmax
    // (Xiao et al., arXiv:2309.17453).
    void (*attention)(const Attention& a);
    // out = bias + the sum over j of rows[j] * weights[j * ld], by FMA in the order of the rows, then x sigmoid(x) if
    // is_silu. bias: null for none. n: a multiple of 16.
    void (*convolve)(const float* const* rows, const float* weights, size_t ld, const float* bias, int n_rows, int n,
                     bool is_silu, float* out);
    // n: a multiple of 16.
    float (*dot_product)(const float* a, const float* b, int n);
    // x *= scale / sqrt(sum(x^2) + epsilon). n: a multiple of 16.
    void (*unit_length)(float* x, int n, float epsilon, float scale);
    // x = exp(rate * ln(1 + exp(x + bias))). Arrays padded to 16.
    void (*decays)(float* x, const float* bias, const float* rate, int n);
    // The gated delta rule (Yang et al., arXiv:2412.06464) on a block of `width` columns, 16 or 32, of a state S (n, width).
    // u = S^T k, w = S^T q; w alone where k is null.
    void (*delta_read)(const float* s, int n, int width, const float* k, const float* q, float* u, float* w);
    // out = decay S + k d^T, which may be S itself; and u, w of the result for next_k, next_q, unless these are null; w
    // alone where only next_k is.
    void (*delta_update)(const float* s, float* out, int n, int width, const float* k, const float* d, float decay,
                         const float* next_k, const float* next_q, float* u, float* w);
    // d = beta (v - decay u), out = decay w + kq d with kq = k q. out may be v.
    void (*delta_values)(int width, const float* u, const float* w, const float* v, float decay, float beta, float kq,
                         float* d, float* out);
    // Mamba2 (Dao and Gu, arXiv:2405.21060), whose state changes as above. step = ln(1 + exp(step + bias)), decay =
    // exp(rate * step). Arrays padded to 16.
    void (*mamba_steps)(float* step, float* decay, const float* bias, const float* rate, int n);
    // d = step v, out = decay w + kq d + skip v with kq = k q. out may be v. width: 16 or 32.
    void (*mamba_values)(int width, const float* w, const float* v, float decay, float step, float kq, float skip,
                         float* d, float* out);
    // x = max(x, 0)^2 (So et al., arXiv:2109.08668). Arrays padded to 16.
    void (*relu2)(float* x, int n);
    // For measuring this machine: reads n bytes, a multiple of 256; does kMultiplyAdds int8 multiply-adds a round out of
    // 1024 bytes. Both give back something that depends on all they did.
    int32_t (*read)(const uint8_t* p, size_t n);
    int32_t (*multiply_adds)(const uint8_t* p, int n_rounds);

    int at_once(int n) const { return n <= kFewestTokens ? streams_at_once : groups_at_once; }
};

// The table of an instruction set, null where this build lacks it, and whether this CPU has it; best first.
struct InstructionSet {
    const char* name;
    const Kernels* kernels;
    bool (*present)();

    bool can_run() const { return kernels && present(); }
};
extern const InstructionSet instruction_sets[];
extern const int n_instruction_sets;
