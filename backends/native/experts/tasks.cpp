#include "experts/tasks.h"

#include <algorithm>

namespace {

constexpr int tasks_of(int n_groups, int groups_each) { return (n_groups + groups_each - 1) / groups_each; }

// Row groups of one task, which reads group_bytes of each. With few rows it is a stream that is worth starting: longer
// than one of a layer's other products, as the experts of a layer are many tasks anyway. With many rows, what it reads
// stays in the core's cache while they go by. least_tasks: that there are at least, if possible.
int groups_of_task(const Matrix& w, size_t group_bytes, int n_rows, int least_tasks, int at_once) {
    constexpr size_t kInCache = size_t{192} << 10, kStream = size_t{800} << 10;
    const Prefetch& prefetch = prefetch_of(w, n_rows);
    const size_t bytes = prefetch.task ? std::max(kStream, static_cast<size_t>(prefetch.task)) : kInCache;
    const int n_groups = w.n_groups(), together = std::min(prefetch.at_once, at_once);
    const int most = std::min({kMostTaskGroups, n_groups, std::max(1, n_groups / least_tasks)});
    const int desired = std::clamp(static_cast<int>(bytes / group_bytes), 1, most);
    const int even = tasks_of(n_groups, tasks_of(n_groups, desired));  // as large as each other
    return std::min(kMostTaskGroups, tasks_of(even, together) * together);
}

}  // namespace

ExpertTasks::ExpertTasks(int most_experts)
    : works_(std::make_unique<ExpertWork[]>(static_cast<size_t>(most_experts) + 1)),
      segments_(std::make_unique<Segment[]>(2 * (static_cast<size_t>(most_experts) + 1))) {}

ExpertWork& ExpertTasks::add(int expert, int n_rows, int first_row, const int32_t* columns, const Matrix& gate,
                             const Matrix& up, const Matrix& down) {
    ExpertWork& work = works_[n_works_++];
    work.expert = expert;
    work.n_rows = n_rows;
    work.first_row = first_row;
    work.columns = columns;
    work.gate = &gate;
    work.up = &up;
    work.down = &down;
    work.record.store(nullptr, std::memory_order_relaxed);
    work.is_activated.store(false, std::memory_order_relaxed);
    return work;
}

// The down product of a network comes after the first products of the next one, so that nobody waits for them; but not
// if the next one may have to be waited for.
void ExpertTasks::plan(int n_ready, int n_threads, const Kernels& kernels) {
    constexpr int kTasksEach = 8;  // that a thread gets at least
    if (n_works_ == 0) return;     // a device computes all of them
    const int least_tasks = std::max(1, kTasksEach * n_threads / (2 * n_works_));
    for (int i = 0; i < n_works_; i++) {
        ExpertWork& work = works_[i];
        const int at_once = kernels.at_once(work.n_rows);
        const size_t up_bytes = work.gate->group_bytes + (work.up->n_out ? work.up->group_bytes : 0);
        work.groups_of_up = groups_of_task(*work.gate, up_bytes, work.n_rows, least_tasks, at_once);
        work.groups_of_down = groups_of_task(*work.down, work.down->group_bytes, work.n_rows, least_tasks, at_once);
        work.up_left.store(tasks_of(work.gate->n_groups(), work.groups_of_up), std::memory_order_relaxed);
        work.down_left.store(tasks_of(work.down->n_groups(), work.groups_of_down), std::memory_order_relaxed);
    }
    first_waiting_ = 0;
    for (int i = 0; i < n_works_; i++) {
        if (i == n_ready) first_waiting_ = n_tasks_;
        add_segment(i, false);
        if (i > 0 && i < n_ready) add_segment(i - 1, true);
        if (i + 1 >= n_ready || i + 1 == n_works_) add_segment(i, true);
    }
}

void ExpertTasks::add_segment(int work, bool is_down) {
    const ExpertWork& of = works_[work];
    segments_[n_segments_++] = {n_tasks_, work, is_down};
    n_tasks_ += (is_down ? of.down_left : of.up_left).load(std::memory_order_relaxed);
}

ExpertTask ExpertTasks::at(int task) const {
    const Segment* after = std::upper_bound(segments_.get(), segments_.get() + n_segments_, task,
                                            [](int t, const Segment& s) { return t < s.first_task; });
    const Segment& segment = after[-1];
    const ExpertWork& work = works_[segment.work];
    const int each = segment.is_down ? work.groups_of_down : work.groups_of_up;
    const int n_groups = (segment.is_down ? work.down : work.gate)->n_groups();
    const int first = (task - segment.first_task) * each;
    return {segment.work, segment.is_down, first, std::min(n_groups, first + each)};
}
