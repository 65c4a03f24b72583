"""A model some of whose experts an OpenCL device computes, against the CPU alone: speed, and how near the logits are.

    python tests/benchmarks/bench_device_experts.py MODEL.gguf [--device opencl:0] [--sizes 25%,50%,100%] [--force]

Tokens after a prompt of real text, one a pass: those that the CPU alone finds most probable, the same ones for every
size. taken: the share of the experts of layers that the device computed. waited: the share of the time that the CPU
waited for it. errors: the largest and the median difference of a row of logits, as shares of the largest logit. same:
tokens that are the most probable ones in both. On a device that is a CPU, as with PoCL, both compute on the same cores:
these are no figures of a GPU, and each line says so.

simulation: what the same routing would take by the times that were measured here, of one expert on the CPU and on the
device, by the rules of tests/support/placement_simulation.py; nothing is computed for it. One JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from numpy.typing import NDArray
from text import SAMPLE_TEXT

import edgeinfer
from edgeinfer.engine import Engine
from edgeinfer.experimental import expert_device
from edgeinfer.experimental.expert_device import device_named
from edgeinfer.offload.routing import NONE, Routing

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from placement_simulation import simulate  # noqa: E402

N_PROMPT = 64
Floats = NDArray[np.float32]


def main() -> None:
    """Print a line for each size, and JSON last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="opencl:0")
    parser.add_argument("--sizes", default="25%,50%,100%", help="of the device's memory for experts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--force", action="store_true", help="have the device compute all that it holds")
    given = parser.parse_args()
    if given.force:
        expert_device.measured_seconds = lambda *_: {1: 0.0}
    info, title = device_named(given.device)
    kind = "a CPU: no figures of a GPU" if info.kind == "cpu" else info.kind
    print(f"device: {title}, {kind}", file=sys.stderr)
    alone = Run(given, None)
    alone.show("the CPU alone", alone)
    rows = []
    for size in given.sizes.split(","):
        run = Run(given, size, alone.tokens)
        run.show(f"{size} of experts on {kind}", alone)
        rows.append({"size": size, **run.figures(alone)})
    result = {"model": given.model.name, "device": title, "is_cpu": info.kind == "cpu", "rows": rows}
    print(json.dumps({**result, "alone": alone.figures(alone), "machine": machine()}))


class Run:
    """A text by the CPU alone, or with a device that holds experts of this size. tokens: None for the most probable."""

    def __init__(self, given: argparse.Namespace, size: str | None, tokens: list[int] | None = None) -> None:
        device = {} if size is None else {"expert_device": given.device, "expert_device_bytes": size}
        n_ctx = N_PROMPT + given.tokens + 1
        with edgeinfer.load(given.model, n_ctx=n_ctx, n_threads=given.threads, draft="none", **device) as engine:
            self._decode(engine, given.tokens, tokens)
            self.device_experts = engine.device_experts
            self.simulation = self._simulated(engine)

    def _decode(self, engine: Engine, n: int, tokens: list[int] | None) -> None:
        session, rows = engine.session, engine.tokenize(SAMPLE_TEXT)[:N_PROMPT]
        self.tokens: list[int] = []
        logits, routing = [], []
        self.pass_lengths = [len(rows)]
        for i in range(n + 1):
            if i == 1:
                began = time.perf_counter()
            logits.append(session.forward(rows).logits[0])
            session.commit(range(len(rows)))
            routing.append(session.model.routing().transpose(1, 0, 2))  # type: ignore[attr-defined]
            self.tokens.append(int(logits[-1].argmax()) if tokens is None else tokens[i])
            rows = self.tokens[-1:]
        self.seconds = time.perf_counter() - began
        self.n, self.logits, self.routing = n, np.array(logits), np.concatenate(routing)
        self.pass_lengths += [1] * n

    def _simulated(self, engine: Engine) -> dict[str, float]:
        """Milliseconds of the experts of a token by each rule, by measured times."""
        device_experts = engine.device_experts
        if device_experts is None:
            return {}
        of_layers = self.routing[:, (self.routing != NONE).any(axis=(0, 2))]
        n_experts = 1 + int(of_layers.max())
        routing = Routing(of_layers, n_experts, N_PROMPT, self.pass_lengths)
        found = simulate(routing, device_experts.times, device_experts.n_slots)
        return {rule: round(1000 * of.seconds / self.n, 3) for rule, of in found.items()}

    def figures(self, alone: Run) -> dict[str, Any]:
        """All of it, for JSON."""
        errors = np.abs(self.logits - alone.logits).max(axis=1) / np.abs(alone.logits).max()
        found: dict[str, Any] = {
            "tokens_per_second": round(self.n / self.seconds, 2),
            "errors": [float(f"{each:.2g}") for each in (errors.max(), np.median(errors))],
            "same": int((self.logits.argmax(axis=1) == alone.logits.argmax(axis=1)).sum()),
            "of": len(self.logits),
        }
        if self.device_experts is not None:
            stats = self.device_experts.stats
            found |= {
                "experts_on_device": self.device_experts.n_slots,
                "taken": round(stats.taken / max(1, stats.taken + stats.left), 3),
                "waited": round(stats.waited_seconds / self.seconds, 3),
                "uploads": stats.uploads,
                "expert_ms": {
                    "cpu": round(1000 * self.device_experts.times.cpu(1), 3),
                    "device": round(1000 * self.device_experts.times.gpu(1), 3),
                },
                "simulation_ms_a_token": self.simulation,
            }
        return found

    def show(self, what: str, alone: Run) -> None:
        """A line for people."""
        print(f"{what}: {self.figures(alone)}", file=sys.stderr)


if __name__ == "__main__":
    main()
