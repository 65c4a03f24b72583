// Sizes, recipes and the states of sequences in Python.
#include <nanobind/stl/variant.h>

#include "activations.h"
#include "bind/bindings.h"
#include "conv_history.h"
#include "kv/byte_sum.h"
#include "kv/sequence_state.h"
#include "platform.h"
#include "recipe.h"

namespace {

int add_rope(DecoderConfig& config, bool halves, std::vector<double> frequencies, double magnitude,
             std::vector<double> long_frequencies, int n_ctx) {
    if (!long_frequencies.empty() && long_frequencies.size() != frequencies.size()) {
        throw nb::value_error("long_frequencies must be as many as the others");
    }
    config.ropes.push_back({halves, std::move(frequencies), magnitude, std::move(long_frequencies), n_ctx});
    return static_cast<int>(config.ropes.size()) - 1;
}

int add_query_scales(DecoderConfig& config, std::vector<float> values, int n_positions) {
    if (n_positions < 1 || values.size() * static_cast<size_t>(n_positions) < static_cast<size_t>(config.n_ctx)) {
        throw nb::value_error("query scales must be given for all positions");
    }
    config.query_scales.push_back({std::move(values), n_positions});
    return static_cast<int>(config.query_scales.size()) - 1;
}

void init_dense(DenseConfig* dense, int n_ff, Activation activation, float post_norm_epsilon, bool is_plain) {
    if (n_ff < 1 || post_norm_epsilon < 0) throw nb::value_error("n_ff must be positive");
    if (is_plain && activation != Activation::Relu2) throw nb::value_error("a network without a gate has relu2");
    new (dense) DenseConfig{n_ff, activation, post_norm_epsilon, is_plain};
}

void init_experts(ExpertsConfig* experts, int n_ff, int n_experts, int n_used, RouterFunction router_function,
                  bool is_normalised, float weight_scale, int n_groups, int n_used_groups, Activation activation,
                  int n_ff_shared, float router_scale, bool own_inputs, int n_latent, bool groups_by_best) {
    if (own_inputs && n_ff_shared < 1) throw nb::value_error("own_inputs are those of a shared network too");
    if (n_ff < 1 || n_ff_shared < 0 || n_latent < 0 || n_used < 1 || n_used > n_experts || n_used > kMostUsed) {
        throw nb::value_error("sizes must be positive, and n_used at most n_experts and 64");
    }
    if (n_groups < 1 || n_groups > kMostExpertGroups || n_experts % n_groups || n_used_groups < 1 ||
        n_used_groups > n_groups || n_used > n_used_groups * (n_experts / n_groups)) {
        throw nb::value_error("the experts must be cut into groups of one size, and those in use hold n_used");
    }
    new (experts) ExpertsConfig{n_ff,         n_experts,  n_used,        router_function, is_normalised,
                                weight_scale, n_groups,   n_used_groups, activation,      n_ff_shared,
                                router_scale, own_inputs, n_latent,      groups_by_best};
}

void init_attention(AttentionConfig* attention, int n_in, int n_heads, int n_kv_heads, int head_dim, int rope,
                    int query_scales, int window, float soft_cap, QKNorm qk_norm, bool key_bias, OutputGate gate,
                    bool gate_is_softplus, float post_norm_epsilon, bool normed_values, bool keys_are_values, int kv_of,
                    bool of_target) {
    if (n_in < 1 || n_heads < 1 || n_kv_heads < 1 || head_dim < 1 || n_heads % n_kv_heads) {
        throw nb::value_error("sizes must be positive, and n_heads a multiple of n_kv_heads");
    }
    if (rope < -1 || query_scales < 0 || window < 0) throw nb::value_error("no such rope, query scales or window");
    if (key_bias && qk_norm != QKNorm::None) throw nb::value_error("key_bias is one that no norm follows");
    if (gate == OutputGate::InQ && qk_norm == QKNorm::Whole)
        throw nb::value_error("gates come with queries that are normed by head");
    if (post_norm_epsilon < 0) throw nb::value_error("post_norm_epsilon must not be negative");
    if (kv_of < -1 || (kv_of >= 0 && (qk_norm == QKNorm::Whole || key_bias)))
        throw nb::value_error("keys of another layer have no norm over all heads and no bias");
    if (of_target && (kv_of < 0 || window == 1))
        throw nb::value_error("of a target it reads a layer, of which a window sees more than the token itself");
    new (attention) AttentionConfig{n_in,         n_heads,          n_kv_heads,        head_dim,      rope,
                                    query_scales, window,           soft_cap,          qk_norm,       key_bias,
                                    gate,         gate_is_softplus, post_norm_epsilon, normed_values, keys_are_values,
                                    kv_of,        of_target};
}

void init_latents(LatentConfig* latents, int n_heads, int n_plain, int n_turned, int n_latent, int n_value,
                  int n_q_latent, int rope, float scale) {
    if (n_heads < 1 || n_plain < 1 || n_turned < 2 || n_latent < 1 || n_latent % kRows || n_turned % kRows ||
        n_value < 1 || n_value % kRows || n_q_latent < 0) {
        throw nb::value_error("rows and values must be of a multiple of 16 numbers");
    }
    new (latents) LatentConfig{n_heads, n_plain, n_turned, n_latent, n_value, n_q_latent, rope, scale};
}

void init_delta_net(DeltaNetConfig* net, int n_key_heads, int n_value_heads, int head_dim, int n_conv, bool modulo,
                    bool joint_steps) {
    if (n_key_heads < 1 || n_value_heads < 1 || n_value_heads % n_key_heads || head_dim < 1 || head_dim % 16 ||
        n_conv < 2 || n_conv > kMostConv) {
        throw nb::value_error("heads must be of a multiple of 16 numbers, and n_value_heads a multiple of n_key_heads");
    }
    new (net) DeltaNetConfig{n_key_heads, n_value_heads, head_dim, n_conv, modulo, joint_steps};
}

void init_mamba2(Mamba2Config* mamba, int n_heads, int head_dim, int n_groups, int n_per_key, int n_conv) {
    if (n_heads < 1 || head_dim < 1 || head_dim % 16 || n_groups < 1 || n_heads % n_groups || n_per_key < 1 ||
        n_per_key % 16 || n_conv < 2 || n_conv > kMostConv) {
        throw nb::value_error("heads and keys must be of a multiple of 16 numbers, and n_heads a multiple of n_groups");
    }
    new (mamba) Mamba2Config{n_heads, head_dim, n_groups, n_per_key, n_conv};
}

void init_short_conv(ShortConvConfig* conv, int n_channels, int n_conv) {
    if (n_channels < 1 || n_channels % 16 || n_conv < 2 || n_conv > kMostConv)
        throw nb::value_error("n_channels must be a multiple of 16");
    new (conv) ShortConvConfig{n_channels, n_conv};
}

void check_rope(const DecoderConfig& config, int number, int head_dim) {
    if (number < 0) return;
    const size_t rope = static_cast<size_t>(number);
    if (rope >= config.ropes.size()) throw nb::value_error("no such rope, query scales or window");
    if (2 * config.ropes[rope].frequencies.size() > static_cast<size_t>(head_dim)) {
        throw nb::value_error("the rope has more pairs than a head");
    }
}

// Keys and values of another layer are those of one before it, of the same sizes.
void check_kv_of(const DecoderConfig& config, const AttentionConfig& attention) {
    if (attention.kv_of < 0 || attention.of_target) return;
    const size_t of = static_cast<size_t>(attention.kv_of);
    const AttentionConfig* other = of < config.layers.size() ? config.layers[of].attention() : nullptr;
    KvSizes own = attention.state_sizes();
    own.of = -1;
    if (!other || other->state_sizes() != own)
        throw nb::value_error("kv_of must be a layer before it of the same sizes");
}

void add_layer(DecoderConfig& config, const MixerConfig& mixer, const FeedForwardConfig& ffn,
               std::optional<LayerEndConfig> end, bool is_beside) {
    const LayerConfig layer{mixer, ffn, end, is_beside};
    if (is_beside && (!layer.attention() || config.layers.empty() ||
                      !std::holds_alternative<NoFeedForwardConfig>(config.layers.back().ffn))) {
        throw nb::value_error("what stands beside the mixer before it is attention, after a layer without a network");
    }
    const bool of_target = layer.attention() && layer.attention()->of_target;
    if (!config.layers.empty() && of_target != config.reads_target())
        throw nb::value_error("all layers read those of a target, or none does");
    if (layer.attention()) {
        check_rope(config, layer.attention()->rope, layer.attention()->head_dim);
        check_kv_of(config, *layer.attention());
    }
    if (layer.latent_attention()) {
        const LatentConfig& latents = *layer.latent_attention();
        if (latents.rope < 0) throw nb::value_error("latent attention has a rope");
        check_rope(config, latents.rope, latents.n_turned);
    }
    if (end && end->n_inputs != 0 && end->n_inputs != config.layer_inputs.n_inputs)
        throw nb::value_error("the end of a layer has as many inputs as the layers have");
    if (layer.short_conv() && layer.short_conv()->n_channels != config.n_embd)
        throw nb::value_error("a short convolution has a channel for each number of the residual stream");
    config.layers.push_back(layer);
}

void init_config(DecoderConfig* config, int n_vocab, int n_logits, int n_embd, int n_ctx, int n_batch,
                 float norm_epsilon) {
    if (n_vocab < 1 || n_logits < 1 || n_embd < 1 || n_ctx < 1 || n_batch < 1) {
        throw nb::value_error("sizes must be positive");
    }
    new (config) DecoderConfig{n_vocab, n_logits, n_embd, n_ctx, n_batch, norm_epsilon, {}, {}, {}};
}

void check_latents(KvType type, const LatentConfig& latents) {
    if (type == KvType::K6V4 || (type == KvType::Q8_0 && (latents.n_row() % 32 || latents.n_latent % 32)))
        throw nb::value_error("latent rows are F16, or Q8_0 where they are of a multiple of 32 numbers");
}

void check_cache(const DecoderConfig& config, KvType type, int n_ctx) {
    if (n_ctx < 1 || n_ctx > config.n_ctx)
        throw nb::value_error("a sequence has as many positions as the model at most");
    for (const LayerConfig& layer : config.layers) {
        if (layer.latent_attention()) check_latents(type, *layer.latent_attention());
        if (!layer.attention()) continue;
        const AttentionConfig& a = *layer.attention();
        if (type != KvType::F16 && a.head_dim % 32) {
            throw nb::value_error("a Q8_0 or K6V4 cache needs heads of a multiple of 32 numbers");
        }
        if (type == KvType::K6V4 && a.key_bias && a.rope >= 0 &&
            !config.ropes[static_cast<size_t>(a.rope)].long_frequencies.empty()) {
            throw nb::value_error("a K6V4 cache needs one set of rope frequencies where keys have a bias");
        }
    }
}

// n_positions: 0 for n_ctx.
PoolSizes pool_sizes(const DecoderConfig& config, KvType type, int n_ctx, int n_sequences, int n_positions) {
    if (n_sequences < 1 || n_sequences > 1 << 16 || (n_positions && n_positions < n_ctx))
        throw nb::value_error("a pool has room for one sequence at least");
    PoolSizes sizes{config.sequence_sizes(type, n_ctx)};
    sizes.n_sequences = n_sequences;
    sizes.n_positions = n_positions ? n_positions : n_ctx;
    return sizes;
}

void init_pool(SequencePool* pool, const DecoderConfig& config, KvType type, int n_ctx, int n_sequences,
               int n_positions, size_t checkpoint_bytes, size_t row_bytes) {
    check_cache(config, type, n_ctx);
    PoolSizes sizes = pool_sizes(config, type, n_ctx, n_sequences, n_positions);
    sizes.checkpoint_bytes = checkpoint_bytes;
    sizes.row_bytes = row_bytes;
    new (pool) SequencePool(sizes);
}

void init_sequence(SequenceState* sequence, const DecoderConfig& config, KvType type, int n_ctx) {
    check_cache(config, type, n_ctx);
    new (sequence) SequenceState(config.sequence_sizes(type, n_ctx));
}

using Wants = std::vector<std::pair<SequenceState*, int>>;

bool has_free(SequencePool& pool, const Wants& wants, bool by_batches) {
    std::vector<SequencePool::Want> all;
    for (const auto& [state, n_new] : wants) {
        if (!state || &state->pool() != &pool || n_new < 0 || n_new > INT_MAX - state->n_past())
            throw nb::value_error("has_free: not slots of a sequence of this pool");
        all.push_back({state, state->n_past() + n_new});
    }
    ReleasedGil release;
    return pool.has_free(all, by_batches);
}

void commit(SequenceState& sequence, const std::vector<int32_t>& path) {
    const int n = static_cast<int>(path.size());
    int before = -1;
    for (const int row : path) {
        if (row <= before || row >= sequence.n_pending())
            throw nb::value_error("commit: no such row, or none that ascend");
        before = row;
    }
    if (!sequence.can_commit(n)) throw nb::value_error("commit: of a long chain in recurrent layers all, or nothing");
    ReleasedGil release;
    sequence.commit(path.data(), n);
}

int truncate_to(SequenceState& sequence, int n_past) {
    if (n_past < 0 || n_past > sequence.n_past()) throw nb::value_error("truncate: no such position");
    return sequence.truncate(n_past);
}

int reach(const SequenceState& sequence, int n_past) {
    if (n_past < 0 || n_past > sequence.n_past()) throw nb::value_error("reach: no such position");
    return sequence.reach(n_past);
}

int shared_reach(const SequenceState& sequence, int n_past) {
    if (n_past < 0) throw nb::value_error("shared_reach: no such position");
    return sequence.shared_reach(n_past);
}

int resume(SequenceState& sequence, int number, int n_past) {
    if (n_past < 0) throw nb::value_error("resume: no such position");
    return sequence.resume(number, n_past);
}

int share(SequenceState& sequence, const SequenceState& other, int n_past) {
    if (n_past < 0 || &other == &sequence || &other.pool() != &sequence.pool())
        throw nb::value_error("share: not a position of another sequence of the pool");
    return sequence.share(other, n_past);
}

// ---- whole segments as bytes ---------------------------------------------------------------------------------------

bool has_segment(const SequenceState& sequence, int segment) {
    return segment >= 0 && segment < segments_of(sequence.n_ctx());
}

bool is_layer_with_segments(const SequenceState& sequence, int layer) {
    const std::vector<LayerSizes>& layers = sequence.sizes().layers;
    return layer >= 0 && layer < static_cast<int>(layers.size()) &&
           std::holds_alternative<KvSizes>(layers[static_cast<size_t>(layer)]);
}

void check_segments(const SequenceState& sequence, int layer, int segment) {
    if (!is_layer_with_segments(sequence, layer) || !has_segment(sequence, segment))
        throw nb::value_error("no such layer or segment");
}

bool copy_segment(const SequenceState& sequence, int layer, int segment, int n_tokens, uint64_t stamp,
                  WritableBytes to) {
    check_segments(sequence, layer, segment);
    if (n_tokens < 1 || n_tokens > kSegment || to.size() != sequence.segment_bytes(layer))
        throw nb::value_error("copy_segment: another number of tokens or bytes");
    ReleasedGil release;
    return sequence.copy_segment(layer, segment, n_tokens, stamp, to.data());
}

// (layers, descriptor, name, at, before, sum), see SequenceState::Part.
using PartArguments = std::tuple<std::vector<int>, int, FileName, uint64_t, uint64_t, uint64_t>;

std::optional<bool> read_segment(SequenceState& sequence, const std::vector<PartArguments>& arguments, int n_tokens) {
    if (sequence.n_past() % kSegment || n_tokens < 1 || n_tokens > kSegment ||
        sequence.n_ctx() - sequence.n_past() < n_tokens)
        throw nb::value_error("read_segment: a segment begins where another one ends");
    for (int layer = 0; layer < static_cast<int>(sequence.sizes().layers.size()); layer++)
        check_segments(sequence, layer, 0);
    std::vector<CachedFile> files;
    std::vector<SequenceState::Part> parts;
    for (const auto& [layers, descriptor, name, at, before, sum] : arguments) {
        for (const int layer : layers) check_segments(sequence, layer, 0);
        files.emplace_back(descriptor, name.bytes);
        parts.push_back({layers, nullptr, at, before, sum});
    }
    for (size_t i = 0; i < parts.size(); i++) parts[i].file = &files[i];
    ReleasedGil release;
    try {
        return sequence.read_segment(parts, n_tokens);
    } catch (const CacheFull&) {
        return std::nullopt;
    }
}

void bind_segments(nb::class_<SequenceState>& state) {
    state
        .def(
            "segment_bytes",
            [](const SequenceState& sequence, int layer) {
                check_segments(sequence, layer, 0);
                return sequence.segment_bytes(layer);
            },
            "layer"_a, "Bytes of a segment in a layer.")
        .def(
            "first_held",
            [](const SequenceState& sequence, int layer) {
                check_segments(sequence, layer, 0);
                return sequence.first_held(layer);
            },
            "layer"_a, "The first segment that the sequence has in a layer.")
        .def(
            "first_kept",
            [](const SequenceState& sequence, int layer, int n_past) {
                check_segments(sequence, layer, 0);
                if (n_past < 0 || n_past > sequence.n_ctx()) throw nb::value_error("first_kept: no such position");
                return sequence.first_kept(layer, n_past);
            },
            "layer"_a, "n_past"_a, "The first segment that is kept in a layer after n_past tokens.")
        .def(
            "stamp",
            [](const SequenceState& sequence, int segment) {
                if (!has_segment(sequence, segment)) throw nb::value_error("stamp: no such segment");
                return sequence.stamp(segment);
            },
            "segment"_a, "A value that this segment never has again once the sequence was cut before its end.")
        .def("copy_segment", &copy_segment, "layer"_a, "segment"_a, "n_tokens"_a, "stamp"_a, "to"_a,
             "Copy a layer of a segment with so many committed tokens; gives False where it is gone or was cut since.")
        .def("read_segment", &read_segment, "parts"_a, "n_tokens"_a,
             "Commit the first tokens of one more segment from files; gives False where bytes are not as their sum "
             "says, None where memory is missing. parts: (layers, descriptor, name, at, before, sum).");
}

void bind_enums(nb::module_& m) {
    nb::enum_<Activation>(m, "Activation")
        .value("silu", Activation::Silu)
        .value("gelu_tanh", Activation::GeluTanh)
        .value("relu2", Activation::Relu2)
        .value("clamped_swiglu", Activation::ClampedSwiglu);
    nb::enum_<RouterFunction>(m, "RouterFunction")
        .value("softmax", RouterFunction::Softmax)
        .value("sigmoid", RouterFunction::Sigmoid)
        .value("softmax_of_top_k", RouterFunction::SoftmaxOfTopK)
        .value("sqrt_softplus", RouterFunction::SqrtSoftplus);
    nb::enum_<QKNorm>(m, "QKNorm")
        .value("none", QKNorm::None)
        .value("per_head", QKNorm::PerHead)
        .value("whole", QKNorm::Whole);
    nb::enum_<OutputGate>(m, "OutputGate")
        .value("none", OutputGate::None)
        .value("in_q", OutputGate::InQ)
        .value("per_head", OutputGate::PerHead)
        .value("per_number", OutputGate::PerNumber);
    nb::enum_<KvType>(m, "KvType").value("f16", KvType::F16).value("q8_0", KvType::Q8_0).value("k6v4", KvType::K6V4);
    nb::enum_<FrontKind>(m, "FrontKind")
        .value("none", FrontKind::None)
        .value("gated_fusion", FrontKind::GatedFusion)
        .value("concatenated_input", FrontKind::ConcatenatedInput)
        .value("projected_input", FrontKind::ProjectedInput)
        .value("target_input", FrontKind::TargetInput);
}

void bind_blocks(nb::module_& m) {
    nb::class_<AttentionConfig>(m, "AttentionConfig", "Attention; see edgeinfer.models.Attention.")
        .def("__init__", &init_attention, nb::kw_only(), "n_in"_a, "n_heads"_a, "n_kv_heads"_a, "head_dim"_a, "rope"_a,
             "query_scales"_a, "window"_a, "soft_cap"_a, "qk_norm"_a, "key_bias"_a, "gate"_a = OutputGate::None,
             "gate_is_softplus"_a = false, "post_norm_epsilon"_a = 0.0f, "normed_values"_a = false,
             "keys_are_values"_a = false, "kv_of"_a = -1, "of_target"_a = false);
    nb::class_<DeltaNetConfig>(m, "DeltaNetConfig", "A gated delta net; see edgeinfer.models.GatedDeltaNet.")
        .def("__init__", &init_delta_net, nb::kw_only(), "n_key_heads"_a, "n_value_heads"_a, "head_dim"_a, "n_conv"_a,
             "modulo"_a, "joint_steps"_a);
    nb::class_<ShortConvConfig>(m, "ShortConvConfig", "A short convolution; see edgeinfer.models.ShortConv.")
        .def("__init__", &init_short_conv, nb::kw_only(), "n_channels"_a, "n_conv"_a);
    nb::class_<LatentConfig>(m, "LatentConfig", "Latent attention; see edgeinfer.models.LatentAttention.")
        .def("__init__", &init_latents, nb::kw_only(), "n_heads"_a, "n_plain"_a, "n_turned"_a, "n_latent"_a,
             "n_value"_a, "n_q_latent"_a, "rope"_a, "scale"_a);
    nb::class_<Mamba2Config>(m, "Mamba2Config", "Mamba2; see edgeinfer.models.Mamba2.")
        .def("__init__", &init_mamba2, nb::kw_only(), "n_heads"_a, "head_dim"_a, "n_groups"_a, "n_per_key"_a,
             "n_conv"_a);
    m.attr("MOST_EXPERTS_USED") = kMostUsed;
    m.attr("MOST_EXPERT_GROUPS") = kMostExpertGroups;
    nb::class_<DenseConfig>(m, "DenseConfig", "A gated feed-forward network; see edgeinfer.models.Dense.")
        .def("__init__", &init_dense, nb::kw_only(), "n_ff"_a, "activation"_a, "post_norm_epsilon"_a = 0.0f,
             "is_plain"_a = false);
    nb::class_<NoFeedForwardConfig>(m, "NoFeedForwardConfig", "No network; see edgeinfer.models.NoFeedForward.")
        .def(nb::init<>());
    nb::class_<ExpertsConfig>(m, "ExpertsConfig", "A mixture of experts; see edgeinfer.models.Experts.")
        .def("__init__", &init_experts, nb::kw_only(), "n_ff"_a, "n_experts"_a, "n_used"_a, "router_function"_a,
             "is_normalised"_a, "weight_scale"_a, "n_groups"_a, "n_used_groups"_a, "activation"_a, "n_ff_shared"_a,
             "router_scale"_a = 1.0f, "own_inputs"_a = false, "n_latent"_a = 0, "groups_by_best"_a = false);
    nb::class_<LayerEndConfig>(m, "LayerEndConfig", "What ends a layer; see edgeinfer.models.LayerEnd.")
        .def(
            "__init__",
            [](LayerEndConfig* end, int n_inputs, Activation activation) {
                if (n_inputs < 0 || n_inputs % 16) throw nb::value_error("n_inputs must be a multiple of 16");
                new (end) LayerEndConfig{n_inputs, activation};
            },
            nb::kw_only(), "n_inputs"_a, "activation"_a);
}

}  // namespace

void bind_config(nb::module_& m) {
    bind_enums(m);
    bind_blocks(m);
    nb::class_<FrontConfig>(m, "FrontConfig", "What a draft head begins with; see head.h.")
        .def(
            "__init__",
            [](FrontConfig* front, FrontKind kind, bool normed_residual) {
                new (front) FrontConfig{kind, normed_residual};
            },
            "kind"_a = FrontKind::None, "normed_residual"_a = false);
    nb::class_<DecoderConfig>(m, "DecoderConfig", "Sizes and layers; see recipe.h and edgeinfer.models.ModelSpec.")
        .def("__init__", &init_config, nb::kw_only(), "n_vocab"_a, "n_logits"_a, "n_embd"_a, "n_ctx"_a, "n_batch"_a,
             "norm_epsilon"_a)
        .def("add_rope", &add_rope, "halves"_a, "frequencies"_a, "magnitude"_a,
             "long_frequencies"_a = std::vector<double>(), "n_ctx"_a = 0, "Gives its number.")
        .def("add_query_scales", &add_query_scales, "values"_a, "n_positions"_a, "Gives their number.")
        .def("add_layer", &add_layer, "mixer"_a, "ffn"_a, "end"_a = nb::none(), "is_beside"_a = false)
        .def(
            "set_layer_inputs",
            [](DecoderConfig& config, int n_inputs, float projection_scale, float table_scale) {
                if (n_inputs < 16 || n_inputs % 16 || !config.layers.empty())
                    throw nb::value_error("n_inputs must be a multiple of 16, and is set before there are layers");
                config.layer_inputs = {n_inputs, projection_scale, table_scale};
            },
            "n_inputs"_a, "projection_scale"_a, "table_scale"_a,
            "What each layer has for each token; see edgeinfer.models.LayerInputs.")
        .def(
            "set_target",
            [](DecoderConfig& config, int n_target) {
                if (n_target < 1) throw nb::value_error("n_target must be positive");
                config.n_target = n_target;
            },
            "n_target"_a, "Numbers of the embeddings and features that FrontKind.target_input joins.")
        .def(
            "set_clusters",
            [](DecoderConfig& config, int n, int n_used) {
                if (n < 1 || n_used < 1 || n_used > n || config.n_logits % n)
                    throw nb::value_error(
                        "n clusters divide the rows of the output matrix, and n_used are some of them");
                config.clusters = {n, n_used};
            },
            "n"_a, "n_used"_a, "Clusters of the rows of the output matrix; see edgeinfer.models.draft_head.Clusters.")
        .def_prop_ro("reads_target", &DecoderConfig::reads_target)
        .def(
            "add_inputs",
            [](DecoderConfig& config, int format, int n_in) { config.inputs.add(packed_format(format, n_in), n_in); },
            "format"_a, "n_in"_a, "Make room for the inputs of matrices of a packed format.")
        .def(
            "add_inputs_of_output", [](DecoderConfig& config) { config.inputs.add_any(config.n_embd); },
            "Make room for the inputs of an output matrix that may have any format.")
        .def_rw("embedding_scale", &DecoderConfig::embedding_scale)
        .def_rw("residual_scale", &DecoderConfig::residual_scale)
        .def_rw("logit_scale", &DecoderConfig::logit_scale)
        .def_rw("logit_soft_cap", &DecoderConfig::logit_soft_cap)
        .def_rw("embedding_norm", &DecoderConfig::embedding_norm)
        .def_rw("centred_output", &DecoderConfig::centred_output)
        .def(
            "kv_bytes",
            [](const DecoderConfig& config, KvType type, int n_ctx, int n_sequences, int n_positions) {
                return SequencePool::n_bytes(pool_sizes(config, type, n_ctx, n_sequences, n_positions));
            },
            "type"_a, "n_ctx"_a, "n_sequences"_a = 1, "n_positions"_a = 0)
        .def_prop_ro(
            "most_rows_of_tree",
            [](const DecoderConfig& config) {
                return SequencePool::most_rows_of_tree(config.sequence_sizes(KvType::F16, config.n_ctx));
            },
            "Tokens of the largest tree that recurrent layers run.")
        .def(
            "activation_bytes",
            [](const DecoderConfig& config, const FrontConfig& front, int n_threads) {
                return Memory::size_of(Activations::n_bytes(config, front.kind, n_threads));
            },
            "front"_a, "n_threads"_a);
}

void bind_sequence_state(nb::module_& m) {
    nb::class_<SequencePool>(m, "SequencePool",
                             "The memory of the sequences of a model, and sequences that are kept in it for later.")
        .def("__init__", &init_pool, "config"_a, "type"_a, "n_ctx"_a, "n_sequences"_a = 1, "n_positions"_a = 0,
             "checkpoint_bytes"_a = RecurrentMemory::kCheckpointBytes, "row_bytes"_a = RecurrentMemory::kRowBytes,
             "checkpoint_bytes: of earlier states of recurrent layers, for each sequence that runs, together; those of "
             "one each, and two, at least.  row_bytes: of what is kept of the tokens of a tree; 16 tokens at least.")
        .def(
            "has_free", &has_free, "wants"_a, "by_batches"_a,
            "Whether so many slots after the committed ones of sequences can be had now; by_batches: committed n_batch "
            "at a time.")
        .def("parked", &SequencePool::parked, "Numbers of the parked sequences, used longest ago first.")
        .def("forget", &SequencePool::forget, "number"_a)
        .def_prop_ro("n_positions", [](const SequencePool& pool) { return pool.sizes().n_positions; })
        .def_prop_ro("used_bytes", &SequencePool::used_bytes)
        .def_prop_ro("window_bytes", &SequencePool::window_bytes)
        .def_prop_ro("recurrent_bytes", &SequencePool::recurrent_bytes);
    m.def(
        "byte_sum", [](Bytes bytes, uint64_t before) { return byte_sum(bytes.data(), bytes.size(), before); },
        "bytes"_a, "before"_a = 0, "A checksum of bytes, after that of what came before them.");
    nb::class_<SequenceState> state(m, "SequenceState", "The state of a sequence in all layers.");
    bind_segments(state);
    state.def("__init__", &init_sequence, "config"_a, "type"_a, "n_ctx"_a, "In a pool of its own.")
        .def(nb::init<std::shared_ptr<SequencePool>>(), "pool"_a)
        .def("has_room", &SequenceState::has_room, "n_tokens"_a,
             "Whether so many tokens can be there, those after n_past not committed.")
        .def("commit", &commit, "path"_a)
        .def(
            "can_begin",
            [](const SequenceState& sequence, Ints parents, int n_pending, int n) {
                if (n_pending < 0 || n < 0 || parents.size() != static_cast<size_t>(n_pending + n))
                    throw nb::value_error("can_begin: arguments do not fit together");
                return sequence.can_begin(parents.data(), n_pending, n);
            },
            "parents"_a, "n_pending"_a, "n"_a,
            "Whether recurrent layers can run n rows after the pending ones; parents of all: a row, or -1.")
        .def_prop_ro("most_rows_of_tree", &SequenceState::most_rows_of_tree,
                     "Tokens of the largest tree that recurrent layers run.")
        .def("can_commit", &SequenceState::can_commit, "n"_a,
             "Whether the first n pending rows can be committed: of a long chain in recurrent layers all, or none.")
        .def("mark", &SequenceState::mark, "A request begins here, which may come back to it.")
        .def("truncate", &truncate_to, "n_past"_a,
             "Keep the first n_past tokens, or fewer where a window before them is gone; gives how many.")
        .def("reach", &reach, "n_past"_a, "The length that truncate would reach.")
        .def("park", &SequenceState::park,
             "Keep the committed sequence in the pool, as long as its memory is not needed; gives its number.")
        .def("reach_parked", &SequenceState::reach_parked, "number"_a, "n_past"_a,
             "The length that resume would reach; 0 for a sequence that is forgotten.")
        .def("resume", &resume, "number"_a, "n_past"_a,
             "Commit the first n_past tokens of a parked sequence, or fewer, and only them; gives how many.")
        .def("share", &share, "other"_a, "n_past"_a, "The same of another sequence of the pool; see shared_reach.")
        .def("shared_reach", &shared_reach, "n_past"_a,
             "The length that another sequence that shares this one reaches.")
        .def("close", &SequenceState::close, "Give the memory back, once no pass runs.")
        .def_prop_ro("n_past", &SequenceState::n_past);
}
