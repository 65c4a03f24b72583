// What a text leaves behind in all layers of a model, and texts that are kept for later.
#pragma once

#include <climits>
#include <memory>
#include <variant>
#include <vector>

#include "kv/kv_state.h"

// Keys and values. window: positions that a token sees, its own among them; 0 for all.
struct KvSizes {
    int n_kv_heads, head_dim, window;

    bool operator==(const KvSizes&) const = default;
};

// What the mixer of a layer keeps of a text, by its kind.
using LayerSizes = std::variant<KvSizes>;

// n_batch: of a text that may be pending at once; see has_room.
struct TextSizes {
    KvType type = KvType::F16;
    int n_ctx = 0, n_batch = 0;
    std::vector<LayerSizes> layers;
};

// Layers that are alike share one LayerState, and so their tables. Parked texts are kept as long as their memory is not
// needed, the last used one longest.
class TextState {
public:
    explicit TextState(const TextSizes& sizes);
    TextState(const TextState&) = delete;
    TextState& operator=(const TextState&) = delete;

    // What is held when all of it is full.
    static size_t n_bytes(const TextSizes& sizes);
    size_t used_bytes() const;
    size_t window_bytes() const;  // of used_bytes, those of layers with a window

    int n_past() const { return n_past_; }
    int n_ctx() const { return sizes_.n_ctx; }
    const TextSizes& sizes() const { return sizes_; }
    // Slots behind n_past that rows may be committed from.
    int n_pending() const { return n_slots_ - n_past_; }
    KvHead head(int layer, int kv_head) const {
        const Place& place = places_[static_cast<size_t>(layer)];
        return place.state->head(place.index, kv_head);
    }

    // Whether the slots n_past..n_slots-1 can be pending: n_batch of them always, more where no window moves for them.
    bool has_room(int n_slots) const { return n_slots - n_past_ <= sizes_.n_batch || n_slots <= n_unmoved_; }
    // Makes these slots this text's own. There must be room.
    void reserve(int n_slots);
    // Moves these slots behind n_past, ascending, to n_past, n_past + 1, ...
    void commit(const int32_t* path, int n);

    // The largest length up to n_past <= this->n_past() that truncate can reach: less where a window was given back.
    int reach(int n_past) const;
    // Forgets what is behind the first n_past tokens, or behind fewer; gives how many there are then.
    int truncate(int n_past);

    // Remembers the text under a number.
    int park();
    // The same as reach and truncate for a parked text, which becomes the current one and stays parked. One that is not
    // there any more has length 0.
    int reach_parked(int number, int n_past) const;
    int resume(int number, int n_past);
    void forget(int number);
    std::vector<int> parked() const;  // used longest ago first

private:
    struct Place {
        KvState* state;
        int index;  // of the layer among those of the state
    };
    struct Parked {
        int number, n_past;
    };

    std::vector<Parked>::const_iterator find(int number) const;

    std::vector<std::unique_ptr<LayerState>> states_;
    std::vector<Place> places_;  // by layer
    TextSizes sizes_;
    int n_unmoved_ = INT_MAX;
    int n_past_ = 0, n_slots_ = 0, n_numbers_ = 0;
    std::vector<Parked> parked_;  // used longest ago first
};
