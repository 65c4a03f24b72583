"""Hashes of logits and hidden rows on every instruction set, to compare two versions of the engine bit by bit.

    python tests/benchmarks/hash_logits.py MODEL.gguf ... > before.txt

Prompts, a tree and its commit, single tokens, in caches of each type: a line each, with the SHA-256 of the bits. The
lines of two versions must be equal, and so must those of all instruction sets; the script fails where these differ.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from edgeinfer.backends.native import NativeBackend, available_isas
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

PARENTS = [-1, 0, 1, 2, 1, 4, 5, 6, -1, 8, 9, 5, 11]
BRANCH = [0, 1, 4, 5, 11]
N_PROMPT, N_SINGLE = 70, 6


def hash_of(output: Any) -> str:
    """SHA-256 of all bits of an output."""
    digest = hashlib.sha256(np.ascontiguousarray(output.logits))
    if output.hidden is not None:
        digest.update(np.ascontiguousarray(output.hidden))
    return digest.hexdigest()[:16]


def hashes(session: Any) -> Iterator[tuple[str, str]]:
    """(what, hash) of some passes behind each other."""
    rng = np.random.default_rng(7)
    n_vocab, n_layers = session.spec.n_vocab, session.spec.n_layers
    prompt = rng.integers(0, n_vocab, N_PROMPT).astype(np.int32)
    yield "prompt", hash_of(session.forward(prompt, logits="all", hidden=True))
    session.commit(range(N_PROMPT))
    nodes = rng.integers(0, n_vocab, len(PARENTS)).astype(np.int32)
    yield "tree", hash_of(session.forward(nodes, PARENTS, logits="all", hidden=(0, n_layers - 1)))
    session.commit(BRANCH)
    for n in (*([1] * N_SINGLE), 2, 3, 4, 8):
        tokens = rng.integers(0, n_vocab, n).astype(np.int32)
        yield f"{n} at {session.n_past}", hash_of(session.forward(tokens, logits="all"))
        session.commit(range(n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--isa", action="append", help="Only these.")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    backend, found = NativeBackend(), {}
    for path in options.models:
        with ModelFile.open(path) as file:
            spec = read_spec(file)
            for isa in options.isa or available_isas():
                for cache_type in ("f16", "q8_0", "k6v4"):
                    plan = backend.plan(
                        file, spec, LoadSettings(256, n_batch=64, n_threads=options.threads, cache_type=cache_type)
                    )
                    loaded: Any = backend.load(file, spec, plan, Device(options.threads, isa))
                    session = loaded.session() if hasattr(loaded, "session") else loaded  # versions before models
                    for what, bits in hashes(session):
                        name = f"{file.path.name} {cache_type} {what}"
                        print(f"{isa:12} {name}: {bits}", flush=True)
                        if found.setdefault(name, bits) != bits:
                            raise SystemExit(f"{name}: {isa} gives other bits")
                    session.close()
                    del loaded, session


if __name__ == "__main__":
    main()
