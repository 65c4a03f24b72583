#include "expert_predictor.h"

#include <algorithm>
#include <numeric>

#include "router.h"

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
    return pass.n <= kPredictedRows ? next.n_in_pass > 0 || is_observed_ : wants_all(pass, next);
}

// Whether so many rows want nearly all experts: were each as probable as the others, all but 2 %.
bool ExpertPredictor::wants_all(const Pass& pass, const Layer& layer) {
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
        int32_t* all = pass.b.experts.predicted.chosen;
        std::iota(all, all + of.router.config.n_experts, 0);
        store_.hint(next, {all, static_cast<size_t>(of.router.config.n_experts)});
    }
}

// The n experts of each row, the most probable of all rows first.
void ExpertPredictor::predict_rows(const Pass& pass, Layer& layer, int n) {
    const PredictedRows& b = pass.b.experts.predicted;
    choose(pass, layer, n);
    for (int i = 0; i < n * pass.n; i++) {
        const int32_t expert = b.chosen[i % pass.n * n + i / pass.n];
        const bool is_new = std::find(layer.predicted.begin(), layer.predicted.end(), expert) == layer.predicted.end();
        if (is_new) layer.predicted.push_back(expert);
    }
}

// chosen: (n rows, n), in descending order of what the router gives.
void ExpertPredictor::choose(const Pass& pass, const Layer& layer, int n) {
    const PredictedRows& b = pass.b.experts.predicted;
    const ExpertRouter& router = layer.router;
    Inputs inputs = b.inputs;
    inputs.n_in = pass.config.n_embd;
    inputs.x = b.h;
    inputs.ldx = pass.b.ld_embd;
    const size_t ld_router = pass.b.experts.ld_router;
    for (int c = 0; c < pass.n; c++) {
        const size_t at = static_cast<size_t>(c) * pass.b.ld_embd;
        const float* x = pass.b.x + at;
        if (router.norm) {
            pass.kernels.rms_norm(x, router.norm, pass.config.n_embd, pass.config.norm_epsilon, b.h + at);
        } else {
            std::copy(x, x + pass.b.ld_embd, b.h + at);
        }
        prepare_inputs(pass.kernels, inputs, c, {&router.matrix});
    }
    const int n_groups = router.matrix.n_groups();
    pass.kernels.matmul(router.matrix, inputs, pass.n, 0, n_groups, nullptr, b.products, ld_router);
    add_bias(router.matrix, router.bias, pass.n, 0, n_groups, b.products, ld_router);
    ExpertsConfig config = router.config;
    config.n_used = n;
    for (int c = 0; c < pass.n; c++) {
        route(config, pass.kernels, b.products + static_cast<size_t>(c) * ld_router, router.selection_bias, b.scores,
              b.chosen + c * n, b.scores + ld_router);
    }
}
