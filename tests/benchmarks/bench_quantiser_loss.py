"""KL divergence that rounding the matrices of all layers costs, by format and by how it was rounded.

    python tests/benchmarks/bench_quantiser_loss.py SOURCE [--formats Q4_0,Q4_1] [--tokens 2048]

SOURCE is a model in floats: a GGUF file or a folder of Hugging Face (tests/support/off_grid.py makes one whose weights
lie on no format's grid). ours: what formats.quantize writes without importance.  plain: what llama.cpp writes. The
embeddings and the output matrix stay as they are. KL is against the source, over the tokens of sample.txt, in nats,
with its standard error. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from text import SAMPLE_TEXT

from edgeinfer.exporters.calibration.running import logits_of, native_model
from edgeinfer.exporters.divergence import Reference
from edgeinfer.exporters.gguf.writer import Tensor, write_gguf
from edgeinfer.exporters.source import Bytes, Floats, Source, SourceTensor, open_source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models.formats import quantize, quantize_plain
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.tokenizer import Tokenizer

Rounding = Callable[[GGMLType, Floats], Bytes]
ROUNDINGS: dict[str, Rounding] = {"plain": quantize_plain, "ours": quantize}
WINDOW = 256  # tokens of a text


def written(tensor: SourceTensor, type: GGMLType, rounding: Rounding) -> Tensor:
    """A tensor in a type, where it is a matrix of a layer that has whole blocks; else as it is."""
    is_matrix = tensor.name.startswith("blk.") and len(tensor.shape) == 2
    if not is_matrix or tensor.n_in % type.block_elements:
        type, rounding = tensor.type, quantize
    return Tensor(tensor.name, type, tensor.shape, lambda: [rounding(type, tensor.rows(0, tensor.n_rows))])


def all_logits(file: ModelFile, texts: list[list[int]]) -> list[Floats]:
    with native_model(file, WINDOW) as model:
        return [logits_of(model, text) for text in texts]


def measure(source: Source, formats: list[str], n_tokens: int) -> dict[str, Any]:
    with model_file_of(source) as file:
        tokens = Tokenizer.from_file(file).encode(SAMPLE_TEXT)[:n_tokens]
        texts = [tokens[first : first + WINDOW] for first in range(0, len(tokens), WINDOW)]
        references = [Reference(logits) for logits in all_logits(file, texts)]
    found: dict[str, Any] = {}
    for format in formats:
        for name, rounding in ROUNDINGS.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "rounded.gguf"
                type = GGMLType[format]
                write_gguf(path, source.metadata, [written(tensor, type, rounding) for tensor in source.tensors])
                with ModelFile.open(path) as rounded:
                    logits = all_logits(rounded, texts)
            parts = [each.distances(rows)[0] for each, rows in zip(references, logits, strict=True)]
            kl = np.concatenate(parts)
            found[f"{format} {name}"] = {"kl": float(kl.mean()), "error": float(kl.std() / np.sqrt(len(kl)))}
            print(f"{format} {name}: {kl.mean():.4f} +- {kl.std() / np.sqrt(len(kl)):.4f}")
    return {"n_tokens": len(tokens), "losses": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--formats", default="Q4_0,Q4_1,Q5_0,Q5_1")
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    with open_source(arguments.source) as source:
        found = measure(source, arguments.formats.split(","), arguments.tokens)
    print(json.dumps({"source": arguments.source.name, **found, "python": platform.python_version()}))


if __name__ == "__main__":
    main()
