// What texts leave behind in some layers of one kind.
//
// There is the current text, which passes run behind, and there are parked texts, known by a number. A state is told n_past,
// the number of committed tokens, by TextState, which holds one state for each kind of layer and keeps them in step.
//
// A forward pass makes the slots from n_past on, one for each row that is not committed, in the order of the rows. A state
// that can be had after a row only by computing it, as in recurrent layers, keeps one for each such row until commit says
// which to keep, and older ones at some lengths, which is what reach is about.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

class LayerState {
public:
    using DropParked = std::function<void()>;

    virtual ~LayerState() = default;

    // Makes the slots n_past..n_slots-1 the current text's own, to be written. drop_parked forgets the text parked longest
    // ago, in all states; it is called as often as memory is missing.
    virtual void reserve(int n_past, int n_slots, const DropParked& drop_parked) = 0;
    // Keeps the slots n_past + path[i], which ascend, as n_past + i, and drops the rest.
    virtual void commit(int n_past, const int32_t* path, int n) = 0;
    // The largest length up to n_past that the current text can be cut to, and cuts it to one that was reached.
    virtual int reach(int n_past) const = 0;
    virtual void truncate(int n_past) = 0;
    // Keeps the first n_past slots of the current text under a number.
    virtual void park(int number, int n_past) = 0;
    // The same as reach, and truncate, for a parked text, which becomes the current one and stays parked too.
    virtual int reach_parked(int number, int n_past) const = 0;
    virtual void resume(int number, int n_past) = 0;
    virtual void forget(int number) = 0;
    // Bytes that were ever in use.
    virtual size_t used_bytes() const = 0;
};
