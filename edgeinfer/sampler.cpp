// From logits to a token, as edgeinfer/sampling.py describes it. Every bit of the choice is defined: IEEE + - * / one by
// one in double, sums from left to right, a log and an exp of our own. So the order of operations here is the meaning,
// and no library's log, exp or sum may take their place.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Changed = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokenized = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15, kMix1 = 0xBF58476D1CE4E5B9, kMix2 = 0x94D049BB133111EB;
constexpr int kMantissaBits = 52, kBias = 1023;
constexpr double kLeast = -700;      // differences of logits below it count as it
constexpr double kRound = 0x1.8p52;  // added and taken away again, it leaves the nearest integer, of two the even one
constexpr uint32_t kBlock = 64;      // logits that are compared with a bound together
constexpr size_t kFew = 256, kGroups = 1024;  // of most likely tokens: usually the nucleus

// e**x for x in -700..0 by the method and constants of fdlibm's e_exp.c: x = k ln 2 + r with |r| <= ln(2) / 2; then
// exp(r) by a rational approximation.
inline double exp_of(double x) {
    const double shifted = x * 1.44269504088896338700e+00 + kRound;
    const double k = shifted - kRound;
    const double high = x - k * 6.93147180369123816490e-01;
    const double low = k * 1.90821492927058770002e-10;
    const double r = high - low;
    const double t = r * r;
    const double p = 6.61375632143793436117e-05 + t * (-1.65339022054652515390e-06 + t * 4.13813679705723846039e-08);
    const double c = r - t * (1.66666666666666019037e-01 + t * (-2.77777777770155933842e-03 + t * p));
    const double y = 1.0 - ((low - (r * c) / (2.0 - c)) - high);
    // k is in the last bits of the shifted number, and the result is no subnormal one: added to the exponent, it is exact.
    return std::bit_cast<double>(std::bit_cast<uint64_t>(y) + (std::bit_cast<uint64_t>(shifted) << kMantissaBits));
}

// Natural logarithm of a normal x > 0 by the method and constants of fdlibm's e_log.c: x = 2**k (1 + f) with 1 + f in
// [sqrt(1/2), sqrt(2)); then a polynomial in s = f / (2 + f).
inline double log_of(double x) {
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    constexpr uint64_t kMantissa = (1ull << kMantissaBits) - 1;
    const double mantissa = std::bit_cast<double>((bits & kMantissa) | (uint64_t{kBias - 1} << kMantissaBits));
    const bool is_small = mantissa < 0.70710678118654752440;
    const double k = static_cast<double>(static_cast<int>(bits >> kMantissaBits) - (kBias - 1) - is_small);
    const double f = (is_small ? mantissa + mantissa : mantissa) - 1.0;
    const double s = f / (2.0 + f);
    const double z = s * s;
    double p = 1.818357216161805012e-01 + z * (1.531383769920937332e-01 + z * 1.479819860511658591e-01);
    p = 2.857142874366239149e-01 + z * (2.222219843214978396e-01 + z * p);
    p = z * (6.666666666666735130e-01 + z * (3.999999999940941908e-01 + z * p));
    const double half = 0.5 * f * f;
    return k * 6.93147180369123816490e-01 - ((half - (s * (half + p) + k * 1.90821492927058770002e-10)) - f);
}

// 64 random bits for an id.
inline uint64_t noise_bits(uint32_t id, uint64_t key) {
    uint64_t x = (uint64_t{id} + 1) * kGolden + key;
    x = (x ^ (x >> 30)) * kMix1;
    x = (x ^ (x >> 27)) * kMix2;
    return x ^ (x >> 31);
}

// Gumbel noise from 64 random bits.
inline double gumbel(uint64_t bits) {
    const double uniform = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
    return -log_of(-log_of(uniform));
}

// More than the noise of these bits: with n ones in front u is below 1 - 2**-(n + 1) but for a rounding, so -log(u) is
// above 2**-(n + 1), and the noise below (n + 1) ln 2.
inline double most_noise(uint64_t bits) { return 0.6932 * (std::countl_one(bits) + 1) + 1e-3; }

using Lanes = float __attribute__((vector_size(16)));

inline Lanes larger(Lanes a, Lanes b) {
#ifdef __SSE__
    return _mm_max_ps(a, b);  // the same, but for how it is compiled
#else
    return a > b ? a : b;
#endif
}

inline void raise_to(Lanes& largest, const float* logits) {
    Lanes each;
    std::memcpy(&each, logits, sizeof each);
    largest = larger(each, largest);
}

float largest_of(const float* logits, uint32_t n) {
    Lanes a = Lanes{} - std::numeric_limits<float>::infinity(), b = a, c = a, d = a;
    uint32_t first = 0;
    for (; first + 16 <= n; first += 16) {
        raise_to(a, logits + first);
        raise_to(b, logits + first + 4);
        raise_to(c, logits + first + 8);
        raise_to(d, logits + first + 12);
    }
    const Lanes lanes = larger(larger(a, b), larger(c, d));
    float largest = std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3]));
    for (; first < n; first++) largest = std::max(largest, logits[first]);
    return largest;
}

bool has_nan(const float* logits, uint32_t n) {
    auto found = Lanes{} != Lanes{};
    uint32_t first = 0;
    for (; first + 4 <= n; first += 4) {
        Lanes each;
        std::memcpy(&each, logits + first, sizeof each);
        found |= each != each;
    }
    bool is_there = found[0] || found[1] || found[2] || found[3];
    for (; first < n; first++) is_there |= logits[first] != logits[first];
    return is_there;
}

// Some tokens and their logits.
struct Tokens {
    std::vector<uint32_t> ids;
    std::vector<float> logits;

    void reserve(size_t n) {
        ids.reserve(n);
        logits.reserve(n);
    }
    void add(uint32_t id, float logit) {
        ids.push_back(id);
        logits.push_back(logit);
    }
};

// The k largest logits, largest first, equal ones by id. 0 < k < n.
Tokens most_likely(const float* logits, uint32_t n, size_t k) {
    std::vector<float> largest;  // of each block
    for (uint32_t first = 0; first < n; first += kBlock) {
        largest.push_back(largest_of(logits + first, std::min(kBlock, n - first)));
    }
    float bound = -std::numeric_limits<float>::infinity();  // at least k logits reach it
    if (largest.size() >= k) {
        std::vector<float> ordered = largest;
        const auto last = ordered.begin() + static_cast<ptrdiff_t>(k - 1);
        std::nth_element(ordered.begin(), last, ordered.end(), std::greater<>());
        bound = *last;
    }
    std::vector<uint32_t> found;
    for (uint32_t block = 0; block < largest.size(); block++) {
        if (largest[block] < bound) continue;
        const uint32_t first = block * kBlock;
        for (uint32_t id = first; id < std::min(first + kBlock, n); id++) {
            if (logits[id] >= bound) found.push_back(id);
        }
    }
    const auto end = found.begin() + static_cast<ptrdiff_t>(std::min(k, found.size()));  // fewer where some are NaN
    std::partial_sort(found.begin(), end, found.end(), [logits](uint32_t a, uint32_t b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    Tokens tokens;
    for (auto id = found.begin(); id != end; id++) tokens.add(*id, logits[*id]);
    return tokens;
}

// e**(logit - largest).
double weight_of(float logit, float largest) {
    const double x = static_cast<double>(logit) - static_cast<double>(largest);
    return exp_of(x > kLeast ? x : kLeast);
}

std::vector<double> weights_of(const float* logits, size_t n, float largest) {
    std::vector<double> weights(n);
    for (size_t i = 0; i < n; i++) weights[i] = weight_of(logits[i], largest);
    return weights;
}

// A value that at least kFew of the weights reach, close to the one that just so many reach.
double bound_of_few(const std::vector<double>& weights) {
    const size_t size = weights.size() / kGroups;  // kFew groups whose largest reaches it hold as many
    std::vector<double> largest(kGroups);
    for (size_t group = 0; group < kGroups; group++) {
        const auto first = weights.begin() + static_cast<ptrdiff_t>(group * size);
        largest[group] = *std::max_element(first, first + static_cast<ptrdiff_t>(size));
    }
    const auto few = largest.begin() + kFew - 1;
    std::nth_element(largest.begin(), few, largest.end(), std::greater<>());
    return *few;
}

// Places of the largest weights, as many as sum up to `enough`, equal ones in their order; all that are at least `lowest`,
// if even those are too few.
std::vector<uint32_t> nucleus_of(const std::vector<double>& weights, double enough, double lowest) {
    std::vector<uint32_t> order;
    order.reserve(weights.size());     // of which only what is written to takes memory
    const auto reaches_enough = [&] {  // cuts the order off there
        std::sort(order.begin(), order.end(),
                  [&](uint32_t a, uint32_t b) { return weights[a] != weights[b] ? weights[a] > weights[b] : a < b; });
        double sum = 0;
        for (size_t n = 0; n < order.size(); n++) {
            sum += weights[order[n]];
            if (sum < enough) continue;
            order.resize(n + 1);
            return true;
        }
        return false;
    };
    const auto take_from = [&](double bound) {
        const double least = std::max(bound, lowest);
        order.clear();
        for (uint32_t i = 0; i < weights.size(); i++) {
            if (weights[i] >= least) order.push_back(i);
        }
    };
    if (weights.size() >= 4 * kGroups) {
        // Whatever reaches a bound comes before whatever does not. Each further bound lets in some more.
        for (double least = bound_of_few(weights); least > 1e-12; least *= 0.1) {
            take_from(least);
            if (reaches_enough()) return order;
        }
    }
    take_from(0);
    reaches_enough();
    return order;
}

Tokens all_of(const float* logits, uint32_t n) {
    Tokens tokens;
    tokens.logits.assign(logits, logits + n);
    tokens.ids.resize(n);
    std::iota(tokens.ids.begin(), tokens.ids.end(), 0u);
    return tokens;
}

// What top_k, top_p and min_p leave of a row of logits.
Tokens candidates(const float* logits, uint32_t n, float largest, int64_t top_k, double top_p, double min_p) {
    const bool is_cut = 0 < top_k && top_k < n;
    if (!is_cut && top_p == 1.0 && min_p == 0.0) return all_of(logits, n);
    const Tokens few = is_cut ? most_likely(logits, n, static_cast<size_t>(top_k)) : Tokens{};
    if (top_p == 1.0 && min_p == 0.0) return few;
    const float* from = is_cut ? few.logits.data() : logits;
    const uint32_t n_from = is_cut ? static_cast<uint32_t>(few.logits.size()) : n;
    Tokens left;
    const auto keep = [&](uint32_t i) { left.add(is_cut ? few.ids[i] : i, from[i]); };
    if (top_p == 1.0) {
        left.reserve(n_from);
        for (uint32_t i = 0; i < n_from; i++) {
            if (weight_of(from[i], largest) >= min_p) keep(i);
        }
        return left;
    }
    // The nucleus takes the most likely tokens first, so what min_p drops can only be its end. At most 12 bytes a token
    // are in memory: weights and places, and after them what is left; see sampling_bytes in loading/ledger.py.
    const std::vector<uint32_t> nucleus = [&] {
        const std::vector<double> weights = weights_of(from, n_from, largest);
        double total = 0;
        for (const double weight : weights) total += weight;
        return nucleus_of(weights, top_p * total, min_p);
    }();
    left.reserve(nucleus.size());
    for (const uint32_t i : nucleus) keep(i);
    return left;
}

// Gumbel-max: the id with the largest score, the lowest of equals.
uint32_t drawn_of(const Tokens& tokens, float largest, double temperature, uint64_t key) {
    double best = -std::numeric_limits<double>::infinity();
    uint32_t drawn = std::numeric_limits<uint32_t>::max();
    const auto consider = [&](size_t i) {
        const double part = (static_cast<double>(tokens.logits[i]) - static_cast<double>(largest)) / temperature;
        const uint64_t bits = noise_bits(tokens.ids[i], key);
        if (part + most_noise(bits) < best) return;  // spares most of them the logarithms
        const double score = part + gumbel(bits);
        if (score > best || (score == best && tokens.ids[i] < drawn)) {
            best = score;
            drawn = tokens.ids[i];
        }
    };
    const auto first = std::find(tokens.logits.begin(), tokens.logits.end(), largest);
    consider(static_cast<size_t>(first - tokens.logits.begin()));  // for what follows to be spared
    for (size_t i = 0; i < tokens.ids.size(); i++) consider(i);
    return drawn;
}

// The first id with the largest logit; the first NaN, if there is one.
uint32_t most_likely_of(const float* logits, uint32_t n) {
    if (has_nan(logits, n)) {
        const float* found = std::find_if(logits, logits + n, [](float logit) { return logit != logit; });
        return static_cast<uint32_t>(found - logits);
    }
    uint32_t block = 0;
    float largest = -std::numeric_limits<float>::infinity();
    for (uint32_t first = 0; first < n; first += kBlock) {
        const float of_block = largest_of(logits + first, std::min(kBlock, n - first));
        if (of_block > largest) block = first, largest = of_block;
    }
    const float* found = std::find(logits + block, logits + n, largest);
    return static_cast<uint32_t>(found - logits);
}

// How much less likely tokens seen lately are.
struct Penalties {
    double repeat, frequency, presence;

    // Of a logit whose token was seen that often.
    float apply(float logit, ptrdiff_t n_seen) const {
        const double seen = static_cast<double>(logit);
        const double scaled = seen <= 0.0 ? seen * repeat : seen / repeat;
        const double taken = static_cast<double>(n_seen) * frequency;
        return static_cast<float>(scaled - (taken + presence));
    }
};

// Makes the logits of tokens seen lately less likely, as edgeinfer.sampling.penalize says, for as long as it lives.
class Penalized {
public:
    Penalized(float* logits, uint32_t n, std::vector<int32_t> recent, const Penalties& penalties) : logits_(logits) {
        std::sort(recent.begin(), recent.end());
        before_.reserve(recent.size());
        for (auto first = recent.begin(), end = first; first != recent.end(); first = end) {
            end = std::upper_bound(first, recent.end(), *first);
            if (*first < 0 || static_cast<uint32_t>(*first) >= n) continue;
            float& logit = logits[*first];
            before_.emplace_back(*first, logit);
            logit = penalties.apply(logit, end - first);
        }
    }

    ~Penalized() {
        for (const auto& [id, logit] : before_) logits_[id] = logit;
    }
    Penalized(const Penalized&) = delete;
    Penalized& operator=(const Penalized&) = delete;

    // Leaves them less likely for good.
    void keep() { before_.clear(); }

private:
    float* logits_;
    std::vector<std::pair<int32_t, float>> before_;
};

// The token that is chosen of a row, and the largest logit; the most likely one for a temperature of 0, and where the
// largest logit is not finite.
std::pair<uint32_t, float> chosen_of(const float* logits, uint32_t n, int64_t top_k, double top_p, double min_p,
                                     double temperature, uint64_t key) {
    const uint32_t most_likely = most_likely_of(logits, n);
    const float largest = logits[most_likely];
    if (!std::isfinite(largest) || temperature == 0) return {most_likely, largest};
    return {drawn_of(candidates(logits, n, largest, top_k, top_p, min_p), largest, temperature, key), largest};
}

// How many of the last tokens stand at the end of each beginning of a text too: found[i] for the one that ends with token
// i, but not for the whole text; none counts more than `most`. This is the Z algorithm, from the end.
std::vector<uint32_t> repeats_of(const int32_t* text, size_t n, uint32_t most) {
    const auto back = [&](size_t i) { return text[n - 1 - i]; };
    std::vector<size_t> lengths(n, 0);  // of the text read backwards
    size_t first = 0, end = 0;          // the match that reaches furthest is first..end - 1
    for (size_t i = 1; i < n; i++) {
        size_t length = i < end ? std::min(end - i, lengths[i - first]) : 0;
        while (i + length < n && back(length) == back(i + length)) length++;
        lengths[i] = length;
        if (i + length > end) {
            first = i;
            end = i + length;
        }
    }
    std::vector<uint32_t> found(n, 0);
    for (size_t i = 0; i + 1 < n; i++) found[i] = static_cast<uint32_t>(std::min<size_t>(lengths[n - 1 - i], most));
    return found;
}

// The tokens that would continue a repetition of at least `least` tokens, and how many the longest one has.
std::vector<std::pair<int32_t, uint32_t>> continuations_of(const int32_t* text, size_t n, uint32_t least,
                                                           uint32_t most) {
    const std::vector<uint32_t> repeats = repeats_of(text, n, most);
    std::vector<std::pair<int32_t, uint32_t>> all;
    for (size_t i = 0; i + 1 < n; i++) {
        if (repeats[i] >= least) all.emplace_back(text[i + 1], repeats[i]);
    }
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first < b.first : a.second > b.second;
    });
    const auto same = [](const auto& a, const auto& b) { return a.first == b.first; };
    all.erase(std::unique(all.begin(), all.end(), same), all.end());
    return all;
}

}  // namespace

NB_MODULE(_sampler, m) {
    m.doc() = "Draws tokens; use edgeinfer.sampling.";
    m.def(
        "candidates",
        [](Floats logits, int64_t top_k, double top_p, double min_p) {
            const uint32_t n = static_cast<uint32_t>(logits.size());
            return candidates(logits.data(), n, largest_of(logits.data(), n), top_k, top_p, min_p).ids;
        },
        "logits"_a, "top_k"_a, "top_p"_a, "min_p"_a, "See edgeinfer.sampling.candidates.");
    m.def(
        "weights",
        [](Floats logits) {
            const uint32_t n = static_cast<uint32_t>(logits.size());
            return weights_of(logits.data(), n, largest_of(logits.data(), n));
        },
        "logits"_a, "e**(logit - largest), below -700 as there. logits: (n,) with a finite maximum and no NaN.");
    m.def(
        "log_total",
        [](Floats logits) {
            const uint32_t n = static_cast<uint32_t>(logits.size());
            const float largest = largest_of(logits.data(), n);
            double total = 0;
            for (uint32_t i = 0; i < n; i++) total += weight_of(logits.data()[i], largest);
            return static_cast<double>(largest) + log_of(total);
        },
        "logits"_a, "Natural logarithm of the sum of e**logit. logits: as of `weights`.");
    m.def(
        "noise", [](uint32_t id, uint64_t key) { return gumbel(noise_bits(id, key)); }, "id"_a, "key"_a,
        "The noise of an id; see edgeinfer.sampling.");
    m.def(
        "penalize",
        [](Changed logits, std::vector<int32_t> recent, double repeat, double frequency, double presence) {
            const uint32_t n = static_cast<uint32_t>(logits.size());
            Penalized(logits.data(), n, std::move(recent), {repeat, frequency, presence}).keep();
        },
        "logits"_a, "recent"_a, "repeat"_a, "frequency"_a, "presence"_a,
        "Changes the logits (n,) of recent tokens; see edgeinfer.sampling.penalize.");
    m.def(
        "continuations",
        [](Tokenized text, uint32_t least, uint32_t most) {
            return continuations_of(text.data(), text.size(), least, most);
        },
        "text"_a, "least"_a, "most"_a,
        "(token, n): tokens that would continue a repetition of the last n tokens of a text, n in least..most, the "
        "largest n of each token; longer repetitions count as `most`. text: (n_tokens,).");
    m.def(
        "choose",
        [](Changed logits, std::vector<int32_t> recent, double repeat, double frequency, double presence, int64_t top_k,
           double top_p, double min_p, double temperature, uint64_t key) {
            const uint32_t n = static_cast<uint32_t>(logits.size());
            const Penalized penalized(logits.data(), n, std::move(recent), {repeat, frequency, presence});
            return chosen_of(logits.data(), n, top_k, top_p, min_p, temperature, key);
        },
        "logits"_a, "recent"_a, "repeat"_a, "frequency"_a, "presence"_a, "top_k"_a, "top_p"_a, "min_p"_a,
        "temperature"_a, "key"_a,
        "(id, largest logit): what the noise of a key chooses, after penalties on recent tokens, among what the "
        "filters "
        "leave. At a temperature of 0, and where the largest logit is not finite: the first id with the largest logit, "
        "or that of the first NaN. logits: (n_vocab,), n_vocab > 0, the same afterwards.");
}
