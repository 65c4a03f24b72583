// The work of a layer's experts on the rows of a pass, cut into tasks. All of it is one phase of the pool: threads take
// tasks in their order, and a task waits only for what tasks before it compute.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/kernels.h"
#include "kernels/matrix.h"

// Row groups of gate and up in one task at most.
constexpr int kMostTaskGroups = 32;

// Of one network, and the rows that it computes: an expert, or the shared one.
struct ExpertWork {
    static constexpr int kShared = -1;

    int expert;                           // its index in the layer, or kShared
    int n_rows;                           // that want it
    int first_row;                        // of them in the arrays of ExpertRows
    const int32_t* columns;               // (n_rows,) which rows of the pass they are; null for all of them
    const Matrix *gate, *up, *down;       // data is null for experts: see record
    int groups_of_up, groups_of_down;     // of a task
    std::atomic<const uint8_t*> record;   // null until the expert was waited for
    std::atomic<int> up_left, down_left;  // tasks that are not done
    std::atomic<bool> is_activated;       // gate and up are done, and inputs of down made of them
};

// Which network a task is of, and which row groups of its matrices it computes.
struct ExpertTask {
    int work;
    bool is_down;
    int first, last;
};

class ExpertTasks {
public:
    explicit ExpertTasks(int most_experts);

    // Begins the work on a layer.
    void clear() { n_works_ = n_segments_ = n_tasks_ = 0; }
    // Adds a network; what comes first is computed first.
    ExpertWork& add(int expert, int n_rows, int first_row, const int32_t* columns, const Matrix& gate, const Matrix& up,
                    const Matrix& down);
    // Cuts the work. n_ready: networks that need not be waited for; they come first.
    void plan(int n_ready, int n_threads, const Kernels& kernels);

    int count() const { return n_tasks_; }
    // The first task of a network that may have to be waited for; 0 if there is none.
    int first_waiting() const { return first_waiting_; }
    ExpertTask at(int task) const;
    int n_works() const { return n_works_; }
    ExpertWork& work(int i) const { return works_[i]; }

private:
    // Consecutive tasks of one network.
    struct Segment {
        int first_task, work;
        bool is_down;
    };

    void add_segment(int work, bool is_down);

    int n_works_ = 0, n_segments_ = 0, n_tasks_ = 0, first_waiting_ = 0;
    std::unique_ptr<ExpertWork[]> works_;
    std::unique_ptr<Segment[]> segments_;
};
