// The memory of the keys and values of some layers alike, cut into segments that several sequences may share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kv_head.h"
#include "platform.h"

constexpr int segments_of(int n_slots) { return n_slots / kSegment + (n_slots % kSegment != 0); }

// n_value: 0 for values beside the keys; else a value is the first n_value numbers of its key, which is kept once.
struct KvShape {
    KvType type;
    int n_layers, n_kv_heads, head_dim;
    int n_value = 0;

    size_t segment_bytes() const;
};

// Which of some pieces of memory, by number, are in use, and by how many: segments, states, rows. Copies of it are how it is
// found out what can be had.
class Users {
public:
    explicit Users(int n);

    bool has_free() const { return !free_.empty(); }
    bool is_shared(int32_t piece) const { return users_[static_cast<size_t>(piece)] > 1; }
    int32_t take();  // a free one, for one user; those that were used before come first
    void share(int32_t piece) { users_[static_cast<size_t>(piece)]++; }
    void give_back(int32_t piece);
    int n_touched() const { return n_touched_; }  // pieces that were ever used

private:
    std::vector<int> users_;  // of each piece
    std::vector<int32_t> free_;
    int n_touched_ = 0;
};

class KvSegments {
public:
    // Segments that no sequence has used take no memory of the system.
    KvSegments(const KvShape& shape, int n_segments);

    // Where the slots of a table are, for one of the layers.
    KvHead head(const int32_t* table, int layer, int kv_head) const;
    // From one slot of a table to another, in all layers.
    void copy_slot(const int32_t* table, int from, int to);

    void copy(int32_t from, int32_t to);

    // All heads of a layer in a segment, which lie side by side.
    size_t layer_bytes() const { return static_cast<size_t>(shape_.n_kv_heads) * head_bytes_; }
    uint8_t* layer(int32_t segment, int layer) const {
        return data(segment) + static_cast<size_t>(layer) * layer_bytes();
    }

    size_t used_bytes() const { return segment_bytes_ * static_cast<size_t>(users.n_touched()); }

    Users users;

private:
    uint8_t* data(int32_t segment) const { return memory_.data() + static_cast<size_t>(segment) * segment_bytes_; }

    KvShape shape_;
    KvHead first_;  // of layer 0, head 0
    size_t head_bytes_, segment_bytes_;
    Memory memory_;
};
