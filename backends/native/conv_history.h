// What went into the convolution of a recurrent layer, along the path of each row of a pass.
#pragma once

#include <algorithm>

#include "pass.h"

constexpr int kMostConv = 16;  // rows that a convolution sees

// One part of the layer (RecurrentSizes::n_parts) in one sequence. rows: (n, ld) of the whole pass, whose first channel is
// that of the states' rows.
struct ConvHistory {
    const Sequence& sequence;
    RecurrentState& state;
    const RecurrentSizes& sizes;
    int layer, part;
    const float* rows;
    size_t ld;
    const float* zeros;

    const RecurrentState::Plan& plan() const { return state.plan(); }

    // Of a node of the plan.
    const float* of_node(int node) const {
        if (node < plan().n_old) return state.row(layer, plan().rows[static_cast<size_t>(node)]);
        return rows + static_cast<size_t>(sequence.first + node - plan().n_old) * ld;
    }
    // Of the i-th token before the nodes, the last one being 0.
    const float* before(int i) const {
        const int n_committed = state.n_committed(layer, part);
        if (i < n_committed) return state.row(layer, plan().committed[static_cast<size_t>(n_committed - 1 - i)]);
        const float* source = state.source(layer, part);
        if (!source) return zeros;
        const int row = sizes.n_conv - 2 - (i - n_committed);
        return source + sizes.conv_at() + static_cast<size_t>(row * sizes.n_channels);
    }
    // Of the n_conv tokens that end with a node, the oldest first.
    void path(int node, const float* (&found)[kMostConv]) const {
        int i = sizes.n_conv - 1;
        for (; i >= 0 && node >= 0; i--) {
            found[i] = of_node(node);
            node = plan().parents[static_cast<size_t>(node)];
        }
        for (int j = 0; i >= 0; i--) found[i] = before(j++);
    }

    // Writes those of channels first..first+n-1 that a state after node `last` of a chain needs, -1 for the state before the
    // nodes. Upwards: a state may become the one after it.
    void store(float* to, int last, int first, int n) const {
        for (int i = 0; i < sizes.n_conv - 1; i++) {
            const int back = sizes.n_conv - 2 - i;
            const float* from = back <= last ? of_node(last - back) : before(back - last - 1);
            float* row = to + sizes.conv_at() + static_cast<size_t>(i * sizes.n_channels);
            std::copy(from + first, from + first + n, row + first);
        }
    }
    // What a pass leaves of these channels, and that it has done so.
    void store_all(int first, int n) const {
        if (plan().is_chain) {
            if (plan().snapshot >= 0) store(state.snapshot(layer), plan().snapshot, first, n);
            store(state.target(layer), plan().n_nodes - 1, first, n);
        } else if (state.target(layer) && state.n_committed(layer, part)) {
            store(state.target(layer), -1, first, n);
            state.set_done(layer, part);
        }
    }
};
