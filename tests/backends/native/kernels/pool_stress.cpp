// Counts how often a thread left a phase of a pool before all its tasks were done; then waits in tasks for what the calling
// thread does when it is woken, which never ends if that thread sleeps on.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

constexpr int kThreads = 6;

long count_early(Pool& pool) {
    constexpr int kPhases = 200, kRounds = 40000;
    std::atomic<long> early{0};
    for (int round = 0; round < kRounds; round++) {
        std::vector<std::atomic<int>> done(kPhases);
        pool.run([&](int thread) {
            for (size_t p = 0; p < kPhases; p++) {
                pool.for_tasks(thread, 3, [&](int) { done[p].fetch_add(1); });
                if (done[p].load() != 3) early++;
            }
        });
    }
    return early;
}

void wake_the_caller(Pool& pool) {
    constexpr int kRounds = 20, kTimes = 5;
    const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
    for (int rounds = 0; rounds < kRounds;) {
        std::atomic<int> n_awake{0};
        const auto task = [&](int thread) {
            if (thread == 0) return;  // it took the task itself
            rounds++;
            for (; n_awake.load() < kTimes; pause()) pool.wake();
        };
        pool.run([&](int thread) {
            if (thread == 0) pause();
            pool.for_tasks(thread, 1, [&](int) { task(thread); }, [&] { n_awake += thread == 0; });
        });
    }
}

}  // namespace

int main() {
    Pool pool(kThreads);
    const long early = count_early(pool);
    wake_the_caller(pool);
    std::printf("%ld\n", early);
}
