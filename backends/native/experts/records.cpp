#include "experts/records.h"

#include "packing/packing.h"

void pack_expert_group(const ExpertLayer& layer, ExpertPart which, Format of, const uint8_t* source, int g,
                       uint8_t* record) {
    const Matrix& m = layer.parts[static_cast<int>(which)];
    uint8_t* group = record + layer.offsets[static_cast<int>(which)] + static_cast<size_t>(g) * m.group_bytes;
    pack_group(of, m.format, source, 1.0f, m.n_out, m.n_in, g, group);
}

ExpertRecords::ExpertRecords(std::shared_ptr<const ExpertLayout> layout, const uint8_t* mapped)
    : layout_(std::move(layout)), memory_(mapped ? 0 : layout_->n_bytes()), mapped_(mapped) {
    if (mapped) mapping_ = std::make_unique<MappedBytes>(mapped, layout_->n_bytes());
}
