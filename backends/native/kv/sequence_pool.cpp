#include "kv/sequence_pool.h"

#include <algorithm>
#include <functional>

#include "kv/sequence_state.h"

namespace {

// Layers that share a memory. A window that would hold no less than all of the sequences is none.
struct Alike {
    KvSizes layer;
    std::vector<int> layers;

    KvShape shape(KvType type) const {
        return {type, static_cast<int>(layers.size()), layer.n_kv_heads, layer.head_dim};
    }
};

// Segments of layers with a window: each sequence that runs may need so many, and those that are kept in further
// positions need as many for each n_ctx of these.
int64_t segments_of_windows(const PoolSizes& sizes, int window) {
    const SequenceSizes& one = sizes.of_sequence;
    const int64_t each = KvMemory::n_segments_of(window, one.n_batch), n_ctx = one.n_ctx;
    const int64_t of_running = n_ctx + int64_t{kSegment} * (sizes.n_sequences - 1);
    const int64_t further = std::max<int64_t>(0, sizes.n_positions - of_running);
    return each * sizes.n_sequences + (each * further + n_ctx - 1) / n_ctx;
}

int n_segments(const PoolSizes& sizes, int window) {
    return window ? static_cast<int>(segments_of_windows(sizes, window)) : segments_of(sizes.n_positions);
}

std::vector<Alike> alike_of(const PoolSizes& sizes) {
    std::vector<Alike> found;
    const std::vector<LayerSizes>& layers = sizes.of_sequence.layers;
    for (int i = 0; i < static_cast<int>(layers.size()); i++) {
        KvSizes layer = std::get<KvSizes>(layers[static_cast<size_t>(i)]);
        if (layer.window >= sizes.of_sequence.n_ctx) layer.window = 0;  // it sees all
        if (layer.window && segments_of_windows(sizes, layer.window) >= segments_of(sizes.n_positions))
            layer.window = 0;
        const auto same = std::find_if(found.begin(), found.end(), [&](const Alike& of) { return of.layer == layer; });
        if (same == found.end())
            found.push_back({layer, {i}});
        else
            same->layers.push_back(i);
    }
    return found;
}

}  // namespace

size_t SequencePool::n_bytes(const PoolSizes& sizes) {
    size_t n_bytes = 0;
    for (const Alike& alike : alike_of(sizes)) {
        n_bytes += alike.shape(sizes.of_sequence.type).segment_bytes() *
                   static_cast<size_t>(n_segments(sizes, alike.layer.window));
    }
    return n_bytes;
}

SequencePool::SequencePool(const PoolSizes& sizes) : sizes_(sizes), places_(sizes.of_sequence.layers.size()) {
    const int n_batch = sizes.of_sequence.n_batch;
    for (const Alike& alike : alike_of(sizes)) {
        const int window = alike.layer.window, number = static_cast<int>(memories_.size());
        if (window) n_unmoved_ = std::min(n_unmoved_, KvMemory::n_segments_of(window, n_batch) * kSegment);
        memories_.push_back(std::make_unique<KvMemory>(alike.shape(sizes.of_sequence.type), window, n_batch,
                                                       n_segments(sizes, window)));
        int index = 0;
        for (const int layer : alike.layers) places_[static_cast<size_t>(layer)] = {number, index++};
    }
}

SequencePool::~SequencePool() {
    bury();
    parked_.clear();
}

size_t SequencePool::used_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t n_bytes = 0;
    for (const auto& memory : memories_) n_bytes += memory->used_bytes();
    return n_bytes;
}

size_t SequencePool::window_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t n_bytes = 0;
    for (const auto& memory : memories_) n_bytes += memory->is_window() ? memory->used_bytes() : 0;
    return n_bytes;
}

SequencePool::States SequencePool::new_states() const {
    States states;
    for (const auto& memory : memories_) states.push_back(memory->state());
    return states;
}

// ---- sequences that end --------------------------------------------------------------------------------------------

// A destructor may run in a thread that must not wait: in one that collects garbage while the lock is held elsewhere, or
// in a child process, where whoever held it is missing.
void SequencePool::release(States states) {
    if (const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock) {
        states.clear();
        return;
    }
    Dead* dead = new Dead{std::move(states), dead_.load()};
    while (!dead_.compare_exchange_weak(dead->next, dead)) {
    }
}

void SequencePool::bury() {
    for (Dead* dead = dead_.exchange(nullptr); dead;) {
        const std::unique_ptr<Dead> buried(dead);
        dead = dead->next;
    }
}

// ---- memory for passes ---------------------------------------------------------------------------------------------

std::vector<std::unique_ptr<LayerClaim>> SequencePool::claim(std::span<const Want> wants, bool by_batches,
                                                             size_t& n_dropped) {
    std::vector<std::unique_ptr<LayerClaim>> claims;
    for (const auto& memory : memories_) claims.push_back(memory->claim());
    const auto drop = [&] {
        if (n_dropped == parked_.size()) throw CacheFull(sizes_.n_positions);
        const Parked& oldest = parked_[n_dropped++];
        for (size_t i = 0; i < claims.size(); i++) claims[i]->forget(*oldest.states[i]);
    };
    for (const Want& want : wants) {
        const int each = by_batches ? sizes_.of_sequence.n_batch : INT_MAX;
        for (int n_past = want.state->n_past_; n_past < want.n_slots;) {
            const int end = want.n_slots - n_past > each ? n_past + each : want.n_slots;
            for (size_t i = 0; i < claims.size(); i++) {
                while (!claims[i]->reserve(*want.state->states_[i], n_past, end)) drop();
            }
            n_past = end;
        }
    }
    return claims;
}

void SequencePool::reserve(std::span<const Want> wants) {
    // The pools, each once, always in the same order.
    std::vector<SequencePool*> pools;
    for (const Want& want : wants) pools.push_back(want.state->pool_.get());
    std::sort(pools.begin(), pools.end(), std::less<>());
    pools.erase(std::unique(pools.begin(), pools.end()), pools.end());
    std::vector<std::unique_lock<std::mutex>> locks;
    struct Claimed {
        SequencePool* pool;
        size_t n_dropped;
        std::vector<std::unique_ptr<LayerClaim>> claims;
    };
    std::vector<Claimed> claimed;
    for (SequencePool* pool : pools) {
        locks.emplace_back(pool->mutex_);
        pool->bury();
        std::vector<Want> missing;
        for (const Want& want : wants) {
            const SequenceState& state = *want.state;
            const auto has = [&](const auto& of) { return of->has(state.n_past_, want.n_slots); };
            if (state.pool_.get() == pool && !std::all_of(state.states_.begin(), state.states_.end(), has))
                missing.push_back(want);
        }
        if (missing.empty()) continue;
        claimed.push_back({pool, 0, {}});
        claimed.back().claims = pool->claim(missing, false, claimed.back().n_dropped);
    }
    for (const Claimed& of : claimed) {
        for (const auto& claim : of.claims) claim->apply();
        std::vector<Parked>& parked = of.pool->parked_;
        parked.erase(parked.begin(), parked.begin() + static_cast<std::ptrdiff_t>(of.n_dropped));
    }
    for (const Want& want : wants) want.state->n_slots_ = want.n_slots;
}

bool SequencePool::has_free(std::span<const Want> wants, bool by_batches) {
    const std::lock_guard<std::mutex> lock(mutex_);
    bury();
    size_t n_dropped = 0;
    try {
        claim(wants, by_batches, n_dropped);
    } catch (const CacheFull&) {
        return false;
    }
    return true;
}

// ---- parked sequences ----------------------------------------------------------------------------------------------

// What one state reaches, another may not, so they are asked until all agree. All reach 0.
int SequencePool::reach(const States& states, int n_past) {
    for (int asked = -1; asked != n_past;) {
        asked = n_past;
        for (const auto& state : states) n_past = state->reach(n_past);
    }
    return n_past;
}

std::vector<SequencePool::Parked>::iterator SequencePool::find(int number) {
    return std::find_if(parked_.begin(), parked_.end(),
                        [&](const Parked& sequence) { return sequence.number == number; });
}

void SequencePool::forget(int number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto sequence = find(number); sequence != parked_.end()) parked_.erase(sequence);
}

std::vector<int> SequencePool::parked() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> numbers;
    for (const Parked& sequence : parked_) numbers.push_back(sequence.number);
    return numbers;
}
