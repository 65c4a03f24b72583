// How experts lie in memory and in files, in Python.
#include <algorithm>

#include "activations.h"
#include "bind/bindings.h"
#include "experts/predictor.h"
#include "experts/records.h"
#include "experts/router.h"
#include "experts/store.h"
#include "packing/packing.h"
#include "pool.h"

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

namespace {

using MatrixSizes = std::tuple<int, int, int>;  // format, n_out, n_in

ExpertMatrix matrix_of(const MatrixSizes& sizes, int least_out = 1) {
    const auto [format, n_out, n_in] = sizes;
    if (n_out < least_out) throw nb::value_error("n_out must be positive");
    return {packed_format(format, n_in), n_out, n_in};
}

void add_layer(ExpertLayout& layout, int n_experts, const MatrixSizes& gate, const MatrixSizes& up,
               const MatrixSizes& down) {
    if (n_experts < 1) throw nb::value_error("n_experts must be positive");
    layout.add_layer(n_experts, matrix_of(gate), matrix_of(up, 0), matrix_of(down));
}

// part: 0 gate, 1 up, 2 down. source: the whole matrix. ggml_type: of the source; see can_pack.
void pack_expert(const ExpertLayout& layout, int layer, int part, int ggml_type, Bytes source, WritableBytes record,
                 Pool& threads) {
    check_layer(layout, layer);
    const ExpertLayer& of_layer = layout.layer(layer);
    if (part < 0 || part >= kExpertParts) throw nb::index_error("no such part");
    const Matrix& m = of_layer.parts[part];
    const Format of = format_of(ggml_type, m.n_in);
    if (of == Format::I2_S || !can_pack(of, m.format)) {
        throw nb::value_error("a source of this type cannot be packed as the matrix is");
    }
    if (source.size() != matrix_source_bytes(ggml_type, m.n_out, m.n_in) || record.size() != of_layer.record_bytes) {
        throw nb::value_error("source must be a whole matrix, and record the bytes of an expert");
    }
    ReleasedGil release;
    threads.run([&](int thread) {
        threads.for_tasks(thread, m.n_groups(), [&](int g) {
            pack_expert_group(of_layer, static_cast<ExpertPart>(part), of, source.data(), g, record.data());
        });
    });
}

// (experts, weights), (n_used,) each. products: (n_experts,).
std::pair<std::vector<int32_t>, std::vector<float>> route_one(const ExpertsConfig& config, const std::string& isa,
                                                              Floats products, std::optional<Floats> selection_bias) {
    const size_t n = static_cast<size_t>(config.n_experts), n_used = static_cast<size_t>(config.n_used);
    if (products.size() != n || (selection_bias && selection_bias->size() != n)) {
        throw nb::value_error("expected a product and a bias for each expert");
    }
    std::vector<float> padded(round_up(n, kRows)), scores(n), weights(round_up(n_used, kRows));
    std::copy(products.data(), products.data() + n, padded.begin());
    std::vector<int32_t> chosen(n_used);
    route(config, kernels_of(isa), padded.data(), selection_bias ? selection_bias->data() : nullptr, scores.data(),
          chosen.data(), weights.data());
    weights.resize(n_used);
    return {std::move(chosen), std::move(weights)};
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
    m.def("pack_expert", &pack_expert, "layout"_a, "layer"_a, "part"_a, "ggml_type"_a, "source"_a, "record"_a,
          "threads"_a, "Pack the gate (0), up (1) or down (2) matrix of an expert into its record.");
    m.def("route", &route_one, "config"_a, "isa"_a, "products"_a, "selection_bias"_a = nb::none(),
          "The experts of a row with these products of a router, in the order of their sum, and their weights.");
}

void bind_predictor(nb::module_& m) {
    const auto checked = [](const ExpertPredictor& predictor, int layer) {
        if (!predictor.has(layer)) throw nb::value_error("there is no such layer of experts");
    };
    nb::class_<ExpertPredictor>(m, "ExpertPredictor", "Which experts layers will need; see experts/predictor.h.")
        .def(
            "set",
            [=](ExpertPredictor& predictor, int layer, int n) {
                checked(predictor, layer);
                if (n < 0) throw nb::value_error("n must be 0 or more");
                predictor.set(layer, n);
            },
            "layer"_a, "n"_a, "In passes of few rows, read the n most probable experts of each row ahead; 0 for none.")
        .def("observe", &ExpertPredictor::observe, "every"_a,
             "In every so many passes, predict layers too that are not read ahead, and only count; 0 for never.")
        .def(
            "counts",
            [=](const ExpertPredictor& predictor, int layer) {
                checked(predictor, layer);
                const ExpertPredictor::Counts counts = predictor.counts(layer);
                return std::pair(counts.predicted, counts.needed);
            },
            "layer"_a, "Experts that were predicted, and those of them that were needed.");
}

}  // namespace

void bind_experts(nb::module_& m) {
    bind_layout(m);
    bind_predictor(m);
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
                check_experts(*records.layout(), layer, {expert});
                const ExpertLayer& of = records.layout()->layer(layer);
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
