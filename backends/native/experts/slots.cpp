#include "experts/slots.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace {

std::vector<SlotPool> pools_of(const ExpertLayout& layout, int n_used) {
    std::vector<SlotPool> pools;
    for (int i = 0; i < layout.n_layers(); i++) {
        const ExpertLayer& layer = layout.layer(i);
        if (layer.n_experts == 0) continue;
        const auto same = [&](const SlotPool& pool) { return pool.record_bytes == layer.record_bytes; };
        auto pool = std::find_if(pools.begin(), pools.end(), same);
        if (pool == pools.end()) {
            pools.emplace_back();
            pool = pools.end() - 1;
            pool->record_bytes = layer.record_bytes;
        }
        pool->layers.push_back(i);
        pool->n_experts += layer.n_experts;
    }
    for (SlotPool& pool : pools) {
        pool.n_least = std::min(pool.n_experts, std::max(2, n_used));
        pool.n_most = pool.n_experts;
    }
    return pools;
}

size_t n_bytes_of(const std::vector<SlotPool>& pools) {
    size_t n_bytes = 0;
    for (const SlotPool& pool : pools) n_bytes += pool.n_bytes();
    return n_bytes;
}

// The pool of which the smallest share of its experts has slots, of those that can get one more of the free bytes.
SlotPool* neediest(std::vector<SlotPool>& pools, size_t n_free) {
    SlotPool* found = nullptr;
    for (SlotPool& pool : pools) {
        if (pool.n_slots == pool.n_most || pool.record_bytes > n_free) continue;
        const auto crossed = [](const SlotPool& a, const SlotPool& b) {
            return static_cast<int64_t>(a.n_slots) * b.n_experts;
        };
        if (!found || crossed(pool, *found) < crossed(*found, pool)) found = &pool;
    }
    return found;
}

// Gives each pool its least, and what is left of n_bytes to the neediest ones. False where n_bytes are fewer than that.
bool share_out(std::vector<SlotPool>& pools, size_t n_bytes) {
    for (SlotPool& pool : pools) pool.n_slots = pool.n_least;
    const size_t least = n_bytes_of(pools);
    size_t n_free = n_bytes < least ? 0 : n_bytes - least;
    while (SlotPool* pool = neediest(pools, n_free)) {
        pool->n_slots++;
        n_free -= pool->record_bytes;
    }
    return n_bytes >= least;
}

}  // namespace

std::vector<SlotPool> ExpertSlots::divide(const ExpertLayout& layout, size_t n_bytes, int n_used) {
    std::vector<SlotPool> pools = pools_of(layout, n_used);
    if (!share_out(pools, n_bytes)) {
        throw std::invalid_argument("an expert cache of " + std::to_string(n_bytes) +
                                    " bytes is too small: " + std::to_string(least_bytes(layout, n_used)) +
                                    " are needed for the experts of one layer");
    }
    return pools;
}

size_t ExpertSlots::least_bytes(const ExpertLayout& layout, int n_used) {
    std::vector<SlotPool> pools = pools_of(layout, n_used);
    for (SlotPool& pool : pools) pool.n_slots = pool.n_least;
    return n_bytes_of(pools);
}

size_t ExpertSlots::memory_bytes(const ExpertLayout& layout, size_t n_bytes, int n_used) {
    return Memory::size_of(n_bytes_of(divide(layout, n_bytes, n_used)));
}

ExpertSlots::ExpertSlots(const ExpertLayout& layout, size_t n_bytes, int n_used)
    : pools_(divide(layout, n_bytes, n_used)),
      memory_(n_bytes_of(pools_)),
      pool_of_layer_(static_cast<size_t>(layout.n_layers())),
      free_(pools_.size()),
      resting_(pools_.size()) {
    uint8_t* end = memory_.data();
    for (size_t i = 0; i < pools_.size(); i++) {
        for (const int layer : pools_[i].layers) pool_of_layer_[static_cast<size_t>(layer)] = i;
        pools_[i].n_most = pools_[i].n_slots;
        end += pools_[i].n_bytes();
        for (int slot = 1; slot <= pools_[i].n_slots; slot++) {
            free_[i].push_back(end - static_cast<size_t>(slot) * pools_[i].record_bytes);
        }
    }
}

uint8_t* ExpertSlots::take(int layer) {
    std::vector<uint8_t*>& free = free_[pool_number(layer)];
    uint8_t* slot = free.back();
    free.pop_back();
    return slot;
}

void ExpertSlots::give_back(int layer, uint8_t* slot) {
    const size_t pool = pool_number(layer);
    if (excess_of(pool) > 0) {
        rest(pool, slot);
    } else {
        free_[pool].push_back(slot);
    }
}

// ---- giving memory back --------------------------------------------------------------------------------------------

size_t ExpertSlots::n_bytes() const { return n_bytes_of(pools_); }

void ExpertSlots::resize(size_t n_bytes) {
    share_out(pools_, n_bytes);
    for (size_t i = 0; i < pools_.size(); i++) {
        std::vector<uint8_t*>&free = free_[i], &resting = resting_[i];
        while (excess_of(i) > 0 && !free.empty()) {
            rest(i, free.back());
            free.pop_back();
        }
        while (excess_of(i) < 0) {
            free.push_back(resting.back());
            resting.pop_back();
        }
    }
}

// All slots but those that rest, over those that may hold experts.
int ExpertSlots::excess_of(size_t pool) const {
    return pools_[pool].n_most - static_cast<int>(resting_[pool].size()) - pools_[pool].n_slots;
}

void ExpertSlots::rest(size_t pool, uint8_t* slot) {
    ::give_back(slot, pools_[pool].record_bytes);
    resting_[pool].push_back(slot);
}
