// From GGUF's blocks to the tiles of matrix.h, and single rows to floats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/matrix.h"

// Inputs and bytes of one GGUF block; false for a format that the engine does not have.
bool block_size(int ggml_type, int& n_inputs, size_t& n_bytes);

// Inputs that a row of a packed matrix must be a multiple of; false for a format that the engine does not have.
bool packed_block(int format, int& n_inputs);

// Whether a matrix of one format can be packed as another: as it is; in Q4_0, each block of 32 rounded to it, unless it is
// I2_S; or in base three, if it is ternary.
bool can_pack(Format of, Format as);

// Bytes of a row group; n_in must be a multiple of the format's block.
size_t packed_group_bytes(Format format, int n_in);

// Packs row group g of a matrix that lies at source as GGUF stores it, row by row, into group. scale: of I2_S.
void pack_group(Format of, Format as, const uint8_t* source, float scale, int n_out, int n_in, int g, uint8_t* group);

// Whether rows can be written in a format.
bool can_write(Format as);

// Rows of a matrix (not I2_S) in another format, both as GGUF stores them. Q4_0 has the scales with the smallest squared
// errors.
void write_rows(Format of, const uint8_t* source, size_t n_rows, int n_in, Format as, uint8_t* out);

// Whether no code of some rows of a ternary matrix is 3, which stands for no trit.
bool holds_trits(Format format, const uint8_t* source, size_t n_bytes);

// The weights of one row as floats. Not for I2_S, whose scale does not lie in the row.
void dequantize_row(Format format, const uint8_t* row, int n_in, float* out);
