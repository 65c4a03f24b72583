// A second executor of experts that Python brings along.
#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>

#include "bind/bindings.h"
#include "decoder.h"
#include "experts/tier.h"

namespace {

using Outputs = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Calls methods of a Python object; see ExpertTier in backends/base.py. What it raises stops the pass.
class PythonTier : public ExpertTier {
public:
    PythonTier(nb::object tier, int n_embd) : tier_(std::move(tier)), n_embd_(static_cast<size_t>(n_embd)) {}
    ~PythonTier() override {
        HeldGil acquire;
        tier_.reset();
        raised_ = nullptr;
    }

    int choose(int layer, std::span<int32_t> wanted, const int32_t* n_rows) override {
        taken.clear();
        std::vector<int> rows;
        for (const int32_t expert : wanted) rows.push_back(n_rows[expert]);
        const std::vector<int32_t> experts(wanted.begin(), wanted.end());
        std::vector<int32_t> found;
        call([&] { found = nb::cast<std::vector<int32_t>>(tier_.attr("choose")(layer, experts, rows)); });
        const auto is_left = [&](int32_t e) { return std::find(found.begin(), found.end(), e) == found.end(); };
        return static_cast<int>(std::stable_partition(wanted.begin(), wanted.end(), is_left) - wanted.begin());
    }

    void start(int layer, const int32_t* rows, const float* h, size_t ld) override {
        std::vector<int32_t> experts;
        std::vector<int> n_rows;
        size_t n = 0;
        for (const Taken& each : taken) {
            experts.push_back(each.expert);
            n_rows.push_back(each.n_rows);
            n += static_cast<size_t>(each.n_rows);
        }
        call([&] {
            auto* inputs = new std::vector<float>(n * n_embd_);
            const nb::capsule owner(inputs, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
            float* to = inputs->data();
            for (const Taken& each : taken) {
                for (int i = 0; i < each.n_rows; i++, to += n_embd_) {
                    const float* from = h + static_cast<size_t>(rows[each.first_row + i]) * ld;
                    std::memcpy(to, from, sizeof(float) * n_embd_);
                }
            }
            const nb::ndarray<nb::numpy, float, nb::ndim<2>> array(inputs->data(), {n, n_embd_}, owner);
            tier_.attr("start")(layer, experts, n_rows, array);
        });
    }

    bool finish(float* out, size_t ld) override {
        bool is_done = false;
        call([&] {
            const nb::object found = tier_.attr("finish")();
            if (found.is_none()) return;
            write(nb::cast<Outputs>(found), out, ld);
            is_done = true;
        });
        return is_done;
    }

    bool has_raised() const override { return raised_ != nullptr; }

    void rethrow() override {
        if (raised_) std::rethrow_exception(std::exchange(raised_, nullptr));
    }

private:
    // One thread of a pass, with the interpreter's lock. An exception is kept for the end of the pass.
    template <class Call>
    void call(const Call& run) {
        HeldGil acquire;
        stay_if_thread_ends([&] {
            try {
                run();
            } catch (const std::exception&) {
                raised_ = std::current_exception();
            }
        });
    }

    void write(const Outputs& rows, float* out, size_t ld) const {
        size_t n = 0;
        for (const Taken& each : taken) n += static_cast<size_t>(each.n_rows);
        if (rows.shape(0) != n || rows.shape(1) != n_embd_) throw nb::value_error("finish: rows of another shape");
        const float* from = rows.data();
        for (const Taken& each : taken) {
            for (int i = 0; i < each.n_rows; i++, from += n_embd_) {
                std::memcpy(out + static_cast<size_t>(each.first_row + i) * ld, from, sizeof(float) * n_embd_);
            }
        }
    }

    nb::object tier_;
    size_t n_embd_;
    std::exception_ptr raised_;
};

}  // namespace

void set_tier(Decoder& decoder, nb::object tier) {
    std::shared_ptr<ExpertTier> made;
    if (!tier.is_none()) made = std::make_shared<PythonTier>(std::move(tier), decoder.config().n_embd);
    ReleasedGil release;  // a pass that runs may want the lock before it ends
    decoder.set_tier(std::move(made));
}
