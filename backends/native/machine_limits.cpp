#include "machine_limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>

#include "platform.h"

namespace {

double seconds_of(const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Limits measure_limits(const Kernels& kernels, Pool& pool, int n_rounds) {
    constexpr size_t kBytes = size_t{512} << 20, kChunk = size_t{1} << 20;
    constexpr int kRounds = 1280000, kShares = 32;
    const Memory memory(kBytes);
    pool.run([&](int thread) {
        pool.for_tasks(thread, static_cast<int>(kBytes / kChunk),
                       [&](int chunk) { std::memset(memory.data() + static_cast<size_t>(chunk) * kChunk, 1, kChunk); });
    });
    std::atomic<int32_t> seen{0};  // so that nothing is left out as unused
    double read = 1e9, multiply = 1e9;
    for (int i = 0; i < n_rounds; i++) {
        read = std::min(read, seconds_of([&] {
                            pool.run([&](int thread) {
                                pool.for_tasks(thread, static_cast<int>(kBytes / kChunk), [&](int chunk) {
                                    seen += kernels.read(memory.data() + static_cast<size_t>(chunk) * kChunk, kChunk);
                                });
                            });
                        }));
        multiply = std::min(multiply, seconds_of([&] {
                                pool.run([&](int thread) {
                                    pool.for_tasks(thread, kShares, [&](int) {
                                        seen += kernels.multiply_adds(memory.data(), kRounds / kShares);
                                    });
                                });
                            }));
    }
    return {static_cast<double>(kBytes) / read, 1.0 * (kRounds / kShares * kShares) * kMultiplyAdds / multiply};
}
