// What a decoder does between its matrix products; the recipe is ModelSpec's.
//
// Macros: GROUP, work-items of those groups that sum together; HEAD_DIM; N_HEADS; N_KV_HEADS; ACTIVATION (0 silu,
// 1 gelu_tanh, 2 relu2); TOP, candidates of a row. Queries, keys and values of a token lie side by side in qkv. The cache, keys and values, is
// (layers, N_KV_HEADS, n_ctx, HEAD_DIM).

#define RUN 32  // activations that share a scale
#define N_Q (N_HEADS * HEAD_DIM)
#define N_KV (N_KV_HEADS * HEAD_DIM)
#define N_QKV (N_Q + 2 * N_KV)

// Sum or maximum over a group, for all of it. parts: GROUP floats of local memory.
float sum_of_group(float value, local float* parts) {
    int item = get_local_id(0);
    parts[item] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
        if (item < half_size) parts[item] += parts[item + half_size];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float sum = parts[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return sum;
}

float maximum_of_group(float value, local float* parts) {
    int item = get_local_id(0);
    parts[item] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
        if (item < half_size) parts[item] = fmax(parts[item], parts[item + half_size]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float maximum = parts[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return maximum;
}

float capped(float x, float cap) { return cap == 0 ? x : cap * tanh(x / cap); }

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

// Attention of one head of one token over the committed text, positions 0 .. n_past - 1, and what it sees of what follows
// there: all up to itself in a chain, where n_nodes is 0; else the tokens are nodes first, first + 1, ... of a tree, whose
// node j has slot n_past + j, and node i sees those with sees[i, j], (n_nodes, n_nodes). positions: of all nodes.
// window: positions, 0 for all. Softmax is taken in one pass (Milakov and Gimelshein, arXiv:1805.02867).
// Groups: (1, N_HEADS, tokens).
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

// activation(gate) * up: in (n_tokens, 2 n), out (n_tokens, n). Items: (n, tokens).
kernel void gate(global const float* restrict in, global float* restrict out, int n) {
    int i = get_global_id(0);
    if (i >= n) return;
    size_t token = get_global_id(1);
    float x = in[token * 2 * n + i], up = in[token * 2 * n + n + i];
#if ACTIVATION == 0
    x = x / (1 + exp(-x));
#elif ACTIVATION == 1
    x = x / (1 + exp(-x * (1.5957691216057308f + 0.07135481627260025f * x * x)));
#else
    x = x > 0 ? x * x : 0;
#endif
    out[token * n + i] = x * up;
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

// Whether a candidate comes before another: the likelier, of equals the one with the smaller id.
int is_before(float value, int id, float other, int other_id) {
    return value > other || (value == other && id < other_id);
}

// The TOP likeliest of the first n logits of each row (., stride), and their probabilities at temperature 1: rows of ids
// and probabilities (., TOP) from first_row on. names: the id of each logit, if has_names; else they are in order.
// Groups: (1, rows).
kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void likeliest(
    global const float* restrict logits, global int* restrict ids, global float* restrict probabilities,
    global const int* restrict names, int has_names, int n, int stride, int first_row) {
    local float parts[GROUP];
    local int places[GROUP];
    int item = get_local_id(0), row = get_group_id(1);
    global const float* own = logits + (size_t)row * stride;
    float best[TOP];
    int best_ids[TOP];
    for (int i = 0; i < TOP; i++) {
        best[i] = -INFINITY;
        best_ids[i] = n;
    }
    float largest = -INFINITY;
    for (int at = item; at < n; at += GROUP) {
        float value = own[at];
        int id = at;
        largest = fmax(largest, value);
        if (!is_before(value, id, best[TOP - 1], best_ids[TOP - 1])) continue;
        for (int i = 0; i < TOP; i++) {  // insert it, and go on with what it displaces
            if (is_before(value, id, best[i], best_ids[i])) {
                float displaced = best[i];
                int displaced_id = best_ids[i];
                best[i] = value;
                best_ids[i] = id;
                value = displaced;
                id = displaced_id;
            }
        }
    }
    largest = maximum_of_group(largest, parts);
    float total = 0;
    for (int at = item; at < n; at += GROUP) total += exp(own[at] - largest);
    total = sum_of_group(total, parts);
    for (int place = 0; place < TOP; place++) {
        parts[item] = best[0];
        places[item] = best_ids[0];
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
            int other = item + half_size;
            if (item < half_size && is_before(parts[other], places[other], parts[item], places[item])) {
                parts[item] = parts[other];
                places[item] = places[other];
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        int chosen = places[0];
        if (item == 0) {
            int at = (first_row + row) * TOP + place;
            int id = min(chosen, n - 1);  // where logits are no numbers nothing is chosen
            ids[at] = has_names ? names[id] : id;
            probabilities[at] = exp(parts[0] - largest) / total;
        }
        if (chosen == best_ids[0]) {
            for (int i = 0; i + 1 < TOP; i++) {
                best[i] = best[i + 1];
                best_ids[i] = best_ids[i + 1];
            }
            best[TOP - 1] = -INFINITY;
            best_ids[TOP - 1] = n;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

// The next level of a tree: of the candidates (., TOP) of the level before it, n_rows from first_row on, those `width` that
// are reached most often, by the product of the chances from the root on. Its nodes have indices from `first` on, those of the level before
// from `before` on; with `first` 0 they follow the one row that there is. Fills ids, parents, chances, reach and sees
// (n_nodes, n_nodes) for them. One item.
kernel void choose_level(global const int* restrict candidates, global const float* restrict candidate_chances,
                         global int* restrict ids, global int* restrict parents, global float* restrict chances,
                         global float* restrict reach, global uchar* restrict sees, int first_row, int n_rows,
                         int width, int before, int first, int n_nodes) {
    int n_taken[TOP];  // of each row, whose candidates come likeliest first
    for (int row = 0; row < TOP; row++) n_taken[row] = 0;
    for (int node = first; node < first + width; node++) {
        int chosen = -1;
        float most = -1;
        for (int row = 0; row < n_rows; row++) {
            if (n_taken[row] == TOP) continue;
            float value = candidate_chances[(first_row + row) * TOP + n_taken[row]] * (first ? reach[before + row] : 1);
            if (chosen < 0 || value > most) {
                chosen = row;
                most = value;
            }
        }
        int candidate = (first_row + chosen) * TOP + n_taken[chosen]++;
        int parent = first ? before + chosen : -1;
        ids[node] = candidates[candidate];
        parents[node] = parent;
        chances[node] = candidate_chances[candidate];
        reach[node] = most;
        for (int other = 0; other < n_nodes; other++)
            sees[node * n_nodes + other] = other == node || (parent >= 0 && sees[parent * n_nodes + other]);
    }
}
