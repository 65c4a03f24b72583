// Part of the simd_*.h where a product in 32 bits costs no more than one in 16.
#pragma once

namespace {

constexpr NarrowBy kNarrowBy = NarrowBy::None;
EI_INLINE bool all_narrow(const int8_t*) { return false; }

}  // namespace
