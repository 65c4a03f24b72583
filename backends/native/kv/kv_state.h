// Keys and values of the layers of a kind: all of a sequence, or those that a window sees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kv/layer_state.h"
#include "kv/segments.h"

// The memory of keys and values that all sequences share.
//
// Of layers in which a token sees `window` positions, its own among them, a sequence of any length needs the last segments
// only. Up to n_batch slots may be pending. A sequence that holds as many segments as it can need, or finds none free,
// uses the first one again that is neither in the window nor in its slack.
class KvMemory : public LayerMemory {
public:
    // A sequence can be cut to so many tokens below the longest that it has been since it was last empty: a chat template
    // may render the end of an answer otherwise.
    static constexpr int kSlack = kSegment;

    // window: 0 for all of a sequence.
    KvMemory(const KvShape& shape, int window, int n_batch, int n_segments)
        : segments(shape, n_segments),
          window(window),
          most_of_sequence(window ? static_cast<size_t>(n_segments_of(window, n_batch)) : SIZE_MAX) {}

    // The window before the first pending slot, the slack before it, and the pending slots, wherever they begin.
    static int n_segments_of(int window, int n_batch) { return (window - 1 + kSlack + n_batch - 2) / kSegment + 2; }

    std::unique_ptr<LayerState> state() override;
    std::unique_ptr<LayerClaim> claim() override;
    size_t used_bytes() const override { return segments.used_bytes(); }
    bool is_window() const override { return window > 0; }

    // The segment of the first slot that is read after n_past tokens, and of the first that is kept.
    size_t first_read(int n_past) const {
        return window ? static_cast<size_t>(std::max(0, n_past + 1 - window) / kSegment) : 0;
    }
    size_t first_kept(int n_past) const { return first_read(n_past - kSlack); }

    KvSegments segments;
    const int window;
    const size_t most_of_sequence;  // segments
};

// Segments by slot / kSegment; those before the first were given back. Sequences are such tables, so that they grow
// without being moved, and what they have in common is held once.
struct KvTable {
    size_t first = 0;
    std::vector<int32_t> segments;

    // Gives back what is after the first n segments.
    void cut(Users& users, size_t n);
};

class KvState : public LayerState {
public:
    explicit KvState(KvMemory& memory) : memory_(memory) {}
    ~KvState() override { table_.cut(memory_.segments.users, 0); }
    KvState(const KvState&) = delete;
    KvState& operator=(const KvState&) = delete;

    KvHead head(int layer, int kv_head) const { return memory_.segments.head(table_.segments.data(), layer, kv_head); }

    const KvMemory& memory() const { return memory_; }
    // The first segment that is there, and the bytes of a layer in one that is.
    size_t first() const { return table_.first; }
    uint8_t* layer(size_t segment, int layer) const { return memory_.segments.layer(table_.segments[segment], layer); }
    // Gives back what is before a segment, all of which may be.
    void drop_before(size_t segment);

    bool has(int n_past, int n_slots) const override;
    void commit(int n_past, const int32_t* path, int n) override;
    int reach(int n_past) const override { return table_.first <= memory_.first_read(n_past) ? n_past : 0; }
    void truncate(int n_past) override;
    std::unique_ptr<LayerState> kept(int n_past) override;
    void share(const LayerState& other, int n_past) override;

private:
    friend class KvClaim;

    KvMemory& memory_;
    KvTable table_;
};

class KvClaim : public LayerClaim {
public:
    explicit KvClaim(KvMemory& memory) : memory_(memory), users_(memory.segments.users) {}

    bool reserve(LayerState& state, int n_past, int n_slots) override;
    void forget(LayerState& state) override;
    void apply() override;

private:
    struct Claimed {
        KvState* state;
        KvTable table;
    };

    KvTable& table_of(LayerState& state);
    bool find_free(KvTable& table, int n_past);
    bool give_back_after(KvTable& table, int n_past);

    KvMemory& memory_;
    Users users_;
    std::vector<Claimed> claimed_;
    std::vector<std::pair<int32_t, int32_t>> copies_;  // from, to
};
