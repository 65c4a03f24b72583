// The parts of a draft head that stand around its decoder (models/draft_head.py has the equations): a front, which joins
// the tokens' embeddings with the features that come with them, and what makes the features.
#pragma once

#include <memory>

#include "pass.h"
#include "weights.h"

class Front {
public:
    virtual ~Front() = default;
    // x = what the first layer adds to, of the embeddings in it and of the features of the pass.
    virtual void run(const Pass& pass, int thread) const = 0;
    // (n, ld_joined) what the first layer attends from, null where that is the norm of x.
    virtual const float* attended(const Pass&) const { return nullptr; }
};

// Null for FrontKind::None. Throws std::invalid_argument for weights that are missing.
std::unique_ptr<Front> make_front(const FrontConfig& front, const DecoderConfig& config, const Weights& weights);

// Dovetail's dynamic gating fusion (Zhang et al., arXiv:2412.18934).
class GatedFusion : public Front {
public:
    GatedFusion(const DecoderConfig& config, const Weights& weights);
    void run(const Pass& pass, int thread) const override;

private:
    Matrix feature_, token_, mix_;
    const float* token_norm_;
};

// What the layer of an EAGLE-3 head attends from (Li et al., arXiv:2503.01840).
class ConcatenatedInput : public Front {
public:
    ConcatenatedInput(const DecoderConfig& config, const Weights& weights, bool normed_residual);
    void run(const Pass& pass, int thread) const override;
    const float* attended(const Pass& pass) const override { return pass.b.joined; }

private:
    const float *token_norm_, *feature_norm_;
    bool normed_residual_;
};

// What a model's own block that drafts begins with (DeepSeek-V3, arXiv:2412.19437).
class ProjectedInput : public Front {
public:
    ProjectedInput(const DecoderConfig& config, const Weights& weights);
    void run(const Pass& pass, int thread) const override;

private:
    Matrix projection_;
    const float *token_norm_, *feature_norm_;
};

// What an assistant of another width begins with: the target's embedding and feature of a token, side by side in `joined`.
class TargetInput : public Front {
public:
    TargetInput(const DecoderConfig& config, const Weights& weights);
    void run(const Pass& pass, int thread) const override;

private:
    Matrix projection_;
};

// Logits of the rows of the output matrix that are in the clusters with the largest scores.
class ClusteredOutput {
public:
    ClusteredOutput(const DecoderConfig& config, const Weights& weights);
    void run(const Pass& pass, int thread, const float* norm, const Matrix& output) const;

private:
    void choose(const Pass& pass, int thread, int row) const;
    void run_cluster(const Pass& pass, int thread, const Inputs& inputs, const Matrix& output, int row,
                     int place) const;

    ClustersConfig config_;
    Matrix centroids_;
};

// Makes features (n, n_embd) of rows (n, n_rows) of the target.
class FeatureProjection {
public:
    // n_normed: numbers of a row that are normed together, n_rows or a multiple of 16.
    FeatureProjection(const Weights& weights, const Kernels& kernels, std::shared_ptr<Pool> pool, int n_embd,
                      int n_rows, int n_normed, float norm_epsilon);

    void run(const float* rows, int n, float* features);
    int n_embd() const { return n_embd_; }
    int n_rows() const { return n_rows_; }
    size_t activation_bytes() const { return activations_.size(); }
    static size_t activation_bytes(int n_rows);

private:
    struct Buffers;

    void run_some(const float* rows, int n, float* features);

    const Kernels& kernels_;
    std::shared_ptr<Pool> pool_;
    int n_embd_, n_rows_, n_normed_;
    float norm_epsilon_;
    Matrix matrix_;
    const float* norm_;
    Memory activations_;
};
