"""The native engine against llama.cpp on the same file and text, teacher-forced: who predicts what.

    python tests/benchmarks/compare_logits.py MODEL.gguf ... [--text FILE] [--tokens 512]

For each model: at how many positions the most likely token is the same, at how many it differs although llama.cpp's
first two are more than 0.5 apart, and the perplexity of both. Both engines round activations to 8 bits, each in its
own order, so that near-ties fall either way; the line `itself` gives the same figures for llama.cpp against llama.cpp
with flash attention on, which is the noise between two runs that are both right. Exits with 1 if a clear position
differs. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from numpy.typing import NDArray
from text import SAMPLE_TEXT

from edgeinfer.backends.base import run_text
from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

Logits = NDArray[np.float32]


def ours(path: Path, text: str, n_tokens: int) -> tuple[list[int], Logits]:
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        tokens = Tokenizer.from_file(file).encode(text)[:n_tokens]
        backend = NativeBackend()
        session = backend.load(
            file, spec, backend.plan(file, spec, LoadSettings(n_tokens, n_batch=512, n_threads=2)), Device(2)
        ).session()
        logits = run_text(session, tokens, logits="all").logits
        session.close()
    return tokens, logits


def llama_cpp(path: Path, tokens: list[int], **options: Any) -> Logits:
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=len(tokens), n_threads=2, logits_all=True, verbose=False, **options)
    model.eval(tokens)
    logits = np.array(model.scores[: len(tokens)], dtype=np.float32)
    model.close()
    return logits


def perplexity(logits: Logits, tokens: list[int]) -> float:
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chosen = rows[np.arange(len(rows)), tokens[1:]] - np.log(np.exp(rows).sum(axis=1))
    return float(np.exp(-chosen.mean()))


def compare(a: Logits, peer: Logits, tokens: list[int]) -> dict[str, float]:
    first_two = np.partition(peer, -2, axis=1)[:, -2:]
    same = a.argmax(axis=1) == peer.argmax(axis=1)
    return {
        "same_argmax_percent": round(100 * float(same.mean()), 2),
        "different_where_clear": int((~same & (first_two[:, 1] - first_two[:, 0] > 0.5)).sum()),
        "perplexity": round(perplexity(a, tokens), 4),
        "peer_perplexity": round(perplexity(peer, tokens), 4),
        "perplexity_difference_percent": round(100 * (perplexity(a, tokens) / perplexity(peer, tokens) - 1), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--text", type=Path, help="default: some source code, sample.txt")
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    text = arguments.text.read_text() if arguments.text else SAMPLE_TEXT
    results = {}
    for path in arguments.models:
        tokens, logits = ours(path, text, arguments.tokens)
        peer = llama_cpp(path, tokens)
        results[path.name] = {
            "edgeinfer": compare(logits, peer, tokens),
            "itself": compare(llama_cpp(path, tokens, flash_attn=True), peer, tokens),
        }
        print(path.name, json.dumps(results[path.name], indent=2), file=sys.stderr)
    print(json.dumps({"benchmark": "logits", "machine": machine(), "results": results}))
    sys.exit(1 if any(of_model["edgeinfer"]["different_where_clear"] for of_model in results.values()) else 0)


if __name__ == "__main__":
    main()
