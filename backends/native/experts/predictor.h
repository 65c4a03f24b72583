// Which experts a layer will probably want, predicted from the layer before it: its own router applied to the residual
// stream as it is before the experts of that layer are added. Fate, Fang et al., arXiv:2502.12224.
//
// Nothing but what the expert store reads ahead depends on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "experts/store.h"
#include "pass.h"

// The router of a layer, with the norm of its inputs; null where the model has none.
struct ExpertRouter {
    ExpertsConfig config;
    Matrix matrix;
    const float *norm, *bias, *selection_bias;
};

class ExpertPredictor {
public:
    struct Counts {
        uint64_t predicted = 0, wanted = 0;  // experts, and those of them that the layer wanted then
    };

    // store: must outlive this.
    ExpertPredictor(ExpertStore& store, int n_layers);

    // A layer with experts; they come in order.
    void add(int layer, const ExpertRouter& router);
    bool has(int layer) const { return layer >= 0 && layer < n_layers_ && at(layer).router.config.n_experts > 0; }

    // Passes of few rows have the n experts read ahead that each row will most probably want in this layer; 0 for none.
    // Takes effect with the next pass.
    void set(int layer, int n);
    // In every so many passes of few rows, layers that are not read ahead are predicted too, but only counted; 0 for never.
    void observe(int every) { every_.store(every, std::memory_order_relaxed); }
    Counts counts(int layer) const;

    // One thread each: before the first layer; when it is known what a layer wants; and, at any time after that while the
    // experts of this layer are computed, if there is something to predict.
    void begin_pass();
    void check(int layer, std::span<const int32_t> wanted);
    bool has_work(const Pass& pass, int layer) const;
    void predict(const Pass& pass, int layer);

private:
    static constexpr int kNone = -1;
    struct Layer {
        int next = kNone;       // the next one with experts
        std::atomic<int> n{0};  // from set
        int n_in_pass = 0;      // what that was when the pass began
        ExpertRouter router{};
        std::vector<int32_t> predicted;  // in this pass
        std::atomic<uint64_t> n_predicted{0}, n_wanted{0};
    };

    Layer& at(int layer) const { return layers_[static_cast<size_t>(layer)]; }
    // Rows first, first + step, ... of a pass, kPredictedRows at most.
    struct Rows {
        int first, step, n;
    };
    static bool wants_most(const Pass& pass, const Layer& layer);
    static void predict_rows(const Pass& pass, Layer& layer, int n);
    void predict_many(const Pass& pass, const Layer& layer);
    static void choose(const Pass& pass, const Layer& layer, Rows rows, int n);

    ExpertStore& store_;
    int n_layers_, last_ = kNone;
    std::unique_ptr<Layer[]> layers_;
    std::atomic<int> every_{0};
    uint64_t n_passes_ = 0;
    bool is_observed_ = false;       // this pass
    std::vector<int32_t> n_rows_;    // of predict_many, for each expert
    std::vector<int32_t> probable_;  // what it found
};
