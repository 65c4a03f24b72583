// Attention of one shape, after common.cl; the recipe is that of edgeinfer.models.spec.Attention.
//
// Macros: HEAD_DIM; N_HEADS; N_KV_HEADS. Queries, keys and values of a token lie side by side in qkv. The cache, keys
// and values, is (layers of this shape, N_KV_HEADS, n_ctx, HEAD_DIM).

#define N_Q (N_HEADS * HEAD_DIM)
#define N_KV (N_KV_HEADS * HEAD_DIM)
#define N_QKV (N_Q + 2 * N_KV)

// Queries turned and scaled, in place; keys turned, and values, into the cache at slots n_past + token.
// turns: (n_tokens, n_dims / 2) cosines and sines. Items: (HEAD_DIM, all heads, tokens).
kernel void turn_and_store(global float* restrict qkv, global half* restrict keys, global half* restrict values,
                           global const float2* restrict turns, global const float* restrict query_scales, int layer,
                           int n_ctx, int n_past, int n_dims, int pairs_are_halves) {
    int i = get_global_id(0), head = get_global_id(1), token = get_global_id(2);
    if (i >= HEAD_DIM) return;
    global float* x = qkv + (size_t)token * N_QKV + head * HEAD_DIM;
    int is_query = head < N_HEADS, is_value = head >= N_HEADS + N_KV_HEADS;
    int kv_head = is_query ? 0 : (head - N_HEADS) % N_KV_HEADS;
    size_t slot = ((size_t)(layer * N_KV_HEADS + kv_head) * n_ctx + n_past + token) * HEAD_DIM;
    if (is_value) {
        vstore_half(x[i], slot + i, values);
        return;
    }
    int n_pairs = n_dims / 2;
    if (i >= n_pairs && i < n_dims) return;  // done with the other of its pair
    float scale = is_query ? query_scales[token] : 1;
    int first = i, second = i;
    float2 turned = (float2)(x[i], 0);
    if (i < n_pairs) {
        first = pairs_are_halves ? i : 2 * i;
        second = pairs_are_halves ? i + n_pairs : 2 * i + 1;
        float2 turn = turns[(size_t)token * n_pairs + i];
        turned = (float2)(x[first] * turn.x - x[second] * turn.y, x[first] * turn.y + x[second] * turn.x);
    }
    if (is_query) {
        x[first] = turned.x * scale;
        if (second != first) x[second] = turned.y * scale;
    } else {
        vstore_half(turned.x, slot + first, keys);
        if (second != first) vstore_half(turned.y, slot + second, keys);
    }
}

// Attention of one head of one token over the committed sequence, positions 0 .. n_past - 1, and what it sees of what
// follows there: all up to itself in a chain, where n_nodes is 0; else the tokens are nodes first, first + 1, ... of a
// tree, whose node j has slot n_past + j, and node i sees those with sees[i, j], (n_nodes, n_nodes). positions: of all
// nodes. window: positions, 0 for all. Softmax is taken in one pass (Milakov and Gimelshein, arXiv:1805.02867). Groups:
// (1, N_HEADS, tokens).
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void attend(
    global const float* restrict qkv, global const half* restrict keys, global const half* restrict values,
    global const int* restrict positions, global const uchar* restrict sees, global float* restrict out, int layer,
    int n_ctx, int n_past, int n_tokens, int n_nodes, int first, int window, float cap) {
    local float parts[GROUP], weights[GROUP], query[HEAD_DIM];
    int item = get_local_id(0), head = get_group_id(1), token = get_group_id(2);
    size_t slots = (size_t)(layer * N_KV_HEADS + head / (N_HEADS / N_KV_HEADS)) * n_ctx;
    for (int d = item; d < HEAD_DIM; d += GROUP) query[d] = qkv[(size_t)token * N_QKV + head * HEAD_DIM + d];
    barrier(CLK_LOCAL_MEM_FENCE);
    float sums[(HEAD_DIM + GROUP - 1) / GROUP];
    for (int part = 0; part < (HEAD_DIM + GROUP - 1) / GROUP; part++) sums[part] = 0;
    int node = first + token;
    int oldest = window ? max(0, positions[node] - window + 1) : 0;
    int last = n_past + (n_nodes ? first + n_tokens : token + 1);
    float largest = -INFINITY, total = 0;
    for (int base = min(oldest, n_past); base < last; base += GROUP) {
        int slot = base + item;
        bool is_seen = slot < last && slot >= oldest;
        if (n_nodes && slot >= n_past && slot < last)
            is_seen = sees[(size_t)node * n_nodes + slot - n_past] && positions[slot - n_past] >= oldest;
        float score = -INFINITY;
        if (is_seen) {
            score = 0;
            for (int d = 0; d < HEAD_DIM; d++) score += query[d] * vload_half((slots + slot) * HEAD_DIM + d, keys);
            score = capped(score, cap);
        }
        float now = fmax(largest, maximum_of_group(score, parts));
        float kept = now == -INFINITY ? 1 : exp(largest - now);  // nothing seen yet
        float weight = now == -INFINITY ? 0 : exp(score - now);
        largest = now;
        weights[item] = weight;
        total = total * kept + sum_of_group(weight, parts);  // which waits for all weights, too
        int n_here = min(GROUP, last - base);
        for (int part = 0, d = item; d < HEAD_DIM; part++, d += GROUP) {
            float sum = sums[part] * kept;
            for (int i = 0; i < n_here; i++) sum += weights[i] * vload_half((slots + base + i) * HEAD_DIM + d, values);
            sums[part] = sum;
        }
        barrier(CLK_LOCAL_MEM_FENCE);  // weights are written again
    }
    for (int part = 0, d = item; d < HEAD_DIM; part++, d += GROUP)
        out[(size_t)token * N_Q + head * HEAD_DIM + d] = sums[part] / total;
}

// Moves the rows of a path to where sequential decoding would have put them. rows: ascending, row i is at least i, so
// that nothing is overwritten before it is read. Items: (HEAD_DIM, layers * N_KV_HEADS).
kernel void keep_path(global half* keys, global half* values, global const int* restrict rows, int n_rows, int n_ctx,
                      int n_past) {
    int d = get_global_id(0);
    if (d >= HEAD_DIM) return;
    size_t slots = (size_t)get_global_id(1) * n_ctx + n_past;
    global ushort* key_bits = (global ushort*)keys;
    global ushort* value_bits = (global ushort*)values;
    for (int i = 0; i < n_rows; i++) {
        size_t to = (slots + i) * HEAD_DIM + d, from = (slots + rows[i]) * HEAD_DIM + d;
        key_bits[to] = key_bits[from];
        value_bits[to] = value_bits[from];
    }
}
