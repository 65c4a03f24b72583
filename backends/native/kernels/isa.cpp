// Which instruction sets this build has, and which of them this CPU has.
#include "kernels/kernels.h"

#include "kernels/cpu_features.h"

#define EI_DECLARE(isa, is_present) extern const Kernels kernels_##isa;
EI_INSTRUCTION_SETS(EI_DECLARE)

// CMake defines EI_BUILT_avx2 and so on as 1 where the set is compiled, else as 0.
#define EI_ENTRY(isa, is_present) {#isa, EI_BUILT_##isa ? &kernels_##isa : nullptr, is_present},
const InstructionSet instruction_sets[] = {EI_INSTRUCTION_SETS(EI_ENTRY)};
const int n_instruction_sets = sizeof instruction_sets / sizeof instruction_sets[0];

namespace {

// Up to `most` tokens, or two if weights are ternary, a product is a stream of one row group after the other. With one or
// two tokens some CPUs' own prefetchers keep up, and software prefetch is left out unless `always`; with more, the
// arithmetic between two lines delays them. Either all lines are prefetched or none: the CPU's prefetchers would not cover
// a few lines that are left out.
constexpr PrefetchPolicy policy_of(int ahead, bool always, Hint hint, int most, int task, int tasks_each) {
    constexpr int kMostTernary = 2, kAllAtOnce = 2;
    PrefetchPolicy policy;
    for (int n = 0; n <= kFewTokens; n++) {
        const auto stream = [&](int most_tokens) {
            const bool few = n > 0 && n <= most_tokens, easy = always || n == 0 || n > 2;
            return Prefetch{ahead, easy, hint, few ? 1 : kAllAtOnce, 1, few ? task : 0, few ? tasks_each : 1, always};
        };
        policy.plain[n] = stream(most);
        policy.ternary[n] = stream(kMostTernary);
    }
    return policy;
}

#if defined(__x86_64__)
bool is_amd_from_zen5() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __builtin_cpu_is("amd") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (eax >> 8 & 15) + (eax >> 20 & 255) >= 0x1a;
}
#endif

}  // namespace

// The start of tuning, and the policy without tuning. With prefetch one stream is 20 % faster on Zen 5, and another 5 % if it
// bypasses L3, a victim cache of L2; 25 % faster on Ice Lake; 20 % on Zen 3, where bypassing L3 is no gain. Zen 4's own
// prefetchers are better at one and two tokens; up to six, one long stream that bypasses L3 takes up to 25 % less time
// than several at once.
const PrefetchPolicy known_policy = [] {
    constexpr int kShort = 192 << 10;
#if defined(__x86_64__)
    constexpr int kLong = 800 << 10;
    __builtin_cpu_init();
    if (is_amd_from_zen5()) return policy_of(7104, true, Hint::AroundL3, 4, kLong, 2);
    if (__builtin_cpu_is("znver3")) return policy_of(4736, true, Hint::All, 6, kShort, 2);
    if (__builtin_cpu_is("amd")) return policy_of(4736, false, Hint::AroundL3, 6, kShort, 2);
    if (__builtin_cpu_is("intel")) return policy_of(4736, true, Hint::All, 2, kShort, 4);
#endif
    return policy_of(4736, false, Hint::All, 2, kShort, 4);
}();
