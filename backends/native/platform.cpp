#include "platform.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif
#if defined(__linux__) && !defined(__ANDROID__)
#define EI_HAS_AFFINITY 1
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

#if defined(__unix__) || defined(__APPLE__)
Memory::Memory(size_t n_bytes, bool on_huge_pages) {
    if (n_bytes == 0) return;
    if (n_bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
    // A huge page needs its alignment: take one more and give the ends back.
    const bool huge = on_huge_pages && n_bytes >= kHugePage;
    const size_t page = huge ? kHugePage : size_t{4096};
    const size_t size = (n_bytes + page - 1) / page * page, taken = size + (huge ? kHugePage : 0);
    void* p = mmap(nullptr, taken, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    uint8_t* first = static_cast<uint8_t*>(p);
    if (huge) {
        const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(p) % kHugePage) % kHugePage;
        if (before) munmap(first, before);
        if (taken - size - before) munmap(first + before + size, taken - size - before);
        first += before;
#if defined(MADV_HUGEPAGE)
        madvise(first, size, MADV_HUGEPAGE);
#endif
    }
    data_ = first;
    size_ = size;
}

Memory::~Memory() {
    if (data_) munmap(data_, size_);
}
#else
Memory::Memory(size_t n_bytes, bool) : size_((n_bytes + 63) / 64 * 64) {
    if (n_bytes == 0) return;
    data_ = static_cast<uint8_t*>(::operator new(size_, std::align_val_t{64}));
    std::memset(data_, 0, size_);
}

Memory::~Memory() {
    if (data_) ::operator delete(data_, std::align_val_t{64});
}
#endif

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

void map_now(const uint8_t* p, size_t n_bytes) {
#if defined(__linux__)
    constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers lack; older systems refuse it
    const uintptr_t page = 4096, first = reinterpret_cast<uintptr_t>(p) / page * page;
    madvise(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(p) + n_bytes - first, kPopulateRead);
#else
    static_cast<void>(p), static_cast<void>(n_bytes);
#endif
}

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if defined(EI_HAS_AFFINITY)
bool keep_off_this_core(std::thread& thread, Cores& before) {
    cpu_set_t cores;
    static_assert(sizeof before.bits == sizeof cores);
    const pthread_t handle = thread.native_handle();
    const int here = sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE || pthread_getaffinity_np(handle, sizeof cores, &cores)) return false;
    std::memcpy(before.bits, &cores, sizeof cores);
    CPU_CLR(here, &cores);
    return CPU_COUNT(&cores) > 0 && pthread_setaffinity_np(handle, sizeof cores, &cores) == 0;
}

void let_run_on(const Cores& cores) {
    cpu_set_t mask;
    std::memcpy(&mask, cores.bits, sizeof mask);
    pthread_setaffinity_np(pthread_self(), sizeof mask, &mask);
}
#else
bool keep_off_this_core(std::thread&, Cores&) { return false; }
void let_run_on(const Cores&) {}
#endif
