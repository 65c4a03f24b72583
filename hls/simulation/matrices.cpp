// Matrices in the memory of a simulated engine, by number: what a host calls that leaves the products of a model to it.
// Stands alone; matrices.py has the address of ei_engine_product (driver.cpp).
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using Product = std::int64_t (*)(void* engine, const std::int8_t* x, std::int32_t n_in, const std::uint8_t* stream,
                                 std::int32_t n_out, std::int32_t* y);

// Rows first..first + n_out - 1 of a stream's n_rows.
struct Matrix {
    const std::uint8_t* stream;
    std::int32_t n_in, n_rows, first, n_out;
};

struct Matrices {
    Product product;
    void* engine;
    std::vector<Matrix> all;
    std::vector<std::int32_t> sums;
    std::int64_t n_cycles, failure;
};

}  // namespace

extern "C" {

void* ei_matrices_new(Product product, void* engine) { return new Matrices{product, engine, {}, {}, 0, 0}; }
void ei_matrices_delete(void* state) { delete static_cast<Matrices*>(state); }

// The stream must outlive them.
void ei_matrices_add(void* state, const std::uint8_t* stream, std::int32_t n_in, std::int32_t n_rows,
                     std::int32_t first, std::int32_t n_out) {
    Matrices& matrices = *static_cast<Matrices*>(state);
    matrices.all.push_back({stream, n_in, n_rows, first, n_out});
    if (matrices.sums.size() < static_cast<std::size_t>(n_rows)) matrices.sums.resize(static_cast<std::size_t>(n_rows));
}

// y (n, n_out) = the products of x (n, n_in). False where the engine failed.
bool ei_matrices_product(void* state, std::int32_t number, const std::int8_t* x, std::int32_t n, std::int32_t* y) {
    Matrices& matrices = *static_cast<Matrices*>(state);
    if (number < 0 || static_cast<std::size_t>(number) >= matrices.all.size()) return false;
    const Matrix& m = matrices.all[static_cast<std::size_t>(number)];
    for (std::int32_t i = 0; i < n; i++, x += m.n_in, y += m.n_out) {
        const std::int64_t cycles =
            matrices.product(matrices.engine, x, m.n_in, m.stream, m.n_rows, matrices.sums.data());
        if (cycles < 0) {
            matrices.failure = cycles;
            return false;
        }
        matrices.n_cycles += cycles;
        std::memcpy(y, matrices.sums.data() + m.first, sizeof *y * static_cast<std::size_t>(m.n_out));
    }
    return true;
}

// Cycles of all products so far; and what the engine gave where it failed, 0 where it did not.
std::int64_t ei_matrices_cycles(const void* state) { return static_cast<const Matrices*>(state)->n_cycles; }
std::int64_t ei_matrices_failure(const void* state) { return static_cast<const Matrices*>(state)->failure; }
}
