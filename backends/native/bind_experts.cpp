// The records of experts and the stores that hold them, in Python.
#include "bindings.h"
#include "expert_records.h"
#include "expert_store.h"
#include "packing.h"
#include "pool.h"

namespace {

// (format, n_out, n_in), see ExpertMatrix.
using MatrixFields = std::tuple<int, int, int>;

ExpertMatrix matrix_of(const MatrixFields& fields) {
    const auto [format, n_out, n_in] = fields;
    if (n_out < 1) throw nb::value_error("n_out must be positive");
    return {packed_format(format, n_in), n_out, n_in};
}

const ExpertLayer& layer_of(const ExpertLayout& layout, int layer) {
    if (layer < 0 || layer >= layout.n_layers() || !layout.layer(layer).n_experts) {
        throw nb::index_error("no such layer of experts");
    }
    return layout.layer(layer);
}

void add_layer(ExpertLayout& layout, int n_experts, const MatrixFields& gate, const MatrixFields& up,
               const MatrixFields& down) {
    if (n_experts < 1) throw nb::value_error("n_experts must be positive");
    layout.add_layer(n_experts, matrix_of(gate), matrix_of(up), matrix_of(down));
}

// part: 0 gate, 1 up, 2 down. source: the whole matrix. ggml_type: of the source; see can_pack.
void pack_expert(const ExpertLayout& layout, int layer, int part, int ggml_type, Bytes source, WritableBytes record,
                 Pool& threads) {
    const ExpertLayer& of_layer = layer_of(layout, layer);
    if (part < 0 || part >= kExpertParts) throw nb::index_error("no such part");
    const Matrix& m = of_layer.parts[part];
    const Format of = format_of(ggml_type, m.n_in);
    if (of == Format::I2_S || !can_pack(of, m.format)) {
        throw nb::value_error("a source of this type cannot be packed as the matrix is");
    }
    if (source.size() != matrix_source_bytes(ggml_type, m.n_out, m.n_in) || record.size() != of_layer.record_bytes) {
        throw nb::value_error("source must be a whole matrix, and record the bytes of an expert");
    }
    nb::gil_scoped_release release;
    threads.run([&](int thread) {
        threads.for_tasks(thread, m.n_groups(), [&](int g) {
            pack_expert_group(of_layer, static_cast<ExpertPart>(part), of, source.data(), g, record.data());
        });
    });
}

void bind_layout(nb::module_& m) {
    nb::class_<ExpertLayout>(m, "ExpertLayout", "How the experts of a model lie in memory and in packed files.")
        .def(nb::init<>())
        .def("add_layer_without_experts", &ExpertLayout::add_layer_without_experts)
        .def("add_layer", &add_layer, "n_experts"_a, "gate"_a, "up"_a, "down"_a,
             "Each (format, n_out, n_in), the format as in matrix.h.")
        .def_prop_ro("n_layers", &ExpertLayout::n_layers)
        .def_prop_ro("n_bytes", &ExpertLayout::n_bytes, "Of the records of all layers.")
        .def(
            "record_bytes", [](const ExpertLayout& layout, int layer) { return layer_of(layout, layer).record_bytes; },
            "layer"_a, "Of one expert.")
        .def(
            "first_byte",
            [](const ExpertLayout& layout, int layer, int expert) {
                if (expert < 0 || expert >= layer_of(layout, layer).n_experts) throw nb::index_error("no such expert");
                return layer_of(layout, layer).first_byte_of(expert);
            },
            "layer"_a, "expert"_a, "Where its record begins, counted over the records of all layers.");
    m.def("pack_expert", &pack_expert, "layout"_a, "layer"_a, "part"_a, "ggml_type"_a, "source"_a, "record"_a,
          "threads"_a, "Pack the gate (0), up (1) or down (2) matrix of an expert into its record.");
}

}  // namespace

void bind_experts(nb::module_& m) {
    bind_layout(m);
    nb::class_<ExpertRecords>(m, "ExpertRecords", "The records of all experts, in memory or in a mapped file.")
        .def(
            "__init__",
            [](ExpertRecords* records, std::shared_ptr<ExpertLayout> layout, std::optional<Bytes> mapped) {
                if (mapped && mapped->size() != layout->n_bytes()) throw nb::value_error("mapped has another size");
                new (records) ExpertRecords(std::move(layout), mapped ? mapped->data() : nullptr);
            },
            "layout"_a, "mapped"_a = nb::none(), nb::keep_alive<1, 3>())
        .def(
            "record",
            [](nb::handle_t<ExpertRecords> self, int layer, int expert) {
                ExpertRecords& records = nb::cast<ExpertRecords&>(self);
                const ExpertLayer& of = layer_of(*records.layout(), layer);
                if (expert < 0 || expert >= of.n_experts) throw nb::index_error("no such expert");
                if (records.is_mapped()) throw nb::value_error("these experts are packed already");
                return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(records.record(layer, expert), {of.record_bytes},
                                                                    self);
            },
            "layer"_a, "expert"_a, "The bytes of an expert that is to be packed.")
        .def_prop_ro(
            "data",
            [](const ExpertRecords& records) { return bytes_of(records, records.data(), records.layout()->n_bytes()); },
            "All of them, read-only, without a copy.");
    nb::class_<ExpertStore>(m, "ExpertStore", "What a pass asks for the experts of its layers.")
        .def_prop_ro("n_bytes", [](const ExpertStore& store) { return store.layout().n_bytes(); });
    nb::class_<ResidentExperts, ExpertStore>(m, "ResidentExperts", "All experts in memory, or mapped.")
        .def(nb::init<std::shared_ptr<ExpertRecords>>(), "records"_a);
}
