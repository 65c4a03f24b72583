// What a forward pass computes on its way, as views of one piece of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "experts/tasks.h"
#include "kernels/matrix.h"
#include "recipe.h"

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
constexpr size_t padded(int n) { return round_up(static_cast<size_t>(n), 16); }

// Cuts one piece of memory into 64-byte aligned arrays; without memory it only counts.
class Cutter {
public:
    explicit Cutter(uint8_t* base) : base_(base) {}
    template <class T>
    T* take(size_t n) {
        T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ += round_up(n * sizeof(T), 64);
        return p;
    }
    size_t used() const { return used_; }

    // What two functions take lies at the same place: things that are not needed at the same time.
    template <class First, class Second>
    void share(const First& first, const Second& second) {
        const size_t start = used_;
        first();
        const size_t end = used_;
        used_ = start;
        second();
        used_ = std::max(used_, end);
    }

private:
    uint8_t* base_;
    size_t used_ = 0;
};

// Inputs of matrix products for n tokens, in the kinds that have a size.
Inputs take_inputs(Cutter& cutter, size_t n, const InputSizes& sizes);

// Rows of a pass for which the experts of the next layer are predicted, at most.
constexpr int kPredictedRows = 8;

// What a prediction computes (experts/predictor.h). n: rows, kPredictedRows at most.
struct PredictedRows {
    float *h, *products;  // (n, ld_embd), (n, ld_router)
    float* scores;        // (2, ld_router)
    int32_t* chosen;      // (n, ld_router)
    Inputs inputs;
};

// What routers and experts compute, in models that have any. Rows of experts: of one expert after the other those of the
// pass that need it, n_batch * n_used in all; the shared network has n_batch rows of its own.
struct ExpertRows {
    void take(const DecoderConfig& config, int n_threads, Cutter& cutter);
    // What lives from the routing of a layer to the end of it.
    void take_rows(const DecoderConfig& config, Cutter& cutter);
    void take_predicted(const DecoderConfig& config, Cutter& cutter);
    // The choices of a layer, the index-th of those with experts: (n_batch, n_used), n_used numbers apart.
    int32_t* chosen_of(int index) const { return chosen + static_cast<size_t>(index) * chosen_stride; }

    size_t chosen_stride, ld_router, ld_ff, ld_out, ld_shared;
    int32_t* chosen;           // (n_layers with experts, n_batch, n_used), until the next pass
    float* router;             // (n_batch, ld_router)
    float* weights;            // (n_batch, n_used)
    int32_t* column;           // of each row of experts, its row of the pass
    int32_t* place;            // (n_batch, n_used): rows of experts
    int32_t *counts, *needed;  // (n_experts,): rows of each; those with rows
    float *gate, *out;         // rows of experts, (ld_ff) and (ld_out)
    float *shared_gate, *shared_out;
    Inputs inputs, shared_inputs;  // of down
    // Where the router and the shared network have norms of their own: (n_batch, ld_embd), and what is made of them.
    float *router_x, *shared_x;
    Inputs router_inputs, shared_gate_inputs;
    // Of experts with latent rows: (n_batch, ld_latent), first what they read, then their sums; and what is made of both.
    size_t ld_latent;
    float* latent;
    Inputs latent_inputs;
    std::vector<float*> up, scores;  // for each thread: (kTokensTogether, kMostTaskGroups * kRows), and (ld_router,)
    PredictedRows predicted;
    std::unique_ptr<ExpertTasks> tasks;
    std::unique_ptr<std::atomic<int>> n_routed;  // tasks of routing that are done in this layer
};

// What latent attention computes. inputs: of one head after the other, for all tokens.
struct LatentRows {
    void take(const DecoderConfig& config, Cutter& cutter);

    size_t ld_q_latent, ld_q, ld_row, ld_query, ld_given, ld_y;
    float *q_latent, *q, *row, *y;  // (n_batch, ld)
    float *queries, *given;         // (n_batch, n_heads, ld)
    Inputs inputs;
};

// Rows of n_batch tokens, each padded to 16 floats. Layers of different sizes share them: rows are as long as those of the
// largest. What a mixer computes lies where the feed-forward network has its rows, since neither reads the other's: what
// pads a row there is cleared by those who read it. Zeros pad x and h, and nothing overwrites them.
struct Activations {
    Activations(const DecoderConfig& config, FrontKind front, int n_threads, Cutter& cutter);

    static size_t n_bytes(const DecoderConfig& config, FrontKind front, int n_threads) {
        Cutter counter(nullptr);
        Activations(config, front, n_threads, counter);
        return counter.used();
    }

    size_t ld_embd, ld_q, ld_kv, ld_ff, ld_scores, ld_value, ld_joined;
    float *x, *h, *q, *k, *v, *attn, *gate;
    float* x_before;  // x as a mixer read it that another one stands beside
    float* up;        // of kTokensTogether tokens; each task has its own of the n_ff
    // Of recurrent layers: what goes into their convolutions, and q, k, v after it; gates; raw b and a, and betas and decays,
    // each in halves of a row; k q. zeros: a row of them. Of Mamba2 u is the first product, z in front, and steps are step
    // sizes and decays.
    size_t ld_u, ld_z, ld_steps, ld_kq;
    float *u, *mixed, *z, *raw_steps, *steps, *kq, *zeros;
    float* gated_q;  // (n_batch, 2 ld_q), queries and gates of attention
    size_t ld_gates;
    float *gates, *ones;  // (n_batch, ld_gates), gates of their own; (ld_embd,), where embeddings are normed
    // (n_batch, ld_layer_inputs): of one layer after the other; rows of their table, one for each thread.
    size_t ld_layer_inputs;
    float* layer_inputs;
    std::vector<float*> own_table_row;
    float *feature, *x_of_feature, *x_of_token, *joined;  // of the fronts of heads
    // Of an output matrix with clusters: (n_batch, ld_clusters) scores, (n_batch, n_used) the chosen ones, ascending; and
    // for each thread the products of the row groups that a cluster is in.
    size_t ld_clusters;
    float* cluster_scores;
    int32_t* clusters;
    std::vector<float*> own_cluster;
    std::vector<int32_t*> own_order;  // (ld_clusters,): clusters, the best ones first
    struct Angles {
        size_t n_pairs;
        float *cosine, *sine;  // (n_batch, n_pairs)
    };
    std::vector<Angles> angles;  // one a rope
    // Of keys that are held without their bias, one a rope; none for a model without key biases. The same in all passes.
    struct RopeTables {
        size_t ld;
        float *tiles, *within;  // see RopeTables
    };
    std::vector<RopeTables> rope_tables;
    int32_t *position, *sequence;  // (n_batch,): logical positions; which sequence of the pass
    Inputs inputs;
    // For each thread: what it needs alone. With one token, every thread prepares the inputs for itself, which is
    // cheaper than waiting for one that does it.
    std::vector<Inputs> own_inputs;
    std::vector<float*> own_h, own_head, scores, sums;  // scores and sums: (kTaskRows, ld)
    std::vector<Inputs> own_queries;                    // (kTaskRows, head_dim), for keys of Q8_0 and K6V4
    std::vector<float*> offsets;                        // (kTaskRows, ld_value + 16), for keys of K6V4
    std::vector<int32_t*> path;                         // (kTaskRows, n_batch)
    std::vector<float*> own_blocks;                     // blocks of the states of a head
    LatentRows latents;
    ExpertRows experts;

private:
    size_t most_in(const DecoderConfig& config) const;
    void take_rows(const DecoderConfig& config, Cutter& cutter);
    void take_turns(const DecoderConfig& config, Cutter& cutter);
    void take_attention(const DecoderConfig& config, Cutter& cutter);
    void take_recurrence(const DecoderConfig& config, Cutter& cutter);
    void take_feed_forward(const DecoderConfig& config, Cutter& cutter);
    void take_front(const DecoderConfig& config, Cutter& cutter);
    void take_clusters(const DecoderConfig& config, int n_threads, Cutter& cutter);
    void take_own(const DecoderConfig& config, size_t most_in, Cutter& cutter);
};
