// The Python face of the engine. What comes in is checked here and in session.py; below, nothing is.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "decoder.h"
#include "machine_limits.h"
#include "packing.h"
#include "top_k.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Features = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Taps = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// The instruction sets that this CPU and this build have, best first.
std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (int i = 0; i < n_instruction_sets; i++) {
        if (instruction_sets[i].present()) names.push_back(instruction_sets[i].kernels->name);
    }
    return names;
}

const Kernels& kernels_of(const std::string& isa) {
    std::string known;
    for (int i = 0; i < n_instruction_sets; i++) {
        if (!instruction_sets[i].present()) continue;
        if (isa == instruction_sets[i].kernels->name) return *instruction_sets[i].kernels;
        known += (known.empty() ? "" : ", ") + std::string(instruction_sets[i].kernels->name);
    }
    const std::string what = "instruction set '" + isa + "' is not one that this CPU and this build have: " + known;
    throw nb::value_error(what.c_str());
}

// format: a ggml type, or one that only packed weights have.
Format packed_format(int format, int n_in) {
    int n_inputs;
    if (!packed_block(format, n_inputs)) {
        throw nb::value_error(("ggml type " + std::to_string(format) + " has no kernel").c_str());
    }
    if (n_in < 1 || n_in % n_inputs) throw nb::value_error("n_in must be a multiple of the type's block");
    return static_cast<Format>(format);
}

Format format_of(int ggml_type, int n_in) {
    int n_inputs;
    size_t n_bytes;
    if (!block_size(ggml_type, n_inputs, n_bytes)) throw nb::value_error("no type that a file could have");
    return packed_format(ggml_type, n_in);
}

size_t matrix_source_bytes(int ggml_type, int n_out, int n_in) {
    int n_inputs;
    size_t n_bytes;
    block_size(ggml_type, n_inputs, n_bytes);
    return static_cast<size_t>(n_out) * static_cast<size_t>(n_in / n_inputs) * n_bytes;
}

// Bytes that a matrix (n_out, n_in), or a vector where n_in is 0, takes when packed.
size_t packed_bytes(int format, int n_out, int n_in) {
    if (n_out < 1) throw nb::value_error("n_out must be positive");
    const size_t n_groups = (static_cast<size_t>(n_out) + kRows - 1) / kRows;
    if (n_in == 0) return n_groups * kRows * sizeof(float);
    return (n_groups * packed_group_bytes(packed_format(format, n_in), n_in) + 63) / 64 * 64;
}

// What has no layer is given layer 0, which a decoder without layers has room for too.
void check_layer(const Decoder& decoder, int layer) {
    if (layer < 0 || layer >= std::max(1, decoder.config().n_layers)) throw nb::index_error("no such layer");
}

void set_matrix(Decoder& decoder, Role role, int layer, int format, int n_out, int n_in) {
    const Format as = packed_format(format, n_in);
    check_layer(decoder, layer);
    decoder.set_matrix(role, layer, as, n_out, n_in);
}

// ggml_type: of the source; see can_pack.
void pack_rows(Decoder& decoder, Role role, int layer, int first_row, int ggml_type, Bytes source, float scale) {
    check_layer(decoder, layer);
    if (decoder.is_mapped()) throw nb::value_error("these weights are packed already");
    const Matrix& m = decoder.matrix(role, layer);
    if (!m.n_out) throw nb::value_error("set_matrix comes first");
    const Format of = format_of(ggml_type, m.n_in);
    if (!can_pack(of, m.format)) throw nb::value_error("a source of this type cannot be packed as the matrix is");
    const size_t row_bytes = matrix_source_bytes(ggml_type, 1, m.n_in);
    if (source.size() % row_bytes) throw nb::value_error("source must be whole rows of the matrix");
    const size_t n_rows = source.size() / row_bytes, n_out = static_cast<size_t>(m.n_out);
    if (first_row < 0 || first_row % kRows || static_cast<size_t>(first_row) + n_rows > n_out ||
        (n_rows % kRows && static_cast<size_t>(first_row) + n_rows != n_out)) {
        throw nb::value_error("rows must be whole groups of 16 within the matrix, or its last ones");
    }
    nb::gil_scoped_release release;
    decoder.pack_rows(role, layer, first_row, static_cast<int>(n_rows), of, source.data(), scale);
}

// Rows of n_in weights in another type, both as GGUF stores them.
void rewrite_rows(int ggml_type, Bytes source, int n_in, int as, WritableBytes out) {
    const Format of = format_of(ggml_type, n_in), wanted = format_of(as, n_in);
    if (of == Format::I2_S || !can_write(wanted)) throw nb::value_error("rows of this type cannot be had in that one");
    const size_t row_bytes = matrix_source_bytes(ggml_type, 1, n_in), n_rows = source.size() / row_bytes;
    if (source.size() % row_bytes || out.size() != n_rows * matrix_source_bytes(as, 1, n_in)) {
        throw nb::value_error("source must be whole rows, and out have room for as many");
    }
    nb::gil_scoped_release release;
    write_rows(of, source.data(), n_rows, n_in, wanted, out.data());
}

void set_vector(Decoder& decoder, Role role, int layer, Floats source) {
    check_layer(decoder, layer);
    if (decoder.is_mapped()) throw nb::value_error("these weights are packed already");
    decoder.set_vector(role, layer, source.data(), static_cast<int>(source.size()));
}

void map_vector(Decoder& decoder, Role role, int layer, int n) {
    check_layer(decoder, layer);
    if (!decoder.is_mapped() || n < 1) throw nb::value_error("only packed weights can be mapped");
    decoder.set_vector(role, layer, nullptr, n);
}

void set_embedding(Decoder& decoder, int ggml_type, Bytes source) {
    const DecoderConfig& config = decoder.config();
    const Format format = format_of(ggml_type, config.n_embd);
    if (format == Format::I2_S) throw nb::value_error("I2_S has no rows that can be read alone");
    if (source.size() != matrix_source_bytes(ggml_type, config.n_vocab, config.n_embd)) {
        throw nb::value_error("source has another size");
    }
    decoder.set_embedding(format, source.data(), source.size() / static_cast<size_t>(config.n_vocab));
}

void share_output(Decoder& decoder, const Decoder& other) {
    const DecoderConfig& config = decoder.config();
    if (other.output().n_out != config.n_logits || other.output().n_in != config.n_embd) {
        throw nb::value_error("the output matrices have other sizes");
    }
    decoder.share_output(other);
}

// Whether the tokens are in the vocabulary, parents come before their rows, and rows that are no chain fit into n_batch.
bool is_tree(const DecoderConfig& config, std::span<const int32_t> tokens, std::span<const int32_t> parents) {
    bool chain = true, valid = true;
    for (size_t i = 0; i < parents.size(); i++) {
        const int parent = parents[i], row = static_cast<int>(i);
        chain = chain && parent == row - 1;
        valid = valid && parent >= -1 && parent < row;
    }
    for (const int32_t token : tokens) valid = valid && token >= 0 && token < config.n_vocab;
    return valid && (chain || parents.size() <= static_cast<size_t>(config.n_batch));
}

// Calls run(poll) without the interpreter's lock; raises what a signal handler raised meanwhile.
template <class Run>
bool interruptible(const Run& run) {
    bool raised = false, whole;
    const auto poll = [&raised] {
        nb::gil_scoped_acquire acquire;
        raised = PyErr_CheckSignals() != 0;
        return raised;
    };
    {
        nb::gil_scoped_release release;
        whole = run(poll);
    }
    if (raised) throw nb::python_error();
    return whole;
}

std::span<const int32_t> span_of(const Ints& ints) { return {ints.data(), ints.size()}; }

// Gives False if the pass was stopped by interrupt().
bool forward(Decoder& decoder, Ints tokens, Ints parents, int n_pending, Ints rows, Rows logits, Ints layers, Taps taps,
             int tap_row, std::optional<Features> features) {
    const DecoderConfig& config = decoder.config();
    const int n = static_cast<int>(tokens.size()), n_rows = static_cast<int>(rows.size());
    const int n_taps = static_cast<int>(layers.size());
    const size_t n_embd = static_cast<size_t>(config.n_embd);
    if (n < 1 || n > config.n_batch || n_pending < 0 || parents.size() != tokens.size() + n_pending ||
        decoder.n_past() + n_pending + n > config.n_ctx || logits.shape(0) < rows.size() ||
        logits.shape(1) != static_cast<size_t>(config.n_logits) || taps.shape(0) < layers.size() ||
        config.has_features() != features.has_value() ||
        (features && (features->shape(0) != tokens.size() || features->shape(1) != n_embd)) ||
        (n_taps && (taps.shape(2) != n_embd || tap_row < 0 || taps.shape(1) < static_cast<size_t>(tap_row + n)))) {
        throw nb::value_error("forward: arguments do not fit together");
    }
    if (!is_tree(config, span_of(tokens), span_of(parents)))
        throw nb::value_error("forward: a token or parent is out of range");
    for (int i = 0; i < n_rows; i++) {
        if (rows.data()[i] < 0 || rows.data()[i] >= n) throw nb::value_error("forward: a row is out of range");
    }
    return interruptible([&](const auto& poll) {
        return decoder.forward(tokens.data(), parents.data(), n, n_pending, features ? features->data() : nullptr,
                               rows.data(), n_rows, logits.data(), layers.data(), n_taps,
                               n_taps ? taps.data() + static_cast<size_t>(tap_row) * n_embd : nullptr,
                               n_taps ? taps.shape(1) * n_embd : 0, poll);
    });
}

// Reads a list of ints; gives false where there is anything else.
bool read_ints(nb::handle values, std::vector<int32_t>& ints) {
    if (!PyList_CheckExact(values.ptr())) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values.ptr()); i++) {
        PyObject* item = PyList_GET_ITEM(values.ptr(), i);
        if (!PyLong_CheckExact(item)) return false;
        int overflow = 0;
        const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow || value < INT32_MIN || value > INT32_MAX) return false;
        ints.push_back(static_cast<int32_t>(value));
    }
    return true;
}

// Lists of ints: tokens, their parents, or None for those of a chain, and the parents of the pending rows before them.
// Logits of the last rows; taps of all, or None. Gives None where these do not fit together, else what forward gives.
std::optional<bool> forward_lists(Decoder& decoder, nb::handle tokens, nb::handle parents, nb::handle pending,
                                  Rows logits, const std::vector<int32_t>& layers, std::optional<Taps> taps,
                                  std::optional<Features> features) {
    const DecoderConfig& config = decoder.config();
    const size_t n_embd = static_cast<size_t>(config.n_embd), n_taps = layers.size();
    std::vector<int32_t> ids, links, rows;
    if (!read_ints(tokens, ids) || !read_ints(pending, links)) return std::nullopt;
    const int n = static_cast<int>(ids.size()), n_rows = static_cast<int>(logits.shape(0));
    const int n_pending = static_cast<int>(links.size());
    for (int i = 0; parents.is_none() && i < n; i++) links.push_back(n_pending + i - 1);
    if (!parents.is_none() && !read_ints(parents, links)) return std::nullopt;
    if (n < 1 || n > config.n_batch || links.size() != static_cast<size_t>(n_pending + n) ||
        decoder.n_past() + n_pending + n > config.n_ctx || n_rows > n ||
        logits.shape(1) != static_cast<size_t>(config.n_logits) || config.has_features() != features.has_value() ||
        (features && (features->shape(0) != ids.size() || features->shape(1) != n_embd)) ||
        (n_taps && (!taps || taps->shape(0) != n_taps || taps->shape(1) != ids.size() || taps->shape(2) != n_embd)) ||
        !is_tree(config, ids, links)) {
        return std::nullopt;
    }
    for (int i = n - n_rows; i < n; i++) rows.push_back(i);
    return interruptible([&](const auto& poll) {
        return decoder.forward(ids.data(), links.data(), n, n_pending, features ? features->data() : nullptr,
                               rows.data(), n_rows, logits.data(), layers.data(), static_cast<int>(n_taps),
                               n_taps ? taps->data() : nullptr, n_taps ? taps->shape(1) * n_embd : 0, poll);
    });
}

void combine(Decoder& decoder, Features rows, Rows features) {
    const DecoderConfig& config = decoder.config();
    const size_t n = rows.shape(0);
    if (!config.n_combined || n < 1 || n > static_cast<size_t>(config.n_batch) ||
        rows.shape(1) != static_cast<size_t>(config.n_combined) || features.shape(0) != n ||
        features.shape(1) != static_cast<size_t>(config.n_embd)) {
        throw nb::value_error("combine: arguments do not fit together");
    }
    nb::gil_scoped_release release;
    decoder.combine(rows.data(), static_cast<int>(n), features.data());
}

void commit(Decoder& decoder, const std::vector<int32_t>& path) {
    const int n = static_cast<int>(path.size());
    for (int i = 0; i < n; i++) {
        const int row = path[static_cast<size_t>(i)];
        if (row < i || decoder.n_past() + row >= decoder.config().n_ctx) throw nb::value_error("commit: no such row");
    }
    nb::gil_scoped_release release;
    decoder.commit(path.data(), n);
}

void truncate_to(Decoder& decoder, int n_past) {
    if (n_past < 0 || n_past > decoder.n_past()) throw nb::value_error("truncate: no such position");
    decoder.cache().truncate(n_past);
}

using StreamFields = std::tuple<int, bool, int, int, int, int, int, bool>;

StreamFields fields_of(const Stream& s) {
    return {s.ahead, s.easy, static_cast<int>(s.hint), s.at_once, s.columns, s.task, s.tasks_each, s.eager};
}

Stream stream_from(const StreamFields& fields) {
    const auto [ahead, easy, hint, at_once, columns, task, tasks_each, eager] = fields;
    if (ahead < 0 || ahead > 1 << 20 || ahead % 64 || hint < 0 || hint > 2 || at_once < 1 || at_once > 4 ||
        columns < 1 || columns > kFewColumns || task < 0 || task > 1 << 28 || tasks_each < 1 || tasks_each > 64) {
        throw nb::value_error("no such way to read");
    }
    return {ahead, easy, static_cast<Hint>(hint), at_once, columns, task, tasks_each, eager};
}

Stream& stream_of_columns(Reading& reading, bool is_ternary, int n) {
    if (n < 1 || n > kFewColumns) throw nb::value_error("only products of a few columns are tuned");
    return (is_ternary ? reading.ternary : reading.plain)[n];
}

void check_part(const Decoder& decoder, int n_parts, int part) {
    if (n_parts < 1 || part < 0 || part >= n_parts || !decoder.output().data) throw nb::index_error("no such part");
}

double seconds_of_part(Decoder& decoder, int n, int n_parts, int part) {
    check_part(decoder, n_parts, part);
    const DecoderConfig& config = decoder.config();
    if (n < 1 || n > config.n_batch || decoder.n_past() + n > config.n_ctx || config.has_features()) {
        throw nb::value_error("seconds_of_part: arguments do not fit together");
    }
    nb::gil_scoped_release release;
    return decoder.seconds_of_part(n, n_parts, part);
}

// One matrix alone, for tests and benchmarks of the kernels.
class PackedMatrix {
public:
    // packed_as: None for the source's type.
    PackedMatrix(int ggml_type, int n_out, int n_in, Bytes source, float scale, std::optional<int> packed_as)
        : memory_(packed_bytes(packed_as.value_or(ggml_type), n_out, n_in)) {
        const Format of = format_of(ggml_type, n_in), as = packed_format(packed_as.value_or(ggml_type), n_in);
        if (!can_pack(of, as)) throw nb::value_error("a source of this type cannot be packed so");
        if (source.size() != matrix_source_bytes(ggml_type, n_out, n_in)) {
            throw nb::value_error("source has another size");
        }
        matrix_ = {as, n_out, n_in, packed_group_bytes(as, n_in), memory_.data()};
        for (int g = 0; g < matrix_.n_groups(); g++) {
            pack_group(of, as, source.data(), scale, n_out, n_in, g,
                       memory_.data() + static_cast<size_t>(g) * matrix_.group_bytes);
        }
    }

    // y (n, n_out) = x (n, n_in) times the matrix transposed.
    // stream: how it is read, None as on CPUs like this one.
    void multiply(const std::string& isa, nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> x,
                  Rows y, std::optional<StreamFields> stream) {
        const Kernels& kernels = kernels_of(isa);
        Reading reading = known_reading;
        if (stream) {
            for (int i = 0; i <= kFewColumns; i++) reading.plain[i] = reading.ternary[i] = stream_from(*stream);
        }
        Matrix matrix = matrix_;
        matrix.reading = &reading;
        const size_t n = x.shape(0), n_in = static_cast<size_t>(matrix_.n_in);
        if (x.shape(1) != n_in || y.shape(0) != n || y.shape(1) != static_cast<size_t>(matrix_.n_out)) {
            throw nb::value_error("x must be (n, n_in) and y (n, n_out)");
        }
        std::vector<int8_t> q(n * n_in + kBehindInputs);
        std::vector<float> scales(n * (n_in / 32 + 1));
        std::vector<int32_t> sums(n * (n_in / 32 + 1)), centre16(n * n_in / 16 + 1);
        std::vector<int16_t> sums32(n * n_in / 32 + 1);
        std::vector<uint8_t> narrow256(n * n_in / 256 + 1);
        Inputs in;
        in.n_in = matrix_.n_in;
        in.x = x.data();
        in.ldx = n_in;
        in.q32 = in.q256 = in.q_token = q.data();
        in.scale32 = in.scale256 = in.scale_token = scales.data();
        in.sum32 = in.sum_token = sums.data();
        in.centre16 = centre16.data();
        in.sums32 = sums32.data();
        in.narrow256 = narrow256.data();
        for (int c = 0; c < static_cast<int>(n); c++) {
            if (input_kind(matrix_.format) == InputKind::Int8By32) kernels.quantize32(in, c);
            if (input_kind(matrix_.format) == InputKind::Int8By256) kernels.quantize256(in, c);
            if (input_kind(matrix_.format) == InputKind::Int8ByToken) kernels.quantize_token(in, c);
        }
        kernels.matmul(matrix, in, static_cast<int>(n), 0, matrix_.n_groups(), nullptr, y.data(),
                       static_cast<size_t>(matrix_.n_out));
    }

    const Matrix& matrix() const { return matrix_; }
    const uint8_t* data() const { return memory_.data(); }
    size_t n_bytes() const { return matrix_.group_bytes * static_cast<size_t>(matrix_.n_groups()); }

private:
    Memory memory_;
    Matrix matrix_;
};

// Seconds to multiply each of these matrices, one after the other, with n columns of made-up activations, which are
// prepared once before.
double seconds_of_products(const std::vector<const Matrix*>& matrices, const Kernels& kernels, Pool& pool, int n) {
    size_t most_in = 0, most_out = 0;
    for (const Matrix* m : matrices) {
        most_in = std::max(most_in, static_cast<size_t>(m->n_in));
        most_out = std::max(most_out, static_cast<size_t>(m->n_groups() * kRows));
    }
    const size_t columns = static_cast<size_t>(n);
    std::vector<float> y(columns * most_out), scales(columns * (most_in / 32 + 1), 0.01f);
    std::vector<int8_t> q(columns * most_in + kBehindInputs);
    for (size_t i = 0; i < q.size(); i++) q[i] = static_cast<int8_t>(i * 37 % 255 - 127);
    std::vector<int32_t> sums(columns * (most_in / 16 + 1), 5);
    std::vector<int16_t> short_sums(columns * (most_in / 32 + 1), 5);
    std::vector<uint8_t> narrow(columns * (most_in / 256 + 1));
    Inputs in;
    in.q32 = in.q256 = in.q_token = q.data();
    in.scale32 = in.scale256 = in.scale_token = scales.data();
    in.sum32 = in.sum_token = in.centre16 = sums.data();
    in.sums32 = short_sums.data();
    in.narrow256 = narrow.data();
    const auto started = std::chrono::steady_clock::now();
    pool.run([&](int thread) {
        for (const Matrix* m : matrices) {
            Inputs of_matrix = in;
            of_matrix.n_in = m->n_in;
            const Tasks tasks(*m, n, pool.size(), kernels.at_once(n));
            pool.for_tasks(thread, tasks.count(), [&](int task) {
                kernels.matmul(*m, of_matrix, n, tasks.first(task), tasks.last(task), tasks.behind(*m, task), y.data(),
                               most_out);
            });
        }
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

// Returns when all threads of a pool are awake: one that was just made comes some milliseconds late.
void gather(Pool& pool) {
    std::atomic<int> n_here{0};
    pool.run([&](int) {
        n_here++;
        while (n_here < pool.size()) std::this_thread::yield();
    });
}

// The same for benchmarks.
double time_products(const std::vector<const PackedMatrix*>& packed, const std::string& isa, int n_threads, int n) {
    if (packed.empty() || n < 1 || n_threads < 1) throw nb::value_error("matrices, threads and columns are needed");
    const Kernels& kernels = kernels_of(isa);
    std::vector<const Matrix*> matrices;
    for (const PackedMatrix* each : packed) matrices.push_back(&each->matrix());
    nb::gil_scoped_release release;
    Pool pool(n_threads);
    gather(pool);
    return seconds_of_products(matrices, kernels, pool, n);
}

// Seconds to multiply a made-up matrix, of n_bytes if it took two bits a weight, with n columns: the best of four tries.
double time_format(int format, const std::string& isa, int n_threads, int n, size_t n_bytes) {
    constexpr int kInputs = 2560, kTries = 4;
    if (n_threads < 1 || n < 1) throw nb::value_error("threads and columns are needed");
    const Format as = packed_format(format, kInputs);
    const Kernels& kernels = kernels_of(isa);
    const size_t group_bytes = packed_group_bytes(as, kInputs), n_groups = n_bytes / (kRows * kInputs / 4) + 1;
    nb::gil_scoped_release release;
    const Memory memory(n_groups * group_bytes + 8192);  // the kernels' prefetches look ahead
    std::memset(memory.data(), 0x55, n_groups * group_bytes);
    const Matrix made_up{as, static_cast<int>(n_groups) * kRows, kInputs, group_bytes, memory.data()};
    Pool pool(n_threads);
    double best = seconds_of_products({&made_up}, kernels, pool, n);
    for (int i = 1; i < kTries; i++) best = std::min(best, seconds_of_products({&made_up}, kernels, pool, n));
    return best;
}

}  // namespace

NB_MODULE(_core, m) {
    m.doc() = "edgeinfer's native engine; use edgeinfer.backends.native.NativeBackend";
#if defined(NDEBUG)
    nb::set_leak_warnings(false);  // of what still lives when Python ends, such as an engine in a thread of its own
#endif
    m.def("available_isas", &available_isas, "Instruction sets that this CPU and this build have, best first.");
    m.def("packed_bytes", &packed_bytes, "format"_a, "n_out"_a, "n_in"_a,
          "Bytes of a packed matrix, or of a vector where n_in is 0.");

    m.def(
        "likeliest",
        [](Floats logits, int k) {
            if (logits.size() == 0) throw nb::value_error("likeliest: a row has at least one logit");
            return likeliest(logits.data(), static_cast<int>(logits.size()), k);
        },
        "logits"_a, "k"_a, "(id, probability) of about the k likeliest tokens, likeliest first. logits: (n_vocab,).");

    m.def(
        "holds_trits",
        [](int ggml_type, Bytes source) {
            return holds_trits(static_cast<Format>(ggml_type), source.data(), source.size());
        },
        "ggml_type"_a, "source"_a,
        "Whether no code of some rows of a TQ1_0, TQ2_0 or I2_S matrix is 3, which stands for no trit.");

    m.def("rewrite_rows", &rewrite_rows, "ggml_type"_a, "source"_a, "n_in"_a, "as_type"_a, "out"_a,
          "Write rows of one GGUF type into out as F16, Q8_0 or Q4_0, the latter with the best of some scales.");
    m.def(
        "measure_limits",
        [](const std::string& isa, int n_threads, int n_rounds) {
            const Kernels& kernels = kernels_of(isa);
            nb::gil_scoped_release release;
            Pool pool(n_threads);
            const Limits limits = measure_limits(kernels, pool, n_rounds);
            return std::make_pair(limits.read_bytes_per_second, limits.int8_multiply_adds_per_second);
        },
        "isa"_a, "n_threads"_a, "n_rounds"_a,
        "Bytes read out of memory, and int8 multiply-adds, a second, by n_threads together: the best of n_rounds.");

    nb::enum_<Role>(m, "Role")
        .value("attn_norm", Role::AttnNorm)
        .value("attn_post_norm", Role::AttnPostNorm)
        .value("ffn_post_norm", Role::FfnPostNorm)
        .value("attn_sub_norm", Role::AttnSubNorm)
        .value("ffn_sub_norm", Role::FfnSubNorm)
        .value("attn_q_norm", Role::QNorm)
        .value("attn_k_norm", Role::KNorm)
        .value("attn_q", Role::Q)
        .value("attn_k", Role::K)
        .value("attn_v", Role::V)
        .value("attn_q_bias", Role::QBias)
        .value("attn_k_bias", Role::KBias)
        .value("attn_v_bias", Role::VBias)
        .value("attn_output", Role::AttnOutput)
        .value("attn_output_bias", Role::AttnOutputBias)
        .value("ffn_norm", Role::FfnNorm)
        .value("ffn_gate", Role::Gate)
        .value("ffn_up", Role::Up)
        .value("ffn_down", Role::Down)
        .value("output_norm", Role::OutputNorm)
        .value("output", Role::Output)
        .value("gate_feature", Role::GateFeature)
        .value("gate_token_norm", Role::GateTokenNorm)
        .value("gate_token", Role::GateToken)
        .value("gate_mix", Role::GateMix)
        .value("pair_token_norm", Role::PairTokenNorm)
        .value("pair_feature_norm", Role::PairFeatureNorm)
        .value("combine", Role::Combine)
        .value("combine_norm", Role::CombineNorm);

    nb::enum_<Activation>(m, "Activation")
        .value("silu", Activation::Silu)
        .value("gelu_tanh", Activation::GeluTanh)
        .value("relu2", Activation::Relu2);
    nb::enum_<QKNorm>(m, "QKNorm")
        .value("none", QKNorm::None)
        .value("per_head", QKNorm::PerHead)
        .value("whole", QKNorm::Whole);

    nb::enum_<KvType>(m, "KvType").value("f16", KvType::F16).value("q8_0", KvType::Q8_0);

    nb::class_<DecoderConfig>(m, "DecoderConfig", "Sizes and recipe; see decoder.h and edgeinfer.models.ModelSpec.")
        .def(
            "__init__",
            [](DecoderConfig* config, int n_vocab, int n_layers, int n_embd, int n_ff, int n_heads, int n_kv_heads,
               int head_dim, int n_ctx, int n_batch, float norm_epsilon) {
                new (config) DecoderConfig{n_vocab, n_layers, n_embd,       n_ff,  n_heads, n_kv_heads, head_dim,
                                           n_ctx,   n_batch,  norm_epsilon, false, {},      {},         {}};
            },
            nb::kw_only(), "n_vocab"_a, "n_layers"_a, "n_embd"_a, "n_ff"_a, "n_heads"_a, "n_kv_heads"_a, "head_dim"_a,
            "n_ctx"_a, "n_batch"_a, "norm_epsilon"_a)
        .def(
            "set_query_scales",
            [](DecoderConfig& config, std::vector<float> scales, int n_positions) {
                if (n_positions < 1) throw nb::value_error("a query scale is for at least one position");
                config.query_scales = std::move(scales);
                config.positions_per_scale = n_positions;
            },
            "scales"_a, "n_positions"_a)
        .def(
            "add_rope",
            [](DecoderConfig& config, std::vector<double> frequencies, double magnitude) {
                if (2 * frequencies.size() > static_cast<size_t>(config.head_dim))
                    throw nb::value_error("too many pairs");
                config.ropes.push_back({std::move(frequencies), magnitude});
            },
            "frequencies"_a, "magnitude"_a)
        .def(
            "add_layer",
            [](DecoderConfig& config, int rope, int window) {
                if (rope < -1 || rope >= static_cast<int>(config.ropes.size()) || window < 0) {
                    throw nb::value_error("no such rope or window");
                }
                config.attention.push_back({rope, window});
            },
            "rope"_a, "window"_a)
        .def_rw("rope_halves", &DecoderConfig::rope_halves)
        .def_rw("activation", &DecoderConfig::activation)
        .def_rw("qk_norm", &DecoderConfig::qk_norm)
        .def_rw("embedding_scale", &DecoderConfig::embedding_scale)
        .def_rw("residual_scale", &DecoderConfig::residual_scale)
        .def_rw("logit_scale", &DecoderConfig::logit_scale)
        .def_rw("attention_soft_cap", &DecoderConfig::attention_soft_cap)
        .def_rw("logit_soft_cap", &DecoderConfig::logit_soft_cap)
        .def_rw("kv_type", &DecoderConfig::kv_type)
        .def_rw("n_logits", &DecoderConfig::n_logits)
        .def_rw("gated", &DecoderConfig::gated)
        .def_rw("paired", &DecoderConfig::paired)
        .def_rw("n_combined", &DecoderConfig::n_combined)
        .def_rw("n_normed", &DecoderConfig::n_normed)
        .def_rw("normed_residual", &DecoderConfig::normed_residual)
        .def("kv_bytes", [](const DecoderConfig& config) { return KvCache::n_bytes(config.kv_sizes()); })
        .def(
            "activation_bytes",
            [](const DecoderConfig& config, int n_threads) { return Decoder::activation_bytes(config, n_threads); },
            "n_threads"_a);

    nb::class_<Decoder>(m, "Decoder")
        .def(
            "__init__",
            [](Decoder* decoder, const DecoderConfig& config, const std::string& isa, int n_threads,
               size_t weight_bytes, std::optional<Bytes> packed, const Decoder* beside) {
                if (config.attention.size() != static_cast<size_t>(config.n_layers)) {
                    throw nb::value_error("add_layer must be called once a layer");
                }
                if (config.query_scales.size() * static_cast<size_t>(config.positions_per_scale) <
                    static_cast<size_t>(config.n_ctx)) {
                    throw nb::value_error("set_query_scales must be called with scales for all positions");
                }
                if (config.kv_type == KvType::Q8_0 && config.head_dim % 32) {
                    throw nb::value_error("a Q8_0 cache needs heads of a multiple of 32 numbers");
                }
                if (n_threads < 1 || n_threads > 1024) throw nb::value_error("n_threads must be in 1..1024");
                if (packed && (packed->size() != weight_bytes || reinterpret_cast<uintptr_t>(packed->data()) % 64)) {
                    throw nb::value_error("packed must have weight_bytes bytes, 64-byte aligned");
                }
                new (decoder) Decoder(config, kernels_of(isa), n_threads, weight_bytes,
                                      packed ? packed->data() : nullptr, beside);
            },
            "config"_a, "isa"_a, "n_threads"_a, "weight_bytes"_a, "packed"_a = nb::none(), "beside"_a = nb::none(),
            nb::keep_alive<1, 6>())
        .def("set_matrix", &set_matrix, "role"_a, "layer"_a, "format"_a, "n_out"_a, "n_in"_a)
        .def("pack_rows", &pack_rows, "role"_a, "layer"_a, "first_row"_a, "ggml_type"_a, "source"_a, "scale"_a = 1.0f)
        .def("set_vector", &set_vector, "role"_a, "layer"_a, "source"_a)
        .def("map_vector", &map_vector, "role"_a, "layer"_a, "n"_a)
        .def("set_embedding", &set_embedding, "ggml_type"_a, "source"_a, nb::keep_alive<1, 3>())
        .def("share_output", &share_output, "other"_a, nb::keep_alive<1, 2>())
        .def("forward", &forward, "tokens"_a, "parents"_a, "n_pending"_a, "rows"_a, "logits"_a, "layers"_a, "taps"_a,
             "tap_row"_a, "features"_a = nb::none())
        .def("forward_lists", &forward_lists, "tokens"_a, "parents"_a.none(), "pending"_a, "logits"_a, "layers"_a,
             "taps"_a.none(), "features"_a.none())
        .def("combine", &combine, "rows"_a, "features"_a)
        .def("commit", &commit, "path"_a)
        .def("truncate", &truncate_to, "n_past"_a)
        .def(
            "put_aside", [](Decoder& decoder) { return decoder.cache().put_aside(); },
            "Remember the committed text, as long as its memory is not needed; gives its number.")
        .def(
            "resume", [](Decoder& decoder, int number, int n_past) { return decoder.cache().resume(number, n_past); },
            "number"_a, "n_past"_a, "Commit the first n_past tokens of a text put aside, and only them.")
        .def(
            "forget", [](Decoder& decoder, int number) { decoder.cache().forget(number); }, "number"_a)
        .def(
            "aside", [](const Decoder& decoder) { return decoder.cache().aside(); }, "Numbers of the texts put aside.")
        .def("interrupt", &Decoder::interrupt)
        .def(
            "stream",
            [](Decoder& decoder, bool is_ternary, int n) {
                return fields_of(stream_of_columns(decoder.reading(), is_ternary, n));
            },
            "is_ternary"_a, "n"_a, "The fields of Stream (matrix.h): how products of n columns read such matrices.")
        .def(
            "set_stream",
            [](Decoder& decoder, bool is_ternary, int n, const StreamFields& fields) {
                stream_of_columns(decoder.reading(), is_ternary, n) = stream_from(fields);
            },
            "is_ternary"_a, "n"_a, "fields"_a, "Between passes only.")
        .def("seconds_of_part", &seconds_of_part, "n"_a, "n_parts"_a, "part"_a,
             "Seconds that a part of a pass of n tokens takes: every n_parts-th layer, and as much of the output "
             "matrix.")
        .def(
            "part_bytes",
            [](const Decoder& decoder, int n_parts, int part) {
                check_part(decoder, n_parts, part);
                return decoder.part_bytes(n_parts, part);
            },
            "n_parts"_a, "part"_a, "Bytes of weights that such a part reads.")
        .def_prop_ro("streams_at_once", [](const Decoder& decoder) { return decoder.kernels().streams_at_once; })
        .def_prop_ro("groups_at_once", [](const Decoder& decoder) { return decoder.kernels().groups_at_once; })
        .def_prop_ro(
            "weights",
            [](const Decoder& decoder) {
                return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(decoder.weights(), {decoder.weight_bytes()},
                                                                          nb::find(decoder));
            },
            "All packed weights, read-only, without a copy.")
        .def_prop_ro("n_past", &Decoder::n_past)
        .def_prop_ro("isa", [](const Decoder& decoder) { return decoder.kernels().name; })
        .def_prop_ro("weight_bytes", [](const Decoder& decoder) { return decoder.weight_bytes(); })
        .def_prop_ro("kv_bytes", [](const Decoder& decoder) { return decoder.kv_bytes(); })
        .def_prop_ro("activation_bytes", [](const Decoder& decoder) { return decoder.activation_bytes(); });

    nb::class_<PackedMatrix>(m, "PackedMatrix")
        .def(nb::init<int, int, int, Bytes, float, std::optional<int>>(), "ggml_type"_a, "n_out"_a, "n_in"_a,
             "source"_a, "scale"_a = 1.0f, "packed_as"_a = nb::none())
        .def("multiply", &PackedMatrix::multiply, "isa"_a, "x"_a, "y"_a, "stream"_a = nb::none())
        .def_prop_ro(
            "data",
            [](const PackedMatrix& matrix) {
                return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(matrix.data(), {matrix.n_bytes()},
                                                                          nb::find(matrix));
            },
            "The packed bytes, read-only, without a copy.");
    m.def("time_format", &time_format, "format"_a, "isa"_a, "n_threads"_a, "n"_a, "n_bytes"_a,
          "Seconds to multiply a made-up matrix, of n_bytes if it took two bits a weight, with n columns: the best of "
          "four.");
    m.def("time_products", &time_products, "matrices"_a, "isa"_a, "n_threads"_a, "n"_a,
          "Seconds to multiply each of these matrices with n columns, one after the other.");
}
