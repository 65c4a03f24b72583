// The Python extension of the quantisers: checks, and the division of rows among threads.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../gil.h"
#include "quantizers.h"

namespace nb = nanobind;
using namespace nb::literals;

extern const Quantizers quantizers_portable;
#if defined(__x86_64__)
extern const Quantizers quantizers_avx2;
#endif

namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Those that this CPU has, the fastest first.
std::vector<const Quantizers*> sets_of_this_cpu() {
    std::vector<const Quantizers*> sets;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) sets.push_back(&quantizers_avx2);
#endif
    sets.push_back(&quantizers_portable);
    return sets;
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Quantizers* set : sets_of_this_cpu()) names.push_back(set->isa);
    return names;
}

const Quantizers& set_named(const std::optional<std::string>& isa) {
    const auto sets = sets_of_this_cpu();
    for (const Quantizers* set : sets) {
        if (!isa || *isa == set->isa) return *set;
    }
    throw nb::value_error(("no quantisers for this instruction set on this CPU: " + *isa).c_str());
}

const Quantizer& format_named(const Quantizers& set, const std::string& name) {
    for (int i = 0; i < set.n_formats; i++) {
        if (name == set.formats[i].name) return set.formats[i];
    }
    throw nb::value_error(("no quantiser for this format: " + name).c_str());
}

// work(i) for i = 0..n_parts - 1 in up to n_threads threads, this one among them. Fewer if the system gives no more.
template <class Work>
void in_parallel(int64_t n_parts, int64_t n_threads, const Work& work) {
    std::atomic<int64_t> next{0};
    const auto take_parts = [&] {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_parts;) work(i);
    };
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(std::max<int64_t>(0, std::min(n_threads, n_parts) - 1)));
    try {
        while (others.size() < others.capacity()) others.emplace_back(take_parts);
    } catch (const std::exception&) {  // no thread, or no memory for one
    }
    take_parts();
    for (std::thread& thread : others) thread.join();
}

constexpr int64_t kPartWeights = 1 << 16, kRowsAtOnce = 8;  // rows that some formats search side by side

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void run(const Quantizer& format, Quantize quantize, const Rows& all, int n_threads) {
    const int64_t rows = kRowsAtOnce * divided_up(kPartWeights, kRowsAtOnce * all.n_in);
    const int64_t row_bytes = all.n_in / format.block_elements * format.block_bytes;
    in_parallel(divided_up(all.n_rows, rows), n_threads, [&](int64_t part) {
        const int64_t first = part * rows;
        quantize(Rows{all.weights + first * all.n_in, all.importance, std::min(rows, all.n_rows - first), all.n_in,
                      all.bytes + first * row_bytes});
    });
}

Quantize search_named(const Quantizer& format, const std::string& name) {
    if (name == "plain") return format.plain;
    if (name == "weighted") return format.weighted;
    if (name == "own" && format.own) return format.own;
    throw nb::value_error(("no such search for " + std::string(format.name) + ": " + name).c_str());
}

void quantize(const std::string& name, const std::string& search, const Matrix& weights,
              const std::optional<Vector>& importance, const Bytes& to, int n_threads,
              const std::optional<std::string>& isa) {
    const Quantizer& format = format_named(set_named(isa), name);
    const Quantize quantize = search_named(format, search);
    const auto n_rows = static_cast<int64_t>(weights.shape(0)), n_in = static_cast<int64_t>(weights.shape(1));
    if (n_in % format.block_elements) throw nb::value_error("rows are not whole blocks");
    if (to.shape(0) != weights.size() / format.block_elements * format.block_bytes) {
        throw nb::value_error("the output has not the size of the blocks");
    }
    if (search == "weighted" && !importance) throw nb::value_error("this search needs the importance of the columns");
    if (importance && importance->shape(0) != weights.shape(1)) throw nb::value_error("importance is not one a column");
    if (weights.size() == 0) return;
    const Rows all{weights.data(), importance ? importance->data() : nullptr, n_rows, n_in, to.data()};
    ReleasedGil released;
    run(format, quantize, all, n_threads);
}

// Place of the first weight that is above the limit in magnitude, or no number.
std::optional<int64_t> first_above(const Vector& weights, float limit, int n_threads) {
    const auto n = static_cast<int64_t>(weights.shape(0));
    const float* all = weights.data();
    std::atomic<int64_t> found{n};
    ReleasedGil released;
    in_parallel(divided_up(n, kPartWeights), n_threads, [&](int64_t part) {
        const int64_t first = part * kPartWeights, last = std::min(n, first + kPartWeights);
        int n_above = 0;
        for (int64_t i = first; i < last; i++) n_above += !(std::fabs(all[i]) <= limit);
        if (!n_above) return;
        int64_t place = first, known = found;
        while (std::fabs(all[place]) <= limit) place++;
        while (place < known && !found.compare_exchange_weak(known, place)) continue;
    });
    return found < n ? std::optional<int64_t>(found) : std::nullopt;
}

}  // namespace

NB_MODULE(_quantize, m) {
    m.doc() = "Quantisers for weights; use edgeinfer.models.formats.quantize";
    m.def("quantize", &quantize, "format"_a, "search"_a, "weights"_a, "importance"_a.none(), "to"_a, "n_threads"_a,
          "isa"_a.none() = nb::none(),
          "Write the blocks of weights (n_rows, n_in). search: \"plain\", \"weighted\" by importance (n_in,), or "
          "\"own\". "
          "isa: one of instruction_sets(), None for the fastest; the bytes are the same.");
    m.def("first_above", &first_above, "weights"_a, "limit"_a, "n_threads"_a,
          "Place of the first weight whose magnitude is above the limit, or that is no number.");
    m.def("instruction_sets", &instruction_sets, "Those that this CPU has, the fastest first.");
}
