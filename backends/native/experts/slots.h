// The memory of an expert cache: slots of one record each. Layers whose records are equally large share a pool of slots.
// A slot is used again without clearing it. Slots can be given back to the system while a model runs, and taken again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "experts/layout.h"
#include "platform.h"

struct SlotPool {
    size_t record_bytes = 0;
    int n_experts = 0;        // of its layers
    std::vector<int> layers;  // ascending
    int n_least = 0;          // slots with which a pass can run
    int n_most = 0;           // slots that there is room for
    int n_slots = 0;          // that may hold experts

    size_t all_bytes() const { return record_bytes * static_cast<size_t>(n_experts); }
    size_t n_bytes() const { return record_bytes * static_cast<size_t>(n_slots); }
};

class ExpertSlots {
public:
    // How slots of n_bytes together are divided: in proportion to what the experts of a pool take, but n_used and at
    // least two for each pool. Throws std::invalid_argument if that is more.
    static std::vector<SlotPool> divide(const ExpertLayout& layout, size_t n_bytes, int n_used);
    static size_t least_bytes(const ExpertLayout& layout, int n_used);
    // Of memory that n_bytes of slots take.
    static size_t memory_bytes(const ExpertLayout& layout, size_t n_bytes, int n_used);

    ExpertSlots(const ExpertLayout& layout, size_t n_bytes, int n_used);

    const std::vector<SlotPool>& pools() const { return pools_; }
    const SlotPool& pool_of(int layer) const { return pools_[pool_number(layer)]; }
    size_t n_bytes() const;
    // From now on slots of n_bytes together hold experts: at most those that it was made with, at least n_least of each
    // pool. Free ones beyond that give their memory back now, others as they become free.
    void resize(size_t n_bytes);
    // Whether more slots of a layer's pool hold experts, or wait for them, than may.
    bool has_excess(int layer) const { return excess_of(pool_number(layer)) > 0; }
    bool has_free(int layer) const { return !free_[pool_number(layer)].empty(); }
    // has_free must hold.
    uint8_t* take(int layer);
    void give_back(int layer, uint8_t* slot);

private:
    size_t pool_number(int layer) const { return pool_of_layer_[static_cast<size_t>(layer)]; }
    int excess_of(size_t pool) const;
    void rest(size_t pool, uint8_t* slot);

    std::vector<SlotPool> pools_;
    Memory memory_;
    std::vector<size_t> pool_of_layer_;
    std::vector<std::vector<uint8_t*>> free_;     // by pool; the last one is taken first
    std::vector<std::vector<uint8_t*>> resting_;  // by pool; without memory
};
