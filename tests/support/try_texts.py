"""Texts of a model with a cache of experts whose reads may fail: each is whole, or ends with an error.

Run: python try_texts.py MODEL CACHE_BYTES N_THREADS N_TEXTS. Prints a line of JSON for each text: {"sha256": of all its
logits} or {"error": ...}.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edgeinfer.backends.native import NativeBackend, NativeModel
from edgeinfer.common.errors import ExpertReadError, ModelFileError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, ExpertSizes
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_PROMPT, N_TOKENS = 24, 12


def sha256_of_text(model: NativeModel, number: int) -> str:
    """The logits of a prompt in chunks, and of the tokens behind it, one by one."""
    tokens = np.random.default_rng(number).integers(0, model.spec.n_vocab, N_PROMPT + N_TOKENS).astype(np.int32)
    session, digest = model.session(), hashlib.sha256()
    digest.update(session.forward(tokens[:N_PROMPT], logits="all").logits.tobytes())
    for token in tokens[N_PROMPT:]:
        digest.update(session.forward(token[None]).logits.tobytes())
    return digest.hexdigest()


def sizes_of(path: Path) -> ExpertSizes:
    """Sizes of a model's experts."""
    with ModelFile.open(path) as file:
        return NativeBackend().expert_sizes(file, read_spec(file))


def texts(path: Path, cache_bytes: int | None, n_threads: int, n_texts: int) -> Iterator[dict[str, str]]:
    """See the module. cache_bytes: None for all experts in memory."""
    backend = NativeBackend(tuned=False)
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        plan = backend.plan(
            file, spec, LoadSettings(N_PROMPT + N_TOKENS, n_batch=10, n_threads=n_threads, expert_cache=cache_bytes)
        )
        try:
            model = backend.load(file, spec, plan, Device(n_threads))
        except ModelFileError as error:
            yield {"error": str(error)}
            return
        for number in range(n_texts):
            try:
                yield {"sha256": sha256_of_text(model, number)}
            except ExpertReadError as error:
                yield {"error": str(error)}
        model.close()


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    for text in texts(Path(name), *map(int, numbers)):  # type: ignore[arg-type]
        print(json.dumps(text), flush=True)
