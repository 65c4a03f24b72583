// Searches for the scale of a run of weights, for as many runs side by side as there are lanes. They are those of ggml
// (quantize_* in ggml-quants.c), with the same float operations in the same order, so that the bytes are the same.
#pragma once

#include "lanes.h"

namespace {

constexpr float kNothing = 1e-15f;  // a run or a super-block whose largest number is smaller counts as zeros

// ---- w = scale q + minimum ----------------------------------------------------------------------------------------

// Inverse scales (first + width i + largest code) / range, i = 0..last.
struct Steps {
    float first, width;
    int last;
};

// What a run becomes, and the rounding that gave the codes: inverse * (w - lowest).
struct Affine {
    Floats scale, minimum, inverse, lowest;
    Floats sum_of_importance;

    EI_INLINE Floats code_of(Floats weight, float largest) const {
        return code(inverse * (weight - lowest), 0, largest);
    }
};

EI_INLINE Floats squared(Floats v) { return v * v; }

// Sums over a run with these codes: importance times q, q^2, and q x.
template <int n>
struct Moments {
    Floats codes[n], q, q2, qx;

    EI_INLINE Moments(const Floats (&x)[n], const Floats (&importance)[n], Floats inverse, Floats lowest, float largest)
        : q{}, q2{}, qx{} {
        for (int k = 0; k < n; k++) {
            codes[k] = code(inverse * (x[k] - lowest), 0, largest);
            const Floats wq = importance[k] * codes[k];
            q += wq;
            q2 += wq * codes[k];
            qx += wq * x[k];
        }
    }
};

// Codes 0..largest. The scale and minimum (at most 0) of each step are those of the least squares for its codes; the step
// of the smallest error wins, where error is a number's distance, or the square of it.
template <int n, class Error>
EI_INLINE Affine affine(const Floats (&x)[n], const Floats (&importance)[n], float largest, Steps steps, Error error) {
    Floats low = x[0], high = x[0], sum = importance[0], sum_x = sum * x[0];
    for (int k = 1; k < n; k++) {
        low = least(low, x[k]);
        high = most(high, x[k]);
        sum += importance[k];
        sum_x += importance[k] * x[k];
    }
    low = least(low, all(0));
    const Floats first = largest / (high - low);
    Affine best{1 / first, low, first, low, sum};
    Floats smallest{};
    for (int k = 0; k < n; k++)
        smallest += importance[k] * error(best.scale * best.code_of(x[k], largest) + low - x[k]);

    for (int i = 0; i <= steps.last; i++) {
        const float numerator = steps.first + steps.width * static_cast<float>(i) + largest;
        const Floats lowest = best.minimum;  // of the best until now, from which the next codes are counted
        const Floats inverse = numerator / (high - lowest);
        const Moments<n> of(x, importance, inverse, lowest, largest);
        const Floats determinant = sum * of.q2 - of.q * of.q;
        Floats scale = (sum * of.qx - sum_x * of.q) / determinant;
        Floats minimum = (of.q2 * sum_x - of.q * of.qx) / determinant;
        const Ints above = minimum > 0;
        minimum = choose(above, all(0), minimum);
        scale = choose(above, of.qx / of.q2, scale);
        Floats found{};
        for (int k = 0; k < n; k++) found += importance[k] * error(scale * of.codes[k] + minimum - x[k]);
        const Ints better = (determinant > 0) & (found < smallest);
        smallest = choose(better, found, smallest);
        best.scale = choose(better, scale, best.scale);
        best.minimum = choose(better, minimum, best.minimum);
        best.inverse = choose(better, inverse, best.inverse);
        best.lowest = choose(better, lowest, best.lowest);
    }
    const Ints is_flat = ~(first <= kLargestFloat);  // or so nearly that a float does not hold the inverse
    best.scale = choose(is_flat, all(0), best.scale);
    best.minimum = choose(is_flat, low, best.minimum);
    best.inverse = choose(is_flat, all(0), best.inverse);
    return best;
}

// ---- w = scale (q - n_negative) -----------------------------------------------------------------------------------

// The number of the largest magnitude, with its sign; of two the first.
template <int n>
EI_INLINE Floats signed_largest(const Floats (&x)[n]) {
    Floats size{}, largest{};
    for (int k = 0; k < n; k++) {
        const Ints larger = magnitude(x[k]) > size;
        size = choose(larger, magnitude(x[k]), size);
        largest = choose(larger, x[k], largest);
    }
    return largest;
}

// What a run becomes. Of zeros all codes are 0, and so is the scale.
struct Symmetric {
    Floats scale, inverse, offset;

    EI_INLINE Floats code_of(Floats weight, float n_negative) const {
        return code(inverse * weight, -n_negative, n_negative - 1) + offset;
    }
};

// Codes -n_negative..n_negative - 1, with n_negative added. Of 19 roundings that put the largest weight near
// -n_negative, the one whose least squares scale leaves the smallest error.
template <int n>
EI_INLINE Symmetric symmetric(const Floats (&x)[n], const Floats (&importance)[n], float n_negative) {
    const Floats largest = signed_largest(x);
    Symmetric best{{}, -n_negative / largest, all(n_negative)};
    Floats gain{};  // by which the error is smaller than that of zeros
    for (int i = 0; i < 19; i++) {
        const int step = i == 0 ? 0 : i <= 9 ? i - 10 : i - 9;  // 0, -9..-1, 1..9
        const Floats inverse = -(n_negative + 0.1f * static_cast<float>(step)) / largest;
        Floats qx{}, q2{};
        for (int k = 0; k < n; k++) {
            const Floats q = code(inverse * x[k], -n_negative, n_negative - 1);
            qx += importance[k] * x[k] * q;
            q2 += importance[k] * q * q;
        }
        const Ints better = i == 0 ? q2 > 0 : (q2 > 0) & (qx * qx > gain * q2);
        const Floats scale = qx / q2;
        best.scale = choose(better, scale, best.scale);
        best.inverse = choose(better, inverse, best.inverse);
        gain = choose(better, scale * qx, gain);
    }
    const Ints is_zero = magnitude(largest) < kNothing;
    best.scale = choose(is_zero, all(0), best.scale);
    best.inverse = choose(is_zero, all(0), best.inverse);
    best.offset = choose(is_zero, all(0), best.offset);
    return best;
}

// The same by descent, with importance x^2: codes (without n_negative added) are moved one at a time to where the least
// squares scale of the others has them, for as long as that helps and up to five times. Gives the scale.
template <int n>
EI_INLINE Floats descend(const Floats (&x)[n], Floats (&codes)[n], float n_negative) {
    const Floats largest = signed_largest(x), inverse = -n_negative / largest;
    Floats qx{}, q2{};
    for (int k = 0; k < n; k++) {
        codes[k] = code(inverse * x[k], -n_negative, n_negative - 1);
        qx += x[k] * x[k] * x[k] * codes[k];
        q2 += x[k] * x[k] * codes[k] * codes[k];
    }
    for (int round = 0; round < 5; round++) {
        Ints changed{};
        for (int k = 0; k < n; k++) {
            const Floats w = x[k] * x[k];
            Floats other_qx = qx - w * x[k] * codes[k], other_q2 = q2 - w * codes[k] * codes[k];
            const Floats moved = code(x[k] * other_q2 / other_qx, -n_negative, n_negative - 1);
            const Ints can_move = (other_qx > 0) & (moved != codes[k]);
            other_qx += w * x[k] * moved;
            other_q2 += w * moved * moved;
            const Ints better = can_move & (other_q2 > 0) & (other_qx * other_qx * q2 > qx * qx * other_q2);
            codes[k] = choose(better, moved, codes[k]);
            qx = choose(better, other_qx, qx);
            q2 = choose(better, other_q2, q2);
            changed |= better;
        }
        if (!any(changed)) break;
    }
    const Ints is_zero = magnitude(largest) < kNothing;
    for (Floats& q : codes) q = choose(is_zero, all(-n_negative), q);
    return choose(is_zero | (q2 <= 0), all(0), qx / q2);
}

// ---- w = scale q of numbers that are not negative: the scales of a super-block -------------------------------------

// Codes 0..largest: the best of nine roundings, and then by descent as above. Gives the scale.
template <int n>
EI_INLINE Floats positive(const Floats (&x)[n], const Floats (&importance)[n], Floats (&codes)[n], float largest) {
    Floats high{};
    for (int k = 0; k < n; k++) high = most(high, x[k]);
    Floats inverse = largest / high, smallest{};
    for (int i = 0; i < 9; i++) {
        const int step = i == 0 ? 0 : i <= 4 ? i - 5 : i - 4;  // 0, -4..-1, 1..4
        const Floats tried = (0.1f * static_cast<float>(step) + largest) / high, scale = 1 / tried;
        Floats found{};
        for (int k = 0; k < n; k++) {
            const Floats difference = x[k] - scale * code(tried * x[k], 0, largest);
            found += importance[k] * difference * difference;
        }
        const Ints better = i == 0 ? found >= 0 : found < smallest;
        smallest = choose(better, found, smallest);
        inverse = choose(better, tried, inverse);
    }
    Floats qx{}, q2{};
    for (int k = 0; k < n; k++) {
        codes[k] = code(inverse * x[k], 0, largest);
        qx += importance[k] * x[k] * codes[k];
        q2 += importance[k] * codes[k] * codes[k];
    }
    for (int round = 0; round < 5; round++) {
        Ints changed{};
        for (int k = 0; k < n; k++) {
            const Floats w = importance[k];
            Floats other_qx = qx - w * x[k] * codes[k], other_q2 = q2 - w * codes[k] * codes[k];
            const Floats moved = code(x[k] * other_q2 / other_qx, 0, largest);
            const Ints can_move = (other_qx > 0) & (other_q2 > 0) & (moved != codes[k]);
            other_qx += w * x[k] * moved;
            other_q2 += w * moved * moved;
            const Ints better = can_move & (other_qx * other_qx * q2 > qx * qx * other_q2);
            codes[k] = choose(better, moved, codes[k]);
            qx = choose(better, other_qx, qx);
            q2 = choose(better, other_q2, q2);
            changed |= better;
        }
        if (!any(changed)) break;
    }
    const Ints is_zero = high < kNothing;
    for (Floats& q : codes) q = choose(is_zero, all(0), q);
    return choose(is_zero | (q2 <= 0), all(0), qx / q2);
}

}  // namespace
