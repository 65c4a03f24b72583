#include "input_squares.h"

#include <algorithm>

namespace {

constexpr int kColumns = 128;  // of a part

void add_row(InputSquares::Sums& sums, int matrix, const float* x, int part) {
    const int first = part * kColumns, last = std::min(sums.n_in, first + kColumns);
    double* of_matrix = sums.sums.data() + static_cast<size_t>(matrix) * static_cast<size_t>(sums.n_in);
    for (int i = first; i < last; i++) of_matrix[i] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    if (part == 0) sums.counts[static_cast<size_t>(matrix)]++;
}

}  // namespace

InputSquares::Sums::Sums(int n_matrices, int n_in)
    : n_in(n_in),
      sums(static_cast<size_t>(n_matrices) * static_cast<size_t>(n_in)),
      counts(static_cast<size_t>(n_matrices)) {}

InputSquares::InputSquares(const Weights& weights, const ExpertStore* store, const DecoderConfig& config) {
    const int n_layers = config.n_layers();
    weights.for_matrices([&](const std::string& name, const Matrix& matrix) {
        if (name != "output") of_data_[matrix.data] = &(matrices_[name] = Sums(1, matrix.n_in));
    });
    for (int i = 0; i < n_layers; i++) {
        const LatentConfig* latents = config.layers[static_cast<size_t>(i)].latent_attention();
        for (const char* role : {"k_b", "v_b"}) {
            if (!latents) continue;
            Sums& sums = matrices_.at("layers." + std::to_string(i) + ".mixer." + role);
            sums = Sums(latents->n_heads, sums.n_in);
        }
    }
    for (int i = 0; store && i < std::min(n_layers, store->layout().n_layers()); i++) {
        const ExpertLayer& layer = store->layout().layer(i);
        experts_.emplace_back();
        if (!layer.n_experts) continue;
        const auto sums_of = [&](ExpertPart part) {
            return Sums(layer.n_experts, layer.parts[static_cast<int>(part)].n_in);
        };
        const bool has_gates = layer.parts[static_cast<int>(ExpertPart::Up)].n_out > 0;
        experts_.back() = {sums_of(ExpertPart::Gate), sums_of(ExpertPart::Down), has_gates};
    }
}

int InputSquares::parts_of(int n_in) { return (n_in + kColumns - 1) / kColumns; }

void InputSquares::add(std::initializer_list<const Matrix*> readers, const float* x, size_t ldx, int n_rows, int part,
                       int number) {
    for (const Matrix* const* reader = readers.begin(); reader != readers.end(); reader++) {
        const auto is_same = [&](const Matrix* other) { return other->data == (*reader)->data; };
        const auto found = of_data_.find((*reader)->data);
        if (found == of_data_.end() || std::any_of(readers.begin(), reader, is_same)) continue;
        for (int c = 0; c < n_rows; c++) add_row(*found->second, number, x + static_cast<size_t>(c) * ldx, part);
    }
}

void InputSquares::add_experts(int layer, bool is_down, const ExpertRowsOf& rows, const float* x, size_t ldx,
                               int part) {
    OfLayer& of = experts_[static_cast<size_t>(layer)];
    for (int i = 0; i < rows.n_rows * rows.n_used; i++) {
        const int row = rows.place ? rows.place[i] : i / rows.n_used;
        if (row >= rows.n_places) continue;
        add_row(is_down ? of.down : of.inputs, rows.chosen[i], x + static_cast<size_t>(row) * ldx, part);
    }
}

InputSquares::ByName InputSquares::all() const {
    ByName found = matrices_;
    for (size_t i = 0; i < experts_.size(); i++) {
        if (experts_[i].inputs.counts.empty()) continue;
        const std::string name = "layers." + std::to_string(i) + ".ffn.";
        found[name + "up"] = experts_[i].inputs;
        if (experts_[i].has_gates) found[name + "gate"] = experts_[i].inputs;
        found[name + "down"] = experts_[i].down;
    }
    return found;
}
