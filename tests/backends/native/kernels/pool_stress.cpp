// Counts how often a thread left a phase of a pool before all its tasks were done.
#include <atomic>
#include <cstdio>
#include <vector>

#include "pool.h"

int main() {
    constexpr int kThreads = 6, kPhases = 200, kRounds = 40000;
    Pool pool(kThreads);
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
    std::printf("%ld\n", early.load());
}
