#include "platform.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#else
#include <filesystem>
#include <fstream>
#include <mutex>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
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

#if defined(__unix__) || defined(__APPLE__)
size_t page_bytes() {
    static const size_t n_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));  // 4, 16 or 64 KiB
    return n_bytes;
}
#endif
}  // namespace

#if defined(__unix__) || defined(__APPLE__)
size_t Memory::size_of(size_t n_bytes) { return (n_bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

Memory::Memory(size_t n_bytes, bool on_huge_pages) {
    if (n_bytes == 0) return;
    if (n_bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
    // A huge page needs its alignment: take one more and give the ends back.
    const bool huge = on_huge_pages && n_bytes >= kHugePage;
    const size_t size = size_of(n_bytes), taken = size + (huge ? kHugePage : 0);
    void* p = mmap(nullptr, taken, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    uint8_t* first = static_cast<uint8_t*>(p);
    if (huge) {
        const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(p) % kHugePage) % kHugePage;
        if (before) munmap(first, before);
        if (taken - size - before) munmap(first + before + size, taken - size - before);
        first += before;
#if defined(MADV_HUGEPAGE)
        madvise(first, size / kHugePage * kHugePage, MADV_HUGEPAGE);  // what is after the last one is small pages
#endif
    }
    data_ = first;
    size_ = size;
}

Memory::~Memory() {
    if (data_) munmap(data_, size_);
}
#else
size_t Memory::size_of(size_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

Memory::Memory(size_t n_bytes, bool) : size_(size_of(n_bytes)) {
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

// ---- files ---------------------------------------------------------------------------------------------------------

#if defined(__unix__) || defined(__APPLE__)
namespace {

[[noreturn]] void throw_error() { throw std::system_error(errno, std::generic_category()); }

struct stat status_of(int descriptor) {
    struct stat status;
    if (fstat(descriptor, &status)) throw_error();
    return status;
}

timespec time_of_change(const struct stat& status) {
#if defined(__APPLE__)
    return status.st_mtimespec;
#else
    return status.st_mtim;
#endif
}

int open_for_reading(const std::string& path, int flags) {
    for (;;) {
        const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
        if (descriptor >= 0 || errno != EINTR) return descriptor;
    }
}

ssize_t read_once(int descriptor, uint64_t offset, size_t n_bytes, uint8_t* to) {
    for (;;) {
        const ssize_t n = pread(descriptor, to, n_bytes, static_cast<off_t>(offset));
        if (n >= 0 || errno != EINTR) return n;
    }
}

// Past the cache of files, or -1 where that cannot be: some file systems refuse it at once, others when one reads.
int open_past_cache(const std::string& path) {
#if defined(O_DIRECT)
    const int descriptor = open_for_reading(path, O_DIRECT);
    if (descriptor < 0) return -1;
    const Memory first(DirectFile::kAlignment, false);
    if (read_once(descriptor, 0, first.size(), first.data()) >= 0 || errno != EINVAL) return descriptor;
    close(descriptor);
    return -1;
#elif defined(F_NOCACHE)
    const int descriptor = open_for_reading(path, 0);
    if (descriptor >= 0) fcntl(descriptor, F_NOCACHE, 1);
    return descriptor;
#else
    static_cast<void>(path);
    return -1;
#endif
}

}  // namespace

struct DirectFile::Handle {
    int descriptor;
    bool is_direct;
    struct stat status;

    explicit Handle(const std::string& path) : descriptor(open_past_cache(path)), is_direct(descriptor >= 0) {
        if (!is_direct) descriptor = open_for_reading(path, 0);
        if (descriptor < 0) throw_error();
#if defined(POSIX_FADV_RANDOM)
        if (!is_direct) posix_fadvise(descriptor, 0, 0, POSIX_FADV_RANDOM);  // nothing beyond what is asked for
#endif
        if (fstat(descriptor, &status)) {
            const int error = errno;
            close(descriptor);
            errno = error;
            throw_error();
        }
    }
    ~Handle() { close(descriptor); }
};

// The system may give less than what it was asked for; past the cache it goes on only at aligned places. Of two reads that
// bring nothing new the second one is the end.
size_t DirectFile::read(uint64_t offset, size_t n_bytes, uint8_t* to) const {
    size_t n_read = 0;
    for (bool ended = false; n_read < n_bytes;) {
        const size_t from = n_read / kAlignment * kAlignment;
        const ssize_t n = read_once(handle_->descriptor, offset + from, n_bytes - from, to + from);
        if (n < 0) throw_error();
        const bool is_new = from + static_cast<size_t>(n) > n_read;
        if (!is_new && ended) break;
        ended = !is_new;
        if (is_new) n_read = from + static_cast<size_t>(n);
    }
#if defined(POSIX_FADV_DONTNEED)
    if (!handle_->is_direct) {
        posix_fadvise(handle_->descriptor, static_cast<off_t>(offset), static_cast<off_t>(n_bytes),
                      POSIX_FADV_DONTNEED);
    }
#endif
    return n_read;
}

bool DirectFile::is_unchanged() const {
    const struct stat now = status_of(handle_->descriptor);
    const timespec time = time_of_change(now), before = time_of_change(handle_->status);
    return now.st_size == handle_->status.st_size && time.tv_sec == before.tv_sec && time.tv_nsec == before.tv_nsec;
}

bool DirectFile::is_direct() const { return handle_->is_direct; }

struct CachedFile::Handle {
    int descriptor;

    Handle(int of, const std::string&) : descriptor(fcntl(of, F_DUPFD_CLOEXEC, 0)) {
        if (descriptor < 0) throw_error();
    }
    ~Handle() { close(descriptor); }
};

size_t CachedFile::read(uint64_t offset, size_t n_bytes, uint8_t* to) const {
    size_t n_read = 0;
    while (n_read < n_bytes) {
        const ssize_t n = read_once(handle_->descriptor, offset + n_read, n_bytes - n_read, to + n_read);
        if (n < 0) throw_error();
        if (n == 0) break;
        n_read += static_cast<size_t>(n);
    }
    return n_read;
}
#else
struct DirectFile::Handle {
    std::filesystem::path path;
    std::uintmax_t n_bytes;
    std::filesystem::file_time_type written;
    std::mutex mutex;
    std::ifstream stream;

    explicit Handle(const std::string& name)
        : path(std::u8string(name.begin(), name.end())),
          n_bytes(std::filesystem::file_size(path)),
          written(std::filesystem::last_write_time(path)),
          stream(path, std::ios::binary) {
        if (!stream) throw std::system_error(errno, std::generic_category());
    }
};

size_t DirectFile::read(uint64_t offset, size_t n_bytes, uint8_t* to) const {
    const std::lock_guard lock(handle_->mutex);
    std::ifstream& stream = handle_->stream;
    stream.clear();
    stream.seekg(static_cast<std::streamoff>(offset));
    stream.read(reinterpret_cast<char*>(to), static_cast<std::streamsize>(n_bytes));
    if (stream.bad()) throw std::system_error(EIO, std::generic_category());
    return static_cast<size_t>(stream.gcount());
}

bool DirectFile::is_unchanged() const {
    return std::filesystem::file_size(handle_->path) == handle_->n_bytes &&
           std::filesystem::last_write_time(handle_->path) == handle_->written;
}

bool DirectFile::is_direct() const { return false; }

struct CachedFile::Handle {
    DirectFile file;

    Handle(int, const std::string& path) : file(path) {}
};

size_t CachedFile::read(uint64_t offset, size_t n_bytes, uint8_t* to) const {
    return handle_->file.read(offset, n_bytes, to);
}
#endif

DirectFile::DirectFile(const std::string& path) : handle_(std::make_unique<Handle>(path)) {}

DirectFile::~DirectFile() = default;

CachedFile::CachedFile(int descriptor, const std::string& path) : handle_(std::make_unique<Handle>(descriptor, path)) {}

CachedFile::~CachedFile() = default;

CachedFile::CachedFile(CachedFile&&) noexcept = default;

// ---- cores and pages -----------------------------------------------------------------------------------------------

void map_now(const uint8_t* p, size_t n_bytes) {
#if defined(__linux__)
    constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers lack; older systems refuse it
    const uintptr_t page = 4096, first = reinterpret_cast<uintptr_t>(p) / page * page;
    madvise(reinterpret_cast<void*>(first), reinterpret_cast<uintptr_t>(p) + n_bytes - first, kPopulateRead);
#else
    static_cast<void>(p), static_cast<void>(n_bytes);
#endif
}

void give_back(uint8_t* p, size_t n_bytes) {
#if defined(__linux__)
    const uintptr_t page = page_bytes(), begin = reinterpret_cast<uintptr_t>(p);
    const uintptr_t first = (begin + page - 1) / page * page, end = (begin + n_bytes) / page * page;
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
#else
    static_cast<void>(p), static_cast<void>(n_bytes);
#endif
}

void give_back_freed() {
#if defined(__GLIBC__)
    malloc_trim(0);
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
