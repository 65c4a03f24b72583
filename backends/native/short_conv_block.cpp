#include "blocks.h"
#include "conv_history.h"

ShortConvBlock::ShortConvBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights)
    : config_(*config.layers[static_cast<size_t>(index)].short_conv()),
      index_(index),
      input_(weights.matrix(name + ".input", 3 * config_.n_channels, config.n_embd)),
      output_(weights.matrix(name + ".output", config.n_embd, config_.n_channels)),
      norm_(weights.vector(name + ".norm", config.n_embd)),
      conv_(weights.required_vector(name + ".conv", config_.n_conv * config_.n_channels)) {}

void ShortConvBlock::run(const Pass& pass, int thread, const float*) const {
    const Activations& b = pass.b;
    const Inputs inputs = pass.normed_inputs(thread, norm_, nullptr, pass.n, {&input_});
    const Tasks tasks(input_, pass.n, pass.pool.size(), pass.kernels.at_once(pass.n));
    pass.for_tasks(thread, tasks.count(), [&](int task) {
        pass.product(thread, input_, inputs, pass.n, tasks.first(task), tasks.last(task), tasks.next_data(input_, task),
                     b.u, b.ld_u);
    });
    const auto since = std::chrono::steady_clock::now();
    const int n_parts = config_.state_sizes().n_parts();
    pass.for_tasks(thread, static_cast<int>(pass.sequences.size()) * n_parts, [&](int task) {
        run_channels(pass, pass.sequences[static_cast<size_t>(task / n_parts)], task % n_parts);
    });
    pass.add_recurrence(thread, since);
    pass.add_projection(thread, b.z, b.ld_z, nullptr, output_, nullptr, nullptr);
}

// All rows of a sequence, of some channels: no channel sees another one. What goes into the convolution takes the place of
// u in the product, whose thirds are b, c and u.
void ShortConvBlock::run_channels(const Pass& pass, const Sequence& sequence, int part) const {
    const Activations& b = pass.b;
    const auto [state, layer] = sequence.rows.state->recurrent(index_);
    const RecurrentSizes sizes = config_.state_sizes();
    const int n_all = config_.n_channels, first = part * RecurrentSizes::kChannels;
    const int n = std::min(RecurrentSizes::kChannels, n_all - first);
    const ConvHistory history{sequence, *state, sizes, layer, part, b.u + 2 * n_all, b.ld_u, b.zeros};
    const RecurrentState::Plan& plan = history.plan();
    for (int node = plan.n_old; node < plan.n_nodes; node++) {
        const size_t column = static_cast<size_t>(sequence.first + node - plan.n_old);
        float* of_b = b.u + column * b.ld_u + first;
        float *of_c = of_b + n_all, *of_u = of_c + n_all;
        for (int i = 0; i < n; i++) of_u[i] = of_b[i] * of_u[i];
        if (!plan.is_chain) {
            float* row = state->row(layer, plan.rows[static_cast<size_t>(node)]);
            std::copy(of_u, of_u + n, row + first);
        }
        const float* path[kMostConv];
        history.path(node, path);
        for (int i = 0; i < config_.n_conv; i++) path[i] += first;
        float* out = b.z + column * b.ld_z + first;
        pass.kernels.convolve(path, conv_ + first, static_cast<size_t>(n_all), nullptr, config_.n_conv, n, false, out);
        for (int i = 0; i < n; i++) out[i] = of_c[i] * out[i];
    }
    history.store_all(first, n);
}
