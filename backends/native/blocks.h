// The blocks that layers are made of: what each adds to the residual stream (models/spec.py has the equations).
#pragma once

#include <string>
#include <vector>

#include "pass.h"
#include "weights.h"

// Attention with its norm, rotary embedding, window and projection.
class AttentionBlock {
public:
    // index: of the layer. name: of the block in the weights. Throws std::invalid_argument for weights that are missing.
    AttentionBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights);

    // attended: (n, ld_joined) what a layer with longer inputs than the residual stream attends from, else null.
    void run(const Pass& pass, int thread, const float* attended) const;
    size_t weight_bytes() const {
        return q_.n_bytes() + k_.n_bytes() + v_.n_bytes() + output_.n_bytes() +
               (config_.n_gate() ? gate_.n_bytes() : 0);
    }

private:
    struct Split;  // how attention is cut into tasks

    void project_qkv(const Pass& pass, int thread, const Inputs& inputs) const;
    void norm_queries_and_keys(const Pass& pass, int thread) const;
    void norm_heads(const Pass& pass, int thread, const float* norm, float* heads, int n_heads) const;
    void rotate_and_store(const Pass& pass, int thread) const;
    void rotate_heads(const Pass& pass, int c, float* q, float* k) const;
    void attend(const Pass& pass, int thread) const;
    Split split(const Pass& pass) const;
    AttentionRow row(const Pass& pass, int thread, const Sequence& sequence, int c, int head, int r) const;
    void store(const Pass& pass, int c, int kv_head, float* k, float* v) const;
    void quantize_query(const Pass& pass, int thread, int r, AttentionRow& a) const;
    void quantize_turned_query(const Pass& pass, int thread, int kv_head, int r, AttentionRow& a) const;
    void set_offset(const Pass& pass, int kv_head, const float* q, float* offset) const;
    RopeTables rope_tables_of(const Pass& pass) const;
    const float* gated_query(const Pass& pass, int c, int head) const;
    const float* gate_of(const Pass& pass, int c, int head) const;
    void gate(const Pass& pass, int thread, int c, int head, float* out) const;

    AttentionConfig config_;
    int index_;
    bool is_beside_, is_rotated_in_halves_;
    const QueryScales& query_scales_;
    Matrix q_, k_, v_, output_;
    std::vector<float> ones_;  // a norm without weights
    // Null where the model has none.
    const float *norm_, *post_norm_, *sub_norm_, *q_norm_, *k_norm_;
    const float *q_bias_, *k_bias_, *v_bias_, *output_bias_, *sinks_;
    Matrix gate_;  // where the gate has one
};

// Latent attention with its norm, rotary embedding and projections.
class LatentAttentionBlock {
public:
    LatentAttentionBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights);

    // attended: null; it reads the residual stream.
    void run(const Pass& pass, int thread, const float* attended) const;
    size_t weight_bytes() const;

private:
    // Numbers of the heads of all tokens: from one head to the next, and from one token to the next.
    struct OfHeads {
        float* x;
        size_t head_stride, ld;
    };

    void project(const Pass& pass, int thread) const;
    Inputs normed_queries(const Pass& pass, int thread) const;
    void turn_and_store(const Pass& pass, int thread) const;
    float* query(const Pass& pass, int c, int head) const;
    void multiply_heads(const Pass& pass, int thread, const Matrix& all, const OfHeads& from, const OfHeads& to,
                        float scale) const;
    void attend(const Pass& pass, int thread) const;
    AttentionRow row(const Pass& pass, int thread, const Sequence& sequence, int c, int head, int r) const;

    LatentConfig config_;
    int index_;
    bool is_rotated_in_halves_;
    Matrix q_, q_b_;  // q is q_a where there are latents of queries, and q_b is empty where there are none
    Matrix kv_, k_b_, v_b_, output_;
    const float *norm_, *q_norm_, *kv_norm_;
};

// A gated delta net with its norm, convolution and projection.
class DeltaNetBlock {
public:
    DeltaNetBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights);

    // attended: null; a recurrence reads the residual stream.
    void run(const Pass& pass, int thread, const float* attended) const;
    size_t weight_bytes() const;

private:
    struct Rows;     // of one sequence in a pass
    struct Columns;  // of a state that are worked on together

    void project(const Pass& pass, int thread, const Inputs& inputs) const;
    void mix(const Pass& pass, int thread) const;
    void convolve(const Pass& pass, const Rows& rows, int c, int first, int n, float* kept) const;
    void set_steps(const Pass& pass, int c, const Rows& rows) const;
    void recur(const Pass& pass, int thread) const;
    void run_head(const Pass& pass, int thread, const Rows& rows, int head) const;
    void gate_head(const Pass& pass, int c, int head) const;

    DeltaNetConfig config_;
    int index_;
    Matrix qkv_, gate_, output_;
    Matrix beta_, alpha_;  // beta is both where they are one matrix
    const float *norm_, *conv_, *decay_, *step_bias_, *out_norm_;
};

// A gated short convolution with its norm and projections.
class ShortConvBlock {
public:
    ShortConvBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights);

    // attended: null, as above.
    void run(const Pass& pass, int thread, const float* attended) const;
    size_t weight_bytes() const { return input_.n_bytes() + output_.n_bytes(); }

private:
    void run_channels(const Pass& pass, const Sequence& sequence, int part) const;

    ShortConvConfig config_;
    int index_;
    Matrix input_, output_;
    const float *norm_, *conv_;
};

// What ends a layer: what it has for each token of its own, and the scale of the residual stream.
class LayerEndBlock {
public:
    LayerEndBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights);

    void run(const Pass& pass, int thread) const;
    size_t weight_bytes() const { return gate_.n_bytes() + projection_.n_bytes(); }

private:
    void add_inputs(const Pass& pass, int thread) const;

    LayerEndConfig config_;
    int index_;
    Matrix gate_, projection_;
    const float *post_norm_, *scale_;  // null where the model has none
};

// What all layers have for each token, made before the first one.
class LayerInputsBlock {
public:
    LayerInputsBlock(const DecoderConfig& config, const Weights& weights);

    // Of what is in x, the scaled embeddings of the tokens.
    void run(const Pass& pass, int thread) const;

private:
    void finish(const Pass& pass, int thread, int c) const;

    LayerInputsConfig config_;
    int n_all_;
    Matrix projection_;
    const float* norm_;
    const Embedding& table_;
};

// Mamba2 with its norms, convolution and projections.
class Mamba2Block {
public:
    Mamba2Block(const DecoderConfig& config, int index, const std::string& name, const Weights& weights);

    // attended: null, as above.
    void run(const Pass& pass, int thread, const float* attended) const;
    size_t weight_bytes() const { return input_.n_bytes() + output_.n_bytes(); }

private:
    struct Rows;     // of one sequence in a pass
    struct Columns;  // of a state that are worked on together

    void mix(const Pass& pass, int thread) const;
    void convolve(const Pass& pass, const Rows& rows, int c, int first, int n) const;
    void set_steps(const Pass& pass, int c, const Rows& rows) const;
    void recur(const Pass& pass, int thread) const;
    void gate(const Pass& pass, int thread) const;

    Mamba2Config config_;
    int index_;
    Matrix input_, output_;
    const float *norm_, *conv_, *conv_bias_, *decay_, *skip_, *step_bias_, *out_norm_;
};

// No network.
class NoFeedForwardBlock {
public:
    void run(const Pass&, int) const {}
    size_t weight_bytes() const { return 0; }
};

// A feed-forward network, gated or plain: up_ is empty where it has no gate, and gate_ is what the file calls up.
class DenseBlock {
public:
    DenseBlock(const DecoderConfig& config, int index, const std::string& name, const Weights& weights);

    void run(const Pass& pass, int thread) const;
    size_t weight_bytes() const { return gate_.n_bytes() + up_.n_bytes() + down_.n_bytes(); }

private:
    void gated(const Pass& pass, int thread, const Inputs& inputs) const;
    void plain(const Pass& pass, int thread, const Inputs& inputs) const;

    DenseConfig config_;
    Matrix gate_, up_, down_;
    const float *norm_, *post_norm_, *sub_norm_;
};
