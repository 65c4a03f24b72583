// Part of the simd_*.h where a product in 32 bits costs no more than one in 16.
#pragma once

namespace {

constexpr Int16Scaling kInt16Scaling = Int16Scaling::None;
EI_INLINE bool all_fit_int16(const int8_t*) { return false; }

}  // namespace
