// A decoder-only transformer with its KV cache: what runs behind Session.forward.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <thread>
#include <vector>

#include "kernels.h"
#include "platform.h"
#include "pool.h"
#include "text_state.h"

// The angles of a rotary embedding; pair i turns by frequencies[i] radians a position.
struct Rope {
    std::vector<double> frequencies;
    double magnitude;
};

// What differs between the attention of layers. rope: index of DecoderConfig::ropes, or -1; window: 0 for none.
struct LayerAttention {
    int rope, window;
};

enum class Activation : int { Silu, GeluTanh, Relu2 };
enum class QKNorm : int { None, PerHead, Whole };

// Sizes and recipe, as models/spec.py describes them. Scales of 1 and caps of 0 change nothing.
struct DecoderConfig {
    int n_vocab, n_layers, n_embd, n_ff, n_heads, n_kv_heads, head_dim;
    int n_ctx, n_batch;
    float norm_epsilon;
    bool rope_halves;  // pairs (i, i + n/2), else (2i, 2i + 1)
    std::vector<Rope> ropes;
    std::vector<LayerAttention> attention;  // (n_layers,)
    std::vector<float> query_scales;        // of positions 0..n-1, n..2n-1, ...; only for a Decoder
    int positions_per_scale = 1;            // n
    Activation activation = Activation::Silu;
    QKNorm qk_norm = QKNorm::None;
    float embedding_scale = 1, residual_scale = 1, logit_scale = 1;
    float attention_soft_cap = 0, logit_soft_cap = 0;
    KvType kv_type = KvType::F16;
    int n_logits = n_vocab;  // rows of the output matrix, of the first tokens where there are more
    bool gated = false;      // tokens come with features, see Gate
    bool paired = false;     // too, see Pair
    bool normed_residual = false;
    int n_combined = 0;  // numbers of a row that Decoder::combine takes, see Combine
    int n_normed = 0;    // of these, that are normed together

    bool has_features() const { return gated || paired; }
    TextSizes text_sizes() const;
};

// Norms and biases are null where the model has none.
struct LayerWeights {
    const float *attn_norm = nullptr, *ffn_norm = nullptr, *attn_post_norm = nullptr, *ffn_post_norm = nullptr;
    const float *attn_sub_norm = nullptr, *ffn_sub_norm = nullptr;
    const float *q_norm = nullptr, *k_norm = nullptr;
    Matrix q, k, v, attn_output, gate, up, down;
    const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr, *attn_output_bias = nullptr;
};

// What a draft head begins with in place of the embedding e of a token alone, f being the feature that comes with it:
// a = feature f, b = silu(token norm(e)), x = s a + (1 - s) b with s = sigmoid(mix [a; b]) (Dovetail's dynamic gating
// fusion, Zhang et al., arXiv:2412.18934).
struct Gate {
    Matrix feature, token, mix;
    const float* token_norm = nullptr;
};

// What the one layer of another kind of draft head attends from: [norm(e); norm(f)], and x is f, or norm(f) with
// normed_residual (EAGLE-3, Li et al., arXiv:2503.01840).
struct Pair {
    const float *token_norm = nullptr, *feature_norm = nullptr;
};

// What makes f of the target's rows of several layers side by side, once: matrix norm(row), each n_normed numbers of the
// row having a norm of their own. n_normed is all of it, or a multiple of 16.
struct Combine {
    Matrix matrix;
    const float* norm = nullptr;
};

// The rows of the embedding matrix stay where they are, as GGUF stores them.
struct Embedding {
    Format format = Format::F32;
    const uint8_t* data = nullptr;
    size_t row_bytes = 0;
};

// Names of the matrices and vectors, for those who fill them in.
enum class Role : int {
    AttnNorm,
    AttnPostNorm,
    AttnSubNorm,
    FfnSubNorm,
    FfnPostNorm,
    QNorm,
    KNorm,
    Q,
    K,
    V,
    QBias,
    KBias,
    VBias,
    AttnOutput,
    AttnOutputBias,
    FfnNorm,
    Gate,
    Up,
    Down,
    OutputNorm,
    Output,
    GateFeature,
    GateTokenNorm,
    GateToken,
    GateMix,
    PairTokenNorm,
    PairFeatureNorm,
    Combine,
    CombineNorm
};

class Decoder {
public:
    // weight_bytes: of all packed weights. packed: null, or these bytes as weights() of another decoder gave them; they
    // must outlive this one; set_vector then gets no sources, and nothing is to be packed. beside: null, or one that works
    // by turns with this one: of as many threads, they share these. Where each had its own, those of one would wait awake
    // on the cores that the other's are woken for.
    Decoder(const DecoderConfig& config, const Kernels& kernels, int n_threads, size_t weight_bytes,
            const uint8_t* packed = nullptr, const Decoder* beside = nullptr);
    ~Decoder();

    // Makes room for a matrix (n_out, n_in); layer is ignored for Output and those of a head.
    void set_matrix(Role role, int layer, Format format, int n_out, int n_in);
    // Packs n_rows of it from first_row on, a multiple of 16, that lie at source as GGUF stores them. of: their format;
    // those of another than the matrix's are rounded to it, which must be Q4_0. scale: of I2_S, which has one for all rows.
    void pack_rows(Role role, int layer, int first_row, int n_rows, Format of, const uint8_t* source, float scale);
    Matrix& matrix(Role role, int layer);
    void set_vector(Role role, int layer, const float* source, int n);
    void set_embedding(Format format, const uint8_t* source, size_t row_bytes);
    // The other's output matrix is this one's too; it must outlive this decoder.
    void share_output(const Decoder& other) { output_ = other.output_; }
    const Matrix& output() const { return output_; }

    // Runs n <= n_batch tokens behind n_pending ones of the forwards before, that are not committed. parents:
    // (n_pending + n,), the row that each of both follows, or -1 for the committed text; unless all are a chain, they
    // are n_batch at most. features: (n, n_embd) where the config has any. logits: (n_rows, n_logits) for these rows
    // of the n. taps: (n_taps, n, n_embd) with a distance of tap_stride floats between taps, the residual stream after
    // these layers; layer n_layers stands for what the output matrix reads. poll is called by the calling thread now
    // and then, and stops the pass by giving true. Gives false if the pass was stopped; the committed text is as before
    // in any case.
    bool forward(const int32_t* tokens, const int32_t* parents, int n, int n_pending, const float* features,
                 const int32_t* rows, int n_rows, float* logits, const int32_t* layers, int n_taps, float* taps,
                 size_t tap_stride, const std::function<bool()>& poll);

    // How products read the weights, which changes no bits; it may be changed between passes.
    Reading& reading() { return reading_; }
    // Seconds that a part of a pass of n <= n_batch tokens takes: every n_parts-th layer, from number `part` on, and as much
    // of the output matrix; for a decoder without features. What is committed stays, what is pending is lost.
    double seconds_of_part(int n, int n_parts, int part);
    // Bytes of the weights that it reads.
    size_t part_bytes(int n_parts, int part) const;

    // Features (n, n_embd) of rows (n, n_combined) of the target, n <= n_batch, see Combine.
    void combine(const float* rows, int n, float* features);

    // The committed text. commit moves these rows of the last forward, a path, to where sequential decoding would have
    // put them.
    TextState& text() { return text_; }
    const TextState& text() const { return text_; }
    void commit(const int32_t* path, int n) { text_.commit(path, n); }
    int n_past() const { return text_.n_past(); }

    void interrupt() { stop_.store(true, std::memory_order_relaxed); }

    const DecoderConfig& config() const { return config_; }
    const Kernels& kernels() const { return kernels_; }
    const uint8_t* weights() const { return packed_ ? packed_ : weights_.data(); }
    bool is_mapped() const { return packed_ != nullptr; }
    size_t weight_bytes() const { return weight_bytes_; }
    size_t kv_bytes() const { return text_.used_bytes(); }
    size_t activation_bytes() const { return activations_.size(); }

    static size_t activation_bytes(const DecoderConfig& config, int n_threads);

private:
    struct Buffers;  // the activations, as views of one piece of memory
    struct Pass;     // the arguments of one forward

    void run(const Pass& pass, int thread);
    void layer(const Pass& pass, int thread, const LayerWeights& w, int index);
    void tap(const Pass& pass, int thread, const float* norm, float* out);
    void embed(const Pass& pass, int thread);
    void fuse(const Pass& pass, int thread);
    void pair(const Pass& pass, int thread);
    void multiply(const Pass& pass, int thread, const Matrix& w, const Inputs& inputs, float* y, size_t ldy);
    Inputs inputs_of(const Pass& pass, int thread, int n_in, const float* x, size_t ldx) const;
    void prepare(const Inputs& inputs, int c, std::initializer_list<const Matrix*> readers) const;
    Inputs plain_inputs(const Pass& pass, int thread, const float* x, size_t ldx,
                        std::initializer_list<const Matrix*> readers);
    Inputs normed_inputs(const Pass& pass, int thread, const float* norm, const int32_t* rows, int n,
                         std::initializer_list<const Matrix*> readers);
    void project_qkv(const Pass& pass, int thread, const LayerWeights& w, const Inputs& inputs);
    void norm_queries_and_keys(const Pass& pass, int thread, const LayerWeights& w);
    void norm_heads(int thread, const float* norm, float* heads, int n_heads) const;
    void rotate_and_store(const Pass& pass, int thread, const LayerWeights& w, int index);
    void attend(const Pass& pass, int thread, int index);
    AttentionRow attention_row(const Pass& pass, int thread, int index, int c, int head, int r);
    void add_projection(const Pass& pass, int thread, float* y, size_t ldy, const float* sub_norm, const Matrix& w,
                        const float* bias, const float* post_norm);
    void feed_forward(const Pass& pass, int thread, const LayerWeights& w, const Inputs& inputs);
    void head(const Pass& pass, int thread, const Matrix& output);
    template <class Task>
    void for_tasks(const Pass& pass, int thread, int n_tasks, const Task& task);
    template <class Item>
    void for_items(const Pass& pass, int thread, int n_items, const Item& item);

    Matrix part_of_output(int n_parts, int part) const;
    size_t take_weights(size_t n_bytes);
    void map_weights() const;
    void wait_for_weights();

    DecoderConfig config_;
    const Kernels& kernels_;
    Reading reading_ = known_reading;
    std::shared_ptr<Pool> pool_;
    Memory weights_, activations_;
    TextState text_;
    size_t weight_bytes_, weights_taken_ = 0;
    const uint8_t* packed_;
    std::vector<LayerWeights> layers_;
    const float* output_norm_ = nullptr;
    Matrix output_;
    Gate gate_;
    Pair pair_;
    Combine combine_;
    Embedding embedding_;
    std::unique_ptr<Buffers> buffers_;
    std::atomic<bool> stop_{false}, closing_{false};
    std::thread mapping_;  // of packed weights: until the first pass, while the caller prepares what else it needs
};
