// A cache of the experts that a file holds: experts that a pass wants are read while it computes others.
//
// An expert is absent, queued, being read, or in memory; what a pass wants stays in memory until it is done. Reads that a
// pass waits for come first, then hints, then what is read ahead of the first pass. A read gets its slot when it begins,
// so where a layer wants more experts than there are slots, each that is done makes room for the next. The readers read
// an expert together, piece by piece, and then the next one: the first of several is there early.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "experts/reader_threads.h"
#include "experts/recency.h"
#include "experts/slots.h"
#include "experts/source.h"
#include "experts/stats.h"
#include "experts/store.h"

// n_bytes: of slots.  n_used: experts that a token wants of a layer.
struct ExpertCacheSize {
    size_t n_bytes;
    int n_used;
    int n_readers;
};

class DiskExperts : public ExpertStore {
public:
    // Throws std::invalid_argument for a cache that is too small, std::bad_alloc, std::system_error.
    DiskExperts(std::shared_ptr<const ExpertLayout> layout, std::unique_ptr<ExpertSource> source,
                const ExpertCacheSize& size);
    // Waits for reads that are under way.
    ~DiskExperts() override;

    // All memory that such a cache takes: slots, buffers of the readers, and tables. buffer_bytes: of a reader's.
    static size_t memory_bytes(const ExpertLayout& layout, size_t buffer_bytes, const ExpertCacheSize& size);
    size_t memory_bytes() const;
    size_t slot_bytes() const;
    // Between passes: slots of n_bytes together hold experts from now on, see ExpertSlots::resize. The experts that are
    // evicted are those that a read would evict first.
    void resize(size_t n_bytes);

    void begin_pass() override;
    int begin(int layer, std::span<int32_t> wanted) override;
    const uint8_t* wait(int layer, int expert, const std::function<bool()>& give_up) override;
    void done(int layer, int expert) override;
    void hint(int layer, std::span<const int32_t> experts) override;
    void forget_use(int layer, std::span<const int32_t> experts) override;
    std::string error() const override;

    // Reads these in the background, in the order of the file, as far as there are free slots.
    void warm(std::vector<ExpertId> experts);

    ExpertStats stats() const;
    // All layers together, since the last begin_pass.
    ExpertLayerStats pass_stats() const;
    std::vector<ExpertId> in_memory() const;
    // The pass that counts as the last one that wanted it, from 1 on; 0 for none.
    uint64_t last_use(ExpertId id) const;
    bool is_direct() const { return source_->is_direct(); }

private:
    enum class State : uint8_t { Absent, Queued, Reading, InMemory };
    struct Entry {
        std::atomic<const uint8_t*> record{nullptr};  // where it is in memory
        uint8_t* slot = nullptr;
        uint64_t read_number = 0;              // in the order in which reads began
        int pieces_left = 0;                   // of the read that is under way
        size_t n_read = 0;                     // bytes of it so far
        std::unique_ptr<std::string> failure;  // of the first piece that failed
        int failed_piece = 0;
        State state = State::Absent;
        bool is_wanted = false;
        bool is_hinted = false;      // stands among the hints
        bool is_prefetched = false;  // came so, and no pass wanted it yet
    };

    struct Piece {
        ExpertId id;
        int number;
    };

    Entry& entry(ExpertId id);
    ExpertLayerStats total() const;
    ExpertLayerStats& stats_of(int layer) { return stats_[static_cast<size_t>(layer)]; }

    // All of these are called with the lock.
    void want(ExpertId id);
    void release(ExpertId id);
    void drop_hints(int layer);
    bool has_reads() const { return open_ || !demanded_.empty() || !hinted_.empty() || !warm_.empty(); }
    std::optional<Piece> next_piece();
    std::optional<ExpertId> next_read();
    std::optional<ExpertId> next_demanded();
    std::optional<ExpertId> next_hinted();
    bool make_room_for_hint(ExpertId id);
    std::optional<ExpertId> next_warm();
    bool is_hint_worth(ExpertId hinted, ExpertId victim) const;
    bool make_room(int layer);
    void trim(int layer);
    void evict(ExpertId id);
    void begin_read(ExpertId id);
    void end_piece(Piece piece, size_t n_read, std::unique_ptr<std::string> failure);
    void end_read(ExpertId id);

    void run_reader(uint8_t* buffer);
    void close();

    ExpertCacheSize size_;
    std::unique_ptr<ExpertSource> source_;
    mutable std::mutex mutex_;
    std::condition_variable arrived_, to_read_;
    ExpertSlots slots_;
    ExpertRecency recency_;
    std::vector<size_t> first_entry_;  // by layer
    std::vector<Entry> entries_;
    std::deque<ExpertId> demanded_, hinted_, warm_;
    std::optional<Piece> open_;     // the next piece of a read that has begun
    std::vector<ExpertId> wanted_;  // of the layers of this pass so far that are not over
    std::vector<ExpertLayerStats> stats_;
    ExpertLayerStats before_pass_;  // of all layers
    std::string error_;
    uint64_t pass_ = 0, n_reads_ = 0;
    int layer_ = 0;      // the present one
    int n_waiting_ = 0;  // threads that compute
    std::chrono::steady_clock::time_point stalled_since_;
    bool closing_ = false;
    ReaderThreads readers_;  // the last one: they use all of the above
};
