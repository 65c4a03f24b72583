// The KV cache: keys and values of a text by slots, slot s being position s until a tree is forwarded.
//
// It is cut into segments of 128 slots, of all layers and heads. A text is a list of segments, so that it grows without
// being moved, and texts that begin alike share what they have in common. Pages that no text has used take no memory.
//
// One segment, one layer, one kv head:
//   F16   keys:   for each 16 slots  f16 [head_dim][16 slots]
//         values: f16 [slot][head_dim rounded up to 16]
//   Q8_0  keys:   for each 16 slots  f32 scale [head_dim / 32][16 slots] | codes, head_dim / 4 lines of 64 bytes; line
//                 i, byte 4*slot + c = 128 + code of dimension 4i + c
//         values: f32 scale [slot][head_dim / 32] | i8 codes [slot][head_dim]
// With a slot a lane, the scores of 16 slots need no sum across a vector.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "platform.h"

enum class KvType : int { F16 = 1, Q8_0 = 8 };  // ggml's numbers

constexpr int kSegment = 128;  // slots

// Where the kernels find the slots of one layer and kv head.
struct KvHead {
    KvType type;
    int head_dim, ld_v;  // ld_v: numbers of a value with padding
    uint8_t* base;       // of this layer and head in segment 0
    const int32_t* segments;
    size_t segment_bytes;
    size_t tile_bytes;    // keys of 16 slots
    size_t values_at;     // from the first key to the first value, or its scale
    size_t value_bytes;   // of a slot, without the scales
    size_t scales_bytes;  // of all values of the segment; 0 for F16
};

struct KvSizes {
    KvType type = KvType::F16;
    int n_layers = 0, n_kv_heads = 0, head_dim = 0, n_ctx = 0;
};

class KvCache {
public:
    explicit KvCache(const KvSizes& sizes);

    static size_t n_bytes(const KvSizes& sizes);
    size_t used_bytes() const { return segment_bytes_ * static_cast<size_t>(n_touched_); }

    int n_past() const { return text_.n_past; }
    int n_ctx() const { return sizes_.n_ctx; }
    KvHead head(int layer, int kv_head) const;

    // Makes the slots n_past..n_slots-1 this text's own. Forgets the texts that were put aside longest ago for it.
    void reserve(int n_slots);
    // Moves these slots behind n_past, ascending, to n_past, n_past + 1, ...
    void commit(const int32_t* path, int n);
    void truncate(int n_past);

    // Remembers the text under a number, as long as its segments are not needed.
    int put_aside();
    // Makes the first n_past slots of a text put aside the current one; it stays aside.
    bool resume(int number, int n_past);
    void forget(int number);
    std::vector<int> aside() const;

private:
    struct Text {
        int number = 0;
        int n_past = 0;
        std::vector<int32_t> segments;
    };

    int32_t take_segment();
    void give_back(const Text& text, size_t first_segment);
    uint8_t* segment(int32_t index) const { return memory_.data() + static_cast<size_t>(index) * segment_bytes_; }
    void copy_slot(int from, int to);

    KvSizes sizes_;
    KvHead first_;  // of layer 0, head 0
    size_t head_bytes_, segment_bytes_;
    Memory memory_;
    std::vector<int> users_;  // texts that have this segment
    std::vector<int32_t> free_;
    int n_touched_ = 0;  // segments that were ever used
    int n_numbers_ = 0;
    Text text_;
    std::vector<Text> aside_;  // longest ago first
};
