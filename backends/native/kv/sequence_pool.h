// The memory of the sequences of a model, and sequences that are kept in it for later.
#pragma once

#include <atomic>
#include <climits>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <variant>
#include <vector>

#include "kv/kv_state.h"
#include "kv/recurrent_state.h"

// Keys and values. window: positions that a token sees, its own among them; 0 for all. n_value: see KvShape. of: the layer
// before it whose keys and values it reads, of which it keeps nothing itself; -1 for its own.
struct KvSizes {
    int n_kv_heads, head_dim, window;
    int n_value = 0;
    int of = -1;

    bool operator==(const KvSizes&) const = default;
};

// What the mixer of a layer keeps of a sequence, by its kind.
using LayerSizes = std::variant<KvSizes, RecurrentSizes>;

// n_batch: of a sequence that may be pending at once; see SequenceState::has_room.
struct SequenceSizes {
    KvType type = KvType::F16;
    int n_ctx = 0, n_batch = 0;
    std::vector<LayerSizes> layers;
};

// n_sequences: that run. n_positions: of all sequences together, those that they share counted once; each has segments of
// its own at its end, and so takes up to kSegment - 1 more.
struct PoolSizes {
    SequenceSizes of_sequence;
    int n_sequences = 1, n_positions = 0;
    // See RecurrentMemory::n_checkpoints and most_rows_of.
    size_t checkpoint_bytes = RecurrentMemory::kCheckpointBytes, row_bytes = RecurrentMemory::kRowBytes;

    static PoolSizes of_one(const SequenceSizes& sizes) { return {sizes, 1, sizes.n_ctx}; }
};

// A pass needs more memory than sequences that run leave. Nothing has changed then.
class CacheFull : public std::runtime_error {
public:
    explicit CacheFull(int n_positions) : std::runtime_error("no segment is free"), n_positions(n_positions) {}

    int n_positions;  // of the pool
};

class SequenceState;

// Layers that are alike share one LayerMemory, and all sequences of a model do, whose common beginnings are held once.
// Sequences that are kept, or parked, are dropped when another one needs their memory, the one used longest ago first.
//
// Any thread may call, also while a pass runs after sequences that are not named in the call; a sequence may be destroyed
// in any thread.
class SequencePool {
public:
    explicit SequencePool(const PoolSizes& sizes);
    ~SequencePool();
    SequencePool(const SequencePool&) = delete;
    SequencePool& operator=(const SequencePool&) = delete;

    // What is held when all of it is full.
    static size_t n_bytes(const PoolSizes& sizes);
    // Tokens of the largest tree that recurrent layers run.
    static int most_rows_of_tree(const SequenceSizes& sizes);
    size_t used_bytes() const;
    size_t window_bytes() const;     // of used_bytes, those of layers with a window
    size_t recurrent_bytes() const;  // those of recurrent layers

    const PoolSizes& sizes() const { return sizes_; }

    // The slots up to n_slots of a sequence.
    struct Want {
        SequenceState* state;
        int n_slots;
    };
    // Makes these slots of several sequences, of any pools, their own, or throws CacheFull. There must be room, see
    // SequenceState::has_room. A pass runs after them from here on, see SequenceState::end_pass.
    static void reserve(std::span<const Want> wants);
    // Whether reserve would do it now, for sequences of this pool; by_batches: for slots that are committed n_batch at a
    // time.
    bool has_free(std::span<const Want> wants, bool by_batches);

    // Parked sequences, by number; see SequenceState.
    void forget(int number);
    std::vector<int> parked() const;  // used longest ago first

private:
    friend class SequenceState;

    struct Place {
        int memory, index;  // of the layer among those in that memory
    };
    using States = std::vector<std::unique_ptr<LayerState>>;
    struct Parked {
        int number, n_past;
        States states;
    };
    struct Dead {
        States states;
        Dead* next;
    };
    struct Claim;

    static int reach(const States& states, int n_past);
    static int shared_reach(const States& states, int n_past);
    States new_states() const;
    std::vector<Parked>::iterator find(int number);
    // Both with the lock.
    std::vector<std::unique_ptr<LayerClaim>> claim(std::span<const Want> wants, bool by_batches, size_t& n_dropped);
    void bury();
    // Gives the memory of a destroyed sequence back, at once or later: never waits.
    void release(States states);

    PoolSizes sizes_;
    int n_unmoved_ = INT_MAX;  // slots of a sequence for which no window moves
    std::vector<std::unique_ptr<LayerMemory>> memories_;
    std::vector<Place> places_;  // by layer
    mutable std::mutex mutex_;
    std::vector<Parked> parked_;  // used longest ago first
    int n_numbers_ = 0;
    std::atomic<Dead*> dead_{nullptr};
};
