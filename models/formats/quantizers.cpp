// Compiled once for each instruction set, with QUANTIZERS naming its table and ISA_NAME what it is called. Everything else
// has internal linkage: an inline function with external linkage, built for a newer CPU, could be the one that the linker
// keeps for all.
#include "quantizers.h"

#include "floats.h"
#include "q2_k.h"
#include "q3_k.h"
#include "q4_0.h"
#include "q4_1.h"
#include "q4_k.h"
#include "q6_k.h"
#include "q8_0.h"

namespace {

constexpr Quantizer formats[] = {
    {"F16", 1, 2, f16, f16, nullptr},
    {"BF16", 1, 2, bf16, bf16, nullptr},
    {"Q8_0", 32, 34, q8_0, q8_0, nullptr},
    {"Q4_0", 32, 18, q4_0_plain, q4_0_weighted, q4_0_least_squares},
    {"Q4_1", 32, 20, q4_1_plain, q4_1_weighted, nullptr},
    {"Q5_0", 32, 22, q5_0_plain, q5_0_weighted, nullptr},
    {"Q5_1", 32, 24, q5_1_plain, q5_1_weighted, nullptr},
    {"Q2_K", 256, 84, q2_k_plain, q2_k_weighted, nullptr},
    {"Q3_K", 256, 110, q3_k_plain, q3_k_weighted, nullptr},
    {"Q4_K", 256, 144, q4_k_plain, q4_k_weighted, nullptr},
    {"Q5_K", 256, 176, q5_k_plain, q5_k_weighted, nullptr},
    {"Q6_K", 256, 210, q6_k_plain, q6_k_weighted, nullptr},
};

}  // namespace

extern const Quantizers QUANTIZERS;
const Quantizers QUANTIZERS{ISA_NAME, formats, sizeof formats / sizeof formats[0]};
