#include "kv/segments.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

KvHead head_layout(const KvShape& shape) {
    const size_t dim = static_cast<size_t>(shape.head_dim);
    KvHead head{};
    head.type = shape.type;
    head.head_dim = shape.head_dim;
    head.is_row = shape.n_value > 0;
    head.n_value = head.is_row ? shape.n_value : shape.head_dim;
    head.ld_v = static_cast<int>(round_up(static_cast<size_t>(head.n_value), 16));
    size_t key_scales_bytes = 0;  // after all tiles
    switch (shape.type) {
        case KvType::F16:
            head.tile_bytes = dim * 16 * 2;
            head.value_bytes = round_up(dim, 16) * 2;
            break;
        case KvType::Q8_0:
            head.tile_bytes = dim / 32 * 64 + dim * 16;
            head.value_bytes = dim;
            head.scales_bytes = kSegment * dim / 32 * sizeof(float);
            break;
        case KvType::K6V4:
            head.tile_bytes = dim * 16 * 6 / 8;
            key_scales_bytes = kSegment * sizeof(uint16_t);
            head.value_bytes = dim / 2;
            head.scales_bytes = kSegment * sizeof(uint16_t);
    }
    if (head.is_row) head.tile_bytes = 0;
    head.key_scales_at = kSegment / 16 * head.tile_bytes;
    head.values_at = head.key_scales_at + key_scales_bytes;
    return head;
}

size_t bytes_of_head(const KvHead& head) {
    return round_up(head.values_at + head.scales_bytes + kSegment * head.value_bytes, 64);
}

uint8_t* segment_of(const KvHead& head, int slot) {
    return head.base + static_cast<size_t>(head.segments[slot / kSegment]) * head.segment_bytes;
}

// n numbers of a key, 16 lanes apart; offset: of the first one's line in the tile.
void copy_key(const KvHead& head, int from, int to, size_t width, size_t n, size_t offset) {
    const auto lane = [&](int slot) {
        return segment_of(head, slot) + static_cast<size_t>(slot % kSegment / 16) * head.tile_bytes +
               static_cast<size_t>(slot % 16) * width + offset;
    };
    const uint8_t* source = lane(from);
    uint8_t* target = lane(to);
    for (size_t i = 0; i < n; i++) std::memcpy(target + 16 * width * i, source + 16 * width * i, width);
}

void copy_key_scale(const KvHead& head, int from, int to) {
    const auto at = [&](int slot) {
        return segment_of(head, slot) + head.key_scales_at + sizeof(uint16_t) * static_cast<size_t>(slot % kSegment);
    };
    std::memcpy(at(to), at(from), sizeof(uint16_t));
}

void copy_key(const KvHead& head, int from, int to) {
    const size_t dim = static_cast<size_t>(head.head_dim);
    switch (head.type) {
        case KvType::F16: return copy_key(head, from, to, 2, dim, 0);
        case KvType::Q8_0:
            copy_key(head, from, to, 4, dim / 32, 0);
            return copy_key(head, from, to, 4, dim / 4, dim / 32 * 64);
        case KvType::K6V4: copy_key(head, from, to, 4, dim / 32 * 6, 0); return copy_key_scale(head, from, to);
    }
}

void copy_value(const KvHead& head, int from, int to) {
    const size_t scale_bytes = head.scales_bytes / kSegment;
    const size_t a = static_cast<size_t>(from % kSegment), b = static_cast<size_t>(to % kSegment);
    const uint8_t* source = segment_of(head, from) + head.values_at;
    uint8_t* target = segment_of(head, to) + head.values_at;
    std::memcpy(target + b * scale_bytes, source + a * scale_bytes, scale_bytes);
    std::memcpy(target + head.scales_bytes + b * head.value_bytes, source + head.scales_bytes + a * head.value_bytes,
                head.value_bytes);
}

}  // namespace

size_t KvShape::segment_bytes() const {
    return bytes_of_head(head_layout(*this)) * static_cast<size_t>(n_layers) * static_cast<size_t>(n_kv_heads);
}

Users::Users(int n) : users_(static_cast<size_t>(n)) {
    for (int i = n; i-- > 0;) free_.push_back(i);
}

int32_t Users::take() {
    const int32_t piece = free_.back();
    free_.pop_back();
    users_[static_cast<size_t>(piece)] = 1;
    n_touched_ = std::max(n_touched_, piece + 1);
    return piece;
}

void Users::give_back(int32_t piece) {
    if (--users_[static_cast<size_t>(piece)] == 0) free_.push_back(piece);
}

KvSegments::KvSegments(const KvShape& shape, int n_segments)
    : users(n_segments),
      shape_(shape),
      first_(head_layout(shape)),
      head_bytes_(bytes_of_head(first_)),
      segment_bytes_(shape.segment_bytes()),
      memory_(segment_bytes_ * static_cast<size_t>(n_segments)) {
    first_.base = memory_.data();
    first_.segment_bytes = segment_bytes_;
}

KvHead KvSegments::head(const int32_t* table, int layer, int kv_head) const {
    KvHead head = first_;
    head.base += static_cast<size_t>(layer * shape_.n_kv_heads + kv_head) * head_bytes_;
    head.segments = table;
    return head;
}

void KvSegments::copy_slot(const int32_t* table, int from, int to) {
    for (int layer = 0; layer < shape_.n_layers; layer++) {
        for (int i = 0; i < shape_.n_kv_heads; i++) {
            const KvHead h = head(table, layer, i);
            if (!h.is_row) copy_key(h, from, to);
            copy_value(h, from, to);
        }
    }
}

void KvSegments::copy(int32_t from, int32_t to) { std::memcpy(data(to), data(from), segment_bytes_); }
