// A mixture of experts with its router and the network that all rows share (models/spec.py has the equations).
#pragma once

#include <string>

#include "experts/predictor.h"
#include "experts/store.h"
#include "pass.h"
#include "weights.h"

class ExpertsBlock {
public:
    // index: of the layer. number: of those with experts. store, predictor: must outlive this, as the weights must.
    ExpertsBlock(const DecoderConfig& config, int index, int number, const std::string& name, Weights& weights,
                 ExpertStore& store, ExpertPredictor& predictor);

    void run(const Pass& pass, int thread) const;
    // Of what one token reads.
    size_t weight_bytes() const;
    // The experts that the last pass chose for a row, (n_used,).
    const int32_t* chosen(const Activations& b, int row) const;
    int n_used() const { return config_.n_used; }

private:
    // Of each expert, null where there is none: biases (n_experts, n), scales (n_experts,).
    struct PerExpert {
        const float *bias, *scale;
    };

    PerExpert per_expert(const Weights& weights, const std::string& name, int n) const;
    void check_layout(const std::string& name) const;
    Inputs own_inputs(const Pass& pass, const float* x, const Inputs& in) const;
    Inputs latent_inputs(const Pass& pass) const;
    void prepare_latent(const Pass& pass, int row, const Matrix& reader) const;
    void norm_own_inputs(const Pass& pass, int thread) const;
    // Whether there are no gates: what the file calls up is in their place.
    bool is_plain() const { return experts_.parts[static_cast<int>(ExpertPart::Up)].n_out == 0; }
    // Whether experts work on rows of their own, which are made of the residual stream's and become such again.
    bool has_latents() const { return config_.n_latent > 0; }
    int n_in() const { return has_latents() ? config_.n_latent : router_.n_in; }
    void score(const Pass& pass, int thread, const Inputs& of_router, const Inputs& inputs) const;
    void score_part(const Pass& pass, const Inputs& inputs, const Tasks& tasks, int task) const;
    void choose(const Pass& pass, int thread) const;
    void choose_for(const Pass& pass, int thread, int row) const;
    void group(const Pass& pass) const;
    void add_work(const Pass& pass, int expert, int n_rows, int first_row) const;
    void add_shared(const Pass& pass) const;
    void add_rows_of(const Pass& pass, const int32_t* needed, int n_needed) const;
    void compute(const Pass& pass, int thread, const Inputs& inputs) const;
    void compute_with_device(const Pass& pass, int thread, const Inputs& inputs) const;
    void run_task(const Pass& pass, int thread, int task, const Inputs& inputs) const;
    void finish_device(const Pass& pass) const;
    void gate_and_up(const Pass& pass, int thread, const ExpertTask& task, const Inputs& inputs) const;
    void down(const Pass& pass, int thread, const ExpertTask& task) const;
    bool find_record(const Pass& pass, int thread, ExpertWork& work) const;
    void activate(const Pass& pass, ExpertWork& work) const;
    void sum_routed(const Pass& pass, int row, float* y) const;
    void sum_latents(const Pass& pass, int thread) const;
    void combine(const Pass& pass, int thread, const Inputs& inputs) const;
    void record_inputs(const Pass& pass, int thread, const Inputs& inputs) const;
    void record_inputs_of_down(const Pass& pass, int thread) const;

    ExpertsConfig config_;
    int index_, number_;
    ExpertStore& store_;
    ExpertPredictor& predictor_;
    ExpertLayer experts_;
    Matrix router_, shared_gate_, shared_up_, shared_down_;
    Matrix latent_down_, latent_up_;  // empty without latent rows
    const float *norm_, *post_norm_, *router_bias_, *selection_bias_, *shared_router_;
    const float *router_norm_, *shared_norm_, *routed_post_norm_, *shared_post_norm_;
    PerExpert of_gate_, of_up_, of_down_;
};
