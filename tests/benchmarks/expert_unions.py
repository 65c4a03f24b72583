"""Which experts real text chooses, by llama.cpp: how large the unions of n tokens are, and how steady the choice is.

    python tests/benchmarks/expert_unions.py MODEL.gguf ... [--tokens 1024] [--sizes 2,4,8,16,512]

For each size the mean number of experts of a layer that n tokens of text need together, and in units of one token's
top-k; beside it that of n random tokens. `previous`: share of a token's experts that the token before it chose too.
`static`: share that goes to the top-k most frequent ones. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from llama_nodes import N_BATCH, Llama, Node, watching
from machine import machine
from text import LICENSE_TEXT, SAMPLE_TEXT


def routing(path: Path, tokens: np.ndarray | None, n_tokens: int, n_threads: int) -> np.ndarray:
    """(n_layers, n, top_k) experts of each token. tokens: None for the text of the benchmarks."""
    chosen: dict[int, list[np.ndarray]] = {}

    def seen(node: Node) -> None:
        chosen.setdefault(node.layer, []).append(node.values(np.int32))

    llama = Llama(path, n_tokens, n_threads, watching("ffn_moe_topk-", seen))
    if tokens is None:
        tokens = llama.tokens(SAMPLE_TEXT + LICENSE_TEXT)
    tokens = tokens[:n_tokens]
    for first in range(0, len(tokens), N_BATCH):
        llama.decode(tokens[first : first + N_BATCH], all_rows=True)
    llama.close()
    return np.stack([np.concatenate(chosen[layer]) for layer in sorted(chosen)])


def mean_union(chosen: np.ndarray, n: int) -> float:
    """Experts that n tokens in a row need of a layer, the mean over layers and stretches."""
    n_tokens = chosen.shape[1]
    stretches = range(0, n_tokens - n + 1, n)
    return float(np.mean([len(np.unique(layer[i : i + n])) for layer in chosen for i in stretches]))


def steadiness(chosen: np.ndarray) -> dict[str, float]:
    """The shares `previous` and `static`."""
    top_k = chosen.shape[2]
    same = (chosen[:, 1:, :, None] == chosen[:, :-1, None, :]).any(-1)
    static = [np.sort(np.bincount(layer.ravel()))[-top_k:].sum() / layer.size for layer in chosen]
    return {"previous": round(float(same.mean()), 3), "static": round(float(np.mean(static)), 3)}


def examine(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    text = routing(path, None, arguments.tokens, arguments.threads)
    ids = np.random.default_rng(1).integers(0, 40000, arguments.tokens).astype(np.int32)
    random = routing(path, ids, arguments.tokens, arguments.threads)
    n_layers, n_tokens, top_k = text.shape
    sizes = [n for n in arguments.sizes if n <= n_tokens]
    unions = {n: [round(mean_union(chosen, n), 2) for chosen in (text, random)] for n in sizes}
    return {
        "model": path.name,
        "layers": n_layers,
        "top_k": top_k,
        "tokens": n_tokens,
        "experts_used": float(np.mean([len(np.unique(layer)) for layer in text])),
        "union": {n: of_text for n, (of_text, _) in unions.items()},
        "union_in_tokens": {n: round(of_text / top_k, 2) for n, (of_text, _) in unions.items()},
        "union_random": {n: of_random for n, (_, of_random) in unions.items()},
        **steadiness(text),
    }


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sizes", type=numbers, default=[2, 4, 8, 16, 512], help="n, comma-separated")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    results = [examine(path, arguments) for path in arguments.models]
    print(json.dumps({"benchmark": "expert unions", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
