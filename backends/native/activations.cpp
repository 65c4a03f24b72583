#include "activations.h"

#include <algorithm>

#include "kernels/kernels.h"
#include "state_columns.h"

Inputs take_inputs(Cutter& cutter, size_t n, const InputSizes& sizes) {
    const size_t by32 = n * static_cast<size_t>(sizes.by32), by256 = n * static_cast<size_t>(sizes.by256);
    const size_t n_by256 = by256 / 256 + (by256 ? 1 : 0), n_by_token = sizes.by_token ? n : 0;
    Inputs inputs;
    inputs.q32 = cutter.take<int8_t>(by32);
    inputs.scale32 = cutter.take<float>(by32 / 32);
    inputs.sum32 = cutter.take<int32_t>(by32 / 32);
    inputs.centre32 = cutter.take<int32_t>(by32 / 32);
    inputs.q256 = cutter.take<int8_t>(by256);
    inputs.scale256 = cutter.take<float>(n_by256);
    inputs.centre16 = cutter.take<int32_t>(by256 / 16);
    inputs.sums16 = cutter.take<int16_t>(by256 / 16);
    inputs.sums32 = cutter.take<int16_t>(by256 / 32);
    inputs.fits_int16 = cutter.take<uint8_t>(n_by256);
    inputs.q_token = cutter.take<int8_t>(n * static_cast<size_t>(sizes.by_token));
    inputs.scale_token = cutter.take<float>(n_by_token);
    inputs.sum_token = cutter.take<int32_t>(n_by_token);
    return inputs;
}

Activations::Activations(const DecoderConfig& c, FrontKind front, int n_threads, Cutter& cutter)
    : ld_embd(padded(c.n_embd)),
      ld_q(padded(c.most_of_attention([](const AttentionConfig& a) { return a.n_q(); }))),
      ld_kv(padded(c.most_of_attention([](const AttentionConfig& a) { return a.n_kv(); }))),
      ld_ff(padded(c.most([](const LayerConfig& l) {
          return std::max(l.dense() ? l.dense()->n_ff : 0, l.end ? l.end->n_inputs : 0);
      }))),
      ld_scores(padded(c.n_ctx) + 16),
      ld_value(std::max(padded(c.most_of_attention([](const AttentionConfig& a) { return a.head_dim; })),
                        padded(c.most_of_latents([](const LatentConfig& l) { return l.n_latent; })))),
      ld_joined(front == FrontKind::None ? 0 : padded(2 * c.n_feature())),
      ld_u(std::max({padded(c.most_of_delta_nets([](const DeltaNetConfig& d) { return d.n_channels(); })),
                     padded(c.most_of_mamba2([](const Mamba2Config& m) { return m.n_input_rows(); })),
                     padded(c.most_of_short_convs([](const ShortConvConfig& s) { return 3 * s.n_channels; }))})),
      ld_z(std::max(padded(c.most_of_delta_nets([](const DeltaNetConfig& d) { return d.n_v(); })),
                    padded(c.most_of_short_convs([](const ShortConvConfig& s) { return s.n_channels; })))),
      ld_steps(2 * std::max(padded(c.most_of_delta_nets([](const DeltaNetConfig& d) { return d.n_value_heads; })),
                            padded(c.most_of_mamba2([](const Mamba2Config& m) { return m.n_heads; })))),
      ld_kq(std::max(padded(c.most_of_delta_nets([](const DeltaNetConfig& d) { return d.n_key_heads; })),
                     padded(c.most_of_mamba2([](const Mamba2Config& m) { return m.n_groups; })))),
      ld_gates(padded(c.most_of_attention([](const AttentionConfig& a) { return a.n_gate(); }))),
      ld_layer_inputs(padded(c.n_layer_inputs())),
      ld_clusters(padded(c.clusters.n)) {
    take_rows(c, cutter);
    if (c.has_key_bias()) take_turns(c, cutter);
    if (front != FrontKind::None) take_front(c, cutter);
    if (c.clusters.n) take_clusters(c, n_threads, cutter);
    inputs = take_inputs(cutter, static_cast<size_t>(c.n_batch), c.inputs);
    for (int i = 0; i < n_threads; i++) take_own(c, most_in(c), cutter);
    if (c.has_experts()) experts.take(c, n_threads, cutter);
    zeros = cutter.take<float>(ld_u);
    const auto take_mixer = [&] {
        cutter.share([&] { take_attention(c, cutter); }, [&] { take_recurrence(c, cutter); });
        latents.take(c, cutter);
    };
    cutter.share(take_mixer, [&] { take_feed_forward(c, cutter); });
}

// The longest row that a thread prepares alone.
size_t Activations::most_in(const DecoderConfig& c) const {
    const size_t of_latents = padded(c.most_of_latents([](const LatentConfig& l) { return l.n_q_latent; }));
    return std::max({ld_embd, ld_q, ld_ff, ld_joined, of_latents});
}

void Activations::take_rows(const DecoderConfig& c, Cutter& cutter) {
    const size_t n = static_cast<size_t>(c.n_batch);
    x = cutter.take<float>(n * ld_embd);
    h = cutter.take<float>(n * ld_embd);
    x_before = cutter.take<float>(c.has_beside() ? n * ld_embd : 0);
    for (const Rope& rope : c.ropes) {
        const size_t n_pairs = rope.frequencies.size();
        angles.push_back({n_pairs, cutter.take<float>(n * n_pairs), cutter.take<float>(n * n_pairs)});
    }
    layer_inputs = cutter.take<float>(n * ld_layer_inputs);
    position = cutter.take<int32_t>(n);
    sequence = cutter.take<int32_t>(n);
    ones = cutter.take<float>(c.embedding_norm ? ld_embd : 0);
}

void Activations::take_turns(const DecoderConfig& c, Cutter& cutter) {
    const size_t n_tiles = padded(c.n_ctx) / 16;
    for (const Rope& rope : c.ropes) {
        const size_t ld = padded(static_cast<int>(rope.frequencies.size()));
        rope_tables.push_back({ld, cutter.take<float>(n_tiles * 2 * ld), cutter.take<float>(ld * 2 * 16)});
    }
}

void Activations::take_attention(const DecoderConfig& c, Cutter& cutter) {
    const size_t n = static_cast<size_t>(c.n_batch);
    q = cutter.take<float>(n * ld_q);
    k = cutter.take<float>(n * ld_kv);
    v = cutter.take<float>(n * ld_kv);
    attn = cutter.take<float>(n * ld_q);
    const bool is_gated =
        c.most_of_attention([](const AttentionConfig& a) { return static_cast<int>(a.gated_q()); }) > 0;
    gated_q = cutter.take<float>(is_gated ? 2 * n * ld_q : 0);
    gates = cutter.take<float>(n * ld_gates);
}

void Activations::take_recurrence(const DecoderConfig& c, Cutter& cutter) {
    const size_t n = static_cast<size_t>(c.n_batch);
    u = cutter.take<float>(n * ld_u);
    mixed = cutter.take<float>(ld_steps ? n * ld_u : 0);
    z = cutter.take<float>(n * ld_z);
    raw_steps = cutter.take<float>(n * ld_steps);
    steps = cutter.take<float>(n * ld_steps);
    kq = cutter.take<float>(n * ld_kq);
}

void Activations::take_feed_forward(const DecoderConfig& c, Cutter& cutter) {
    const size_t n = static_cast<size_t>(c.n_batch);
    cutter.share(
        [&] {
            gate = cutter.take<float>(n * ld_ff);
            up = cutter.take<float>(std::min(n, size_t{kTokensTogether}) * ld_ff);
        },
        [&] {
            if (c.has_experts()) experts.take_rows(c, cutter);
        });
}

void Activations::take_front(const DecoderConfig& c, Cutter& cutter) {
    const size_t n = static_cast<size_t>(c.n_batch);
    joined = cutter.take<float>(n * ld_joined);
    if (c.n_target) return;  // it is made in place there
    feature = cutter.take<float>(n * ld_embd);
    x_of_feature = cutter.take<float>(n * ld_embd);
    x_of_token = cutter.take<float>(n * ld_embd);
}

void Activations::take_clusters(const DecoderConfig& c, int n_threads, Cutter& cutter) {
    const size_t n = static_cast<size_t>(c.n_batch), n_each = static_cast<size_t>(c.n_logits / c.clusters.n);
    cluster_scores = cutter.take<float>(n * ld_clusters);
    clusters = cutter.take<int32_t>(n * static_cast<size_t>(c.clusters.n_used));
    for (int i = 0; i < n_threads; i++) {
        own_cluster.push_back(cutter.take<float>(round_up(n_each, kRows) + kRows));
        own_order.push_back(cutter.take<int32_t>(ld_clusters));
    }
}

void Activations::take_own(const DecoderConfig& c, size_t most_in, Cutter& cutter) {
    own_inputs.push_back(take_inputs(cutter, 1, c.inputs));
    own_h.push_back(cutter.take<float>(most_in));
    own_head.push_back(cutter.take<float>(ld_value));
    own_table_row.push_back(cutter.take<float>(ld_layer_inputs));
    scores.push_back(cutter.take<float>(kTaskRows * ld_scores));
    sums.push_back(cutter.take<float>(kTaskRows * ld_value));
    own_queries.push_back(
        take_inputs(cutter, kTaskRows, {.by32 = static_cast<int>(ld_value), .by_token = static_cast<int>(ld_value)}));
    offsets.push_back(cutter.take<float>(kTaskRows * (ld_value + 16)));
    path.push_back(cutter.take<int32_t>(kTaskRows * static_cast<size_t>(c.n_batch)));
    const int n_rows = std::max(c.most_of_delta_nets([](const DeltaNetConfig& d) { return d.head_dim; }),
                                c.most_of_mamba2([](const Mamba2Config& m) { return m.n_per_key; }));
    const int n_blocks = 1 + RecurrentState::kMostBlocks;
    own_blocks.push_back(cutter.take<float>(static_cast<size_t>(n_blocks * kStateColumns * n_rows)));
}

void LatentRows::take(const DecoderConfig& c, Cutter& cutter) {
    const auto most = [&](const auto& number) { return c.most_of_latents(number); };
    const size_t n = static_cast<size_t>(c.n_batch);
    const size_t n_heads = n * static_cast<size_t>(most([](const LatentConfig& l) { return l.n_heads; }));
    ld_q_latent = padded(most([](const LatentConfig& l) { return l.n_q_latent; }));
    ld_q = padded(most([](const LatentConfig& l) { return l.n_q(); }));
    ld_row = ld_query = padded(most([](const LatentConfig& l) { return l.n_row(); }));
    ld_given = padded(most([](const LatentConfig& l) { return l.n_latent; }));
    ld_y = padded(most([](const LatentConfig& l) { return l.n_heads * l.n_value; }));
    q_latent = cutter.take<float>(n * ld_q_latent);
    q = cutter.take<float>(n * ld_q);
    row = cutter.take<float>(n * ld_row);
    y = cutter.take<float>(n * ld_y);
    queries = cutter.take<float>(n_heads * ld_query);
    given = cutter.take<float>(n_heads * ld_given);
    const int most_in = most([](const LatentConfig& l) { return std::max(l.n_plain, l.n_latent); });
    inputs = take_inputs(cutter, n_heads, n_heads ? c.inputs.up_to(most_in) : InputSizes{});
}

void ExpertRows::take(const DecoderConfig& c, int n_threads, Cutter& cutter) {
    const auto most = [&](int ExpertsConfig::* number) {
        return static_cast<size_t>(c.most_of_experts([&](const ExpertsConfig& e) { return e.*number; }));
    };
    const size_t n = static_cast<size_t>(c.n_batch), n_experts = most(&ExpertsConfig::n_experts);
    const size_t n_used = most(&ExpertsConfig::n_used), n_rows = n * n_used;
    const size_t n_layers = static_cast<size_t>(
        std::count_if(c.layers.begin(), c.layers.end(), [](const LayerConfig& l) { return l.experts(); }));
    chosen_stride = n * n_used;
    ld_router = round_up(n_experts, 16);
    ld_ff = round_up(most(&ExpertsConfig::n_ff), 16);
    ld_shared = round_up(most(&ExpertsConfig::n_ff_shared), 16);
    ld_latent = round_up(most(&ExpertsConfig::n_latent), 16);
    ld_out = std::max(padded(c.n_embd), ld_latent);
    chosen = cutter.take<int32_t>(n_layers * chosen_stride);
    router = cutter.take<float>(n * ld_router);
    weights = cutter.take<float>(n_rows);
    column = cutter.take<int32_t>(n_rows);
    place = cutter.take<int32_t>(n_rows);
    counts = cutter.take<int32_t>(n_experts);
    needed = cutter.take<int32_t>(n_experts);
    for (int i = 0; i < n_threads; i++) {
        up.push_back(cutter.take<float>(std::min(n_rows, size_t{kTokensTogether}) * kMostTaskGroups * kRows));
        scores.push_back(cutter.take<float>(2 * ld_router));
    }
    take_predicted(c, cutter);
    tasks = std::make_unique<ExpertTasks>(static_cast<int>(n_experts));
    n_routed = std::make_unique<std::atomic<int>>(0);
}

void ExpertRows::take_rows(const DecoderConfig& c, Cutter& cutter) {
    const size_t n = static_cast<size_t>(c.n_batch), n_rows = chosen_stride, ld_embd = padded(c.n_embd);
    gate = cutter.take<float>(n_rows * ld_ff);
    out = cutter.take<float>(n_rows * ld_out);
    inputs = take_inputs(cutter, n_rows, c.inputs.up_to(static_cast<int>(ld_ff)));
    if (ld_latent) {
        latent = cutter.take<float>(n * ld_latent);
        latent_inputs = take_inputs(cutter, n, c.inputs.up_to(static_cast<int>(ld_latent)));
    }
    if (c.most_of_experts([](const ExpertsConfig& e) { return static_cast<int>(e.own_inputs); })) {
        router_x = cutter.take<float>(n * ld_embd);
        shared_x = cutter.take<float>(n * ld_embd);
        router_inputs = take_inputs(cutter, n, c.inputs.up_to(c.n_embd));
        shared_gate_inputs = take_inputs(cutter, n, c.inputs.up_to(c.n_embd));
    }
    if (!ld_shared) return;
    shared_gate = cutter.take<float>(n * ld_shared);
    shared_out = cutter.take<float>(n * ld_embd);
    shared_inputs = take_inputs(cutter, n, c.inputs.up_to(static_cast<int>(ld_shared)));
}

void ExpertRows::take_predicted(const DecoderConfig& c, Cutter& cutter) {
    const size_t n = static_cast<size_t>(std::min(c.n_batch, kPredictedRows)), ld_embd = padded(c.n_embd);
    predicted.h = cutter.take<float>(n * ld_embd);
    predicted.products = cutter.take<float>(n * ld_router);
    predicted.scores = cutter.take<float>(2 * ld_router);
    predicted.chosen = cutter.take<int32_t>(n * ld_router);
    predicted.inputs = take_inputs(cutter, n, c.inputs.up_to(c.n_embd));
}
