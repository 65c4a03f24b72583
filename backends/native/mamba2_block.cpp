#include "blocks.h"
#include "conv_history.h"
#include "state_columns.h"

Mamba2Block::Mamba2Block(const DecoderConfig& config, int index, const std::string& name, const Weights& weights)
    : config_(*config.layers[static_cast<size_t>(index)].mamba2()),
      index_(index),
      input_(weights.matrix(name + ".input", config_.n_input_rows(), config.n_embd)),
      output_(weights.matrix(name + ".output", config.n_embd, config_.n_v())),
      norm_(weights.vector(name + ".norm", config.n_embd)),
      conv_(weights.required_vector(name + ".conv", config_.n_conv * config_.n_channels())),
      conv_bias_(weights.vector(name + ".conv_bias", config_.n_channels())),
      decay_(weights.required_vector(name + ".decay", config_.n_heads)),
      skip_(weights.required_vector(name + ".skip", config_.n_heads)),
      step_bias_(weights.required_vector(name + ".step_bias", config_.n_heads)),
      out_norm_(weights.vector(name + ".out_norm", config_.n_v())) {}

// A sequence of the pass, and its state in this layer.
struct Mamba2Block::Rows {
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
    // Of a column of the pass.
    float* row_of_column(int c) const { return row(c - sequence.first + plan().n_old); }
    // n_v: numbers of the first product before those that are convolved.
    ConvHistory history(const Activations& b, int n_v) const {
        return {sequence, state, sizes, layer, sizes.n_heads, b.u + n_v, b.ld_u, b.zeros};
    }
};

void Mamba2Block::run(const Pass& pass, int thread, const float*) const {
    const Activations& b = pass.b;
    const Inputs inputs = pass.normed_inputs(thread, norm_, nullptr, pass.n, {&input_});
    const Tasks tasks(input_, pass.n, pass.pool.size(), pass.kernels.at_once(pass.n));
    pass.for_tasks(thread, tasks.count(), [&](int task) {
        pass.product(thread, input_, inputs, pass.n, tasks.first(task), tasks.last(task), tasks.next_data(input_, task),
                     b.u, b.ld_u);
    });
    const auto since = std::chrono::steady_clock::now();
    mix(pass, thread);
    recur(pass, thread);
    gate(pass, thread);
    pass.add_recurrence(thread, since);
    pass.add_projection(thread, b.u, b.ld_u, nullptr, output_, nullptr, nullptr);
}

// ---- what each row is by itself ----------------------------------------------------------------------------------

// v, B and C after the convolution, with B C of each group; step sizes and decays; and the rows that are kept until commit.
void Mamba2Block::mix(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const int n_v = config_.n_v(), n_k = config_.n_k(), n_groups = config_.n_groups, n_each = config_.n_per_key;
    const int n_parts = n_groups + config_.n_heads + 1;
    pass.for_items(thread, pass.n * n_parts, [&](int item) {
        const int c = item / n_parts, part = item % n_parts;
        const Sequence& sequence = pass.sequence_of(c);
        const auto [state, layer] = sequence.rows.state->recurrent(index_);
        const Rows rows{sequence, *state, layer, config_.state_sizes()};
        if (part == n_parts - 1) return set_steps(pass, c, rows);
        const int head = part - n_groups;
        if (head >= 0) return convolve(pass, rows, c, head * config_.head_dim, config_.head_dim);
        convolve(pass, rows, c, n_v + part * n_each, n_each);
        convolve(pass, rows, c, n_v + n_k + part * n_each, n_each);
        const float* of_b = b.mixed + static_cast<size_t>(c) * b.ld_u + n_v + part * n_each;
        b.kq[static_cast<size_t>(c) * b.ld_kq + static_cast<size_t>(part)] =
            pass.kernels.dot_product(of_b, of_b + n_k, n_each);
        float* kept = rows.row_of_column(c);
        if (kept) std::copy(of_b, of_b + n_each, kept + rows.sizes.k_at() + part * n_each);
    });
}

// Channels first..first+n-1 of row c.
void Mamba2Block::convolve(const Pass& pass, const Rows& rows, int c, int first, int n) const {
    const Activations& b = pass.b;
    const float* path[kMostConv];
    rows.history(b, config_.n_v()).path(c - rows.sequence.first + rows.plan().n_old, path);
    float* kept = rows.row_of_column(c);
    if (kept) std::copy(path[config_.n_conv - 1] + first, path[config_.n_conv - 1] + first + n, kept + first);
    for (int i = 0; i < config_.n_conv; i++) path[i] += first;
    pass.kernels.convolve(path, conv_ + first, static_cast<size_t>(config_.n_channels()),
                          conv_bias_ ? conv_bias_ + first : nullptr, config_.n_conv, n, true,
                          b.mixed + static_cast<size_t>(c) * b.ld_u + first);
}

// Step sizes, and after them decays, of all heads of row c.
void Mamba2Block::set_steps(const Pass& pass, int c, const Rows& rows) const {
    const Activations& b = pass.b;
    const int n = config_.n_heads;
    const float* raw = b.u + static_cast<size_t>(c) * b.ld_u + config_.n_v() + config_.n_channels();
    float* step = b.steps + static_cast<size_t>(c) * b.ld_steps;
    float* decay = step + b.ld_steps / 2;
    std::copy(raw, raw + n, step);
    clear_padding(step, n);
    pass.kernels.mamba_steps(step, decay, step_bias_, decay_, static_cast<int>(padded(n)));
    float* kept = rows.row_of_column(c);
    if (kept) std::copy(decay, decay + n, kept + rows.sizes.decays_at());
}

// ---- the recurrence ----------------------------------------------------------------------------------------------

// The work on a block of a state: B, C and v of new rows, or of those whose change is known. What a row reads takes the
// place of its v.
struct Mamba2Block::Columns {
    const Pass& pass;
    const Mamba2Block& of;
    const Rows& rows;
    int head, first, width;
    float w[kStateColumns], own_d[kStateColumns];
    bool is_read = false;  // w is that of the next new row

    void read(int node, const float* state) {
        const Activations& b = pass.b;
        if (!is_read) pass.kernels.delta_read(state, of.config_.n_per_key, width, nullptr, query(node), nullptr, w);
        is_read = false;
        const size_t column = static_cast<size_t>(rows.column(node)), h = static_cast<size_t>(head);
        const float* steps = b.steps + column * b.ld_steps;
        float* v = mixed(node) + head * of.config_.head_dim + first;
        pass.kernels.mamba_values(width, w, v, steps[b.ld_steps / 2 + h], steps[h],
                                  b.kq[column * b.ld_kq + static_cast<size_t>(group())], of.skip_[head], d(node), v);
    }
    void update(int node, const float* state, float* to, int next) {
        const float* row = rows.row(node);
        if (row) return update_committed(row, state, to, next);
        const float* steps = pass.b.steps + static_cast<size_t>(rows.column(node)) * pass.b.ld_steps;
        apply(key(node), own_d, steps[pass.b.ld_steps / 2 + static_cast<size_t>(head)], state, to, next);
    }
    void update_committed(const float* row, const float* state, float* to, int next) {
        apply(row + rows.sizes.k_at() + group() * of.config_.n_per_key, row + d_at(),
              row[rows.sizes.decays_at() + static_cast<size_t>(head)], state, to, next);
    }

private:
    int group() const { return of.config_.group_of(head); }
    float* mixed(int node) const { return pass.b.mixed + static_cast<size_t>(rows.column(node)) * pass.b.ld_u; }
    const float* key(int node) const { return mixed(node) + of.config_.n_v() + group() * of.config_.n_per_key; }
    const float* query(int node) const { return key(node) + of.config_.n_k(); }
    size_t d_at() const { return rows.sizes.d_at() + static_cast<size_t>(head * of.config_.head_dim + first); }
    float* d(int node) {
        float* row = rows.row(node);
        return row ? row + d_at() : own_d;
    }
    void apply(const float* k, const float* change, float decay, const float* state, float* to, int next) {
        is_read = next >= 0;
        pass.kernels.delta_update(state, to, of.config_.n_per_key, width, k, change, decay, nullptr,
                                  is_read ? query(next) : nullptr, nullptr, w);
    }
};

// A task is a head of a sequence, for all of its rows, or what its convolution leaves.
void Mamba2Block::recur(const Pass& pass, int thread) const {
    const int n_parts = config_.n_heads + 1;
    pass.for_tasks(thread, static_cast<int>(pass.sequences.size()) * n_parts, [&](int task) {
        const Sequence& sequence = pass.sequences[static_cast<size_t>(task / n_parts)];
        const auto [state, layer] = sequence.rows.state->recurrent(index_);
        const Rows rows{sequence, *state, layer, config_.state_sizes()};
        const int head = task % n_parts;
        if (head == config_.n_heads) return rows.history(pass.b, config_.n_v()).store_all(0, config_.n_channels());
        const StateOfHead of_head{*state, rows.sizes, layer, head, pass.b.own_blocks[static_cast<size_t>(thread)]};
        of_head.run([&](int first, int width) { return Columns{pass, *this, rows, head, first, width, {}, {}}; });
    });
}

// z = norm(y silu(z)) by group, whose y stands where v was.
void Mamba2Block::gate(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const int n = config_.n_v() / config_.n_groups;
    pass.for_items(thread, pass.n * config_.n_groups, [&](int item) {
        const int c = item / config_.n_groups, first = item % config_.n_groups * n;
        const size_t at = static_cast<size_t>(c) * b.ld_u + static_cast<size_t>(first);
        pass.kernels.swiglu(b.u + at, b.mixed + at, n);
        if (out_norm_) pass.kernels.rms_norm(b.u + at, out_norm_ + first, n, pass.config.norm_epsilon, b.u + at);
    });
}
