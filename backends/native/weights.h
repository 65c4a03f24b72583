// The weights of a model, packed, by the name of their block and their role in it (models/spec.py): "layers.3.mixer.q".
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "embedding.h"
#include "kernels/matrix.h"
#include "mapped_bytes.h"
#include "platform.h"
#include "pool.h"
#include "product_device.h"
#include "recipe.h"

class Weights {
public:
    // n_bytes: of all packed weights. packed: null, or these bytes as data() of other Weights gave them; they must
    // outlive these, set_vector gets no sources, and nothing is packed. parent: null, or the weights of a draft head's
    // target, whose embeddings and output matrix it takes where it has none of its own.
    Weights(size_t n_bytes, const uint8_t* packed, std::shared_ptr<const Weights> parent);
    Weights(const Weights&) = delete;
    Weights& operator=(const Weights&) = delete;

    // Reads all of them from a file in which they lie packed, from a whole page on, past the system's cache of files; from
    // then on they are as if given as `packed`. Throws std::system_error, std::runtime_error for a file that ends too early.
    void read_packed(const std::string& path, uint64_t offset);

    // Makes room for a matrix (n_out, n_in). Throws std::invalid_argument for a name that is there.
    void set_matrix(const std::string& name, Format format, int n_out, int n_in);
    // Packs n_rows of it from first_row on, a multiple of 16, that lie at source as GGUF stores them. of: their format;
    // those of another than the matrix's are rounded to it, which must be Q4_0. scale: of I2_S, which has one for all
    // rows.
    void pack_rows(const std::string& name, int first_row, int n_rows, Format of, const uint8_t* source, float scale,
                   Pool& pool);
    // source: null for what is mapped.
    void set_vector(const std::string& name, const float* source, int n);
    void set_embedding(std::unique_ptr<const Embedding> embedding) { embedding_ = std::move(embedding); }
    // The rows that have a part for each layer.
    void set_layer_table(std::unique_ptr<const Embedding> table) { layer_table_ = std::move(table); }

    // A weight of that size. Throws std::invalid_argument where it is missing or has another one. vector gives null
    // where it is missing.
    const Matrix& matrix(const std::string& name, int n_out, int n_in) const;
    const float* vector(const std::string& name, int n) const;
    const float* required_vector(const std::string& name, int n) const;
    // The matrix called "output" and the embeddings, the parent's where they are missing here.
    const Matrix& output(int n_out, int n_in) const;
    const Embedding& embedding(int n_vocab, int n_embd) const;
    const Embedding& layer_table(int n_vocab, int n_all) const;
    // A matrix of any size that is here.
    const Matrix& own_matrix(const std::string& name) const;
    // Calls visit(name, matrix) for each matrix that is here.
    template <class Visit>
    void for_matrices(const Visit& visit) const {
        for (const auto& [name, matrix] : matrices_) visit(name, matrix);
    }
    // Throws std::invalid_argument for a matrix with longer inputs than these, but for what makes features, which has
    // inputs of its own.
    void check_inputs(const InputSizes& sizes) const;
    // Throws std::invalid_argument for a weight that nobody asked for by its name.
    void check_all_are_used() const;

    // Waits until packed weights are mapped, which a thread does from the start.
    void wait_until_mapped() {
        if (mapping_) mapping_->wait();
    }

    // Products with a matrix that is here, in a format with a scale a row, are the device's from then on, as its matrix of
    // that number. Before decoders are made. Throws std::invalid_argument for another format, and for a second device.
    void set_device(const std::string& name, std::shared_ptr<ProductDevice> device, int number);
    // Null where the kernels do all products.
    ProductDevice* device() const { return device_.get(); }

    // How products read the matrices, which changes no bits; it may be changed between passes.
    PrefetchPolicy& policy() { return policy_; }

    const uint8_t* data() const { return packed_ ? packed_ : memory_.data(); }
    size_t n_bytes() const { return n_bytes_; }
    bool is_mapped() const { return packed_ != nullptr; }

private:
    struct Vector {
        const float* data;
        int n;
    };

    size_t take(size_t n_bytes);
    void check_new(const std::string& name) const;

    size_t n_bytes_, n_taken_ = 0;
    Memory memory_;
    const uint8_t* packed_;
    std::shared_ptr<const Weights> parent_;
    PrefetchPolicy policy_ = known_policy;
    std::map<std::string, Matrix> matrices_;
    std::map<std::string, Vector> vectors_;
    mutable std::map<std::string, bool> used_;
    std::unique_ptr<const Embedding> embedding_, layer_table_;
    std::shared_ptr<ProductDevice> device_;
    std::unique_ptr<MappedBytes> mapping_;
};
