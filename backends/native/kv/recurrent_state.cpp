#include "kv/recurrent_state.h"

#include <algorithm>
#include <stdexcept>

namespace {

// Those that a text needs: the state before a pass, and the one after it.
constexpr int kLeastSlots = 2;
constexpr size_t kCheckpointBytes = size_t{64} << 20;
constexpr int kFewestCheckpoints = 2, kMostCheckpoints = 16;
// Rows of committed tokens, and those of the pass that applies them.
constexpr int kRows = 2 * RecurrentState::kMostRows;
constexpr size_t kHugeSlot = size_t{8} << 20;  // bytes of a slot from which on huge pages lose little

}  // namespace

// ---- memory ----------------------------------------------------------------------------------------------------

size_t RecurrentState::slot_floats(const RecurrentSizes& sizes, int n_layers) {
    return sizes.state_floats() * static_cast<size_t>(n_layers);
}

int RecurrentState::n_slots(const RecurrentSizes& sizes, int n_layers) {
    const size_t fitting = kCheckpointBytes / (sizeof(float) * slot_floats(sizes, n_layers));
    return kLeastSlots + std::clamp(static_cast<int>(std::min<size_t>(fitting, kMostCheckpoints)), kFewestCheckpoints,
                                    kMostCheckpoints);
}

size_t RecurrentState::n_bytes(const RecurrentSizes& sizes, int n_layers) {
    const size_t rows = sizes.row_floats() * static_cast<size_t>(n_layers) * kRows;
    return sizeof(float) * (slot_floats(sizes, n_layers) * static_cast<size_t>(n_slots(sizes, n_layers)) + rows);
}

RecurrentState::RecurrentState(const RecurrentSizes& sizes, int n_layers)
    : sizes_(sizes),
      n_layers_(n_layers),
      states_(sizeof(float) * slot_floats(sizes, n_layers) * static_cast<size_t>(n_slots(sizes, n_layers)),
              sizeof(float) * slot_floats(sizes, n_layers) >= kHugeSlot),
      rows_(sizeof(float) * sizes.row_floats() * static_cast<size_t>(n_layers) * kRows, false),
      users_(static_cast<size_t>(n_slots(sizes, n_layers))),
      done_(static_cast<size_t>(n_layers) * static_cast<size_t>(sizes.n_parts())) {
    for (int i = n_slots(sizes, n_layers); i-- > 0;) free_.push_back(i);
    for (int i = kRows; i-- > 0;) free_rows_.push_back(i);
}

size_t RecurrentState::used_bytes() const {
    const size_t rows = sizes_.row_floats() * static_cast<size_t>(n_layers_) * static_cast<size_t>(n_rows_touched_);
    return sizeof(float) * (slot_floats(sizes_, n_layers_) * static_cast<size_t>(n_touched_) + rows);
}

float* RecurrentState::at(int slot, int layer) const {
    if (slot < 0) return nullptr;
    const size_t state = static_cast<size_t>(slot) * static_cast<size_t>(n_layers_) + static_cast<size_t>(layer);
    return reinterpret_cast<float*>(states_.data()) + state * sizes_.state_floats();
}

float* RecurrentState::row(int layer, int row) const {
    const size_t number = static_cast<size_t>(row) * static_cast<size_t>(n_layers_) + static_cast<size_t>(layer);
    return reinterpret_cast<float*>(rows_.data()) + number * sizes_.row_floats();
}

int RecurrentState::take() {
    const int slot = free_.back();
    free_.pop_back();
    users_[static_cast<size_t>(slot)] = 1;
    n_touched_ = std::max(n_touched_, slot + 1);
    return slot;
}

void RecurrentState::give_back(int slot) {
    if (--users_[static_cast<size_t>(slot)] == 0) free_.push_back(slot);
}

// What a pass needs: reserved, or free since it dropped what was pending.
int RecurrentState::take_spare() {
    if (spares_.empty()) return take();
    const int slot = spares_.back();
    spares_.pop_back();
    return slot;
}

int RecurrentState::take_row() {
    const int row = free_rows_.back();
    free_rows_.pop_back();
    n_rows_touched_ = std::max(n_rows_touched_, row + 1);
    return row;
}

void RecurrentState::give_back_rows(std::vector<int>& rows) {
    free_rows_.insert(free_rows_.end(), rows.rbegin(), rows.rend());
    rows.clear();
}

// Gives up the checkpoint whose loss costs least: the gap that it leaves is small beside how far back it is.
bool RecurrentState::thin() {
    if (table_.size() < 2) return false;
    size_t least = 0;
    double least_cost = 0;
    for (size_t i = 0; i + 1 < table_.size(); i++) {
        const int before = i ? table_[i - 1].position : 0, after = table_[i + 1].position;
        const double cost = static_cast<double>(after - before) / (length() - table_[i].position + 1);
        if (i && cost >= least_cost) continue;
        least = i;
        least_cost = cost;
    }
    give_back(table_[least].slot);
    table_.erase(table_.begin() + static_cast<std::ptrdiff_t>(least));
    return true;
}

// A pass may need a place for the state after the committed rows, or for a tip.
void RecurrentState::reserve(int n_past, int n_slots, const DropParked& drop_parked) {
    settle();
    const bool needs_tip = n_slots - n_past > kMostRows && tip_ < 0;
    const bool needs_target = !committed_.empty() && target_ < 0;
    const size_t needed = static_cast<size_t>(needs_tip) + static_cast<size_t>(needs_target);
    while (spares_.size() < needed) {
        while (!has_free()) {
            if (!thin()) drop_parked();
        }
        spares_.push_back(take());
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
    return is_chain || n_nodes <= kMostRows;
}

void RecurrentState::begin(const int32_t* parents, int n_pending, int n) {
    settle();
    if (n_pending < n_tip_ || n_pending == 0) drop_pending();
    while (static_cast<int>(nodes_.size()) > n_pending - n_tip_) {
        free_rows_.push_back(nodes_.back());
        nodes_.pop_back();
    }
    plan_ = {};
    plan_.n_old = static_cast<int>(nodes_.size());
    plan_.n_nodes = plan_.n_old + n;
    plan_.is_chain = plan_.n_nodes > kMostRows;
    plan_.snapshot = kNone;
    for (int i = n_tip_; i < n_pending + n; i++) plan_.parents.push_back(parents[i] - n_tip_);
    source_ = n_tip_ ? tip_ : table_.empty() ? kNone : table_.back().slot;
    if (n_tip_ == 0) plan_.committed = committed_;
    if (!plan_.is_chain) {
        for (int i = 0; i < n; i++) nodes_.push_back(take_row());
        plan_.rows = nodes_;
        if (!plan_.committed.empty() && target_ < 0) {
            const bool is_kept =
                base_position() == marked_ || table_.empty() || users_[static_cast<size_t>(table_.back().slot)] > 1;
            target_ = is_kept ? take_spare() : table_.back().slot;
        }
        add_steps();
    } else {
        plan_.rows = nodes_;
        give_back_rows(nodes_);
        if (tip_ < 0) tip_ = take_spare();
        take_snapshot(n_pending, n);
        n_tip_ = n_pending + n;
    }
    for (const int spare : spares_) give_back(spare);
    spares_.clear();
}

// A checkpoint kBack tokens before the end of a chain, if there is a place for it.
void RecurrentState::take_snapshot(int n_pending, int n) {
    const int node = plan_.n_nodes - kBack - 1;
    if (node < plan_.n_old || n <= kBack) return;
    if (snapshot_ < 0) {
        if (!has_free() && !thin()) return;
        if (!has_free()) return;
        snapshot_ = take();
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
    return target_ >= 0 && !table_.empty() && table_.back().slot == target_ &&
           std::find(done_.begin(), done_.end(), 1) != done_.end();
}

// After a pass that was whole, its target is the base.
void RecurrentState::settle() {
    if (target_ < 0 || std::find(done_.begin(), done_.end(), 0) != done_.end()) return;
    keep_base_or_drop(length(), target_);
    target_ = kNone;
    std::fill(done_.begin(), done_.end(), uint8_t{0});
    give_back_rows(committed_);
}

// A new base. The one before stays, as a checkpoint, where that was asked for, or costs nothing.
void RecurrentState::keep_base_or_drop(int next_position, int next_slot) {
    if (!table_.empty()) {
        const Entry base = table_.back();
        const bool is_wanted = base.position == marked_ || users_[static_cast<size_t>(base.slot)] > 1;
        if (base.slot == next_slot) {
            table_.pop_back();
        } else if (!is_wanted) {
            give_back(base.slot);
            table_.pop_back();
        }
    }
    table_.push_back({next_position, next_slot});
}

void RecurrentState::drop_target() {
    if (target_ >= 0 && (table_.empty() || table_.back().slot != target_)) give_back(target_);
    target_ = kNone;
    std::fill(done_.begin(), done_.end(), uint8_t{0});
}

void RecurrentState::drop_pending() {
    for (int* slot : {&tip_, &snapshot_}) {
        if (*slot >= 0) give_back(*slot);
        *slot = kNone;
    }
    n_tip_ = 0;
    give_back_rows(nodes_);
}

void RecurrentState::commit(int n_past, const int32_t* path, int n) {
    settle();
    if (!can_commit(n) || (n && n_tip_ && path[n_tip_ - 1] != n_tip_ - 1)) {
        throw std::logic_error("a part of a chain is committed whose rows were not kept");
    }
    if (n && n_tip_) {
        drop_target();
        give_back_rows(committed_);
        if (snapshot_ >= 0) {
            keep_base_or_drop(snapshot_position_, snapshot_);
            marked_ = snapshot_position_;  // so that it is kept
            snapshot_ = kNone;
        }
        keep_base_or_drop(n_past + n_tip_, tip_);
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

int RecurrentState::reach(int n_past) const {
    if (n_past >= length()) return length();
    const bool has_base = !is_torn();
    if (has_base && n_past >= base_position()) return n_past;
    int reached = 0;
    for (size_t i = 0; i + (has_base ? 0 : 1) < table_.size(); i++) {
        if (table_[i].position <= n_past) reached = table_[i].position;
    }
    return reached;
}

void RecurrentState::truncate(int n_past) {
    drop_pending();
    if (n_past >= length()) return;
    const bool was_torn = is_torn(), has_base = !was_torn && n_past >= base_position();
    drop_target();
    if (was_torn) {
        give_back(table_.back().slot);
        table_.pop_back();
    }
    const int n_rows = has_base ? n_past - base_position() : 0;
    while (static_cast<int>(committed_.size()) > n_rows) {
        free_rows_.push_back(committed_.back());
        committed_.pop_back();
    }
    cut_table(table_, n_past);
}

// Drops the states after n_past tokens.
void RecurrentState::cut_table(Table& table, int n_past) {
    while (!table.empty() && (table.back().position > n_past || n_past == 0)) {
        give_back(table.back().slot);
        table.pop_back();
    }
}

// ---- parked sequences ------------------------------------------------------------------------------------------

void RecurrentState::park(int number, int n_past) {
    settle();
    Table kept = table_;
    if (is_torn()) {
        kept.pop_back();
    } else {
        drop_target();  // it might be the base, which is shared from now on
    }
    while (!kept.empty() && kept.back().position > n_past) kept.pop_back();
    for (const Entry& entry : kept) share(entry.slot);
    parked_.emplace_back(number, std::move(kept));
}

std::vector<std::pair<int, RecurrentState::Table>>::const_iterator RecurrentState::find(int number) const {
    return std::find_if(parked_.begin(), parked_.end(), [&](const auto& sequence) { return sequence.first == number; });
}

int RecurrentState::reach_parked(int number, int n_past) const {
    int reached = 0;
    if (const auto sequence = find(number); sequence != parked_.end()) {
        for (const Entry& entry : sequence->second) {
            if (entry.position <= n_past) reached = entry.position;
        }
    }
    return reached;
}

void RecurrentState::resume(int number, int n_past) {
    Table table;
    if (const auto sequence = find(number); sequence != parked_.end()) {
        for (const Entry& entry : sequence->second) {
            if (entry.position <= n_past) table.push_back(entry);
        }
    }
    for (const Entry& entry : table) share(entry.slot);
    truncate(0);
    table_ = std::move(table);
}

void RecurrentState::forget(int number) {
    const auto sequence = find(number);
    if (sequence == parked_.end()) return;
    for (const Entry& entry : sequence->second) give_back(entry.slot);
    parked_.erase(sequence);
}
