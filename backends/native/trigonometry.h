// sin and cos of our own: libm's differ between machines, and every bit of the text would depend on them.
#pragma once

#include <cmath>

namespace {

// To about 1e-16 for 0 <= x < 2^22 or so: rotary angles. Reduction by pi/2 in three parts (Cody and Waite), then the
// Taylor polynomials on [-pi/4, pi/4].
inline void sin_cos(double x, double& sine, double& cosine) {
    const double shifted = std::fma(x, 0.63661977236758134308, 6755399441055744.0);  // 2/pi; 1.5 * 2^52 rounds
    const double n = shifted - 6755399441055744.0;
    double r = std::fma(-n, 1.57079632673412561417e+00, x);
    r = std::fma(-n, 6.07710050630396597660e-11, r);
    r = std::fma(-n, 2.02226624879595063154e-21, r);
    const double z = r * r;
    double s = -7.6471637318198164759e-13, c = 4.7794773323873852974e-14;
    constexpr double kSine[] = {1.6059043836821614599e-10,  -2.5052108385441718775e-08, 2.7557319223985890653e-06,
                                -1.9841269841269841270e-04, 8.3333333333333333333e-03,  -1.6666666666666666667e-01};
    constexpr double kCosine[] = {-1.1470745597729724714e-11,
                                  2.0876756987868098979e-09,
                                  -2.7557319223985890653e-07,
                                  2.4801587301587301587e-05,
                                  -1.3888888888888888889e-03,
                                  4.1666666666666666667e-02,
                                  -5.0e-01};
    for (const double k : kSine) s = std::fma(s, z, k);
    for (const double k : kCosine) c = std::fma(c, z, k);
    s = std::fma(s * z, r, r);
    c = std::fma(c, z, 1.0);
    switch (static_cast<long long>(n) & 3) {
        case 0: sine = s, cosine = c; return;
        case 1: sine = c, cosine = -s; return;
        case 2: sine = -s, cosine = -c; return;
        default: sine = -c, cosine = s; return;
    }
}

}  // namespace
