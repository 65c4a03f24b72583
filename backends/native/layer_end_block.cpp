#include <cmath>

#include "blocks.h"

LayerEndBlock::LayerEndBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights)
    : config_(*config.layers[static_cast<size_t>(index)].end),
      index_(index),
      post_norm_(nullptr),
      scale_(weights.vector(name + ".scale", 1)) {
    if (!config_.n_inputs) return;
    gate_ = weights.matrix(name + ".gate", config_.n_inputs, config.n_embd);
    projection_ = weights.matrix(name + ".projection", config.n_embd, config_.n_inputs);
    post_norm_ = weights.required_vector(name + ".post_norm", config.n_embd);
}

void LayerEndBlock::run(const Pass& pass, int thread) const {
    if (config_.n_inputs) add_inputs(pass, thread);
    if (!scale_) return;
    pass.for_items(thread, pass.n, [&](int c) {
        float* x = pass.b.x + static_cast<size_t>(c) * pass.b.ld_embd;
        for (int i = 0; i < pass.config.n_embd; i++) x[i] *= *scale_;
    });
}

// x += norm((activation(gate x) * inputs) projection)
void LayerEndBlock::add_inputs(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const auto activate = activation_of(pass.kernels, config_.activation);
    const Inputs inputs = pass.plain_inputs(thread, b.x, b.ld_embd, {&gate_});
    const Tasks tasks(gate_, pass.n, pass.pool.size(), pass.kernels.at_once(pass.n));
    pass.for_tasks(thread, tasks.count(), [&](int task) {
        const int first = tasks.first(task), last = tasks.last(task);
        pass.product(thread, gate_, inputs, pass.n, first, last, tasks.next_data(gate_, task), b.gate, b.ld_ff);
        for (int c = 0; c < pass.n; c++) {
            const size_t column = static_cast<size_t>(c), at = static_cast<size_t>(first * kRows);
            const float* of_layer = b.layer_inputs + column * b.ld_layer_inputs + index_ * config_.n_inputs;
            activate(b.gate + column * b.ld_ff + at, of_layer + at, (last - first) * kRows);
        }
    });
    pass.add_projection(thread, b.gate, b.ld_ff, nullptr, projection_, nullptr, post_norm_);
}

LayerInputsBlock::LayerInputsBlock(const DecoderConfig& config, const Weights& weights)
    : config_(config.layer_inputs),
      n_all_(config.n_layer_inputs()),
      projection_(weights.matrix("layer_inputs.projection", n_all_, config.n_embd)),
      norm_(weights.required_vector("layer_inputs.norm", config_.n_inputs)),
      table_(weights.layer_table(config.n_vocab, n_all_)) {}

void LayerInputsBlock::run(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const Inputs inputs = pass.plain_inputs(thread, b.x, b.ld_embd, {&projection_});
    pass.multiply(thread, projection_, inputs, b.layer_inputs, b.ld_layer_inputs);
    pass.for_items(thread, pass.n, [&](int c) { finish(pass, thread, c); });
}

// The products of token c become norm(projection_scale * products), plus its row of the table, each by 1 / sqrt(2).
void LayerInputsBlock::finish(const Pass& pass, int thread, int c) const {
    const Sequence& sequence = pass.sequence_of(c);
    float* row = pass.b.own_table_row[static_cast<size_t>(thread)];
    try {
        table_.read(sequence.rows.tokens[c - sequence.first], row);
    } catch (const std::exception& error) {  // no memory too: nothing may leave a thread of the pool
        pass.fail(error.what());
        return;
    }
    const float half = std::sqrt(0.5f);
    float* all = pass.b.layer_inputs + static_cast<size_t>(c) * pass.b.ld_layer_inputs;
    for (int first = 0; first < n_all_; first += config_.n_inputs) {
        float* of_layer = all + first;
        for (int i = 0; i < config_.n_inputs; i++) of_layer[i] *= config_.projection_scale;
        pass.kernels.rms_norm(of_layer, norm_, config_.n_inputs, pass.config.norm_epsilon, of_layer);
        for (int i = 0; i < config_.n_inputs; i++) {
            of_layer[i] = (of_layer[i] + row[first + i] * config_.table_scale) * half;
        }
    }
}
