// Mapped files that another program may cut short: a page that the file has no longer is read as zeros, and the process
// goes on.
//
// The system answers such a read with SIGBUS. The handler here replaces the rest of the range by zeros and notes that it is
// lost, so that whoever reads can say so afterwards; pages that the disk cannot read end in the same way. Every other
// SIGBUS goes to the handler that was there before. The handler is there while a range is guarded.
#pragma once

#if defined(__unix__) || defined(__APPLE__)
#define EI_HAS_FAULT_GUARD 1

#include <atomic>
#include <cstddef>
#include <cstdint>

// A range of mapped memory. The handler looks at it in any thread, so none is ever freed; they are used again.
struct GuardedRange {
    std::atomic<uintptr_t> first{0}, end{0};  // end 0: of no range
    std::atomic<bool> is_lost{false};
    GuardedRange* next = nullptr;
};

// Guards n_bytes of a mapping, until unguard; any thread. Before the memory is unmapped it must end.
GuardedRange* guard(const void* p, size_t n_bytes);
void unguard(GuardedRange* range);
// Puts the handler on top again, where the program has put another one there since; does nothing without a range.
void keep_guard();
#endif
