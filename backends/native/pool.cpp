#include "pool.h"

#include <algorithm>

Pool::Pool(int n_threads)
    : n_threads_(n_threads), threads_(std::make_unique<Thread[]>(static_cast<size_t>(n_threads))) {
    for (int i = 1; i < n_threads; i++) threads_[i].thread = std::thread([this, i] { work(i); });
    spread();
}

Pool::~Pool() {
    closing_ = true;
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    for (int i = 1; i < n_threads_; i++) threads_[i].thread.join();
}

void Pool::run(const std::function<void(int)>& program) {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    constexpr std::chrono::milliseconds kLong{1};
    if (std::chrono::steady_clock::now() - last_run_ > kLong) spread();
    program_ = &program;
    first_phase_ = static_cast<uint32_t>(ticket_.load(std::memory_order_relaxed) >> 32);
    threads_[0].phase = first_phase_;
    inside_.store(kOpen, std::memory_order_release);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    program(0);
    inside_.fetch_and(~kOpen, std::memory_order_acq_rel);
    while (const uint32_t n = inside_.load(std::memory_order_acquire)) wait_for_change(inside_, n, threads_[0].spins);
    last_run_ = std::chrono::steady_clock::now();
}

// Keeps the other threads off the caller's core until they are awake. In a virtual machine whose host descheduled an idle
// core, Linux takes that core for a busy one: it wakes a thread on its waker's core, and both share that core for some
// milliseconds.
void Pool::spread() {
    for (int i = 1; i < n_threads_; i++) {
        Thread& each = threads_[i];
        if (!each.kept_off && keep_off_this_core(each.thread, each.cores)) each.kept_off = true;
    }
}

void Pool::work(int index) {
    for (uint32_t round = 0;;) {
        wait_for_change(round_, round, threads_[index].spins);
        round = round_.load(std::memory_order_acquire);
        if (threads_[index].kept_off.exchange(false)) let_run_on(threads_[index].cores);
        if (closing_) return;
        uint32_t n = inside_.load(std::memory_order_acquire);
        while ((n & kOpen) && !inside_.compare_exchange_weak(n, n + 1, std::memory_order_acq_rel)) {
        }
        if (!(n & kOpen)) continue;  // too late for this one
        threads_[index].phase = first_phase_;
        (*program_)(index);
        inside_.fetch_sub(1, std::memory_order_acq_rel);
        inside_.notify_all();
    }
}

void Pool::next_phase(uint32_t phase) {
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(phase) << 32, std::memory_order_release);
    wake();
}

void Pool::wake() {
    phases_.fetch_add(1, std::memory_order_release);
    phases_.notify_all();
}

// Waits until value is no longer old: awake for as long as that was worth it lately, then asleep. A thread that spins
// while another process has the core of the one it waits for uses up its own share of time, and both come last.
void Pool::wait_for_change(std::atomic<uint32_t>& value, uint32_t old, int& spins) {
    for (int i = 0, most = spins; i < most; i++) {
        if (value.load(std::memory_order_acquire) != old) {
            spins = std::min(kMostSpins, spins + spins / 8 + 1);
            return;
        }
        relax();
    }
    spins = std::max(kFewestSpins, spins / 2);
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}
