// Threads and weights in Python.
#include "weights.h"
#include "bind/bindings.h"
#include "packing/packed_rows.h"
#include "packing/packing.h"
#include "pool.h"

namespace {

// "layers.3.mixer.q"; what belongs to no block has its role as its name.
std::string name_of(const std::string& block, const std::string& role) {
    return block.empty() ? role : block + "." + role;
}

void init_weights(Weights* weights, size_t n_bytes, std::optional<Bytes> packed, std::shared_ptr<Weights> parent) {
    if (packed && (packed->size() != n_bytes || reinterpret_cast<uintptr_t>(packed->data()) % 64)) {
        throw nb::value_error("packed must have n_bytes bytes, 64-byte aligned");
    }
    new (weights) Weights(n_bytes, packed ? packed->data() : nullptr, std::move(parent));
}

void set_matrix(Weights& weights, const std::string& block, const std::string& role, int format, int n_out, int n_in) {
    if (n_out < 1) throw nb::value_error("n_out must be positive");
    weights.set_matrix(name_of(block, role), packed_format(format, n_in), n_out, n_in);
}

// ggml_type: of the source; see can_pack.
void pack_rows(Weights& weights, const std::string& block, const std::string& role, int first_row, int ggml_type,
               Bytes source, Pool& threads, float scale) {
    const std::string name = name_of(block, role);
    if (weights.is_mapped()) throw nb::value_error("these weights are packed already");
    const Matrix& m = weights.own_matrix(name);
    const Format of = format_of(ggml_type, m.n_in);
    if (!can_pack(of, m.format)) throw nb::value_error("a source of this type cannot be packed as the matrix is");
    const size_t row_bytes = matrix_source_bytes(ggml_type, 1, m.n_in);
    if (source.size() % row_bytes) throw nb::value_error("source must be whole rows of the matrix");
    const size_t n_rows = source.size() / row_bytes, n_out = static_cast<size_t>(m.n_out);
    if (first_row < 0 || first_row % kRows || static_cast<size_t>(first_row) + n_rows > n_out ||
        (n_rows % kRows && static_cast<size_t>(first_row) + n_rows != n_out)) {
        throw nb::value_error("rows must be whole groups of 16 within the matrix, or its last ones");
    }
    ReleasedGil release;
    weights.pack_rows(name, first_row, static_cast<int>(n_rows), of, source.data(), scale, threads);
}

void set_vector(Weights& weights, const std::string& block, const std::string& role, Floats source) {
    if (weights.is_mapped()) throw nb::value_error("these weights are packed already");
    weights.set_vector(name_of(block, role), source.data(), static_cast<int>(source.size()));
}

void map_vector(Weights& weights, const std::string& block, const std::string& role, int n) {
    if (!weights.is_mapped() || n < 1) throw nb::value_error("only packed weights can be mapped");
    weights.set_vector(name_of(block, role), nullptr, n);
}

StoredRows stored_rows(int ggml_type, int n_vocab, int n_embd) {
    const Format format = format_of(ggml_type, n_embd);
    if (format == Format::I2_S) throw nb::value_error("I2_S has no rows that can be read alone");
    if (n_vocab < 1) throw nb::value_error("n_vocab must be positive");
    return {format, matrix_source_bytes(ggml_type, 1, n_embd)};
}

// The embeddings, or the table that has a part for each layer.
void set_rows(Weights& weights, std::unique_ptr<const Embedding> rows, bool of_layers) {
    of_layers ? weights.set_layer_table(std::move(rows)) : weights.set_embedding(std::move(rows));
}

void set_embedding(Weights& weights, int ggml_type, int n_vocab, int n_embd, Bytes source, bool of_layers) {
    const StoredRows rows = stored_rows(ggml_type, n_vocab, n_embd);
    if (source.size() != rows.row_bytes * static_cast<size_t>(n_vocab)) {
        throw nb::value_error("source has another size");
    }
    set_rows(weights, std::make_unique<RowsInMemory>(rows, source.data(), n_vocab, n_embd), of_layers);
}

void set_embedding_of_file(Weights& weights, int ggml_type, int n_vocab, int n_embd, int descriptor,
                           const FileName& path, uint64_t offset, bool of_layers) {
    const StoredRows rows = stored_rows(ggml_type, n_vocab, n_embd);
    CachedFile file(descriptor, path.bytes);
    set_rows(weights, std::make_unique<RowsOfFile>(rows, std::move(file), path.bytes, offset, n_vocab, n_embd),
             of_layers);
}

void set_embedding_of_matrix(Weights& weights, const std::string& block, const std::string& role) {
    const Matrix& matrix = weights.own_matrix(name_of(block, role));
    if (!has_packed_rows(matrix.format)) throw nb::value_error("I2_S has no rows that can be read alone");
    weights.set_embedding(std::make_unique<RowsOfMatrix>(matrix));
}

void init_device(ProductDevice* device, uintptr_t product, uintptr_t state, nb::object) {
    if (!product) throw nb::value_error("product must be the address of a function");
    new (device) ProductDevice(reinterpret_cast<DeviceProduct>(product), reinterpret_cast<void*>(state));
}

void set_device(Weights& weights, const std::string& block, const std::string& role,
                std::shared_ptr<ProductDevice> device, int number) {
    weights.set_device(name_of(block, role), std::move(device), number);
}

}  // namespace

void bind_weights(nb::module_& m) {
    nb::class_<ProductDevice>(m, "ProductDevice",
                              "A function of C that multiplies with ternary matrices; see product_device.h.")
        .def("__init__", &init_device, "product"_a, "state"_a, "owner"_a.none(), nb::keep_alive<1, 4>(),
             "product, state: addresses; owner: what keeps both alive.")
        .def_static("n_bytes", &ProductDevice::n_bytes, "n_out"_a, "Memory that it takes for a matrix of n_out rows.");

    nb::class_<Pool>(m, "Threads",
                     "Threads shared by models that never run at the same time, such as a target and its drafters.")
        .def(
            "__init__",
            [](Pool* pool, int n) {
                if (n < 1 || n > 1024) throw nb::value_error("n_threads must be in 1..1024");
                new (pool) Pool(n);
            },
            "n"_a)
        .def_prop_ro("n", &Pool::size);

    nb::class_<Weights>(m, "Weights", "Packed weights by the name of their block and their role in it.")
        .def("__init__", &init_weights, "n_bytes"_a, "packed"_a = nb::none(), "parent"_a = nb::none(),
             nb::keep_alive<1, 3>())
        .def(
            "read_packed",
            [](Weights& weights, const FileName& path, uint64_t offset) {
                if (weights.is_mapped() || offset % DirectFile::kAlignment) {
                    throw nb::value_error("packed weights are read once, and from a whole page on");
                }
                ReleasedGil release;
                weights.read_packed(path.bytes, offset);
            },
            "path"_a, "offset"_a, "Read all weights from a file that has them packed. Raises RuntimeError.")
        .def("set_matrix", &set_matrix, "block"_a, "role"_a, "format"_a, "n_out"_a, "n_in"_a)
        .def("pack_rows", &pack_rows, "block"_a, "role"_a, "first_row"_a, "ggml_type"_a, "source"_a, "threads"_a,
             "scale"_a = 1.0f)
        .def("set_vector", &set_vector, "block"_a, "role"_a, "source"_a)
        .def("map_vector", &map_vector, "block"_a, "role"_a, "n"_a)
        .def("set_embedding", &set_embedding, "ggml_type"_a, "n_vocab"_a, "n_embd"_a, "source"_a, "of_layers"_a = false,
             nb::keep_alive<1, 5>(),
             "Embeddings in memory, as GGUF stores them. of_layers: those that have a part for each layer.")
        .def("set_embedding_of_file", &set_embedding_of_file, "ggml_type"_a, "n_vocab"_a, "n_embd"_a, "descriptor"_a,
             "path"_a, "offset"_a, "of_layers"_a = false,
             "Embeddings that are read from a file, row by row. descriptor: of the open file, of which a copy is kept.")
        .def("set_embedding_of_matrix", &set_embedding_of_matrix, "block"_a, "role"_a,
             "Embeddings that are the rows of a packed matrix.")
        .def("set_device", &set_device, "block"_a, "role"_a, "device"_a, "number"_a,
             "Let a device multiply with a matrix, as its matrix of that number; before decoders are made.")
        .def("check_all_are_used", &Weights::check_all_are_used,
             "Raises ValueError for a weight that no decoder and no part of a head has looked up.")
        .def_prop_ro("n_bytes", &Weights::n_bytes)
        .def_prop_ro(
            "data", [](const Weights& weights) { return bytes_of(weights, weights.data(), weights.n_bytes()); },
            "All packed weights, read-only, without a copy.");
}
