// The state of a sequence in all layers of a model, and sequences that are kept for later.
#pragma once

#include <climits>
#include <memory>
#include <variant>
#include <vector>

#include "kv/kv_state.h"
#include "kv/recurrent_state.h"

// Keys and values. window: positions that a token sees, its own among them; 0 for all.
struct KvSizes {
    int n_kv_heads, head_dim, window;

    bool operator==(const KvSizes&) const = default;
};

// What the mixer of a layer keeps of a sequence, by its kind.
using LayerSizes = std::variant<KvSizes, RecurrentSizes>;

// n_batch: of a sequence that may be pending at once; see has_room.
struct SequenceSizes {
    KvType type = KvType::F16;
    int n_ctx = 0, n_batch = 0;
    std::vector<LayerSizes> layers;
};

// Layers that are alike share one LayerState, and so their tables. Parked sequences are kept as long as their memory is
// not needed, the last used one longest.
class SequenceState {
public:
    explicit SequenceState(const SequenceSizes& sizes);
    SequenceState(const SequenceState&) = delete;
    SequenceState& operator=(const SequenceState&) = delete;

    // What is held when all of it is full.
    static size_t n_bytes(const SequenceSizes& sizes);
    size_t used_bytes() const;
    size_t window_bytes() const;     // of used_bytes, those of layers with a window
    size_t recurrent_bytes() const;  // those of recurrent layers

    int n_past() const { return n_past_; }
    int n_ctx() const { return sizes_.n_ctx; }
    const SequenceSizes& sizes() const { return sizes_; }
    // Slots after n_past that rows may be committed from.
    int n_pending() const { return n_slots_ - n_past_; }
    KvHead head(int layer, int kv_head) const {
        const Place& place = places_[static_cast<size_t>(layer)];
        return place.kv->head(place.index, kv_head);
    }
    // The state of a recurrent layer, and the number of the layer in it.
    std::pair<RecurrentState*, int> recurrent(int layer) const {
        const Place& place = places_[static_cast<size_t>(layer)];
        return {place.recurrent, place.index};
    }

    // Whether the slots n_past..n_slots-1 can be pending: n_batch of them always, more where no window moves for them.
    bool has_room(int n_slots) const { return n_slots - n_past_ <= sizes_.n_batch || n_slots <= n_unmoved_; }
    // Whether recurrent layers can run n rows after n_pending pending ones: all of a long chain that is pending, or none, a
    // tree of RecurrentState::kMostRows at most. parents: (n_pending + n,), see begin.
    bool can_begin(const int32_t* parents, int n_pending, int n) const;
    // Makes these slots this sequence's own. There must be room.
    void reserve(int n_slots);
    // Rows n_pending .. n_pending + n - 1 of what is pending are about to run, for which there is room; parents: of all, a row
    // or -1.
    void begin(const int32_t* parents, int n_pending, int n);
    // Whether the first n pending rows can be committed: of a long chain in recurrent layers none, or no fewer than it has.
    bool can_commit(int n) const;
    // Moves these slots after n_past, ascending, to n_past, n_past + 1, ...
    void commit(const int32_t* path, int n);

    // The largest length up to n_past <= this->n_past() that truncate can reach: less where a window was given back.
    int reach(int n_past) const;
    // Forgets what is after the first n_past tokens, or after fewer; gives how many there are then.
    int truncate(int n_past);

    // A request begins: it may come back to here.
    void mark();

    // Remembers the sequence under a number.
    int park();
    // The same as reach and truncate for a parked sequence, which becomes the current one and stays parked. One that is
    // not there any more has length 0.
    int reach_parked(int number, int n_past) const;
    int resume(int number, int n_past);
    void forget(int number);
    std::vector<int> parked() const;  // used longest ago first

private:
    struct Place {
        KvState* kv;
        RecurrentState* recurrent;
        int index;  // of the layer among those of the state
    };
    struct Parked {
        int number, n_past;
    };

    std::vector<Parked>::const_iterator find(int number) const;

    std::vector<std::unique_ptr<LayerState>> states_;
    std::vector<RecurrentState*> recurrences_;  // of these
    std::vector<Place> places_;                 // by layer
    SequenceSizes sizes_;
    int n_unmoved_ = INT_MAX;
    int n_past_ = 0, n_slots_ = 0, n_numbers_ = 0;
    std::vector<Parked> parked_;  // used longest ago first
};
