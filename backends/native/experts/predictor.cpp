#include "experts/predictor.h"

#include <algorithm>

#include "experts/router.h"

ExpertPredictor::ExpertPredictor(ExpertStore& store, int n_layers)
    : store_(store), n_layers_(n_layers), layers_(std::make_unique<Layer[]>(static_cast<size_t>(n_layers))) {}

void ExpertPredictor::add(int layer, const ExpertRouter& router) {
    if (last_ != kNone) at(last_).next = layer;
    last_ = layer;
    at(layer).router = router;
    at(layer).predicted.reserve(static_cast<size_t>(router.config.n_experts));
}

void ExpertPredictor::set(int layer, int n) { at(layer).n.store(n, std::memory_order_relaxed); }

ExpertPredictor::Counts ExpertPredictor::counts(int layer) const {
    const Layer& of = at(layer);
    return {of.n_predicted.load(std::memory_order_relaxed), of.n_wanted.load(std::memory_order_relaxed)};
}

// All threads of a pass must agree on what there is to do, so settings are looked at only here.
void ExpertPredictor::begin_pass() {
    const int every = every_.load(std::memory_order_relaxed);
    is_observed_ = every > 0 && ++n_passes_ % static_cast<uint64_t>(every) == 0;
    for (int i = 0; i < n_layers_; i++) {
        at(i).n_in_pass = at(i).n.load(std::memory_order_relaxed);
        at(i).predicted.clear();
    }
}

void ExpertPredictor::check(int layer, std::span<const int32_t> wanted) {
    Layer& of = at(layer);
    if (of.predicted.empty()) return;
    const auto is_wanted = [&](int32_t e) { return std::find(wanted.begin(), wanted.end(), e) != wanted.end(); };
    const auto n_wanted = std::count_if(of.predicted.begin(), of.predicted.end(), is_wanted);
    of.n_predicted.fetch_add(of.predicted.size(), std::memory_order_relaxed);
    of.n_wanted.fetch_add(static_cast<uint64_t>(n_wanted), std::memory_order_relaxed);
}

bool ExpertPredictor::has_work(const Pass& pass, int layer) const {
    if (at(layer).next == kNone) return false;
    const Layer& next = at(at(layer).next);
    return pass.n <= kPredictedRows ? next.n_in_pass > 0 || is_observed_ : wants_most(pass, next);
}

// Whether so many rows want most of the experts: were each as probable as the others, all but 2 %.
bool ExpertPredictor::wants_most(const Pass& pass, const Layer& layer) {
    return pass.n * layer.router.config.n_used >= 4 * layer.router.config.n_experts;
}

void ExpertPredictor::predict(const Pass& pass, int layer) {
    const int next = at(layer).next;
    Layer& of = at(next);
    if (pass.n <= kPredictedRows) {
        const int n = of.n_in_pass > 0 ? of.n_in_pass : of.router.config.n_used;
        predict_rows(pass, of, std::min(n, of.router.config.n_experts));
        if (of.n_in_pass > 0) store_.hint(next, of.predicted);
    } else {
        predict_many(pass, of);
        store_.hint(next, probable_);
    }
}

// The n experts of each row, the most probable of all rows first.
void ExpertPredictor::predict_rows(const Pass& pass, Layer& layer, int n) {
    const PredictedRows& b = pass.b.experts.predicted;
    choose(pass, layer, {0, 1, pass.n}, n);
    for (int i = 0; i < n * pass.n; i++) {
        const int32_t expert = b.chosen[i % pass.n * n + i / pass.n];
        const bool is_new = std::find(layer.predicted.begin(), layer.predicted.end(), expert) == layer.predicted.end();
        if (is_new) layer.predicted.push_back(expert);
    }
}

// The experts that some of the rows will probably want, those of most rows first. A sample: rows past a few hundred add
// hardly any expert, and each takes a reading of the router.
void ExpertPredictor::predict_many(const Pass& pass, const Layer& layer) {
    constexpr int kMostSampled = 256;
    const ExpertsConfig& config = layer.router.config;
    const int step = (pass.n + kMostSampled - 1) / kMostSampled, n_sampled = pass.n / step;
    n_rows_.assign(static_cast<size_t>(config.n_experts), 0);
    for (int i = 0; i < n_sampled; i += kPredictedRows) {
        const int n = std::min(kPredictedRows, n_sampled - i);
        choose(pass, layer, {i * step, step, n}, config.n_used);
        const int32_t* chosen = pass.b.experts.predicted.chosen;
        for (int k = 0; k < n * config.n_used; k++) n_rows_[static_cast<size_t>(chosen[k])]++;
    }
    probable_.clear();
    for (int e = 0; e < config.n_experts; e++) {
        if (n_rows_[static_cast<size_t>(e)]) probable_.push_back(e);
    }
    const auto rows_of = [this](int32_t e) { return n_rows_[static_cast<size_t>(e)]; };
    std::stable_sort(probable_.begin(), probable_.end(), [&](int32_t a, int32_t b) { return rows_of(a) > rows_of(b); });
}

// chosen: (n rows, n), in descending order of what the router gives.
void ExpertPredictor::choose(const Pass& pass, const Layer& layer, Rows rows, int n) {
    const PredictedRows& b = pass.b.experts.predicted;
    const ExpertRouter& router = layer.router;
    Inputs inputs = b.inputs;
    inputs.n_in = pass.config.n_embd;
    inputs.x = b.h;
    inputs.ldx = pass.b.ld_embd;
    const size_t ld_router = pass.b.experts.ld_router;
    for (int c = 0; c < rows.n; c++) {
        const size_t at = static_cast<size_t>(c) * pass.b.ld_embd;
        const float* x = pass.b.x + static_cast<size_t>(rows.first + c * rows.step) * pass.b.ld_embd;
        if (router.norm) {
            pass.kernels.rms_norm(x, router.norm, pass.config.n_embd, pass.config.norm_epsilon, b.h + at);
        } else {
            std::copy(x, x + pass.b.ld_embd, b.h + at);
        }
        prepare_inputs(pass.kernels, inputs, c, {&router.matrix});
    }
    const int n_groups = router.matrix.n_groups();
    pass.kernels.matmul(router.matrix, inputs, rows.n, 0, n_groups, nullptr, b.products, ld_router);
    add_bias(router.matrix, router.bias, rows.n, 0, n_groups, b.products, ld_router);
    ExpertsConfig config = router.config;
    config.n_used = n;
    for (int c = 0; c < rows.n; c++) {
        route(config, pass.kernels, b.products + static_cast<size_t>(c) * ld_router, router.selection_bias, b.scores,
              b.chosen + c * n, b.scores + ld_router);
    }
}
