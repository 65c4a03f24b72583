// What the files that make up the Python face have in common. What comes in is checked here and in Python; below,
// nothing is.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "../../../models/gil.h"
#include "kernels/kernels.h"
#include "kernels/matrix.h"

namespace nb = nanobind;
using namespace nb::literals;

// The name of a file as the system has it, which need not be UTF-8: of a str, bytes or os.PathLike.
struct FileName {
    std::string bytes;
};

// The message of an error as a text of Python, in which the name of a file is as os.fsdecode has it.
inline nb::object message_of(const std::string& what) {
    return nb::steal(PyUnicode_DecodeUTF8(what.data(), static_cast<Py_ssize_t>(what.size()), "surrogateescape"));
}

template <>
struct nanobind::detail::type_caster<FileName> {
    NB_TYPE_CASTER(FileName, const_name("str | bytes | os.PathLike[str]"))

    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        PyObject* encoded = nullptr;
        if (!PyUnicode_FSConverter(source.ptr(), &encoded)) {
            PyErr_Clear();
            return false;
        }
        value.bytes.assign(PyBytes_AsString(encoded), static_cast<size_t>(PyBytes_Size(encoded)));
        Py_DECREF(encoded);
        return true;
    }
};

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Features = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Taps = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// A Python array of bytes that an object has, read-only, without a copy.
template <class Owner>
auto bytes_of(const Owner& owner, const uint8_t* data, size_t n_bytes) {
    return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(data, {n_bytes}, nb::find(owner));
}

// Raises ValueError for an instruction set that this CPU or this build lacks.
const Kernels& kernels_of(const std::string& isa);
// format: a ggml type, or one that only packed weights have. Both raise ValueError.
Format packed_format(int format, int n_in);
Format format_of(int ggml_type, int n_in);
// Bytes of a matrix as GGUF stores it.
size_t matrix_source_bytes(int ggml_type, int n_out, int n_in);
// Bytes that a matrix (n_out, n_in), or a vector where n_in is 0, takes when packed.
size_t packed_bytes(int format, int n_out, int n_in);

// Raise ValueError for a layer without experts, and for experts that it lacks.
class ExpertLayout;
void check_layer(const ExpertLayout& layout, int layer);
void check_experts(const ExpertLayout& layout, int layer, const std::vector<int32_t>& experts);

// The fields of Prefetch in matrix.h.
using PrefetchFields = std::tuple<int, bool, int, int, int, int, int, bool>;
PrefetchFields fields_of(const Prefetch& prefetch);
Prefetch prefetch_from(const PrefetchFields& fields);

class Decoder;
// A device that computes some experts, see ExpertTier in backends/base.py; None for none.
void set_tier(Decoder& decoder, nb::object tier);

void bind_weights(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_disk_experts(nb::module_& m);
void bind_config(nb::module_& m);
void bind_text_state(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_head(nb::module_& m);
void bind_kernels(nb::module_& m);
