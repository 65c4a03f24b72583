// Whose rows the last pass had, and which of them were rejected: to know which experts only rejected drafts needed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pass.h"

class PassRows {
public:
    void begin(std::span<const Sequence> sequences, int n_rows);
    int n_rows() const { return static_cast<int>(is_rejected_.size()); }
    bool is_rejected(int row) const { return is_rejected_[static_cast<size_t>(row)] != 0; }
    // A sequence commits some of its pending rows and drops the others. Gives whether any of these were in the pass;
    // sequences of a pass do this one after the other.
    bool commit(const SequenceState& state, std::span<const int32_t> path);

    // Gives the experts of a layer that only rejected rows needed. chosen: (n_rows, n_used).
    std::vector<int32_t> only_rejected(const int32_t* chosen, int n_used, int n_experts) const;

private:
    // first: row of the pass. n_pending: of the sequence's rows before it.
    struct OfSequence {
        const SequenceState* state;
        int first, n, n_pending;
    };

    std::vector<OfSequence> sequences_;
    std::vector<uint8_t> is_rejected_;  // by row
};
