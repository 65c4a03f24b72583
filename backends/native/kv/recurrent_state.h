// The state of layers with a recurrence: one of a fixed size, which each token changes, and some earlier ones.
//
// Of each token that is not committed a row is kept, from which its change of the state can be made again: what goes into
// the convolution, and k, d and the decay of its heads (arXiv:2412.06464: S = decay S + k d^T). So a tree of drafts needs no
// state a node. Rows that are committed are applied when the next pass reads the state anyway, which reads and writes it
// once. A chain of more tokens than there are rows leaves the state after its last token, the tip, in a second place: the
// state before it is there until the chain is committed.
//
// Earlier states, checkpoints, are where a text can be cut: where a request began to read its prompt, and kBack tokens before
// the end of each long chain, since templates change the end of a prompt. There are some, at growing distances from the end.
// Sequences share them, and rows of committed tokens; none of what is shared changes. They have one store of checkpoints, which
// are given up, also those of others, before a pass lacks a place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "kv/layer_state.h"
#include "kv/segments.h"
#include "platform.h"

// A state of n_heads times S (n_rows, head_dim), and the last n_conv - 1 rows of n_channels that went into the
// convolution. n_k: numbers of the keys of a token. head_dim, n_k and n_channels are multiples of 16; without heads the
// convolution is all.
struct RecurrentSizes {
    int n_heads, head_dim, n_k, n_channels, n_conv, n_rows;

    bool operator==(const RecurrentSizes&) const = default;

    // Parts that are computed one by one: heads and the convolution; or runs of channels of the convolution.
    static constexpr int kChannels = 128;
    int n_parts() const { return n_heads ? n_heads + 1 : (n_channels + kChannels - 1) / kChannels; }
    size_t head_floats() const { return static_cast<size_t>(n_rows) * static_cast<size_t>(head_dim); }
    // Where the rows of the convolution are in a state.
    size_t conv_at() const { return static_cast<size_t>(n_heads) * head_floats(); }
    size_t state_floats() const { return conv_at() + static_cast<size_t>((n_conv - 1) * n_channels); }
    // The same in the row of a token: first what went into the convolution.
    size_t k_at() const { return static_cast<size_t>(n_channels); }
    size_t d_at() const { return k_at() + static_cast<size_t>(n_k); }
    size_t decays_at() const { return d_at() + static_cast<size_t>(n_heads * head_dim); }
    size_t row_floats() const { return decays_at() + static_cast<size_t>((n_heads + 15) / 16 * 16); }
};

class RecurrentState;

// The memory of states and rows that all sequences share. A state of all layers is in one slot, and the rows of a token in all
// layers are one row.
class RecurrentMemory : public LayerMemory {
public:
    // Most tokens of a tree, and of a chain whose rows are kept: 32, or 24, or 16 where these bytes do not hold more.
    static constexpr int kMostRows = 32;
    static constexpr size_t kRowBytes = size_t{32} << 20;
    static int most_rows_of(const RecurrentSizes& sizes, int n_layers, size_t n_bytes);

    // Those that a sequence needs: the state before a pass, and the one after it.
    static constexpr int kLeastSlots = 2;
    static constexpr size_t kCheckpointBytes = size_t{64} << 20;

    // Checkpoints of so many sequences that run: as many as these bytes of each hold, but one of each, and two, at least.
    static int64_t n_checkpoints(const RecurrentSizes& sizes, int n_layers, size_t n_bytes, int n_sequences);
    static size_t n_bytes(const RecurrentSizes& sizes, int n_layers, size_t n_slots, size_t n_rows);

    // most_of_sequence: slots.  Each of n_sequences has rows of committed tokens, and those of the pass that applies them.
    RecurrentMemory(const RecurrentSizes& sizes, int n_layers, int n_slots, int n_sequences, int most_of_sequence,
                    int most_rows);

    std::unique_ptr<LayerState> state() override;
    std::unique_ptr<LayerClaim> claim() override;
    size_t used_bytes() const override;
    bool is_recurrent() const override { return true; }

    size_t n_parts() const { return static_cast<size_t>(n_layers) * static_cast<size_t>(sizes.n_parts()); }
    // Null for no slot.
    float* at(int slot, int layer) const;
    float* row(int layer, int row) const;

    const RecurrentSizes sizes;
    const int n_layers, most_of_sequence;  // slots
    const int most_rows;
    Users slots, rows;
    std::vector<RecurrentState*> states;  // of all sequences, those that are kept among them

private:
    Memory states_, rows_;
};

// Earlier states of a sequence, ascending. The last one is the base: after it come the committed rows.
struct RecurrentTable {
    struct Entry {
        int position, slot;
    };

    std::vector<Entry> entries;

    bool empty() const { return entries.empty(); }
    int base_slot() const { return entries.empty() ? -1 : entries.back().slot; }
    int base_position() const { return entries.empty() ? 0 : entries.back().position; }
    // Gives back the base, or what is after n_past tokens.
    void drop_base(Users& slots);
    void cut(Users& slots, int n_past);
    // Gives up the checkpoint whose loss costs least, if there is one; of those that nobody else has, where one must get
    // free. length: of the sequence.
    bool thin(Users& slots, int length, bool must_free);
};

class RecurrentState : public LayerState {
public:
    static constexpr int kMostRows = RecurrentMemory::kMostRows;
    static constexpr int kBack = 32;
    // Scratch for the states of nodes: each that waits has another child, so that two nodes at least need a block.
    static constexpr int kMostBlocks = kMostRows / 2 + 1;

    explicit RecurrentState(RecurrentMemory& memory) : memory_(memory), done_(memory.n_parts()) {
        memory.states.push_back(this);
    }
    ~RecurrentState() override {
        clear();
        std::erase(memory_.states, this);
    }
    RecurrentState(const RecurrentState&) = delete;
    RecurrentState& operator=(const RecurrentState&) = delete;

    bool has(int n_past, int n_slots) const override;
    void commit(int n_past, const int32_t* path, int n) override;
    int reach(int n_past) const override { return n_past >= length() ? length() : shared_reach(n_past); }
    int shared_reach(int n_past) const override;
    void truncate(int n_past) override;
    // Without the rows after the base: sequences that run need them.
    std::unique_ptr<LayerState> kept(int n_past) override;
    void share(const LayerState& other, int n_past) override;

    // A request begins here: the state now, or that some tokens before, is worth keeping.
    void mark() { marked_ = is_torn() ? kNone : table_.base_position(); }
    int most_rows() const { return memory_.most_rows; }
    // Whether n rows can come after n_pending pending ones, see begin.
    bool can_begin(const int32_t* parents, int n_pending, int n) const;
    // Whether the first n pending rows, a chain or a path of a tree, can be committed.
    bool can_commit(int n) const { return n == 0 || n >= n_tip_; }

    // ---- a pass, which a claim made room for ----

    // The rows n_pending .. n_pending + n - 1 follow those that parents (n_pending + n,) says, -1 the committed ones.
    void begin(const int32_t* parents, int n_pending, int n);
    // It has ended, whole or not, or has not begun. What was claimed and not used is given back.
    void end();

    // What to do with a state, in this order: apply the committed rows; store it, if there is a target; then the steps of a
    // tree, or a chain of rows.
    //
    // The states of nodes are in blocks: 0 is that after the committed rows, others are scratch.
    struct Step {
        int node;      // of those that hang on the state, the new ones last
        int from, to;  // blocks: of the state before it, and for that after it; to: -1 if nothing follows
        bool is_new;   // has no row yet: its outputs are wanted
    };
    struct Plan {
        bool is_chain;               // too long for rows: leaves a tip
        std::vector<int> committed;  // rows to apply first, see row
        std::vector<int> rows;       // of nodes that have one: of a chain those that were pending, of a tree all
        std::vector<int> parents;    // of nodes: a node, or -1
        std::vector<Step> steps;     // of a tree
        int n_old;                   // nodes that were pending
        int n_nodes;
        int snapshot;  // a node after which the state is stored, -1 for none
    };
    const Plan& plan() const { return plan_; }
    // Of a part of a layer, what was done before in a pass that was stopped does not come again.
    int n_committed(int layer, int part) const {
        return is_done(layer, part) ? 0 : static_cast<int>(plan_.committed.size());
    }
    // Null for the state before the text, which is zeros.
    const float* source(int layer, int part) const {
        return memory_.at(is_done(layer, part) ? target_ : source_, layer);
    }
    // Where the state after the committed rows, or the tip, goes; null where nothing changes.
    float* target(int layer) const { return memory_.at(plan_.is_chain ? tip_ : target_, layer); }
    float* snapshot(int layer) const { return memory_.at(snapshot_, layer); }
    float* row(int layer, int row) const { return memory_.row(layer, row); }
    // The part is in the target.
    void set_done(int layer, int part) {
        if (!plan_.is_chain && target_ >= 0) done_[place_of(layer, part)] = 1;
    }

private:
    friend class RecurrentClaim;

    static constexpr int kNone = -1;

    // What must be at hand before a pass, see needed.
    struct Needed {
        size_t slots, rows;
    };

    size_t place_of(int layer, int part) const {
        return static_cast<size_t>(layer) * static_cast<size_t>(memory_.sizes.n_parts()) + static_cast<size_t>(part);
    }
    bool is_done(int layer, int part) const { return target_ >= 0 && done_[place_of(layer, part)]; }
    int length() const { return table_.base_position() + static_cast<int>(committed_.size()); }
    // Whether a pass writes, or has written, to the base.
    bool is_torn() const;
    bool is_base_kept() const;

    Needed needed(int n_new) const;
    size_t n_held_beside_table() const;
    bool make_place();
    int take_spare();
    int take_row();

    void settle();
    void push_base(int position, int slot);
    void drop_target();
    void drop_pending();
    void give_back_rows(std::vector<int>& rows);
    void give_back_spares();
    void clear() { truncate(0); }
    void take_snapshot(int n_pending, int n);
    void add_steps();

    RecurrentMemory& memory_;
    RecurrentTable table_;
    std::vector<int> committed_;            // rows of the tokens after the base
    int marked_ = kNone;                    // a position whose state is to be kept
    std::vector<int> spares_, spare_rows_;  // for the next pass
    int tip_ = kNone, n_tip_ = 0;
    std::vector<int> nodes_;   // rows of the pending tokens after the tip
    std::vector<int> folded_;  // those that a chain takes into its tip, as long as the pass runs
    int snapshot_ = kNone, snapshot_position_ = 0;
    int source_ = kNone, target_ = kNone;  // of the pass, for the committed rows; the target may be the source
    std::vector<uint8_t> done_;            // parts of layers that are in the target
    bool is_running_ = false;
    Plan plan_{};
};

class RecurrentClaim : public LayerClaim {
public:
    explicit RecurrentClaim(RecurrentMemory& memory) : memory_(memory), slots_(memory.slots), rows_(memory.rows) {}

    bool reserve(LayerState& state, int n_past, int n_slots) override;
    void forget(LayerState& state) override;
    void apply() override;

private:
    struct Claimed {
        RecurrentState* state;
        RecurrentTable table;
        std::vector<int> spares, spare_rows;
    };

    Claimed& claimed_of(LayerState& state);
    bool take_slot(Claimed& of);
    bool thin_others(bool must_free);

    RecurrentMemory& memory_;
    Users slots_, rows_;
    std::deque<Claimed> claimed_;  // of which references stay
};
