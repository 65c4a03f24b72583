// Part of the simd_*.h where two products in 32 bits cost no more than one of pairs in 16.
#pragma once

namespace {

constexpr bool kPairs = false;
EI_INLINE bool all_narrow(const int8_t*) { return false; }
EI_INLINE I16 load_scale_pair(const uint8_t* p) {
    uint8_t both[32];
    for (int i = 0; i < 16; i++) both[2 * i] = p[i], both[2 * i + 1] = p[16 + i];
    return load_u8_as_i16(both);
}
EI_INLINE I32 add_pair_times(I32 sum, Dot even, Dot odd, I16 scales) {
    return add_dot_times(add_dot_times(sum, even, even_scale(scales)), odd, odd_scale(scales));
}

}  // namespace
