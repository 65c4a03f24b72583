"""Quantisers against libgguf (`pip install libgguf==0.2.2`), which has llama.cpp's: bytes and errors.

    python tests/benchmarks/compare_quantisers.py [MODEL.gguf ...] [--write]

Compares every case of tests/support/quantiser_cases.py, byte by byte, and with models each matrix of them, plain and
with importance: at most --rows rows, dequantised, two and two mixed so that the weights lie on no format's grid.
--write writes the hashes of libgguf's bytes that tests/models/formats/test_quantising.py expects. The last line is
JSON: what differs, and the error of each format, the root mean square of the difference over that of the weights.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from late import Late  # noqa: E402
from quantiser_cases import FORMATS, Floats, cases, gaussian, hash_of, quantized  # noqa: E402

from edgeinfer.exporters.source import open_source  # noqa: E402
from edgeinfer.models.formats import quantize, quantize_plain  # noqa: E402
from edgeinfer.models.gguf import GGMLType  # noqa: E402

gguf: Any = Late("gguf")
libgguf: Any = Late("libgguf")

HASHES = ROOT / "tests" / "models" / "formats" / "quantiser_hashes.json"


def theirs(format: str, weights: Floats, columns: Floats | None) -> np.ndarray:
    data = libgguf.quantize_rows_raw(int(GGMLType[format]), weights, *weights.shape, columns)
    return np.frombuffer(data, np.uint8)


def back(format: str, data: np.ndarray, weights: Floats) -> Floats:
    kind = gguf.GGMLQuantizationType[format]
    view = data.reshape(len(weights), -1).view(np.float16 if format == "F16" else np.uint8)
    return np.asarray(gguf.dequantize(view, kind), np.float32)


def relative_error(format: str, data: np.ndarray, weights: Floats, columns: Floats | float) -> float:
    squares = np.square(back(format, data, weights) - weights, dtype=np.float64)
    return float(np.sqrt((columns * squares).sum() / (columns * np.square(weights, dtype=np.float64)).sum()))


def matrices(path: str, most_rows: int) -> Iterator[Floats]:
    """The first rows of each matrix of a model, two and two turned by an angle."""
    with open_source(Path(path)) as source:
        for tensor in source.tensors:
            n = min(tensor.n_rows, most_rows) // 2
            if len(tensor.shape) < 2 or not n or tensor.n_in % 32:
                continue
            rows = tensor.rows(0, 2 * n)
            yield np.concatenate([0.8 * rows[:n] + 0.6 * rows[n:], 0.8 * rows[n:] - 0.6 * rows[:n]]).astype(np.float32)


def compare_cases(write: bool) -> dict[str, int]:
    """Cases whose bytes differ, of each format."""
    hashes = {name: {case: hash_of(theirs(name, *of)) for case, *of in cases(name)} for name in FORMATS}
    if write:
        HASHES.write_text(json.dumps(hashes, indent=1) + "\n")
    ours = {name: {case: hash_of(quantized(name, *of)) for case, *of in cases(name)} for name in FORMATS}
    return {name: sum(ours[name][case] != hashes[name][case] for case in hashes[name]) for name in FORMATS}


def n_differ(format: str, weights: Floats, columns: Floats) -> int:
    """Blocks whose bytes differ, plain and with importance."""
    n = 0
    for importance in (None, columns):
        differs = quantized(format, weights, importance, n_threads=2) != theirs(format, weights, importance)
        n += int(differs.reshape(-1, GGMLType[format].block_bytes).any(axis=1).sum())
    return n


def errors(format: str, weights: Floats, columns: Floats) -> Iterator[tuple[str, float]]:
    """(what, percent) of each search, over all columns alike and weighted by importance."""
    type = GGMLType[format]
    for name, data in (
        ("plain", quantize_plain(type, weights)),
        ("default", quantize(type, weights)),
        ("flat", quantize(type, weights, np.ones_like(columns))),
        ("importance", quantize(type, weights, columns)),
    ):
        yield name, 100 * relative_error(format, data, weights, 1.0)
        yield f"{name}, weighted", 100 * relative_error(format, data, weights, columns)


def compare(all_weights: Iterable[Floats]) -> dict[str, Any]:
    """Of each format: blocks compared and those that differ, and means of the errors over the matrices."""
    blocks, differing = dict.fromkeys(FORMATS, 0), dict.fromkeys(FORMATS, 0)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in FORMATS}
    for weights in all_weights:
        columns = (np.square(gaussian(np.random.PCG64(5), weights.shape[1:])) + 0.01).astype(np.float32)
        for format in FORMATS:
            n_in_block = GGMLType[format].block_elements
            if weights.shape[1] % n_in_block == 0:
                blocks[format] += 2 * weights.size // n_in_block
                differing[format] += n_differ(format, weights, columns)
                for what, percent in errors(format, weights, columns):
                    found[format].setdefault(what, []).append(percent)
    means = {name: {what: round(float(np.mean(of)), 4) for what, of in found[name].items()} for name in FORMATS}
    return {"blocks": blocks, "blocks_that_differ": differing, "error_percent": means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--write", action="store_true", help="write the hashes that the tests expect")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"peer": f"libgguf {importlib.metadata.version('libgguf')}"}
    result["cases_that_differ"] = compare_cases(arguments.write)
    result["gaussian"] = compare([(0.02 * gaussian(np.random.PCG64(1), (256, 2048))).astype(np.float32)])
    result |= {Path(path).name: compare(matrices(path, arguments.rows)) for path in arguments.models}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
