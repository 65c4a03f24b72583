// A pool of threads that run one program together. The program is a sequence of phases, each a number of tasks. A phase
// is over when all of its tasks are done; threads that did not take part in it are not waited for. A thread that the
// system has suspended delays the others only if it has begun a task, until that task is done; it skips the phases that
// were done without it. At the end of a program all threads that began it are waited for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "platform.h"

class Pool {
public:
    explicit Pool(int n_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return n_threads_; }

    // Runs program(thread) on the threads that are free, the caller being thread 0, and returns when all are through. One
    // program at a time: another caller waits.
    void run(const std::function<void(int)>& program);

    // Inside a program, called by every thread for the same phases in the same order: does tasks 0..n_tasks-1 of this
    // phase together, n_tasks >= 1, and returns when all are done. What a thread computes for itself between two phases
    // may be made from data that others are already changing; then its phase is over, and it gets no task to use it in.
    // awake(): called by a thread that waits for the tasks of others whenever wake() was called.
    template <class Task, class Awake>
    void for_tasks(int thread, int n_tasks, const Task& task, const Awake& awake) {
        const uint32_t phase = threads_[thread].phase++;
        for (uint64_t ticket = ticket_.load(std::memory_order_acquire);;) {
            if (static_cast<uint32_t>(ticket >> 32) != phase) return;
            const int index = static_cast<int>(static_cast<uint32_t>(ticket));
            if (index >= n_tasks) break;
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            task(index);
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_tasks) return next_phase(phase + 1);
            ticket = ticket_.load(std::memory_order_acquire);
        }
        // The ticket alone says which phase it is; phases_ changes a moment later, and only wakes.
        for (;;) {
            const uint32_t seen = phases_.load(std::memory_order_acquire);
            if (static_cast<uint32_t>(ticket_.load(std::memory_order_acquire) >> 32) != phase) return;
            awake();
            wait_for_change(phases_, seen, threads_[thread].spins);
        }
    }
    template <class Task>
    void for_tasks(int thread, int n_tasks, const Task& task) {
        for_tasks(thread, n_tasks, task, [] {});
    }

    // Inside a task that waits for something else than other tasks: wakes the threads that have none.
    void wake();

private:
    static constexpr int kMostSpins = 4000, kFewestSpins = 60;  // some 70 microseconds, and one

    struct alignas(64) Thread {
        uint32_t phase = 0;      // the next one it comes to
        int spins = kMostSpins;  // for which it waits awake
        std::thread thread;
        Cores cores{};  // to go back to, if it was kept off one
        std::atomic<bool> kept_off{false};
    };

    void spread();
    void work(int index);
    void next_phase(uint32_t phase);
    static void wait_for_change(std::atomic<uint32_t>& value, uint32_t old, int& spins);

    static constexpr uint32_t kOpen = 1u << 31;

    std::mutex running_;
    int n_threads_;
    std::unique_ptr<Thread[]> threads_;
    const std::function<void(int)>* program_ = nullptr;
    uint32_t first_phase_ = 0;                          // of the program
    std::chrono::steady_clock::time_point last_run_{};  // when it ended
    std::atomic<bool> closing_{false};
    alignas(64) std::atomic<uint32_t> round_{0};   // programs started
    alignas(64) std::atomic<uint32_t> inside_{0};  // threads in the program, and whether more may come in
    alignas(64) std::atomic<uint64_t> ticket_{0};  // phase << 32 | its next task
    alignas(64) std::atomic<int> done_{0};         // tasks of the phase
    alignas(64) std::atomic<uint32_t> phases_{0};  // begun so far
};
