// Bytes of a mapped file that a thread brings into the page table from the start.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

class MappedBytes {
public:
    MappedBytes() = default;
    // Begins at once. bytes: must outlive this.
    MappedBytes(const uint8_t* bytes, size_t n_bytes);
    ~MappedBytes();
    MappedBytes(const MappedBytes&) = delete;
    MappedBytes& operator=(const MappedBytes&) = delete;

    // Returns when all are mapped. One thread at a time.
    void wait();

private:
    std::atomic<bool> closing_{false};
    std::thread thread_;
};
