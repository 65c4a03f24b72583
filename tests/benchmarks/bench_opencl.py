"""An OpenCL device as a drafter's: what a pass costs there, beside the native engine on the CPU in the same run.

    python tests/benchmarks/bench_opencl.py [MODEL.gguf] [--head HEAD.gguf] [--device N] [--rounds 7]

Milliseconds, medians: of passes of some tokens behind 128 others with the logits of the last read back; of a level of
a tree chosen on the device (`OpenCLSession.draft`, 8 levels of 1 and of 4 nodes); of a token of a chain of 8, made one
by one as logits come back and all at once, in turns; the same of a level of a tree of a draft head for that model, of
two nodes; of a copy of 4 bytes there and back; and of ternary products with two matrices of BitNet b1.58 2B4T in each
way that the device has, transfers included. Through PoCL these are figures of the CPU, and say nothing about a GPU. One
JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from machine import machine

from edgeinfer.backends.base import Session
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.opencl import (
    OpenCLBackend,
    OpenCLDevice,
    OpenCLHead,
    OpenCLHeadBackend,
    OpenCLSession,
    choose_device,
    measure_ways,
)
from edgeinfer.common.devices import default_n_threads
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.loading.open import default_model
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.drafters.candidates import draft_candidates
from edgeinfer.speculation.drafters.head import DEFAULT_WIDTH

SIZES = (1, 2, 4, 8, 16)
TERNARY_SHAPES = ((2560, 2560), (6912, 2560))
TERNARY_SIZES = (1, 4, 16)
N_PAST, N_LEVELS = 128, 8


def milliseconds(action: Callable[[], object], rounds: int) -> float:
    """Median of some rounds, behind one that is not counted."""
    action()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - started))
    return round(statistics.median(times), 3)


def passes(session: Session, tokens: np.ndarray, rounds: int) -> dict[int, float]:
    """Of passes by number of tokens, behind N_PAST."""
    session.forward(tokens[:N_PAST], logits=())
    session.commit(range(N_PAST))
    return {n: milliseconds(lambda n=n: session.forward(tokens[:n]), rounds) for n in SIZES}


def levels(session: OpenCLSession, tokens: np.ndarray, rounds: int) -> dict[int, float]:
    """Of a level of a tree, by number of nodes."""
    return {
        width: round(milliseconds(lambda width=width: session.draft(tokens, N_LEVELS, width), rounds) / N_LEVELS, 3)
        for width in (1, 4)
    }


def drafted_tokens(session: OpenCLSession, tokens: np.ndarray, rounds: int) -> dict[str, float]:
    """Of a token of a chain, by the way in which it is made."""

    def one_by_one() -> None:
        chain = tokens[-1:].tolist()
        for _ in range(N_LEVELS):
            (row,) = session.forward(chain[-1:]).logits
            session.commit([0])
            chain.append(draft_candidates(row, int(row.argmax()), is_greedy=True, n=2)[0][0])
        session.truncate(N_PAST)

    return in_turns({"one_by_one": one_by_one, "at_once": lambda: session.draft(tokens[-1:], N_LEVELS)}, rounds)


def drafted_levels(head: OpenCLHead, rounds: int) -> dict[str, float]:
    """Of a level of DEFAULT_WIDTH nodes of a head's tree, by the way in which it is made."""
    ones = np.ones((1, head.spec.n_embd), dtype=np.float32)
    head.forward([1] * N_PAST, ones.repeat(N_PAST, axis=0), logits=())
    head.commit(range(N_PAST) if head.spec.decoder.n_layers else ())

    def one_by_one() -> None:
        out, n_pending = head.forward([1], ones), 1
        for _ in range(N_LEVELS - 1):
            assert out.hidden is not None
            found = [
                id for row in out.logits for id, _, _ in draft_candidates(row, int(row.argmax()), is_greedy=True, n=3)
            ]
            features = out.hidden[0, -1:].repeat(DEFAULT_WIDTH, axis=0)
            parents = [n_pending - 1] * DEFAULT_WIDTH
            out = head.forward([found[0]] * DEFAULT_WIDTH, features, parents, n_pending=n_pending, logits="all")
            n_pending += DEFAULT_WIDTH

    at_once = partial(head.draft, [1], ones, N_LEVELS, DEFAULT_WIDTH)
    return in_turns({"one_by_one": one_by_one, "at_once": at_once}, rounds)


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Of one of N_LEVELS, medians, by the way in which they are made; in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append(1e3 * (time.perf_counter() - started) / N_LEVELS)
    return {name: round(statistics.median(each[1:]), 3) for name, each in times.items()}


def round_trip(device: OpenCLDevice, rounds: int) -> float:
    four = np.zeros(1, dtype=np.int32)
    buffer = device.buffer(4)

    def there_and_back() -> None:
        device.write(buffer, four)
        device.read(buffer, four)

    return milliseconds(there_and_back, rounds)


def measure(model: str, head: str | None, device_index: int | None, rounds: int) -> dict[str, Any]:
    info = choose_device(device_index)
    device = OpenCLDevice(info)
    result: dict[str, Any] = {"device": vars(info), "model": model, "round_trip": round_trip(device, 10 * rounds)}
    with ModelFile.open(model) as file:
        backends = {"opencl": OpenCLBackend(info), "native": NativeBackend()}
        for name, backend in backends.items():
            spec = backend.read_spec(file)
            loaded = backend.load(file, spec, backend.plan(file, spec, LoadSettings(256)), Device(default_n_threads()))
            session = loaded.session()
            tokens = np.random.default_rng(1).integers(0, spec.n_vocab, N_PAST).astype(np.int32)
            result[f"{name}_passes"] = passes(session, tokens, rounds)
            if isinstance(session, OpenCLSession):
                result["opencl_levels"] = levels(session, tokens[:1], rounds)
                result["opencl_drafted"] = drafted_tokens(session, tokens, rounds)
            loaded.close()
        if head is not None:
            with ModelFile.open(head) as of_head:
                of_target = read_spec(file)
                spec = read_head_beside(of_head, file, of_target)
                heads = OpenCLHeadBackend(info, file, of_target)
                opened = heads.load(of_head, spec, heads.plan(of_head, spec, LoadSettings(256)), Device(1))
            result["opencl_head_drafted"] = drafted_levels(opened.session(), rounds)
            opened.close()
    for shape in TERNARY_SHAPES:
        for n in TERNARY_SIZES:
            seconds = measure_ways(device, n, shape)
            result[f"ternary_{shape[0]}x{shape[1]}_{n}"] = {way: round(1e3 * each, 3) for way, each in seconds.items()}
    return result | {"machine": machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--head", help="a draft head for the model")
    parser.add_argument("--device", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    result = measure(arguments.model or str(default_model()), arguments.head, arguments.device, arguments.rounds)
    for name, value in result.items():
        print(f"{name:<22}{value}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
