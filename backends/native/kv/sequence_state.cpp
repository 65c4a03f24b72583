#include "kv/sequence_state.h"

#include <algorithm>

SequenceState::SequenceState(std::shared_ptr<SequencePool> pool)
    : pool_(std::move(pool)), states_(pool_->new_states()), places_(pool_->places_.size()) {
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
    n_slots_ = n_past_ = reach_locked(n_past);
    for (const auto& state : states_) state->truncate(n_past_);
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
    std::rotate(sequence, sequence + 1, pool_->parked_.end());
    return n_past_;
}

int SequenceState::share(const SequenceState& other, int n_past) {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    if (&other == this || other.pool_ != pool_) throw std::invalid_argument("not another sequence of the pool");
    n_slots_ = n_past_ = SequencePool::shared_reach(other.states_, std::min(n_past, other.n_past_));
    for (size_t i = 0; i < states_.size(); i++) states_[i]->share(*other.states_[i], n_past_);
    return n_past_;
}

void SequenceState::clear() {
    n_slots_ = n_past_ = 0;
    for (const auto& state : states_) state->truncate(0);
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

void SequenceState::end_pass() {
    const std::lock_guard<std::mutex> lock(pool_->mutex_);
    is_running_ = false;
    for (RecurrentState* state : recurrences_) state->end();
    if (is_closed_) clear();
}
