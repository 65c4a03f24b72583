"""Whether a model that was split into experts, all of them in use, gives the text of the dense one (split_ffn.py).

    python tests/benchmarks/check_split.py SPLIT.gguf [--dense MODEL.gguf] [--engine native]

Both pass the end of the license, which no router was made from. Equal but for rounding means: perplexities within 1 %,
and the same most probable token wherever its margin in the dense model is more than --margin times the root mean square
of the differences of logits. Exits with 1 where they are not. --measure-only prints the same of a model that uses some
of its experts, and does not judge. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from text import LICENSE_TEXT

from edgeinfer.common.settings import LoadSettings
from edgeinfer.loading.open import default_model

TEXT = LICENSE_TEXT[8000:]


def by_llama(path: Path, n_tokens: int, n_threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (n,) of the text and their logits (n, n_vocab)."""
    from llama_nodes import Llama

    llama = Llama(path, n_tokens, n_threads)
    tokens = llama.tokens(TEXT)[:n_tokens]
    logits = llama.decode(tokens, all_rows=True)
    llama.close()
    return tokens, logits


def by_native(path: Path, n_tokens: int, n_threads: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of the native engine."""
    from edgeinfer.backends.native import NativeBackend
    from edgeinfer.common.types import Device
    from edgeinfer.models import read_spec
    from edgeinfer.models.gguf import ModelFile
    from edgeinfer.models.tokenizer import Tokenizer

    with ModelFile.open(path) as file:
        tokens = np.array(Tokenizer.from_file(file).encode(TEXT)[:n_tokens], np.int32)
        spec, backend = read_spec(file), NativeBackend(tuned=False, packed=False)
        plan = backend.plan(file, spec, LoadSettings(n_tokens, n_batch=n_tokens, n_threads=n_threads))
        session = backend.load(file, spec, plan, Device(n_threads)).session()
        logits: np.ndarray = session.forward(tokens, logits="all").logits
        session.close()
    return tokens, logits


ENGINES = {"llama.cpp": by_llama, "native": by_native}


def perplexity(tokens: np.ndarray, logits: np.ndarray) -> float:
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chances = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return float(np.exp(-chances[np.arange(len(rows)), tokens[1:]].mean()))


def compare(dense: np.ndarray, split: np.ndarray, margin: float) -> dict[str, Any]:
    """How far the logits (n, n_vocab) are apart."""
    difference = float(np.sqrt(np.mean((dense - split) ** 2)))
    best = np.partition(dense, -2, axis=1)[:, -2:]
    is_clear = best[:, 1] - best[:, 0] > margin * difference
    same = dense.argmax(axis=1) == split.argmax(axis=1)
    return {
        "rms_difference": round(difference, 4),
        "rms_logit": round(float(np.std(dense)), 3),
        "same_best": round(float(same.mean()), 4),
        "clear": int(is_clear.sum()),
        "clear_but_other": int((is_clear & ~same).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split", type=Path, metavar="SPLIT.gguf")
    parser.add_argument("--dense", type=Path)
    parser.add_argument("--engine", choices=ENGINES, default="native")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--margin", type=float, default=6)
    parser.add_argument("--measure-only", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    logits_of = ENGINES[arguments.engine]
    sizes = arguments.tokens, arguments.threads
    tokens, dense = logits_of(arguments.dense or default_model(), *sizes)
    same_tokens, split = logits_of(arguments.split, *sizes)
    if not np.array_equal(tokens, same_tokens):
        raise SystemExit("the models have different vocabularies")
    perplexities = {"dense": perplexity(tokens, dense), "split": perplexity(tokens, split)}
    found = compare(dense, split, arguments.margin)
    is_same = abs(perplexities["split"] / perplexities["dense"] - 1) < 0.01 and not found["clear_but_other"]
    rounded = {name: round(value, 3) for name, value in perplexities.items()}
    facts = {"split": arguments.split.name, "engine": arguments.engine, "tokens": len(tokens), "perplexity": rounded}
    print(json.dumps({"benchmark": "split", "machine": machine(), **facts, **found, "same": is_same}))
    sys.exit(0 if is_same or arguments.measure_only else 1)


if __name__ == "__main__":
    main()
