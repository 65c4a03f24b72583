#include "blocks.h"

DenseBlock::DenseBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights)
    : config_(*config.layers[static_cast<size_t>(index)].dense()),
      gate_(weights.matrix(name + (config_.is_plain ? ".up" : ".gate"), config_.n_ff, config.n_embd)),
      up_(config_.is_plain ? Matrix() : weights.matrix(name + ".up", config_.n_ff, config.n_embd)),
      down_(weights.matrix(name + ".down", config.n_embd, config_.n_ff)),
      norm_(weights.vector(name + ".norm", config.n_embd)),
      post_norm_(weights.vector(name + ".post_norm", config.n_embd)),
      sub_norm_(weights.vector(name + ".sub_norm", config_.n_ff)) {}

void DenseBlock::run(const Pass& pass, int thread) const {
    if (config_.is_plain) {
        plain(pass, thread, pass.normed_inputs(thread, norm_, nullptr, pass.n, {&gate_}));
    } else {
        gated(pass, thread, pass.normed_inputs(thread, norm_, nullptr, pass.n, {&gate_, &up_}));
    }
    pass.add_projection(thread, pass.b.gate, pass.b.ld_ff, sub_norm_, down_, nullptr, post_norm_,
                        config_.post_norm_epsilon);
}

// gate = activation(gate)
void DenseBlock::plain(const Pass& pass, int thread, const Inputs& inputs) const {
    const Activations& b = pass.b;
    const Tasks tasks(gate_, pass.n, pass.pool.size(), pass.kernels.at_once(pass.n));
    pass.for_tasks(thread, tasks.count(), [&](int task) {
        const int first = tasks.first(task), last = tasks.last(task);
        pass.product(thread, gate_, inputs, pass.n, first, last, tasks.next_data(gate_, task), b.gate, b.ld_ff);
        for (int c = 0; c < pass.n; c++) {
            const size_t at = static_cast<size_t>(c) * b.ld_ff + static_cast<size_t>(first * kRows);
            pass.kernels.relu2(b.gate + at, (last - first) * kRows);
        }
    });
}

// gate = activation(gate) * up
void DenseBlock::gated(const Pass& pass, int thread, const Inputs& inputs) const {
    const Activations& b = pass.b;
    const Kernels& kernels = pass.kernels;
    const auto activate = activation_of(kernels, config_.activation);
    const Tasks tasks(up_.device ? up_ : gate_, pass.n, pass.pool.size(), kernels.at_once(pass.n));
    pass.for_tasks(thread, tasks.count(), [&](int task) {
        const int first = tasks.first(task), last = tasks.last(task);
        for (int c = 0; c < pass.n; c += kTokensTogether) {
            const int n = std::min(kTokensTogether, pass.n - c);
            const Inputs some = inputs.from(c);
            float* gate = b.gate + static_cast<size_t>(c) * b.ld_ff;
            const uint8_t* up = up_.data + static_cast<size_t>(first) * up_.group_bytes;
            pass.product(thread, gate_, some, n, first, last, up, gate, b.ld_ff);
            pass.product(thread, up_, some, n, first, last, tasks.next_data(gate_, task), b.up, b.ld_ff);
            for (int i = 0; i < n; i++) {
                const size_t at = static_cast<size_t>(i) * b.ld_ff + static_cast<size_t>(first * kRows);
                activate(gate + at, b.up + at, (last - first) * kRows);
            }
        }
    });
}
