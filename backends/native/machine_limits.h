// What this machine can do at most, measured.
#pragma once

#include "kernels/kernels.h"
#include "pool.h"

struct Limits {
    double read_bytes_per_second;  // out of memory, all threads together
    double int8_multiply_adds_per_second;
};

// Best of n_rounds tries, of some 50 ms each. Takes 512 MiB of memory meanwhile.
Limits measure_limits(const Kernels& kernels, Pool& pool, int n_rounds);
