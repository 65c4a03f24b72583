#include <cstring>

#include "blocks.h"
#include "kernels/hadamard.h"
#include "rotation.h"

AttentionBlock::AttentionBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights)
    : config_(*config.layers[static_cast<size_t>(index)].attention()),
      index_(index),
      is_beside_(config.layers[static_cast<size_t>(index)].is_beside),
      is_rotated_in_halves_(config_.rope >= 0 && config.ropes[static_cast<size_t>(config_.rope)].halves),
      query_scales_(config.query_scales[static_cast<size_t>(config_.query_scales)]),
      q_(weights.matrix(name + ".q", config_.n_q_rows(), config_.n_in)),
      k_(config_.has_keys() ? weights.matrix(name + ".k", config_.n_kv(), config_.n_in) : Matrix()),
      v_(config_.has_values() ? weights.matrix(name + ".v", config_.n_kv(), config_.n_in) : Matrix()),
      output_(weights.matrix(name + ".output", config.n_embd, config_.n_q())),
      ones_(config_.normed_values ? padded(config_.head_dim) : 0, 1.0f),
      norm_(weights.vector(name + ".norm", config.n_embd)),
      post_norm_(weights.vector(name + ".post_norm", config.n_embd)),
      sub_norm_(weights.vector(name + ".sub_norm", config_.n_q())),
      q_norm_(nullptr),
      k_norm_(nullptr),
      q_bias_(weights.vector(name + ".q_bias", config_.n_q_rows())),
      k_bias_(config_.key_bias ? weights.required_vector(name + ".k_bias", config_.n_kv())
                               : weights.vector(name + ".k_bias", config_.n_kv())),
      v_bias_(weights.vector(name + ".v_bias", config_.n_kv())),
      output_bias_(weights.vector(name + ".output_bias", config.n_embd)),
      sinks_(weights.vector(name + ".sinks", config_.n_heads)),
      gate_(config_.n_gate() ? weights.matrix(name + ".gate", config_.n_gate(), config_.n_in) : Matrix{}) {
    if (config_.qk_norm == QKNorm::None) return;
    const bool is_whole = config_.qk_norm == QKNorm::Whole;
    q_norm_ = weights.required_vector(name + ".q_norm", is_whole ? config_.n_q() : config_.head_dim);
    if (config_.has_keys())
        k_norm_ = weights.required_vector(name + ".k_norm", is_whole ? config_.n_kv() : config_.head_dim);
}

void AttentionBlock::run(const Pass& pass, int thread, const float* attended) const {
    const Activations& b = pass.b;
    const Matrix *k = config_.has_keys() ? &k_ : &q_, *v = config_.has_values() ? &v_ : &q_;
    const Matrix* gate = config_.n_gate() ? &gate_ : &q_;
    const float* before = is_beside_ ? b.x_before : nullptr;
    const Inputs inputs = attended ? pass.plain_inputs(thread, attended, b.ld_joined, {&q_, k, v, gate})
                                   : pass.normed_inputs(thread, norm_, nullptr, pass.n, {&q_, k, v, gate}, before);
    project_qkv(pass, thread, inputs);
    if (config_.qk_norm == QKNorm::Whole) norm_queries_and_keys(pass, thread);
    rotate_and_store(pass, thread);
    attend(pass, thread);
    pass.add_projection(thread, b.attn, b.ld_q, sub_norm_, output_, output_bias_, post_norm_,
                        config_.post_norm_epsilon);
}

void AttentionBlock::project_qkv(const Pass& pass, int thread, const Inputs& inputs) const {
    const Activations& b = pass.b;
    const int n = pass.n, n_threads = pass.pool.size(), together = pass.kernels.at_once(n);
    const Matrix &of_k = config_.has_keys() ? k_ : q_, &of_v = config_.has_values() ? v_ : q_;
    const Tasks q(q_, n, n_threads, together), k(of_k, n, n_threads, together), v(of_v, n, n_threads, together);
    const bool has_gate = config_.n_gate() > 0;
    const Tasks gate(has_gate ? gate_ : q_, n, n_threads, together);
    const auto project = [&](const Matrix& m, const float* bias, const Tasks& tasks, int task, float* y, size_t ldy) {
        const int first = tasks.first(task), last = tasks.last(task);
        pass.product(thread, m, inputs, n, first, last, tasks.next_data(m, task), y, ldy);
        add_bias(m, bias, n, first, last, y, ldy);
    };
    const int n_keys = config_.has_keys() ? k.count() : 0, n_values = config_.has_values() ? v.count() : 0;
    const int n_gates = has_gate ? gate.count() : 0;
    pass.for_tasks(thread, q.count() + n_keys + n_values + n_gates, [&](int task) {
        if (task < q.count() && config_.gated_q()) return project(q_, q_bias_, q, task, b.gated_q, 2 * b.ld_q);
        if (task < q.count()) return project(q_, q_bias_, q, task, b.q, b.ld_q);
        task -= q.count();
        if (task < n_keys) return project(k_, config_.key_bias ? nullptr : k_bias_, k, task, b.k, b.ld_kv);
        task -= n_keys;
        if (task < n_values) return project(v_, v_bias_, v, task, b.v, b.ld_kv);
        project(gate_, nullptr, gate, task - n_values, b.gates, b.ld_gates);
    });
}

// ---- norms, positions and the cache ----------------------------------------------------------------------------

// RMS norms over all queries, and all keys, of a token.
void AttentionBlock::norm_queries_and_keys(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const float epsilon = pass.config.norm_epsilon;
    pass.for_items(thread, pass.n, [&](int c) {
        float* q = b.q + static_cast<size_t>(c) * b.ld_q;
        float* k = b.k + static_cast<size_t>(c) * b.ld_kv;
        clear_padding(q, config_.n_q());
        clear_padding(k, config_.n_kv());
        pass.kernels.rms_norm(q, q_norm_, config_.n_q(), epsilon, q);
        pass.kernels.rms_norm(k, k_norm_, config_.n_kv(), epsilon, k);
    });
}

// RMS norms over each of some heads, which stand side by side and so are copied to a padded place first.
void AttentionBlock::norm_heads(const Pass& pass, int thread, const float* norm, float* heads, int n_heads) const {
    float* padded_head = pass.b.own_head[static_cast<size_t>(thread)];
    clear_padding(padded_head, config_.head_dim);
    for (int i = 0; i < n_heads; i++) {
        float* head = heads + i * config_.head_dim;
        const size_t n_bytes = sizeof(float) * static_cast<size_t>(config_.head_dim);
        std::memcpy(padded_head, head, n_bytes);
        pass.kernels.rms_norm(padded_head, norm, config_.head_dim, pass.config.norm_epsilon, padded_head);
        std::memcpy(head, padded_head, n_bytes);
    }
}

// The queries and the key of one kv head of token c; k: null for a layer without.
void AttentionBlock::rotate_heads(const Pass& pass, int c, float* q, float* k) const {
    const Activations::Angles& angles = pass.b.angles[static_cast<size_t>(config_.rope)];
    const size_t at = static_cast<size_t>(c) * angles.n_pairs;
    const auto turn = [&](float* head) {
        rotate_head(head, angles.cosine + at, angles.sine + at, angles.n_pairs, is_rotated_in_halves_);
    };
    for (int i = 0; i < config_.n_heads / config_.n_kv_heads; i++) turn(q + i * config_.head_dim);
    if (k) turn(k);
}

// Positions into queries and keys, keys and values into the states of the sequences.
void AttentionBlock::rotate_and_store(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const int dim = config_.head_dim, of_group = config_.n_heads / config_.n_kv_heads;
    pass.for_items(thread, pass.n * config_.n_kv_heads, [&](int item) {
        const int c = item / config_.n_kv_heads, kv_head = item % config_.n_kv_heads;
        const size_t token = static_cast<size_t>(c);
        float* q = b.q + token * b.ld_q + kv_head * of_group * dim;
        float* k = config_.has_keys() ? b.k + token * b.ld_kv + kv_head * dim : nullptr;
        float* v = b.v + token * b.ld_kv + kv_head * dim;
        if (k && config_.keys_are_values) std::copy(k, k + dim, v);
        if (k && config_.normed_values) norm_heads(pass, thread, ones_.data(), v, 1);
        for (int i = 0; config_.gated_q() && i < of_group; i++) {
            const float* both = gated_query(pass, c, kv_head * of_group + i);
            std::copy(both, both + dim, q + i * dim);
        }
        if (config_.qk_norm == QKNorm::PerHead) {
            norm_heads(pass, thread, q_norm_, q, of_group);
            if (k) norm_heads(pass, thread, k_norm_, k, 1);
        }
        const bool has_bias = k && config_.key_bias && pass.sequence_of(c).rows.state->sizes().type != KvType::K6V4;
        for (int d = 0; has_bias && d < dim; d++) k[d] += k_bias_[kv_head * dim + d];
        if (config_.rope >= 0) rotate_heads(pass, c, q, k);
        const float scale = query_scales_.at(b.position[c]);
        for (int d = 0; d < of_group * dim; d++) q[d] *= scale;
        if (k) store(pass, c, kv_head, k, v);
    });
}

// What stands out in a key or a value is spread over all of it before it gets few bits. The largest numbers of keys come
// from the bias, which is therefore not stored: it is the same in all sequences, and adds to scores what set_offset
// says.
void AttentionBlock::store(const Pass& pass, int c, int kv_head, float* k, float* v) const {
    const Sequence& sequence = pass.sequence_of(c);
    const KvHead head = sequence.rows.state->head(index_, kv_head);
    if (head.type == KvType::K6V4) {
        hadamard_in(k, config_.head_dim);
        hadamard_in(v, config_.head_dim);
    }
    pass.kernels.store_key_value(head, sequence.slot(c), k, v);
}

// ---- attention -------------------------------------------------------------------------------------------------

// Tasks of some tokens of one sequence and some query heads of one kv head, kTaskRows together at most. What a task
// loads serves all of its rows; but with few tokens, more tasks with fewer heads keep all threads at work.
struct AttentionBlock::Split {
    int tokens_each, n_blocks;  // blocks of tokens, which end where a sequence ends
    int parts;                  // of the query heads of a kv head
    bool is_short;

    int blocks_of(const Sequence& sequence) const { return (sequence.rows.n + tokens_each - 1) / tokens_each; }
};

AttentionBlock::Split AttentionBlock::split(const Pass& pass) const {
    // Threads beside each other take different kv heads, and find them in their own caches for the next part; a
    // sequence that is too long for that they read together.
    constexpr int kShort = 512;
    const int of_group = config_.n_heads / config_.n_kv_heads;
    Split s{std::max(1, kTaskRows / of_group), 0, 0, true};
    for (const Sequence& sequence : pass.sequences) {
        s.n_blocks += s.blocks_of(sequence);
        s.is_short = s.is_short && sequence.slot(sequence.last()) <= kShort;
    }
    const int n_whole = config_.n_kv_heads * s.n_blocks, needed = (2 * pass.pool.size() + n_whole - 1) / n_whole;
    s.parts = std::min(of_group, std::max(needed, (of_group + kTaskRows - 1) / kTaskRows));
    return s;
}

void AttentionBlock::attend(const Pass& pass, int thread) const {
    const Split s = split(pass);
    const int of_group = config_.n_heads / config_.n_kv_heads, tasks_each = config_.n_kv_heads * s.parts;
    pass.for_tasks(thread, s.n_blocks * tasks_each, [&](int task) {
        const int i = task % tasks_each;
        const int kv_head = s.is_short ? i % config_.n_kv_heads : i / s.parts;
        const int part = s.is_short ? i / config_.n_kv_heads : i % s.parts;
        const int first_head = kv_head * of_group + of_group * part / s.parts;
        const int last_head = kv_head * of_group + of_group * (part + 1) / s.parts;
        int block = task / tasks_each;
        const Sequence* sequence = pass.sequences.data();
        for (; block >= s.blocks_of(*sequence); sequence++) block -= s.blocks_of(*sequence);
        const int first_token = sequence->first + block * s.tokens_each;
        const int last_token = std::min(sequence->last(), first_token + s.tokens_each);
        Attention a;
        a.kv = sequence->rows.state->head(config_.of_target ? config_.kv_of : index_, kv_head);
        a.soft_cap = config_.soft_cap;
        a.rope = rope_tables_of(pass);
        a.n_rows = 0;
        for (int c = first_token; c < last_token; c++) {
            for (int head = first_head; head < last_head; head++) {
                a.rows[a.n_rows] = row(pass, thread, *sequence, c, head, a.n_rows);
                AttentionRow& added = a.rows[a.n_rows];
                if (a.kv.type == KvType::Q8_0) quantize_query(pass, thread, a.n_rows, added);
                if (a.kv.type == KvType::K6V4) quantize_turned_query(pass, thread, kv_head, a.n_rows, added);
                a.n_rows++;
            }
        }
        pass.kernels.attention(a);
        for (int r = 0; a.kv.type == KvType::K6V4 && r < a.n_rows; r++) hadamard_back(a.rows[r].out, config_.head_dim);
        for (int c = first_token, r = 0; config_.gate != OutputGate::None && c < last_token; c++) {
            for (int head = first_head; head < last_head; head++) gate(pass, thread, c, head, a.rows[r++].out);
        }
    });
}

// The query of a head of token c, with its gate after it.
const float* AttentionBlock::gated_query(const Pass& pass, int c, int head) const {
    return pass.b.gated_q + static_cast<size_t>(c) * 2 * pass.b.ld_q + static_cast<size_t>(2 * head * config_.head_dim);
}

// The numbers that a head's gate is made of: one, or head_dim.
const float* AttentionBlock::gate_of(const Pass& pass, int c, int head) const {
    if (config_.gated_q()) return gated_query(pass, c, head) + config_.head_dim;
    const int each = config_.gate == OutputGate::PerHead ? 1 : config_.head_dim;
    return pass.b.gates + static_cast<size_t>(c) * pass.b.ld_gates + static_cast<size_t>(head * each);
}

// What a head gives, times sigmoid(gate) or softplus(gate).
void AttentionBlock::gate(const Pass& pass, int thread, int c, int head, float* out) const {
    const bool is_one = config_.gate == OutputGate::PerHead;
    const int dim = config_.head_dim, n = is_one ? 1 : dim;
    const float* from = gate_of(pass, c, head);
    float* share = pass.b.own_head[static_cast<size_t>(thread)];
    std::copy(from, from + n, share);
    clear_padding(share, n);
    const auto function = config_.gate_is_softplus ? pass.kernels.softplus : pass.kernels.sigmoid;
    function(share, static_cast<int>(padded(n)));
    for (int d = 0; d < dim; d++) out[d] *= share[is_one ? 0 : d];
}

// Head `head` of token c, as row r of a task.
AttentionRow AttentionBlock::row(const Pass& pass, int thread, const Sequence& sequence, int c, int head, int r) const {
    const Activations& b = pass.b;
    const size_t own = static_cast<size_t>(thread), row = static_cast<size_t>(r);
    const size_t at = static_cast<size_t>(c) * b.ld_q + static_cast<size_t>(head * config_.head_dim);
    AttentionRow a{};
    a.q = b.q + at;
    a.out = b.attn + at;
    a.sink = sinks_ ? sinks_ + head : nullptr;
    a.scores = b.scores[own] + row * b.ld_scores;
    a.sum = b.sums[own] + row * b.ld_value;
    a.first = config_.window ? std::max(0, b.position[c] + 1 - config_.window) : 0;
    a.n_past = sequence.chain && !config_.of_target ? sequence.slot(c) + 1 : sequence.base;
    if (sequence.chain || config_.of_target) return a;
    set_path(sequence, c, b.path[own] + row * static_cast<size_t>(pass.config.n_batch), a);
    return a;
}

// The codes of row r of a task, for keys of Q8_0.
void AttentionBlock::quantize_query(const Pass& pass, int thread, int r, AttentionRow& a) const {
    const size_t row = static_cast<size_t>(r), dim = static_cast<size_t>(config_.head_dim);
    Inputs q = pass.b.own_queries[static_cast<size_t>(thread)];
    q.n_in = config_.head_dim;
    q.x = a.q;
    q.q32 += row * dim;
    q.scale32 += row * dim / 32;
    q.sum32 += row * dim / 32;
    q.centre32 += row * dim / 32;
    pass.kernels.quantize32(q, 0);
    a.codes = q.q32;
    a.scales = q.scale32;
    a.sums = q.sum32;
}

// The codes of row r of a task, for keys of K6V4, and the offset where keys are stored without a bias.
void AttentionBlock::quantize_turned_query(const Pass& pass, int thread, int kv_head, int r, AttentionRow& a) const {
    const size_t own = static_cast<size_t>(thread), row = static_cast<size_t>(r);
    const size_t dim = static_cast<size_t>(config_.head_dim);
    float* turned = pass.b.own_head[own];
    std::memcpy(turned, a.q, sizeof(float) * dim);
    hadamard_back(turned, config_.head_dim);
    Inputs q = pass.b.own_queries[own];
    q.n_in = config_.head_dim;
    q.x = turned;
    q.ldx = dim;
    q.q_token += row * dim;
    q.scale_token += row;
    q.sum_token += row;
    pass.kernels.quantize_token(q, 0);
    a.codes = q.q_token;
    a.scales = q.scale_token;
    a.sums = q.sum_token;
    if (!config_.key_bias) return;
    float* offset = pass.b.offsets[own] + row * (pass.b.ld_value + 16);
    set_offset(pass, kv_head, a.q, offset);
    a.offset = offset;
}

RopeTables AttentionBlock::rope_tables_of(const Pass& pass) const {
    if (!config_.key_bias || config_.rope < 0) return {};
    const Activations::RopeTables& rope = pass.b.rope_tables[static_cast<size_t>(config_.rope)];
    return {static_cast<int>(rope.ld), rope.tiles, rope.within};
}

// q times the bias turned to position p, as a function of p (see RopeTables): of each pair, and of what is not turned.
void AttentionBlock::set_offset(const Pass& pass, int kv_head, const float* q, float* offset) const {
    const float* bias = k_bias_ + kv_head * config_.head_dim;
    const size_t ld = static_cast<size_t>(rope_tables_of(pass).ld);
    std::fill(offset, offset + 2 * ld + 1, 0.0f);
    size_t n_pairs = 0;
    if (config_.rope >= 0) {
        const Rope& rope = pass.config.ropes[static_cast<size_t>(config_.rope)];
        const float magnitude = static_cast<float>(rope.magnitude);
        n_pairs = rope.frequencies.size();
        for (size_t i = 0; i < n_pairs; i++) {
            const size_t first = is_rotated_in_halves_ ? i : 2 * i,
                         second = first + (is_rotated_in_halves_ ? n_pairs : 1);
            offset[i] = magnitude * (q[first] * bias[first] + q[second] * bias[second]);
            offset[ld + i] = magnitude * (q[second] * bias[first] - q[first] * bias[second]);
        }
    }
    for (size_t d = 2 * n_pairs; d < static_cast<size_t>(config_.head_dim); d++) offset[2 * ld] += q[d] * bias[d];
}
