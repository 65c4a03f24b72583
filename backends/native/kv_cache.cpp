#include "kv_cache.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
constexpr size_t n_segments(int n_slots) { return (static_cast<size_t>(n_slots) + kSegment - 1) / kSegment; }

KvHead head_layout(const KvSizes& sizes) {
    const size_t dim = static_cast<size_t>(sizes.head_dim);
    KvHead head{};
    head.type = sizes.type;
    head.head_dim = sizes.head_dim;
    head.ld_v = static_cast<int>(round_up(dim, 16));
    if (sizes.type == KvType::F16) {
        head.tile_bytes = dim * 16 * 2;
        head.value_bytes = static_cast<size_t>(head.ld_v) * 2;
    } else {
        head.tile_bytes = dim / 32 * 64 + dim * 16;
        head.value_bytes = dim;
        head.scales_bytes = kSegment * dim / 32 * sizeof(float);
    }
    head.values_at = kSegment / 16 * head.tile_bytes;
    return head;
}

size_t bytes_of_head(const KvHead& head) {
    return round_up(head.values_at + head.scales_bytes + kSegment * head.value_bytes, 64);
}

size_t bytes_of_segment(const KvSizes& sizes) {
    return bytes_of_head(head_layout(sizes)) * static_cast<size_t>(sizes.n_layers) *
           static_cast<size_t>(sizes.n_kv_heads);
}

}  // namespace

size_t KvCache::n_bytes(const KvSizes& sizes) { return n_segments(sizes.n_ctx) * bytes_of_segment(sizes); }

KvCache::KvCache(const KvSizes& sizes)
    : sizes_(sizes),
      first_(head_layout(sizes)),
      head_bytes_(bytes_of_head(first_)),
      segment_bytes_(bytes_of_segment(sizes)),
      memory_(n_bytes(sizes)),
      users_(n_segments(sizes.n_ctx)) {
    first_.base = memory_.data();
    first_.segment_bytes = segment_bytes_;
    for (size_t i = users_.size(); i-- > 0;) free_.push_back(static_cast<int32_t>(i));
}

KvHead KvCache::head(int layer, int kv_head) const {
    KvHead head = first_;
    head.base += static_cast<size_t>(layer * sizes_.n_kv_heads + kv_head) * head_bytes_;
    head.segments = text_.segments.data();
    return head;
}

// There are as many segments as one text can need, so that some are free when no other text is left.
int32_t KvCache::take_segment() {
    while (free_.empty()) forget(aside_.front().number);
    const int32_t index = free_.back();
    free_.pop_back();
    users_[static_cast<size_t>(index)] = 1;
    n_touched_ = std::max(n_touched_, index + 1);
    return index;
}

void KvCache::give_back(const Text& text, size_t first_segment) {
    for (size_t i = first_segment; i < text.segments.size(); i++) {
        if (--users_[static_cast<size_t>(text.segments[i])] == 0) free_.push_back(text.segments[i]);
    }
}

void KvCache::reserve(int n_slots) {
    for (size_t i = static_cast<size_t>(text_.n_past) / kSegment; i < n_segments(n_slots); i++) {
        if (i == text_.segments.size()) {
            text_.segments.push_back(take_segment());
            continue;
        }
        const auto shared = [&] { return users_[static_cast<size_t>(text_.segments[i])] > 1; };
        while (shared() && free_.empty()) forget(aside_.front().number);
        if (!shared()) continue;
        const int32_t own = take_segment();
        std::memcpy(segment(own), segment(text_.segments[i]), segment_bytes_);
        users_[static_cast<size_t>(text_.segments[i])]--;
        text_.segments[i] = own;
    }
}

void KvCache::commit(const int32_t* path, int n) {
    for (int i = 0; i < n; i++) {
        if (path[i] != i) copy_slot(text_.n_past + path[i], text_.n_past + i);
    }
    text_.n_past += n;
}

void KvCache::copy_slot(int from, int to) {
    const auto key_lane = [&](const KvHead& head, int slot, size_t width) {
        return head.base + static_cast<size_t>(head.segments[slot / kSegment]) * head.segment_bytes +
               static_cast<size_t>(slot % kSegment / 16) * head.tile_bytes + static_cast<size_t>(slot % 16) * width;
    };
    const auto values = [&](const KvHead& head, int slot) {
        return head.base + static_cast<size_t>(head.segments[slot / kSegment]) * head.segment_bytes + head.values_at;
    };
    const auto copy = [&](const KvHead& head, size_t width, size_t n, size_t offset) {  // n numbers, 16 lanes apart
        for (size_t i = 0; i < n; i++) {
            std::memcpy(key_lane(head, to, width) + offset + 16 * width * i,
                        key_lane(head, from, width) + offset + 16 * width * i, width);
        }
    };
    const size_t dim = static_cast<size_t>(sizes_.head_dim), scale_bytes = first_.scales_bytes / kSegment;
    for (int layer = 0; layer < sizes_.n_layers; layer++) {
        for (int i = 0; i < sizes_.n_kv_heads; i++) {
            const KvHead h = head(layer, i);
            if (h.type == KvType::F16) {
                copy(h, 2, dim, 0);
            } else {
                copy(h, 4, dim / 32, 0);
                copy(h, 4, dim / 4, dim / 32 * 64);
            }
            const size_t a = static_cast<size_t>(from % kSegment), b = static_cast<size_t>(to % kSegment);
            uint8_t *source = values(h, from), *target = values(h, to);
            std::memcpy(target + b * scale_bytes, source + a * scale_bytes, scale_bytes);
            std::memcpy(target + h.scales_bytes + b * h.value_bytes, source + h.scales_bytes + a * h.value_bytes,
                        h.value_bytes);
        }
    }
}

// Segments that are not needed any more stay this text's own until it is put aside.
void KvCache::truncate(int n_past) { text_.n_past = n_past; }

int KvCache::put_aside() {
    const size_t n = n_segments(text_.n_past);
    give_back(text_, n);
    text_.segments.resize(n);
    for (const int32_t index : text_.segments) users_[static_cast<size_t>(index)]++;
    aside_.push_back(text_);
    return aside_.back().number = n_numbers_++;
}

bool KvCache::resume(int number, int n_past) {
    const auto text = std::find_if(aside_.begin(), aside_.end(), [&](const Text& t) { return t.number == number; });
    if (text == aside_.end() || n_past > text->n_past) return false;
    const size_t n = n_segments(n_past);
    for (size_t i = 0; i < n; i++) users_[static_cast<size_t>(text->segments[i])]++;
    give_back(text_, 0);
    text_.segments.assign(text->segments.begin(), text->segments.begin() + static_cast<std::ptrdiff_t>(n));
    text_.n_past = n_past;
    std::rotate(text, text + 1, aside_.end());
    return true;
}

void KvCache::forget(int number) {
    const auto text = std::find_if(aside_.begin(), aside_.end(), [&](const Text& t) { return t.number == number; });
    if (text == aside_.end()) return;
    give_back(*text, 0);
    aside_.erase(text);
}

std::vector<int> KvCache::aside() const {
    std::vector<int> numbers;
    for (const Text& text : aside_) numbers.push_back(text.number);
    return numbers;
}
