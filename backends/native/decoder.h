// A decoder-only transformer: weights, threads and activations, which run the rows of several sequences in one pass.
// The state of a sequence is in its SequenceState.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <variant>
#include <vector>

#include "blocks.h"
#include "experts/experts_block.h"
#include "head.h"
#include "kernels/kernels.h"
#include "kv/sequence_state.h"
#include "pass.h"
#include "pass_rows.h"
#include "pool.h"
#include "weights.h"

// An expert could not be read, and so the pass has no result.
class ExpertsUnreadable : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// The embedding of a token could not be read, and so the pass has no result.
class RowUnreadable : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// A device could not multiply, and so the pass has no result.
class DeviceFailed : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

class Decoder {
public:
    // store: of the experts, null for a model without any. Throws std::invalid_argument for weights that are missing or
    // have another size.
    Decoder(const DecoderConfig& config, const FrontConfig& front, const Kernels& kernels, std::shared_ptr<Pool> pool,
            std::shared_ptr<Weights> weights, std::shared_ptr<ExpertStore> store = nullptr);

    // Runs the rows of several sequences, each sequence once, n_batch tokens at most. rows: (n_rows,) those that logits
    // (n_rows, n_logits) are requested, counted over the tokens of all sequences. poll is called by the calling thread
    // now and then, and stops the pass by giving true. Gives false if the pass was stopped; the committed sequences are
    // as before in any case. One pass at a time: another caller waits. interrupts: what interrupts() gave before; if
    // there are more by now, or while it waits or runs, the pass is stopped. Throws CacheFull
    // before it begins, ExpertsUnreadable, RowUnreadable, DeviceFailed.
    bool forward(std::span<const SequenceRows> sequences, const int32_t* rows, int n_rows, float* logits,
                 uint64_t interrupts, const std::function<bool()>& poll);

    // The logits (n_rows, n_logits) of some rows of a sequence's first tokens, at most n_batch, whose residual stream
    // before a layer is known: (n, n_embd) x. What is pending of the sequence is lost; the layers before it have
    // nothing of the sequence; it stands beside no other one. Gives false if it was stopped, and throws, as forward; no device computes experts.
    bool forward_from(const SequenceRows& sequence, int first_layer, const float* x, const int32_t* rows, int n_rows,
                      float* logits, const std::function<bool()>& poll);

    // Seconds that a part of a pass of n <= n_batch tokens takes: every n_parts-th layer, from number `part` on, and as
    // much of the output matrix; for a decoder without a front. What is committed stays, what is pending is lost.
    double seconds_of_part(SequenceState& state, int n, int n_parts, int part);
    // Bytes of the weights that it reads, of experts those of one token.
    size_t part_bytes(int n_parts, int part) const;

    // The experts that the rows of the last pass chose, (n_layers, n_rows, n_used), in the order in which they are added
    // up; -1 in layers without experts, and after those of layers that use fewer. Not while a pass runs.
    struct Routing {
        int n_rows, n_used;
        std::vector<int32_t> experts;
    };
    Routing routing();
    // Null for a model without experts.
    ExpertPredictor* predictor() const { return predictor_.get(); }

    // The clusters whose logits the requested rows of the last pass have, (n_rows, n_used). Not while a pass runs.
    std::vector<int32_t> clusters();

    // From the next pass on the squares of what matrices read are summed, or no longer; what was summed before is gone.
    void record_inputs(bool is_on);
    // What was summed until now, none where nothing is.
    std::optional<InputSquares::ByName> input_squares();

    // A device that computes some experts, from the next pass on; null for none.
    void set_expert_device(std::shared_ptr<ExpertDevice> device);
    // Bytes of the experts that the rows of the last pass chose, each once, over bytes of those of one row: 1 for a pass
    // of one row, 0 without experts.
    double expert_union();
    size_t expert_bytes_of_row() const;
    // What recurrent layers took in the last pass beside their products: convolutions, states, waiting for other threads.
    double recurrence_seconds() const { return 1e-9 * static_cast<double>(recurrence_ns_.load()); }
    // A sequence commits this path of its pending rows, and drops the others: experts that only dropped rows of the
    // last pass needed have the recency that they had before it. Rows of sequences that did not commit yet count as
    // kept. Does nothing while a pass runs.
    void commit_experts(const SequenceState& state, std::span<const int32_t> path);

    void interrupt() {
        interrupts_.fetch_add(1);
        stop_.store(true);
    }
    uint64_t interrupts() const { return interrupts_.load(); }

    const DecoderConfig& config() const { return config_; }
    bool has_front() const { return front_ != nullptr; }
    const Kernels& kernels() const { return kernels_; }
    Weights& weights() const { return *weights_; }
    size_t activation_bytes() const { return memory_.size(); }

private:
    using Mixer = std::variant<AttentionBlock, DeltaNetBlock, ShortConvBlock, LatentAttentionBlock, Mamba2Block>;

    struct Layer {
        Mixer mixer;
        std::variant<DenseBlock, ExpertsBlock, NoFeedForwardBlock> ffn;
        std::optional<LayerEndBlock> end;

        void run_mixer(const Pass& pass, int thread, const float* attended) const {
            std::visit([&](const auto& block) { block.run(pass, thread, attended); }, mixer);
        }
        // And what ends the layer.
        void run_ffn(const Pass& pass, int thread) const {
            std::visit([&](const auto& block) { block.run(pass, thread); }, ffn);
            if (end) end->run(pass, thread);
        }
        size_t weight_bytes() const {
            const auto bytes = [](const auto& block) { return block.weight_bytes(); };
            return std::visit(bytes, mixer) + std::visit(bytes, ffn) + (end ? end->weight_bytes() : 0);
        }
    };

    // Calls visit(index, block) for each layer with experts.
    template <class Visit>
    void for_experts(const Visit& visit) const {
        for (size_t i = 0; i < layers_.size(); i++) {
            if (const ExpertsBlock* block = std::get_if<ExpertsBlock>(&layers_[i].ffn))
                visit(static_cast<int>(i), *block);
        }
    }
    // Throws std::invalid_argument for a matrix with longer inputs than there is room for.
    void check_inputs() const;
    void add_layer(int index, int& n_with_experts);
    void fill_rope_tables();
    void begin(const Pass& pass);
    bool run_by_all(const Pass& pass);
    void run(const Pass& pass, int thread) const;
    void keep_for_next(const Pass& pass, int thread, int layer) const;
    void embed(const Pass& pass, int thread) const;
    void embed_token(const Pass& pass, int c) const;
    void set_angles(const Pass& pass, int c) const;
    void centre(const Pass& pass, int thread) const;
    void tap(const Pass& pass, int thread, int layer) const;
    bool run_reading(std::span<const SequenceRows> sequences, Pass& pass, uint64_t interrupts);
    void head(const Pass& pass, int thread, const Matrix& output) const;
    Matrix part_of_output(int n_parts, int part) const;

    DecoderConfig config_;
    const Kernels& kernels_;
    std::shared_ptr<Pool> pool_;
    std::shared_ptr<Weights> weights_;
    std::shared_ptr<ExpertStore> store_;
    std::unique_ptr<ExpertPredictor> predictor_;
    std::shared_ptr<ExpertDevice> expert_device_;
    std::unique_ptr<InputSquares> squares_;
    Memory memory_;
    std::unique_ptr<Activations> activations_;
    std::unique_ptr<Front> front_;
    std::optional<ClusteredOutput> clustered_output_;
    int n_last_rows_ = 0;  // of the last pass, whose logits were requested
    std::optional<LayerInputsBlock> layer_inputs_;
    std::vector<Layer> layers_;
    PassRows last_rows_;
    std::atomic<int64_t> recurrence_ns_{0};  // of the last pass, see recurrence_seconds
    const float* output_norm_;
    Matrix output_;
    const Embedding& embedding_;
    std::mutex running_;
    std::atomic<uint64_t> interrupts_{0};
    std::atomic<bool> stop_{false};  // of the pass that runs
};
