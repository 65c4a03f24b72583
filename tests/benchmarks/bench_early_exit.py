"""Whether a model can draft for itself with some of its layers, without training (SWIFT, Xia et al., arXiv:2410.06916).

    python tests/benchmarks/bench_early_exit.py MODEL.gguf --prompts FILE [--prompt-tokens 60] [--every 10]
        [--tokens 24] [--threads 2]

FILE: JSON Lines with "turns", the first of which is asked. The model answers every n-th prompt of at most that many
tokens greedily. Then some of its layers predict the token after each token of these answers, with the whole model's
keys and values of the text before (numpy, float32 weights). Tried are the first layers alone, and, on the native
engine, the model without the layers whose removal changes least.

A token of such a draft takes `draft` passes of one token: measured, with an output matrix of 49,152 rows if the model
has more. With `match`, its acceptance rate, and the measured costs c(n) of verifying,

    speedup = max over K of (1 - match^(K+1)) / (1 - match) / (c(K+1) + K draft)

which assumes equal acceptance everywhere and no other cost of drafting: an upper bound for a drafter made of these
layers. `if_always_right` is the same with a match of 1. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from answer_logits import logits_from
from asked import read_prompts
from machine import machine
from numpy.typing import NDArray

import edgeinfer
from edgeinfer.backends.base import run_sequence
from edgeinfer.backends.native import NativeBackend, NativeSession
from edgeinfer.backends.native.weights import DRAFT_TOKENS
from edgeinfer.backends.reference import ReferenceBackend, ReferenceModel, SequenceState, visible_slots
from edgeinfer.backends.reference_math import Floats, scale
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import ModelSpec, TensorRows, dense_of, read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.calibration import measure_costs
from edgeinfer.speculation.cost import CostModel

N_CTX, N_PAST, N_TIMED, MAX_DRAFT = 1024, 64, 15, 15


@dataclass
class Texts:
    """Prompts with the model's answers, and where the answers begin."""

    ids: list[list[int]]
    begins: list[int]

    @property
    def n_answered(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.ids)) - sum(self.begins)


def answers(arguments: argparse.Namespace) -> Texts:
    """What the whole model writes greedily."""
    asked = read_prompts(arguments.prompts)
    texts, n_most = Texts([], []), arguments.prompt_tokens
    with edgeinfer.load(arguments.model, n_ctx=N_CTX, n_threads=arguments.threads, draft="suffix") as engine:
        messages = ([{"role": "user", "content": prompt["turns"][0]}] for prompt in asked)
        prompts = [engine.template.encode(engine.tokenizer, one, add_generation_prompt=True) for one in messages]
        for tokens in [one for one in prompts if len(one) <= n_most][:: arguments.every]:
            completion = engine.generate(
                tokens, max_tokens=arguments.tokens, params=edgeinfer.SamplingParams(temperature=0.0)
            )
            texts.ids.append([*tokens, *completion.tokens])
            texts.begins.append(len(tokens))
    return texts


def opened(file: ModelFile, spec: ModelSpec, layers: Sequence[int], n_threads: int) -> NativeSession:
    """The model with these of its layers only; with all, all of its output matrix."""
    part = replace(spec, n_layers=len(layers), layers=tuple(spec.layers[layer] for layer in layers))
    if len(layers) < spec.n_layers and spec.n_vocab > DRAFT_TOKENS:
        assert isinstance(spec.output, str)
        part = replace(part, n_logits=DRAFT_TOKENS, output=TensorRows(spec.output, 0, DRAFT_TOKENS))
    backend = NativeBackend(packed=False)
    return backend.load(
        file, part, backend.plan(file, part, LoadSettings(N_CTX, n_batch=512, n_threads=n_threads)), Device(n_threads)
    ).session()


class Skipping(ReferenceModel):
    """The whole model, whose next passes may be through some of the layers only."""

    kept: Sequence[int] | None = None

    def run_layers(
        self,
        x: Floats,
        text: SequenceState,
        links: NDArray[np.int32],
        rows: NDArray[np.int32],
        taps: tuple[int, ...],
        inputs: Floats | None = None,
        of_layers: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        if self.kept is None:
            return super().run_layers(x, text, links, rows, taps, inputs, of_layers)
        spec, paths = self.spec, visible_slots(links, text.n_past)
        for index in self.kept:
            layer = spec.layers[index]
            x = x + scale(self.mixed(layer.mixer, x, text.rows(index, paths, None)), spec.residual_scale)
            x = x + scale(self._dense(dense_of(layer), x), spec.residual_scale)
        assert spec.output is not None  # whole models have one
        return self.linear(spec.output, None, self.norm(spec.output_norm, x)[rows]), x[None]


def matches(file: ModelFile, spec: ModelSpec, texts: Texts, sets: Sequence[Sequence[int]]) -> list[float]:
    """How often the most likely token of each set of layers is the answers', after the answers so far."""
    backend = ReferenceBackend("int8")
    model = Skipping(
        spec, backend.plan(file, spec, LoadSettings(N_CTX)), backend.read_weights(file, spec.tensor_shapes())
    )
    session = model.session()
    right = [0] * len(sets)
    for ids, begin in zip(texts.ids, texts.begins, strict=True):
        model.kept = None
        session.truncate(0)
        run_sequence(session, ids[: begin - 1], logits="none")
        for before, after in pairwise(ids[begin - 1 :]):
            for i, model.kept in enumerate(sets):
                right[i] += int(session.forward([before]).logits[0].argmax()) == after
            model.kept = None
            session.forward([before], logits=())
            session.commit([0])
    model.close()
    return [n / texts.n_answered for n in right]


def alone(session: NativeSession, texts: Texts) -> float:
    """The same for a model of some layers with keys and values of its own."""
    n_right = 0
    for ids, begin in zip(texts.ids, texts.begins, strict=True):
        logits = logits_from(session, ids[:-1], begin - 1)
        n_right += int(np.sum(logits.argmax(axis=1) == np.array(ids[begin:])))
    return n_right / texts.n_answered


def by_loss(file: ModelFile, spec: ModelSpec, texts: Texts, n_threads: int) -> list[int]:
    """The layers, those first that are missed least where they alone are left out."""
    found: dict[int, float] = {}
    for layer in range(spec.n_layers):
        part = opened(file, spec, [one for one in range(spec.n_layers) if one != layer], n_threads)
        found[layer] = alone(part, texts)
        part.close()
        print(f"without layer {layer}: {found[layer]:.3f}", file=sys.stderr, flush=True)
    return sorted(found, key=lambda layer: -found[layer])


def share(whole: NativeSession, part: NativeSession) -> float:
    """What a token takes with a part of the layers, in passes of the whole, both in turns."""
    seconds: dict[int, list[float]] = {id(whole): [], id(part): []}
    for session in (whole, part):
        session.truncate(0)
        session.forward([1] * N_PAST)
        session.commit(range(N_PAST))
    for _ in range(N_TIMED):
        for session in (whole, part):
            started = time.perf_counter()
            session.forward([1])
            seconds[id(session)].append(time.perf_counter() - started)
    whole.truncate(0)
    return statistics.median(seconds[id(part)]) / statistics.median(seconds[id(whole)])


def speedup(probability: float, draft: float, costs: Sequence[float]) -> tuple[float, int]:
    """The best speedup, and the length of the drafts that gives it (0: none). costs: by number of tokens."""
    best = 1.0, 0
    expected = 1.0
    for k in range(1, MAX_DRAFT + 1):
        expected += probability**k
        best = max(best, (expected / (costs[k + 1] / costs[1] + k * draft), k))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=60, help="prompts of at most so many")
    parser.add_argument("--every", type=int, default=10, help="only every n-th of these")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: arguments.threads]))
    texts = answers(arguments)
    figures: list[dict[str, Any]] = []
    with ModelFile.open(arguments.model) as file:
        spec = read_spec(file)
        whole = opened(file, spec, range(spec.n_layers), arguments.threads)
        costs = CostModel(measure_costs(whole, 2.0)).milliseconds(N_PAST)
        order, n = by_loss(file, spec, texts, arguments.threads), spec.n_layers
        first = [list(range(n * eighths // 8)) for eighths in (2, 4, 6, 7)]
        sets = [*first, *(sorted(order[n * eighths // 8 :]) for eighths in (1, 2, 3, 4, 6))]
        for layers, probability in zip(sets, matches(file, spec, texts, sets), strict=True):
            part = opened(file, spec, layers, arguments.threads)
            draft = share(whole, part)
            part.close()
            best, length = speedup(probability, draft, costs)
            figures.append(
                {
                    "layers": layers,
                    "match": round(probability, 3),
                    "draft": round(draft, 3),
                    "speedup": round(best, 3),
                    "length": length,
                    "if_always_right": round(speedup(1.0, draft, costs)[0], 3),
                }
            )
            print(f"{figures[-1]}", file=sys.stderr)
        whole.close()
    record = {"benchmark": "early exit", "machine": machine(), "model": arguments.model.name, "prompts": len(texts.ids)}
    record |= {"tokens": texts.n_answered, "threads": arguments.threads}
    record |= {"milliseconds_by_tokens": [round(ms, 3) for ms in costs[:17]]}
    print(json.dumps(record | {"figures": figures}))


if __name__ == "__main__":
    main()
