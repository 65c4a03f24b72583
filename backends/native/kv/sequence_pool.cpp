#include "kv/sequence_pool.h"

#include <algorithm>
#include <functional>

#include "kv/sequence_state.h"

namespace {

// Pieces of a memory of which a sequence needs `each`, whatever its length, for those that are kept in further positions: as
// many for each n_ctx of these.
int64_t of_kept(const PoolSizes& sizes, int64_t each) {
    const int64_t n_ctx = sizes.of_sequence.n_ctx;
    const int64_t of_running = n_ctx + int64_t{kSegment} * (sizes.n_sequences - 1);
    const int64_t further = std::max<int64_t>(0, sizes.n_positions - of_running);
    return (each * further + n_ctx - 1) / n_ctx;
}

// The same for all: each one that runs may need so many.
int64_t of_all(const PoolSizes& sizes, int64_t each) { return each * sizes.n_sequences + of_kept(sizes, each); }

int64_t segments_of_windows(const PoolSizes& sizes, int window) {
    return of_all(sizes, KvMemory::n_segments_of(window, sizes.of_sequence.n_batch));
}

// Layers that share a memory.
struct Alike {
    LayerSizes layer;
    std::vector<int> layers;

    int n_layers() const { return static_cast<int>(layers.size()); }
    const KvSizes* kv() const { return std::get_if<KvSizes>(&layer); }
    const RecurrentSizes& recurrent() const { return std::get<RecurrentSizes>(layer); }
    KvShape shape(KvType type) const { return {type, n_layers(), kv()->n_kv_heads, kv()->head_dim, kv()->n_value}; }
    int64_t n_segments(const PoolSizes& sizes) const {
        return kv()->window ? segments_of_windows(sizes, kv()->window) : segments_of(sizes.n_positions);
    }
    int64_t n_checkpoints(const PoolSizes& sizes, int n_sequences) const {
        return RecurrentMemory::n_checkpoints(recurrent(), n_layers(), sizes.checkpoint_bytes, n_sequences);
    }
    // Of a sequence, which may have all checkpoints.
    int64_t most_slots(const PoolSizes& sizes) const {
        return RecurrentMemory::kLeastSlots + n_checkpoints(sizes, sizes.n_sequences);
    }
    int64_t n_slots(const PoolSizes& sizes) const {
        const int64_t of_running = int64_t{RecurrentMemory::kLeastSlots} * (sizes.n_sequences - 1) + most_slots(sizes);
        return of_running + of_kept(sizes, RecurrentMemory::kLeastSlots + n_checkpoints(sizes, 1));
    }
    int most_rows(const PoolSizes& sizes) const {
        return RecurrentMemory::most_rows_of(recurrent(), n_layers(), sizes.row_bytes);
    }
    size_t n_bytes(const PoolSizes& sizes) const;
    std::unique_ptr<LayerMemory> memory(const PoolSizes& sizes) const;
};

size_t Alike::n_bytes(const PoolSizes& sizes) const {
    if (kv()) return shape(sizes.of_sequence.type).segment_bytes() * static_cast<size_t>(n_segments(sizes));
    return RecurrentMemory::n_bytes(recurrent(), n_layers(), static_cast<size_t>(n_slots(sizes)),
                                    2 * static_cast<size_t>(most_rows(sizes) * sizes.n_sequences));
}

std::unique_ptr<LayerMemory> Alike::memory(const PoolSizes& sizes) const {
    const SequenceSizes& one = sizes.of_sequence;
    if (kv())
        return std::make_unique<KvMemory>(shape(one.type), kv()->window, one.n_batch,
                                          static_cast<int>(n_segments(sizes)));
    return std::make_unique<RecurrentMemory>(recurrent(), n_layers(), static_cast<int>(n_slots(sizes)),
                                             sizes.n_sequences, static_cast<int>(most_slots(sizes)), most_rows(sizes));
}

// A window that would hold no less than all of the sequences is none.
LayerSizes kept_of(LayerSizes layer, const PoolSizes& sizes) {
    KvSizes* kv = std::get_if<KvSizes>(&layer);
    if (!kv) return layer;
    if (kv->window >= sizes.of_sequence.n_ctx) kv->window = 0;  // it sees all
    if (kv->window && segments_of_windows(sizes, kv->window) >= segments_of(sizes.n_positions)) kv->window = 0;
    return layer;
}

// The layer whose keys and values a layer reads, -1 for its own.
int read_by(const LayerSizes& layer) {
    const KvSizes* kv = std::get_if<KvSizes>(&layer);
    return kv ? kv->of : -1;
}

std::vector<Alike> alike_of(const PoolSizes& sizes) {
    std::vector<Alike> found;
    const std::vector<LayerSizes>& layers = sizes.of_sequence.layers;
    for (int i = 0; i < static_cast<int>(layers.size()); i++) {
        if (read_by(layers[static_cast<size_t>(i)]) >= 0) continue;
        const LayerSizes layer = kept_of(layers[static_cast<size_t>(i)], sizes);
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
    for (const Alike& alike : alike_of(sizes)) n_bytes += alike.n_bytes(sizes);
    return n_bytes;
}

int SequencePool::most_rows_of_tree(const SequenceSizes& sizes) {
    const PoolSizes of_one = PoolSizes::of_one(sizes);
    int most = RecurrentMemory::kMostRows;
    for (const Alike& alike : alike_of(of_one)) {
        if (!alike.kv()) most = std::min(most, alike.most_rows(of_one));
    }
    return most;
}

SequencePool::SequencePool(const PoolSizes& sizes) : sizes_(sizes), places_(sizes.of_sequence.layers.size()) {
    for (const Alike& alike : alike_of(sizes)) {
        const int window = alike.kv() ? alike.kv()->window : 0, number = static_cast<int>(memories_.size());
        const int n_batch = sizes.of_sequence.n_batch;
        if (window) n_unmoved_ = std::min(n_unmoved_, KvMemory::n_segments_of(window, n_batch) * kSegment);
        memories_.push_back(alike.memory(sizes));
        int index = 0;
        for (const int layer : alike.layers) places_[static_cast<size_t>(layer)] = {number, index++};
    }
    for (size_t i = 0; i < places_.size(); i++) {
        if (const int of = read_by(sizes.of_sequence.layers[i]); of >= 0) places_[i] = places_[static_cast<size_t>(of)];
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

size_t SequencePool::recurrent_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t n_bytes = 0;
    for (const auto& memory : memories_) n_bytes += memory->is_recurrent() ? memory->used_bytes() : 0;
    return n_bytes;
}

SequencePool::States SequencePool::new_states() const {
    const std::lock_guard<std::mutex> lock(mutex_);
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
    for (const Want& want : wants) {
        want.state->n_slots_ = want.n_slots;
        want.state->is_running_ = true;
    }
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

int SequencePool::shared_reach(const States& states, int n_past) {
    for (int asked = -1; asked != n_past;) {
        asked = n_past;
        for (const auto& state : states) n_past = state->shared_reach(n_past);
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
