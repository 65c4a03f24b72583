// Which instruction sets this CPU has.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

inline bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
inline bool has_avxvnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
inline bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
inline bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
inline bool has_avx512vbmi() { return has_avx512vnni() && __builtin_cpu_supports("avx512vbmi"); }
inline bool is_zen4() { return has_avx512vbmi() && __builtin_cpu_is("amdfam19h"); }
inline bool is_not_zen4() { return has_avx512vbmi() && !is_zen4(); }
#endif

#if defined(__aarch64__)
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

inline bool has_neon() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
inline bool has_neon_i8mm() { return has_neon() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM); }
#else
inline bool has_neon() { return false; }  // until the other systems' ways of asking are written
inline bool has_neon_i8mm() { return false; }
#endif
#endif

inline bool always() { return true; }

// Every instruction set with what tells whether this CPU has it, best first. avx512zen4 can be asked for, and is tested, on
// every CPU that has the instructions.
#if defined(__x86_64__)
#define EI_INSTRUCTION_SETS(SET)    \
    SET(avx512zen4, is_zen4)        \
    SET(avx512vbmi, has_avx512vbmi) \
    SET(avx512zen4, is_not_zen4)    \
    SET(avx512vnni, has_avx512vnni) \
    SET(avx512, has_avx512)         \
    SET(avxvnni, has_avxvnni)       \
    SET(avx2, has_avx2)             \
    SET(scalar, always)
#elif defined(__aarch64__)
#define EI_INSTRUCTION_SETS(SET)  \
    SET(neon_i8mm, has_neon_i8mm) \
    SET(neon, has_neon)           \
    SET(scalar, always)
#else
#define EI_INSTRUCTION_SETS(SET) SET(scalar, always)
#endif
