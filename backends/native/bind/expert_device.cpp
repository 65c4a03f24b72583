// A second executor of experts that Python brings along.
#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>

#include "bind/bindings.h"
#include "decoder.h"
#include "experts/device.h"

namespace {

using Outputs = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Calls methods of a Python object; see ExpertDevice in backends/base.py. What it raises stops the pass.
class PythonExpertDevice : public ExpertDevice {
public:
    PythonExpertDevice(nb::object device, const DecoderConfig& config) : expert_device_(std::move(device)) {
        for (const LayerConfig& layer : config.layers) {
            n_in_of_.push_back(static_cast<size_t>(layer.experts() ? layer.experts()->n_in(config.n_embd) : 0));
        }
    }
    ~PythonExpertDevice() override {
        HeldGil acquire;
        expert_device_.reset();
        raised_ = nullptr;
    }

    int choose(int layer, std::span<int32_t> needed, const int32_t* n_rows) override {
        taken.clear();
        std::vector<int> rows;
        for (const int32_t expert : needed) rows.push_back(n_rows[expert]);
        const std::vector<int32_t> experts(needed.begin(), needed.end());
        std::vector<int32_t> found;
        call([&] { found = nb::cast<std::vector<int32_t>>(expert_device_.attr("choose")(layer, experts, rows)); });
        const auto is_left = [&](int32_t e) { return std::find(found.begin(), found.end(), e) == found.end(); };
        return static_cast<int>(std::stable_partition(needed.begin(), needed.end(), is_left) - needed.begin());
    }

    void start(int layer, const int32_t* rows, const float* h, size_t ld) override {
        std::vector<int32_t> experts;
        std::vector<int> n_rows;
        size_t n = 0;
        n_in_ = n_in_of_[static_cast<size_t>(layer)];
        for (const Taken& each : taken) {
            experts.push_back(each.expert);
            n_rows.push_back(each.n_rows);
            n += static_cast<size_t>(each.n_rows);
        }
        call([&] {
            auto* inputs = new std::vector<float>(n * n_in_);
            const nb::capsule owner(inputs, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
            float* to = inputs->data();
            for (const Taken& each : taken) {
                for (int i = 0; i < each.n_rows; i++, to += n_in_) {
                    const float* from = h + static_cast<size_t>(rows[each.first_row + i]) * ld;
                    std::memcpy(to, from, sizeof(float) * n_in_);
                }
            }
            const nb::ndarray<nb::numpy, float, nb::ndim<2>> array(inputs->data(), {n, n_in_}, owner);
            expert_device_.attr("start")(layer, experts, n_rows, array);
        });
    }

    bool finish(float* out, size_t ld) override {
        bool is_done = false;
        call([&] {
            const nb::object found = expert_device_.attr("finish")();
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
        if (rows.shape(0) != n || rows.shape(1) != n_in_) throw nb::value_error("finish: rows of another shape");
        const float* from = rows.data();
        for (const Taken& each : taken) {
            for (int i = 0; i < each.n_rows; i++, from += n_in_) {
                std::memcpy(out + static_cast<size_t>(each.first_row + i) * ld, from, sizeof(float) * n_in_);
            }
        }
    }

    nb::object expert_device_;
    std::vector<size_t> n_in_of_;  // numbers of a row, by layer
    size_t n_in_ = 0;              // of those that were started
    std::exception_ptr raised_;
};

}  // namespace

void set_expert_device(Decoder& decoder, nb::object device) {
    std::shared_ptr<ExpertDevice> made;
    if (!device.is_none()) made = std::make_shared<PythonExpertDevice>(std::move(device), decoder.config());
    ReleasedGil release;  // a pass that runs may need the lock before it ends
    decoder.set_expert_device(std::move(made));
}
