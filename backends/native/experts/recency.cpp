#include "experts/recency.h"

ExpertRecency::ExpertRecency(const ExpertLayout& layout) {
    size_t n_entries = 0;
    for (int i = 0; i < layout.n_layers(); i++) {
        layers_.push_back({n_entries, kNone, kNone});
        n_entries += static_cast<size_t>(layout.layer(i).n_experts);
    }
    entries_.resize(n_entries);
}

void ExpertRecency::use(ExpertId id, uint64_t pass) {
    Entry& e = entry(id);
    if (e.last == pass) return;
    e.before = e.last;
    e.last = pass;
}

void ExpertRecency::forget(ExpertId id, uint64_t pass) {
    Entry& e = entry(id);
    if (e.last != pass) return;
    const bool was_candidate = e.is_candidate;
    if (was_candidate) remove(id);
    e.last = e.before;
    if (was_candidate) add(id);
}

// Its place is mostly near the end: most candidates come fresh from the pass that wanted them.
void ExpertRecency::add(ExpertId id) {
    Layer& layer = layers_[static_cast<size_t>(id.layer)];
    Entry& e = entry(id);
    const auto is_newer = [&](int32_t other) {
        const uint64_t last = entry({id.layer, other}).last;
        return last > e.last || (last == e.last && other > id.expert);
    };
    e.is_candidate = true;
    e.next = kNone;
    e.previous = layer.newest;
    while (e.previous != kNone && is_newer(e.previous)) {
        e.next = e.previous;
        e.previous = entry({id.layer, e.previous}).previous;
    }
    (e.previous == kNone ? layer.oldest : entry({id.layer, e.previous}).next) = id.expert;
    (e.next == kNone ? layer.newest : entry({id.layer, e.next}).previous) = id.expert;
}

void ExpertRecency::remove(ExpertId id) {
    Layer& layer = layers_[static_cast<size_t>(id.layer)];
    Entry& e = entry(id);
    e.is_candidate = false;
    (e.previous == kNone ? layer.oldest : entry({id.layer, e.previous}).next) = e.next;
    (e.next == kNone ? layer.newest : entry({id.layer, e.next}).previous) = e.previous;
}

// Layers behind the present one were computed in one pass fewer: there, what the pass before this one wanted is as recent
// as what this one wants of the layers that it has gone through.
std::optional<ExpertId> ExpertRecency::oldest(std::span<const int> layers, int present_layer) const {
    const int n_layers = static_cast<int>(layers_.size());
    std::optional<ExpertId> found;
    uint64_t recency = 0;
    int ahead = 0;
    for (const int layer : layers) {
        const int32_t expert = layers_[static_cast<size_t>(layer)].oldest;
        if (expert == kNone) continue;
        const uint64_t its_recency = entry({layer, expert}).last + (layer > present_layer ? 1 : 0);
        const int its_ahead = (layer - present_layer + n_layers) % n_layers;
        if (found && (its_recency > recency || (its_recency == recency && its_ahead < ahead))) continue;
        found = {layer, expert};
        recency = its_recency;
        ahead = its_ahead;
    }
    return found;
}
