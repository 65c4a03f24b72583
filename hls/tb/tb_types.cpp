// What ap_int, ap_uint and hls::stream compute, a line an operation. The output is the same with both kinds of headers.
#include <cstdio>

#include "ei_types.hpp"

namespace {

std::uint64_t random_bits() {  // SplitMix64
    static std::uint64_t state = 0;
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

// All bits random, or all but a few the same, as the largest and smallest numbers have them.
template <class T>
T random_number() {
    T number = 0;
    const int kind = static_cast<int>(random_bits() % 4);
    for (int bit = 0; bit < T::width; bit++) {
        const bool random = kind == 0 || bit < 2 || bit == T::width - 1;
        number[bit] = random ? random_bits() % 2 != 0 : kind == 1;
    }
    return number;
}

template <class T>
void show(const char* what, const T& number) {
    std::printf("%s %d:", what, T::width);
    for (int lo = (T::width - 1) & ~31; lo >= 0; lo -= 32) {
        const int hi = lo + 31 < T::width ? lo + 31 : T::width - 1;
        std::printf(" %x", static_cast<unsigned>(ap_uint<32>(number.range(hi, lo)).to_uint()));
    }
    std::printf("\n");
}

template <class A, class B>
void show_arithmetic() {
    for (int i = 0; i < 40; i++) {
        const A a = random_number<A>();
        const B b = random_number<B>();
        show("a", a), show("b", b);
        show("+", a + b), show("-", a - b), show("*", a * b), show("neg", -a);
        show("+int", a + 7), show("int-", -3 - b), show("*unsigned", a * 5u);
        std::printf("%d%d%d%d%d%d\n", a == b, a != b, a<b, a> b, a <= b, a >= b);
        std::printf("%d%d%d\n", a == -1, a < 3, a > 100);
        A c = a;
        show("+=", c += b), show("-=", c -= 100), show("*=", c *= b), show("++", ++c);
        std::printf("%d %u %lld\n", a.to_int(), b.to_uint(), static_cast<long long>(a.to_int64()));
    }
}

template <class A, class B>
void show_bits() {
    for (int i = 0; i < 40; i++) {
        const A a = random_number<A>();
        const B b = random_number<B>();
        show("a", a), show("b", b), show("as", A(b));
        show("&", a & b), show("|", a | b), show("^", a ^ b), show("~", ~a);
        std::printf("%d%d\n", a == b, a != A(b));
        const int n = static_cast<int>(random_bits() % (A::width + 3));
        show("<<", a << n), show(">>", a >> n);
        const int lo = static_cast<int>(random_bits() % A::width);
        const int hi = lo + static_cast<int>(random_bits() % static_cast<unsigned>(A::width - lo));
        A c = a;
        show("range", ap_uint<A::width>(a.range(hi, lo)));
        c.range(hi, lo) = b;
        show("range=", c);
        c.range(hi, lo) = static_cast<int>(lo);
        show("range=int", c);
        c[lo] = !a[lo];
        show("[]", c), show("<<=", c <<= n), show(">>=", c >>= 1);
        std::printf("%d%d\n", static_cast<bool>(a[hi]), static_cast<bool>(c[lo]));
    }
}

void show_stream() {
    hls::stream<ap_int<5>> stream("numbers");
    for (int i = 0; i < 3; i++) stream.write(ap_int<5>(31 - i));
    while (!stream.empty()) show("read", stream.read());
}

}  // namespace

int main() {
    show_arithmetic<ap_int<8>, ap_int<8>>();
    show_arithmetic<ap_int<10>, ap_uint<5>>();
    show_arithmetic<ap_uint<64>, ap_uint<40>>();
    show_bits<ap_int<8>, ap_int<12>>();
    show_bits<ap_int<65>, ap_uint<40>>();
    show_bits<ap_uint<320>, ap_int<128>>();
    show_stream();
}
