#include "kv/sequence_state.h"

#include <algorithm>
#include <stdexcept>

namespace {

// Layers that share a state.
struct Alike {
    LayerSizes layer;
    std::vector<int> layers;

    int n_layers() const { return static_cast<int>(layers.size()); }
    const KvSizes* kv() const { return std::get_if<KvSizes>(&layer); }
    KvShape shape(KvType type) const { return {type, n_layers(), kv()->n_kv_heads, kv()->head_dim}; }
    int n_segments(const SequenceSizes& sizes) const {
        return kv()->window ? WindowKv::n_segments(kv()->window, sizes.n_batch) : segments_of(sizes.n_ctx);
    }
    size_t n_bytes(const SequenceSizes& sizes) const {
        if (!kv()) return RecurrentState::n_bytes(std::get<RecurrentSizes>(layer), n_layers());
        return shape(sizes.type).segment_bytes() * static_cast<size_t>(n_segments(sizes));
    }
};

// Its window is none where it would hold no less than all of a sequence.
LayerSizes kept_of(LayerSizes layer, const SequenceSizes& sizes) {
    KvSizes* kv = std::get_if<KvSizes>(&layer);
    if (!kv) return layer;
    if (kv->window >= sizes.n_ctx) kv->window = 0;  // it sees all
    if (kv->window && WindowKv::n_segments(kv->window, sizes.n_batch) >= segments_of(sizes.n_ctx)) kv->window = 0;
    return layer;
}

std::vector<Alike> alike_of(const SequenceSizes& sizes) {
    std::vector<Alike> found;
    for (int i = 0; i < static_cast<int>(sizes.layers.size()); i++) {
        const LayerSizes layer = kept_of(sizes.layers[static_cast<size_t>(i)], sizes);
        const auto same = std::find_if(found.begin(), found.end(), [&](const Alike& of) { return of.layer == layer; });
        if (same == found.end())
            found.push_back({layer, {i}});
        else
            same->layers.push_back(i);
    }
    return found;
}

}  // namespace

size_t SequenceState::n_bytes(const SequenceSizes& sizes) {
    size_t n_bytes = 0;
    for (const Alike& alike : alike_of(sizes)) n_bytes += alike.n_bytes(sizes);
    return n_bytes;
}

SequenceState::SequenceState(const SequenceSizes& sizes) : places_(sizes.layers.size()), sizes_(sizes) {
    for (const Alike& alike : alike_of(sizes)) {
        KvState* kv = nullptr;
        RecurrentState* recurrent = nullptr;
        if (const KvSizes* layer = alike.kv()) {
            const KvShape shape = alike.shape(sizes.type);
            if (layer->window) n_unmoved_ = std::min(n_unmoved_, alike.n_segments(sizes) * kSegment);
            kv = layer->window ? static_cast<KvState*>(new WindowKv(shape, layer->window, sizes.n_batch))
                               : new FullKv(shape, sizes.n_ctx);
            states_.emplace_back(kv);
        } else {
            recurrent = new RecurrentState(std::get<RecurrentSizes>(alike.layer), alike.n_layers());
            states_.emplace_back(recurrent);
            recurrences_.push_back(recurrent);
        }
        int index = 0;
        for (const int layer : alike.layers) places_[static_cast<size_t>(layer)] = {kv, recurrent, index++};
    }
}

size_t SequenceState::used_bytes() const {
    size_t n_bytes = 0;
    for (const auto& state : states_) n_bytes += state->used_bytes();
    return n_bytes;
}

size_t SequenceState::window_bytes() const {
    size_t n_bytes = 0;
    for (const auto& state : states_) {
        if (dynamic_cast<const WindowKv*>(state.get())) n_bytes += state->used_bytes();
    }
    return n_bytes;
}

size_t SequenceState::recurrent_bytes() const {
    size_t n_bytes = 0;
    for (const RecurrentState* state : recurrences_) n_bytes += state->used_bytes();
    return n_bytes;
}

void SequenceState::reserve(int n_slots) {
    const LayerState::DropParked drop_parked = [this] {
        if (parked_.empty()) throw std::length_error("more tokens are pending than there is room for");
        forget(parked_.front().number);
    };
    for (const auto& state : states_) state->reserve(n_past_, n_slots, drop_parked);
    n_slots_ = n_slots;
}

bool SequenceState::can_begin(const int32_t* parents, int n_pending, int n) const {
    return std::all_of(recurrences_.begin(), recurrences_.end(),
                       [&](const RecurrentState* state) { return state->can_begin(parents, n_pending, n); });
}

void SequenceState::begin(const int32_t* parents, int n_pending, int n) {
    for (RecurrentState* state : recurrences_) state->begin(parents, n_pending, n);
}

bool SequenceState::can_commit(int n) const {
    return std::all_of(recurrences_.begin(), recurrences_.end(),
                       [&](const RecurrentState* state) { return state->can_commit(n); });
}

void SequenceState::mark() {
    for (RecurrentState* state : recurrences_) state->mark();
}

void SequenceState::commit(const int32_t* path, int n) {
    for (const auto& state : states_) state->commit(n_past_, path, n);
    n_slots_ = n_past_ += n;
}

// What one state reaches, another may not, so they are asked until all agree. All reach 0.
int SequenceState::reach(int n_past) const {
    for (int asked = -1; asked != n_past;) {
        asked = n_past;
        for (const auto& state : states_) n_past = state->reach(n_past);
    }
    return n_past;
}

int SequenceState::truncate(int n_past) {
    n_slots_ = n_past_ = reach(n_past);
    for (const auto& state : states_) state->truncate(n_past_);
    return n_past_;
}

int SequenceState::park() {
    const int number = n_numbers_++;  // first: a number that failed half way is not given again
    n_slots_ = n_past_;
    for (const auto& state : states_) state->park(number, n_past_);
    parked_.push_back({number, n_past_});
    return number;
}

std::vector<SequenceState::Parked>::const_iterator SequenceState::find(int number) const {
    return std::find_if(parked_.begin(), parked_.end(),
                        [&](const Parked& sequence) { return sequence.number == number; });
}

int SequenceState::reach_parked(int number, int n_past) const {
    const auto sequence = find(number);
    n_past = sequence == parked_.end() ? 0 : std::min(n_past, sequence->n_past);
    for (int asked = -1; asked != n_past;) {
        asked = n_past;
        for (const auto& state : states_) n_past = state->reach_parked(number, n_past);
    }
    return n_past;
}

int SequenceState::resume(int number, int n_past) {
    n_slots_ = n_past_ = reach_parked(number, n_past);
    for (const auto& state : states_) state->resume(number, n_past_);
    if (const auto sequence = find(number); sequence != parked_.end()) {
        const auto at = parked_.begin() + (sequence - parked_.cbegin());
        std::rotate(at, at + 1, parked_.end());
    }
    return n_past_;
}

void SequenceState::forget(int number) {
    const auto sequence = find(number);
    if (sequence == parked_.end()) return;
    for (const auto& state : states_) state->forget(number);
    parked_.erase(sequence);
}

std::vector<int> SequenceState::parked() const {
    std::vector<int> numbers;
    for (const Parked& sequence : parked_) numbers.push_back(sequence.number);
    return numbers;
}
