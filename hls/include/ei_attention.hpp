// Attention of queries with a KV cache in float16, newest position first: of the tokens of a prompt, and of one token.
//
// A prompt is processed from its last block of tokens to its first (the reversed order of TeLLMe, arXiv:2504.16266): the
// keys that a block needs are a prefix of those of the block before, nothing above the diagonal is computed but in the
// diagonal's own block, and positions past a block are never read again. Both kernels sum in the same order, so a prompt
// gives the same bits as its tokens one by one.
//
//     score[j] = (q . k[j]) * scale, the dot product as a tree;  p[j] = exp(score[j] - max)
//     out = (sum of p[j] * v[j]) / (sum of p[j]), j from the newest position down to 0
//
// A sum over positions takes a term every HEAD_DIM / LANES cycles: an adder that takes longer makes the loop slower than its
// II = 1, which is asked for and was never synthesised.
// Keys and values are read once each for all rows of a block. hls/attention.py has the same arithmetic in numpy.
#pragma once

#include "ei_math.hpp"

namespace ei {

// HEAD_DIM: numbers of a head.  LANES: of them in a cycle, a power of two.  ROWS: queries that are computed together.
// MAX_POSITIONS: of a context.
template <int HEAD_DIM, int LANES, int ROWS, int MAX_POSITIONS>
class AttentionBlock {
    static_assert(HEAD_DIM % LANES == 0 && (LANES & (LANES - 1)) == 0,
                  "lanes are a power of two that divides the head");
    static const int CHUNKS = HEAD_DIM / LANES;
    static const int LEAVES = next_power_of_two(CHUNKS);

public:
    // q, out: (ROWS, HEAD_DIM).  last: the position of each row's token, which it sees itself; -1 for a row that is not
    // used.  newest: the greatest of them.  keys, values: (newest + 1, HEAD_DIM) bits of float16.
    static void run(const float (&q)[ROWS][HEAD_DIM], const int (&last)[ROWS], int newest, const uint16_t* keys,
                    const uint16_t* values, float scale, float (&out)[ROWS][HEAD_DIM]) {
        float scores[ROWS][MAX_POSITIONS];
#pragma HLS ARRAY_PARTITION variable = scores dim = 1 complete
        float most[ROWS];
#pragma HLS ARRAY_PARTITION variable = most complete
        score(q, last, newest, keys, scale, scores, most);
        weigh(last, newest, values, scores, most, out);
    }

private:
    static void score(const float (&q)[ROWS][HEAD_DIM], const int (&last)[ROWS], int newest, const uint16_t* keys,
                      float scale, float (&scores)[ROWS][MAX_POSITIONS], float (&most)[ROWS]) {
        float parts[ROWS][LEAVES];
#pragma HLS ARRAY_PARTITION variable = parts dim = 0 complete
        for (int r = 0; r < ROWS; r++) {
            most[r] = -3.0e38f;
            for (int c = 0; c < LEAVES; c++) parts[r][c] = 0.0f;
        }
        for (int j = newest; j >= 0; j--) {
            for (int c = 0; c < CHUNKS; c++) {
#pragma HLS PIPELINE II = 1
                float key[LANES];
                for (int l = 0; l < LANES; l++) key[l] = float_of_half(keys[j * HEAD_DIM + c * LANES + l]);
                for (int r = 0; r < ROWS; r++) {
                    float products[LANES];
                    for (int l = 0; l < LANES; l++) products[l] = q[r][c * LANES + l] * key[l];
                    parts[r][c] = Tree<LANES>::sum(products);
                    if (c == CHUNKS - 1 && j <= last[r]) {
                        const float s = Tree<LEAVES>::sum(parts[r]) * scale;
                        scores[r][j] = s;
                        if (s > most[r]) most[r] = s;
                    }
                }
            }
        }
    }

    static void weigh(const int (&last)[ROWS], int newest, const uint16_t* values,
                      const float (&scores)[ROWS][MAX_POSITIONS], const float (&most)[ROWS],
                      float (&out)[ROWS][HEAD_DIM]) {
        float total[ROWS];
#pragma HLS ARRAY_PARTITION variable = total complete
        for (int r = 0; r < ROWS; r++) {
            total[r] = 0.0f;
            for (int d = 0; d < HEAD_DIM; d++) out[r][d] = 0.0f;
        }
        for (int j = newest; j >= 0; j--) {
            for (int c = 0; c < CHUNKS; c++) {
#pragma HLS PIPELINE II = 1
                float value[LANES];
                for (int l = 0; l < LANES; l++) value[l] = float_of_half(values[j * HEAD_DIM + c * LANES + l]);
                for (int r = 0; r < ROWS; r++) {
                    if (j > last[r]) continue;
                    const float p = exp_of_negative(scores[r][j] - most[r]);
                    if (c == 0) total[r] = total[r] + p;
                    for (int l = 0; l < LANES; l++) {
                        out[r][c * LANES + l] = out[r][c * LANES + l] + p * value[l];
                    }
                }
            }
        }
        for (int r = 0; r < ROWS; r++) {
            for (int d = 0; d < HEAD_DIM; d++) {
#pragma HLS PIPELINE II = 1
                if (last[r] >= 0) out[r][d] = out[r][d] / total[r];
            }
        }
    }
};

// One token. GROUP: query heads that share a head of keys and values, computed together.  q, out: (n_kv_heads * GROUP,
// HEAD_DIM).  keys, values: (n_kv_heads, stride, HEAD_DIM) bits of float16, n_positions of the stride in use.
template <int HEAD_DIM, int LANES, int GROUP, int MAX_POSITIONS>
void decode_attention(const float* q, const uint16_t* keys, const uint16_t* values, float* out, int n_kv_heads,
                      int n_positions, int stride, float scale) {
    for (int head = 0; head < n_kv_heads; head++) {
        float rows[GROUP][HEAD_DIM], results[GROUP][HEAD_DIM];
#pragma HLS ARRAY_PARTITION variable = rows dim = 1 complete
#pragma HLS ARRAY_PARTITION variable = rows dim = 2 cyclic factor = LANES
#pragma HLS ARRAY_PARTITION variable = results dim = 1 complete
#pragma HLS ARRAY_PARTITION variable = results dim = 2 cyclic factor = LANES
        int last[GROUP];
        for (int r = 0; r < GROUP; r++) {
            last[r] = n_positions - 1;
            for (int d = 0; d < HEAD_DIM; d++) {
#pragma HLS PIPELINE II = 1
                rows[r][d] = q[(head * GROUP + r) * HEAD_DIM + d];
            }
        }
        const int first = head * stride * HEAD_DIM;
        AttentionBlock<HEAD_DIM, LANES, GROUP, MAX_POSITIONS>::run(rows, last, n_positions - 1, keys + first,
                                                                   values + first, scale, results);
        for (int r = 0; r < GROUP; r++) {
            for (int d = 0; d < HEAD_DIM; d++) {
#pragma HLS PIPELINE II = 1
                out[(head * GROUP + r) * HEAD_DIM + d] = results[r][d];
            }
        }
    }
}

// Tokens of a prompt at positions first .. first + n_tokens - 1, TOKENS of them together, the last first.  q, out:
// (n_tokens, n_kv_heads * GROUP, HEAD_DIM).  keys, values: as of decode_attention, first + n_tokens positions in use.
template <int HEAD_DIM, int LANES, int GROUP, int TOKENS, int MAX_POSITIONS>
void prefill_attention(const float* q, const uint16_t* keys, const uint16_t* values, float* out, int n_kv_heads,
                       int first, int n_tokens, int stride, float scale) {
    const int rows_of_token = n_kv_heads * GROUP * HEAD_DIM;
    for (int head = 0; head < n_kv_heads; head++) {
        const uint16_t* head_keys = keys + head * stride * HEAD_DIM;
        const uint16_t* head_values = values + head * stride * HEAD_DIM;
        for (int block = (n_tokens - 1) / TOKENS; block >= 0; block--) {
            float rows[TOKENS * GROUP][HEAD_DIM], results[TOKENS * GROUP][HEAD_DIM];
#pragma HLS ARRAY_PARTITION variable = rows dim = 1 complete
#pragma HLS ARRAY_PARTITION variable = rows dim = 2 cyclic factor = LANES
#pragma HLS ARRAY_PARTITION variable = results dim = 1 complete
#pragma HLS ARRAY_PARTITION variable = results dim = 2 cyclic factor = LANES
            int last[TOKENS * GROUP];
            int newest = 0;
            for (int r = 0; r < TOKENS * GROUP; r++) {
                const int token = block * TOKENS + r / GROUP;
                last[r] = token < n_tokens ? first + token : -1;
                if (last[r] > newest) newest = last[r];
                const int from = token * rows_of_token + (head * GROUP + r % GROUP) * HEAD_DIM;
                for (int d = 0; d < HEAD_DIM; d++) {
#pragma HLS PIPELINE II = 1
                    rows[r][d] = token < n_tokens ? q[from + d] : 0.0f;
                }
            }
            AttentionBlock<HEAD_DIM, LANES, TOKENS * GROUP, MAX_POSITIONS>::run(rows, last, newest, head_keys,
                                                                                head_values, scale, results);
            for (int r = 0; r < TOKENS * GROUP; r++) {
                const int token = block * TOKENS + r / GROUP;
                const int to = token * rows_of_token + (head * GROUP + r % GROUP) * HEAD_DIM;
                for (int d = 0; d < HEAD_DIM; d++) {
#pragma HLS PIPELINE II = 1
                    if (token < n_tokens) out[to + d] = results[r][d];
                }
            }
        }
    }
}

}  // namespace ei
