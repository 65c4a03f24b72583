#include "embedding.h"

#include <stdexcept>
#include <system_error>
#include <vector>

#include "packing/packed_rows.h"
#include "packing/packing.h"

void RowsInMemory::read(int token, float* out) const {
    dequantize_row(rows_.format, data_ + static_cast<size_t>(token) * rows_.row_bytes, n_embd(), out);
}

void RowsOfFile::read(int token, float* out) const {
    std::vector<uint8_t> stored(rows_.row_bytes);
    const uint64_t first = offset_ + static_cast<uint64_t>(token) * rows_.row_bytes;
    const auto refuse = [&](const std::string& reason) {
        throw std::runtime_error(path_ + ": the embedding of token " + std::to_string(token) + ", bytes " +
                                 std::to_string(first) + ".." + std::to_string(first + rows_.row_bytes) +
                                 " of the file, cannot be read: " + reason);
    };
    size_t n_read = 0;
    try {
        n_read = file_.read(first, stored.size(), stored.data());
    } catch (const std::system_error& error) {
        refuse(error.code().message());
    }
    if (n_read < stored.size()) refuse("the file was cut off since the model was loaded; load it again");
    dequantize_row(rows_.format, stored.data(), n_embd(), out);
}

void RowsOfMatrix::read(int token, float* out) const { dequantize_packed_row(matrix_, token, out); }
