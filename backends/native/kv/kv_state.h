// Keys and values of the layers of a kind: all of a text, or those that a window sees.
#pragma once

#include <utility>
#include <vector>

#include "kv/layer_state.h"
#include "kv/segments.h"

// Texts are tables of segments, so that they grow without being moved, and what they have in common is held once.
class KvState : public LayerState {
public:
    KvHead head(int layer, int kv_head) const { return segments_.head(table_.segments.data(), layer, kv_head); }

    void reserve(int n_past, int n_slots, const DropParked& drop_parked) override;
    void commit(int n_past, const int32_t* path, int n) override;
    int reach(int n_past) const override { return reach_of(table_, n_past); }
    void truncate(int n_past) override;
    void park(int number, int n_past) override;
    int reach_parked(int number, int n_past) const override;
    void resume(int number, int n_past) override;
    void forget(int number) override;
    size_t used_bytes() const override { return segments_.used_bytes(); }

protected:
    // Segments by slot / kSegment; those before the first were given back.
    struct Table {
        size_t first = 0;
        std::vector<int32_t> segments;
    };

    KvState(const KvShape& shape, int n_segments) : segments_(shape, n_segments) {}

    // Frees one segment of the current text, which is n_past long and will not be read there any more, if there is one.
    virtual bool give_back_behind(int n_past) = 0;
    virtual int reach_of(const Table& table, int n_past) const = 0;
    // The first segment that the current text keeps when it is parked with n_past tokens.
    virtual size_t first_kept(int n_past) const = 0;

    KvSegments segments_;
    Table table_;

private:
    int32_t take(int n_past, const DropParked& drop_parked);
    void make_room(int n_past, const DropParked& drop_parked);
    void cut(Table& table, size_t n_segments);
    std::vector<std::pair<int, Table>>::const_iterator find(int number) const;

    std::vector<std::pair<int, Table>> parked_;
};

// All of a text of up to n_ctx tokens.
class FullKv : public KvState {
public:
    FullKv(const KvShape& shape, int n_ctx) : KvState(shape, segments_of(n_ctx)) {}

private:
    bool give_back_behind(int) override { return false; }
    int reach_of(const Table&, int n_past) const override { return n_past; }
    size_t first_kept(int) const override { return 0; }
};

// What layers need in which a token sees `window` positions, its own among them: of a text of any length the last
// segments. Up to n_batch slots may be pending. When no segment is free, the first one that is neither in the window nor in
// its slack is used again.
class WindowKv : public KvState {
public:
    // The current text can be cut to so many tokens below the longest that it has been since it was last empty: a chat
    // template may render the end of an answer otherwise.
    static constexpr int kSlack = kSegment;

    WindowKv(const KvShape& shape, int window, int n_batch)
        : KvState(shape, n_segments(window, n_batch)), window_(window) {}

    // The window before the first pending slot, the slack before it, and the pending slots, wherever they begin.
    static int n_segments(int window, int n_batch) { return (window - 1 + kSlack + n_batch - 2) / kSegment + 2; }

private:
    bool give_back_behind(int n_past) override;
    int reach_of(const Table& table, int n_past) const override;
    size_t first_kept(int n_past) const override;

    int window_;
};
