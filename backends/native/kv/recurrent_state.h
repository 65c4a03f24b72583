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
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kv/layer_state.h"
#include "platform.h"

// A state of n_heads times S (head_dim, head_dim), and the last n_conv - 1 rows of n_channels that went into the
// convolution. n_k: numbers of the keys of a token. All but n_heads and n_conv are multiples of 16; without heads the
// convolution is all.
struct RecurrentSizes {
    int n_heads, head_dim, n_k, n_channels, n_conv;

    bool operator==(const RecurrentSizes&) const = default;

    // Parts that are computed one by one: heads and the convolution; or runs of channels of the convolution.
    static constexpr int kChannels = 128;
    int n_parts() const { return n_heads ? n_heads + 1 : (n_channels + kChannels - 1) / kChannels; }
    size_t head_floats() const { return static_cast<size_t>(head_dim) * static_cast<size_t>(head_dim); }
    // Where the rows of the convolution are in a state.
    size_t conv_at() const { return static_cast<size_t>(n_heads) * head_floats(); }
    size_t state_floats() const { return conv_at() + static_cast<size_t>((n_conv - 1) * n_channels); }
    // The same in the row of a token: first what went into the convolution.
    size_t k_at() const { return static_cast<size_t>(n_channels); }
    size_t d_at() const { return k_at() + static_cast<size_t>(n_k); }
    size_t decays_at() const { return d_at() + static_cast<size_t>(n_heads * head_dim); }
    size_t row_floats() const { return decays_at() + static_cast<size_t>((n_heads + 15) / 16 * 16); }
};

class RecurrentState : public LayerState {
public:
    // Most tokens of a tree, and of a chain whose rows are kept.
    static constexpr int kMostRows = 32;
    static constexpr int kBack = 32;
    // Scratch for the states of nodes: each that waits has another child, so that two nodes at least need a block.
    static constexpr int kMostBlocks = kMostRows / 2 + 1;

    RecurrentState(const RecurrentSizes& sizes, int n_layers);

    static size_t n_bytes(const RecurrentSizes& sizes, int n_layers);

    void reserve(int n_past, int n_slots, const DropParked& drop_parked) override;
    void commit(int n_past, const int32_t* path, int n) override;
    int reach(int n_past) const override;
    void truncate(int n_past) override;
    void park(int number, int n_past) override;
    int reach_parked(int number, int n_past) const override;
    void resume(int number, int n_past) override;
    void forget(int number) override;
    size_t used_bytes() const override;

    // A request begins here: the state now, or that some tokens before, is worth keeping.
    void mark() { marked_ = base_position(); }
    // Whether n rows can come after n_pending pending ones, see begin.
    bool can_begin(const int32_t* parents, int n_pending, int n) const;
    // Whether the first n pending rows, a chain or a path of a tree, can be committed.
    bool can_commit(int n) const { return n == 0 || n >= n_tip_; }

    // ---- a pass, which reserve made room for ----

    // The rows n_pending .. n_pending + n - 1 follow those that parents (n_pending + n,) says, -1 the committed ones.
    void begin(const int32_t* parents, int n_pending, int n);

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
    const float* source(int layer, int part) const { return at(is_done(layer, part) ? target_ : source_, layer); }
    // Where the state after the committed rows, or the tip, goes; null where nothing changes.
    float* target(int layer) const { return plan_.is_chain ? at(tip_, layer) : at(target_, layer); }
    float* snapshot(int layer) const { return at(snapshot_, layer); }
    float* row(int layer, int row) const;
    // The part is in the target.
    void set_done(int layer, int part) {
        if (!plan_.is_chain && target_ >= 0) done_[place_of(layer, part)] = 1;
    }

private:
    static constexpr int kNone = -1;

    struct Entry {
        int position, slot;
    };
    using Table = std::vector<Entry>;  // ascending

    static int n_slots(const RecurrentSizes& sizes, int n_layers);
    static size_t slot_floats(const RecurrentSizes& sizes, int n_layers);

    size_t place_of(int layer, int part) const {
        return static_cast<size_t>(layer) * static_cast<size_t>(sizes_.n_parts()) + static_cast<size_t>(part);
    }
    bool is_done(int layer, int part) const { return target_ >= 0 && done_[place_of(layer, part)]; }
    float* at(int slot, int layer) const;

    int base_position() const { return table_.empty() ? 0 : table_.back().position; }
    int length() const { return base_position() + static_cast<int>(committed_.size()); }
    // Whether a pass has written to the last state of the table.
    bool is_torn() const;
    void settle();
    void drop_target();
    void drop_pending();
    void cut_table(Table& table, int n_past);
    void keep_base_or_drop(int next_position, int next_slot);

    bool has_free() const { return !free_.empty(); }
    int take();
    int take_spare();
    void share(int slot) { users_[static_cast<size_t>(slot)]++; }
    void give_back(int slot);
    bool thin();
    int take_row();
    void give_back_rows(std::vector<int>& rows);
    void take_snapshot(int n_pending, int n);
    void add_steps();
    std::vector<std::pair<int, Table>>::const_iterator find(int number) const;

    RecurrentSizes sizes_;
    int n_layers_;
    Memory states_, rows_;
    std::vector<int> users_;  // of each slot
    std::vector<int> free_, free_rows_;
    int n_touched_ = 0, n_rows_touched_ = 0;

    Table table_;                 // the last one is the base: after it come the committed rows
    std::vector<int> committed_;  // rows of the tokens after the base
    int marked_ = kNone;          // a position whose state is to be kept
    std::vector<int> spares_;     // slots for the next pass
    int tip_ = kNone, n_tip_ = 0;
    std::vector<int> nodes_;  // rows of the pending tokens after the tip
    int snapshot_ = kNone, snapshot_position_ = 0;
    int source_ = kNone, target_ = kNone;  // of the pass, for the committed rows; the target may be the source
    std::vector<uint8_t> done_;            // parts of layers that are in the target
    Plan plan_{};
    std::vector<std::pair<int, Table>> parked_;
};
