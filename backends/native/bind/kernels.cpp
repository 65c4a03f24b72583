// Single matrices and their products, for tests and benchmarks.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "bind/bindings.h"
#include "packing/packed_rows.h"
#include "packing/packing.h"
#include "pool.h"

namespace {

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
    // prefetch: how it is read, None as on CPUs like this one.
    void multiply(const std::string& isa, nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> x,
                  FloatRows y, std::optional<PrefetchFields> prefetch) {
        const Kernels& kernels = kernels_of(isa);
        PrefetchPolicy policy = known_policy;
        if (prefetch) {
            for (int i = 0; i <= kFewTokens; i++) policy.plain[i] = policy.ternary[i] = prefetch_from(*prefetch);
        }
        Matrix matrix = matrix_;
        matrix.policy = &policy;
        const size_t n = x.shape(0), n_in = static_cast<size_t>(matrix_.n_in);
        if (x.shape(1) != n_in || y.shape(0) != n || y.shape(1) != static_cast<size_t>(matrix_.n_out)) {
            throw nb::value_error("x must be (n, n_in) and y (n, n_out)");
        }
        std::vector<int8_t> q(n * n_in + kBehindInputs);
        std::vector<float> scales(n * (n_in / 32 + 1));
        std::vector<int32_t> sums(n * (n_in / 32 + 1)), centre16(n * n_in / 16 + 1), centre32(n * n_in / 32 + 1);
        std::vector<int16_t> sums16(n * n_in / 16 + 1), sums32(n * n_in / 32 + 1);
        std::vector<uint8_t> fits_int16(n * n_in / 256 + 1);
        Inputs in;
        in.n_in = matrix_.n_in;
        in.x = x.data();
        in.ldx = n_in;
        in.q32 = in.q256 = in.q_token = q.data();
        in.scale32 = in.scale256 = in.scale_token = scales.data();
        in.sum32 = in.sum_token = sums.data();
        in.centre32 = centre32.data();
        in.centre16 = centre16.data();
        in.sums16 = sums16.data();
        in.sums32 = sums32.data();
        in.fits_int16 = fits_int16.data();
        for (int c = 0; c < static_cast<int>(n); c++) {
            if (input_kind(matrix_.format) == InputKind::Int8By32) kernels.quantize32(in, c);
            if (input_kind(matrix_.format) == InputKind::Int8By256) kernels.quantize256(in, c);
            if (input_kind(matrix_.format) == InputKind::Int8ByToken) kernels.quantize_token(in, c);
        }
        kernels.matmul(matrix, in, static_cast<int>(n), 0, matrix_.n_groups(), nullptr, y.data(),
                       static_cast<size_t>(matrix_.n_out));
    }

    // out (n_out, n_in) = all rows, one by one.
    void read_rows(FloatRows out) const {
        if (!has_packed_rows(matrix_.format)) throw nb::value_error("I2_S has no rows that can be read alone");
        const size_t n_in = static_cast<size_t>(matrix_.n_in);
        if (out.shape(0) != static_cast<size_t>(matrix_.n_out) || out.shape(1) != n_in) {
            throw nb::value_error("out must be (n_out, n_in)");
        }
        for (int r = 0; r < matrix_.n_out; r++) {
            dequantize_packed_row(matrix_, r, out.data() + static_cast<size_t>(r) * n_in);
        }
    }

    const Matrix& matrix() const { return matrix_; }
    const uint8_t* data() const { return memory_.data(); }
    size_t n_bytes() const { return matrix_.group_bytes * static_cast<size_t>(matrix_.n_groups()); }

private:
    Memory memory_;
    Matrix matrix_;
};

// Seconds to multiply each of these matrices, one after the other, with n tokens of made-up activations, which are
// prepared once before.
double seconds_of_products(const std::vector<const Matrix*>& matrices, const Kernels& kernels, Pool& pool, int n) {
    size_t most_in = 0, most_out = 0;
    for (const Matrix* m : matrices) {
        most_in = std::max(most_in, static_cast<size_t>(m->n_in));
        most_out = std::max(most_out, static_cast<size_t>(m->n_groups() * kRows));
    }
    const size_t n_tokens = static_cast<size_t>(n);
    std::vector<float> y(n_tokens * most_out), scales(n_tokens * (most_in / 32 + 1), 0.01f);
    std::vector<int8_t> q(n_tokens * most_in + kBehindInputs);
    for (size_t i = 0; i < q.size(); i++) q[i] = static_cast<int8_t>(i * 37 % 255 - 127);
    std::vector<int32_t> sums(n_tokens * (most_in / 16 + 1), 5);
    std::vector<int16_t> short_sums(n_tokens * (most_in / 16 + 1), 5);
    std::vector<uint8_t> fits_int16(n_tokens * (most_in / 256 + 1));
    const size_t ldx = (most_in + 15) / 16 * 16;
    const std::vector<float> x(n_tokens * ldx, 0.5f);
    Inputs in;
    in.x = x.data();
    in.ldx = ldx;
    in.q32 = in.q256 = in.q_token = q.data();
    in.scale32 = in.scale256 = in.scale_token = scales.data();
    in.sum32 = in.centre32 = in.sum_token = in.centre16 = sums.data();
    in.sums16 = in.sums32 = short_sums.data();
    in.fits_int16 = fits_int16.data();
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
    if (packed.empty() || n < 1 || n_threads < 1) throw nb::value_error("matrices, threads and tokens are needed");
    const Kernels& kernels = kernels_of(isa);
    std::vector<const Matrix*> matrices;
    for (const PackedMatrix* each : packed) matrices.push_back(&each->matrix());
    ReleasedGil release;
    Pool pool(n_threads);
    gather(pool);
    return seconds_of_products(matrices, kernels, pool, n);
}

// Seconds to multiply a made-up matrix, of n_bytes if it took two bits a weight, with n tokens: the best of four tries.
double time_format(int format, const std::string& isa, int n_threads, int n, size_t n_bytes) {
    constexpr int kInputs = 2560, kTries = 4;
    if (n_threads < 1 || n < 1) throw nb::value_error("threads and tokens are needed");
    const Format as = packed_format(format, kInputs);
    const Kernels& kernels = kernels_of(isa);
    const size_t group_bytes = packed_group_bytes(as, kInputs), n_groups = n_bytes / (kRows * kInputs / 4) + 1;
    ReleasedGil release;
    const Memory memory(n_groups * group_bytes + 8192);  // the kernels' prefetches look ahead
    std::memset(memory.data(), 0x55, n_groups * group_bytes);
    const Matrix made_up{as, static_cast<int>(n_groups) * kRows, kInputs, group_bytes, memory.data()};
    Pool pool(n_threads);
    double best = seconds_of_products({&made_up}, kernels, pool, n);
    for (int i = 1; i < kTries; i++) best = std::min(best, seconds_of_products({&made_up}, kernels, pool, n));
    return best;
}

}  // namespace

void bind_kernels(nb::module_& m) {
    nb::class_<PackedMatrix>(m, "PackedMatrix")
        .def(nb::init<int, int, int, Bytes, float, std::optional<int>>(), "ggml_type"_a, "n_out"_a, "n_in"_a,
             "source"_a, "scale"_a = 1.0f, "packed_as"_a = nb::none())
        .def("multiply", &PackedMatrix::multiply, "isa"_a, "x"_a, "y"_a, "prefetch"_a = nb::none())
        .def("read_rows", &PackedMatrix::read_rows, "out"_a, "All rows as floats, (n_out, n_in).")
        .def_prop_ro(
            "data",
            [](const PackedMatrix& matrix) { return bytes_of(matrix, matrix.data(), matrix.matrix().n_bytes()); },
            "The packed bytes, read-only, without a copy.");
    m.def("time_format", &time_format, "format"_a, "isa"_a, "n_threads"_a, "n"_a, "n_bytes"_a,
          "Seconds to multiply a made-up matrix, of n_bytes if it took two bits a weight, with n tokens: the best of "
          "four.");
    m.def("time_products", &time_products, "matrices"_a, "isa"_a, "n_threads"_a, "n"_a,
          "Seconds to multiply each of these matrices with n tokens, one after the other.");
}
