// Where a pass finds the experts of its layers: all of them in memory, or a cache of those that a file holds.
//
// A pass goes through the layers in order. In each it calls begin once with the experts that its rows want; then its
// threads wait for each of these experts, use its record, and say done. Results do not depend on the order in which
// records arrive.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "experts/layout.h"

class ExpertStore {
public:
    explicit ExpertStore(std::shared_ptr<const ExpertLayout> layout) : layout_(std::move(layout)) {}
    virtual ~ExpertStore() = default;
    ExpertStore(const ExpertStore&) = delete;
    ExpertStore& operator=(const ExpertStore&) = delete;

    const ExpertLayout& layout() const { return *layout_; }

    // A pass begins: one thread, before its first layer. What an earlier pass left waiting is given up.
    virtual void begin_pass() {}
    // One thread, before the experts of a layer are computed. wanted: experts of that layer, each once. It puts them into
    // the order in which to compute them, those in memory first, then as they will arrive; gives how many are in memory.
    virtual int begin(int layer, std::span<int32_t> wanted) = 0;
    // Any thread: the record of a wanted expert, as soon as it is in memory. Null if it cannot be read, see error(), or if
    // give_up, called every few milliseconds meanwhile, says so. At least two experts that were begun can be in memory
    // together: an expert is waited for only when all that come two places or more before it are done or in work.
    virtual const uint8_t* wait(int layer, int expert, const std::function<bool()>& give_up) = 0;
    // Any thread, once for each wanted expert: nothing reads its record any more in this pass.
    virtual void done(int layer, int expert) = 0;
    // Experts that a layer will probably want soon, the most probable first. Read when nothing else is.
    virtual void hint(int layer, std::span<const int32_t> experts) {
        static_cast<void>(layer), static_cast<void>(experts);
    }
    // Between passes: the last one should not have wanted these experts, because only a draft that was rejected did; their
    // recency is again what it was before.
    virtual void forget_use(int layer, std::span<const int32_t> experts) {
        static_cast<void>(layer), static_cast<void>(experts);
    }
    // Why wait gave null; empty if nothing failed in this pass.
    virtual std::string error() const { return {}; }

private:
    std::shared_ptr<const ExpertLayout> layout_;
};
