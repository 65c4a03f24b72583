#include <algorithm>
#include <cstring>

#include "blocks.h"
#include "rotation.h"

LatentAttentionBlock::LatentAttentionBlock(const DecoderConfig& config, int index, const std::string& name,
                                           const Weights& weights)
    : config_(*config.layers[static_cast<size_t>(index)].latent_attention()),
      index_(index),
      is_rotated_in_halves_(config.ropes[static_cast<size_t>(config_.rope)].halves),
      q_(config_.n_q_latent ? weights.matrix(name + ".q_a", config_.n_q_latent, config.n_embd)
                            : weights.matrix(name + ".q", config_.n_q(), config.n_embd)),
      q_b_(config_.n_q_latent ? weights.matrix(name + ".q_b", config_.n_q(), config_.n_q_latent) : Matrix{}),
      kv_(weights.matrix(name + ".kv", config_.n_row(), config.n_embd)),
      k_b_(weights.matrix(name + ".k_b", config_.n_heads * config_.n_latent, config_.n_plain)),
      v_b_(weights.matrix(name + ".v_b", config_.n_heads * config_.n_value, config_.n_latent)),
      output_(weights.matrix(name + ".output", config.n_embd, config_.n_heads * config_.n_value)),
      norm_(weights.vector(name + ".norm", config.n_embd)),
      q_norm_(config_.n_q_latent ? weights.required_vector(name + ".q_norm", config_.n_q_latent) : nullptr),
      kv_norm_(weights.required_vector(name + ".kv_norm", config_.n_latent)) {}

size_t LatentAttentionBlock::weight_bytes() const {
    return q_.n_bytes() + (config_.n_q_latent ? q_b_.n_bytes() : 0) + kv_.n_bytes() + k_b_.n_bytes() + v_b_.n_bytes() +
           output_.n_bytes();
}

void LatentAttentionBlock::run(const Pass& pass, int thread, const float*) const {
    const LatentRows& l = pass.b.latents;
    project(pass, thread);
    if (config_.n_q_latent) {
        const Inputs inputs = normed_queries(pass, thread);
        const Tasks tasks(q_b_, pass.n, pass.pool.size(), pass.kernels.at_once(pass.n));
        pass.for_tasks(thread, tasks.count(), [&](int task) {
            pass.product(thread, q_b_, inputs, pass.n, tasks.first(task), tasks.last(task), tasks.next_data(q_b_, task),
                         l.q, l.ld_q);
        });
    }
    turn_and_store(pass, thread);
    const size_t ld_queries = static_cast<size_t>(config_.n_heads) * l.ld_query;
    multiply_heads(pass, thread, k_b_, {l.q, static_cast<size_t>(config_.n_plain + config_.n_turned), l.ld_q},
                   {l.queries, l.ld_query, ld_queries}, config_.scale);
    attend(pass, thread);
    const size_t ld_given = static_cast<size_t>(config_.n_heads) * l.ld_given;
    multiply_heads(pass, thread, v_b_, {l.given, l.ld_given, ld_given},
                   {l.y, static_cast<size_t>(config_.n_value), l.ld_y}, 1.0f);
    pass.add_projection(thread, l.y, l.ld_y, nullptr, output_, nullptr, nullptr);
}

// ---- queries and rows ------------------------------------------------------------------------------------------

// Queries, or what they are made of, and rows.
void LatentAttentionBlock::project(const Pass& pass, int thread) const {
    const LatentRows& l = pass.b.latents;
    const int n = pass.n, n_threads = pass.pool.size(), together = pass.kernels.at_once(n);
    const Inputs inputs = pass.normed_inputs(thread, norm_, nullptr, n, {&q_, &kv_});
    const Tasks q(q_, n, n_threads, together), kv(kv_, n, n_threads, together);
    float* y = config_.n_q_latent ? l.q_latent : l.q;
    const size_t ldy = config_.n_q_latent ? l.ld_q_latent : l.ld_q;
    pass.for_tasks(thread, q.count() + kv.count(), [&](int task) {
        const bool is_q = task < q.count();
        const Matrix& m = is_q ? q_ : kv_;
        const Tasks& tasks = is_q ? q : kv;
        const int i = is_q ? task : task - q.count();
        pass.product(thread, m, inputs, n, tasks.first(i), tasks.last(i), tasks.next_data(m, i), is_q ? y : l.row,
                     is_q ? ldy : l.ld_row);
    });
}

// The latents of queries after their norm, as inputs of q_b. With one token every thread makes its own.
Inputs LatentAttentionBlock::normed_queries(const Pass& pass, int thread) const {
    const LatentRows& l = pass.b.latents;
    const int n = config_.n_q_latent;
    float* h = pass.alone() ? pass.b.own_h[static_cast<size_t>(thread)] : l.q_latent;
    const Inputs inputs = pass.inputs_of(thread, n, h, l.ld_q_latent);
    const auto input = [&](int c) {
        const size_t at = static_cast<size_t>(c) * l.ld_q_latent;
        if (h != l.q_latent) std::memcpy(h + at, l.q_latent + at, sizeof(float) * static_cast<size_t>(n));
        clear_padding(h + at, n);
        pass.kernels.rms_norm(h + at, q_norm_, n, pass.config.norm_epsilon, h + at);
        prepare_inputs(pass.kernels, inputs, c, {&q_b_});
    };
    if (pass.alone()) {
        input(0);
    } else {
        pass.for_items(thread, pass.n, input);
    }
    pass.record(thread, inputs, pass.n, {&q_b_});
    return inputs;
}

// Positions into the last numbers of queries, which go behind the place of what k_b gives, and of rows, which go into the
// states of the sequences.
void LatentAttentionBlock::turn_and_store(const Pass& pass, int thread) const {
    const LatentRows& l = pass.b.latents;
    const Activations::Angles& angles = pass.b.angles[static_cast<size_t>(config_.rope)];
    const int n_parts = config_.n_heads + 1;
    pass.for_items(thread, pass.n * n_parts, [&](int item) {
        const int c = item / n_parts, head = item % n_parts;
        const size_t token = static_cast<size_t>(c), at = token * angles.n_pairs;
        const auto turn = [&](float* x) {
            rotate_head(x, angles.cosine + at, angles.sine + at, angles.n_pairs, is_rotated_in_halves_);
        };
        if (head == config_.n_heads) {
            float* row = l.row + token * l.ld_row;
            turn(row + config_.n_latent);
            pass.kernels.rms_norm(row, kv_norm_, config_.n_latent, pass.config.norm_epsilon, row);
            const Sequence& sequence = pass.sequence_of(c);
            const KvHead kept = sequence.rows.state->head(index_, 0);
            return pass.kernels.store_key_value(kept, sequence.slot(c), row, nullptr);
        }
        const int n = config_.n_turned;
        const float* from = l.q + token * l.ld_q + head * (config_.n_plain + n) + config_.n_plain;
        float* to = query(pass, c, head) + config_.n_latent;
        std::copy(from, from + n, to);
        turn(to);
        for (int i = 0; i < n; i++) to[i] *= config_.scale;
    });
}

float* LatentAttentionBlock::query(const Pass& pass, int c, int head) const {
    const LatentRows& l = pass.b.latents;
    return l.queries + static_cast<size_t>(c * config_.n_heads + head) * l.ld_query;
}

// The matrix of each head times its own numbers of all tokens, times scale.
void LatentAttentionBlock::multiply_heads(const Pass& pass, int thread, const Matrix& all, const OfHeads& from,
                                          const OfHeads& to, float scale) const {
    const int n = pass.n, n_heads = config_.n_heads;
    const auto inputs_of = [&](int head) {
        Inputs inputs = pass.b.latents.inputs;
        inputs.n_in = all.n_in;
        inputs = inputs.from(head * n);
        inputs.x = from.x + static_cast<size_t>(head) * from.head_stride;
        inputs.ldx = from.ld;
        return inputs;
    };
    if (input_kind(all.format) != InputKind::Float) {
        pass.for_items(thread, n * n_heads,
                       [&](int i) { prepare_inputs(pass.kernels, inputs_of(i / n), i % n, {&all}); });
    }
    for (int head = 0; pass.squares && head < n_heads; head++) pass.record(thread, inputs_of(head), n, {&all}, head);
    Matrix one = all;
    one.n_out = all.n_out / n_heads;
    const Tasks tasks(one, n, pass.pool.size(), pass.kernels.at_once(n));
    pass.for_tasks(thread, n_heads * tasks.count(), [&](int task) {
        const int head = task / tasks.count(), first = tasks.first(task % tasks.count());
        const int last = tasks.last(task % tasks.count());
        Matrix of_head = all.from(head * one.n_groups());
        of_head.n_out = one.n_out;
        float* y = to.x + static_cast<size_t>(head) * to.head_stride;
        pass.kernels.matmul(of_head, inputs_of(head), n, first, last, nullptr, y, to.ld);
        if (scale == 1.0f) return;
        for (int c = 0; c < n; c++) {
            float* row = y + static_cast<size_t>(c) * to.ld;
            for (int i = first * kRows; i < last * kRows; i++) row[i] *= scale;
        }
    });
}

// ---- attention -------------------------------------------------------------------------------------------------

// Tasks of some tokens of one sequence and some heads, kTaskRows together at most: all of them read the same rows.
void LatentAttentionBlock::attend(const Pass& pass, int thread) const {
    const int n_heads = config_.n_heads, tokens_each = std::max(1, kTaskRows / n_heads);
    const auto blocks_of = [&](const Sequence& s) { return (s.rows.n + tokens_each - 1) / tokens_each; };
    int n_blocks = 0;
    for (const Sequence& sequence : pass.sequences) n_blocks += blocks_of(sequence);
    const int needed = (2 * pass.pool.size() + n_blocks - 1) / n_blocks;
    const int parts = std::min(n_heads, std::max(needed, (n_heads + kTaskRows - 1) / kTaskRows));
    pass.for_tasks(thread, n_blocks * parts, [&](int task) {
        const int part = task % parts, first_head = n_heads * part / parts, last_head = n_heads * (part + 1) / parts;
        int block = task / parts;
        const Sequence* sequence = pass.sequences.data();
        for (; block >= blocks_of(*sequence); sequence++) block -= blocks_of(*sequence);
        const int first_token = sequence->first + block * tokens_each;
        const int last_token = std::min(sequence->last(), first_token + tokens_each);
        Attention a;
        a.kv = sequence->rows.state->head(index_, 0);
        a.soft_cap = 0;
        a.n_rows = 0;
        for (int c = first_token; c < last_token; c++) {
            for (int head = first_head; head < last_head; head++, a.n_rows++)
                a.rows[a.n_rows] = row(pass, thread, *sequence, c, head, a.n_rows);
        }
        pass.kernels.attention(a);
    });
}

// Head `head` of token c, as row r of a task.
AttentionRow LatentAttentionBlock::row(const Pass& pass, int thread, const Sequence& sequence, int c, int head,
                                       int r) const {
    const Activations& b = pass.b;
    const size_t own = static_cast<size_t>(thread), at = static_cast<size_t>(r);
    AttentionRow a{};
    a.q = query(pass, c, head);
    a.out = b.latents.given + static_cast<size_t>(c * config_.n_heads + head) * b.latents.ld_given;
    a.scores = b.scores[own] + at * b.ld_scores;
    a.sum = b.sums[own] + at * b.ld_value;
    a.n_past = sequence.chain ? sequence.slot(c) + 1 : sequence.base;
    if (!sequence.chain) set_path(sequence, c, b.path[own] + at * static_cast<size_t>(pass.config.n_batch), a);
    return a;
}
