// A pool of threads that run one program together, phase by phase.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

class Pool {
public:
    explicit Pool(int n_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return n_threads_; }

    // Runs program(thread) on every thread, the caller being thread 0, and returns when all are through.
    void run(const std::function<void(int)>& program);

    // Inside a program, called by every thread: waits for all. The first task of the next phase is 0 again.
    void barrier();

    // Inside a program: the next task of this phase that nobody has taken, for work that is split as it comes.
    int next_task() { return next_task_.fetch_add(1, std::memory_order_relaxed); }

private:
    void work(int thread);

    int n_threads_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* program_ = nullptr;
    std::atomic<bool> closing_{false};
    alignas(64) std::atomic<uint32_t> round_{0};  // programs started
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};  // barriers passed
    alignas(64) std::atomic<int> next_task_{0};
};
