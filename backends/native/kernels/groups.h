// Several row groups at once, for instruction sets where an activation that was loaded should serve more than one product;
// part of kernels.cpp. The functions of simd_*.h that matrix products are made of, for each of G groups. With G = 1 the
// types are those of simd_*.h, and nothing is added.
#pragma once

namespace {

// One of T for each of G row groups.
template <class T, int G>
struct Groups {
    T of[G];

    Groups() = default;
    EI_INLINE Groups(T same) {
        for (T& each : of) each = same;
    }
};

// What the codes of MXFP4 stand for, above zero, and the scales of 16 rows. Below exponent 2 a scale is subnormal, and the
// larger of the two.
EI_INLINE U8 mxfp4_codes(U8 codes) { return look_up(codes, kMxfp4Codes); }
EI_INLINE F32 load_mxfp4_scales(const uint8_t* p) {
    const I32 e = load_u8_as_i32(p);
    const I32 normal = shl_i32(add_i32(e, set_i32(-1)), 23), subnormal = shl_i32(add_i32(e, set_i32(1)), 21);
    return as_f32(max_i32(normal, subnormal));
}

// A place in each of G row groups that follow each other.
template <int G>
struct Places {
    const uint8_t* first;
    size_t group_bytes;

    EI_INLINE Places operator+(size_t n) const { return {first + n, group_bytes}; }
    EI_INLINE Places& operator+=(size_t n) {
        first += n;
        return *this;
    }
};

template <class T, int G>
using Of = std::conditional_t<G == 1, T, Groups<T, G>>;
template <int G>
using At = std::conditional_t<G == 1, const uint8_t*, Places<G>>;

template <int G>
EI_INLINE At<G> places(const uint8_t* first, [[maybe_unused]] size_t group_bytes) {
    if constexpr (G == 1) {
        return first;
    } else {
        return {first, group_bytes};
    }
}

template <class T>
constexpr int kGroups = 1;
template <class T, int G>
constexpr int kGroups<Groups<T, G>> = G;
template <int G>
constexpr int kGroups<Places<G>> = G;

template <class T>
EI_INLINE const T& of_group(const T& same, int) {
    return same;
}
template <class T, int G>
EI_INLINE const T& of_group(const Groups<T, G>& each, int g) {
    return each.of[g];
}
template <int G>
EI_INLINE const uint8_t* of_group(const Places<G>& each, int g) {
    return each.first + static_cast<size_t>(g) * each.group_bytes;
}

#define EI_FOR_GROUPS(name)                                                                      \
    template <class... X>                                                                        \
        requires((kGroups<X> > 1) || ...)                                                        \
    EI_INLINE auto name(const X&... x) {                                                         \
        constexpr int n = std::max({kGroups<X>...});                                             \
        Groups<decltype(name(of_group(x, 0)...)), n> all;                                        \
        _Pragma("GCC unroll 4") for (int g = 0; g < n; g++) all.of[g] = name(of_group(x, g)...); \
        return all;                                                                              \
    }
EI_FOR_GROUPS(load_u8)
EI_FOR_GROUPS(load_f16)
EI_FOR_GROUPS(load_scale)
EI_FOR_GROUPS(load_scale_pair)
EI_FOR_GROUPS(load_u8_as_i16)
EI_FOR_GROUPS(load_i8_as_i16)
EI_FOR_GROUPS(even_scale)
EI_FOR_GROUPS(odd_scale)
EI_FOR_GROUPS(and_u8)
EI_FOR_GROUPS(or_u8)
EI_FOR_GROUPS(codes8)
EI_FOR_GROUPS(mxfp4_codes)
EI_FOR_GROUPS(load_mxfp4_scales)
EI_FOR_GROUPS(dot)
EI_FOR_GROUPS(dot8)
EI_FOR_GROUPS(dot2)
EI_FOR_GROUPS(add_dot)
EI_FOR_GROUPS(add_dot_times)
EI_FOR_GROUPS(add_pair_times)
EI_FOR_GROUPS(add_int16_times)
EI_FOR_GROUPS(even_low)
EI_FOR_GROUPS(odd_low)
EI_FOR_GROUPS(add_i32)
EI_FOR_GROUPS(shl_i32)
EI_FOR_GROUPS(to_f32)
EI_FOR_GROUPS(mul_f32)
EI_FOR_GROUPS(fma_f32)
EI_FOR_GROUPS(fnma_f32)
#undef EI_FOR_GROUPS

template <int N, class T, int G>
EI_INLINE Groups<T, G> shl_u16(const Groups<T, G>& v) {
    Groups<T, G> all;
    for (int g = 0; g < G; g++) all.of[g] = shl_u16<N>(v.of[g]);
    return all;
}
template <int N, class T, int G>
EI_INLINE Groups<T, G> shr_u16(const Groups<T, G>& v) {
    Groups<T, G> all;
    for (int g = 0; g < G; g++) all.of[g] = shr_u16<N>(v.of[g]);
    return all;
}

// The scale of each row, as the products of I2_S begin.
EI_INLINE F32 load_row_scales(const uint8_t* p) { return load_f32(reinterpret_cast<const float*>(p)); }
template <int G>
EI_INLINE Groups<F32, G> load_row_scales(const Places<G>& at) {
    Groups<F32, G> all;
    for (int g = 0; g < G; g++) all.of[g] = load_row_scales(of_group(at, g));
    return all;
}

}  // namespace
