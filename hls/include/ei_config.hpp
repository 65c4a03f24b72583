// The engine that a top is built for. Macros come from the command line, or with EI_MODEL_HEADER from edgeinfer_model.h of
// an exported folder on the include path. Without any it is the engine for a KV260: base3, 4 rows, 16 tables, 4 ports.
#pragma once

#ifdef EI_MODEL_HEADER
#include "edgeinfer_model.h"
#endif

#ifndef EI_TRITS  // 5: base3, 3: g3x5, 1: 2bit
#define EI_TRITS 5
#define EI_ROWS 4
#define EI_TABLES 16
#define EI_PORTS 4
#define EI_GEOMETRY_HASH "0"
#endif
#ifndef EI_MAX_INPUTS
#define EI_MAX_INPUTS 6912
#define EI_MAX_OUTPUTS 13824
#endif

#include "ei_tlmm.hpp"

namespace ei {

// The number that hexadecimal digits stand for.
constexpr std::uint64_t number_of(const char* digits, std::uint64_t before = 0) {
    return *digits == 0 ? before
                        : number_of(digits + 1, before * 16 + static_cast<std::uint64_t>(
                                                                  *digits <= '9' ? *digits - '0' : *digits - 'a' + 10));
}

using Configured = Engine<EI_TRITS, EI_ROWS, EI_TABLES, EI_MAX_INPUTS, EI_MAX_OUTPUTS>;
constexpr int kPorts = EI_PORTS;
constexpr std::uint64_t kGeometryHash = number_of(EI_GEOMETRY_HASH);

}  // namespace ei
