#include "pass.h"

#include <cstring>

#include "product_device.h"

void Pass::add(const SequenceRows& rows) {
    Sequence sequence{rows, n, rows.state->n_past(), true};
    for (int i = 0; i < rows.n_pending + rows.n; i++) sequence.chain = sequence.chain && rows.parents[i] == i - 1;
    for (int i = 0; i < rows.n; i++) {
        int depth = sequence.chain ? rows.n_pending + i : 0;
        for (int row = rows.n_pending + i; !sequence.chain && rows.parents[row] >= 0; row = rows.parents[row]) depth++;
        b.position[n + i] = config.reads_target() ? sequence.base : sequence.base + depth;
        b.sequence[n + i] = static_cast<int32_t>(sequences.size());
    }
    sequences.push_back(sequence);
    n += rows.n;
}

void Pass::fail(const char* reason) const {
    const std::lock_guard<std::mutex> lock(failing_);
    if (failure_.empty()) failure_ = reason;
    stop();
}

Inputs Pass::inputs_of(int thread, int n_in, const float* x, size_t ldx) const {
    Inputs inputs = alone() ? b.own_inputs[static_cast<size_t>(thread)] : b.inputs;
    inputs.n_in = n_in;
    inputs.x = x;
    inputs.ldx = ldx;
    return inputs;
}

void prepare_inputs(const Kernels& kernels, const Inputs& inputs, int c, std::initializer_list<const Matrix*> readers) {
    bool by32 = false, by256 = false, by_token = false;
    for (const Matrix* reader : readers) {
        by32 = by32 || input_kind(reader->format) == InputKind::Int8By32;
        by256 = by256 || input_kind(reader->format) == InputKind::Int8By256;
        by_token = by_token || input_kind(reader->format) == InputKind::Int8ByToken;
    }
    if (by32) kernels.quantize32(inputs, c);
    if (by256) kernels.quantize256(inputs, c);
    if (by_token) kernels.quantize_token(inputs, c);
}

Inputs Pass::plain_inputs(int thread, const float* x, size_t ldx, std::initializer_list<const Matrix*> readers) const {
    const Inputs inputs = inputs_of(thread, (*readers.begin())->n_in, x, ldx);
    if (alone()) {
        prepare_inputs(kernels, inputs, 0, readers);
    } else {
        for_items(thread, n, [&](int c) { prepare_inputs(kernels, inputs, c, readers); });
    }
    record(thread, inputs, n, readers);
    return inputs;
}

Inputs Pass::normed_inputs(int thread, const float* norm, const int32_t* of, int n_inputs,
                           std::initializer_list<const Matrix*> readers, const float* x) const {
    float* h = !norm && !of ? b.x : alone() ? b.own_h[static_cast<size_t>(thread)] : b.h;
    const Inputs inputs = inputs_of(thread, config.n_embd, h, b.ld_embd);
    const auto input = [&](int c) {
        const float* row = (x ? x : b.x) + static_cast<size_t>(of ? of[c] : c) * b.ld_embd;
        float* out = h + static_cast<size_t>(c) * b.ld_embd;
        if (norm) {
            kernels.rms_norm(row, norm, config.n_embd, config.norm_epsilon, out);
        } else if (of) {
            std::memcpy(out, row, sizeof(float) * b.ld_embd);
        }
        prepare_inputs(kernels, inputs, c, readers);
    };
    if (alone()) {
        input(0);
    } else {
        for_items(thread, n_inputs, input);
    }
    record(thread, inputs, n_inputs, readers);
    return inputs;
}

void Pass::record(int thread, const Inputs& inputs, int n_inputs, std::initializer_list<const Matrix*> readers,
                  int number) const {
    if (!squares) return;
    for_tasks(thread, InputSquares::parts_of(inputs.n_in),
              [&](int part) { squares->add(readers, inputs.x, inputs.ldx, n_inputs, part, number); });
}

void set_path(const Sequence& sequence, int c, int32_t* path, AttentionRow& row) {
    for (int i = sequence.rows.n_pending + c - sequence.first; i >= 0; i = sequence.rows.parents[i]) {
        path[row.n_path++] = sequence.base + i;
    }
    std::reverse(path, path + row.n_path);
    row.path = path;
}

void add_bias(const Matrix& w, const float* bias, int n, int first, int last, float* y, size_t ldy) {
    if (!bias) return;
    for (int c = 0; c < n; c++) {
        float* row = y + static_cast<size_t>(c) * ldy;
        for (int i = first * kRows; i < std::min(w.n_out, last * kRows); i++) row[i] += bias[i];
    }
}

void Pass::product_on_device(int thread, const Matrix& w, const Inputs& inputs, int n_columns, float* y,
                             size_t ldy) const {
    if (!w.device->multiply(w, inputs, n_columns, y, ldy, [&] { return gives_up_waiting(thread); })) stop();
}

void Pass::multiply(int thread, const Matrix& w, const Inputs& inputs, float* y, size_t ldy) const {
    const Tasks tasks(w, n, pool.size(), kernels.at_once(n));
    for_tasks(thread, tasks.count(), [&](int task) {
        kernels.matmul(w, inputs, n, tasks.first(task), tasks.last(task), tasks.next_data(w, task), y, ldy);
    });
}

void Pass::add_projection(int thread, float* y, size_t ldy, const float* sub_norm, const Matrix& w, const float* bias,
                          const float* post_norm, float post_epsilon) const {
    // Other threads still read y; and where this one is late, something else is there that they write to.
    float* h = sub_norm && alone() ? b.own_h[static_cast<size_t>(thread)] : y;
    const Inputs inputs = inputs_of(thread, w.n_in, h, ldy);
    const auto input = [&](int c) {
        const size_t at = static_cast<size_t>(c) * ldy;
        if (sub_norm) {
            if (h != y) std::memcpy(h, y, sizeof(float) * static_cast<size_t>(w.n_in));
            clear_padding(h + at, w.n_in);
            kernels.rms_norm(h + at, sub_norm, w.n_in, config.norm_epsilon, h + at);
        }
        prepare_inputs(kernels, inputs, c, {&w});
    };
    if (alone()) {
        input(0);
    } else if (sub_norm || input_kind(w.format) != InputKind::Float) {
        for_items(thread, n, input);
    }
    record(thread, inputs, n, {&w});
    const Tasks tasks(w, n, pool.size(), kernels.at_once(n));
    for_tasks(thread, tasks.count(), [&](int task) {
        const int first = tasks.first(task), last = tasks.last(task);
        product(thread, w, inputs, n, first, last, tasks.next_data(w, task), b.h, b.ld_embd);
        add_bias(w, bias, n, first, last, b.h, b.ld_embd);
        for (int c = 0; !post_norm && c < n; c++) {
            const size_t at = static_cast<size_t>(c) * b.ld_embd + static_cast<size_t>(first * kRows);
            const int n_added = std::min(w.n_out, last * kRows) - first * kRows;
            kernels.add_scaled(b.x + at, b.h + at, n_added, config.residual_scale);
        }
    });
    if (post_norm) add_to_residual(thread, post_norm, post_epsilon == 0 ? config.norm_epsilon : post_epsilon);
}

// x += residual_scale * norm(h)
void Pass::add_to_residual(int thread, const float* post_norm, float epsilon) const {
    for_items(thread, n, [&](int c) {
        const size_t at = static_cast<size_t>(c) * b.ld_embd;
        kernels.rms_norm(b.h + at, post_norm, config.n_embd, epsilon, b.h + at);
        kernels.add_scaled(b.x + at, b.h + at, config.n_embd, config.residual_scale);
    });
}
