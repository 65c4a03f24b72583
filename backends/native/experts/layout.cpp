#include "experts/layout.h"

#include <stdexcept>

#include "packing/packing.h"

namespace {
constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
}  // namespace

void ExpertLayout::add_layer(int n_experts, const ExpertMatrix& gate, const ExpertMatrix& up,
                             const ExpertMatrix& down) {
    ExpertLayer layer;
    layer.n_experts = n_experts;
    size_t at = 0;
    const ExpertMatrix* parts[kExpertParts] = {&gate, &up, &down};
    for (int i = 0; i < kExpertParts; i++) {
        int n_inputs = 0;
        if (!packed_block(static_cast<int>(parts[i]->format), n_inputs) || parts[i]->n_in % n_inputs) {
            throw std::invalid_argument("no packed format of experts with rows of " + std::to_string(parts[i]->n_in));
        }
        Matrix& m = layer.parts[i];
        m.format = parts[i]->format;
        m.n_out = parts[i]->n_out;
        m.n_in = parts[i]->n_in;
        m.group_bytes = packed_group_bytes(m.format, m.n_in);
        layer.offsets[i] = at;
        at += round_up(m.n_bytes(), 64);
    }
    layer.record_bytes = round_up(at, kRecordAlignment);
    layer.first_byte = n_bytes_;
    n_bytes_ += layer.record_bytes * static_cast<size_t>(n_experts);
    layers_.push_back(layer);
}
