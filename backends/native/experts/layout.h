// How the experts of a model lie in memory and in packed files: each is a record, its gate, up and down matrices side by
// side, so that one read brings a whole expert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/matrix.h"

enum class ExpertPart : int { Gate, Up, Down };
constexpr int kExpertParts = 3;
constexpr size_t kRecordAlignment = 4096;  // of records in files and in memory, as reads past the page cache need it

// The experts of one layer; n_experts is 0 for a layer without them.
struct ExpertLayer {
    int n_experts = 0;
    Matrix parts[kExpertParts];         // formats and sizes; data is null
    size_t offsets[kExpertParts] = {};  // of the parts in a record, multiples of 64
    size_t record_bytes = 0;            // of one expert, a multiple of kRecordAlignment
    size_t first_byte = 0;              // of the record of expert 0, counted over the records of all layers

    // A matrix of the expert whose record this is.
    Matrix part(ExpertPart which, const uint8_t* record) const {
        Matrix m = parts[static_cast<int>(which)];
        m.data = record + offsets[static_cast<int>(which)];
        return m;
    }
    size_t first_byte_of(int expert) const { return first_byte + static_cast<size_t>(expert) * record_bytes; }
};

// Of what an expert's matrix is: as packed_group_bytes has it.
struct ExpertMatrix {
    Format format;
    int n_out, n_in;
};

class ExpertLayout {
public:
    void add_layer_without_experts() { layers_.emplace_back(); }
    // up: of experts without gates none, so that n_out is 0; gate is what the file calls up then.
    // Throws std::invalid_argument for a format that cannot be packed with these sizes.
    void add_layer(int n_experts, const ExpertMatrix& gate, const ExpertMatrix& up, const ExpertMatrix& down);

    int n_layers() const { return static_cast<int>(layers_.size()); }
    const ExpertLayer& layer(int index) const { return layers_[static_cast<size_t>(index)]; }
    // Of the records of all layers.
    size_t n_bytes() const { return n_bytes_; }

private:
    std::vector<ExpertLayer> layers_;
    size_t n_bytes_ = 0;
};
