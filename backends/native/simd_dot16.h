// Part of the simd_*.h whose dot product of bytes, vpmaddubsw, sums in 16 bits.
#pragma once

namespace {

// Two products of a code and an activation, 2 * 127 * the largest code, as often as 16 bits hold them.
template <int BITS>
constexpr int kDots = BITS == 8 ? 1 : 128 >> BITS;

// Of 16 activations, those in each of a lane's two sums, the first in the low half. Four dots of codes that stand 32 above
// the true ones may wrap around, but with this taken off they end within 16 bits: 8 * 32 * 127.
EI_INLINE int32_t centre_16(const int8_t* a, int32_t sum) {
    int second = 0;
    for (int i = 0; i < 16; i += 4) second += a[i + 2] + a[i + 3];
    const int first = sum - second;
    return static_cast<int32_t>(static_cast<uint32_t>(-32 * second) << 16 |
                                (static_cast<uint32_t>(-32 * first) & 0xffff));
}

}  // namespace
