// The engine that a top is built for. Macros come from the command line, or from the header that EI_CONFIG names, such as
// edgeinfer_model.h of an exported folder. Without any it is the engine for a KV260: base3, 4 rows, 16 tables, 4 ports.
#pragma once

#ifdef EI_CONFIG
#include EI_CONFIG
#endif

#ifndef EI_TRITS  // 5: base3, 3: g3x5, 1: 2bit
#define EI_TRITS 5
#define EI_ROWS 4
#define EI_TABLES 16
#define EI_PORTS 4
#define EI_GEOMETRY_HASH 0
#endif
#ifndef EI_MAX_IN
#define EI_MAX_IN 6912
#endif
#ifndef EI_MAX_OUT
#define EI_MAX_OUT 13824
#endif

#include "ei_tlmm.hpp"

namespace ei {

using Configured = Engine<EI_TRITS, EI_ROWS, EI_TABLES, EI_MAX_IN, EI_MAX_OUT>;
constexpr std::uint64_t kGeometryHash = EI_GEOMETRY_HASH;

}  // namespace ei
