// How keys and values of one layer and kv head lie in memory, which is what the attention kernels read.
//
// Memory is cut into segments of 128 slots. Slot s of a sequence is position s until a tree is forwarded; a table says
// in which segment it lies. One segment, one layer, one kv head:
//   F16   keys:   for each 16 slots  f16 [head_dim][16 slots]
//         values: f16 [slot][head_dim rounded up to 16]
//   Q8_0  keys:   for each 16 slots  f32 scale [head_dim / 32][16 slots] | codes, head_dim / 4 lines of 64 bytes; line
//                 i, byte 4*slot + c = 128 + code of dimension 4i + c
//         values: f32 scale [slot][head_dim / 32] | i8 codes [slot][head_dim]
//   K6V4  keys:   for each 16 slots and 32 dimensions 6 lines of 64 bytes; of lines i = 0..3 byte 4*slot + c has the low
//                 4 bits of dimensions 4i + c and 16 + 4i + c; of lines 4 + j the high 2 bits of 16j + c, 16j + 4 + c,
//                 16j + 8 + c and 16j + 12 + c, lowest first | bf16 scale [slot]
//                 number: (2 code - 63) * scale
//         values: bf16 scale [slot] | for each slot and 32 dimensions 16 bytes, byte i with dimension i in the low 4 bits
//                 and 16 + i in the high ones
//                 number: (16 code - 120) * scale
//         Both are Hadamard transformed, and keys are without the bias of the model, see attention_block.cpp.
// With a slot a lane, the scores of 16 slots need no sum across a vector.
//
// Rows that are keys, and values with their first numbers, lie as values do, and there are no keys; not as K6V4.
#pragma once

#include <cstddef>
#include <cstdint>

enum class KvType : int { F16 = 1, Q8_0 = 8, K6V4 = 1000 };  // ggml's numbers; K6V4 is none of its types

constexpr int kSegment = 128;  // slots

// Where the kernels find the slots of one layer and kv head.
struct KvHead {
    KvType type;
    int head_dim;             // numbers of a key
    int n_value, ld_v;        // numbers of a value, without and with padding
    bool is_row;              // whether a value is the first numbers of its key
    uint8_t* base;            // of this layer and head in segment 0
    const int32_t* segments;  // by slot / kSegment
    size_t segment_bytes;
    size_t tile_bytes;     // keys of 16 slots
    size_t key_scales_at;  // from the first key to the scale of the first key, for K6V4
    size_t values_at;      // from the first key to the first value, or its scale
    size_t value_bytes;    // of a slot, without the scales
    size_t scales_bytes;   // of all values of the segment; 0 for F16
};
