// Threads that read, each with a buffer of its own. They end when what they run returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "platform.h"

class ReaderThreads {
public:
    ReaderThreads() = default;
    ~ReaderThreads() { join(); }
    ReaderThreads(const ReaderThreads&) = delete;
    ReaderThreads& operator=(const ReaderThreads&) = delete;

    // If one cannot be had, those that could run on. Throws std::bad_alloc, std::system_error.
    void start(int n, size_t buffer_bytes, const std::function<void(uint8_t*)>& run) {
        for (int i = 0; i < n; i++) buffers_.emplace_back(buffer_bytes, false);
        for (int i = 0; i < n; i++) threads_.emplace_back(run, buffers_[static_cast<size_t>(i)].data());
    }
    void join() {
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }
    static size_t memory_bytes(int n, size_t buffer_bytes) {
        return static_cast<size_t>(n) * Memory::size_of(buffer_bytes);
    }

private:
    std::vector<Memory> buffers_;
    std::vector<std::thread> threads_;
};
