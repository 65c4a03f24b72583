// A second executor of experts beside the CPU, such as a GPU that holds some of them (HybriMoE, arXiv:2504.05897).
//
// In each layer a pass calls choose, then start while the CPU begins with what is left to it, and finish when the CPU is
// done; each by one thread. What the device gives takes the place of what the CPU would have computed, so the order of
// the sum over experts is the same.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

class ExpertTier {
public:
    // An expert that the device computes. Its rows are first_row .. first_row + n_rows - 1 of those of all experts.
    struct Taken {
        int32_t expert;
        int n_rows, first_row;
    };

    virtual ~ExpertTier() = default;

    // wanted: experts of a layer, each once. n_rows: of each expert of the layer, how many rows want it. Puts those that
    // the device takes last, and gives how many are left to the CPU.
    virtual int choose(int layer, std::span<int32_t> wanted, const int32_t* n_rows) = 0;
    // Begins to compute what was taken. rows: of all experts, which row of h each is. h: inputs of experts, ld apart.
    virtual void start(int layer, const int32_t* rows, const float* h, size_t ld) = 0;
    // Waits for the outputs, without weights, and writes them to their rows of out, ld apart. Gives false if the device
    // failed: then nothing was written, and the CPU has to compute them.
    virtual bool finish(float* out, size_t ld) = 0;
    // Whether one of these raised something, so that the pass has to stop; rethrow raises it, once.
    virtual bool has_raised() const = 0;
    virtual void rethrow() = 0;

    // Of the layer at hand, in the order of `wanted`.
    std::vector<Taken> taken;
};
