#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>

#include "packing.h"
#include "platform.h"
#include "trigonometry.h"

namespace {

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
constexpr size_t padded(int n) { return round_up(static_cast<size_t>(n), 16); }

// Weights up to so many bytes are worth keeping in the outer caches: those of a draft head, used again in each step.
constexpr size_t kKept = size_t{16} << 20;

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

private:
    uint8_t* base_;
    size_t used_ = 0;
};

Inputs take_inputs(Cutter& cutter, size_t n, size_t n_in) {
    Inputs inputs;
    inputs.q32 = cutter.take<int8_t>(n * n_in);
    inputs.scale32 = cutter.take<float>(n * n_in / 32);
    inputs.sum32 = cutter.take<int32_t>(n * n_in / 32);
    inputs.q256 = cutter.take<int8_t>(n * n_in);
    inputs.scale256 = cutter.take<float>(n * n_in / 256 + 1);
    inputs.centre16 = cutter.take<int32_t>(n * n_in / 16);
    inputs.sums32 = cutter.take<int16_t>(n * n_in / 32);
    inputs.narrow256 = cutter.take<uint8_t>(n * n_in / 256 + 1);
    inputs.q_token = cutter.take<int8_t>(n * n_in);
    inputs.scale_token = cutter.take<float>(n);
    inputs.sum_token = cutter.take<int32_t>(n);
    return inputs;
}

}  // namespace

// Rows of n_batch tokens, each padded to 16 floats with zeros that nothing overwrites.
struct Decoder::Buffers {
    size_t ld_embd, ld_q, ld_kv, ld_ff, ld_scores, ld_value, ld_joined, ld_combined;
    float *x, *h, *q, *k, *v, *attn, *gate;
    float* up;  // of kColumnsTogether tokens; each task has its own of the n_ff
    float *feature, *x_of_feature, *x_of_token, *joined, *combined;  // of heads
    struct Angles {
        size_t n_pairs;
        float *cosine, *sine;  // (n_batch, n_pairs)
    };
    std::vector<Angles> angles;  // one a rope
    int32_t* position;           // (n_batch,)
    Inputs inputs;
    // For each thread: what it needs alone. With one token, every thread prepares the inputs for itself, which is
    // cheaper than waiting for one that does it.
    std::vector<Inputs> own_inputs;
    std::vector<float*> own_h, own_head, scores, sums;  // scores and sums: (kTaskRows, ld)
    std::vector<Inputs> own_queries;                    // (kTaskRows, head_dim), for keys of Q8_0
    std::vector<int32_t*> path;                         // (kTaskRows, n_batch)

    Buffers(const DecoderConfig& c, int n_threads, Cutter& cutter)
        : ld_embd(padded(c.n_embd)),
          ld_q(padded(c.n_heads * c.head_dim)),
          ld_kv(padded(c.n_kv_heads * c.head_dim)),
          ld_ff(padded(c.n_ff)),
          ld_scores(padded(c.n_ctx) + 16),
          ld_value(padded(c.head_dim)),
          ld_joined(c.has_features() ? padded(2 * c.n_embd) : 0),
          ld_combined(padded(c.n_combined)) {
        const size_t n = static_cast<size_t>(c.n_batch);
        x = cutter.take<float>(n * ld_embd);
        h = cutter.take<float>(n * ld_embd);
        q = cutter.take<float>(n * ld_q);
        k = cutter.take<float>(n * ld_kv);
        v = cutter.take<float>(n * ld_kv);
        attn = cutter.take<float>(n * ld_q);
        gate = cutter.take<float>(n * ld_ff);
        up = cutter.take<float>(std::min(n, size_t{kColumnsTogether}) * ld_ff);
        for (const Rope& rope : c.ropes) {
            const size_t n_pairs = rope.frequencies.size();
            angles.push_back({n_pairs, cutter.take<float>(n * n_pairs), cutter.take<float>(n * n_pairs)});
        }
        position = cutter.take<int32_t>(n);
        feature = cutter.take<float>(c.has_features() ? n * ld_embd : 0);
        x_of_feature = cutter.take<float>(c.has_features() ? n * ld_embd : 0);
        x_of_token = cutter.take<float>(c.has_features() ? n * ld_embd : 0);
        joined = cutter.take<float>(n * ld_joined);
        combined = cutter.take<float>(n * ld_combined);
        const size_t most_in = std::max({ld_embd, ld_q, ld_ff, ld_joined, ld_combined});
        inputs = take_inputs(cutter, n, most_in);
        for (int i = 0; i < n_threads; i++) {
            own_inputs.push_back(take_inputs(cutter, 1, most_in));
            own_h.push_back(cutter.take<float>(most_in));
            own_head.push_back(cutter.take<float>(padded(c.head_dim)));
            scores.push_back(cutter.take<float>(kTaskRows * ld_scores));
            sums.push_back(cutter.take<float>(kTaskRows * ld_value));
            own_queries.push_back(take_inputs(cutter, kTaskRows, static_cast<size_t>(c.head_dim)));
            path.push_back(cutter.take<int32_t>(kTaskRows * n));
        }
    }
};

TextSizes DecoderConfig::text_sizes() const {
    TextSizes sizes{kv_type, n_ctx, n_batch, {}};
    for (const LayerAttention& layer : attention) sizes.layers.push_back({n_kv_heads, head_dim, layer.window});
    return sizes;
}

struct Decoder::Pass {
    const int32_t *tokens, *parents;
    int n, n_pending;
    int base;  // committed slots
    bool chain;
    const float* features;
    const int32_t* rows;
    int n_rows;
    float* logits;
    const int32_t* tapped;
    int n_taps;
    float* taps;
    size_t tap_stride;
    const std::function<bool()>* poll;

    bool alone() const { return n == 1; }
    int slot(int c) const { return base + n_pending + c; }
};

Decoder::Decoder(const DecoderConfig& config, const Kernels& kernels, int n_threads, size_t weight_bytes,
                 const uint8_t* packed, const Decoder* beside)
    : config_(config),
      kernels_(kernels),
      pool_(beside && beside->pool_->size() == n_threads ? beside->pool_ : std::make_shared<Pool>(n_threads)),
      weights_(packed ? 0 : weight_bytes),
      activations_(activation_bytes(config, n_threads), false),
      text_(config.text_sizes()),
      weight_bytes_(weight_bytes),
      packed_(packed),
      layers_(static_cast<size_t>(std::max(1, config.n_layers))) {
    Cutter cutter(activations_.data());
    buffers_ = std::make_unique<Buffers>(config_, n_threads, cutter);
    if (packed) mapping_ = std::thread([this] { map_weights(); });
}

Decoder::~Decoder() {
    closing_ = true;
    if (mapping_.joinable()) mapping_.join();
}

size_t Decoder::activation_bytes(const DecoderConfig& config, int n_threads) {
    Cutter counter(nullptr);
    Buffers(config, n_threads, counter);
    return counter.used();
}

// Goes by pieces: meanwhile no other thread can map or unmap memory.
void Decoder::map_weights() const {
    constexpr size_t kPiece = size_t{1} << 20;
    for (size_t at = 0; at < weight_bytes_ && !closing_; at += kPiece) {
        map_now(packed_ + at, std::min(kPiece, weight_bytes_ - at));
    }
}

void Decoder::wait_for_weights() {
    if (mapping_.joinable()) mapping_.join();
}

// ---- weights ---------------------------------------------------------------------------------------------------

// Where in the packed weights the next n_bytes go.
size_t Decoder::take_weights(size_t n_bytes) {
    n_bytes = round_up(n_bytes, 64);
    if (n_bytes > weight_bytes_ - weights_taken_) throw std::bad_alloc();
    weights_taken_ += n_bytes;
    return weights_taken_ - n_bytes;
}

Matrix& Decoder::matrix(Role role, int layer) {
    LayerWeights& w = layers_[static_cast<size_t>(layer)];
    switch (role) {
        case Role::Q: return w.q;
        case Role::K: return w.k;
        case Role::V: return w.v;
        case Role::AttnOutput: return w.attn_output;
        case Role::Gate: return w.gate;
        case Role::Up: return w.up;
        case Role::Down: return w.down;
        case Role::GateFeature: return gate_.feature;
        case Role::GateToken: return gate_.token;
        case Role::GateMix: return gate_.mix;
        case Role::Combine: return combine_.matrix;
        default: return output_;
    }
}

void Decoder::set_matrix(Role role, int layer, Format format, int n_out, int n_in) {
    Matrix& m = matrix(role, layer);
    m.format = format;
    m.n_out = n_out;
    m.n_in = n_in;
    m.group_bytes = packed_group_bytes(format, n_in);
    m.is_kept = weight_bytes_ <= kKept;
    m.reading = &reading_;
    m.data = weights() + take_weights(m.group_bytes * static_cast<size_t>(m.n_groups()));
}

void Decoder::pack_rows(Role role, int layer, int first_row, int n_rows, Format of, const uint8_t* source,
                        float scale) {
    const Matrix& m = matrix(role, layer);
    uint8_t* data =
        weights_.data() + (m.data - weights_.data()) + static_cast<size_t>(first_row / kRows) * m.group_bytes;
    pool_->run([&](int thread) {
        pool_->for_tasks(thread, (n_rows + kRows - 1) / kRows, [&](int g) {
            pack_group(of, m.format, source, scale, n_rows, m.n_in, g, data + static_cast<size_t>(g) * m.group_bytes);
        });
    });
}

void Decoder::set_vector(Role role, int layer, const float* source, int n) {
    const size_t at = take_weights(padded(n) * sizeof(float));
    if (source) std::memcpy(weights_.data() + at, source, static_cast<size_t>(n) * sizeof(float));
    const float* data = reinterpret_cast<const float*>(weights() + at);
    LayerWeights& w = layers_[static_cast<size_t>(layer)];
    switch (role) {
        case Role::AttnNorm: w.attn_norm = data; break;
        case Role::AttnPostNorm: w.attn_post_norm = data; break;
        case Role::FfnPostNorm: w.ffn_post_norm = data; break;
        case Role::AttnSubNorm: w.attn_sub_norm = data; break;
        case Role::FfnSubNorm: w.ffn_sub_norm = data; break;
        case Role::QNorm: w.q_norm = data; break;
        case Role::KNorm: w.k_norm = data; break;
        case Role::QBias: w.q_bias = data; break;
        case Role::KBias: w.k_bias = data; break;
        case Role::VBias: w.v_bias = data; break;
        case Role::AttnOutputBias: w.attn_output_bias = data; break;
        case Role::FfnNorm: w.ffn_norm = data; break;
        case Role::GateTokenNorm: gate_.token_norm = data; break;
        case Role::PairTokenNorm: pair_.token_norm = data; break;
        case Role::PairFeatureNorm: pair_.feature_norm = data; break;
        case Role::CombineNorm: combine_.norm = data; break;
        default: output_norm_ = data; break;
    }
}

void Decoder::set_embedding(Format format, const uint8_t* source, size_t row_bytes) {
    embedding_ = {format, source, row_bytes};
}

// ---- the forward pass ------------------------------------------------------------------------------------------

bool Decoder::forward(const int32_t* tokens, const int32_t* parents, int n, int n_pending, const float* features,
                      const int32_t* rows, int n_rows, float* logits, const int32_t* tapped, int n_taps, float* taps,
                      size_t tap_stride, const std::function<bool()>& poll) {
    Pass pass{tokens, parents, n,      n_pending, n_past(), true,       features, rows,
              n_rows, logits,  tapped, n_taps,    taps,     tap_stride, nullptr};
    for (int i = 0; i < n_pending + n; i++) pass.chain = pass.chain && parents[i] == i - 1;
    for (int i = 0; i < n; i++) {
        int depth = pass.chain ? n_pending + i : 0;
        for (int row = n_pending + i; !pass.chain && parents[row] >= 0; row = parents[row]) depth++;
        buffers_->position[i] = pass.base + depth;
    }
    wait_for_weights();
    stop_.store(false, std::memory_order_relaxed);
    using Clock = std::chrono::steady_clock;
    Clock::time_point polled = Clock::now();
    const std::function<bool()> seldom = [&] {
        const Clock::time_point now = Clock::now();
        if (now - polled < std::chrono::milliseconds(40)) return false;
        polled = now;
        return poll();
    };
    pass.poll = &seldom;
    text_.reserve(pass.slot(n));
    pool_->run([&](int thread) { run(pass, thread); });
    return !stop_.load(std::memory_order_relaxed);
}

// A piece of the output matrix, for a pass in n_parts.
Matrix Decoder::part_of_output(int n_parts, int part) const {
    Matrix output = output_;
    const int n_groups = std::max(1, output_.n_groups() / n_parts);
    output.n_out = std::min(output_.n_out, n_groups * kRows);
    output.data += static_cast<size_t>(part % output_.n_groups() * n_groups) * output.group_bytes;
    return output;
}

size_t Decoder::part_bytes(int n_parts, int part) const {
    const Matrix output = part_of_output(n_parts, part);
    size_t n_bytes = output.group_bytes * static_cast<size_t>(output.n_groups());
    for (size_t i = static_cast<size_t>(part); i < layers_.size(); i += static_cast<size_t>(n_parts)) {
        const LayerWeights& w = layers_[i];
        for (const Matrix* m : {&w.q, &w.k, &w.v, &w.attn_output, &w.gate, &w.up, &w.down})
            n_bytes += m->group_bytes * static_cast<size_t>(m->n_groups());
    }
    return n_bytes;
}

double Decoder::seconds_of_part(int n, int n_parts, int part) {
    wait_for_weights();
    const size_t columns = static_cast<size_t>(n);
    std::vector<int32_t> tokens(columns, 0), parents(columns), rows(columns);
    for (int i = 0; i < n; i++) {
        parents[static_cast<size_t>(i)] = i - 1;
        rows[static_cast<size_t>(i)] = i;
        buffers_->position[i] = n_past() + i;
    }
    const Matrix output = part_of_output(n_parts, part);
    std::vector<float> logits(columns * static_cast<size_t>(output.n_out));
    const std::function<bool()> never = [] { return false; };  // it is over soon
    const Pass pass{tokens.data(), parents.data(), n, 0,       n_past(),  true,  nullptr, rows.data(), n,
                    logits.data(), nullptr,        0, nullptr, size_t{0}, &never};
    text_.reserve(pass.slot(n));
    stop_.store(false, std::memory_order_relaxed);
    const auto started = std::chrono::steady_clock::now();
    pool_->run([&](int thread) {
        embed(pass, thread);
        for (int i = part; i < config_.n_layers; i += n_parts) layer(pass, thread, layers_[static_cast<size_t>(i)], i);
        head(pass, thread, output);
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

// Tasks of a pass that was stopped are counted, but not done.
template <class Task>
void Decoder::for_tasks(const Pass& pass, int thread, int n_tasks, const Task& task) {
    pool_->for_tasks(thread, n_tasks, [&](int i) {
        if (thread == 0 && (*pass.poll)()) stop_.store(true, std::memory_order_relaxed);
        if (!stop_.load(std::memory_order_relaxed)) task(i);
    });
}

// Items that take a microsecond or so. Where there are many, several make a task: threads that take them one by one in turn
// wait for each other's cache lines.
template <class Item>
void Decoder::for_items(const Pass& pass, int thread, int n_items, const Item& item) {
    constexpr int kMost = 16;
    const int each = std::clamp(n_items / (8 * pool_->size()), 1, kMost);
    for_tasks(pass, thread, (n_items + each - 1) / each, [&](int task) {
        for (int i = task * each; i < std::min(n_items, (task + 1) * each); i++) item(i);
    });
}

void Decoder::run(const Pass& pass, int thread) {
    const auto tap_behind = [&](int index, const float* norm) {
        for (int t = 0; t < pass.n_taps; t++) {
            if (pass.tapped[t] == index) tap(pass, thread, norm, pass.taps + static_cast<size_t>(t) * pass.tap_stride);
        }
    };
    embed(pass, thread);
    if (config_.gated) fuse(pass, thread);
    if (config_.paired) pair(pass, thread);
    for (int i = 0; i < config_.n_layers; i++) {
        layer(pass, thread, layers_[static_cast<size_t>(i)], i);
        tap_behind(i, nullptr);
    }
    tap_behind(config_.n_layers, output_norm_);
    if (pass.n_rows) head(pass, thread, output_);
}

// Copies x out, or rms_norm(x) with a norm.
void Decoder::tap(const Pass& pass, int thread, const float* norm, float* out) {
    const Buffers& b = *buffers_;
    const size_t n_embd = static_cast<size_t>(config_.n_embd);
    for_items(pass, thread, pass.n, [&](int c) {
        const size_t column = static_cast<size_t>(c);
        const float* x = b.x + column * b.ld_embd;
        float* h = b.h + column * b.ld_embd;
        if (norm) kernels_.rms_norm(x, norm, config_.n_embd, config_.norm_epsilon, h);
        std::memcpy(out + column * n_embd, norm ? h : x, sizeof(float) * n_embd);
    });
}

void Decoder::layer(const Pass& pass, int thread, const LayerWeights& w, int index) {
    const Buffers& b = *buffers_;
    const Inputs attn = config_.paired ? plain_inputs(pass, thread, b.joined, b.ld_joined, {&w.q, &w.k, &w.v})
                                       : normed_inputs(pass, thread, w.attn_norm, nullptr, pass.n, {&w.q, &w.k, &w.v});
    project_qkv(pass, thread, w, attn);
    if (config_.qk_norm == QKNorm::Whole) norm_queries_and_keys(pass, thread, w);
    rotate_and_store(pass, thread, w, index);
    attend(pass, thread, index);
    add_projection(pass, thread, b.attn, b.ld_q, w.attn_sub_norm, w.attn_output, w.attn_output_bias, w.attn_post_norm);
    const Inputs ffn = normed_inputs(pass, thread, w.ffn_norm, nullptr, pass.n, {&w.gate, &w.up});
    feed_forward(pass, thread, w, ffn);
    add_projection(pass, thread, b.gate, b.ld_ff, w.ffn_sub_norm, w.down, nullptr, w.ffn_post_norm);
}

// x = the embeddings of the tokens; what comes with them, and the angles of their positions.
void Decoder::embed(const Pass& pass, int thread) {
    const Buffers& b = *buffers_;
    for_items(pass, thread, pass.n, [&](int c) {
        const size_t column = static_cast<size_t>(c);
        dequantize_row(embedding_.format, embedding_.data + static_cast<size_t>(pass.tokens[c]) * embedding_.row_bytes,
                       config_.n_embd, b.x + column * b.ld_embd);
        for (int i = 0; i < config_.n_embd; i++)
            b.x[column * b.ld_embd + static_cast<size_t>(i)] *= config_.embedding_scale;
        if (config_.has_features()) {
            const size_t n_embd = static_cast<size_t>(config_.n_embd);
            std::memcpy(b.feature + column * b.ld_embd, pass.features + column * n_embd, sizeof(float) * n_embd);
        }
        for (size_t r = 0; r < config_.ropes.size(); r++) {
            const Buffers::Angles& angles = b.angles[r];
            const double magnitude = config_.ropes[r].magnitude;
            for (size_t i = 0; i < angles.n_pairs; i++) {
                double sine, cosine;
                sin_cos(b.position[c] * config_.ropes[r].frequencies[i], sine, cosine);
                angles.cosine[column * angles.n_pairs + i] = static_cast<float>(cosine * magnitude);
                angles.sine[column * angles.n_pairs + i] = static_cast<float>(sine * magnitude);
            }
        }
    });
}

// Where this thread finds x as inputs of a matrix: in arrays of its own with one token, in those of all otherwise.
Inputs Decoder::inputs_of(const Pass& pass, int thread, int n_in, const float* x, size_t ldx) const {
    Inputs inputs = pass.alone() ? buffers_->own_inputs[static_cast<size_t>(thread)] : buffers_->inputs;
    inputs.n_in = n_in;
    inputs.x = x;
    inputs.ldx = ldx;
    return inputs;
}

// Column c in the kinds that the readers want.
void Decoder::prepare(const Inputs& inputs, int c, std::initializer_list<const Matrix*> readers) const {
    bool by32 = false, by256 = false, by_token = false;
    for (const Matrix* reader : readers) {
        by32 = by32 || input_kind(reader->format) == InputKind::Int8By32;
        by256 = by256 || input_kind(reader->format) == InputKind::Int8By256;
        by_token = by_token || input_kind(reader->format) == InputKind::Int8ByToken;
    }
    if (by32) kernels_.quantize32(inputs, c);
    if (by256) kernels_.quantize256(inputs, c);
    if (by_token) kernels_.quantize_token(inputs, c);
}

// Columns of x, prepared for the readers.
Inputs Decoder::plain_inputs(const Pass& pass, int thread, const float* x, size_t ldx,
                             std::initializer_list<const Matrix*> readers) {
    const Inputs inputs = inputs_of(pass, thread, (*readers.begin())->n_in, x, ldx);
    if (pass.alone()) {
        prepare(inputs, 0, readers);
    } else {
        for_items(pass, thread, pass.n, [&](int c) { prepare(inputs, c, readers); });
    }
    return inputs;
}

// rms_norm(x) of n columns, or x itself without a norm, prepared for the readers; column i is row rows[i] of x, or row
// i without rows.
Inputs Decoder::normed_inputs(const Pass& pass, int thread, const float* norm, const int32_t* rows, int n,
                              std::initializer_list<const Matrix*> readers) {
    const Buffers& b = *buffers_;
    float* h = !norm && !rows ? b.x : pass.alone() ? b.own_h[static_cast<size_t>(thread)] : b.h;
    const Inputs inputs = inputs_of(pass, thread, config_.n_embd, h, b.ld_embd);
    const auto column = [&](int c) {
        const float* row = b.x + static_cast<size_t>(rows ? rows[c] : c) * b.ld_embd;
        float* out = h + static_cast<size_t>(c) * b.ld_embd;
        if (norm) {
            kernels_.rms_norm(row, norm, config_.n_embd, config_.norm_epsilon, out);
        } else if (rows) {
            std::memcpy(out, row, sizeof(float) * b.ld_embd);
        }
        prepare(inputs, c, readers);
    };
    if (pass.alone()) {
        column(0);
    } else {
        for_items(pass, thread, n, column);
    }
    return inputs;
}

namespace {

// y[c][row] += bias[row] for the rows of groups first..last-1.
void add_bias(const Matrix& w, const float* bias, int n, int first, int last, float* y, size_t ldy) {
    if (!bias) return;
    for (int c = 0; c < n; c++) {
        float* column = y + static_cast<size_t>(c) * ldy;
        for (int row = first * kRows; row < std::min(w.n_out, last * kRows); row++) column[row] += bias[row];
    }
}

}  // namespace

void Decoder::multiply(const Pass& pass, int thread, const Matrix& w, const Inputs& inputs, float* y, size_t ldy) {
    const Tasks tasks(w, pass.n, pool_->size(), kernels_.at_once(pass.n));
    for_tasks(pass, thread, tasks.count(), [&](int task) {
        kernels_.matmul(w, inputs, pass.n, tasks.first(task), tasks.last(task), tasks.behind(w, task), y, ldy);
    });
}

// x = what the gate makes of the features and of the embeddings, which are in x.
void Decoder::fuse(const Pass& pass, int thread) {
    const Buffers& b = *buffers_;
    const size_t n_bytes = sizeof(float) * static_cast<size_t>(config_.n_embd);
    const Inputs features = plain_inputs(pass, thread, b.feature, b.ld_embd, {&gate_.feature});
    multiply(pass, thread, gate_.feature, features, b.x_of_feature, b.ld_embd);
    const Inputs tokens = normed_inputs(pass, thread, gate_.token_norm, nullptr, pass.n, {&gate_.token});
    multiply(pass, thread, gate_.token, tokens, b.x_of_token, b.ld_embd);
    for_items(pass, thread, pass.n, [&](int c) {
        const size_t at = static_cast<size_t>(c) * b.ld_embd;
        float* joined = b.joined + static_cast<size_t>(c) * b.ld_joined;
        kernels_.silu(b.x_of_token + at, config_.n_embd);
        std::memcpy(joined, b.x_of_feature + at, n_bytes);
        std::memcpy(joined + config_.n_embd, b.x_of_token + at, n_bytes);
    });
    const Inputs both = plain_inputs(pass, thread, b.joined, b.ld_joined, {&gate_.mix});
    multiply(pass, thread, gate_.mix, both, b.h, b.ld_embd);
    for_items(pass, thread, pass.n, [&](int c) {
        const size_t at = static_cast<size_t>(c) * b.ld_embd;
        kernels_.blend(b.h + at, b.x_of_feature + at, b.x_of_token + at, config_.n_embd, b.x + at);
    });
}

// joined = what the layer attends from, of the embeddings in x and the features; x = what it adds to.
void Decoder::pair(const Pass& pass, int thread) {
    const Buffers& b = *buffers_;
    const size_t n_bytes = sizeof(float) * static_cast<size_t>(config_.n_embd);
    for_items(pass, thread, pass.n, [&](int c) {
        const size_t at = static_cast<size_t>(c) * b.ld_embd;
        float *joined = b.joined + static_cast<size_t>(c) * b.ld_joined, *x = b.x + at;
        kernels_.rms_norm(x, pair_.token_norm, config_.n_embd, config_.norm_epsilon, b.x_of_token + at);
        kernels_.rms_norm(b.feature + at, pair_.feature_norm, config_.n_embd, config_.norm_epsilon,
                          b.x_of_feature + at);
        std::memcpy(joined, b.x_of_token + at, n_bytes);
        std::memcpy(joined + config_.n_embd, b.x_of_feature + at, n_bytes);
        std::memcpy(x, (config_.normed_residual ? b.x_of_feature : b.feature) + at, n_bytes);
    });
}

void Decoder::combine(const float* rows, int n, float* features) {
    const Buffers& b = *buffers_;
    const size_t n_in = static_cast<size_t>(config_.n_combined), n_embd = static_cast<size_t>(config_.n_embd);
    Inputs inputs = b.inputs;
    inputs.n_in = config_.n_combined;
    inputs.x = b.combined;
    inputs.ldx = b.ld_combined;
    pool_->run([&](int thread) {
        pool_->for_tasks(thread, n, [&](int c) {
            float* row = b.combined + static_cast<size_t>(c) * b.ld_combined;
            std::memcpy(row, rows + static_cast<size_t>(c) * n_in, sizeof(float) * n_in);
            for (int k = 0; combine_.norm && k < config_.n_combined; k += config_.n_normed)
                kernels_.rms_norm(row + k, combine_.norm + k, config_.n_normed, config_.norm_epsilon, row + k);
            prepare(inputs, c, {&combine_.matrix});
        });
        const Tasks tasks(combine_.matrix, n, pool_->size(), kernels_.at_once(n));
        pool_->for_tasks(thread, tasks.count(), [&](int task) {
            kernels_.matmul(combine_.matrix, inputs, n, tasks.first(task), tasks.last(task),
                            tasks.behind(combine_.matrix, task), features, n_embd);
        });
    });
}

void Decoder::project_qkv(const Pass& pass, int thread, const LayerWeights& w, const Inputs& inputs) {
    const Buffers& b = *buffers_;
    const int n = pass.n, n_threads = pool_->size(), together = kernels_.at_once(n);
    const Tasks q(w.q, n, n_threads, together), k(w.k, n, n_threads, together), v(w.v, n, n_threads, together);
    const auto project = [&](const Matrix& m, const float* bias, const Tasks& tasks, int task, float* y, size_t ldy) {
        kernels_.matmul(m, inputs, pass.n, tasks.first(task), tasks.last(task), tasks.behind(m, task), y, ldy);
        add_bias(m, bias, pass.n, tasks.first(task), tasks.last(task), y, ldy);
    };
    for_tasks(pass, thread, q.count() + k.count() + v.count(), [&](int task) {
        if (task < q.count()) return project(w.q, w.q_bias, q, task, b.q, b.ld_q);
        task -= q.count();
        if (task < k.count()) return project(w.k, w.k_bias, k, task, b.k, b.ld_kv);
        project(w.v, w.v_bias, v, task - k.count(), b.v, b.ld_kv);
    });
}

namespace {

// Turns the pairs of one head (Su et al., arXiv:2104.09864).
void rotate(float* x, const float* cosine, const float* sine, size_t n_pairs, bool halves) {
    for (size_t i = 0; i < n_pairs; i++) {
        float& first = x[halves ? i : 2 * i];
        float& second = x[halves ? i + n_pairs : 2 * i + 1];
        const float a = first, b = second;
        first = a * cosine[i] - b * sine[i];
        second = a * sine[i] + b * cosine[i];
    }
}

}  // namespace

// RMS norms over all queries, and all keys, of a token.
void Decoder::norm_queries_and_keys(const Pass& pass, int thread, const LayerWeights& w) {
    const Buffers& b = *buffers_;
    for_items(pass, thread, pass.n, [&](int c) {
        float* q = b.q + static_cast<size_t>(c) * b.ld_q;
        float* k = b.k + static_cast<size_t>(c) * b.ld_kv;
        kernels_.rms_norm(q, w.q_norm, config_.n_heads * config_.head_dim, config_.norm_epsilon, q);
        kernels_.rms_norm(k, w.k_norm, config_.n_kv_heads * config_.head_dim, config_.norm_epsilon, k);
    });
}

// RMS norms over each of some heads, which stand side by side and so are copied to a padded place first.
void Decoder::norm_heads(int thread, const float* norm, float* heads, int n_heads) const {
    float* padded_head = buffers_->own_head[static_cast<size_t>(thread)];
    for (int i = 0; i < n_heads; i++) {
        float* head = heads + i * config_.head_dim;
        const size_t n_bytes = sizeof(float) * static_cast<size_t>(config_.head_dim);
        std::memcpy(padded_head, head, n_bytes);
        kernels_.rms_norm(padded_head, norm, config_.head_dim, config_.norm_epsilon, padded_head);
        std::memcpy(head, padded_head, n_bytes);
    }
}

// Positions into queries and keys, keys and values into the cache.
void Decoder::rotate_and_store(const Pass& pass, int thread, const LayerWeights& w, int index) {
    const Buffers& b = *buffers_;
    const int dim = config_.head_dim, of_group = config_.n_heads / config_.n_kv_heads;
    const int rope = config_.attention[static_cast<size_t>(index)].rope;
    for_items(pass, thread, pass.n * config_.n_kv_heads, [&](int task) {
        const int c = task / config_.n_kv_heads, kv_head = task % config_.n_kv_heads;
        const size_t column = static_cast<size_t>(c);
        float* q = b.q + column * b.ld_q + kv_head * of_group * dim;
        float* k = b.k + column * b.ld_kv + kv_head * dim;
        if (config_.qk_norm == QKNorm::PerHead) {
            norm_heads(thread, w.q_norm, q, of_group);
            norm_heads(thread, w.k_norm, k, 1);
        }
        if (rope >= 0) {
            const Buffers::Angles& angles = b.angles[static_cast<size_t>(rope)];
            const size_t at = column * angles.n_pairs;
            const auto turn = [&](float* head) {
                rotate(head, angles.cosine + at, angles.sine + at, angles.n_pairs, config_.rope_halves);
            };
            for (int i = 0; i < of_group; i++) turn(q + i * dim);
            turn(k);
        }
        const float scale = config_.query_scales[static_cast<size_t>(b.position[c] / config_.positions_per_scale)];
        for (int d = 0; d < of_group * dim; d++) q[d] *= scale;
        kernels_.store_key_value(text_.head(index, kv_head), pass.slot(c), k, b.v + column * b.ld_kv + kv_head * dim);
    });
}

// Tasks of some tokens and some query heads of one kv head, kTaskRows together at most. What a task loads serves all of
// its rows; but with few tokens, more tasks with fewer heads keep all threads at work.
void Decoder::attend(const Pass& pass, int thread, int index) {
    const int of_group = config_.n_heads / config_.n_kv_heads;
    const int tokens_each = std::max(1, kTaskRows / of_group);
    const int n_blocks = (pass.n + tokens_each - 1) / tokens_each;
    const int n_whole = config_.n_kv_heads * n_blocks, wanted = (2 * pool_->size() + n_whole - 1) / n_whole;
    const int parts = std::min(of_group, std::max(wanted, (of_group + kTaskRows - 1) / kTaskRows));
    const int tasks_each = config_.n_kv_heads * parts;
    // Threads beside each other take different kv heads, and find them in their own caches for the next part; a text that is
    // too long for that they read together.
    constexpr int kShort = 512;
    const bool is_short = pass.slot(pass.n) <= kShort;
    for_tasks(pass, thread, n_blocks * tasks_each, [&](int task) {
        const int i = task % tasks_each;
        const int kv_head = is_short ? i % config_.n_kv_heads : i / parts;
        const int part = is_short ? i / config_.n_kv_heads : i % parts;
        const int first_head = kv_head * of_group + of_group * part / parts;
        const int last_head = kv_head * of_group + of_group * (part + 1) / parts;
        const int first_token = task / tasks_each * tokens_each;
        const int last_token = std::min(pass.n, first_token + tokens_each);
        Attention a;
        a.kv = text_.head(index, kv_head);
        a.soft_cap = config_.attention_soft_cap;
        a.n_rows = 0;
        for (int c = first_token; c < last_token; c++) {
            for (int head = first_head; head < last_head; head++) {
                a.rows[a.n_rows] = attention_row(pass, thread, index, c, head, a.n_rows);
                a.n_rows++;
            }
        }
        kernels_.attention(a);
    });
}

// Head `head` of token c, as row r of a task.
AttentionRow Decoder::attention_row(const Pass& pass, int thread, int index, int c, int head, int r) {
    const Buffers& b = *buffers_;
    const size_t own = static_cast<size_t>(thread), row = static_cast<size_t>(r);
    const size_t at = static_cast<size_t>(c) * b.ld_q + static_cast<size_t>(head * config_.head_dim);
    AttentionRow a{};
    a.q = b.q + at;
    a.out = b.attn + at;
    a.scores = b.scores[own] + row * b.ld_scores;
    a.sum = b.sums[own] + row * b.ld_value;
    if (config_.kv_type == KvType::Q8_0) {
        const size_t dim = static_cast<size_t>(config_.head_dim);
        Inputs q = b.own_queries[own];
        q.n_in = config_.head_dim;
        q.x = a.q;
        q.q32 += row * dim;
        q.scale32 += row * dim / 32;
        q.sum32 += row * dim / 32;
        kernels_.quantize32(q, 0);
        a.codes = q.q32;
        a.scales = q.scale32;
        a.sums = q.sum32;
    }
    const int window = config_.attention[static_cast<size_t>(index)].window;
    a.first = window ? std::max(0, b.position[c] + 1 - window) : 0;
    a.n_past = pass.chain ? pass.slot(c) + 1 : pass.base;
    if (!pass.chain) {
        int32_t* path = b.path[own] + row * static_cast<size_t>(config_.n_batch);
        for (int i = pass.n_pending + c; i >= 0; i = pass.parents[i]) path[a.n_path++] = pass.base + i;
        std::reverse(path, path + a.n_path);
        a.path = path;
    }
    return a;
}

// x += residual_scale * norm(w * norm(y) + bias) for the rows y, which their norm overwrites.
void Decoder::add_projection(const Pass& pass, int thread, float* y, size_t ldy, const float* sub_norm, const Matrix& w,
                             const float* bias, const float* post_norm) {
    const Buffers& b = *buffers_;
    float* h = sub_norm && pass.alone() ? b.own_h[static_cast<size_t>(thread)] : y;  // other threads still read y
    const Inputs inputs = inputs_of(pass, thread, w.n_in, h, ldy);
    const auto column = [&](int c) {
        const size_t at = static_cast<size_t>(c) * ldy;
        if (sub_norm) kernels_.rms_norm(y + at, sub_norm, w.n_in, config_.norm_epsilon, h + at);
        prepare(inputs, c, {&w});
    };
    if (pass.alone()) {
        column(0);
    } else if (sub_norm || input_kind(w.format) != InputKind::Float) {
        for_items(pass, thread, pass.n, column);
    }
    const auto add = [&](int c, int first_row, int last_row) {
        const size_t at = static_cast<size_t>(c) * b.ld_embd + static_cast<size_t>(first_row);
        kernels_.add_scaled(b.x + at, b.h + at, last_row - first_row, config_.residual_scale);
    };
    const Tasks tasks(w, pass.n, pool_->size(), kernels_.at_once(pass.n));
    for_tasks(pass, thread, tasks.count(), [&](int task) {
        const int first = tasks.first(task), last = tasks.last(task);
        kernels_.matmul(w, inputs, pass.n, first, last, tasks.behind(w, task), b.h, b.ld_embd);
        add_bias(w, bias, pass.n, first, last, b.h, b.ld_embd);
        for (int c = 0; !post_norm && c < pass.n; c++) add(c, first * kRows, std::min(w.n_out, last * kRows));
    });
    if (!post_norm) return;
    for_items(pass, thread, pass.n, [&](int c) {
        float* h = b.h + static_cast<size_t>(c) * b.ld_embd;
        kernels_.rms_norm(h, post_norm, config_.n_embd, config_.norm_epsilon, h);
        add(c, 0, config_.n_embd);
    });
}

// gate = activation(gate) * up
void Decoder::feed_forward(const Pass& pass, int thread, const LayerWeights& w, const Inputs& inputs) {
    const Buffers& b = *buffers_;
    const auto gated = config_.activation == Activation::Silu       ? kernels_.swiglu
                       : config_.activation == Activation::GeluTanh ? kernels_.geglu
                                                                    : kernels_.relu2_glu;
    const Tasks tasks(w.gate, pass.n, pool_->size(), kernels_.at_once(pass.n));
    for_tasks(pass, thread, tasks.count(), [&](int task) {
        const int first = tasks.first(task), last = tasks.last(task);
        for (int c = 0; c < pass.n; c += kColumnsTogether) {
            const int n = std::min(kColumnsTogether, pass.n - c);
            const Inputs columns = inputs.from(c);
            float* gate = b.gate + static_cast<size_t>(c) * b.ld_ff;
            const uint8_t* up = w.up.data + static_cast<size_t>(first) * w.up.group_bytes;
            kernels_.matmul(w.gate, columns, n, first, last, up, gate, b.ld_ff);
            kernels_.matmul(w.up, columns, n, first, last, tasks.behind(w.gate, task), b.up, b.ld_ff);
            for (int i = 0; i < n; i++) {
                const size_t at = static_cast<size_t>(i) * b.ld_ff + static_cast<size_t>(first * kRows);
                gated(gate + at, b.up + at, (last - first) * kRows);
            }
        }
    });
}

// Logits of the rows of an output matrix, or of some of its first ones.
void Decoder::head(const Pass& pass, int thread, const Matrix& output) {
    const Inputs inputs = normed_inputs(pass, thread, output_norm_, pass.rows, pass.n_rows, {&output});
    const Tasks tasks(output, pass.n_rows, pool_->size(), kernels_.at_once(pass.n_rows));
    const bool changed = config_.logit_scale != 1.0f || config_.logit_soft_cap != 0.0f;
    for_tasks(pass, thread, tasks.count(), [&](int task) {
        const int first = tasks.first(task), last = tasks.last(task), n_logits = output.n_out;
        kernels_.matmul(output, inputs, pass.n_rows, first, last, tasks.behind(output, task), pass.logits,
                        static_cast<size_t>(n_logits));
        for (int i = 0; changed && i < pass.n_rows; i++) {
            float* row = pass.logits + static_cast<size_t>(i) * static_cast<size_t>(n_logits) + first * kRows;
            kernels_.scale_and_cap(row, std::min(n_logits, last * kRows) - first * kRows, config_.logit_scale,
                                   config_.logit_soft_cap);
        }
    });
}
