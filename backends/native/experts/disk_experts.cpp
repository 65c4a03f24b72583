#include "experts/disk_experts.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <tuple>

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kPollEvery{20};

double seconds_between(Clock::time_point begin, Clock::time_point end) {
    return std::chrono::duration<double>(end - begin).count();
}

size_t n_experts_of(const ExpertLayout& layout) {
    size_t n = 0;
    for (int i = 0; i < layout.n_layers(); i++) n += static_cast<size_t>(layout.layer(i).n_experts);
    return n;
}

}  // namespace

DiskExperts::DiskExperts(std::shared_ptr<const ExpertLayout> layout, std::unique_ptr<ExpertSource> source,
                         const ExpertCacheSize& size)
    : ExpertStore(std::move(layout)),
      size_(size),
      source_(std::move(source)),
      slots_(this->layout(), size.n_bytes, size.n_used),
      recency_(this->layout()),
      entries_(n_experts_of(this->layout())),
      stats_(static_cast<size_t>(this->layout().n_layers())) {
    size_t n_entries = 0;
    for (int i = 0; i < this->layout().n_layers(); i++) {
        first_entry_.push_back(n_entries);
        n_entries += static_cast<size_t>(this->layout().layer(i).n_experts);
    }
    try {
        readers_.start(size.n_readers, source_->buffer_bytes(), [this](uint8_t* buffer) { run_reader(buffer); });
    } catch (...) {
        close();
        throw;
    }
}

DiskExperts::~DiskExperts() { close(); }

void DiskExperts::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    to_read_.notify_all();
    readers_.join();
}

size_t DiskExperts::memory_bytes(const ExpertLayout& layout, size_t buffer_bytes, const ExpertCacheSize& size) {
    const size_t tables = n_experts_of(layout) * (sizeof(Entry) + ExpertRecency::kEntryBytes);
    return ExpertSlots::memory_bytes(layout, size.n_bytes, size.n_used) + tables +
           ReaderThreads::memory_bytes(size.n_readers, buffer_bytes);
}

size_t DiskExperts::memory_bytes() const {
    const std::lock_guard lock(mutex_);
    return memory_bytes(this->layout(), source_->buffer_bytes(), size_);
}

size_t DiskExperts::slot_bytes() const {
    const std::lock_guard lock(mutex_);
    return slots_.n_bytes();
}

DiskExperts::Entry& DiskExperts::entry(ExpertId id) {
    return entries_[first_entry_[static_cast<size_t>(id.layer)] + static_cast<size_t>(id.expert)];
}

// ---- what a pass does ----------------------------------------------------------------------------------------------

void DiskExperts::begin_pass() {
    const std::lock_guard lock(mutex_);
    for (const ExpertId id : wanted_) {
        if (entry(id).is_wanted) release(id);
    }
    wanted_.clear();
    demanded_.clear();
    error_.clear();
    before_pass_ = total();
    pass_++;
}

int DiskExperts::begin(int layer, std::span<int32_t> wanted) {
    std::unique_lock lock(mutex_);
    layer_ = layer;
    std::erase_if(wanted_, [this](ExpertId id) { return !entry(id).is_wanted; });
    int n_in_memory = 0;
    for (const int32_t expert : wanted) {
        want({layer, expert});
        n_in_memory += entry({layer, expert}).state == State::InMemory;
    }
    drop_hints(layer);
    std::sort(wanted.begin(), wanted.end(), [&](int32_t a, int32_t b) {
        const auto place = [&](int32_t expert) {
            const Entry& e = entry({layer, expert});
            const bool comes = e.state == State::Reading;
            return std::tuple(e.state != State::InMemory, !comes, comes ? e.read_number : 0, expert);
        };
        return place(a) < place(b);
    });
    for (const int32_t expert : wanted) {
        if (entry({layer, expert}).state == State::Queued) demanded_.push_back({layer, expert});
    }
    stats_of(layer).lookups += wanted.size();
    stats_of(layer).hits += static_cast<size_t>(n_in_memory);
    const bool is_read = has_reads();
    lock.unlock();
    if (is_read) to_read_.notify_one();  // which wakes the next one
    return n_in_memory;
}

void DiskExperts::want(ExpertId id) {
    Entry& e = entry(id);
    if (e.state == State::InMemory && !e.is_wanted) recency_.remove(id);
    if (e.state == State::Absent) e.state = State::Queued;
    recency_.use(id, pass_);
    stats_of(id.layer).useful += e.is_prefetched;
    e.is_prefetched = false;
    e.is_wanted = true;
    wanted_.push_back(id);
}

const uint8_t* DiskExperts::wait(int layer, int expert, const std::function<bool()>& give_up) {
    Entry& e = entry({layer, expert});
    if (const uint8_t* record = e.record.load(std::memory_order_acquire)) return record;
    std::unique_lock lock(mutex_);
    const Clock::time_point begin = Clock::now();
    if (n_waiting_++ == 0) stalled_since_ = begin;
    Clock::time_point poll = begin + kPollEvery;
    bool is_given_up = false;
    while (e.state != State::InMemory && e.state != State::Absent && !is_given_up) {
        arrived_.wait_until(lock, poll);
        if (Clock::now() < poll) continue;
        poll += kPollEvery;
        if (!give_up) continue;
        lock.unlock();
        is_given_up = give_up();
        lock.lock();
    }
    const Clock::time_point end = Clock::now();
    stats_of(layer).seconds_waited += seconds_between(begin, end);
    if (--n_waiting_ == 0) stats_of(layer).seconds_stalled += seconds_between(stalled_since_, end);
    return is_given_up ? nullptr : e.record.load(std::memory_order_relaxed);
}

void DiskExperts::done(int layer, int expert) {
    const std::lock_guard lock(mutex_);
    if (entry({layer, expert}).is_wanted) release({layer, expert});
    if (has_reads()) to_read_.notify_one();
}

// What is being read becomes a candidate when it arrives.
void DiskExperts::release(ExpertId id) {
    Entry& e = entry(id);
    e.is_wanted = false;
    if (e.state == State::InMemory) recency_.add(id);
    if (e.state == State::Queued) e.state = State::Absent;
}

void DiskExperts::forget_use(int layer, std::span<const int32_t> experts) {
    const std::lock_guard lock(mutex_);
    for (const int32_t expert : experts) recency_.forget({layer, expert}, pass_);
}

std::string DiskExperts::error() const {
    const std::lock_guard lock(mutex_);
    return error_;
}

// ---- what is read ahead --------------------------------------------------------------------------------------------

void DiskExperts::hint(int layer, std::span<const int32_t> experts) {
    const std::lock_guard lock(mutex_);
    for (const int32_t expert : experts) {
        const ExpertId id{layer, expert};
        Entry& e = entry(id);
        if (e.state == State::InMemory && !e.is_wanted) {  // it is to stay
            recency_.remove(id);
            recency_.use(id, pass_);
            recency_.add(id);
        } else if (e.state == State::Absent && !e.is_hinted) {
            e.is_hinted = true;
            hinted_.push_back(id);
        }
    }
    if (!hinted_.empty()) to_read_.notify_one();
}

// The layer has come: what it wants is read anyway.
void DiskExperts::drop_hints(int layer) {
    std::erase_if(hinted_, [&](ExpertId id) {
        if (id.layer != layer) return false;
        entry(id).is_hinted = false;
        stats_of(layer).dropped++;
        return true;
    });
}

void DiskExperts::warm(std::vector<ExpertId> experts) {
    const auto place = [this](ExpertId id) { return this->layout().layer(id.layer).first_byte_of(id.expert); };
    std::sort(experts.begin(), experts.end(), [&](ExpertId a, ExpertId b) { return place(a) < place(b); });
    const std::lock_guard lock(mutex_);
    warm_.insert(warm_.end(), experts.begin(), experts.end());
    to_read_.notify_one();
}

// ---- reading -------------------------------------------------------------------------------------------------------

void DiskExperts::run_reader(uint8_t* buffer) {
    std::unique_lock lock(mutex_);
    for (;;) {
        std::optional<Piece> piece;
        to_read_.wait(lock, [&] { return closing_ || (piece = next_piece()); });
        if (closing_) return;
        if (has_reads()) to_read_.notify_one();
        const ExpertId id = piece->id;
        uint8_t* slot = entry(id).slot;
        lock.unlock();
        size_t n_read = 0;
        std::unique_ptr<std::string> failure;
        try {
            n_read = source_->read(id.layer, id.expert, piece->number, buffer, slot);
        } catch (const std::exception& error) {
            failure = std::make_unique<std::string>(error.what());
        }
        lock.lock();
        end_piece(*piece, n_read, std::move(failure));
    }
}

std::optional<DiskExperts::Piece> DiskExperts::next_piece() {
    if (!open_) {
        const std::optional<ExpertId> id = next_read();
        if (!id) return {};
        begin_read(*id);
        open_ = {*id, 0};
    }
    const Piece piece = *open_;
    if (++open_->number == source_->n_pieces(piece.id.layer)) open_.reset();
    return piece;
}

// An expert to be read, with a free slot for it.
std::optional<ExpertId> DiskExperts::next_read() {
    if (!demanded_.empty()) return next_demanded();
    if (const std::optional<ExpertId> id = next_hinted()) return id;
    return next_warm();
}

std::optional<ExpertId> DiskExperts::next_demanded() {
    while (!demanded_.empty() && entry(demanded_.front()).state != State::Queued) demanded_.pop_front();
    if (demanded_.empty()) return {};
    const ExpertId id = demanded_.front();
    if (!make_room(id.layer)) return {};  // one that is done will make room
    demanded_.pop_front();
    return id;
}

std::optional<ExpertId> DiskExperts::next_hinted() {
    while (!hinted_.empty()) {
        const ExpertId id = hinted_.front();
        hinted_.pop_front();
        Entry& e = entry(id);
        e.is_hinted = false;
        if (e.state != State::Absent) continue;
        if (!make_room_for_hint(id)) {
            stats_of(id.layer).dropped++;
            continue;
        }
        e.is_prefetched = true;
        recency_.use(id, pass_);
        stats_of(id.layer).prefetches++;
        return id;
    }
    return {};
}

bool DiskExperts::make_room_for_hint(ExpertId id) {
    if (slots_.has_free(id.layer)) return true;
    const std::optional<ExpertId> victim = recency_.oldest(slots_.pool_of(id.layer).layers, layer_);
    return victim && is_hint_worth(id, *victim) && make_room(id.layer);
}

// Not in place of what this pass hinted for the same layer.
bool DiskExperts::is_hint_worth(ExpertId hinted, ExpertId victim) const {
    return victim.layer != hinted.layer || recency_.last_use(victim) != pass_;
}

std::optional<ExpertId> DiskExperts::next_warm() {
    while (!warm_.empty()) {
        const ExpertId id = warm_.front();
        warm_.pop_front();
        Entry& e = entry(id);
        if (e.state != State::Absent || !slots_.has_free(id.layer)) continue;
        e.is_prefetched = true;
        stats_of(id.layer).prefetches++;
        return id;
    }
    return {};
}

// A free slot for an expert of this layer; false while all are in use. An evicted slot beyond what the cache may have does
// not become free, so it may take several.
bool DiskExperts::make_room(int layer) {
    while (!slots_.has_free(layer)) {
        const std::optional<ExpertId> victim = recency_.oldest(slots_.pool_of(layer).layers, layer_);
        if (!victim) return false;
        evict(*victim);
    }
    return true;
}

// Evicts what the layer's pool holds too many of, as far as nothing uses it.
void DiskExperts::trim(int layer) {
    while (slots_.has_excess(layer)) {
        const std::optional<ExpertId> victim = recency_.oldest(slots_.pool_of(layer).layers, layer_);
        if (!victim) return;
        evict(*victim);
    }
}

void DiskExperts::evict(ExpertId id) {
    Entry& e = entry(id);
    recency_.remove(id);
    e.record.store(nullptr, std::memory_order_relaxed);
    e.state = State::Absent;
    e.is_prefetched = false;
    slots_.give_back(id.layer, e.slot);
    stats_of(id.layer).evictions++;
}

void DiskExperts::begin_read(ExpertId id) {
    Entry& e = entry(id);
    e.slot = slots_.take(id.layer);
    e.state = State::Reading;
    e.read_number = ++n_reads_;
    e.pieces_left = source_->n_pieces(id.layer);
    e.n_read = 0;
}

void DiskExperts::end_piece(Piece piece, size_t n_read, std::unique_ptr<std::string> failure) {
    Entry& e = entry(piece.id);
    e.n_read += n_read;
    if (failure && (!e.failure || piece.number < e.failed_piece)) {
        e.failure = std::move(failure);
        e.failed_piece = piece.number;
    }
    if (--e.pieces_left == 0) end_read(piece.id);
}

void DiskExperts::end_read(ExpertId id) {
    Entry& e = entry(id);
    const std::unique_ptr<std::string> failure = std::move(e.failure);
    if (!failure) {
        e.state = State::InMemory;
        e.record.store(e.slot, std::memory_order_release);
        if (!e.is_wanted) recency_.add(id);
        stats_of(id.layer).reads++;
        stats_of(id.layer).bytes_read += e.n_read;
    } else {
        slots_.give_back(id.layer, e.slot);
        e.state = State::Absent;
        e.is_prefetched = false;
        if (e.is_wanted && error_.empty()) error_ = *failure;
    }
    trim(id.layer);
    arrived_.notify_all();
    if (has_reads()) to_read_.notify_one();  // for which there may be room now
}

// ---- giving memory back --------------------------------------------------------------------------------------------

void DiskExperts::resize(size_t n_bytes) {
    const std::lock_guard lock(mutex_);
    slots_.resize(n_bytes);
    size_.n_bytes = slots_.n_bytes();
    for (const SlotPool& pool : slots_.pools()) trim(pool.layers.front());
}

// ---- looking -------------------------------------------------------------------------------------------------------

ExpertStats DiskExperts::stats() const {
    const std::lock_guard lock(mutex_);
    ExpertStats stats{stats_, source_->busy_seconds(), 0, 0};
    for (const SlotPool& pool : slots_.pools()) stats.n_slots += static_cast<uint64_t>(pool.n_slots);
    for (const Entry& e : entries_) stats.n_in_memory += e.state == State::InMemory;
    return stats;
}

ExpertLayerStats DiskExperts::total() const {
    ExpertLayerStats all;
    for (const ExpertLayerStats& layer : stats_) all += layer;
    return all;
}

ExpertLayerStats DiskExperts::pass_stats() const {
    const std::lock_guard lock(mutex_);
    ExpertLayerStats all = total();
    all -= before_pass_;
    return all;
}

uint64_t DiskExperts::last_use(ExpertId id) const {
    const std::lock_guard lock(mutex_);
    return recency_.last_use(id);
}

std::vector<ExpertId> DiskExperts::in_memory() const {
    const std::lock_guard lock(mutex_);
    std::vector<ExpertId> ids;
    for (int layer = 0; layer < this->layout().n_layers(); layer++) {
        for (int expert = 0; expert < this->layout().layer(layer).n_experts; expert++) {
            const Entry& e = entries_[first_entry_[static_cast<size_t>(layer)] + static_cast<size_t>(expert)];
            if (e.state == State::InMemory) ids.push_back({layer, expert});
        }
    }
    return ids;
}
