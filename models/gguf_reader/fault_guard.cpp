#include "fault_guard.h"

#if defined(EI_HAS_FAULT_GUARD)
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#if !defined(MAP_ANONYMOUS)
#define MAP_ANONYMOUS MAP_ANON
#endif

namespace {

std::atomic<GuardedRange*> ranges{nullptr};
std::atomic<uintptr_t> page_bytes{0};
// What was there before our handler, and what was put on top of it and is now below.
constexpr int kMostEarlier = 8;
struct sigaction earlier[kMostEarlier];
std::atomic<int> n_earlier{0};
std::mutex changing;
int n_guarded = 0;

// Whether the page of an address was replaced by zeros. Only what a signal handler may do.
bool replace_lost_pages(uintptr_t address) {
    for (GuardedRange* range = ranges.load(std::memory_order_acquire); range; range = range->next) {
        const uintptr_t first = range->first.load(std::memory_order_relaxed);
        const uintptr_t end = range->end.load(std::memory_order_acquire);
        if (address < first || address >= end) continue;
        range->is_lost.store(true, std::memory_order_release);
        const uintptr_t page = address & ~(page_bytes.load(std::memory_order_relaxed) - 1);
        return mmap(reinterpret_cast<void*>(page), end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                    0) != MAP_FAILED;
    }
    return false;
}

void handle(int number, siginfo_t* info, void*) {
    const int error = errno;
    const bool is_fault = info->si_code > 0;  // not one that a process has sent
    if (!is_fault || !replace_lost_pages(reinterpret_cast<uintptr_t>(info->si_addr))) {
        // The one before takes over, and with the fault itself: the instruction runs again after this returns.
        const int n = n_earlier.load(std::memory_order_relaxed);
        struct sigaction next = {};
        next.sa_handler = SIG_DFL;
        if (n > 0) {
            next = earlier[n - 1];
            n_earlier.store(n - 1, std::memory_order_relaxed);
        }
        sigaction(number, &next, nullptr);
        if (!is_fault) raise(number);  // comes when this returns
    }
    errno = error;
}

bool is_ours(const struct sigaction& action) { return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == handle; }

// Puts our handler on top. One that was put on top of ours since is the next one below.
void install() {
    struct sigaction now = {};
    if (sigaction(SIGBUS, nullptr, &now) || is_ours(now)) return;
    const int n = n_earlier.load();
    if (n == kMostEarlier) return;
    earlier[n] = now;
    n_earlier.store(n + 1);
    struct sigaction ours = {};
    ours.sa_sigaction = handle;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

// Unless another one is on top, which may call ours.
void remove() {
    struct sigaction now = {};
    const int n = n_earlier.load();
    if (n == 0 || sigaction(SIGBUS, nullptr, &now) || !is_ours(now)) return;
    sigaction(SIGBUS, &earlier[n - 1], nullptr);
    n_earlier.store(n - 1);
}

}  // namespace

GuardedRange* guard(const void* p, size_t n_bytes) {
    const std::lock_guard lock(changing);
    page_bytes.store(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)));
    GuardedRange* range = ranges.load();
    while (range && range->end.load()) range = range->next;
    if (!range) {
        range = new GuardedRange;
        range->next = ranges.load();
        ranges.store(range, std::memory_order_release);
    }
    const uintptr_t first = reinterpret_cast<uintptr_t>(p), page = page_bytes.load();
    range->is_lost.store(false);
    range->first.store(first);
    range->end.store((first + n_bytes + page - 1) / page * page, std::memory_order_release);
    n_guarded++;
    install();
    return range;
}

void unguard(GuardedRange* range) {
    const std::lock_guard lock(changing);
    range->end.store(0, std::memory_order_release);
    if (--n_guarded == 0) remove();
}

void keep_guard() {
    const std::lock_guard lock(changing);
    if (n_guarded) install();
}
#endif
