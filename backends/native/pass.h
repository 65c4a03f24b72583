// One forward pass: the rows of one or several sequences, and how the threads work on them together.
//
// A row's results depend on its own sequence only: products compute each column independently, and attention is cut at
// the borders of sequences.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <string>
#include <vector>

#include "activations.h"
#include "experts/device.h"
#include "input_squares.h"
#include "kernels/kernels.h"
#include "kv/sequence_state.h"
#include "pool.h"

// The rows of one sequence: n tokens after n_pending ones of the forwards before, that are not committed. parents:
// (n_pending + n,), the row that each of both follows, or -1 for the committed sequence; unless all are a chain, they
// are n_batch at most. n_ctx: positions that the sequence may have. features: (n, n_embd) for a decoder with a front.
// taps: (n_taps, n, n_embd) with a distance of tap_stride floats between taps, the residual stream after the layers
// `tapped`; layer n_layers stands for what the output matrix reads.
struct SequenceRows {
    SequenceState* state;
    int n_ctx;
    const int32_t *tokens, *parents;
    int n, n_pending;
    const float* features;
    const int32_t* tapped;
    int n_taps;
    float* taps;
    size_t tap_stride;
};

// Where a sequence's rows are in a pass. base: its committed slots.
struct Sequence {
    SequenceRows rows;
    int first, base;
    bool chain;

    int slot(int c) const { return base + rows.n_pending + c - first; }
    int last() const { return first + rows.n; }
};

class Pass {
public:
    // stop: set, it ends the pass without its result. poll: called by the calling thread now and then; true stops it.
    Pass(const DecoderConfig& config, const Kernels& kernels, Pool& pool, const Activations& activations,
         std::atomic<bool>& stop, const std::function<bool()>& poll)
        : config(config), kernels(kernels), pool(pool), b(activations), stop_(stop), poll_(poll) {}

    // Its tokens come after those that were added before.
    void add(const SequenceRows& rows);

    bool alone() const { return n == 1; }
    const Sequence& sequence_of(int c) const { return sequences[static_cast<size_t>(b.sequence[c])]; }

    bool is_stopped() const { return stop_.load(std::memory_order_relaxed); }
    void stop() const { stop_.store(true, std::memory_order_relaxed); }
    // Stops it for a reason, the first of which is kept.
    void fail(const char* reason) const;
    const std::string& failure() const { return failure_; }
    // What the first thread took since then is time of recurrences, beside products.
    void add_recurrence(int thread, std::chrono::steady_clock::time_point since) const {
        if (thread != 0 || !recurrence_ns) return;
        const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - since;
        recurrence_ns->fetch_add(taken.count(), std::memory_order_relaxed);
    }
    // The same as is_stopped, for tasks that wait for something: polls too.
    bool gives_up(int thread) const {
        if (thread == 0 && poll_()) stop();
        return is_stopped();
    }
    // The same for what may wait for long, every few milliseconds: the thread that polls may be asleep without a task.
    bool gives_up_waiting(int thread) const {
        if (thread != 0) pool.wake();
        return gives_up(thread);
    }

    // Tasks of a pass that was stopped are counted, but not done. There may be none: what cuts the work of experts is such
    // a task itself.
    template <class Task>
    void for_tasks(int thread, int n_tasks, const Task& task) const {
        const auto unless_stopped = [&](int i) {
            if (i < n_tasks && !gives_up(thread)) task(i);
        };
        pool.for_tasks(thread, std::max(1, n_tasks), unless_stopped, [&] { gives_up(thread); });
    }

    // Items that take a microsecond or so. Where there are many, several make a task: threads that take them one by one
    // in turn wait for each other's cache lines.
    template <class Item>
    void for_items(int thread, int n_items, const Item& item) const {
        constexpr int kMost = 16;
        const int each = std::clamp(n_items / (8 * pool.size()), 1, kMost);
        for_tasks(thread, (n_items + each - 1) / each, [&](int task) {
            for (int i = task * each; i < std::min(n_items, (task + 1) * each); i++) item(i);
        });
    }

    // Where this thread finds x as inputs of a matrix: in arrays of its own with one token, in those of all otherwise.
    Inputs inputs_of(int thread, int n_in, const float* x, size_t ldx) const;
    // Rows of x, prepared for the readers.
    Inputs plain_inputs(int thread, const float* x, size_t ldx, std::initializer_list<const Matrix*> readers) const;
    // rms_norm(x) of n_inputs rows, or x itself without a norm, prepared for the readers; input i is row of[i] of x, or
    // row i without `of`. x: rows in place of the residual stream's, with a norm.
    Inputs normed_inputs(int thread, const float* norm, const int32_t* of, int n_inputs,
                         std::initializer_list<const Matrix*> readers, const float* x = nullptr) const;
    // Adds the squares of n_inputs inputs to those of their readers, where they are recorded. number: see InputSquares.
    void record(int thread, const Inputs& inputs, int n_inputs, std::initializer_list<const Matrix*> readers,
                int number = 0) const;
    // Kernels::matmul, or the product of w's device, which gets all row groups at once.
    void product(int thread, const Matrix& w, const Inputs& inputs, int n_columns, int first, int last,
                 const uint8_t* next, float* y, size_t ldy) const {
        if (w.device) return product_on_device(thread, w, inputs, n_columns, y, ldy);
        kernels.matmul(w, inputs, n_columns, first, last, next, y, ldy);
    }
    // y = w inputs
    void multiply(int thread, const Matrix& w, const Inputs& inputs, float* y, size_t ldy) const;
    // x += residual_scale * norm(w * norm(y) + bias) for the rows y, which their norm overwrites. post_epsilon: of the
    // outer norm, 0 for the model's.
    void add_projection(int thread, float* y, size_t ldy, const float* sub_norm, const Matrix& w, const float* bias,
                        const float* post_norm, float post_epsilon = 0) const;

    const DecoderConfig& config;
    const Kernels& kernels;
    Pool& pool;
    const Activations& b;
    std::vector<Sequence> sequences;
    int n = 0;
    const int32_t* rows = nullptr;  // whose logits are requested, counted over all sequences
    int n_rows = 0;
    float* logits = nullptr;
    InputSquares* squares = nullptr;  // null where they are not recorded
    int first_layer = 0;              // that runs: those before it left what is in `start`
    const float* start = nullptr;     // (n, n_embd): the residual stream before that layer, null for the embeddings
    ExpertDevice* expert_device = nullptr;          // null where the CPU computes all experts
    std::atomic<int64_t>* recurrence_ns = nullptr;  // see add_recurrence

private:
    void product_on_device(int thread, const Matrix& w, const Inputs& inputs, int n_columns, float* y,
                           size_t ldy) const;
    void add_to_residual(int thread, const float* post_norm, float epsilon) const;

    std::atomic<bool>& stop_;
    const std::function<bool()>& poll_;
    mutable std::mutex failing_;
    mutable std::string failure_;
};

// The slots of the branch of a tree that ends in row c, ascending. path: room for them.
void set_path(const Sequence& sequence, int c, int32_t* path, AttentionRow& row);

// Clears what pads n numbers to 16, where a layer of another size may have left something.
inline void clear_padding(float* row, int n) { std::fill(row + n, row + padded(n), 0.0f); }

// Makes input c in the kinds that the readers need.
void prepare_inputs(const Kernels& kernels, const Inputs& inputs, int c, std::initializer_list<const Matrix*> readers);

// y[c][row] += bias[row] for the rows of groups first..last-1; bias: null for none.
void add_bias(const Matrix& w, const float* bias, int n, int first, int last, float* y, size_t ldy);

// gate = what an activation makes of gate and up; see Kernels.
using Activate = void (*)(float* gate, const float* up, int n);
inline Activate activation_of(const Kernels& kernels, Activation activation) {
    switch (activation) {
        case Activation::Silu: return kernels.swiglu;
        case Activation::GeluTanh: return kernels.geglu;
        case Activation::Relu2: return kernels.relu2_glu;
        case Activation::ClampedSwiglu: return kernels.clamped_swiglu;
    }
    return nullptr;
}
