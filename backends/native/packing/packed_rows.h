// Single rows of a packed matrix as floats: a model whose token embedding is its output matrix has it once.
#pragma once

#include "kernels/matrix.h"

// Whether rows of a packed format can be read, all but I2_S.
bool has_packed_rows(Format format);

// Row `row` of it, (n_in,): the bits that dequantize_row gives for the row that was packed.
void dequantize_packed_row(const Matrix& matrix, int row, float* out);
