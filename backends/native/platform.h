// What each operating system does in its own way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <thread>

// Zeroed memory, 64-byte aligned; on huge pages where the system has them, unless little of it may ever be used: the
// first touch of one clears all of it. Throws std::bad_alloc.
class Memory {
public:
    Memory() = default;
    explicit Memory(size_t n_bytes, bool on_huge_pages = true);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Brings these bytes of a mapped file into the page table at once, where the system can: one fault after the other takes
// three times as long. Does no harm to other memory.
void map_now(const uint8_t* p, size_t n_bytes);

// Tells the core that this is a waiting loop.
void relax();

// The cores that a thread may run on.
struct Cores {
    unsigned long bits[16];
};

// Takes the core that the caller runs on from those of a thread, where the system can and others are left; gives what it
// had before, for let_run_on. False where nothing was changed.
bool keep_off_this_core(std::thread& thread, Cores& before);

// Lets the calling thread run on these cores.
void let_run_on(const Cores& cores);
