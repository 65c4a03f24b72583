// The Python face of the engine: the module, and what stands alone in it.
#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "bind/bindings.h"
#include "kernels/top_k.h"
#include "machine_limits.h"
#include "packing/packing.h"
#include "platform.h"

const Kernels& kernels_of(const std::string& isa) {
    std::string known;
    for (int i = 0; i < n_instruction_sets; i++) {
        if (!instruction_sets[i].can_run()) continue;
        if (isa == instruction_sets[i].name) return *instruction_sets[i].kernels;
        known += (known.empty() ? "" : ", ") + std::string(instruction_sets[i].name);
    }
    const std::string what = "instruction set '" + isa + "' is not one that this CPU and this build have: " + known;
    throw nb::value_error(what.c_str());
}

Format packed_format(int format, int n_in) {
    int n_inputs;
    if (!packed_block(format, n_inputs)) {
        throw nb::value_error(("ggml type " + std::to_string(format) + " has no kernel").c_str());
    }
    if (n_in < 1 || n_in % n_inputs) throw nb::value_error("n_in must be a multiple of the type's block");
    return static_cast<Format>(format);
}

Format format_of(int ggml_type, int n_in) {
    int n_inputs;
    size_t n_bytes;
    if (!block_size(ggml_type, n_inputs, n_bytes)) throw nb::value_error("no type that a file could have");
    return packed_format(ggml_type, n_in);
}

size_t matrix_source_bytes(int ggml_type, int n_out, int n_in) {
    int n_inputs;
    size_t n_bytes;
    block_size(ggml_type, n_inputs, n_bytes);
    return static_cast<size_t>(n_out) * static_cast<size_t>(n_in / n_inputs) * n_bytes;
}

size_t packed_bytes(int format, int n_out, int n_in) {
    if (n_out < 1) throw nb::value_error("n_out must be positive");
    const size_t n_groups = (static_cast<size_t>(n_out) + kRows - 1) / kRows;
    if (n_in == 0) return n_groups * kRows * sizeof(float);
    return (n_groups * packed_group_bytes(packed_format(format, n_in), n_in) + 63) / 64 * 64;
}

namespace {

// The instruction sets that this CPU and this build have, best first.
std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (int i = 0; i < n_instruction_sets; i++) {
        if (instruction_sets[i].can_run()) names.push_back(instruction_sets[i].name);
    }
    return names;
}

// (name, whether this build has it, whether this CPU has it) of every instruction set of this architecture, best first.
std::vector<std::tuple<std::string, bool, bool>> known_isas() {
    std::vector<std::tuple<std::string, bool, bool>> sets;
    for (int i = 0; i < n_instruction_sets; i++) {
        const InstructionSet& set = instruction_sets[i];
        sets.emplace_back(set.name, set.kernels != nullptr, set.present());
    }
    return sets;
}

// Rows of n_in weights in another type, both as GGUF stores them.
void rewrite_rows(int ggml_type, Bytes source, int n_in, int as, WritableBytes out) {
    const Format of = format_of(ggml_type, n_in), wanted = format_of(as, n_in);
    if (of == Format::I2_S || !can_write(wanted)) throw nb::value_error("rows of this type cannot be had in that one");
    const size_t row_bytes = matrix_source_bytes(ggml_type, 1, n_in), n_rows = source.size() / row_bytes;
    if (source.size() % row_bytes || out.size() != n_rows * matrix_source_bytes(as, 1, n_in)) {
        throw nb::value_error("source must be whole rows, and out have room for as many");
    }
    ReleasedGil release;
    write_rows(of, source.data(), n_rows, n_in, wanted, out.data());
}

void bind_formats(nb::module_& m) {
    m.def("packed_bytes", &packed_bytes, "format"_a, "n_out"_a, "n_in"_a,
          "Bytes of a packed matrix, or of a vector where n_in is 0.");
    m.def(
        "holds_trits",
        [](int ggml_type, Bytes source) {
            return holds_trits(static_cast<Format>(ggml_type), source.data(), source.size());
        },
        "ggml_type"_a, "source"_a,
        "Whether no code of some rows of a TQ1_0, TQ2_0 or I2_S matrix is 3, which stands for no trit.");
    m.def("rewrite_rows", &rewrite_rows, "ggml_type"_a, "source"_a, "n_in"_a, "as_type"_a, "out"_a,
          "Write rows of one GGUF type into out as F16, Q8_0 or Q4_0, the latter with the best of some scales.");
}

void bind_machine(nb::module_& m) {
    m.def("give_back_freed", &give_back_freed, nb::call_guard<ReleasedGil>(),
          "Give memory that was freed and that the allocator keeps back to the system, where it can.");
    m.def("available_isas", &available_isas, "Instruction sets that this CPU and this build have, best first.");
    m.def("known_isas", &known_isas,
          "(name, whether this build has it, whether this CPU has it), best first; a name may stand twice.");
    m.def(
        "measure_limits",
        [](const std::string& isa, int n_threads, int n_rounds) {
            const Kernels& kernels = kernels_of(isa);
            ReleasedGil release;
            Pool pool(n_threads);
            const Limits limits = measure_limits(kernels, pool, n_rounds);
            return std::make_pair(limits.read_bytes_per_second, limits.int8_multiply_adds_per_second);
        },
        "isa"_a, "n_threads"_a, "n_rounds"_a,
        "Bytes read out of memory, and int8 multiply-adds, a second, by n_threads together: the best of n_rounds.");
}

void bind_top_k(nb::module_& m) {
    m.def(
        "top_k",
        [](Floats logits, int k) {
            if (logits.size() == 0) throw nb::value_error("top_k: a row has at least one logit");
            return top_k(logits.data(), static_cast<int>(logits.size()), k);
        },
        "logits"_a, "k"_a,
        "(id, probability) of about the k most probable tokens, the most probable first. logits: (n_vocab,).");
}

}  // namespace

// An error whose message has the name of a file in it that is no UTF-8: Python's text has its bytes as os.fsdecode does.
void translate_bytes(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::runtime_error& error) {
        const char* what = error.what();
        const auto n_bytes = static_cast<Py_ssize_t>(std::strlen(what));
        if (PyObject* sound = PyUnicode_DecodeUTF8(what, n_bytes, nullptr)) {
            Py_DECREF(sound);
            throw;  // to the translator of all others
        }
        PyErr_Clear();
        PyErr_SetObject(PyExc_RuntimeError, message_of(what).ptr());
    }
}

NB_MODULE(_core, m) {
    nb::register_exception_translator(translate_bytes);
    m.doc() = "edgeinfer's native engine; use edgeinfer.backends.native.NativeBackend";
#if defined(NDEBUG)
    nb::set_leak_warnings(false);  // of what still lives when Python ends, such as an engine in a thread of its own
#endif
    bind_machine(m);
    bind_formats(m);
    bind_top_k(m);
    bind_weights(m);
    bind_config(m);
    bind_text_state(m);
    bind_experts(m);
    bind_disk_experts(m);
    bind_decoder(m);
    bind_head(m);
    bind_kernels(m);
}
