// How a recurrence runs over the state of a head: block of columns by block, so that a state is read from memory once, and
// written once if it changes. Columns of a state never meet, so blocks change no bit.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kv/recurrent_state.h"

constexpr int kStateColumns =
    32;  // that are worked on together: 16 kB of a state with 128 rows, which an L1 cache holds

// The part `head` of a layer, in one sequence. scratch: kMostBlocks + 1 blocks of kStateColumns columns.
struct StateOfHead {
    RecurrentState& state;
    const RecurrentSizes& sizes;
    int layer, head;
    float* scratch;

    size_t block_floats() const { return static_cast<size_t>(kStateColumns * sizes.n_rows); }
    // Of the block that begins with a column.
    size_t at(int first) const {
        return static_cast<size_t>(head) * sizes.head_floats() + static_cast<size_t>(first * sizes.n_rows);
    }

    // make(first, width): the work on columns first..first+width-1, which has
    //   read(node, state): what a new row reads of the state before it, and how it changes the state
    //   update(node, state, to, next): the state after a node; next: a new one that reads it then, or -1
    //   update_committed(row, state, to, next): the same of a row that is committed
    template <class Make>
    void run(const Make& make) const {
        const RecurrentState::Plan& plan = state.plan();
        const int n_committed = state.n_committed(layer, head);
        const float* source = state.source(layer, head);
        float* target = n_committed || plan.is_chain ? state.target(layer) : nullptr;
        for (int first = 0; first < sizes.head_dim; first += kStateColumns) {
            auto columns = make(first, std::min(kStateColumns, sizes.head_dim - first));
            const size_t n_floats = static_cast<size_t>(columns.width * sizes.n_rows);
            float* to = target ? target + at(first) : scratch;
            const float* from = source ? source + at(first) : to;
            if (!source) std::memset(to, 0, sizeof(float) * n_floats);
            for (int i = 0; i < n_committed; i++) {
                const float* row = state.row(layer, plan.committed[static_cast<size_t>(i)]);
                columns.update_committed(row, from, to, i + 1 == n_committed ? first_new() : -1);
                from = to;
            }
            if (plan.is_chain) {
                float* snapshot = plan.snapshot >= 0 ? state.snapshot(layer) + at(first) : nullptr;
                run_chain(columns, from, to, snapshot, n_floats);
            } else {
                run_tree(columns, from);
            }
        }
        if (n_committed) state.set_done(layer, head);
    }

private:
    // The node that runs first, if that is a new one.
    int first_new() const {
        const RecurrentState::Plan& plan = state.plan();
        if (plan.is_chain) return plan.n_old == 0 ? 0 : -1;
        return plan.steps.front().is_new ? plan.steps.front().node : -1;
    }

    // from: the state after the committed rows. Block 0 of the scratch may be that.
    template <class Columns>
    void run_tree(Columns& columns, const float* after_committed) const {
        const std::vector<RecurrentState::Step>& steps = state.plan().steps;
        const auto block = [&](int number) { return scratch + static_cast<size_t>(number) * block_floats(); };
        for (size_t i = 0; i < steps.size(); i++) {
            const RecurrentState::Step& step = steps[i];
            const float* from = step.from ? block(step.from) : after_committed;
            if (step.is_new) columns.read(step.node, from);
            if (step.to < 0) continue;
            const bool reads_next = i + 1 < steps.size() && steps[i + 1].from == step.to && steps[i + 1].is_new;
            columns.update(step.node, from, block(step.to), reads_next ? steps[i + 1].node : -1);
        }
    }

    // The state after all nodes goes to `to`, that after one of them to `snapshot`.
    template <class Columns>
    void run_chain(Columns& columns, const float* from, float* to, float* snapshot, size_t n_floats) const {
        const RecurrentState::Plan& plan = state.plan();
        for (int node = 0; node < plan.n_nodes; node++) {
            if (node >= plan.n_old) columns.read(node, from);
            const bool reads_next = node + 1 < plan.n_nodes && node + 1 >= plan.n_old;
            columns.update(node, from, to, reads_next ? node + 1 : -1);
            from = to;
            if (node == plan.snapshot) std::memcpy(snapshot, to, sizeof(float) * n_floats);
        }
    }
};
