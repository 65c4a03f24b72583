#include "pass_rows.h"

#include <algorithm>

void PassRows::begin(std::span<const Sequence> sequences, int n_rows) {
    sequences_.clear();
    for (const Sequence& sequence : sequences)
        sequences_.push_back({sequence.rows.state, sequence.first, sequence.rows.n, sequence.rows.n_pending});
    is_rejected_.assign(static_cast<size_t>(n_rows), 0);
}

bool PassRows::commit(const SequenceState& state, std::span<const int32_t> path) {
    const auto sequence =
        std::find_if(sequences_.begin(), sequences_.end(), [&](const OfSequence& t) { return t.state == &state; });
    if (sequence == sequences_.end()) return false;
    const auto rejected = is_rejected_.begin() + sequence->first;
    std::fill(rejected, rejected + sequence->n, uint8_t{1});
    int n_kept = 0;
    for (const int32_t row : path) {
        const int i = row - sequence->n_pending;
        if (i < 0 || i >= sequence->n) continue;
        rejected[i] = 0;
        n_kept++;
    }
    const bool has_rejected = n_kept < sequence->n;
    sequences_.erase(sequence);  // its rows are decided
    return has_rejected;
}

std::vector<int32_t> PassRows::only_rejected(const int32_t* chosen, int n_used, int n_experts) const {
    constexpr uint8_t kRejected = 1, kKept = 2;
    std::vector<uint8_t> needed_by(static_cast<size_t>(n_experts), 0);
    for (int row = 0; row < n_rows(); row++) {
        const uint8_t kind = is_rejected(row) ? kRejected : kKept;
        for (int i = 0; i < n_used; i++) needed_by[static_cast<size_t>(chosen[row * n_used + i])] |= kind;
    }
    std::vector<int32_t> experts;
    for (int e = 0; e < n_experts; e++) {
        if (needed_by[static_cast<size_t>(e)] == kRejected) experts.push_back(e);
    }
    return experts;
}
