// What each operating system does in its own way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
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

    // What size() will be.
    static size_t size_of(size_t n_bytes);

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// A file that is read at any place, by several threads at once, past the system's cache of files where that can be: what
// is read once would only push other things out of it.
class DirectFile {
public:
    static constexpr size_t kAlignment = 4096;  // of places in the file, of sizes, and of memory

    // Throws std::system_error.
    explicit DirectFile(const std::string& path);
    ~DirectFile();
    DirectFile(const DirectFile&) = delete;
    DirectFile& operator=(const DirectFile&) = delete;

    // Reads n_bytes, or up to the end of the file; gives how many those are. All three are multiples of kAlignment.
    // Throws std::system_error.
    size_t read(uint64_t offset, size_t n_bytes, uint8_t* to) const;
    // Whether it has the size that it had when it was opened, and nobody has written to it since. A file that got its name
    // later is another one; this one stays what it is, and readable.
    bool is_unchanged() const;
    bool is_direct() const;

private:
    struct Handle;
    std::unique_ptr<Handle> handle_;
};

// A file that is open already, read at any place, by several threads at once, through the system's cache of files.
class CachedFile {
public:
    // descriptor: of the file, of which a copy is kept. path: of the same file, for systems that read by name. Throws
    // std::system_error.
    CachedFile(int descriptor, const std::string& path);
    ~CachedFile();
    CachedFile(CachedFile&& other) noexcept;
    CachedFile(const CachedFile&) = delete;
    CachedFile& operator=(const CachedFile&) = delete;

    // Reads n_bytes, or up to the end of the file; gives how many those are. Throws std::system_error.
    size_t read(uint64_t offset, size_t n_bytes, uint8_t* to) const;

private:
    struct Handle;
    std::unique_ptr<Handle> handle_;
};

// Brings these bytes of a mapped file into the page table at once, where the system can: one fault after the other takes
// three times as long. Does no harm to other memory.
void map_now(const uint8_t* p, size_t n_bytes);

// Gives the memory of the whole pages in this part of a Memory back, where the system can: what it held is lost, and the
// next touch takes new memory.
void give_back(uint8_t* p, size_t n_bytes);

// Gives memory that was freed, and that the allocator keeps for later, back to the system, where it can.
void give_back_freed();

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
