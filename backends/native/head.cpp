#include "head.h"

#include <algorithm>
#include <cstring>
#include <limits>

std::unique_ptr<Front> make_front(const FrontConfig& front, const DecoderConfig& config, const Weights& weights) {
    switch (front.kind) {
        case FrontKind::None: return nullptr;
        case FrontKind::GatedFusion: return std::make_unique<GatedFusion>(config, weights);
        case FrontKind::ConcatenatedInput:
            return std::make_unique<ConcatenatedInput>(config, weights, front.normed_residual);
        case FrontKind::ProjectedInput: return std::make_unique<ProjectedInput>(config, weights);
        case FrontKind::TargetInput: return std::make_unique<TargetInput>(config, weights);
    }
    return nullptr;
}

GatedFusion::GatedFusion(const DecoderConfig& config, const Weights& weights)
    : feature_(weights.matrix("front.feature", config.n_embd, config.n_embd)),
      token_(weights.matrix("front.token", config.n_embd, config.n_embd)),
      mix_(weights.matrix("front.mix", config.n_embd, 2 * config.n_embd)),
      token_norm_(weights.required_vector("front.token_norm", config.n_embd)) {}

void GatedFusion::run(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const int n_embd = pass.config.n_embd;
    const size_t n_bytes = sizeof(float) * static_cast<size_t>(n_embd);
    const Inputs features = pass.plain_inputs(thread, b.feature, b.ld_embd, {&feature_});
    pass.multiply(thread, feature_, features, b.x_of_feature, b.ld_embd);
    const Inputs tokens = pass.normed_inputs(thread, token_norm_, nullptr, pass.n, {&token_});
    pass.multiply(thread, token_, tokens, b.x_of_token, b.ld_embd);
    pass.for_items(thread, pass.n, [&](int c) {
        const size_t at = static_cast<size_t>(c) * b.ld_embd;
        float* joined = b.joined + static_cast<size_t>(c) * b.ld_joined;
        pass.kernels.silu(b.x_of_token + at, n_embd);
        std::memcpy(joined, b.x_of_feature + at, n_bytes);
        std::memcpy(joined + n_embd, b.x_of_token + at, n_bytes);
    });
    const Inputs both = pass.plain_inputs(thread, b.joined, b.ld_joined, {&mix_});
    pass.multiply(thread, mix_, both, b.h, b.ld_embd);
    pass.for_items(thread, pass.n, [&](int c) {
        const size_t at = static_cast<size_t>(c) * b.ld_embd;
        pass.kernels.blend(b.h + at, b.x_of_feature + at, b.x_of_token + at, n_embd, b.x + at);
    });
}

// joined = [norm of the embedding in x; norm of the feature] of a row, which stay in x_of_token and x_of_feature.
static void join_normed(const Pass& pass, int c, const float* token_norm, const float* feature_norm) {
    const Activations& b = pass.b;
    const int n_embd = pass.config.n_embd;
    const float epsilon = pass.config.norm_epsilon;
    const size_t at = static_cast<size_t>(c) * b.ld_embd, n_bytes = sizeof(float) * static_cast<size_t>(n_embd);
    float* joined = b.joined + static_cast<size_t>(c) * b.ld_joined;
    pass.kernels.rms_norm(b.x + at, token_norm, n_embd, epsilon, b.x_of_token + at);
    pass.kernels.rms_norm(b.feature + at, feature_norm, n_embd, epsilon, b.x_of_feature + at);
    std::memcpy(joined, b.x_of_token + at, n_bytes);
    std::memcpy(joined + n_embd, b.x_of_feature + at, n_bytes);
}

ConcatenatedInput::ConcatenatedInput(const DecoderConfig& config, const Weights& weights, bool normed_residual)
    : token_norm_(weights.required_vector("front.token_norm", config.n_embd)),
      feature_norm_(weights.required_vector("front.feature_norm", config.n_embd)),
      normed_residual_(normed_residual) {}

void ConcatenatedInput::run(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const size_t n_bytes = sizeof(float) * static_cast<size_t>(pass.config.n_embd);
    pass.for_items(thread, pass.n, [&](int c) {
        join_normed(pass, c, token_norm_, feature_norm_);
        const size_t at = static_cast<size_t>(c) * b.ld_embd;
        std::memcpy(b.x + at, (normed_residual_ ? b.x_of_feature : b.feature) + at, n_bytes);
    });
}

ProjectedInput::ProjectedInput(const DecoderConfig& config, const Weights& weights)
    : projection_(weights.matrix("front.projection", config.n_embd, 2 * config.n_embd)),
      token_norm_(weights.required_vector("front.token_norm", config.n_embd)),
      feature_norm_(weights.required_vector("front.feature_norm", config.n_embd)) {}

void ProjectedInput::run(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    pass.for_items(thread, pass.n, [&](int c) { join_normed(pass, c, token_norm_, feature_norm_); });
    const Inputs both = pass.plain_inputs(thread, b.joined, b.ld_joined, {&projection_});
    pass.multiply(thread, projection_, both, b.x, b.ld_embd);
}

TargetInput::TargetInput(const DecoderConfig& config, const Weights& weights)
    : projection_(weights.matrix("front.projection", config.n_embd, 2 * config.n_target)) {}

void TargetInput::run(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const Inputs both = pass.plain_inputs(thread, b.joined, b.ld_joined, {&projection_});
    pass.multiply(thread, projection_, both, b.x, b.ld_embd);
}

// ---- clusters of tokens --------------------------------------------------------------------------------------------

ClusteredOutput::ClusteredOutput(const DecoderConfig& config, const Weights& weights)
    : config_(config.clusters), centroids_(weights.matrix("clusters.centroids", config.clusters.n, config.n_embd)) {}

void ClusteredOutput::run(const Pass& pass, int thread, const float* norm, const Matrix& output) const {
    const Activations& b = pass.b;
    const int n_rows = pass.n_rows, n_used = config_.n_used;
    const Inputs inputs = pass.normed_inputs(thread, norm, pass.rows, n_rows, {&centroids_, &output});
    const Tasks tasks(centroids_, n_rows, pass.pool.size(), pass.kernels.at_once(n_rows));
    pass.for_tasks(thread, tasks.count(), [&](int task) {
        pass.kernels.matmul(centroids_, inputs, n_rows, tasks.first(task), tasks.last(task),
                            tasks.next_data(centroids_, task), b.cluster_scores, b.ld_clusters);
    });
    pass.for_items(thread, n_rows, [&](int row) { choose(pass, thread, row); });
    pass.for_tasks(thread, n_rows * n_used,
                   [&](int task) { run_cluster(pass, thread, inputs, output, task / n_used, task % n_used); });
}

// The clusters of a row, ascending; of equal scores the lower one, and a NaN is no larger than -infinity.
void ClusteredOutput::choose(const Pass& pass, int thread, int row) const {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const Activations& b = pass.b;
    float* scores = b.cluster_scores + static_cast<size_t>(row) * b.ld_clusters;
    int32_t* order = b.own_order[static_cast<size_t>(thread)];
    for (int i = 0; i < config_.n; i++) {
        order[i] = i;
        scores[i] = scores[i] >= kNone ? scores[i] : kNone;
    }
    std::nth_element(order, order + config_.n_used - 1, order + config_.n,
                     [&](int32_t i, int32_t j) { return scores[i] > scores[j] || (scores[i] == scores[j] && i < j); });
    std::sort(order, order + config_.n_used);
    std::copy_n(order, config_.n_used, b.clusters + static_cast<std::ptrdiff_t>(row) * config_.n_used);
}

// Row groups may have rows of the clusters beside it too, whose products are dropped.
void ClusteredOutput::run_cluster(const Pass& pass, int thread, const Inputs& inputs, const Matrix& output, int row,
                                  int place) const {
    const int n_each = output.n_out / config_.n, cluster = pass.b.clusters[row * config_.n_used + place];
    const int first = cluster * n_each, group = first / kRows, end = (first + n_each + kRows - 1) / kRows;
    float* products = pass.b.own_cluster[static_cast<size_t>(thread)];
    const int32_t column = row;
    pass.kernels.matmul(output.from(group), inputs.of(&column), 1, 0, end - group, nullptr, products,
                        static_cast<size_t>((end - group) * kRows));
    std::copy_n(products + first - group * kRows, n_each,
                pass.logits + static_cast<size_t>(row * config_.n_used + place) * static_cast<size_t>(n_each));
}

// ---- features ------------------------------------------------------------------------------------------------------

// Of kTokensTogether rows, which are made at once.
struct FeatureProjection::Buffers {
    size_t ld;
    float* row;  // (kTokensTogether, ld)
    Inputs inputs;

    Buffers(int n_rows, Cutter& cutter)
        : ld(padded(n_rows)),
          row(cutter.take<float>(kTokensTogether * ld)),
          inputs(take_inputs(cutter, kTokensTogether, InputSizes::all(static_cast<int>(ld)))) {
        inputs.n_in = n_rows;
        inputs.x = row;
        inputs.ldx = ld;
    }
};

FeatureProjection::FeatureProjection(const Weights& weights, const Kernels& kernels, std::shared_ptr<Pool> pool,
                                     int n_embd, int n_rows, int n_normed, float norm_epsilon)
    : kernels_(kernels),
      pool_(std::move(pool)),
      n_embd_(n_embd),
      n_rows_(n_rows),
      n_normed_(n_normed),
      norm_epsilon_(norm_epsilon),
      matrix_(weights.matrix("features.matrix", n_embd, n_rows)),
      norm_(weights.vector("features.norm", n_rows)),
      activations_(activation_bytes(n_rows), false) {}

size_t FeatureProjection::activation_bytes(int n_rows) {
    Cutter counter(nullptr);
    Buffers(n_rows, counter);
    return counter.used();
}

void FeatureProjection::run(const float* rows, int n, float* features) {
    for (int first = 0; first < n; first += kTokensTogether) {
        const size_t at = static_cast<size_t>(first);
        run_some(rows + at * static_cast<size_t>(n_rows_), std::min(kTokensTogether, n - first),
                 features + at * static_cast<size_t>(n_embd_));
    }
}

void FeatureProjection::run_some(const float* rows, int n, float* features) {
    Cutter cutter(activations_.data());
    const Buffers b(n_rows_, cutter);
    pool_->run([&](int thread) {
        pool_->for_tasks(thread, n, [&](int c) {
            const size_t n_in = static_cast<size_t>(n_rows_);
            float* row = b.row + static_cast<size_t>(c) * b.ld;
            std::memcpy(row, rows + static_cast<size_t>(c) * n_in, sizeof(float) * n_in);
            for (int k = 0; norm_ && k < n_rows_; k += n_normed_)
                kernels_.rms_norm(row + k, norm_ + k, n_normed_, norm_epsilon_, row + k);
            prepare_inputs(kernels_, b.inputs, c, {&matrix_});
        });
        const Tasks tasks(matrix_, n, pool_->size(), kernels_.at_once(n));
        pool_->for_tasks(thread, tasks.count(), [&](int task) {
            kernels_.matmul(matrix_, b.inputs, n, tasks.first(task), tasks.last(task), tasks.next_data(matrix_, task),
                            features, static_cast<size_t>(n_embd_));
        });
    });
}
