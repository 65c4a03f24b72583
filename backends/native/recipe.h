// What a decoder computes: sizes, and layers made of blocks, as models/spec.py describes them.
#pragma once

#include <algorithm>
#include <optional>
#include <variant>
#include <vector>

#include "kernels/matrix.h"
#include "kv/sequence_state.h"

// A rotary embedding; pair i turns by frequencies[i] radians a position.
struct Rope {
    bool halves;  // pairs (i, i + n/2), else (2i, 2i + 1)
    std::vector<double> frequencies;
    double magnitude;
    std::vector<double> long_frequencies;  // of sequences that may have more than n_ctx positions; none: the same
    int n_ctx = 0;

    const std::vector<double>& of_context(int n) const {
        return long_frequencies.empty() || n <= n_ctx ? frequencies : long_frequencies;
    }
};

// What queries are multiplied by: values[i] at the positions i * n_positions .. (i + 1) * n_positions - 1.
struct QueryScales {
    std::vector<float> values;
    int n_positions;

    float at(int position) const { return values[static_cast<size_t>(position / n_positions)]; }
};

enum class Activation : int { Silu, GeluTanh, Relu2, ClampedSwiglu };
enum class QKNorm : int { None, PerHead, Whole };
// Of what heads give: with each query in its matrix, or of a matrix of its own, by head or by number.
enum class OutputGate : int { None, InQ, PerHead, PerNumber };

// A cap of 0 and a window of 0 are none. rope, query_scales: indices in DecoderConfig, rope -1 for none. post_norm_epsilon:
// 0 for the model's.
struct AttentionConfig {
    int n_in, n_heads, n_kv_heads, head_dim;
    int rope = -1, query_scales = 0;
    int window = 0;
    float soft_cap = 0;
    QKNorm qk_norm = QKNorm::None;
    bool key_bias = false;  // one that no norm follows, so that keys can be held without it
    OutputGate gate = OutputGate::None;
    bool gate_is_softplus = false;
    float post_norm_epsilon = 0;
    bool normed_values = false;
    bool keys_are_values = false;  // values are the products of keys, before their norm
    int kv_of = -1;                // the layer whose keys and values it reads; -1 for its own
    bool of_target = false;        // a layer of another decoder: of the slots before the token, which has none itself

    bool gated_q() const { return gate == OutputGate::InQ; }
    int n_q_rows() const { return (gated_q() ? 2 : 1) * n_q(); }
    // Rows of the gate's own matrix.
    int n_gate() const { return gate == OutputGate::PerHead ? n_heads : gate == OutputGate::PerNumber ? n_q() : 0; }
    int n_q() const { return n_heads * head_dim; }
    int n_kv() const { return n_kv_heads * head_dim; }
    bool has_keys() const { return kv_of < 0 && !of_target; }
    bool has_values() const { return has_keys() && !keys_are_values; }
    KvSizes state_sizes() const { return {n_kv_heads, head_dim, window, 0, kv_of}; }
};

// Latent attention. n_q_latent: 0 for queries of one matrix. rope: an index in DecoderConfig.
struct LatentConfig {
    int n_heads, n_plain, n_turned, n_latent, n_value, n_q_latent, rope;
    float scale;

    int n_q() const { return n_heads * (n_plain + n_turned); }
    int n_row() const { return n_latent + n_turned; }
    KvSizes state_sizes() const { return {1, n_row(), 0, n_latent}; }
};

// A gated delta net. modulo: value head h reads key head h % n_key_heads, else h / (n_value_heads / n_key_heads).
// joint_steps: b and a are one matrix, for each key head b of its value heads and then a.
struct DeltaNetConfig {
    int n_key_heads, n_value_heads, head_dim, n_conv;
    bool modulo, joint_steps;

    int n_k() const { return n_key_heads * head_dim; }
    int n_v() const { return n_value_heads * head_dim; }
    int n_channels() const { return 2 * n_k() + n_v(); }
    int key_head(int value_head) const {
        return modulo ? value_head % n_key_heads : value_head / (n_value_heads / n_key_heads);
    }
    RecurrentSizes state_sizes() const { return {n_value_heads, head_dim, n_k(), n_channels(), n_conv, head_dim}; }
};

// A gated short convolution of n_channels, the width of the residual stream.
struct ShortConvConfig {
    int n_channels, n_conv;

    RecurrentSizes state_sizes() const { return {0, 0, 0, n_channels, n_conv, 0}; }
};

// Mamba2: n_heads states (n_per_key, head_dim), of which n_heads / n_groups that follow one another share B and C.
struct Mamba2Config {
    int n_heads, head_dim, n_groups, n_per_key, n_conv;

    int n_v() const { return n_heads * head_dim; }
    int n_k() const { return n_groups * n_per_key; }
    int n_channels() const { return n_v() + 2 * n_k(); }
    int n_input_rows() const { return n_v() + n_channels() + n_heads; }
    int group_of(int head) const { return head / (n_heads / n_groups); }
    RecurrentSizes state_sizes() const { return {n_heads, head_dim, n_k(), n_channels(), n_conv, n_per_key}; }
};

// is_plain: without a gate; relu2 is the only activation then.
struct DenseConfig {
    int n_ff;
    Activation activation = Activation::Silu;
    float post_norm_epsilon = 0;  // 0 for the model's
    bool is_plain = false;
};

// A layer that is a mixer alone.
struct NoFeedForwardConfig {};

enum class RouterFunction : int { Softmax, Sigmoid, SoftmaxOfTopK, SqrtSoftplus };

constexpr int kMostExpertGroups = 64, kMostUsed = 64;  // groups of experts, and experts of a row

// n_ff_shared: 0 without a shared network. n_latent: numbers that experts read and give, 0 for those of the residual stream.
struct ExpertsConfig {
    int n_ff, n_experts, n_used;
    RouterFunction function = RouterFunction::Softmax;
    bool is_normalised = false;
    float weight_scale = 1;
    int n_groups = 1, n_used_groups = 1;
    Activation activation = Activation::Silu;
    int n_ff_shared = 0;
    float router_scale = 1;
    bool own_inputs = false;  // the router and the shared network read x with norms of their own
    int n_latent = 0;
    bool groups_by_best = false;  // else by their two best

    // Numbers that a routed expert reads, and gives.
    int n_in(int n_embd) const { return n_latent ? n_latent : n_embd; }
};

// What ends a layer: n_inputs numbers that it has for each token, 0 for none, and a scale of the residual stream.
struct LayerEndConfig {
    int n_inputs = 0;
    Activation activation = Activation::GeluTanh;
};

// What layers have of their own for each token: n_inputs numbers each, 0 for none.
struct LayerInputsConfig {
    int n_inputs = 0;
    float projection_scale = 1, table_scale = 1;
};

using MixerConfig = std::variant<AttentionConfig, DeltaNetConfig, ShortConvConfig, LatentConfig, Mamba2Config>;
using FeedForwardConfig = std::variant<DenseConfig, ExpertsConfig, NoFeedForwardConfig>;

struct LayerConfig {
    MixerConfig mixer;
    FeedForwardConfig ffn;
    std::optional<LayerEndConfig> end = std::nullopt;
    // The mixer reads the residual stream as the mixer before it did, in a layer without a network. Attention only.
    bool is_beside = false;

    LayerSizes state_sizes() const {
        return std::visit([](const auto& block) -> LayerSizes { return block.state_sizes(); }, mixer);
    }
    // Null for a layer of another kind.
    const AttentionConfig* attention() const { return std::get_if<AttentionConfig>(&mixer); }
    const DeltaNetConfig* delta_net() const { return std::get_if<DeltaNetConfig>(&mixer); }
    const ShortConvConfig* short_conv() const { return std::get_if<ShortConvConfig>(&mixer); }
    const LatentConfig* latent_attention() const { return std::get_if<LatentConfig>(&mixer); }
    const Mamba2Config* mamba2() const { return std::get_if<Mamba2Config>(&mixer); }
    const DenseConfig* dense() const { return std::get_if<DenseConfig>(&ffn); }
    const ExpertsConfig* experts() const { return std::get_if<ExpertsConfig>(&ffn); }
};

// The longest inputs of matrix products, by the form in which they are read (InputKind); 0 where none is.
struct InputSizes {
    int by32 = 0, by256 = 0, by_token = 0;

    static InputSizes all(int n_in) { return {n_in, n_in, n_in}; }
    void add(Format format, int n_in) {
        switch (input_kind(format)) {
            case InputKind::Int8By32: by32 = std::max(by32, n_in); return;
            case InputKind::Int8By256: by256 = std::max(by256, n_in); return;
            case InputKind::Int8ByToken: by_token = std::max(by_token, n_in); return;
            case InputKind::Float: return;
        }
    }
    void add_any(int n_in) {
        for (int* each : {&by32, &by256, &by_token}) *each = std::max(*each, n_in);
    }
    bool fit(Format format, int n_in) const {
        InputSizes with = *this;
        with.add(format, n_in);
        return with == *this;
    }
    // Those of matrices whose inputs are no longer than n_in.
    InputSizes up_to(int n_in) const { return {std::min(by32, n_in), std::min(by256, n_in), std::min(by_token, n_in)}; }
    bool operator==(const InputSizes&) const = default;
};

// Of the n clusters that the rows of the output matrix are, one after the other, the n_used whose logits a row gets; none
// where n is 0.
struct ClustersConfig {
    int n = 0, n_used = 0;
};

// Scales of 1 and caps of 0 change nothing. inputs: of all matrices. n_ctx: the longest sequence; n_batch: tokens of a
// pass at most. n_target: numbers of the embeddings and features that a front joins, 0 for n_embd.
struct DecoderConfig {
    int n_vocab, n_logits, n_embd, n_ctx, n_batch;
    float norm_epsilon;
    std::vector<Rope> ropes;
    std::vector<QueryScales> query_scales;  // only for a Decoder, not for its sizes
    std::vector<LayerConfig> layers;
    float embedding_scale = 1, residual_scale = 1, logit_scale = 1, logit_soft_cap = 0;
    bool embedding_norm = false;  // of the scaled embeddings, without weights
    bool centred_output = false;  // the last norm is of rows less their mean
    InputSizes inputs = {};
    LayerInputsConfig layer_inputs = {};
    int n_target = 0;
    ClustersConfig clusters = {};

    int n_feature() const { return n_target ? n_target : n_embd; }
    // Logits of a row.
    int n_row_logits() const { return clusters.n ? n_logits / clusters.n * clusters.n_used : n_logits; }
    // Whether all layers attend to the sequences of another decoder, of which nothing is written.
    bool reads_target() const {
        return most_of_attention([](const AttentionConfig& a) { return static_cast<int>(a.of_target); }) > 0;
    }

    int n_layers() const { return static_cast<int>(layers.size()); }

    // The largest of a number over all layers, 0 without layers.
    template <class Number>
    int most(const Number& number) const {
        int largest = 0;
        for (const LayerConfig& layer : layers) largest = std::max(largest, number(layer));
        return largest;
    }

    // The same over the layers that have a block of that kind.
    template <class Number>
    int most_of_attention(const Number& number) const {
        return most([&](const LayerConfig& layer) { return layer.attention() ? number(*layer.attention()) : 0; });
    }
    template <class Number>
    int most_of_experts(const Number& number) const {
        return most([&](const LayerConfig& layer) { return layer.experts() ? number(*layer.experts()) : 0; });
    }
    template <class Number>
    int most_of_delta_nets(const Number& number) const {
        return most([&](const LayerConfig& layer) { return layer.delta_net() ? number(*layer.delta_net()) : 0; });
    }
    template <class Number>
    int most_of_short_convs(const Number& number) const {
        return most([&](const LayerConfig& layer) { return layer.short_conv() ? number(*layer.short_conv()) : 0; });
    }
    template <class Number>
    int most_of_latents(const Number& number) const {
        return most(
            [&](const LayerConfig& layer) { return layer.latent_attention() ? number(*layer.latent_attention()) : 0; });
    }
    template <class Number>
    int most_of_mamba2(const Number& number) const {
        return most([&](const LayerConfig& layer) { return layer.mamba2() ? number(*layer.mamba2()) : 0; });
    }
    bool has_beside() const {
        return most([](const LayerConfig& layer) { return static_cast<int>(layer.is_beside); }) > 0;
    }
    bool has_key_bias() const {
        return most_of_attention([](const AttentionConfig& a) { return static_cast<int>(a.key_bias); }) > 0;
    }
    int n_layer_inputs() const { return n_layers() * layer_inputs.n_inputs; }
    bool has_experts() const {
        return most_of_experts([](const ExpertsConfig&) { return 1; }) > 0;
    }

    // Whether a sequence of these sizes is one of this model, or one that its layers can read.
    bool fits(const SequenceSizes& sizes) const {
        if (reads_target()) {
            return sizes.n_ctx <= n_ctx && std::all_of(layers.begin(), layers.end(), [&](const LayerConfig& layer) {
                       return can_read(*layer.attention(), sizes);
                   });
        }
        if (sizes.layers.size() != layers.size() || sizes.n_ctx > n_ctx || sizes.n_batch > n_batch) return false;
        for (size_t i = 0; i < layers.size(); i++) {
            if (sizes.layers[i] != layers[i].state_sizes()) return false;
        }
        return true;
    }

    static bool can_read(const AttentionConfig& attention, const SequenceSizes& sizes) {
        const size_t of = static_cast<size_t>(attention.kv_of);
        KvSizes own = attention.state_sizes();
        own.of = -1;
        return of < sizes.layers.size() && sizes.layers[of] == LayerSizes(own);
    }

    // The state of a sequence of up to n_ctx_of_sequence positions.
    SequenceSizes sequence_sizes(KvType type, int n_ctx_of_sequence) const {
        SequenceSizes sizes{type, n_ctx_of_sequence, std::min(n_batch, n_ctx_of_sequence), {}};
        for (const LayerConfig& layer : layers) sizes.layers.push_back(layer.state_sizes());
        return sizes;
    }
};

// What a draft head begins with in place of the embeddings alone, see head.h.
enum class FrontKind : int { None, GatedFusion, ConcatenatedInput, ProjectedInput, TargetInput };

struct FrontConfig {
    FrontKind kind = FrontKind::None;
    bool normed_residual = false;  // of ConcatenatedInput
};
