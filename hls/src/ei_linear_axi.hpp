// The whole ternary linear, which reads weights, activations and scales from memory and writes its results there.
#pragma once

#include "ei_config.hpp"
#include "ei_linear.hpp"

// An argument for each memory port of weights.
#if EI_PORTS == 1
#define EI_PORT_NAMES port0
#define EI_PORT_PARAMETERS const ei::Lane* port0
#elif EI_PORTS == 2
#define EI_PORT_NAMES port0, port1
#define EI_PORT_PARAMETERS const ei::Lane *port0, const ei::Lane *port1
#elif EI_PORTS == 3
#define EI_PORT_NAMES port0, port1, port2
#define EI_PORT_PARAMETERS const ei::Lane *port0, const ei::Lane *port1, const ei::Lane *port2
#elif EI_PORTS == 4
#define EI_PORT_NAMES port0, port1, port2, port3
#define EI_PORT_PARAMETERS const ei::Lane *port0, const ei::Lane *port1, const ei::Lane *port2, const ei::Lane *port3
#else
#error "this top reads weights by 1 to 4 memory ports: export for so many, or add ports here"
#endif

namespace ei {

// What a run ended with.
enum Status : std::uint32_t { kDone = 1, kWrongGeometry = 2, kWrongSize = 3 };

}  // namespace ei

// y = W x for n_tokens rows x, (n_tokens, n_in) float32, each row padded to whole lanes of 16 bytes; scales (n_out,) and
// y (n_tokens, n_out) alike. port0..: what each port has of the matrix's stream; `to_ports` of hls/packing.py.
// geometry_of_weights: the hash of the weights' geometry. Where it is not the engine's, or the matrix is empty or larger
// than the engine, nothing is read and written. geometry: the engine's hash; status: see ei::Status. A host reads both.
void ei_linear_axi(EI_PORT_PARAMETERS, const ei::Lane* x, const ei::Lane* scales, ei::Lane* y, int n_tokens, int n_in,
                   int n_out, std::uint64_t geometry_of_weights, std::uint64_t* geometry, std::uint32_t* status);
