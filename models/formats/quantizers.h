// Quantisers: float32 weights to the blocks of a model file, whose layouts are drawn in the Python files of this folder.
#pragma once

#include <cstdint>

// Rows of a matrix, whole blocks each.
struct Rows {
    const float* weights;     // (n_rows, n_in)
    const float* importance;  // (n_in,), none where not needed
    int64_t n_rows, n_in;
    uint8_t* bytes;  // (n_rows, n_in / block elements, block bytes), to be written
};

using Quantize = void (*)(const Rows&);

struct Quantizer {
    const char* name;
    int block_elements, block_bytes;
    // As llama.cpp without an importance matrix and with one; and where we have a better search than its first, that.
    Quantize plain, weighted, own;
};

// Compiled for one set of instructions; all give the same bytes.
struct Quantizers {
    const char* isa;
    const Quantizer* formats;
    int n_formats;
};
