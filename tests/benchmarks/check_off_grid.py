"""Whether a checkpoint with another basis gives the text of the file that it was made of.

    python tests/benchmarks/check_off_grid.py MODEL.gguf [--folder FOLDER] [--tokens 64]

tests/support/off_grid.py makes a Hugging Face folder of the file: dequantised, channels permuted, values rotated. That
becomes a GGUF file again, in F16. Compared are greedy texts of this file, of the original, and of the original
dequantised to F16; and the logits of the last two, which differ by rounding only. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from machine import machine
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import off_grid

from edgeinfer import load
from edgeinfer.backends.base import run_sequence
from edgeinfer.exporters.gguf.writer import Tensor, write_gguf
from edgeinfer.exporters.huggingface import open_folder
from edgeinfer.exporters.source import GgufSource, Source, SourceTensor
from edgeinfer.models.formats import quantize
from edgeinfer.models.gguf import GGMLType, ModelFile

PROMPTS = (
    "Write a Python function that reverses a linked list.",
    "def fibonacci(n):\n",
    "Explain what a hash map is in two sentences.",
    "The three primary colours are",
)
PIECE_WEIGHTS = 8 << 20


def pieces(tensor: SourceTensor, kind: GGMLType) -> Iterator[NDArray[np.uint8]]:
    step = max(1, PIECE_WEIGHTS // tensor.n_in)
    for first in range(0, tensor.n_rows, step):
        yield quantize(kind, tensor.rows(first, min(first + step, tensor.n_rows)))


def write_f16(source: Source, path: Path) -> None:
    """Matrices in F16, vectors in F32."""
    kinds = [GGMLType.F16 if len(tensor.shape) > 1 else GGMLType.F32 for tensor in source.tensors]
    tensors = [
        Tensor(tensor.name, kind, tensor.shape, partial(pieces, tensor, kind))
        for tensor, kind in zip(source.tensors, kinds, strict=True)
    ]
    write_gguf(path, source.metadata, tensors)


def run(path: Path, n_tokens: int) -> tuple[list[str], NDArray[np.float32]]:
    """(texts after the prompts, logits of the first prompt's tokens)."""
    with load(path, n_ctx=1024) as engine:
        texts = [
            engine.generate(prompt, max_tokens=n_tokens, temperature=0.0, repeat_penalty=1.0).text for prompt in PROMPTS
        ]
        engine.session.truncate(0)
        logits = run_sequence(engine.session, engine.tokenize(PROMPTS[0]), logits="all").logits
    return texts, logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, help="of the checkpoint, made if it is not there")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name) / "checkpoint"
        if not folder.is_dir():
            off_grid.make(arguments.model, folder)
        start = time.perf_counter()
        write_f16(open_folder(folder), Path(name) / "off-grid.gguf")
        seconds = time.perf_counter() - start
        with ModelFile.open(arguments.model) as file:
            write_f16(GgufSource(file), Path(name) / "original.gguf")
        paths = {
            "original": arguments.model,
            "f16": Path(name) / "original.gguf",
            "off_grid": Path(name) / "off-grid.gguf",
        }
        found = {kind: run(path, arguments.tokens) for kind, path in paths.items()}
    texts, logits = {kind: run[0] for kind, run in found.items()}, {kind: run[1] for kind, run in found.items()}
    error = float(np.abs(logits["off_grid"] - logits["f16"]).max() / np.abs(logits["f16"]).max())
    result = {
        "benchmark": "check_off_grid",
        "model": arguments.model.name,
        "tokens": arguments.tokens,
        "texts": len(PROMPTS),
        "equal_to_original": sum(a == b for a, b in zip(texts["off_grid"], texts["original"], strict=True)),
        "equal_to_original_in_f16": sum(a == b for a, b in zip(texts["off_grid"], texts["f16"], strict=True)),
        "largest_error_to_f16": float(f"{error:.2g}"),
        "same_first_token_as_f16": float((logits["off_grid"].argmax(-1) == logits["f16"].argmax(-1)).mean()),
        "conversion_seconds": round(seconds, 1),
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
