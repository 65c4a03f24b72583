#include "product_device.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace {

// Of one output row; a row group begins with the scales of its rows (matrix.h).
float scale_of(const Matrix& w, int row) {
    float scale;
    std::memcpy(&scale, w.data + static_cast<size_t>(row / kRows) * w.group_bytes + sizeof scale * (row % kRows),
                sizeof scale);
    return scale;
}

}  // namespace

bool ProductDevice::multiply(const Matrix& w, const Inputs& x, int n, float* y, size_t ldy,
                             const std::function<bool()>& stops) {
    const size_t n_in = static_cast<size_t>(w.n_in), n_out = static_cast<size_t>(w.n_out);
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    sums_.resize(std::max(sums_.size(), kColumns * n_out));  // see n_bytes
    for (int first = 0; first < n; first += kColumns) {
        const size_t count = static_cast<size_t>(std::min(kColumns, n - first)), at = static_cast<size_t>(first);
        if (!failure_.empty() || stops()) return false;
        if (!product_(state_, w.number, x.q_token + at * n_in, static_cast<int32_t>(count), sums_.data())) {
            failure_ = "matrix " + std::to_string(w.number);
            return false;
        }
        for (size_t c = 0; c < count; c++) {
            const float x_scale = x.scale_token[at + c];
            for (size_t row = 0; row < n_out; row++) {
                const float sum = static_cast<float>(sums_[c * n_out + row]);
                y[(at + c) * ldy + row] = (sum * scale_of(w, static_cast<int>(row))) * x_scale;
            }
        }
    }
    return true;
}

std::string ProductDevice::take_failure() {
    const std::lock_guard<std::mutex> one_at_a_time(running_);
    return std::exchange(failure_, std::string());
}
