"""Headers of a folder for a board: what its manifest says, for C, HLS C++ and the test bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edgeinfer.hls.files.manifest import VERSION, BoardManifest, BoardTensor
from edgeinfer.hls.geometry import LANE_BYTES, accumulator_bits

_NOTE = "Written by `edgeinfer fpga export` from manifest.json; `edgeinfer fpga check` compares both."


def model_header(manifest: BoardManifest) -> str:
    """`edgeinfer_model.h`, for C and C++: sizes as macros, and tables of tensors and arrays with their offsets."""
    lines = [
        f"/* {_NOTE} */",
        "#ifndef EI_MODEL_H",
        "#define EI_MODEL_H",
        "",
        *_defines(_engine(manifest)),
        "",
        *_defines(_flat("", manifest.facts.get("model", {}))),
        "",
        *_tables(manifest),
        "",
        "#endif",
    ]
    return "\n".join(lines) + "\n"


def config_header(manifest: BoardManifest) -> str:
    """`config.hpp`, for HLS C++: the engine's parameters, and the shapes of each phase that all layers share."""
    lines = [
        f"// {_NOTE}",
        "#pragma once",
        '#include "edgeinfer_model.h"',
        "",
        "namespace edgeinfer_model {",
        "constexpr int kTrits = EI_TRITS, kIndexBits = EI_INDEX_BITS, kRows = EI_ROWS, kTables = EI_TABLES;",
        "constexpr int kPorts = EI_PORTS, kBeatBytes = EI_BEAT_BYTES, kAccumulatorBits = EI_ACCUMULATOR_BITS;",
        "constexpr int kMaxInputs = EI_MAX_INPUTS, kMaxOutputs = EI_MAX_OUTPUTS;",
        "constexpr int kMaxSteps = EI_MAX_STEPS, kMaxTiles = EI_MAX_TILES;",
        *_phases(manifest),
        "}  // namespace edgeinfer_model",
    ]
    return "\n".join(lines) + "\n"


HEADERS: Mapping[str, Callable[[BoardManifest], str]] = {
    "edgeinfer_model.h": model_header,
    "config.hpp": config_header,
}


def _engine(manifest: BoardManifest) -> dict[str, Any]:
    geometry, tensors = manifest.geometry, manifest.tensors
    n_in = max((tensor.n_in for tensor in tensors), default=0)
    n_out = max((tensor.n_out for tensor in tensors), default=0)
    return {
        "FORMAT_VERSION": VERSION,
        "GEOMETRY_HASH": geometry.hash(),
        "ENCODING": geometry.encoding,
        "TRITS": geometry.code.n_trits,
        "INDEX_BITS": geometry.code.n_bits,
        "ROWS": geometry.rows,
        "TABLES": geometry.tables,
        "PORTS": geometry.n_ports,
        "LANE_BYTES": LANE_BYTES,
        "BEAT_BYTES": geometry.beat_bytes,
        "ACCUMULATOR_BITS": accumulator_bits(n_in),
        "MAX_INPUTS": n_in,
        "MAX_OUTPUTS": n_out,
        "MAX_STEPS": geometry.n_steps(n_in),
        "MAX_TILES": geometry.n_tiles(n_out),
    }


def _flat(prefix: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and texts of nested facts, by names joined with _; what is a list or None is left out."""
    found: dict[str, Any] = {}
    for key, value in sorted(facts.items()):
        if isinstance(value, Mapping):
            found |= _flat(f"{prefix}{key.upper()}_", value)
        elif isinstance(value, (bool, int, float, str)):
            found[f"{prefix}{key.upper()}"] = value
    return found


def _defines(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield f"#define EI_{name} {_literal(value)}"


def _literal(value: str | bool | int | float) -> str:
    if isinstance(value, str):
        text = value.encode("ascii", "replace").decode()
        text = "".join(char if " " <= char <= "~" else "?" for char in text)
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, float):
        return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else repr(value)
    return str(int(value))


def _tables(manifest: BoardManifest) -> Iterator[str]:
    """Both tables, for the one source that asks for them, as C warns of tables that nothing reads."""
    tensors, arrays = manifest.tensors, manifest.arrays
    yield f"#define EI_N_TENSORS {len(tensors)}"
    yield f"#define EI_N_ARRAYS {len(arrays)}"
    yield "#ifdef EI_TABLES_HERE /* define it in the one source that reads them */"
    yield "/* Bytes offset.. of `stream`.p.bin are those of port p; layer -1: of none. */"
    yield "struct ei_tensor { const char *name, *phase, *stream; int layer, n_out, n_in, rows_padded;"
    yield "                   unsigned long long offset, bytes, scales_offset; };"
    yield f"static const struct ei_tensor ei_tensors[{max(1, len(tensors))}] = {{"
    for tensor in tensors:
        names = ", ".join(_literal(text) for text in (tensor.name, tensor.phase, tensor.stream))
        sizes = (-1 if tensor.layer is None else tensor.layer, tensor.n_out, tensor.n_in, tensor.rows_padded)
        places = f"{tensor.offset}ull, {tensor.n_bytes}ull, {tensor.scales.offset}ull"
        yield f"  {{ {names}, {', '.join(map(str, sizes))}, {places} }},"
    yield "};"
    yield "struct ei_array { const char *name, *file, *type; unsigned long long offset, bytes; };"
    yield f"static const struct ei_array ei_arrays[{max(1, len(arrays))}] = {{"
    for array in arrays:
        names = ", ".join(_literal(text) for text in (array.name, array.place.file, array.dtype))
        yield f"  {{ {names}, {array.place.offset}ull, {array.place.n_bytes}ull }},"
    yield "};"
    yield "#endif"


def _phases(manifest: BoardManifest) -> Iterator[str]:
    """Shapes of the phases in which all layers are alike, and the bytes from one layer to the next."""
    by_phase: dict[str, list[BoardTensor]] = {}
    for tensor in manifest.tensors:
        by_phase.setdefault(tensor.phase, []).append(tensor)
    for phase, tensors in by_phase.items():
        if not phase or len({(tensor.n_out, tensor.n_in) for tensor in tensors}) > 1:
            continue
        first, geometry = tensors[0], manifest.geometry
        yield (
            f"struct {phase} {{ static constexpr int kOutputs = {first.n_out}, kInputs = {first.n_in}, "
            f"kSteps = {geometry.n_steps(first.n_in)}, kTiles = {geometry.n_tiles(first.n_out)}; "
            f"static constexpr long long kPortBytes = {first.n_bytes}; }};"
        )
