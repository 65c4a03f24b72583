// A device outside of this engine, such as an FPGA or its simulation, that multiplies with ternary matrices of one scale a
// row and activations of one scale a token (I2_S). It gives the integer sums. Scaling them is done here, in the order of
// the kernels, so the results are theirs to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/matrix.h"

// y = x w^T with the device's matrix of that number, whole: x (n_rows, n_in), y (n_rows, n_out). Called by one thread at a
// time, without Python's lock. Gives false if the device failed.
using DeviceProduct = bool (*)(void* state, int32_t matrix, const int8_t* x, int32_t n_rows, int32_t* y);

class ProductDevice {
public:
    ProductDevice(DeviceProduct product, void* state) : product_(product), state_(state) {}

    // The product with row groups first..last-1 of w, which must be all, and n columns prepared by token; see
    // Kernels::matmul. stops: asked before each few columns. Gives false if it is to stop, or the device failed.
    bool multiply(const Matrix& w, const Inputs& x, int n, float* y, size_t ldy, const std::function<bool()>& stops);

    // Memory that it takes for a matrix of n_out rows.
    static size_t n_bytes(int n_out) { return sizeof(int32_t) * kColumns * static_cast<size_t>(n_out); }
    // What failed since this was last asked, "" for nothing.
    std::string take_failure();

private:
    static constexpr int kColumns = 4;  // at once, so that a slow device can be interrupted

    DeviceProduct product_;
    void* state_;
    std::mutex running_;
    std::vector<int32_t> sums_;
    std::string failure_;
};
