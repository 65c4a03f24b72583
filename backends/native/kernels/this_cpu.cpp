// Prints the instruction sets that this CPU has, best first; CMake runs it to choose what to compile.
#include <cstdio>

#include "cpu_features.h"

int main() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
#define EI_PRINT(isa, is_present) \
    if (is_present()) std::puts(#isa);
    EI_INSTRUCTION_SETS(EI_PRINT)
}
