// Decoders and their forward passes, and the parts of draft heads, in Python.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>

#include "bind/bindings.h"
#include "decoder.h"

namespace {

void init_decoder(Decoder* decoder, const DecoderConfig& config, const FrontConfig& front, const std::string& isa,
                  std::shared_ptr<Pool> threads, std::shared_ptr<Weights> weights,
                  std::shared_ptr<ExpertStore> experts) {
    for (size_t i = 0; i < config.layers.size(); i++) {
        if (!config.layers[i].attention()) continue;
        const AttentionConfig& attention = *config.layers[i].attention();
        const bool is_joined = i == 0 && front.kind == FrontKind::ConcatenatedInput;
        if (attention.n_in != (is_joined ? 2 : 1) * config.n_embd) {
            throw nb::value_error("a layer attends from the residual stream, or from what the front joins");
        }
        if (attention.query_scales >= static_cast<int>(config.query_scales.size())) {
            throw nb::value_error("a layer has query scales that were not added");
        }
    }
    if ((front.kind == FrontKind::TargetInput) != (config.n_target > 0) ||
        (config.n_target && config.layer_inputs.n_inputs) ||
        (config.clusters.n && (config.logit_scale != 1.0f || config.logit_soft_cap != 0.0f))) {
        throw nb::value_error("n_target is of target_input, and logits of clusters are not changed");
    }
    new (decoder) Decoder(config, front, kernels_of(isa), std::move(threads), std::move(weights), std::move(experts));
}

// ---- forward passes ------------------------------------------------------------------------------------------------

// Whether the tokens are in the vocabulary, parents come before their rows, and rows that are no chain fit into n_batch.
bool is_tree(const DecoderConfig& config, std::span<const int32_t> tokens, std::span<const int32_t> parents) {
    bool chain = true, valid = true;
    for (size_t i = 0; i < parents.size(); i++) {
        const int parent = parents[i], row = static_cast<int>(i);
        chain = chain && parent == row - 1;
        valid = valid && parent >= -1 && parent < row;
    }
    for (const int32_t token : tokens) valid = valid && token >= 0 && token < config.n_vocab;
    return valid && (chain || parents.size() <= static_cast<size_t>(config.n_batch));
}

// Raises an error of edgeinfer.common.errors.
[[noreturn]] void raise_unreadable(const char* kind, const std::string& reason) {
    const nb::object error = nb::module_::import_("edgeinfer.common.errors").attr(kind);
    PyErr_SetObject(error.ptr(), message_of(reason).ptr());
    throw nb::python_error();
}

// Raises CacheFull of edgeinfer.common.errors.
[[noreturn]] void raise_full(int n_positions) {
    const nb::object error = nb::module_::import_("edgeinfer.common.errors").attr("CacheFull");
    PyErr_SetObject(error.ptr(), nb::int_(n_positions).ptr());
    throw nb::python_error();
}

// Calls run(poll) without the interpreter's lock; raises what a signal handler raised meanwhile, CacheFull,
// ExpertReadError, ModelFileError and BackendLost.
template <class Run>
bool interruptible(const Run& run) {
    bool raised = false, whole = false;
    int full = -1;
    std::string unreadable;
    const char* kind = nullptr;
    const auto poll = [&raised] {
        HeldGil acquire;
        if (!raised) raised = PyErr_CheckSignals() != 0;  // a handler's exception stays until it is thrown
        return raised;
    };
    {
        ReleasedGil release;
        try {
            whole = run(poll);
        } catch (const CacheFull& error) {
            full = error.n_positions;
        } catch (const ExpertsUnreadable& error) {
            kind = "ExpertReadError", unreadable = error.what();
        } catch (const RowUnreadable& error) {
            kind = "ModelFileError", unreadable = error.what();
        } catch (const DeviceFailed& error) {
            kind = "BackendLost", unreadable = error.what();
        }
    }
    if (raised) throw nb::python_error();
    if (full >= 0) raise_full(full);
    if (kind) raise_unreadable(kind, unreadable);
    return whole;
}

std::span<const int32_t> span_of(const Ints& ints) { return {ints.data(), ints.size()}; }

// Whether n rows can run after n_pending pending ones of a sequence; of one that is read, there must be something.
bool has_place(const DecoderConfig& config, const SequenceState& state, int n_pending, int n) {
    if (!config.fits(state.sizes()) || n < 1 || n_pending < 0) return false;
    if (config.reads_target()) return n_pending == 0 && state.n_past() > 0 && state.n_past() < state.n_ctx();
    const int n_slots = state.n_past() + n_pending + n;
    return n_slots <= state.n_ctx() && state.has_room(n_slots);
}

// Whether features are (n, n_feature), for a decoder with a front, and absent for others.
bool fit_features(const Decoder& decoder, const std::optional<Features>& features, size_t n) {
    if (!features) return !decoder.has_front();
    const size_t n_feature = static_cast<size_t>(decoder.config().n_feature());
    return decoder.has_front() && features->shape(0) == n && features->shape(1) == n_feature;
}

// The rows of a sequence in a pass: (state, tokens, parents, n_pending, layers, taps, tap_row, features). taps:
// (n_taps, any, n_embd); those of the rows are written from tap_row on.
using SequenceArguments = std::tuple<SequenceState*, Ints, Ints, int, Ints, Taps, int, std::optional<Features>>;

SequenceRows sequence_rows(const Decoder& decoder, const SequenceArguments& arguments) {
    const auto& [state, tokens, parents, n_pending, layers, taps, tap_row, features] = arguments;
    const DecoderConfig& config = decoder.config();
    const int n = static_cast<int>(tokens.size()), n_taps = static_cast<int>(layers.size());
    const size_t n_embd = static_cast<size_t>(config.n_embd);
    if (!state || !has_place(config, *state, n_pending, n) ||
        parents.size() != tokens.size() + static_cast<size_t>(n_pending) || taps.shape(0) < layers.size() ||
        !fit_features(decoder, features, tokens.size()) ||
        (n_taps && (taps.shape(2) != n_embd || tap_row < 0 || taps.shape(1) < static_cast<size_t>(tap_row + n)))) {
        throw nb::value_error("forward: arguments do not fit together");
    }
    if (!is_tree(config, span_of(tokens), span_of(parents))) {
        throw nb::value_error("forward: a token or parent is out of range");
    }
    if (!state->can_begin(parents.data(), n_pending, n))
        throw nb::value_error("forward: rows that recurrent layers lack");
    float* first_tap = n_taps ? taps.data() + static_cast<size_t>(tap_row) * n_embd : nullptr;
    return {state,
            state->n_ctx(),
            tokens.data(),
            parents.data(),
            n,
            n_pending,
            features ? features->data() : nullptr,
            layers.data(),
            n_taps,
            first_tap,
            n_taps ? taps.shape(1) * n_embd : 0};
}

// Gives False if the pass was stopped by interrupt().
// interrupts: the decoder's count of them before the first pass of these rows.
bool forward(Decoder& decoder, const std::vector<SequenceArguments>& sequences, Ints rows, FloatRows logits,
             uint64_t interrupts) {
    const DecoderConfig& config = decoder.config();
    std::vector<SequenceRows> all;
    int n = 0;
    for (const SequenceArguments& arguments : sequences) {
        all.push_back(sequence_rows(decoder, arguments));
        n += all.back().n;
        for (size_t i = 0; i + 1 < all.size(); i++) {
            if (all[i].state == all.back().state) throw nb::value_error("forward: a sequence comes twice");
        }
    }
    const int n_rows = static_cast<int>(rows.size());
    if (n < 1 || n > config.n_batch || n_rows > n || logits.shape(0) != rows.size() ||
        logits.shape(1) != static_cast<size_t>(config.n_row_logits())) {
        throw nb::value_error("forward: arguments do not fit together");
    }
    for (int i = 0; i < n_rows; i++) {
        if (rows.data()[i] < 0 || rows.data()[i] >= n) throw nb::value_error("forward: a row is out of range");
    }
    return interruptible(
        [&](const auto& poll) { return decoder.forward(all, rows.data(), n_rows, logits.data(), interrupts, poll); });
}

// Reads a list of ints; gives false where there is anything else.
bool read_ints(nb::handle values, std::vector<int32_t>& ints) {
    if (!PyList_CheckExact(values.ptr())) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values.ptr()); i++) {
        PyObject* item = PyList_GET_ITEM(values.ptr(), i);
        if (!PyLong_CheckExact(item)) return false;
        int overflow = 0;
        const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow || value < INT32_MIN || value > INT32_MAX) return false;
        ints.push_back(static_cast<int32_t>(value));
    }
    return true;
}

// The rows of one sequence in lists of ints: (state, tokens, their parents, or None for those of a chain, the parents of
// the pending rows before them, whether logits of all rows are requested or of the last one, layers, taps of these layers
// or None, features or None).
using ListArguments = std::tuple<SequenceState*, nb::object, nb::object, nb::object, bool, std::vector<int32_t>,
                                 std::optional<Taps>, std::optional<Features>>;

// What has the rows of a sequence, as long as a pass runs.
struct Lists {
    std::vector<int32_t> tokens, links;
    SequenceRows rows;

    // Gives false where the arguments do not fit together, or are no lists.
    bool read(const Decoder& decoder, const ListArguments& arguments);
};

bool Lists::read(const Decoder& decoder, const ListArguments& arguments) {
    const auto& [state, ids, parents, pending, is_all, layers, taps, features] = arguments;
    const DecoderConfig& config = decoder.config();
    const size_t n_embd = static_cast<size_t>(config.n_embd), n_taps = layers.size();
    if (!state || !read_ints(ids, tokens) || !read_ints(pending, links)) return false;
    const int n = static_cast<int>(tokens.size()), n_pending = static_cast<int>(links.size());
    for (int i = 0; parents.is_none() && i < n; i++) links.push_back(n_pending + i - 1);
    if (!parents.is_none() && !read_ints(parents, links)) return false;
    if (!has_place(config, *state, n_pending, n) || links.size() != static_cast<size_t>(n_pending + n) ||
        !fit_features(decoder, features, tokens.size()) ||
        (n_taps &&
         (!taps || taps->shape(0) != n_taps || taps->shape(1) != tokens.size() || taps->shape(2) != n_embd))) {
        return false;
    }
    rows = {state,
            state->n_ctx(),
            tokens.data(),
            links.data(),
            n,
            n_pending,
            features ? features->data() : nullptr,
            layers.data(),
            static_cast<int>(n_taps),
            n_taps ? taps->data() : nullptr,
            n_taps ? taps->shape(1) * n_embd : 0};
    return is_tree(config, tokens, links) && state->can_begin(links.data(), n_pending, n);
}

// Logits of the rows that are requested of all sequences, in their order. Gives None where the arguments do not fit
// together, else what forward gives.
std::optional<bool> forward_lists(Decoder& decoder, const std::vector<ListArguments>& sequences, FloatRows logits) {
    const DecoderConfig& config = decoder.config();
    std::vector<Lists> lists(sequences.size());
    std::vector<SequenceRows> all;
    std::vector<int32_t> rows;
    int n = 0;
    for (size_t i = 0; i < sequences.size(); i++) {
        if (!lists[i].read(decoder, sequences[i])) return std::nullopt;
        const SequenceRows& of = lists[i].rows;
        const auto is_same = [&](const SequenceRows& other) { return other.state == of.state; };
        if (std::any_of(all.begin(), all.end(), is_same) || of.n > config.n_batch - n) return std::nullopt;
        for (int row = std::get<bool>(sequences[i]) ? 0 : of.n - 1; row < of.n; row++) rows.push_back(n + row);
        n += of.n;
        all.push_back(of);
    }
    if (all.empty() || logits.shape(0) != rows.size() || logits.shape(1) != static_cast<size_t>(config.n_row_logits()))
        return std::nullopt;
    const uint64_t interrupts = decoder.interrupts();
    const int n_rows = static_cast<int>(rows.size());
    return interruptible(
        [&](const auto& poll) { return decoder.forward(all, rows.data(), n_rows, logits.data(), interrupts, poll); });
}

// An array of Python's that holds these values.
template <class Array, class T>
Array array_of(std::vector<T> values, std::initializer_list<size_t> shape) {
    auto* held = new std::vector<T>(std::move(values));
    const nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Array(held->data(), shape, owner);
}

// rows: whose logits (m, n_logits) are requested.  x: (n, n_embd).
bool forward_from(Decoder& decoder, SequenceState& state, Ints tokens, int first_layer, Features x, Ints rows,
                  FloatRows logits) {
    const DecoderConfig& config = decoder.config();
    const int n = static_cast<int>(tokens.size()), n_rows = static_cast<int>(rows.size());
    std::vector<int32_t> links(tokens.size());
    for (int i = 0; i < n; i++) links[static_cast<size_t>(i)] = i - 1;
    const bool rows_fit =
        std::all_of(rows.data(), rows.data() + rows.size(), [n](int32_t row) { return row >= 0 && row < n; });
    if (!config.fits(state.sizes()) || decoder.has_front() || n < 1 || n > config.n_batch || n > state.n_ctx() ||
        n_rows > n || state.n_past() || !state.has_room(n) || first_layer < 0 || first_layer > config.n_layers() ||
        !rows_fit || x.shape(0) != tokens.size() || x.shape(1) != static_cast<size_t>(config.n_embd) ||
        logits.shape(0) != rows.size() || logits.shape(1) != static_cast<size_t>(config.n_logits) ||
        !is_tree(config, span_of(tokens), links)) {
        throw nb::value_error("forward_from: arguments do not fit together");
    }
    const SequenceRows sequence{&state, state.n_ctx(), tokens.data(), links.data(), n, 0, nullptr, nullptr, 0, nullptr,
                                0};
    return interruptible([&](const auto& poll) {
        return decoder.forward_from(sequence, first_layer, x.data(), rows.data(), n_rows, logits.data(), poll);
    });
}

// (n_layers, n_rows, n_used) int32.
auto routing(Decoder& decoder) {
    Decoder::Routing last;
    {
        ReleasedGil release;  // a pass that runs may need the lock before it ends
        last = decoder.routing();
    }
    auto* experts = new std::vector<int32_t>(std::move(last.experts));
    const nb::capsule owner(experts, [](void* p) noexcept { delete static_cast<std::vector<int32_t>*>(p); });
    const size_t n_layers = static_cast<size_t>(decoder.config().n_layers());
    return nb::ndarray<nb::numpy, int32_t, nb::ndim<3>>(
        experts->data(), {n_layers, static_cast<size_t>(last.n_rows), static_cast<size_t>(last.n_used)}, owner);
}

using ColumnSums = nb::ndarray<nb::numpy, double, nb::ndim<2>>;
using RowCounts = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;
using Squares = nb::typed<nb::dict, nb::str, nb::typed<nb::tuple, ColumnSums, RowCounts>>;

// By the name of the matrix: sums (n_matrices, n_in) and the number of rows that were summed, (n_matrices,).
Squares input_squares(Decoder& decoder) {
    std::optional<InputSquares::ByName> summed;
    {
        ReleasedGil release;  // a pass that runs may need the lock before it ends
        summed = decoder.input_squares();
    }
    if (!summed) throw nb::value_error("input_squares: nothing is recorded");
    Squares found;
    for (auto& [name, of] : *summed) {
        const size_t n_matrices = of.counts.size(), n_in = static_cast<size_t>(of.n_in);
        found[name.c_str()] = nb::make_tuple(array_of<ColumnSums>(std::move(of.sums), {n_matrices, n_in}),
                                             array_of<RowCounts>(std::move(of.counts), {n_matrices}));
    }
    return found;
}

// ---- tuning --------------------------------------------------------------------------------------------------------

Prefetch& prefetch_of_tokens(PrefetchPolicy& policy, bool is_ternary, int n) {
    if (n < 1 || n > kFewTokens) throw nb::value_error("only products of a few tokens are tuned");
    return (is_ternary ? policy.ternary : policy.plain)[n];
}

void check_part(int n_parts, int part) {
    if (n_parts < 1 || part < 0 || part >= n_parts) throw nb::index_error("no such part");
}

double seconds_of_part(Decoder& decoder, SequenceState& state, int n, int n_parts, int part) {
    check_part(n_parts, part);
    const DecoderConfig& config = decoder.config();
    if (!config.fits(state.sizes()) || n < 1 || n > config.n_batch || state.n_past() + n > state.n_ctx() ||
        decoder.has_front()) {
        throw nb::value_error("seconds_of_part: arguments do not fit together");
    }
    ReleasedGil release;
    return decoder.seconds_of_part(state, n, n_parts, part);
}

size_t part_bytes(const Decoder& decoder, int n_parts, int part) {
    check_part(n_parts, part);
    return decoder.part_bytes(n_parts, part);
}

void bind_tuning(nb::class_<Decoder>& decoder) {
    decoder
        .def(
            "prefetch",
            [](Decoder& decoder, bool is_ternary, int n) {
                return fields_of(prefetch_of_tokens(decoder.weights().policy(), is_ternary, n));
            },
            "is_ternary"_a, "n"_a, "The fields of Prefetch (matrix.h): how products of n tokens read such matrices.")
        .def(
            "set_prefetch",
            [](Decoder& decoder, bool is_ternary, int n, const PrefetchFields& fields) {
                prefetch_of_tokens(decoder.weights().policy(), is_ternary, n) = prefetch_from(fields);
            },
            "is_ternary"_a, "n"_a, "fields"_a, "Between passes only.")
        .def("seconds_of_part", &seconds_of_part, "state"_a, "n"_a, "n_parts"_a, "part"_a,
             "Seconds that a part of a pass of n tokens takes: every n_parts-th layer, and as much of the output "
             "matrix.")
        .def("part_bytes", &part_bytes, "n_parts"_a, "part"_a, "Bytes of weights that such a part reads.")
        .def_prop_ro("streams_at_once", [](const Decoder& decoder) { return decoder.kernels().streams_at_once; })
        .def_prop_ro("groups_at_once", [](const Decoder& decoder) { return decoder.kernels().groups_at_once; });
}

// ---- heads ---------------------------------------------------------------------------------------------------------

void project(FeatureProjection& projection, Features rows, FloatRows features) {
    if (rows.shape(0) < 1 || rows.shape(1) != static_cast<size_t>(projection.n_rows()) ||
        features.shape(0) != rows.shape(0) || features.shape(1) != static_cast<size_t>(projection.n_embd())) {
        throw nb::value_error("run: arguments do not fit together");
    }
    ReleasedGil release;
    projection.run(rows.data(), static_cast<int>(rows.shape(0)), features.data());
}

void init_projection(FeatureProjection* projection, const Weights& weights, const std::string& isa,
                     std::shared_ptr<Pool> threads, int n_embd, int n_rows, int n_normed, float norm_epsilon) {
    if (n_embd < 1 || n_rows < 1 || n_normed < 1 || n_rows % n_normed || (n_normed < n_rows && n_normed % 16)) {
        throw nb::value_error("n_normed must be n_rows, or a multiple of 16 that divides it");
    }
    new (projection)
        FeatureProjection(weights, kernels_of(isa), std::move(threads), n_embd, n_rows, n_normed, norm_epsilon);
}

}  // namespace

PrefetchFields fields_of(const Prefetch& p) {
    return {p.ahead, p.easy, static_cast<int>(p.hint), p.at_once, p.tokens, p.task, p.tasks_each, p.eager};
}

Prefetch prefetch_from(const PrefetchFields& fields) {
    const auto [ahead, easy, hint, at_once, tokens, task, tasks_each, eager] = fields;
    if (ahead < 0 || ahead > 1 << 20 || ahead % 64 || hint < 0 || hint > 2 || at_once < 1 || at_once > 4 ||
        tokens < 1 || tokens > kFewTokens || task < 0 || task > 1 << 28 || tasks_each < 1 || tasks_each > 64) {
        throw nb::value_error("no such way to read");
    }
    return {ahead, easy, static_cast<Hint>(hint), at_once, tokens, task, tasks_each, eager};
}

void bind_decoder(nb::module_& m) {
    nb::class_<Decoder> decoder(m, "Decoder");
    decoder
        .def("__init__", &init_decoder, "config"_a, "front"_a, "isa"_a, "threads"_a, "weights"_a,
             "experts"_a = nb::none())
        .def("routing", &routing,
             "The experts that the rows of the last pass chose, (n_layers, n_rows, n_used); -1 in layers without "
             "experts.")
        .def("clusters", &Decoder::clusters, nb::call_guard<ReleasedGil>(),
             "The clusters whose logits the requested rows of the last pass have, row after row.")
        .def("record_inputs", &Decoder::record_inputs, "is_on"_a, nb::call_guard<ReleasedGil>(),
             "From the next pass on, sum the squares of what matrices read, or no longer.")
        .def("input_squares", &input_squares,
             "By the name of the matrix: sums (n_matrices, n_in), and rows that were summed (n_matrices,).")
        .def("set_expert_device", &set_expert_device, "device"_a.none(),
             "What computes some experts beside the CPU, None for nothing.")
        .def("forward", &forward, "sequences"_a, "rows"_a, "logits"_a, "interrupts"_a)
        .def("forward_lists", &forward_lists, "sequences"_a, "logits"_a)
        .def("forward_from", &forward_from, "state"_a, "tokens"_a, "first_layer"_a, "x"_a, "rows"_a, "logits"_a,
             "Logits of some rows of a new sequence whose residual stream before a layer is known: x (n, n_embd).")
        .def_prop_ro("recurrence_seconds", &Decoder::recurrence_seconds,
                     "What recurrent layers took in the last pass beside their products.")
        .def_prop_ro("expert_bytes_of_row", &Decoder::expert_bytes_of_row)
        .def("expert_union", &Decoder::expert_union, nb::call_guard<ReleasedGil>(),
             "Bytes of the experts that the last pass needed, each once, over bytes of those of one row; 0 without "
             "experts.")
        .def(
            "commit_experts",
            [](Decoder& decoder, const SequenceState& state, const std::vector<int32_t>& path) {
                decoder.commit_experts(state, path);
            },
            "state"_a, "path"_a,
            "Before a sequence commits less than all of its pending rows: experts that only the others needed in the "
            "last "
            "pass have the recency that they had before it.")
        .def("interrupt", &Decoder::interrupt, "Stop the pass that runs, and those that wait.")
        .def_prop_ro("interrupts", &Decoder::interrupts, "How often interrupt was called.")
        .def_prop_ro("isa", [](const Decoder& decoder) { return decoder.kernels().name; })
        .def_prop_ro("weight_bytes", [](const Decoder& decoder) { return decoder.weights().n_bytes(); })
        .def_prop_ro("activation_bytes", &Decoder::activation_bytes)
        .def_prop_ro("predictor", &Decoder::predictor, nb::rv_policy::reference_internal,
                     "Of the experts that layers will need, None for a model without any.");
    bind_tuning(decoder);
}

void bind_head(nb::module_& m) {
    nb::class_<FeatureProjection>(m, "FeatureProjection", "Makes features of the target's rows of several layers.")
        .def("__init__", &init_projection, "weights"_a, "isa"_a, "threads"_a, "n_embd"_a, "n_rows"_a, "n_normed"_a,
             "norm_epsilon"_a, nb::keep_alive<1, 2>())
        .def("run", &project, "rows"_a, "features"_a, "features (n, n_embd) of rows (n, n_rows).")
        .def_static("activation_bytes", nb::overload_cast<int>(&FeatureProjection::activation_bytes), "n_rows"_a);
}
