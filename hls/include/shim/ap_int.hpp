// ap_int<W> and ap_uint<W> of the vendor's ap_int.h, as far as the kernels use them: two's complement of any width W that
// wraps around; results as wide as the vendor's, so that none overflows; range(hi, lo) to read and write bits.
// Arithmetic and order take operands of 64 bits at most; bits, shifts and equality take any width. Numbers are ordered by
// their values: do not compare a negative one with an unsigned one, where the vendor's simulation is wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ei_shim {

__extension__ typedef __int128 Wide;
__extension__ typedef unsigned __int128 UnsignedWide;

constexpr int larger(int a, int b) { return a > b ? a : b; }

// The smallest type of the language that holds W bits, or the largest one.
template <int W, bool S>
using Native = std::conditional_t<
    W <= 8, std::conditional_t<S, std::int8_t, std::uint8_t>,
    std::conditional_t<W <= 16, std::conditional_t<S, std::int16_t, std::uint16_t>,
                       std::conditional_t<W <= 32, std::conditional_t<S, std::int32_t, std::uint32_t>,
                                          std::conditional_t<S, std::int64_t, std::uint64_t>>>>;

template <int W, bool S>
class Integer;

// Bits hi..lo of a number, to be read and written.
template <int W, bool S>
class Part {
public:
    Part(Integer<W, S>& of, int hi, int lo) : of_(of), hi_(hi), lo_(lo) {}
    Part(const Part&) = default;
    template <class T>
    Part& operator=(const T& value) {
        of_.write_bits(hi_, lo_, Integer<W, false>(value));
        return *this;
    }
    Part& operator=(const Part& other) { return *this = other.get(); }
    Integer<W, false> get() const { return of_.read_bits(hi_, lo_); }
    operator std::uint64_t() const { return get().to_uint64(); }
    int to_int() const { return get().to_int(); }
    unsigned to_uint() const { return get().to_uint(); }

private:
    Integer<W, S>& of_;
    int hi_, lo_;
};

template <int W, bool S>
class Integer {
    static_assert(W >= 1, "a number has a bit at least");

public:
    static constexpr int width = W, kWords = (W + 63) / 64;

    Integer() = default;
    template <class T, std::enable_if_t<std::is_integral<T>::value, int> = 0>
    Integer(T value) : Integer(static_cast<Wide>(value)) {}
    template <class T, std::enable_if_t<std::is_floating_point<T>::value, int> = 0>
    Integer(T value) = delete;  // the kernels round where they say so
    Integer(Wide value) {
        words_[0] = static_cast<std::uint64_t>(value);
        for (int i = 1; i < kWords; i++) words_[i] = static_cast<std::uint64_t>(i == 1 ? value >> 64 : value >> 127);
        extend();
    }
    template <int W2, bool S2>
    Integer(const Integer<W2, S2>& other) {
        for (int i = 0; i < kWords; i++) words_[i] = other.word(i);
        extend();
    }
    template <int W2, bool S2>
    Integer(const Part<W2, S2>& part) : Integer(part.get()) {}

    operator Native<W, S>() const { return static_cast<Native<W, S>>(words_[0]); }
    int to_int() const { return static_cast<int>(words_[0]); }
    unsigned to_uint() const { return static_cast<unsigned>(words_[0]); }
    std::int64_t to_int64() const { return static_cast<std::int64_t>(words_[0]); }
    std::uint64_t to_uint64() const { return words_[0]; }

    Part<W, S> range(int hi, int lo) { return {*this, hi, lo}; }
    Integer<W, false> range(int hi, int lo) const { return read_bits(hi, lo); }
    Part<W, S> operator[](int bit) { return {*this, bit, bit}; }
    bool operator[](int bit) const { return word_from(bit) & 1; }

    template <class T>
    Integer& operator+=(const T& b) {
        return *this = *this + b;
    }
    template <class T>
    Integer& operator-=(const T& b) {
        return *this = *this - b;
    }
    template <class T>
    Integer& operator*=(const T& b) {
        return *this = *this * b;
    }
    template <class T>
    Integer& operator&=(const T& b) {
        return *this = *this & b;
    }
    template <class T>
    Integer& operator|=(const T& b) {
        return *this = *this | b;
    }
    template <class T>
    Integer& operator^=(const T& b) {
        return *this = *this ^ b;
    }
    Integer& operator<<=(int n) { return *this = *this << n; }
    Integer& operator>>=(int n) { return *this = *this >> n; }
    Integer& operator++() { return *this += 1; }
    Integer& operator--() { return *this -= 1; }
    Integer operator<<(int n) const { return shifted(-n); }
    Integer operator>>(int n) const { return shifted(n); }
    Integer operator~() const {
        Integer r;
        for (int i = 0; i < kWords; i++) r.words_[i] = ~words_[i];
        return r.extend();
    }
    Integer<W + 1, true> operator-() const { return 0 - wide(); }
    bool operator!() const { return *this == 0; }

    // Bits 64 i and up, those past W as the sign has them.
    std::uint64_t word(int i) const {
        if (i < 0) return 0;
        return i < kWords ? words_[i] : S && words_[kWords - 1] >> 63 ? ~std::uint64_t{0} : 0;
    }
    Wide wide() const {
        static_assert(W <= 64, "arithmetic takes 64 bits at most: cut the operands with range()");
        return S ? static_cast<Wide>(static_cast<std::int64_t>(words_[0])) : static_cast<Wide>(words_[0]);
    }
    Integer<W, false> read_bits(int hi, int lo) const {
        Integer<W, false> r;
        for (int at = lo; at <= hi; at += 64) r.put(at - lo, larger(0, 63 - (hi - at)), word_from(at));
        return r;
    }
    void write_bits(int hi, int lo, const Integer<W, false>& value) {
        for (int at = lo; at <= hi; at += 64) put(at, larger(0, 63 - (hi - at)), value.word((at - lo) / 64));
        extend();
    }
    // Writes the word without its n_cut highest bits from bit `at` on.
    void put(int at, int n_cut, std::uint64_t value) {
        const std::uint64_t mask = ~std::uint64_t{0} >> n_cut;
        const int i = at / 64, shift = at % 64;
        words_[i] = (words_[i] & ~(mask << shift)) | (value & mask) << shift;
        if (shift == 0 || shift - n_cut <= 0) return;
        words_[i + 1] = (words_[i + 1] & ~(mask >> (64 - shift))) | (value & mask) >> (64 - shift);
    }
    template <class Op>
    static Integer by_word(const Integer& a, const Integer& b, Op op) {
        Integer r;
        for (int i = 0; i < kWords; i++) r.words_[i] = op(a.words_[i], b.words_[i]);
        return r.extend();
    }

private:
    Integer& extend() {
        constexpr int kUnused = 64 * kWords - W;
        std::uint64_t& top = words_[kWords - 1];
        top = S ? static_cast<std::uint64_t>(static_cast<std::int64_t>(top << kUnused) >> kUnused)
                : top << kUnused >> kUnused;
        return *this;
    }
    // 64 bits from any bit on; those below bit 0 are 0.
    std::uint64_t word_from(int bit) const {
        const int i = bit >> 6, shift = bit & 63;
        return shift == 0 ? word(i) : word(i) >> shift | word(i + 1) << (64 - shift);
    }
    Integer shifted(int down) const {
        Integer r;
        for (int i = 0; i < kWords; i++) r.words_[i] = word_from(64 * i + down);
        return r.extend();
    }

    std::uint64_t words_[kWords] = {};
};

// What operands are: numbers of this file, their parts, and those of the language.
template <class T>
struct Operand {
    static constexpr bool kOwn = false, kIs = std::is_integral<T>::value, S = std::is_signed<T>::value;
    static constexpr int W = std::is_same<T, bool>::value ? 1 : 8 * sizeof(T);
};
template <int N, bool SIGNED>
struct Operand<Integer<N, SIGNED>> {
    static constexpr bool kOwn = true, kIs = true, S = SIGNED;
    static constexpr int W = N;
};
template <int N, bool SIGNED>
struct Operand<Part<N, SIGNED>> : Operand<Integer<N, false>> {};

template <class A, class B>
struct Results {
    using X = Operand<A>;
    using Y = Operand<B>;
    static constexpr bool S = X::S || Y::S;
    static constexpr int W = larger(X::W + (Y::S && !X::S), Y::W + (X::S && !Y::S));
    using Left = Integer<X::W, X::S>;
    using Right = Integer<Y::W, Y::S>;
    using Sum = Integer<W + 1, S>;
    using Difference = Integer<W + 1, true>;
    using Product = Integer<X::W + Y::W, S>;
    using Bits = Integer<W, S>;
};

template <class A, class B>
using IfOperands =
    std::enable_if_t<(Operand<A>::kOwn || Operand<B>::kOwn) && Operand<A>::kIs && Operand<B>::kIs, Results<A, B>>;

template <class A, class B, class R = IfOperands<A, B>>
typename R::Sum operator+(const A& a, const B& b) {
    return typename R::Left(a).wide() + typename R::Right(b).wide();
}
template <class A, class B, class R = IfOperands<A, B>>
typename R::Difference operator-(const A& a, const B& b) {
    return typename R::Left(a).wide() - typename R::Right(b).wide();
}
template <class A, class B, class R = IfOperands<A, B>>
typename R::Product operator*(const A& a, const B& b) {
    const auto x = static_cast<UnsignedWide>(typename R::Left(a).wide());
    return static_cast<Wide>(x * static_cast<UnsignedWide>(typename R::Right(b).wide()));
}

#define EI_SHIM_BITS(OP)                                                                  \
    template <class A, class B, class R = IfOperands<A, B>>                               \
    typename R::Bits operator OP(const A& a, const B& b) {                                \
        return R::Bits::by_word(typename R::Left(a), typename R::Right(b),                \
                                [](std::uint64_t x, std::uint64_t y) { return x OP y; }); \
    }
EI_SHIM_BITS(&)
EI_SHIM_BITS(|)
EI_SHIM_BITS(^)
#undef EI_SHIM_BITS

template <class A, class B, class R = IfOperands<A, B>>
bool operator==(const A& a, const B& b) {
    const typename R::Sum x{typename R::Left(a)}, y{typename R::Right(b)};
    for (int i = 0; i < R::Sum::kWords; i++) {
        if (x.word(i) != y.word(i)) return false;
    }
    return true;
}
template <class A, class B, class R = IfOperands<A, B>>
bool operator!=(const A& a, const B& b) {
    return !(a == b);
}
template <class A, class B, class R = IfOperands<A, B>>
bool operator<(const A& a, const B& b) {
    return typename R::Left(a).wide() < typename R::Right(b).wide();
}
template <class A, class B, class R = IfOperands<A, B>>
bool operator>(const A& a, const B& b) {
    return b < a;
}
template <class A, class B, class R = IfOperands<A, B>>
bool operator<=(const A& a, const B& b) {
    return !(b < a);
}
template <class A, class B, class R = IfOperands<A, B>>
bool operator>=(const A& a, const B& b) {
    return !(a < b);
}

}  // namespace ei_shim

template <int W>
using ap_int = ei_shim::Integer<W, true>;
template <int W>
using ap_uint = ei_shim::Integer<W, false>;
