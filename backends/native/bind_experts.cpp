// How experts lie in memory and in files, in Python.
#include "bindings.h"
#include "expert_layout.h"
#include "expert_store.h"

namespace {

using MatrixSizes = std::tuple<int, int, int>;  // format, n_out, n_in

ExpertMatrix matrix_of(const MatrixSizes& sizes) {
    const auto [format, n_out, n_in] = sizes;
    if (n_out < 1) throw nb::value_error("n_out must be positive");
    return {packed_format(format, n_in), n_out, n_in};
}

void add_layer(ExpertLayout& layout, int n_experts, const MatrixSizes& gate, const MatrixSizes& up,
               const MatrixSizes& down) {
    if (n_experts < 1) throw nb::value_error("n_experts must be positive");
    layout.add_layer(n_experts, matrix_of(gate), matrix_of(up), matrix_of(down));
}

void check_layer(const ExpertLayout& layout, int layer) {
    if (layer < 0 || layer >= layout.n_layers() || layout.layer(layer).n_experts == 0) {
        throw nb::value_error("there is no such layer of experts");
    }
}

void check_experts(const ExpertLayout& layout, int layer, const std::vector<int32_t>& experts) {
    check_layer(layout, layer);
    for (const int32_t expert : experts) {
        if (expert < 0 || expert >= layout.layer(layer).n_experts) throw nb::value_error("there is no such expert");
    }
}

void bind_layout(nb::module_& m) {
    nb::class_<ExpertLayout>(m, "ExpertLayout", "How experts lie in memory and in packed files: a record each.")
        .def(nb::init<>())
        .def("add_layer_without_experts", &ExpertLayout::add_layer_without_experts)
        .def("add_layer", &add_layer, "n_experts"_a, "gate"_a, "up"_a, "down"_a,
             "gate, up, down: (packed format, n_out, n_in). Raises ValueError.")
        .def_prop_ro("n_layers", &ExpertLayout::n_layers)
        .def_prop_ro("n_bytes", &ExpertLayout::n_bytes, "Of all records.")
        .def(
            "record_bytes",
            [](const ExpertLayout& layout, int layer) {
                check_layer(layout, layer);
                return layout.layer(layer).record_bytes;
            },
            "layer"_a)
        .def(
            "first_byte",
            [](const ExpertLayout& layout, int layer, int expert) {
                check_experts(layout, layer, {expert});
                return layout.layer(layer).first_byte_of(expert);
            },
            "layer"_a, "expert"_a, "Of a record, counted over all of them.")
        .def(
            "offsets",
            [](const ExpertLayout& layout, int layer) {
                check_layer(layout, layer);
                const size_t* offsets = layout.layer(layer).offsets;
                return std::vector<size_t>(offsets, offsets + kExpertParts);
            },
            "layer"_a, "Of the gate, up and down matrices in a record.");
}

}  // namespace

void bind_experts(nb::module_& m) {
    bind_layout(m);
    nb::class_<ExpertStore>(m, "ExpertStore", "Where a pass finds experts.");
}
