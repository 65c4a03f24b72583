// What sequences keep in some layers of one kind, and the memory that it is in, which all sequences share.
//
// A LayerState is that of one sequence, which passes run after, or of a sequence that is kept for later. It is told
// n_past, the number of committed tokens, by SequenceState, which holds one state for each kind of layer and keeps them
// in step.
//
// A forward pass makes the slots from n_past on, one for each row that is not committed, in the order of the rows. A state
// that can be had after a row only by computing it, as in recurrent layers, keeps one for each such row until commit says
// which to keep, and older ones at some lengths, which is what reach is about.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

class LayerState {
public:
    virtual ~LayerState() = default;

    // Whether the slots n_past..n_slots-1 are this sequence's own, to be written.
    virtual bool has(int n_past, int n_slots) const = 0;
    // Keeps the slots n_past + path[i], which ascend, as n_past + i, and drops the rest.
    virtual void commit(int n_past, const int32_t* path, int n) = 0;
    // The largest length up to n_past that this sequence can be cut to, and cuts it to one that was reached.
    virtual int reach(int n_past) const = 0;
    virtual void truncate(int n_past) = 0;
    // The same as reach for another sequence that shares this one, also while a pass runs after it.
    virtual int shared_reach(int n_past) const { return reach(n_past); }
    // The first n_past slots once more, in the same memory: as little as is needed to go on after them, or after
    // somewhat fewer.
    virtual std::unique_ptr<LayerState> kept(int n_past) = 0;
    // Becomes the first n_past slots of another one, n_past being a length that shared_reach gives, in the same
    // memory.
    virtual void share(const LayerState& other, int n_past) = 0;
};

// What is about to be taken of a memory, for several sequences together: noted in a copy of its books, which count once it
// is applied. Not longer than the states that it is told of.
class LayerClaim {
public:
    virtual ~LayerClaim() = default;

    // Makes the slots n_past..n_slots-1 a sequence's own. Gives false where memory is missing; it is to be called again
    // once a kept sequence was forgotten.
    virtual bool reserve(LayerState& state, int n_past, int n_slots) = 0;
    virtual void forget(LayerState& state) = 0;
    virtual void apply() = 0;
};

class LayerMemory {
public:
    virtual ~LayerMemory() = default;

    virtual std::unique_ptr<LayerState> state() = 0;  // of an empty sequence
    virtual std::unique_ptr<LayerClaim> claim() = 0;
    // Bytes that were ever in use.
    virtual size_t used_bytes() const = 0;
    virtual bool is_window() const { return false; }
    virtual bool is_recurrent() const { return false; }
};
