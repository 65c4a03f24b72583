#include <cmath>

#include "blocks.h"
#include "conv_history.h"
#include "state_columns.h"

DeltaNetBlock::DeltaNetBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights)
    : config_(*config.layers[static_cast<size_t>(index)].delta_net()),
      index_(index),
      qkv_(weights.matrix(name + ".qkv", config_.n_channels(), config.n_embd)),
      gate_(weights.matrix(name + ".gate", config_.n_v(), config.n_embd)),
      output_(weights.matrix(name + ".output", config.n_embd, config_.n_v())),
      beta_(config_.joint_steps ? weights.matrix(name + ".beta_alpha", 2 * config_.n_value_heads, config.n_embd)
                                : weights.matrix(name + ".beta", config_.n_value_heads, config.n_embd)),
      alpha_(config_.joint_steps ? beta_ : weights.matrix(name + ".alpha", config_.n_value_heads, config.n_embd)),
      norm_(weights.vector(name + ".norm", config.n_embd)),
      conv_(weights.required_vector(name + ".conv", config_.n_conv * config_.n_channels())),
      decay_(weights.required_vector(name + ".decay", config_.n_value_heads)),
      step_bias_(weights.required_vector(name + ".step_bias", config_.n_value_heads)),
      out_norm_(weights.required_vector(name + ".out_norm", config_.head_dim)) {}

size_t DeltaNetBlock::weight_bytes() const {
    return qkv_.n_bytes() + gate_.n_bytes() + output_.n_bytes() + beta_.n_bytes() +
           (config_.joint_steps ? 0 : alpha_.n_bytes());
}

// A sequence of the pass, and its state in this layer.
struct DeltaNetBlock::Rows {
    const Sequence& sequence;
    RecurrentState& state;
    int layer;
    RecurrentSizes sizes;

    const RecurrentState::Plan& plan() const { return state.plan(); }
    int column(int node) const { return sequence.first + node - plan().n_old; }
    // Of a node that has a row, else null.
    float* row(int node) const {
        const bool has_row = !plan().is_chain || node < plan().n_old;
        return has_row ? state.row(layer, plan().rows[static_cast<size_t>(node)]) : nullptr;
    }
    ConvHistory history(const Activations& b) const {
        return {sequence, state, sizes, layer, sizes.n_heads, b.u, b.ld_u, b.zeros};
    }
};

void DeltaNetBlock::run(const Pass& pass, int thread, const float*) const {
    const Activations& b = pass.b;
    project(pass, thread, pass.normed_inputs(thread, norm_, nullptr, pass.n, {&qkv_, &gate_, &beta_, &alpha_}));
    const auto since = std::chrono::steady_clock::now();
    mix(pass, thread);
    recur(pass, thread);
    pass.add_recurrence(thread, since);
    pass.add_projection(thread, b.z, b.ld_z, nullptr, output_, nullptr, nullptr);
}

void DeltaNetBlock::project(const Pass& pass, int thread, const Inputs& inputs) const {
    const Activations& b = pass.b;
    const int n = pass.n, n_threads = pass.pool.size(), together = pass.kernels.at_once(n);
    struct Product {
        const Matrix& matrix;
        float* y;
        size_t ldy;
        Tasks tasks;
    };
    const auto of = [&](const Matrix& m, float* y, size_t ldy) {
        return Product{m, y, ldy, {m, n, n_threads, together}};
    };
    const Product products[] = {of(qkv_, b.u, b.ld_u), of(gate_, b.z, b.ld_z), of(beta_, b.raw_steps, b.ld_steps),
                                of(alpha_, b.raw_steps + b.ld_steps / 2, b.ld_steps)};
    const int n_products = config_.joint_steps ? 3 : 4;
    int n_tasks = 0;
    for (int i = 0; i < n_products; i++) n_tasks += products[i].tasks.count();
    pass.for_tasks(thread, n_tasks, [&](int task) {
        const Product* p = products;
        for (; task >= p->tasks.count(); p++) task -= p->tasks.count();
        pass.product(thread, p->matrix, inputs, n, p->tasks.first(task), p->tasks.last(task),
                     p->tasks.next_data(p->matrix, task), p->y, p->ldy);
    });
}

// ---- what each row is by itself ----------------------------------------------------------------------------------

// Queries, keys and values after the convolution, with k q; decays and betas; and the rows that are kept until commit.
void DeltaNetBlock::mix(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const int dim = config_.head_dim, n_k = config_.n_k(), n_key_heads = config_.n_key_heads;
    const int n_parts = n_key_heads + config_.n_value_heads + 1;
    const float epsilon = pass.config.norm_epsilon, scale = 1.0f / std::sqrt(static_cast<float>(dim));
    pass.for_items(thread, pass.n * n_parts, [&](int item) {
        const int c = item / n_parts, part = item % n_parts;
        const Sequence& sequence = pass.sequence_of(c);
        const auto [state, layer] = sequence.rows.state->recurrent(index_);
        const Rows rows{sequence, *state, layer, config_.state_sizes()};
        float* kept = rows.row(c - sequence.first + rows.plan().n_old);
        if (part == n_parts - 1) return set_steps(pass, c, rows);
        if (part >= n_key_heads) return convolve(pass, rows, c, 2 * n_k + (part - n_key_heads) * dim, dim, kept);
        convolve(pass, rows, c, part * dim, dim, kept);
        convolve(pass, rows, c, n_k + part * dim, dim, kept);
        float* q = b.mixed + static_cast<size_t>(c) * b.ld_u + part * dim;
        float* k = q + n_k;
        pass.kernels.unit_length(q, dim, epsilon, scale);
        pass.kernels.unit_length(k, dim, epsilon, 1.0f);
        b.kq[static_cast<size_t>(c) * b.ld_kq + static_cast<size_t>(part)] = pass.kernels.dot_product(k, q, dim);
        if (kept) std::copy(k, k + dim, kept + rows.sizes.k_at() + part * dim);
    });
}

// Channels first..first+n-1 of row c.
void DeltaNetBlock::convolve(const Pass& pass, const Rows& rows, int c, int first, int n, float* kept) const {
    const Activations& b = pass.b;
    const float* path[kMostConv];
    const int node = c - rows.sequence.first + rows.plan().n_old;
    rows.history(b).path(node, path);
    if (kept) std::copy(path[config_.n_conv - 1] + first, path[config_.n_conv - 1] + first + n, kept + first);
    for (int i = 0; i < config_.n_conv; i++) path[i] += first;
    pass.kernels.convolve(path, conv_ + first, static_cast<size_t>(config_.n_channels()), nullptr, config_.n_conv, n,
                          true, b.mixed + static_cast<size_t>(c) * b.ld_u + first);
}

// Betas, and after them decays, of all heads of row c.
void DeltaNetBlock::set_steps(const Pass& pass, int c, const Rows& rows) const {
    const Activations& b = pass.b;
    const int n = config_.n_value_heads, n_padded = static_cast<int>(padded(n)), n_each = n / config_.n_key_heads;
    const float* raw = b.raw_steps + static_cast<size_t>(c) * b.ld_steps;
    float* beta = b.steps + static_cast<size_t>(c) * b.ld_steps;
    float* decay = beta + b.ld_steps / 2;
    clear_padding(beta, n);
    clear_padding(decay, n);
    for (int head = 0; head < n; head++) {
        const int of_group = head / n_each * 2 * n_each + head % n_each;  // where both are one product
        beta[head] = config_.joint_steps ? raw[of_group] : raw[head];
        decay[head] = config_.joint_steps ? raw[of_group + n_each] : raw[b.ld_steps / 2 + static_cast<size_t>(head)];
    }
    pass.kernels.sigmoid(beta, n_padded);
    pass.kernels.decays(decay, step_bias_, decay_, n_padded);
    float* kept = rows.row(c - rows.sequence.first + rows.plan().n_old);
    if (kept) std::copy(decay, decay + n, kept + rows.sizes.decays_at());
}

// ---- the recurrence ----------------------------------------------------------------------------------------------

// A task is a head of a sequence, for all of its rows, or what its convolution leaves.
void DeltaNetBlock::recur(const Pass& pass, int thread) const {
    const int n_parts = config_.n_value_heads + 1;
    pass.for_tasks(thread, static_cast<int>(pass.sequences.size()) * n_parts, [&](int task) {
        const Sequence& sequence = pass.sequences[static_cast<size_t>(task / n_parts)];
        const auto [state, layer] = sequence.rows.state->recurrent(index_);
        const Rows rows{sequence, *state, layer, config_.state_sizes()};
        const int head = task % n_parts;
        if (head == config_.n_value_heads) return rows.history(pass.b).store_all(0, config_.n_channels());
        run_head(pass, thread, rows, head);
        for (int c = sequence.first; c < sequence.last(); c++) gate_head(pass, c, head);
    });
}

// The work on a block of a state: k, q and values of new rows, or of those whose change is known.
struct DeltaNetBlock::Columns {
    const Pass& pass;
    const DeltaNetBlock& of;
    const Rows& rows;
    int head, first, width;
    float u[kStateColumns], w[kStateColumns], own_d[kStateColumns];
    bool is_read = false;  // u and w are those of the next new row

    const float* key(int node) const {
        if (node < rows.plan().n_old) return rows.row(node) + key_at();
        return mixed(node) + of.config_.n_k() + key_head() * of.config_.head_dim;
    }
    const float* query(int node) const { return mixed(node) + key_head() * of.config_.head_dim; }
    float decay(int node) const {
        if (node < rows.plan().n_old) return rows.row(node)[rows.sizes.decays_at() + static_cast<size_t>(head)];
        return steps(node)[pass.b.ld_steps / 2 + static_cast<size_t>(head)];
    }
    float* d(int node) {
        float* row = rows.row(node);
        return row ? row + d_at() : own_d;
    }

    // What a new row reads, and how it changes the state.
    void read(int node, const float* state) {
        const Activations& b = pass.b;
        if (!is_read) pass.kernels.delta_read(state, of.config_.head_dim, width, key(node), query(node), u, w);
        is_read = false;
        const size_t column = static_cast<size_t>(rows.column(node));
        float* v = mixed(node) + 2 * of.config_.n_k() + head * of.config_.head_dim + first;
        pass.kernels.delta_values(width, u, w, v, decay(node), steps(node)[head],
                                  b.kq[column * b.ld_kq + static_cast<size_t>(key_head())], d(node), v);
    }
    // The state after a node. next: a new one that reads it, or -1.
    void update(int node, const float* state, float* to, int next) {
        apply(key(node), d(node), decay(node), state, to, next);
    }
    // The same of a row that is committed.
    void update_committed(const float* row, const float* state, float* to, int next) {
        apply(row + key_at(), row + d_at(), row[rows.sizes.decays_at() + static_cast<size_t>(head)], state, to, next);
    }

private:
    int key_head() const { return of.config_.key_head(head); }
    size_t key_at() const { return rows.sizes.k_at() + static_cast<size_t>(key_head() * of.config_.head_dim); }
    size_t d_at() const { return rows.sizes.d_at() + static_cast<size_t>(head * of.config_.head_dim + first); }
    float* mixed(int node) const { return pass.b.mixed + static_cast<size_t>(rows.column(node)) * pass.b.ld_u; }
    const float* steps(int node) const {
        return pass.b.steps + static_cast<size_t>(rows.column(node)) * pass.b.ld_steps;
    }
    void apply(const float* k, const float* change, float decay, const float* state, float* to, int next) {
        is_read = next >= 0;
        pass.kernels.delta_update(state, to, of.config_.head_dim, width, k, change, decay,
                                  is_read ? key(next) : nullptr, is_read ? query(next) : nullptr, u, w);
    }
};

void DeltaNetBlock::run_head(const Pass& pass, int thread, const Rows& rows, int head) const {
    float* scratch = pass.b.own_blocks[static_cast<size_t>(thread)];
    const StateOfHead of_head{rows.state, rows.sizes, rows.layer, head, scratch};
    of_head.run([&](int first, int width) { return Columns{pass, *this, rows, head, first, width, {}, {}, {}}; });
}

// z = norm(y) silu(z) of a head, whose y stands where its values were.
void DeltaNetBlock::gate_head(const Pass& pass, int c, int head) const {
    const Activations& b = pass.b;
    const int dim = config_.head_dim;
    float* y = b.mixed + static_cast<size_t>(c) * b.ld_u + 2 * config_.n_k() + head * dim;
    pass.kernels.rms_norm(y, out_norm_, dim, pass.config.norm_epsilon, y);
    pass.kernels.swiglu(b.z + static_cast<size_t>(c) * b.ld_z + head * dim, y, dim);
}
