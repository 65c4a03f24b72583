#include "kv/recurrent_state.h"

#include <stdexcept>
#include <utility>

namespace {

constexpr int64_t kFewestCheckpoints = 2, kMostCheckpoints = 16;  // of all sequences; of each
constexpr size_t kHugeSlot = size_t{8} << 20;  // bytes of a slot from which on huge pages lose little

size_t slot_bytes(const RecurrentSizes& sizes, int n_layers) {
    return sizeof(float) * sizes.state_floats() * static_cast<size_t>(n_layers);
}

size_t row_bytes(const RecurrentSizes& sizes, int n_layers) {
    return sizeof(float) * sizes.row_floats() * static_cast<size_t>(n_layers);
}

}  // namespace

// ---- memory ----------------------------------------------------------------------------------------------------

int64_t RecurrentMemory::n_checkpoints(const RecurrentSizes& sizes, int n_layers, size_t n_bytes, int n_sequences) {
    const size_t fitting = n_bytes * static_cast<size_t>(n_sequences) / slot_bytes(sizes, n_layers);
    return std::clamp(static_cast<int64_t>(fitting), std::max<int64_t>(kFewestCheckpoints, n_sequences),
                      kMostCheckpoints * n_sequences);
}

size_t RecurrentMemory::n_bytes(const RecurrentSizes& sizes, int n_layers, size_t n_slots, size_t n_rows) {
    return slot_bytes(sizes, n_layers) * n_slots + row_bytes(sizes, n_layers) * n_rows;
}

int RecurrentMemory::most_rows_of(const RecurrentSizes& sizes, int n_layers, size_t n_bytes) {
    for (const int n : {kMostRows, 24}) {
        if (row_bytes(sizes, n_layers) * static_cast<size_t>(n) <= n_bytes) return n;
    }
    return 16;
}

RecurrentMemory::RecurrentMemory(const RecurrentSizes& sizes, int n_layers, int n_slots, int n_sequences,
                                 int most_of_sequence, int most_rows)
    : sizes(sizes),
      n_layers(n_layers),
      most_of_sequence(most_of_sequence),
      most_rows(most_rows),
      slots(n_slots),
      rows(2 * most_rows * n_sequences),
      states_(slot_bytes(sizes, n_layers) * static_cast<size_t>(n_slots), slot_bytes(sizes, n_layers) >= kHugeSlot),
      rows_(row_bytes(sizes, n_layers) * static_cast<size_t>(2 * most_rows * n_sequences), false) {}

std::unique_ptr<LayerState> RecurrentMemory::state() { return std::make_unique<RecurrentState>(*this); }

std::unique_ptr<LayerClaim> RecurrentMemory::claim() { return std::make_unique<RecurrentClaim>(*this); }

size_t RecurrentMemory::used_bytes() const {
    return n_bytes(sizes, n_layers, static_cast<size_t>(slots.n_touched()), static_cast<size_t>(rows.n_touched()));
}

float* RecurrentMemory::at(int slot, int layer) const {
    if (slot < 0) return nullptr;
    const size_t state = static_cast<size_t>(slot) * static_cast<size_t>(n_layers) + static_cast<size_t>(layer);
    return reinterpret_cast<float*>(states_.data()) + state * sizes.state_floats();
}

float* RecurrentMemory::row(int layer, int row) const {
    const size_t number = static_cast<size_t>(row) * static_cast<size_t>(n_layers) + static_cast<size_t>(layer);
    return reinterpret_cast<float*>(rows_.data()) + number * sizes.row_floats();
}

// ---- earlier states --------------------------------------------------------------------------------------------

void RecurrentTable::drop_base(Users& slots) {
    slots.give_back(entries.back().slot);
    entries.pop_back();
}

void RecurrentTable::cut(Users& slots, int n_past) {
    while (!empty() && (base_position() > n_past || n_past == 0)) drop_base(slots);
}

// The gap that it leaves is small beside how far back it is.
bool RecurrentTable::thin(Users& slots, int length, bool must_free) {
    int least = -1;
    double least_cost = 0;
    for (int i = 0; i + 1 < static_cast<int>(entries.size()); i++) {
        const Entry& entry = entries[static_cast<size_t>(i)];
        if (must_free && slots.is_shared(entry.slot)) continue;
        const int before = i ? entries[static_cast<size_t>(i - 1)].position : 0;
        const int after = entries[static_cast<size_t>(i + 1)].position;
        const double cost = static_cast<double>(after - before) / (length - entry.position + 1);
        if (least >= 0 && cost >= least_cost) continue;
        least = i;
        least_cost = cost;
    }
    if (least < 0) return false;
    slots.give_back(entries[static_cast<size_t>(least)].slot);
    entries.erase(entries.begin() + least);
    return true;
}

// ---- what a pass needs -----------------------------------------------------------------------------------------

// A place for the state after the committed rows, or for a tip, which has their changes too. n_new: pending rows, those of the
// pass among them.
RecurrentState::Needed RecurrentState::needed(int n_new) const {
    const bool needs_tip = n_new > most_rows() && tip_ < 0;
    const bool needs_target = n_new <= most_rows() && !committed_.empty() && target_ < 0;
    const size_t n_rows = static_cast<size_t>(std::min(n_new, most_rows()));
    return {static_cast<size_t>(needs_tip || needs_target), n_rows - std::min(n_rows, nodes_.size())};
}

bool RecurrentState::has(int n_past, int n_slots) const {
    const Needed all = needed(n_slots - n_past);
    return spares_.size() >= all.slots && spare_rows_.size() >= all.rows;
}

size_t RecurrentState::n_held_beside_table() const {
    const bool has_target = target_ >= 0 && target_ != table_.base_slot();
    return static_cast<size_t>(tip_ >= 0) + static_cast<size_t>(snapshot_ >= 0) + static_cast<size_t>(has_target);
}

// For a checkpoint, beside what was claimed. Where none is free and a sequence has none, it takes one of that which has most.
bool RecurrentState::make_place() {
    const size_t most = static_cast<size_t>(memory_.most_of_sequence);
    while (table_.entries.size() + n_held_beside_table() + spares_.size() >= most) {
        if (!table_.thin(memory_.slots, length(), false)) return false;
    }
    if (memory_.slots.has_free() || table_.thin(memory_.slots, length(), true)) return true;
    const auto n_entries = [](const RecurrentState* of) { return of->table_.entries.size(); };
    RecurrentState& richest = **std::ranges::max_element(memory_.states, {}, n_entries);
    return n_entries(&richest) > n_entries(this) + 1 && richest.table_.thin(memory_.slots, richest.length(), true);
}

// What a pass needs: claimed, or free since it dropped what was pending.
int RecurrentState::take_spare() {
    if (spares_.empty()) return memory_.slots.take();
    const int slot = spares_.back();
    spares_.pop_back();
    return slot;
}

int RecurrentState::take_row() {
    if (spare_rows_.empty()) return memory_.rows.take();
    const int row = spare_rows_.back();
    spare_rows_.pop_back();
    return row;
}

void RecurrentState::give_back_rows(std::vector<int>& rows) {
    for (size_t i = rows.size(); i-- > 0;) memory_.rows.give_back(rows[i]);
    rows.clear();
}

void RecurrentState::give_back_spares() {
    for (const int slot : spares_) memory_.slots.give_back(slot);
    spares_.clear();
    give_back_rows(spare_rows_);
}

RecurrentClaim::Claimed& RecurrentClaim::claimed_of(LayerState& state) {
    RecurrentState* of = static_cast<RecurrentState*>(&state);
    const auto known = std::find_if(claimed_.begin(), claimed_.end(), [&](const Claimed& c) { return c.state == of; });
    if (known != claimed_.end()) return *known;
    claimed_.push_back({of, of->table_, of->spares_, of->spare_rows_});
    return claimed_.back();
}

bool RecurrentClaim::take_slot(Claimed& of) {
    const size_t most = static_cast<size_t>(memory_.most_of_sequence);
    const size_t n_others = of.state->n_held_beside_table() + of.spares.size();
    const int length = of.state->length();
    while (of.table.entries.size() + n_others >= most && of.table.thin(slots_, length, false)) {
    }
    while (!slots_.has_free()) {
        if (!of.table.thin(slots_, length, true) && !thin_others(true) && !thin_others(false)) return false;
    }
    of.spares.push_back(slots_.take());
    return true;
}

// Of the sequence that has the most, whatever runs after it: a pass reads no checkpoints but the base.
bool RecurrentClaim::thin_others(bool must_free) {
    std::vector<Claimed*> all;
    for (RecurrentState* state : memory_.states) all.push_back(&claimed_of(*state));
    std::stable_sort(all.begin(), all.end(), [](const Claimed* a, const Claimed* b) {
        return a->table.entries.size() > b->table.entries.size();
    });
    return std::any_of(all.begin(), all.end(),
                       [&](Claimed* of) { return of->table.thin(slots_, of->state->length(), must_free); });
}

// After tokens that are not there yet the state has been in a slot that was claimed for it, and in the one before, if that
// was the sequence's own; the rows of one pass are committed when the next one runs.
bool RecurrentClaim::reserve(LayerState& state, int n_past, int n_slots) {
    Claimed& of = claimed_of(state);
    RecurrentState::Needed all = of.state->needed(n_slots - n_past);
    if (n_past > of.state->length()) {
        const bool has_own = !of.table.empty() && !slots_.is_shared(of.table.base_slot());
        all.slots = has_own ? 1 : 2;
        const size_t n_rows = 2 * static_cast<size_t>(memory_.most_rows);
        all.rows = n_rows - std::min(n_rows, of.state->nodes_.size() + of.state->committed_.size());
    }
    while (of.spares.size() < all.slots) {
        if (!take_slot(of)) return false;
    }
    while (of.spare_rows.size() < all.rows) {
        if (!rows_.has_free()) return false;
        of.spare_rows.push_back(rows_.take());
    }
    return true;
}

void RecurrentClaim::forget(LayerState& state) { claimed_of(state).table.cut(slots_, 0); }

void RecurrentClaim::apply() {
    memory_.slots = std::move(slots_);
    memory_.rows = std::move(rows_);
    for (Claimed& of : claimed_) {
        of.state->table_ = std::move(of.table);
        of.state->spares_ = std::move(of.spares);
        of.state->spare_rows_ = std::move(of.spare_rows);
    }
}

// ---- a pass ----------------------------------------------------------------------------------------------------

bool RecurrentState::can_begin(const int32_t* parents, int n_pending, int n) const {
    if (n_pending > 0 && n_pending < n_tip_) return false;
    const int n_tip = n_pending ? n_tip_ : 0, n_nodes = n_pending + n - n_tip;
    bool is_chain = true;
    for (int i = n_tip; i < n_pending + n; i++) {
        if (parents[i] < n_tip - 1) return false;
        is_chain = is_chain && parents[i] == i - 1;
    }
    return is_chain || n_nodes <= most_rows();
}

void RecurrentState::begin(const int32_t* parents, int n_pending, int n) {
    is_running_ = true;
    if (n_pending < n_tip_ || n_pending == 0) drop_pending();
    while (static_cast<int>(nodes_.size()) > n_pending - n_tip_) {
        memory_.rows.give_back(nodes_.back());
        nodes_.pop_back();
    }
    plan_ = {};
    plan_.n_old = static_cast<int>(nodes_.size());
    plan_.n_nodes = plan_.n_old + n;
    plan_.is_chain = plan_.n_nodes > most_rows();
    plan_.snapshot = kNone;
    for (int i = n_tip_; i < n_pending + n; i++) plan_.parents.push_back(parents[i] - n_tip_);
    source_ = n_tip_ ? tip_ : table_.base_slot();
    if (n_tip_ == 0) plan_.committed = committed_;
    if (!plan_.is_chain) {
        for (int i = 0; i < n; i++) nodes_.push_back(take_row());
        plan_.rows = nodes_;
        if (!plan_.committed.empty() && target_ < 0)
            target_ = table_.empty() || is_base_kept() ? take_spare() : table_.base_slot();
        add_steps();
    } else {
        plan_.rows = folded_ = std::exchange(nodes_, {});
        if (tip_ < 0) tip_ = take_spare();
        take_snapshot(n_pending, n);
        n_tip_ = n_pending + n;
    }
    give_back_spares();
}

// Other sequences ask what is there while no pass runs after this one, or while one does: they do not see its parts.
void RecurrentState::end() {
    is_running_ = false;
    give_back_rows(folded_);
    settle();
    if (std::find(done_.begin(), done_.end(), 1) == done_.end()) drop_target();
    give_back_spares();
}

// A checkpoint kBack tokens before the end of a chain, if there is a place for it.
void RecurrentState::take_snapshot(int n_pending, int n) {
    const int node = plan_.n_nodes - kBack - 1;
    if (node < plan_.n_old || n <= kBack) return;
    if (snapshot_ < 0) {
        if (!make_place()) return;
        snapshot_ = memory_.slots.take();
    }
    plan_.snapshot = node;
    snapshot_position_ = length() + n_pending + n - kBack;
}

// Depth first: the state of a node is there while its children run, in a block that the last of them may take over.
void RecurrentState::add_steps() {
    const size_t n = static_cast<size_t>(plan_.n_nodes);
    std::vector<std::vector<int>> children(n + 1);  // of node - 1
    std::vector<bool> is_needed(n);                 // new, or before a new one
    for (int i = plan_.n_nodes; i-- > 0;) {
        const size_t node = static_cast<size_t>(i);
        is_needed[node] = is_needed[node] || i >= plan_.n_old;
        if (!is_needed[node]) continue;
        if (plan_.parents[node] >= 0) is_needed[static_cast<size_t>(plan_.parents[node])] = true;
        children[static_cast<size_t>(plan_.parents[node] + 1)].push_back(i);
    }
    std::vector<int> free_blocks;
    int n_blocks = 1;
    struct Visit {
        int node, from;
        bool is_last;
    };
    std::vector<Visit> stack;
    const auto push = [&](int node, int block) {
        const std::vector<int>& of_node = children[static_cast<size_t>(node + 1)];  // descending: the first is on top
        for (size_t i = 0; i < of_node.size(); i++) stack.push_back({of_node[i], block, i == 0});
    };
    push(-1, 0);
    while (!stack.empty()) {
        const Visit visit = stack.back();
        stack.pop_back();
        const bool is_parent = !children[static_cast<size_t>(visit.node + 1)].empty();
        int to = -1;
        if (is_parent && visit.is_last && visit.from > 0) {
            to = visit.from;
        } else if (is_parent && !free_blocks.empty()) {
            to = free_blocks.back();
            free_blocks.pop_back();
        } else if (is_parent) {
            to = n_blocks++;
        } else if (visit.is_last && visit.from > 0) {
            free_blocks.push_back(visit.from);
        }
        plan_.steps.push_back({visit.node, visit.from, to, visit.node >= plan_.n_old});
        push(visit.node, to);
    }
}

// ---- what is committed -----------------------------------------------------------------------------------------

bool RecurrentState::is_torn() const {
    return target_ >= 0 && table_.base_slot() == target_ &&
           (is_running_ || std::find(done_.begin(), done_.end(), 1) != done_.end());
}

// Whether the base stays, as a checkpoint, when there is a new one: where that was asked for, or costs nothing.
bool RecurrentState::is_base_kept() const {
    return table_.base_position() == marked_ || memory_.slots.is_shared(table_.base_slot());
}

// After a pass that was whole, its target is the base.
void RecurrentState::settle() {
    if (target_ < 0 || std::find(done_.begin(), done_.end(), 0) != done_.end()) return;
    push_base(length(), target_);
    target_ = kNone;
    std::fill(done_.begin(), done_.end(), uint8_t{0});
    give_back_rows(committed_);
}

void RecurrentState::push_base(int position, int slot) {
    if (!table_.empty()) {
        if (table_.base_slot() == slot)
            table_.entries.pop_back();
        else if (!is_base_kept())
            table_.drop_base(memory_.slots);
    }
    table_.entries.push_back({position, slot});
}

// Drops what a pass has made of the base, too, where that was written to.
void RecurrentState::drop_target() {
    if (is_torn())
        table_.drop_base(memory_.slots);
    else if (target_ >= 0 && table_.base_slot() != target_)
        memory_.slots.give_back(target_);
    target_ = kNone;
    std::fill(done_.begin(), done_.end(), uint8_t{0});
}

void RecurrentState::drop_pending() {
    for (int* slot : {&tip_, &snapshot_}) {
        if (*slot >= 0) memory_.slots.give_back(*slot);
        *slot = kNone;
    }
    n_tip_ = 0;
    give_back_rows(nodes_);
}

void RecurrentState::commit(int n_past, const int32_t* path, int n) {
    if (!can_commit(n) || (n && n_tip_ && path[n_tip_ - 1] != n_tip_ - 1)) {
        throw std::logic_error("a part of a chain is committed whose rows were not kept");
    }
    if (n && n_tip_) {
        drop_target();
        give_back_rows(committed_);
        if (snapshot_ >= 0) {
            push_base(snapshot_position_, snapshot_);
            marked_ = snapshot_position_;  // so that it is kept
            snapshot_ = kNone;
        }
        push_base(n_past + n_tip_, tip_);
        tip_ = kNone;
    }
    std::vector<int> kept;
    for (int i = n ? n_tip_ : 0; i < n; i++) {
        int& row = nodes_[static_cast<size_t>(path[i] - n_tip_)];
        kept.push_back(row);
        row = kNone;
    }
    nodes_.erase(std::remove(nodes_.begin(), nodes_.end(), kNone), nodes_.end());
    committed_.insert(committed_.end(), kept.begin(), kept.end());
    drop_pending();
}

int RecurrentState::shared_reach(int n_past) const {
    const bool has_base = !is_torn();
    if (has_base && n_past >= table_.base_position()) return std::min(n_past, length());
    int reached = 0;
    for (size_t i = 0; i + (has_base ? 0 : 1) < table_.entries.size(); i++) {
        if (table_.entries[i].position <= n_past) reached = table_.entries[i].position;
    }
    return reached;
}

void RecurrentState::truncate(int n_past) {
    drop_pending();
    give_back_spares();
    if (n_past >= length() && n_past > 0) return;
    const bool has_base = !is_torn() && n_past >= table_.base_position();
    const size_t n_rows = has_base ? static_cast<size_t>(n_past - table_.base_position()) : 0;
    drop_target();
    while (committed_.size() > n_rows) {
        memory_.rows.give_back(committed_.back());
        committed_.pop_back();
    }
    table_.cut(memory_.slots, n_past);
}

// ---- sequences that are kept, or have a common beginning -------------------------------------------------------

std::unique_ptr<LayerState> RecurrentState::kept(int n_past) {
    auto kept = std::make_unique<RecurrentState>(memory_);
    kept->share(*this, n_past);
    kept->give_back_rows(kept->committed_);
    return kept;
}

void RecurrentState::share(const LayerState& other, int n_past) {
    const RecurrentState& theirs = static_cast<const RecurrentState&>(other);
    RecurrentTable table = theirs.table_;
    std::vector<int> rows;
    if (theirs.is_torn()) {
        table.entries.pop_back();
    } else if (n_past > table.base_position()) {
        const auto n = std::min<std::ptrdiff_t>(n_past, theirs.length()) - table.base_position();
        rows.assign(theirs.committed_.begin(), theirs.committed_.begin() + n);
    }
    while (!table.empty() && (table.base_position() > n_past || n_past == 0)) table.entries.pop_back();
    for (const RecurrentTable::Entry& entry : table.entries) memory_.slots.share(entry.slot);
    for (const int row : rows) memory_.rows.share(row);
    clear();
    table_ = std::move(table);
    committed_ = std::move(rows);
    marked_ = kNone;
}
