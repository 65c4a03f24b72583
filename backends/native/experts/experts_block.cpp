#include "experts/experts_block.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "experts/router.h"

namespace {

// y = scale * y + bias, for n numbers; null for none.
void scale_and_add(float* y, int n, const float* scale, const float* bias) {
    for (int i = 0; scale && i < n; i++) y[i] *= *scale;
    for (int i = 0; bias && i < n; i++) y[i] += bias[i];
}

// Returns when the inputs of the down product are there, which threads with earlier tasks make; false if the pass is
// stopped before.
bool wait_for_activation(const Pass& pass, int thread, const ExpertWork& work) {
    constexpr int kSpins = 4000;
    for (int i = 0; !work.is_activated.load(std::memory_order_acquire); i++) {
        if (pass.gives_up(thread)) return false;
        if (i < kSpins) {
            relax();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
    return true;
}

}  // namespace

ExpertsBlock::ExpertsBlock(const DecoderConfig& config, int index, int number, const std::string& name,
                           Weights& weights, ExpertStore& store, ExpertPredictor& predictor)
    : config_(*config.layers[static_cast<size_t>(index)].experts()),
      index_(index),
      number_(number),
      store_(store),
      predictor_(predictor),
      experts_(index < store.layout().n_layers() ? store.layout().layer(index) : ExpertLayer()),
      router_(weights.matrix(name + ".router", config_.n_experts, config.n_embd)),
      norm_(weights.vector(name + ".norm", config.n_embd)),
      post_norm_(weights.vector(name + ".post_norm", config.n_embd)),
      router_bias_(weights.vector(name + ".router_bias", config_.n_experts)),
      selection_bias_(weights.vector(name + ".selection_bias", config_.n_experts)),
      shared_router_(weights.vector(name + ".shared_router", config.n_embd)),
      router_norm_(config_.own_inputs ? weights.required_vector(name + ".router_norm", config.n_embd) : nullptr),
      shared_norm_(config_.own_inputs ? weights.required_vector(name + ".shared_norm", config.n_embd) : nullptr),
      routed_post_norm_(weights.vector(name + ".routed_post_norm", config.n_embd)),
      shared_post_norm_(weights.vector(name + ".shared_post_norm", config.n_embd)),
      of_gate_(per_expert(weights, name + ".gate", config_.n_ff)),
      of_up_(per_expert(weights, name + ".up", config_.n_ff)),
      of_down_(per_expert(weights, name + ".down", n_in())) {
    if (has_latents()) {
        latent_down_ = weights.matrix(name + ".latent_down", config_.n_latent, config.n_embd);
        latent_up_ = weights.matrix(name + ".latent_up", config.n_embd, config_.n_latent);
    }
    check_layout(name);
    if (is_plain() && (config_.activation != Activation::Relu2 || of_gate_.bias || of_gate_.scale)) {
        throw std::invalid_argument(name + " has no gates, so relu2 is its activation, and nothing is done to gates");
    }
    for (Matrix& part : experts_.parts) part.policy = &weights.policy();
    if (const int n_ff = config_.n_ff_shared) {
        shared_gate_ = weights.matrix(name + (is_plain() ? ".shared_up" : ".shared_gate"), n_ff, config.n_embd);
        if (!is_plain()) shared_up_ = weights.matrix(name + ".shared_up", n_ff, config.n_embd);
        shared_down_ = weights.matrix(name + ".shared_down", config.n_embd, n_ff);
    }
    // Its router_scale is above 0 and changes no order.
    predictor_.add(index, {config_, router_, router_norm_ ? router_norm_ : norm_, router_bias_, selection_bias_});
}

ExpertsBlock::PerExpert ExpertsBlock::per_expert(const Weights& weights, const std::string& name, int n) const {
    return {weights.vector(name + "_bias", config_.n_experts * n), weights.vector(name + "_scale", config_.n_experts)};
}

// Throws std::invalid_argument if the store holds other experts than those of this layer.
void ExpertsBlock::check_layout(const std::string& name) const {
    const auto is = [](const Matrix& m, int n_out, int n_in) { return m.n_out == n_out && m.n_in == n_in; };
    const int n_up = is_plain() ? 0 : config_.n_ff;
    if (experts_.n_experts != config_.n_experts || !is(experts_.parts[0], config_.n_ff, n_in()) ||
        !is(experts_.parts[1], n_up, n_in()) || !is(experts_.parts[2], n_in(), config_.n_ff)) {
        throw std::invalid_argument("the experts of " + name + " have other sizes than those of their store");
    }
}

size_t ExpertsBlock::weight_bytes() const {
    size_t of_expert = 0;
    for (const Matrix& part : experts_.parts) of_expert += part.n_bytes();
    size_t shared = 0;
    if (config_.n_ff_shared) shared = shared_gate_.n_bytes() + shared_up_.n_bytes() + shared_down_.n_bytes();
    const size_t of_latents = has_latents() ? latent_down_.n_bytes() + latent_up_.n_bytes() : 0;
    return router_.n_bytes() + of_expert * static_cast<size_t>(config_.n_used) + shared + of_latents;
}

const int32_t* ExpertsBlock::chosen(const Activations& b, int row) const {
    return b.experts.chosen_of(number_) + static_cast<size_t>(row) * static_cast<size_t>(config_.n_used);
}

void ExpertsBlock::run(const Pass& pass, int thread) const {
    const bool is_shared = config_.n_ff_shared && !config_.own_inputs;
    const Matrix& first = has_latents() ? latent_down_ : experts_.parts[0];
    const Matrix& second = has_latents() ? latent_down_ : experts_.parts[1];
    const Matrix& router = config_.own_inputs ? first : router_;
    const Matrix& shared = is_shared ? shared_gate_ : router;
    const Matrix& shared_up = is_shared && !is_plain() ? shared_up_ : router;
    const Inputs inputs =
        pass.normed_inputs(thread, norm_, nullptr, pass.n, {&router, &first, &second, &shared, &shared_up});
    if (config_.own_inputs) norm_own_inputs(pass, thread);
    const ExpertRows& b = pass.b.experts;
    score(pass, thread, config_.own_inputs ? own_inputs(pass, b.router_x, b.router_inputs) : inputs, inputs);
    if (!pass.alone()) choose(pass, thread);
    if (pass.squares) record_inputs(pass, thread, has_latents() ? latent_inputs(pass) : inputs);
    pass.expert_device ? compute_with_device(pass, thread, inputs) : compute(pass, thread, inputs);
    if (pass.squares) record_inputs_of_down(pass, thread);
    combine(pass, thread, inputs);
}

Inputs ExpertsBlock::own_inputs(const Pass& pass, const float* x, const Inputs& in) const {
    Inputs inputs = in;
    inputs.n_in = pass.config.n_embd;
    inputs.x = x;
    inputs.ldx = pass.b.ld_embd;
    return inputs;
}

// What experts read, or what becomes of their sums, as inputs of a product.
Inputs ExpertsBlock::latent_inputs(const Pass& pass) const {
    Inputs inputs = pass.b.experts.latent_inputs;
    inputs.n_in = config_.n_latent;
    inputs.x = pass.b.experts.latent;
    inputs.ldx = pass.b.experts.ld_latent;
    return inputs;
}

void ExpertsBlock::prepare_latent(const Pass& pass, int row, const Matrix& reader) const {
    prepare_inputs(pass.kernels, latent_inputs(pass), row, {&reader});
}

// What the router and the shared network read, where that is not what the experts read.
void ExpertsBlock::norm_own_inputs(const Pass& pass, int thread) const {
    const ExpertRows& b = pass.b.experts;
    const Inputs of_router = own_inputs(pass, b.router_x, b.router_inputs);
    const Inputs of_shared = own_inputs(pass, b.shared_x, b.shared_gate_inputs);
    pass.for_items(thread, 2 * pass.n, [&](int item) {
        const int c = item / 2;
        const size_t at = static_cast<size_t>(c) * pass.b.ld_embd;
        const float* x = pass.b.x + at;
        const int n_embd = pass.config.n_embd;
        if (item % 2) {
            pass.kernels.rms_norm(x, router_norm_, n_embd, pass.config.norm_epsilon, b.router_x + at);
            prepare_inputs(pass.kernels, of_router, c, {&router_});
        } else {
            pass.kernels.rms_norm(x, shared_norm_, n_embd, pass.config.norm_epsilon, b.shared_x + at);
            prepare_inputs(pass.kernels, of_shared, c, {&shared_gate_, &shared_up_});
        }
    });
    pass.record(thread, of_router, pass.n, {&router_});
    pass.record(thread, of_shared, pass.n, {&shared_gate_, &shared_up_});
}

void ExpertsBlock::record_inputs(const Pass& pass, int thread, const Inputs& inputs) const {
    const InputSquares::ExpertRowsOf rows{pass.b.experts.chosen_of(number_), nullptr, pass.n, config_.n_used, pass.n};
    pass.for_tasks(thread, InputSquares::parts_of(inputs.n_in),
                   [&](int part) { pass.squares->add_experts(index_, false, rows, inputs.x, inputs.ldx, part); });
}

// A device that computes experts keeps what down reads there: the rows that it took, the last ones, are left out.
void ExpertsBlock::record_inputs_of_down(const Pass& pass, int thread) const {
    const ExpertRows& b = pass.b.experts;
    pass.for_tasks(thread, InputSquares::parts_of(config_.n_ff), [&](int part) {
        const bool is_taken = pass.expert_device && !pass.expert_device->taken.empty();
        const int n_places = is_taken ? pass.expert_device->taken.front().first_row : pass.n * config_.n_used;
        const InputSquares::ExpertRowsOf rows{b.chosen_of(number_), b.place, pass.n, config_.n_used, n_places};
        pass.squares->add_experts(index_, true, rows, b.gate, b.ld_ff, part);
    });
    if (!config_.n_ff_shared) return;
    pass.for_tasks(thread, InputSquares::parts_of(config_.n_ff_shared),
                   [&](int part) { pass.squares->add({&shared_down_}, b.shared_gate, b.ld_shared, pass.n, part, 0); });
}

// ---- routing -------------------------------------------------------------------------------------------------------

// The router's products, and latent rows. With one row, the thread that comes last chooses its experts too.
void ExpertsBlock::score(const Pass& pass, int thread, const Inputs& of_router, const Inputs& inputs) const {
    const ExpertRows& b = pass.b.experts;
    const int n_threads = pass.pool.size(), together = pass.kernels.at_once(pass.n);
    const Tasks tasks(router_, pass.n, n_threads, together);
    const Tasks latents(has_latents() ? latent_down_ : router_, pass.n, n_threads, together);
    const int n_latents = has_latents() ? latents.count() : 0, n_tasks = n_latents + tasks.count();
    pass.for_tasks(thread, n_tasks, [&](int task) {
        if (task < n_latents) {
            pass.kernels.matmul(latent_down_, inputs, pass.n, latents.first(task), latents.last(task),
                                latents.next_data(latent_down_, task), b.latent, b.ld_latent);
        } else {
            score_part(pass, of_router, tasks, task - n_latents);
        }
        if (!pass.alone() || b.n_routed->fetch_add(1, std::memory_order_acq_rel) + 1 < n_tasks) return;
        choose_for(pass, thread, 0);
        group(pass);
    });
}

void ExpertsBlock::score_part(const Pass& pass, const Inputs& inputs, const Tasks& tasks, int task) const {
    const ExpertRows& b = pass.b.experts;
    const int first = tasks.first(task), last = tasks.last(task);
    pass.kernels.matmul(router_, inputs, pass.n, first, last, tasks.next_data(router_, task), b.router, b.ld_router);
    for (int c = 0; config_.router_scale != 1.0f && c < pass.n; c++) {
        float* z = b.router + static_cast<size_t>(c) * b.ld_router;
        for (int i = first * kRows; i < std::min(router_.n_out, last * kRows); i++) z[i] *= config_.router_scale;
    }
    add_bias(router_, router_bias_, pass.n, first, last, b.router, b.ld_router);
}

void ExpertsBlock::choose(const Pass& pass, int thread) const {
    pass.for_items(thread, pass.n, [&](int row) {
        choose_for(pass, thread, row);
        if (pass.b.experts.n_routed->fetch_add(1, std::memory_order_acq_rel) + 1 == pass.n) group(pass);
    });
}

void ExpertsBlock::choose_for(const Pass& pass, int thread, int row) const {
    const ExpertRows& b = pass.b.experts;
    const size_t r = static_cast<size_t>(row), n_used = static_cast<size_t>(config_.n_used);
    if (has_latents()) prepare_latent(pass, row, experts_.parts[0]);
    float* scores = b.scores[static_cast<size_t>(thread)];
    float* weights = scores + b.ld_router;
    route(config_, pass.kernels, b.router + r * b.ld_router, selection_bias_, scores, b.chosen_of(number_) + r * n_used,
          weights);
    std::copy(weights, weights + n_used, b.weights + r * n_used);
}

// Puts the rows of the pass that need the same expert together, and cuts the work. One thread, when all rows have chosen.
void ExpertsBlock::group(const Pass& pass) const {
    const ExpertRows& b = pass.b.experts;
    b.n_routed->store(0, std::memory_order_relaxed);
    const int32_t* chosen = b.chosen_of(number_);
    const int n_chosen = pass.n * config_.n_used;
    std::fill(b.counts, b.counts + config_.n_experts, 0);
    for (int i = 0; i < n_chosen; i++) b.counts[chosen[i]]++;
    int n_needed = 0;
    for (int e = 0; e < config_.n_experts; e++) {
        if (b.counts[e]) b.needed[n_needed++] = e;
    }
    const std::span<int32_t> needed(b.needed, static_cast<size_t>(n_needed));
    predictor_.check(index_, needed);
    const int n_own = pass.expert_device ? pass.expert_device->choose(index_, needed, b.counts) : n_needed;
    b.tasks->clear();
    const int n_shared = config_.n_ff_shared ? 1 : 0;
    const int n_ready = store_.begin(index_, needed.first(static_cast<size_t>(n_own))) + n_shared;
    if (n_shared) b.tasks->add(ExpertWork::kShared, pass.n, 0, nullptr, shared_gate_, shared_up_, shared_down_);
    int first = 0;
    for (int i = 0; i < n_needed; i++) {
        const int expert = b.needed[i], n_rows = b.counts[expert];
        if (i < n_own) {
            add_work(pass, expert, n_rows, first);
        } else {
            pass.expert_device->taken.push_back({expert, n_rows, first});
        }
        b.counts[expert] = first;
        first += n_rows;
    }
    for (int i = 0; i < n_chosen; i++) {
        const int place = b.counts[chosen[i]]++;
        b.place[i] = place;
        b.column[place] = i / config_.n_used;
    }
    b.tasks->plan(n_ready, pass.pool.size(), pass.kernels);
    if (pass.expert_device && pass.expert_device->has_raised()) pass.stop();
}

void ExpertsBlock::add_work(const Pass& pass, int expert, int n_rows, int first_row) const {
    const ExpertRows& b = pass.b.experts;
    b.tasks->add(expert, n_rows, first_row, pass.alone() ? nullptr : b.column + first_row, experts_.parts[0],
                 experts_.parts[1], experts_.parts[2]);
}

// ---- experts -------------------------------------------------------------------------------------------------------

// What the next layer will need is predicted while nothing else can be done, or at once if nothing is waited for. With many
// rows the disk would have nothing to do for long: at once too.
void ExpertsBlock::compute(const Pass& pass, int thread, const Inputs& inputs) const {
    const ExpertTasks& tasks = *pass.b.experts.tasks;
    const int n_predictions = predictor_.has_work(pass, index_) ? 1 : 0;
    pass.for_tasks(thread, tasks.count() + n_predictions, [&](int i) {
        const int before = pass.n <= kPredictedRows ? tasks.first_waiting() : 0;
        if (n_predictions && i == before) return predictor_.predict(pass, index_);
        run_task(pass, thread, i > before ? i - n_predictions : i, inputs);
    });
}

void ExpertsBlock::run_task(const Pass& pass, int thread, int task, const Inputs& inputs) const {
    const ExpertTask of = pass.b.experts.tasks->at(task);
    of.is_down ? down(pass, thread, of) : gate_and_up(pass, thread, of, inputs);
}

// The CPU's experts while the device computes what it took; then those with which the device failed. These are three
// phases whatever happens: a late thread must find as many as the others.
void ExpertsBlock::compute_with_device(const Pass& pass, int thread, const Inputs& inputs) const {
    const ExpertRows& b = pass.b.experts;
    const ExpertTasks& tasks = *b.tasks;
    pass.for_tasks(thread, 1 + tasks.count(), [&](int i) {
        if (i > 0) return run_task(pass, thread, i - 1, inputs);
        if (pass.expert_device->taken.empty()) return;
        const Inputs read = has_latents() ? latent_inputs(pass) : inputs;
        pass.expert_device->start(index_, b.column, read.x, read.ldx);
        if (pass.expert_device->has_raised()) pass.stop();
    });
    pass.for_tasks(thread, 1, [&](int) { finish_device(pass); });
    pass.for_tasks(thread, std::max(1, tasks.count()), [&](int i) {
        if (i < tasks.count()) run_task(pass, thread, i, inputs);
    });
}

// Outputs of the device; or the work on what it took, anew, if it failed.
void ExpertsBlock::finish_device(const Pass& pass) const {
    const ExpertRows& b = pass.b.experts;
    b.tasks->clear();
    std::vector<ExpertDevice::Taken>& taken = pass.expert_device->taken;
    if (taken.empty() || pass.expert_device->finish(b.out, b.ld_out)) return;
    if (pass.expert_device->has_raised()) return pass.stop();
    for (size_t i = 0; i < taken.size(); i++) b.needed[i] = taken[i].expert;
    const std::span<int32_t> needed(b.needed, taken.size());
    const int n_ready = store_.begin(index_, needed);
    for (const int32_t expert : needed) {
        const auto found = std::find_if(taken.begin(), taken.end(), [&](const auto& t) { return t.expert == expert; });
        add_work(pass, expert, found->n_rows, found->first_row);
    }
    b.tasks->plan(n_ready, pass.pool.size(), pass.kernels);
}

// Waits for the expert; gives false, and stops the pass, if it does not come.
bool ExpertsBlock::find_record(const Pass& pass, int thread, ExpertWork& work) const {
    if (work.expert == ExpertWork::kShared) return true;
    const uint8_t* record = store_.wait(index_, work.expert, [&] { return pass.gives_up_waiting(thread); });
    if (!record) {
        pass.stop();
        return false;
    }
    work.record.store(record, std::memory_order_relaxed);
    return true;
}

// gate = activation(gate) * up for some row groups, or activation(gate) without gates.
void ExpertsBlock::gate_and_up(const Pass& pass, int thread, const ExpertTask& task, const Inputs& inputs) const {
    ExpertWork& work = pass.b.experts.tasks->work(task.work);
    if (!find_record(pass, thread, work)) return;
    const ExpertRows& b = pass.b.experts;
    const bool is_shared = work.expert == ExpertWork::kShared;
    const uint8_t* record = work.record.load(std::memory_order_relaxed);
    const Matrix gate = (is_shared ? *work.gate : experts_.part(ExpertPart::Gate, record)).from(task.first);
    const Matrix up =
        is_plain() ? Matrix() : (is_shared ? *work.up : experts_.part(ExpertPart::Up, record)).from(task.first);
    const int n_groups = task.last - task.first, n_numbers = std::min(gate.n_out, n_groups * kRows);
    const size_t ld = is_shared ? b.ld_shared : b.ld_ff, ld_up = static_cast<size_t>(kMostTaskGroups) * kRows;
    const size_t at = static_cast<size_t>(task.first) * kRows, expert = static_cast<size_t>(work.expert);
    float* ups = b.up[static_cast<size_t>(thread)];
    const auto activate_numbers = activation_of(pass.kernels, config_.activation);
    const auto add = [&](const PerExpert& of, float* y) {
        const size_t first = expert * static_cast<size_t>(config_.n_ff) + at;
        scale_and_add(y, n_numbers, of.scale ? of.scale + expert : nullptr, of.bias ? of.bias + first : nullptr);
    };
    const Inputs read = is_shared && config_.own_inputs ? own_inputs(pass, b.shared_x, b.shared_gate_inputs)
                        : !is_shared && has_latents()   ? latent_inputs(pass)
                                                        : inputs;
    for (int c = 0; c < work.n_rows; c += kTokensTogether) {
        const int n = std::min(kTokensTogether, work.n_rows - c);
        const Inputs some = work.columns ? read.of(work.columns + c) : read.from(c);
        float* gates = (is_shared ? b.shared_gate : b.gate) + static_cast<size_t>(work.first_row + c) * ld + at;
        pass.kernels.matmul(gate, some, n, 0, n_groups, up.data, gates, ld);
        if (!is_plain()) pass.kernels.matmul(up, some, n, 0, n_groups, nullptr, ups, ld_up);
        for (int i = 0; i < n; i++) {
            float *g = gates + static_cast<size_t>(i) * ld, *u = ups + static_cast<size_t>(i) * ld_up;
            if (is_plain()) {
                if (!is_shared) add(of_up_, g);
                pass.kernels.relu2(g, n_groups * kRows);
                continue;
            }
            if (!is_shared) add(of_gate_, g), add(of_up_, u);
            activate_numbers(g, u, n_groups * kRows);
        }
    }
    if (work.up_left.fetch_sub(1, std::memory_order_acq_rel) == 1) activate(pass, work);
}

// What the down product reads, when all of gate and up is there.
void ExpertsBlock::activate(const Pass& pass, ExpertWork& work) const {
    const ExpertRows& b = pass.b.experts;
    const bool is_shared = work.expert == ExpertWork::kShared;
    Inputs inputs = is_shared ? b.shared_inputs : b.inputs;
    inputs.n_in = work.down->n_in;
    inputs.x = is_shared ? b.shared_gate : b.gate;
    inputs.ldx = is_shared ? b.ld_shared : b.ld_ff;
    for (int i = 0; i < work.n_rows; i++) prepare_inputs(pass.kernels, inputs, work.first_row + i, {work.down});
    work.is_activated.store(true, std::memory_order_release);
}

void ExpertsBlock::down(const Pass& pass, int thread, const ExpertTask& task) const {
    ExpertWork& work = pass.b.experts.tasks->work(task.work);
    if (!wait_for_activation(pass, thread, work)) return;
    const ExpertRows& b = pass.b.experts;
    const bool is_shared = work.expert == ExpertWork::kShared;
    const uint8_t* record = work.record.load(std::memory_order_relaxed);
    const Matrix m = (is_shared ? *work.down : experts_.part(ExpertPart::Down, record)).from(task.first);
    Inputs inputs = is_shared ? b.shared_inputs : b.inputs;
    inputs.n_in = m.n_in;
    inputs.x = is_shared ? b.shared_gate : b.gate;
    inputs.ldx = is_shared ? b.ld_shared : b.ld_ff;
    const int n_groups = task.last - task.first, n_numbers = std::min(m.n_out, n_groups * kRows);
    const size_t at = static_cast<size_t>(task.first) * kRows, expert = static_cast<size_t>(work.expert);
    const size_t ld = is_shared ? pass.b.ld_embd : b.ld_out, n_each = static_cast<size_t>(n_in());
    float* y = (is_shared ? b.shared_out : b.out) + static_cast<size_t>(work.first_row) * ld + at;
    pass.kernels.matmul(m, inputs.from(work.first_row), work.n_rows, 0, n_groups, nullptr, y, ld);
    for (int i = 0; !is_shared && i < work.n_rows; i++) {
        scale_and_add(y + static_cast<size_t>(i) * ld, n_numbers, of_down_.scale ? of_down_.scale + expert : nullptr,
                      of_down_.bias ? of_down_.bias + expert * n_each + at : nullptr);
    }
    if (work.down_left.fetch_sub(1, std::memory_order_acq_rel) == 1 && !is_shared) store_.done(index_, work.expert);
}

// y = the weighted sum of what the experts of a row gave, in the order in which they were chosen.
void ExpertsBlock::sum_routed(const Pass& pass, int row, float* y) const {
    const ExpertRows& b = pass.b.experts;
    const size_t first = static_cast<size_t>(row) * static_cast<size_t>(config_.n_used);
    const float* outputs[kMostUsed];
    for (int i = 0; i < config_.n_used; i++) {
        outputs[i] = b.out + static_cast<size_t>(b.place[first + static_cast<size_t>(i)]) * b.ld_out;
    }
    pass.kernels.weighted_sum(outputs, b.weights + first, config_.n_used, n_in(), y);
}

// Puts what becomes of latent sums where the outputs of experts were, row after row.
void ExpertsBlock::sum_latents(const Pass& pass, int thread) const {
    const ExpertRows& b = pass.b.experts;
    pass.for_items(thread, pass.n, [&](int row) {
        sum_routed(pass, row, b.latent + static_cast<size_t>(row) * b.ld_latent);
        prepare_latent(pass, row, latent_up_);
    });
    const Inputs inputs = latent_inputs(pass);
    pass.record(thread, inputs, pass.n, {&latent_up_});
    pass.multiply(thread, latent_up_, inputs, b.out, b.ld_out);
}

// x += the sum of what the experts of a row gave, and the shared network.
void ExpertsBlock::combine(const Pass& pass, int thread, const Inputs& inputs) const {
    const ExpertRows& b = pass.b.experts;
    const size_t ld = pass.b.ld_embd;
    if (has_latents()) sum_latents(pass, thread);
    pass.for_items(thread, pass.n, [&](int row) {
        const size_t r = static_cast<size_t>(row);
        float shared_weight[kRows] = {};
        if (shared_router_) {
            shared_weight[0] = dot_product(inputs.x + r * inputs.ldx, shared_router_, pass.config.n_embd);
            pass.kernels.sigmoid(shared_weight, 1);
        } else {
            shared_weight[0] = 1;
        }
        float* y = has_latents() ? b.out + r * b.ld_out : pass.b.own_h[static_cast<size_t>(thread)];
        if (!has_latents()) sum_routed(pass, row, y);
        if (routed_post_norm_) {
            clear_padding(y, pass.config.n_embd);
            pass.kernels.rms_norm(y, routed_post_norm_, pass.config.n_embd, pass.config.norm_epsilon, y);
        }
        if (shared_post_norm_) {
            float* shared = b.shared_out + r * ld;
            clear_padding(shared, pass.config.n_embd);
            pass.kernels.rms_norm(shared, shared_post_norm_, pass.config.n_embd, pass.config.norm_epsilon, shared);
        }
        if (config_.n_ff_shared) pass.kernels.add_scaled(y, b.shared_out + r * ld, pass.config.n_embd, *shared_weight);
        clear_padding(y, pass.config.n_embd);
        if (post_norm_) pass.kernels.rms_norm(y, post_norm_, pass.config.n_embd, pass.config.norm_epsilon, y);
        pass.kernels.add_scaled(pass.b.x + r * ld, y, pass.config.n_embd, pass.config.residual_scale);
    });
}
