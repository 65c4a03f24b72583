#include "kv/kv_state.h"

#include <algorithm>

namespace {

size_t count(int n_slots) { return static_cast<size_t>(segments_of(n_slots)); }

}  // namespace

std::unique_ptr<LayerState> KvMemory::state() { return std::make_unique<KvState>(*this); }

std::unique_ptr<LayerClaim> KvMemory::claim() { return std::make_unique<KvClaim>(*this); }

void KvTable::cut(Users& users, size_t n) {
    for (size_t i = std::max(first, n); i < segments.size(); i++) users.give_back(segments[i]);
    segments.resize(std::min(segments.size(), n));
    first = std::min(first, n);
}

// ---- the state of a sequence ---------------------------------------------------------------------------------------

bool KvState::has(int n_past, int n_slots) const {
    const size_t end = count(n_slots);
    if (table_.segments.size() < end) return false;
    for (size_t i = static_cast<size_t>(n_past / kSegment); i < end; i++) {
        if (memory_.segments.users.is_shared(table_.segments[i])) return false;
    }
    return true;
}

void KvState::commit(int n_past, const int32_t* path, int n) {
    for (int i = 0; i < n; i++) {
        if (path[i] != i) memory_.segments.copy_slot(table_.segments.data(), n_past + path[i], n_past + i);
    }
    truncate(n_past + n);
}

void KvState::truncate(int n_past) { table_.cut(memory_.segments.users, count(n_past)); }

// No more than the window and its slack: other sequences need the memory, and would drop what is kept as a whole.
std::unique_ptr<LayerState> KvState::kept(int n_past) {
    auto kept = std::make_unique<KvState>(memory_);
    kept->share(*this, n_past);
    kept->drop_before(memory_.first_kept(n_past));
    return kept;
}

void KvState::drop_before(size_t segment) {
    for (const size_t first = std::min(segment, table_.segments.size()); table_.first < first; table_.first++) {
        memory_.segments.users.give_back(std::exchange(table_.segments[table_.first], -1));
    }
}

void KvState::share(const LayerState& other, int n_past) {
    const KvTable& theirs = static_cast<const KvState&>(other).table_;
    KvTable table;
    if (n_past > 0) {
        table.first = theirs.first;
        table.segments.assign(theirs.segments.begin(),
                              theirs.segments.begin() + static_cast<std::ptrdiff_t>(count(n_past)));
        for (size_t i = table.first; i < table.segments.size(); i++) memory_.segments.users.share(table.segments[i]);
    }
    table_.cut(memory_.segments.users, 0);
    table_ = std::move(table);
}

// ---- what is about to be taken -------------------------------------------------------------------------------------

KvTable& KvClaim::table_of(LayerState& state) {
    KvState* of = static_cast<KvState*>(&state);
    const auto known = std::find_if(claimed_.begin(), claimed_.end(), [&](const Claimed& c) { return c.state == of; });
    if (known != claimed_.end()) return known->table;
    claimed_.push_back({of, of->table_});
    return claimed_.back().table;
}

// Frees segments of a sequence that is n_past long and will not read them any more, if there are any. What others share
// would not be free then; it goes along where one after it is.
bool KvClaim::give_back_after(KvTable& table, int n_past) {
    const size_t end = std::min(memory_.first_kept(n_past), table.segments.size());
    size_t own = table.first;
    while (own < end && users_.is_shared(table.segments[own])) own++;
    if (own >= end) return false;
    for (; table.first <= own; table.first++) users_.give_back(std::exchange(table.segments[table.first], -1));
    return true;
}

bool KvClaim::find_free(KvTable& table, int n_past) {
    while (!users_.has_free()) {
        if (!give_back_after(table, n_past)) return false;
    }
    return true;
}

bool KvClaim::reserve(LayerState& state, int n_past, int n_slots) {
    KvTable& table = table_of(state);
    table.cut(users_, count(n_slots));
    for (size_t i = static_cast<size_t>(n_past / kSegment); i < count(n_slots); i++) {
        const bool is_new = i == table.segments.size();
        if (!is_new && !users_.is_shared(table.segments[i])) continue;
        const size_t kept_from = std::min(memory_.first_kept(n_past), table.segments.size());
        while (is_new && i - table.first >= memory_.most_of_sequence && table.first < kept_from) {
            users_.give_back(std::exchange(table.segments[table.first++], -1));
        }
        if (!find_free(table, n_past)) return false;
        const int32_t own = users_.take();
        if (is_new) {
            table.segments.push_back(own);
        } else {
            copies_.emplace_back(table.segments[i], own);
            users_.give_back(std::exchange(table.segments[i], own));
        }
    }
    return true;
}

void KvClaim::forget(LayerState& state) { table_of(state).cut(users_, 0); }

// In the order in which they were noted: a segment may be given back after it was copied, and then be copied to.
void KvClaim::apply() {
    memory_.segments.users = std::move(users_);
    for (Claimed& of : claimed_) of.state->table_ = std::move(of.table);
    for (const auto& [from, to] : copies_) memory_.segments.copy(from, to);
}
