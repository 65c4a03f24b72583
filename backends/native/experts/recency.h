// Which expert to evict: the one that was not wanted the largest number of times that its layer was computed since its
// last use. Of equals it is one of the layer that comes last in the cycle of layers from the present one on; in a layer
// the one with the lowest index. Plain LRU evicts in the order of layers: a cache smaller than what one token wants would
// evict each expert just before it is wanted again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "experts/layout.h"

struct ExpertId {
    int layer, expert;
};

class ExpertRecency {
public:
    explicit ExpertRecency(const ExpertLayout& layout);

    // A pass wants an expert, which is no candidate. Passes ascend from 1.
    void use(ExpertId id, uint64_t pass);
    // Undoes that, also for a candidate.
    void forget(ExpertId id, uint64_t pass);
    // The pass that wanted it last, 0 for none.
    uint64_t last_use(ExpertId id) const { return entry(id).last; }

    // It may be evicted from now on, or no longer.
    void add(ExpertId id);
    void remove(ExpertId id);
    // Which of the candidates of these layers to evict while a layer is computed, if there is one.
    std::optional<ExpertId> oldest(std::span<const int> layers, int present_layer) const;

private:
    // Of the list of a layer's candidates, the oldest one first: experts, or kNone.
    static constexpr int32_t kNone = -1;
    struct Entry {
        uint64_t last = 0, before = 0;  // passes
        int32_t previous = kNone, next = kNone;
        bool is_candidate = false;
    };

public:
    static constexpr size_t kEntryBytes = sizeof(Entry);  // of memory that an expert takes here

private:
    struct Layer {
        size_t first_entry = 0;
        int32_t oldest = kNone, newest = kNone;
    };

    Entry& entry(ExpertId id) {
        return entries_[layers_[static_cast<size_t>(id.layer)].first_entry + static_cast<size_t>(id.expert)];
    }
    const Entry& entry(ExpertId id) const {
        return entries_[layers_[static_cast<size_t>(id.layer)].first_entry + static_cast<size_t>(id.expert)];
    }

    std::vector<Layer> layers_;
    std::vector<Entry> entries_;
};
