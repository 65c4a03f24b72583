// Files that are mapped while they are read, in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>

#include "fault_guard.h"

#if defined(EI_HAS_FAULT_GUARD)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Bytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;

#if defined(EI_HAS_FAULT_GUARD)
// A whole file, read-only.
class GuardedMapping {
public:
    GuardedMapping(int descriptor, size_t n_bytes, bool on_huge_pages) : n_bytes_(n_bytes) {
        if (n_bytes == 0) throw nb::value_error("there are no bytes to map");
        void* p = mmap(nullptr, n_bytes, PROT_READ, MAP_SHARED, descriptor, 0);
        if (p == MAP_FAILED) throw std::system_error(errno, std::generic_category());
        data_ = static_cast<uint8_t*>(p);
#if defined(MADV_HUGEPAGE)
        if (on_huge_pages) madvise(data_, n_bytes, MADV_HUGEPAGE);  // a kernel may lack them
#else
        static_cast<void>(on_huge_pages);
#endif
        range_ = guard(data_, n_bytes);
    }
    ~GuardedMapping() {
        unguard(range_);
        munmap(data_, n_bytes_);
    }
    GuardedMapping(const GuardedMapping&) = delete;
    GuardedMapping& operator=(const GuardedMapping&) = delete;

    const uint8_t* data() const { return data_; }
    size_t size() const { return n_bytes_; }
    bool is_lost() const {
        keep_guard();
        return range_->is_lost.load(std::memory_order_acquire);
    }

    // Zeros in place of lost pages stay.
    void drop(size_t first, size_t last) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        first = first / page * page;
        last = std::min(last, (n_bytes_ + page - 1) / page * page) / page * page;
        if (first < last) madvise(data_ + first, last - first, MADV_DONTNEED);
    }

private:
    uint8_t* data_ = nullptr;
    size_t n_bytes_;
    GuardedRange* range_ = nullptr;
};
#endif

}  // namespace

NB_MODULE(_mapped, m) {
    m.doc() = "Mapped files; use edgeinfer.models.gguf_reader.mapping";
#if defined(EI_HAS_FAULT_GUARD)
    nb::class_<GuardedMapping>(m, "GuardedMapping",
                               "A whole file, read-only. What it is cut by meanwhile is read as zeros; see is_lost.")
        .def(
            "__init__",
            [](GuardedMapping* mapping, int descriptor, size_t n_bytes, bool on_huge_pages) {
                try {
                    new (mapping) GuardedMapping(descriptor, n_bytes, on_huge_pages);
                } catch (const std::system_error& error) {
                    errno = error.code().value();
                    PyErr_SetFromErrno(PyExc_OSError);
                    throw nb::python_error();
                }
            },
            "descriptor"_a, "n_bytes"_a, "on_huge_pages"_a = false, "Raises OSError.")
        .def_prop_ro(
            "bytes",
            [](const GuardedMapping& mapping) { return Bytes(mapping.data(), {mapping.size()}, nb::find(mapping)); },
            "All of them, (n_bytes,), without a copy.")
        .def_prop_ro("is_lost", &GuardedMapping::is_lost, "Whether something was read that the file has no longer.")
        .def("drop", &GuardedMapping::drop, "first"_a, "last"_a,
             "Give the memory of the pages from that of byte first to the last whole one before byte last back.");
#endif
}
