// The state of a sequence in all layers of a model.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kv/sequence_pool.h"

class CachedFile;

class SequenceState {
public:
    explicit SequenceState(std::shared_ptr<SequencePool> pool);
    // One in a pool of its own.
    explicit SequenceState(const SequenceSizes& sizes);
    ~SequenceState();
    SequenceState(const SequenceState&) = delete;
    SequenceState& operator=(const SequenceState&) = delete;

    SequencePool& pool() const { return *pool_; }
    int n_past() const { return n_past_; }
    int n_ctx() const { return sizes().n_ctx; }
    const SequenceSizes& sizes() const { return pool_->sizes().of_sequence; }
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
    bool has_room(int n_slots) const { return n_slots - n_past_ <= sizes().n_batch || n_slots <= pool_->n_unmoved_; }
    // Whether recurrent layers can run n rows after n_pending pending ones: all of a long chain that is pending, or none, a
    // tree of most_rows_of_tree at most. parents: (n_pending + n,), see begin.
    int most_rows_of_tree() const;
    bool can_begin(const int32_t* parents, int n_pending, int n) const;
    // Whether the first n pending rows can be committed: of a long chain in recurrent layers none, or no fewer than it has.
    bool can_commit(int n) const;
    // Moves these slots after n_past, ascending, to n_past, n_past + 1, ...
    void commit(const int32_t* path, int n);

    // The largest length up to n_past <= this->n_past() that truncate can reach: less where a window was given back.
    int reach(int n_past) const;
    // Forgets what is after the first n_past tokens, or after fewer; gives how many there are then.
    int truncate(int n_past);
    // The length that another sequence reaches when it shares this one, also while a pass runs after it.
    int shared_reach(int n_past) const;

    // A request begins: it may come back to here.
    void mark();

    // Keeps the sequence in the pool under a number.
    int park();
    // The same as reach and truncate for a parked sequence of the pool, which becomes the current one and stays parked.
    // One that is not there any more has length 0.
    int reach_parked(int number, int n_past) const;
    int resume(int number, int n_past);
    // The same for the committed tokens of another sequence of the pool.
    int share(const SequenceState& other, int n_past);

    // Gives the memory back, once no pass runs. The sequence is empty then.
    void close();

    // ---- whole segments as bytes, to be kept elsewhere; not of recurrent layers ----

    // Bytes of a segment in a layer.
    size_t segment_bytes(int layer) const;
    // The first segment that the sequence has in a layer, and the first that it would keep there after n_past tokens.
    int first_held(int layer) const;
    int first_kept(int layer, int n_past) const;
    // A value that a segment never has again once the sequence was cut before its end.
    uint64_t stamp(int segment) const;
    // Copies a layer of a segment whose first n_tokens are committed, unless it is gone, or the sequence was cut since it had
    // this stamp. In any thread; while a pass runs, it copies whole segments only, which do not change.
    bool copy_segment(int layer, int segment, int n_tokens, uint64_t stamp, uint8_t* to) const;
    // The bytes of some layers, one after the other from a place in a file on. sum: byte_sum of all, each after that of
    // the one before, the first one after `before`.
    struct Part {
        std::vector<int> layers;
        const CachedFile* file;
        uint64_t at, before, sum;
    };
    // Commits the first n_tokens of one more segment, from files; layers that no part names give up all segments up to here, so that `reach` tells
    // whether passes can run after it. n_past is at the beginning of a segment. Gives false where bytes cannot be
    // read or are not those of their sum. Throws CacheFull. Both change nothing.
    bool read_segment(std::span<const Part> parts, int n_tokens);

    // ---- a pass, for which SequencePool::reserve made room ----

    // Rows n_pending .. n_pending + n - 1 of what is pending are about to run; parents: of all, a row or -1.
    void begin(const int32_t* parents, int n_pending, int n);
    // The pass has ended, or has not begun.
    void end_pass();

    // Another decoder reads what is committed: until end_reading, close keeps it. Gives false once it was closed.
    bool begin_reading();
    void end_reading() { end_pass(); }

private:
    friend class SequencePool;

    struct Place {
        KvState* kv;
        RecurrentState* recurrent;
        int index;  // of the layer among those of the state
    };

    int reach_locked(int n_past) const { return SequencePool::reach(states_, n_past); }
    void clear();
    void was_cut(int n_past);
    bool read_part(const Part& part, size_t segment) const;

    std::shared_ptr<SequencePool> pool_;
    SequencePool::States states_;
    std::vector<RecurrentState*> recurrences_;  // of these
    std::vector<Place> places_;                 // by layer
    int n_past_ = 0, n_slots_ = 0;
    bool is_running_ = false, is_closed_ = false;
    std::vector<uint64_t> stamps_;  // by segment
    uint64_t n_stamps_ = 0;
};
