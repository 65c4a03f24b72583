#include "kv/sequence_state.h"

#include <algorithm>
#include <numeric>
#include <system_error>

#include "kv/byte_sum.h"
#include "platform.h"

SequenceState::SequenceState(std::shared_ptr<SequencePool> pool)
    : pool_(std::move(pool)),
      states_(pool_->new_states()),
      places_(pool_->places_.size()),
      stamps_(static_cast<size_t>(segments_of(n_ctx()))) {
    for (size_t i = 0; i < places_.size(); i++) {
        const SequencePool::Place& place = pool_->places_[i];
        const size_t number = static_cast<size_t>(place.memory);
        LayerState* state = states_[number].get();
        if (pool_->memories_[number]->is_recurrent())
            places_[i] = {nullptr, static_cast<RecurrentState*>(state), place.index};
        else
            places_[i] = {static_cast<KvState*>(state), nullptr, place.index};
    }
    for (size_t i = 0; i < states_.size(); i++) {
        if (pool_->memories_[i]->is_recurrent()) recurrences_.push_back(static_cast<RecurrentState*>(states_[i].get()));
    }
}

SequenceState::SequenceState(const SequenceSizes& sizes)
    : SequenceState(std::make_shared<SequencePool>(PoolSizes::of_one(sizes))) {}

SequenceState::~SequenceState() { pool_->release(std::move(states_)); }

int SequenceState::most_rows_of_tree() const {
    int most = RecurrentState::kMostRows;
    for (const RecurrentState* state : recurrences_) most = std::min(most, state->most_rows());
    return most;
}

bool SequenceState::can_begin(const int32_t* parents, int n_pending, int n) const {
    return std::all_of(recurrences_.begin(), recurrences_.end(),
                       [&](const RecurrentState* state) { return state->can_begin(parents, n_pending, n); });
}

bool SequenceState::can_commit(int n) const {
    return std::all_of(recurrences_.begin(), recurrences_.end(),
                       [&](const RecurrentState* state) { return state->can_commit(n); });
}

void SequenceState::mark() {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    for (RecurrentState* state : recurrences_) state->mark();
}

void SequenceState::commit(const int32_t* path, int n) {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    for (const auto& state : states_) state->commit(n_past_, path, n);
    n_slots_ = n_past_ += n;
}

int SequenceState::reach(int n_past) const {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    return reach_locked(n_past);
}

int SequenceState::truncate(int n_past) {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    const int before = n_past_;
    n_slots_ = n_past_ = reach_locked(n_past);
    for (const auto& state : states_) state->truncate(n_past_);
    if (n_past_ < before) was_cut(n_past_);
    return n_past_;
}

int SequenceState::shared_reach(int n_past) const {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    return SequencePool::shared_reach(states_, std::min(n_past, n_past_));
}

int SequenceState::park() {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    const int number = pool_->n_numbers_++;
    SequencePool::Parked parked{number, n_past_, {}};
    n_slots_ = n_past_;
    for (const auto& state : states_) {
        state->truncate(n_past_);
        parked.states.push_back(state->kept(n_past_));
    }
    pool_->parked_.push_back(std::move(parked));
    return number;
}

int SequenceState::reach_parked(int number, int n_past) const {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    const auto sequence = pool_->find(number);
    if (sequence == pool_->parked_.end()) return 0;
    return SequencePool::reach(sequence->states, std::min(n_past, sequence->n_past));
}

int SequenceState::resume(int number, int n_past) {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    const auto sequence = pool_->find(number);
    if (sequence == pool_->parked_.end()) {
        clear();
        return 0;
    }
    n_slots_ = n_past_ = SequencePool::reach(sequence->states, std::min(n_past, sequence->n_past));
    for (size_t i = 0; i < states_.size(); i++) states_[i]->share(*sequence->states[i], n_past_);
    was_cut(0);
    std::rotate(sequence, sequence + 1, pool_->parked_.end());
    return n_past_;
}

int SequenceState::share(const SequenceState& other, int n_past) {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    if (&other == this || other.pool_ != pool_) throw std::invalid_argument("not another sequence of the pool");
    n_slots_ = n_past_ = SequencePool::shared_reach(other.states_, std::min(n_past, other.n_past_));
    for (size_t i = 0; i < states_.size(); i++) states_[i]->share(*other.states_[i], n_past_);
    was_cut(0);
    return n_past_;
}

void SequenceState::clear() {
    n_slots_ = n_past_ = 0;
    for (const auto& state : states_) state->truncate(0);
    was_cut(0);
}

void SequenceState::was_cut(int n_past) {
    for (size_t i = static_cast<size_t>(n_past / kSegment); i < stamps_.size(); i++) stamps_[i] = ++n_stamps_;
}

size_t SequenceState::segment_bytes(int layer) const {
    return places_[static_cast<size_t>(layer)].kv->memory().segments.layer_bytes();
}

int SequenceState::first_held(int layer) const {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    return static_cast<int>(places_[static_cast<size_t>(layer)].kv->first());
}

int SequenceState::first_kept(int layer, int n_past) const {
    return static_cast<int>(places_[static_cast<size_t>(layer)].kv->memory().first_kept(n_past));
}

uint64_t SequenceState::stamp(int segment) const {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    return stamps_[static_cast<size_t>(segment)];
}

bool SequenceState::copy_segment(int layer, int segment, int n_tokens, uint64_t stamp, uint8_t* to) const {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    const size_t number = static_cast<size_t>(segment);
    const Place& place = places_[static_cast<size_t>(layer)];
    if (stamps_[number] != stamp || n_past_ < segment * kSegment + n_tokens || number < place.kv->first()) return false;
    if (is_running_ && n_tokens < kSegment) return false;
    std::copy_n(place.kv->layer(number, place.index), place.kv->memory().segments.layer_bytes(), to);
    return true;
}

// As in a pass, what is written to are slots that are pending.
bool SequenceState::read_part(const Part& part, size_t segment) const {
    uint64_t at = part.at, sum = part.before;
    for (const int layer : part.layers) {
        const Place& place = places_[static_cast<size_t>(layer)];
        const size_t n_bytes = place.kv->memory().segments.layer_bytes();
        uint8_t* to = place.kv->layer(segment, place.index);
        if (part.file->read(at, n_bytes, to) != n_bytes) return false;
        sum = byte_sum(to, n_bytes, sum);
        at += n_bytes;
    }
    return sum == part.sum;
}

bool SequenceState::read_segment(std::span<const Part> parts, int n_tokens) {
    const SequencePool::Want want{this, n_past_ + n_tokens};
    SequencePool::reserve({&want, 1});
    const size_t segment = static_cast<size_t>(n_past_ / kSegment);
    bool is_whole = false;
    try {
        is_whole = std::all_of(parts.begin(), parts.end(), [&](const Part& part) { return read_part(part, segment); });
    } catch (const std::system_error&) {
        is_whole = false;
    }
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    is_running_ = false;
    if (is_closed_) clear();
    if (is_closed_ || !is_whole) return false;
    std::vector<int32_t> path(static_cast<size_t>(n_tokens));
    std::iota(path.begin(), path.end(), 0);
    for (const auto& state : states_) state->commit(n_past_, path.data(), n_tokens);
    n_slots_ = n_past_ += n_tokens;
    for (int layer = 0; layer < static_cast<int>(places_.size()); layer++) {
        const KvSizes* kv = std::get_if<KvSizes>(&sizes().layers[static_cast<size_t>(layer)]);
        if (kv && kv->of >= 0) continue;  // another layer's
        const auto names = [layer](const Part& part) { return std::ranges::count(part.layers, layer) > 0; };
        if (std::none_of(parts.begin(), parts.end(), names))
            places_[static_cast<size_t>(layer)].kv->drop_before(segment + 1);
    }
    return true;
}

void SequenceState::close() {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    is_closed_ = true;
    if (!is_running_) clear();
}

void SequenceState::begin(const int32_t* parents, int n_pending, int n) {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    for (RecurrentState* state : recurrences_) state->begin(parents, n_pending, n);
}

bool SequenceState::begin_reading() {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    is_running_ = true;
    return !is_closed_;
}

void SequenceState::end_pass() {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    is_running_ = false;
    for (RecurrentState* state : recurrences_) state->end();
    if (is_closed_) clear();
}
