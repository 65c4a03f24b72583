#include "kv/kv_state.h"

#include <algorithm>

namespace {

// The segment of the first slot that is read behind n_past tokens.
size_t first_read(int n_past, int window) { return static_cast<size_t>(std::max(0, n_past + 1 - window) / kSegment); }

size_t count(int n_slots) { return static_cast<size_t>(segments_of(n_slots)); }

}  // namespace

// There are as many segments as one text can need, so that one is free when nothing is parked.
void KvState::make_room(int n_past, const DropParked& drop_parked) {
    if (!give_back_behind(n_past)) drop_parked();
}

int32_t KvState::take(int n_past, const DropParked& drop_parked) {
    while (!segments_.has_free()) make_room(n_past, drop_parked);
    return segments_.take();
}

void KvState::reserve(int n_past, int n_slots, const DropParked& drop_parked) {
    for (size_t i = static_cast<size_t>(n_past / kSegment); i < count(n_slots); i++) {
        if (i == table_.segments.size()) {
            table_.segments.push_back(take(n_past, drop_parked));
            continue;
        }
        const int32_t shared = table_.segments[i];
        while (segments_.is_shared(shared) && !segments_.has_free()) make_room(n_past, drop_parked);
        if (!segments_.is_shared(shared)) continue;
        table_.segments[i] = segments_.take();
        segments_.copy(shared, table_.segments[i]);
        segments_.give_back(shared);
    }
}

void KvState::commit(int n_past, const int32_t* path, int n) {
    for (int i = 0; i < n; i++) {
        if (path[i] != i) segments_.copy_slot(table_.segments.data(), n_past + path[i], n_past + i);
    }
}

void KvState::cut(Table& table, size_t n_segments) {
    for (size_t i = std::max(table.first, n_segments); i < table.segments.size(); i++)
        segments_.give_back(table.segments[i]);
    table.segments.resize(n_segments);
    table.first = std::min(table.first, n_segments);
}

// Segments that are not needed any more stay this text's own until it is parked.
void KvState::truncate(int n_past) {
    if (n_past == 0) cut(table_, 0);
}

void KvState::park(int number, int n_past) {
    cut(table_, count(n_past));
    Table kept = table_;
    for (const size_t first = std::min(first_kept(n_past), kept.segments.size()); kept.first < first; kept.first++)
        kept.segments[kept.first] = -1;
    parked_.emplace_back(number, kept);
    for (size_t i = kept.first; i < kept.segments.size(); i++) segments_.share(kept.segments[i]);
}

std::vector<std::pair<int, KvState::Table>>::const_iterator KvState::find(int number) const {
    return std::find_if(parked_.begin(), parked_.end(), [&](const auto& text) { return text.first == number; });
}

int KvState::reach_parked(int number, int n_past) const {
    const auto text = find(number);
    return text == parked_.end() ? 0 : reach_of(text->second, n_past);
}

void KvState::resume(int number, int n_past) {
    const auto text = find(number);
    Table table;
    if (text != parked_.end() && n_past > 0) {
        table.first = text->second.first;
        table.segments.assign(text->second.segments.begin(),
                              text->second.segments.begin() + static_cast<std::ptrdiff_t>(count(n_past)));
        for (size_t i = table.first; i < table.segments.size(); i++) segments_.share(table.segments[i]);
    }
    cut(table_, 0);
    table_ = std::move(table);
}

void KvState::forget(int number) {
    const auto text = find(number);
    if (text == parked_.end()) return;
    for (size_t i = text->second.first; i < text->second.segments.size(); i++)
        segments_.give_back(text->second.segments[i]);
    parked_.erase(text);
}

// What a parked text shares would not be free then; it goes along where one behind it is.
bool WindowKv::give_back_behind(int n_past) {
    const size_t end = std::min(first_read(n_past - kSlack, window_), table_.segments.size());
    size_t own = table_.first;
    while (own < end && segments_.is_shared(table_.segments[own])) own++;
    if (own >= end) return false;
    for (; table_.first <= own; table_.first++) segments_.give_back(std::exchange(table_.segments[table_.first], -1));
    return true;
}

// No more than that: the next text needs the memory, and would drop a parked text that holds it.
size_t WindowKv::first_kept(int n_past) const { return first_read(n_past - kSlack, window_); }

int WindowKv::reach_of(const Table& table, int n_past) const {
    return table.first <= first_read(n_past, window_) ? n_past : 0;
}
