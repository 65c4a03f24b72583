#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "trigonometry.h"

namespace {

std::string name_of(int layer, const char* block) { return "layers." + std::to_string(layer) + "." + block; }

// The same poll, asked every 40 ms: it may wait for a lock.
std::function<bool()> asked_seldom(const std::function<bool()>& poll) {
    using Clock = std::chrono::steady_clock;
    return [&poll, polled = Clock::now()]() mutable {
        const Clock::time_point now = Clock::now();
        if (now - polled < std::chrono::milliseconds(40)) return false;
        polled = now;
        return poll();
    };
}

// What the sequences of a pass write to is theirs, and nobody gives it back, as long as this is there.
class Reserved {
public:
    explicit Reserved(const Pass& pass) : pass_(pass) {
        std::vector<SequencePool::Want> wants;
        for (const Sequence& sequence : pass.sequences)
            wants.push_back({sequence.rows.state, sequence.slot(sequence.last())});
        SequencePool::reserve(wants);
    }
    ~Reserved() {
        for (const Sequence& sequence : pass_.sequences) sequence.rows.state->end_pass();
    }
    Reserved(const Reserved&) = delete;
    Reserved& operator=(const Reserved&) = delete;

private:
    const Pass& pass_;
};

// Sequences that a pass reads, which is no pass of theirs: nobody gives back what they have as long as this is there.
class Read {
public:
    explicit Read(std::span<const SequenceRows> sequences) : sequences_(sequences) {
        for (const SequenceRows& rows : sequences_) is_open_ = rows.state->begin_reading() && is_open_;
    }
    ~Read() {
        for (const SequenceRows& rows : sequences_) rows.state->end_reading();
    }
    Read(const Read&) = delete;
    Read& operator=(const Read&) = delete;

    // Whether all of them were there.
    bool is_open() const { return is_open_; }

private:
    std::span<const SequenceRows> sequences_;
    bool is_open_ = true;
};

void begin_states(const Pass& pass) {
    for (const Sequence& sequence : pass.sequences) {
        const SequenceRows& rows = sequence.rows;
        rows.state->begin(rows.parents, rows.n_pending, rows.n);
    }
}

}  // namespace

Decoder::Decoder(const DecoderConfig& config, const FrontConfig& front, const Kernels& kernels,
                 std::shared_ptr<Pool> pool, std::shared_ptr<Weights> weights, std::shared_ptr<ExpertStore> store)
    : config_(config),
      kernels_(kernels),
      pool_(std::move(pool)),
      weights_(std::move(weights)),
      store_(std::move(store)),
      predictor_(store_ ? std::make_unique<ExpertPredictor>(*store_, config.n_layers()) : nullptr),
      memory_(Activations::n_bytes(config, front.kind, pool_->size()), false),
      front_(make_front(front, config_, *weights_)),
      output_norm_(weights_->vector("output_norm", config.n_embd)),
      output_(weights_->output(config.n_logits, config.n_embd)),
      embedding_(weights_->embedding(config.n_vocab, config.n_feature())) {
    check_inputs();
    Cutter cutter(memory_.data());
    activations_ = std::make_unique<Activations>(config_, front.kind, pool_->size(), cutter);
    fill_rope_tables();
    if (config_.embedding_norm) std::fill_n(activations_->ones, config_.n_embd, 1.0f);
    if (config_.clusters.n) clustered_output_.emplace(config_, *weights_);
    if (config_.layer_inputs.n_inputs) layer_inputs_.emplace(config_, *weights_);
    int n_with_experts = 0;
    for (int i = 0; i < config_.n_layers(); i++) add_layer(i, n_with_experts);
}

// Angles of keys without their bias; see RopeTables. Rows after the last pair stay 0.
void Decoder::fill_rope_tables() {
    for (size_t r = 0; r < activations_->rope_tables.size(); r++) {
        const Activations::RopeTables& tables = activations_->rope_tables[r];
        const std::vector<double>& frequencies = config_.ropes[r].frequencies;
        const auto fill = [&](size_t n_positions, int each, const auto& at) {
            for (size_t p = 0; p < n_positions; p++) {
                for (size_t i = 0; i < frequencies.size(); i++) {
                    double sine, cosine;
                    sin_cos(static_cast<double>(each) * static_cast<double>(p) * frequencies[i], sine, cosine);
                    at(p, i, 0) = static_cast<float>(cosine);
                    at(p, i, 1) = static_cast<float>(sine);
                }
            }
        };
        fill(padded(config_.n_ctx) / 16, 16,
             [&](size_t p, size_t i, size_t which) -> float& { return tables.tiles[(2 * p + which) * tables.ld + i]; });
        fill(16, 1,
             [&](size_t p, size_t i, size_t which) -> float& { return tables.within[(2 * i + which) * 16 + p]; });
    }
}

void Decoder::check_inputs() const {
    weights_->check_inputs(config_.inputs);
    for (int i = 0; store_ && i < config_.n_layers(); i++) {
        if (!config_.layers[static_cast<size_t>(i)].experts()) continue;
        for (const Matrix& matrix : store_->layout().layer(i).parts) {
            if (!config_.inputs.fit(matrix.format, matrix.n_in)) {
                throw std::invalid_argument("experts have longer inputs than there is room for");
            }
        }
    }
}

void Decoder::add_layer(int index, int& n_with_experts) {
    const LayerConfig& layer = config_.layers[static_cast<size_t>(index)];
    const std::string of_mixer = name_of(index, "mixer"), of_ffn = name_of(index, "ffn");
    const auto mixer = [&]() -> Mixer {
        if (layer.delta_net()) return DeltaNetBlock(config_, index, of_mixer, *weights_);
        if (layer.mamba2()) return Mamba2Block(config_, index, of_mixer, *weights_);
        if (layer.short_conv()) return ShortConvBlock(config_, index, of_mixer, *weights_);
        if (layer.latent_attention()) return LatentAttentionBlock(config_, index, of_mixer, *weights_);
        return AttentionBlock(config_, index, of_mixer, *weights_);
    };
    if (layer.dense()) {
        layers_.push_back({mixer(), DenseBlock(config_, index, of_ffn, *weights_), std::nullopt});
    } else if (!layer.experts()) {
        layers_.push_back({mixer(), NoFeedForwardBlock(), std::nullopt});
    } else if (store_) {
        layers_.push_back({mixer(),
                           ExpertsBlock(config_, index, n_with_experts++, of_ffn, *weights_, *store_, *predictor_),
                           std::nullopt});
    } else {
        throw std::invalid_argument(of_ffn + " has experts, which a store must hold: found none");
    }
    if (layer.end) layers_.back().end.emplace(config_, index, name_of(index, "end"), *weights_);
}

// ---- the forward pass ----------------------------------------------------------------------------------------------

bool Decoder::forward(std::span<const SequenceRows> sequences, const int32_t* rows, int n_rows, float* logits,
                      uint64_t interrupts, const std::function<bool()>& poll) {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    const std::function<bool()> seldom = asked_seldom(poll);
    Pass pass(config_, kernels_, *pool_, *activations_, stop_, seldom);
    pass.rows = rows;
    pass.n_rows = n_last_rows_ = n_rows;
    pass.logits = logits;
    if (config_.reads_target()) return run_reading(sequences, pass, interrupts);
    for (const SequenceRows& sequence : sequences) pass.add(sequence);
    pass.recurrence_ns = &recurrence_ns_;
    pass.expert_device = expert_device_.get();
    pass.squares = squares_.get();
    const Reserved reserved(pass);  // first: where memory is missing, nothing has begun
    begin(pass);
    stop_.store(false);
    if (interrupts_.load() != interrupts)
        return false;  // in this order: an interrupt is seen here, or sets stop_ after it
    begin_states(pass);
    return run_by_all(pass);
}

bool Decoder::run_reading(std::span<const SequenceRows> sequences, Pass& pass, uint64_t interrupts) {
    const Read read(sequences);
    for (const SequenceRows& sequence : sequences) pass.add(sequence);
    begin(pass);
    stop_.store(false);
    if (!read.is_open() || interrupts_.load() != interrupts) return false;
    return run_by_all(pass);
}

std::vector<int32_t> Decoder::clusters() {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    if (!clustered_output_) return {};
    return {activations_->clusters, activations_->clusters + n_last_rows_ * config_.clusters.n_used};
}

bool Decoder::forward_from(const SequenceRows& sequence, int first_layer, const float* x, const int32_t* rows,
                           int n_rows, float* logits, const std::function<bool()>& poll) {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    const std::function<bool()> seldom = asked_seldom(poll);
    Pass pass(config_, kernels_, *pool_, *activations_, stop_, seldom);
    pass.add(sequence);
    pass.rows = rows;
    pass.n_rows = n_rows;
    pass.recurrence_ns = &recurrence_ns_;
    pass.logits = logits;
    pass.first_layer = first_layer;
    pass.start = x;
    const Reserved reserved(pass);
    begin(pass);
    stop_.store(false);
    begin_states(pass);
    return run_by_all(pass);
}

bool Decoder::run_by_all(const Pass& pass) {
    pool_->run([&](int thread) { run(pass, thread); });
    const bool is_whole = !stop_.load(std::memory_order_relaxed);
    if (!pass.failure().empty()) throw RowUnreadable(pass.failure());
    const std::string failed = weights_->device() ? weights_->device()->take_failure() : "";
    if (!failed.empty()) throw DeviceFailed("the device of ternary products failed at " + failed);
    if (!is_whole && store_ && !store_->error().empty()) throw ExpertsUnreadable(store_->error());
    if (!is_whole && expert_device_) expert_device_->rethrow();
    return is_whole;
}

void Decoder::begin(const Pass& pass) {
    weights_->wait_until_mapped();
    last_rows_.begin(pass.sequences, pass.n);
    recurrence_ns_.store(0, std::memory_order_relaxed);
    if (!store_) return;
    store_->begin_pass();
    predictor_->begin_pass();
    pass.b.experts.n_routed->store(0, std::memory_order_relaxed);
}

void Decoder::run(const Pass& pass, int thread) const {
    embed(pass, thread);
    if (front_) front_->run(pass, thread);
    for (int i = pass.first_layer; i < config_.n_layers(); i++) {
        const Layer& layer = layers_[static_cast<size_t>(i)];
        keep_for_next(pass, thread, i);
        layer.run_mixer(pass, thread, front_ && i == 0 ? front_->attended(pass) : nullptr);
        layer.run_ffn(pass, thread);
        tap(pass, thread, i);
    }
    if (config_.centred_output) centre(pass, thread);
    tap(pass, thread, config_.n_layers());
    if (!pass.n_rows) return;
    if (clustered_output_) return clustered_output_->run(pass, thread, output_norm_, output_);
    head(pass, thread, output_);
}

// What a mixer reads, where that of the next layer stands beside it.
void Decoder::keep_for_next(const Pass& pass, int thread, int layer) const {
    const size_t next = static_cast<size_t>(layer) + 1;
    if (next >= layers_.size() || !config_.layers[next].is_beside) return;
    const Activations& b = pass.b;
    pass.for_items(thread, pass.n, [&](int c) {
        const size_t at = static_cast<size_t>(c) * b.ld_embd;
        std::memcpy(b.x_before + at, b.x + at, sizeof(float) * b.ld_embd);
    });
}

// x = the embeddings of the tokens, or what the pass starts with; what comes with them, and the angles of their positions.
void Decoder::embed(const Pass& pass, int thread) const {
    const Activations& b = pass.b;
    const size_t n_embd = static_cast<size_t>(config_.n_embd);
    const auto begin_with = [&](int c) {
        float* x = b.x + static_cast<size_t>(c) * b.ld_embd;
        std::memcpy(x, pass.start + static_cast<size_t>(c) * n_embd, sizeof(float) * n_embd);
    };
    pass.for_items(thread, pass.n, [&](int c) {
        if (!pass.start || layer_inputs_) {
            embed_token(pass, c);
        } else {
            begin_with(c);
        }
        set_angles(pass, c);
    });
    if (!layer_inputs_) return;
    layer_inputs_->run(pass, thread);
    if (pass.start) pass.for_items(thread, pass.n, begin_with);
}

void Decoder::embed_token(const Pass& pass, int c) const {
    const Activations& b = pass.b;
    const Sequence& sequence = pass.sequence_of(c);
    const size_t n_embd = static_cast<size_t>(config_.n_feature());
    const size_t at = static_cast<size_t>(c) * b.ld_embd, i = static_cast<size_t>(c - sequence.first);
    float* x = config_.n_target ? b.joined + static_cast<size_t>(c) * b.ld_joined : b.x + at;
    try {
        embedding_.read(sequence.rows.tokens[i], x);
    } catch (const std::exception& error) {  // no memory too: nothing may leave a thread of the pool
        pass.fail(error.what());
        return;
    }
    for (size_t k = 0; k < n_embd; k++) x[k] *= config_.embedding_scale;
    if (config_.embedding_norm) kernels_.rms_norm(x, b.ones, config_.n_embd, config_.norm_epsilon, x);
    float* feature = config_.n_target ? x + n_embd : b.feature + at;
    if (front_) std::memcpy(feature, sequence.rows.features + i * n_embd, sizeof(float) * n_embd);
}

void Decoder::set_angles(const Pass& pass, int c) const {
    for (size_t r = 0; r < config_.ropes.size(); r++) {
        const Rope& rope = config_.ropes[r];
        const std::vector<double>& frequencies = rope.of_context(pass.sequence_of(c).rows.n_ctx);
        const Activations::Angles& angles = pass.b.angles[r];
        const size_t at = static_cast<size_t>(c) * angles.n_pairs;
        for (size_t i = 0; i < angles.n_pairs; i++) {
            double sine, cosine;
            sin_cos(pass.b.position[c] * frequencies[i], sine, cosine);
            angles.cosine[at + i] = static_cast<float>(cosine * rope.magnitude);
            angles.sine[at + i] = static_cast<float>(sine * rope.magnitude);
        }
    }
}

// x less its mean, which a norm makes a layer norm of; nothing else reads x any more.
void Decoder::centre(const Pass& pass, int thread) const {
    pass.for_items(thread, pass.n, [&](int c) {
        float* x = pass.b.x + static_cast<size_t>(c) * pass.b.ld_embd;
        double sum = 0;
        for (int i = 0; i < config_.n_embd; i++) sum += static_cast<double>(x[i]);
        const float mean = static_cast<float>(sum / config_.n_embd);
        for (int i = 0; i < config_.n_embd; i++) x[i] -= mean;
    });
}

// Copies x to the sequences that requested the output of this layer, and rms_norm(x) after the last one.
void Decoder::tap(const Pass& pass, int thread, int layer) const {
    const Activations& b = pass.b;
    const float* norm = layer == config_.n_layers() ? output_norm_ : nullptr;
    const size_t n_embd = static_cast<size_t>(config_.n_embd);
    for (const Sequence& sequence : pass.sequences) {
        const SequenceRows& rows = sequence.rows;
        for (int t = 0; t < rows.n_taps; t++) {
            if (rows.tapped[t] != layer) continue;
            float* out = rows.taps + static_cast<size_t>(t) * rows.tap_stride;
            pass.for_items(thread, rows.n, [&](int i) {
                const size_t at = static_cast<size_t>(sequence.first + i) * b.ld_embd;
                if (norm) kernels_.rms_norm(b.x + at, norm, config_.n_embd, config_.norm_epsilon, b.h + at);
                const float* row = norm ? b.h + at : b.x + at;
                std::memcpy(out + static_cast<size_t>(i) * n_embd, row, sizeof(float) * n_embd);
            });
        }
    }
}

// Logits of the rows of an output matrix, or of some of its first ones.
void Decoder::head(const Pass& pass, int thread, const Matrix& output) const {
    const Inputs inputs = pass.normed_inputs(thread, output_norm_, pass.rows, pass.n_rows, {&output});
    const Tasks tasks(output, pass.n_rows, pool_->size(), kernels_.at_once(pass.n_rows));
    const bool changed = config_.logit_scale != 1.0f || config_.logit_soft_cap != 0.0f;
    pass.for_tasks(thread, tasks.count(), [&](int task) {
        const int first = tasks.first(task), last = tasks.last(task), n_logits = output.n_out;
        kernels_.matmul(output, inputs, pass.n_rows, first, last, tasks.next_data(output, task), pass.logits,
                        static_cast<size_t>(n_logits));
        for (int i = 0; changed && i < pass.n_rows; i++) {
            float* row = pass.logits + static_cast<size_t>(i) * static_cast<size_t>(n_logits) + first * kRows;
            kernels_.scale_and_cap(row, std::min(n_logits, last * kRows) - first * kRows, config_.logit_scale,
                                   config_.logit_soft_cap);
        }
    });
}

void Decoder::record_inputs(bool is_on) {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    squares_ = is_on ? std::make_unique<InputSquares>(*weights_, store_.get(), config_) : nullptr;
}

std::optional<InputSquares::ByName> Decoder::input_squares() {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    if (!squares_) return std::nullopt;
    return squares_->all();
}

void Decoder::set_expert_device(std::shared_ptr<ExpertDevice> device) {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    expert_device_ = std::move(device);
}

Decoder::Routing Decoder::routing() {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    const int n_used = config_.most_of_experts([](const ExpertsConfig& e) { return e.n_used; });
    const size_t n_rows = static_cast<size_t>(last_rows_.n_rows()), n_each = static_cast<size_t>(n_used);
    Routing routing{last_rows_.n_rows(), n_used, std::vector<int32_t>(layers_.size() * n_rows * n_each, -1)};
    for (size_t i = 0; i < layers_.size(); i++) {
        const ExpertsBlock* block = std::get_if<ExpertsBlock>(&layers_[i].ffn);
        for (size_t r = 0; block && r < n_rows; r++) {
            const int32_t* chosen = block->chosen(*activations_, static_cast<int>(r));
            std::copy(chosen, chosen + block->n_used(), routing.experts.begin() + (i * n_rows + r) * n_each);
        }
    }
    return routing;
}

double Decoder::expert_union() {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    const size_t of_row = expert_bytes_of_row();
    size_t all = 0;
    for_experts([&](int layer, const ExpertsBlock& block) {
        const ExpertLayer& experts = store_->layout().layer(layer);
        const size_t n_used = static_cast<size_t>(block.n_used()),
                     n_chosen = n_used * static_cast<size_t>(last_rows_.n_rows());
        const int32_t* chosen = block.chosen(*activations_, 0);
        std::vector<bool> is_needed(static_cast<size_t>(experts.n_experts));
        for (size_t i = 0; i < n_chosen; i++) is_needed[static_cast<size_t>(chosen[i])] = true;
        all += experts.record_bytes * static_cast<size_t>(std::count(is_needed.begin(), is_needed.end(), true));
    });
    return of_row ? static_cast<double>(all) / static_cast<double>(of_row) : 0.0;
}

size_t Decoder::expert_bytes_of_row() const {
    size_t n_bytes = 0;
    for_experts([&](int layer, const ExpertsBlock& block) {
        n_bytes += store_->layout().layer(layer).record_bytes * static_cast<size_t>(block.n_used());
    });
    return n_bytes;
}

void Decoder::commit_experts(const SequenceState& state, std::span<const int32_t> path) {
    const std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
    if (!lock || !store_ || !last_rows_.commit(state, path)) return;
    for_experts([&](int layer, const ExpertsBlock& block) {
        const int n_experts = store_->layout().layer(layer).n_experts;
        store_->forget_use(layer, last_rows_.only_rejected(block.chosen(*activations_, 0), block.n_used(), n_experts));
    });
}

// ---- parts of a pass, for tuning -----------------------------------------------------------------------------------

// A piece of the output matrix, for a pass in n_parts.
Matrix Decoder::part_of_output(int n_parts, int part) const {
    Matrix output = output_;
    const int n_groups = std::max(1, output_.n_groups() / n_parts);
    output.n_out = std::min(output_.n_out, n_groups * kRows);
    output.data += static_cast<size_t>(part % output_.n_groups() * n_groups) * output.group_bytes;
    return output;
}

size_t Decoder::part_bytes(int n_parts, int part) const {
    size_t n_bytes = part_of_output(n_parts, part).n_bytes();
    for (size_t i = static_cast<size_t>(part); i < layers_.size(); i += static_cast<size_t>(n_parts)) {
        n_bytes += layers_[i].weight_bytes();
    }
    return n_bytes;
}

double Decoder::seconds_of_part(SequenceState& state, int n, int n_parts, int part) {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    const size_t n_tokens = static_cast<size_t>(n);
    std::vector<int32_t> tokens(n_tokens, 0), parents(n_tokens), rows(n_tokens);
    for (int i = 0; i < n; i++) {
        parents[static_cast<size_t>(i)] = i - 1;
        rows[static_cast<size_t>(i)] = i;
    }
    const Matrix output = part_of_output(n_parts, part);
    std::vector<float> logits(n_tokens * static_cast<size_t>(output.n_out));
    const std::function<bool()> never = [] { return false; };  // it is over soon
    Pass pass(config_, kernels_, *pool_, *activations_, stop_, never);
    pass.add({&state, config_.n_ctx, tokens.data(), parents.data(), n, 0, nullptr, nullptr, 0, nullptr, 0});
    pass.rows = rows.data();
    pass.n_rows = n;
    pass.logits = logits.data();
    const Reserved reserved(pass);
    begin(pass);
    begin_states(pass);
    stop_.store(false, std::memory_order_relaxed);
    const auto started = std::chrono::steady_clock::now();
    pool_->run([&](int thread) {
        embed(pass, thread);
        for (int i = part; i < config_.n_layers(); i += n_parts) {
            layers_[static_cast<size_t>(i)].run_mixer(pass, thread, nullptr);
            layers_[static_cast<size_t>(i)].run_ffn(pass, thread);
        }
        head(pass, thread, output);
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}
