#include "pool.h"

#include "platform.h"

namespace {

// Waits until value is no longer old: some microseconds awake, then asleep, so that a core which another process wants
// is not burnt by waiting (spinning engines become 10 to 100 times slower beside one).
void wait_for_change(std::atomic<uint32_t>& value, uint32_t old) {
    constexpr int kSpins = 4000;
    for (int i = 0; i < kSpins; i++) {
        if (value.load(std::memory_order_acquire) != old) return;
        relax();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

Pool::Pool(int n_threads) : n_threads_(n_threads) {
    for (int i = 1; i < n_threads; i++) threads_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    closing_ = true;
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& program) {
    next_task_.store(0, std::memory_order_relaxed);
    program_ = &program;
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    program(0);
    barrier();
}

void Pool::barrier() {
    if (n_threads_ == 1) {
        next_task_.store(0, std::memory_order_relaxed);
        return;
    }
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        next_task_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        phase_.notify_all();
    } else {
        wait_for_change(phase_, phase);
    }
}

void Pool::work(int thread) {
    for (uint32_t round = 0;; round++) {
        wait_for_change(round_, round);
        if (closing_) return;
        (*program_)(thread);
        barrier();
    }
}
