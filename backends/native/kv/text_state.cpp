#include "kv/text_state.h"

#include <algorithm>
#include <stdexcept>

namespace {

// Layers that share a state. A window that would hold no less than all of a text is none.
struct Alike {
    KvSizes layer;
    std::vector<int> layers;

    KvShape shape(KvType type) const {
        return {type, static_cast<int>(layers.size()), layer.n_kv_heads, layer.head_dim};
    }
    int n_segments(const TextSizes& sizes) const {
        return layer.window ? WindowKv::n_segments(layer.window, sizes.n_batch) : segments_of(sizes.n_ctx);
    }
};

std::vector<Alike> alike_of(const TextSizes& sizes) {
    std::vector<Alike> found;
    for (int i = 0; i < static_cast<int>(sizes.layers.size()); i++) {
        KvSizes layer = std::get<KvSizes>(sizes.layers[static_cast<size_t>(i)]);
        if (layer.window >= sizes.n_ctx) layer.window = 0;  // it sees all
        if (layer.window && WindowKv::n_segments(layer.window, sizes.n_batch) >= segments_of(sizes.n_ctx))
            layer.window = 0;
        const auto same = std::find_if(found.begin(), found.end(), [&](const Alike& of) { return of.layer == layer; });
        if (same == found.end())
            found.push_back({layer, {i}});
        else
            same->layers.push_back(i);
    }
    return found;
}

}  // namespace

size_t TextState::n_bytes(const TextSizes& sizes) {
    size_t n_bytes = 0;
    for (const Alike& alike : alike_of(sizes))
        n_bytes += alike.shape(sizes.type).segment_bytes() * static_cast<size_t>(alike.n_segments(sizes));
    return n_bytes;
}

TextState::TextState(const TextSizes& sizes) : places_(sizes.layers.size()), sizes_(sizes) {
    for (const Alike& alike : alike_of(sizes)) {
        const KvShape shape = alike.shape(sizes.type);
        std::unique_ptr<KvState> state;
        if (alike.layer.window) {
            state = std::make_unique<WindowKv>(shape, alike.layer.window, sizes.n_batch);
            n_unmoved_ = std::min(n_unmoved_, alike.n_segments(sizes) * kSegment);
        } else {
            state = std::make_unique<FullKv>(shape, sizes.n_ctx);
        }
        int index = 0;
        for (const int layer : alike.layers) places_[static_cast<size_t>(layer)] = {state.get(), index++};
        states_.push_back(std::move(state));
    }
}

size_t TextState::used_bytes() const {
    size_t n_bytes = 0;
    for (const auto& state : states_) n_bytes += state->used_bytes();
    return n_bytes;
}

size_t TextState::window_bytes() const {
    size_t n_bytes = 0;
    for (const auto& state : states_) {
        if (dynamic_cast<const WindowKv*>(state.get())) n_bytes += state->used_bytes();
    }
    return n_bytes;
}

void TextState::reserve(int n_slots) {
    const LayerState::DropParked drop_parked = [this] {
        if (parked_.empty()) throw std::length_error("more tokens are pending than there is room for");
        forget(parked_.front().number);
    };
    for (const auto& state : states_) state->reserve(n_past_, n_slots, drop_parked);
    n_slots_ = n_slots;
}

void TextState::commit(const int32_t* path, int n) {
    for (const auto& state : states_) state->commit(n_past_, path, n);
    n_slots_ = n_past_ += n;
}

// What one state reaches, another may not, so they are asked until all agree. All reach 0.
int TextState::reach(int n_past) const {
    for (int asked = -1; asked != n_past;) {
        asked = n_past;
        for (const auto& state : states_) n_past = state->reach(n_past);
    }
    return n_past;
}

int TextState::truncate(int n_past) {
    n_slots_ = n_past_ = reach(n_past);
    for (const auto& state : states_) state->truncate(n_past_);
    return n_past_;
}

int TextState::park() {
    const int number = n_numbers_++;  // first: a number that failed half way is not given again
    n_slots_ = n_past_;
    for (const auto& state : states_) state->park(number, n_past_);
    parked_.push_back({number, n_past_});
    return number;
}

std::vector<TextState::Parked>::const_iterator TextState::find(int number) const {
    return std::find_if(parked_.begin(), parked_.end(), [&](const Parked& text) { return text.number == number; });
}

int TextState::reach_parked(int number, int n_past) const {
    const auto text = find(number);
    n_past = text == parked_.end() ? 0 : std::min(n_past, text->n_past);
    for (int asked = -1; asked != n_past;) {
        asked = n_past;
        for (const auto& state : states_) n_past = state->reach_parked(number, n_past);
    }
    return n_past;
}

int TextState::resume(int number, int n_past) {
    n_slots_ = n_past_ = reach_parked(number, n_past);
    for (const auto& state : states_) state->resume(number, n_past_);
    if (const auto text = find(number); text != parked_.end()) {
        const auto at = parked_.begin() + (text - parked_.cbegin());
        std::rotate(at, at + 1, parked_.end());
    }
    return n_past_;
}

void TextState::forget(int number) {
    const auto text = find(number);
    if (text == parked_.end()) return;
    for (const auto& state : states_) state->forget(number);
    parked_.erase(text);
}

std::vector<int> TextState::parked() const {
    std::vector<int> numbers;
    for (const Parked& text : parked_) numbers.push_back(text.number);
    return numbers;
}
