// Rows of the embedding matrix as floats, wherever they are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/matrix.h"
#include "platform.h"

class Embedding {
public:
    Embedding(int n_vocab, int n_embd) : n_vocab_(n_vocab), n_embd_(n_embd) {}
    virtual ~Embedding() = default;

    int n_vocab() const { return n_vocab_; }
    int n_embd() const { return n_embd_; }

    // The row of a token, (n_embd,); any thread. Throws std::runtime_error where it cannot be read.
    virtual void read(int token, float* out) const = 0;

private:
    int n_vocab_, n_embd_;
};

// How GGUF stores the rows.
struct StoredRows {
    Format format;
    size_t row_bytes;
};

// In memory, as GGUF stores them; data must outlive this.
class RowsInMemory : public Embedding {
public:
    RowsInMemory(const StoredRows& rows, const uint8_t* data, int n_vocab, int n_embd)
        : Embedding(n_vocab, n_embd), rows_(rows), data_(data) {}
    void read(int token, float* out) const override;

private:
    StoredRows rows_;
    const uint8_t* data_;
};

// In a file, as GGUF stores them, from an offset on. Each row is read when it is wanted, without a mapping: where the file
// was cut off since, that is an error of the pass, and not the end of the process.
class RowsOfFile : public Embedding {
public:
    RowsOfFile(const StoredRows& rows, CachedFile file, std::string path, uint64_t offset, int n_vocab, int n_embd)
        : Embedding(n_vocab, n_embd), rows_(rows), file_(std::move(file)), path_(std::move(path)), offset_(offset) {}
    void read(int token, float* out) const override;

private:
    StoredRows rows_;
    CachedFile file_;
    std::string path_;
    uint64_t offset_;
};

// In a packed matrix, which the output matrix is where both are one tensor.
class RowsOfMatrix : public Embedding {
public:
    explicit RowsOfMatrix(const Matrix& matrix) : Embedding(matrix.n_out, matrix.n_in), matrix_(matrix) {}
    void read(int token, float* out) const override;

private:
    Matrix matrix_;
};
