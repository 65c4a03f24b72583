// Part of the simd_*.h whose dot product of bytes, dot4, sums in 32 bits: what those of 16 bits have to do in two steps.
#pragma once

namespace {

using Dot = I32;
using Scale = I32;

template <int BITS>
constexpr int kDots = 8;

EI_INLINE Dot dot_zero() { return set_i32(0); }
EI_INLINE Dot dot_from(const int32_t* centre) { return set_i32(*centre); }
EI_INLINE int32_t centre_16(const int8_t*, int32_t sum) { return -32 * sum; }
EI_INLINE int32_t centre_32(const int8_t*, int32_t sum) { return -kMxfp4Offset * sum; }
EI_INLINE Dot dot(Dot d, U8 codes, const int8_t* a) { return dot4(d, codes, a); }
EI_INLINE I32 add_dot(I32 sum, Dot d) { return add_i32(sum, d); }
EI_INLINE I32 add_dot_times(I32 sum, Dot d, Scale scale) { return add_i32(sum, mul_i32(d, scale)); }

EI_INLINE Scale load_scale(const uint8_t* p) { return load_u8_as_i32(p); }
EI_INLINE Scale even_scale(I16 v) { return even_i16(v); }
EI_INLINE Scale odd_scale(I16 v) { return odd_i16(v); }

}  // namespace
