/* Makes reads of some files fail, for tests: preloaded into a process, it stands before pread and open.
 *
 * FAULTY_READS is a list of kind:first:every with commas between. Of the reads (pread) of files whose names contain
 * FAULTY_FILES, number `first` and each `every`-th one after it (0: no other) has that kind of fault: eio, short (half of
 * what was asked for), end (nothing, as at the end of a file), late (the same, but not twice in a row to a thread), slow
 * (20 ms). FAULTY_DIRECT=1: files are not opened past the page cache. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long n_reads;
static __thread int was_late;

static int is_faulty_file(int descriptor) {
    const char* pattern = getenv("FAULTY_FILES");
    char link[64], name[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t n = readlink(link, name, sizeof name - 1);
    if (!pattern || n < 0) return 0;
    name[n] = 0;
    return strstr(name, pattern) != NULL;
}

static int is_due(const char* fault, const char* kind, long number) {
    long first, every;
    const size_t n = strlen(kind);
    if (strncmp(fault, kind, n) || sscanf(fault + n, ":%ld:%ld", &first, &every) != 2) return 0;
    return number == first || (every && number > first && (number - first) % every == 0);
}

static ssize_t faulty(ssize_t (*read)(int, void*, size_t, off_t), int descriptor, void* to, size_t n, off_t offset) {
    const char* fault = getenv("FAULTY_READS");
    if (!fault || !is_faulty_file(descriptor)) return read(descriptor, to, n, offset);
    const long number = atomic_fetch_add(&n_reads, 1) + 1;
    for (; fault; fault = strchr(fault, ','), fault = fault ? fault + 1 : fault) {
        if (is_due(fault, "slow", number)) usleep(20000);
        if (is_due(fault, "end", number)) return 0;
        if (is_due(fault, "late", number) && !was_late) {
            was_late = 1;
            return 0;
        }
        if (is_due(fault, "short", number)) return read(descriptor, to, n >= 8192 ? n / 8192 * 4096 : n, offset);
        if (is_due(fault, "eio", number)) {
            errno = EIO;
            return -1;
        }
    }
    was_late = 0;
    return read(descriptor, to, n, offset);
}

ssize_t pread(int descriptor, void* to, size_t n, off_t offset) {
    return faulty(dlsym(RTLD_NEXT, "pread"), descriptor, to, n, offset);
}

ssize_t pread64(int descriptor, void* to, size_t n, off_t offset) {
    return faulty(dlsym(RTLD_NEXT, "pread64"), descriptor, to, n, offset);
}

static int refused(const char* name, int flags, mode_t mode, const char* symbol) {
    int (*open_it)(const char*, int, ...) = dlsym(RTLD_NEXT, symbol);
    if ((flags & O_DIRECT) && getenv("FAULTY_DIRECT")) {
        errno = EINVAL;
        return -1;
    }
    return open_it(name, flags, mode);
}

int open(const char* name, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return refused(name, flags, mode, "open");
}

int open64(const char* name, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return refused(name, flags, mode, "open64");
}
