// The cache of experts that files hold, in Python.
#include "experts/disk_experts.h"
#include "bind/bindings.h"
#include "experts/layout.h"
#include "experts/source.h"
#include "packing/packing.h"

namespace {

using ExpertNumbers = std::vector<std::pair<int, int>>;  // (layer, expert)

// ---- sources -------------------------------------------------------------------------------------------------------

struct Source {
    std::shared_ptr<const ExpertLayout> layout;
    std::unique_ptr<ExpertSource> source;  // null once a cache has it
    size_t buffer_bytes;
};

Source packed_experts(std::shared_ptr<const ExpertLayout> layout, const FileName& path, uint64_t offset,
                      std::vector<std::string> names) {
    if (names.size() != static_cast<size_t>(layout->n_layers()))
        throw nb::value_error("a name for each layer is wanted");
    return {layout, std::make_unique<PackedExperts>(layout, path.bytes, offset, std::move(names)), 0};
}

// name, file, offset, stride, format of GGUF, scale
using TensorFields = std::tuple<std::string, int, uint64_t, uint64_t, int, float>;

Source unpacked_experts(std::shared_ptr<const ExpertLayout> layout, const std::vector<FileName>& names,
                        const std::vector<TensorFields>& tensors) {
    std::vector<ExpertTensor> checked;
    for (int i = 0; i < layout->n_layers(); i++) {
        if (layout->layer(i).n_experts == 0) continue;
        for (const Matrix& matrix : layout->layer(i).parts) {
            if (checked.size() == tensors.size())
                throw nb::value_error("a tensor for each matrix of experts is wanted");
            const auto& [name, file, offset, stride, type, scale] = tensors[checked.size()];
            const Format format = format_of(type, matrix.n_in);
            checked.push_back(
                {name, file, offset, stride, matrix_source_bytes(type, matrix.n_out, matrix.n_in), format, scale});
        }
    }
    if (checked.size() != tensors.size()) throw nb::value_error("more tensors than matrices of experts");
    std::vector<std::string> paths;
    for (const FileName& name : names) paths.push_back(name.bytes);
    auto source = std::make_unique<UnpackedExperts>(layout, paths, std::move(checked));
    const size_t buffer_bytes = source->buffer_bytes();
    return {layout, std::move(source), buffer_bytes};
}

// ---- the cache -----------------------------------------------------------------------------------------------------

ExpertCacheSize checked_size(size_t n_bytes, int n_used, int n_readers) {
    if (n_used < 1) throw nb::value_error("n_used must be positive");
    if (n_readers < 1 || n_readers > 64) throw nb::value_error("n_readers must be in 1..64");
    return {n_bytes, n_used, n_readers};
}

void init_cache(DiskExperts* experts, Source& source, size_t n_bytes, int n_used, int n_readers) {
    const ExpertCacheSize size = checked_size(n_bytes, n_used, n_readers);
    if (!source.source) throw nb::value_error("a source is for one cache");
    new (experts) DiskExperts(source.layout, std::move(source.source), size);
}

std::pair<std::vector<int32_t>, int> begin(DiskExperts& experts, int layer, std::vector<int32_t> wanted) {
    check_experts(experts.layout(), layer, wanted);
    const int n_in_memory = experts.begin(layer, wanted);
    return {std::move(wanted), n_in_memory};
}

// None where it cannot be had.
nb::object wait(nb::handle_t<DiskExperts> self, int layer, int expert) {
    DiskExperts& experts = nb::cast<DiskExperts&>(self);
    check_experts(experts.layout(), layer, {expert});
    const uint8_t* record;
    {
        ReleasedGil release;
        record = experts.wait(layer, expert, [] {
            HeldGil acquire;
            return PyErr_CheckSignals() != 0;
        });
    }
    if (PyErr_Occurred()) throw nb::python_error();
    if (!record) return nb::none();
    const size_t n_bytes = experts.layout().layer(layer).record_bytes;
    return nb::cast(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(record, {n_bytes}, self));
}

void warm(DiskExperts& experts, const ExpertNumbers& numbers) {
    std::vector<ExpertId> ids;
    for (const auto& [layer, expert] : numbers) {
        check_experts(experts.layout(), layer, {expert});
        ids.push_back({layer, expert});
    }
    experts.warm(std::move(ids));
}

std::vector<size_t> record_bytes(const DiskExperts& experts) {
    std::vector<size_t> n_bytes;
    for (int i = 0; i < experts.layout().n_layers(); i++) n_bytes.push_back(experts.layout().layer(i).record_bytes);
    return n_bytes;
}

ExpertNumbers in_memory(const DiskExperts& experts) {
    ExpertNumbers numbers;
    for (const ExpertId id : experts.in_memory()) numbers.emplace_back(id.layer, id.expert);
    return numbers;
}

// (n_layers, most experts of a layer) uint8.
auto presence(const DiskExperts& experts) {
    const ExpertLayout& layout = experts.layout();
    int n_most = 0;
    for (int i = 0; i < layout.n_layers(); i++) n_most = std::max(n_most, layout.layer(i).n_experts);
    const size_t n_layers = static_cast<size_t>(layout.n_layers()), n_each = static_cast<size_t>(n_most);
    auto* present = new std::vector<uint8_t>(n_layers * n_each, 0);
    const nb::capsule owner(present, [](void* p) noexcept { delete static_cast<std::vector<uint8_t>*>(p); });
    for (const ExpertId id : experts.in_memory()) {
        (*present)[static_cast<size_t>(id.layer) * n_each + static_cast<size_t>(id.expert)] = 1;
    }
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(present->data(), {n_layers, n_each}, owner);
}

void bind_stats(nb::module_& m) {
    nb::class_<ExpertLayerStats>(m, "ExpertLayerStats", "What an expert cache did for a layer; see experts/stats.h.")
        .def_ro("lookups", &ExpertLayerStats::lookups)
        .def_ro("hits", &ExpertLayerStats::hits)
        .def_ro("reads", &ExpertLayerStats::reads)
        .def_ro("bytes_read", &ExpertLayerStats::bytes_read)
        .def_ro("evictions", &ExpertLayerStats::evictions)
        .def_ro("prefetches", &ExpertLayerStats::prefetches)
        .def_ro("useful", &ExpertLayerStats::useful)
        .def_ro("dropped", &ExpertLayerStats::dropped)
        .def_ro("seconds_waited", &ExpertLayerStats::seconds_waited)
        .def_ro("seconds_stalled", &ExpertLayerStats::seconds_stalled);
    nb::class_<ExpertStats>(m, "ExpertStats", "What an expert cache did.")
        .def_ro("layers", &ExpertStats::layers)
        .def_ro("busy_seconds", &ExpertStats::busy_seconds)
        .def_ro("n_slots", &ExpertStats::n_slots)
        .def_ro("n_in_memory", &ExpertStats::n_in_memory);
}

void bind_sources(nb::module_& m) {
    nb::class_<Source>(m, "ExpertSource", "Where a cache reads experts.")
        .def_static("packed", &packed_experts, "layout"_a, "path"_a, "offset"_a, "names"_a,
                    "Records one after the other from an offset on. names: of the experts of each layer, for errors.")
        .def_static(
            "unpacked", &unpacked_experts, "layout"_a, "paths"_a, "tensors"_a,
            "The model's files. tensors: gate, up and down of each layer with experts, each (name, index of the "
            "file, offset of expert 0, bytes from one expert to the next, ggml type, scale of I2_S).")
        .def_ro("buffer_bytes", &Source::buffer_bytes, "Of memory that each reader has for itself.")
        .def_static("buffer_bytes_of", &UnpackedExperts::buffer_bytes_of, "n_bytes"_a,
                    "What that is where the matrices of experts lie in the model's files and have n_bytes at most.");
}

}  // namespace

void bind_disk_experts(nb::module_& m) {
    bind_stats(m);
    bind_sources(m);
    const auto without_gil = nb::call_guard<ReleasedGil>();
    nb::class_<DiskExperts, ExpertStore>(m, "DiskExperts", "A cache of experts that files hold; see disk_experts.h.")
        .def("__init__", &init_cache, "source"_a, "n_bytes"_a, "n_used"_a, "n_readers"_a,
             "n_bytes: of slots. Raises ValueError for less than least_bytes, MemoryError, OSError.")
        .def("begin_pass", &DiskExperts::begin_pass, without_gil)
        .def("begin", &begin, "layer"_a, "wanted"_a, without_gil,
             "The experts in the order in which to compute them, and how many of them are in memory.")
        .def("wait", &wait, "layer"_a, "expert"_a,
             "The record, valid until done; None where it cannot be had: see error.")
        .def(
            "done",
            [](DiskExperts& experts, int layer, int expert) {
                check_experts(experts.layout(), layer, {expert});
                experts.done(layer, expert);
            },
            "layer"_a, "expert"_a, without_gil)
        .def(
            "hint",
            [](DiskExperts& experts, int layer, const std::vector<int32_t>& wanted) {
                check_experts(experts.layout(), layer, wanted);
                experts.hint(layer, wanted);
            },
            "layer"_a, "experts"_a, without_gil, "Experts that a layer will probably want, the most probable first.")
        .def(
            "forget_use",
            [](DiskExperts& experts, int layer, const std::vector<int32_t>& wanted) {
                check_experts(experts.layout(), layer, wanted);
                experts.forget_use(layer, wanted);
            },
            "layer"_a, "experts"_a, without_gil, "Their recency is again what it was before the last pass.")
        .def("resize", &DiskExperts::resize, "n_bytes"_a, without_gil,
             "Between passes: slots of n_bytes together hold experts, at most those that it was made with and at least "
             "what a pass needs. The memory of the others is given back to the system.")
        .def("warm", &warm, "experts"_a, without_gil, "Read these (layer, expert) in the background into free slots.")
        .def_prop_ro("error", &DiskExperts::error, "What could not be read in this pass, and why; empty if nothing.")
        .def("stats", &DiskExperts::stats, without_gil)
        .def("in_memory", &in_memory, without_gil, "(layer, expert) of all that are in memory.")
        .def("pass_stats", &DiskExperts::pass_stats, without_gil, "All layers together, since the last pass began.")
        .def(
            "last_use",
            [](const DiskExperts& experts, int layer, int expert) {
                check_experts(experts.layout(), layer, {expert});
                return experts.last_use({layer, expert});
            },
            "layer"_a, "expert"_a, "The number of the pass that counts as the last one that wanted it; 0 for none.")
        .def("presence", &presence, "(n_layers, most experts of a layer) uint8: 1 for those that are in memory.")
        .def_prop_ro("record_bytes", &record_bytes, "By layer, 0 for one without experts.")
        .def_prop_ro("is_direct", &DiskExperts::is_direct, "Whether reads go past the system's cache of files.")
        .def_prop_ro(
            "n_bytes", [](const DiskExperts& experts) { return experts.memory_bytes(); },
            "Of memory now: slots, buffers of the readers, and tables.")
        .def_prop_ro(
            "slot_bytes", [](const DiskExperts& experts) { return experts.slot_bytes(); }, "Of that, slots.")
        .def_static(
            "planned_bytes",
            [](const ExpertLayout& layout, size_t buffer_bytes, size_t n_bytes, int n_used, int n_readers) {
                return DiskExperts::memory_bytes(layout, buffer_bytes, checked_size(n_bytes, n_used, n_readers));
            },
            "layout"_a, "buffer_bytes"_a, "n_bytes"_a, "n_used"_a, "n_readers"_a,
            "What n_bytes will be. Raises ValueError.")
        .def_static(
            "least_bytes",
            [](const ExpertLayout& layout, int n_used) {
                return ExpertSlots::least_bytes(layout, std::max(1, n_used));
            },
            "layout"_a, "n_used"_a, "Of slots with which a pass can run.");
}
