"""How much of drafting is hidden behind the target's passes when both run at once.

    python tests/benchmarks/bench_overlap.py [MODEL.gguf] [--pass-ms 40] [--right 0.85] [--timeline FILE.png]
    python tests/benchmarks/bench_overlap.py [MODEL.gguf] --draft FILE --draft-device opencl:0 -t 1 --pass-ms 600

Simulates a machine with a GPU: each pass of the target is stretched by sleeping to --pass-ms, and by 3 % for each
further token. The simulated drafter knows the text, is right in a given share of cases, and sleeps for a share of a
pass per token. Or it is a draft model or a head on a device, which works while the target sleeps. Reported for each:
the share of time that the target waited for drafts, that time as a share of drafting, tokens per step, the speed
relative to plain decoding, also with drafting and verifying in turn, and whether the text is the same. One JSON line on
stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from virtual_time import SlowDrafter

import edgeinfer
from edgeinfer.backends.base import Session
from edgeinfer.bench import TIMELINE_PROMPT
from edgeinfer.cli.plotting import draw_timeline
from edgeinfer.engine import Engine
from edgeinfer.loading.open import default_model
from edgeinfer.speculation.cost import MAX_TOKENS, CostCurve, CostModel
from edgeinfer.speculation.drafters.base import ModelBasedDrafter
from edgeinfer.speculation.drafters.overlapped import overlapped
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.timeline import Timeline

PARTS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6)  # of a pass, for a drafted token
MORE = 0.03  # of a pass, for each further token of it


def nap(seconds: float, is_over: Callable[[], bool]) -> None:
    """Sleep, or less once something is true."""
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0 and not is_over():
        time.sleep(min(left, 1e-3))


def stretch(session: Session, one: float) -> CostModel:
    """Make passes take as long as they should, of one token `one` seconds; gives their costs."""
    forward = session.forward

    def stretched(tokens: Any, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        out = forward(tokens, *arguments, **options)
        seconds = one * (1.0 + MORE * (len(tokens) - 1)) if len(tokens) <= MAX_TOKENS else 0.0
        time.sleep(max(0.0, seconds - (time.perf_counter() - started)))
        return out

    session.forward = stretched  # type: ignore[method-assign]
    return CostModel(CostCurve(0, {n: one * (1.0 + MORE * (n - 1)) for n in range(1, MAX_TOKENS + 1)}, 0, {}))


def answer(engine: Engine, n_tokens: int, speculator: Speculator | None) -> tuple[Any, float]:
    """A greedy answer, and seconds of its tokens after the first."""
    engine.speculator = speculator
    completion = engine.generate(TIMELINE_PROMPT, max_tokens=n_tokens, params=edgeinfer.SamplingParams(temperature=0.0))
    return completion, completion.timings.decode_seconds


def figures(engine: Engine, drafter: ModelBasedDrafter, costs: CostModel, plain: Any, seconds: float) -> dict[str, Any]:
    """Of an answer that is drafted by it."""
    speculator = Speculator(engine.session, [drafter], costs, engine.tokenizer.n_vocab, MAX_TOKENS - 1)
    speculator.timeline = timeline = Timeline()
    completion, own_seconds = answer(engine, len(plain.tokens), speculator)
    speculation = completion.timings.speculation
    return {
        "waited": round(speculation.waited_seconds / speculation.step_seconds, 4),
        "waited_of_drafting": round(speculation.waited_seconds / max(1e-9, timeline.seconds("draft")), 4),
        "tokens_per_step": round(speculation.tokens_per_step, 3),
        "speed": round(seconds / own_seconds, 3),
        "equal": completion.tokens == plain.tokens,
        "dropped": dict(speculation.dropped),
        "timeline": timeline,
    }


def with_stub(engine: Engine, one: float, n_tokens: int, right: float) -> dict[str, Any]:
    """Figures for each part of a pass, of drafts while the target works and in turns."""
    costs = stretch(engine.session, one)
    plain, seconds = answer(engine, n_tokens, None)
    text = [*engine.tokenize(TIMELINE_PROMPT), *plain.tokens]
    rng = random.Random(1)
    is_right = [rng.random() < right for _ in range(len(text) + MAX_TOKENS)]
    results: dict[str, Any] = {}
    for part in PARTS:
        stub = SlowDrafter(text, lambda place: place < len(is_right) and is_right[place], part * one, nap)
        ahead = overlapped(stub)
        results[str(part)] = figures(engine, ahead, costs, plain, seconds)
        results[str(part)]["speed_in_turns"] = figures(engine, stub, costs, plain, seconds)["speed"]
        ahead.close()
    return results


def with_model(engine: Engine, one: float, n_tokens: int) -> dict[str, Any]:
    """Figures of the draft model or the head of an engine, where it was put."""
    if engine.speculator is None or not engine.speculator.placements:
        raise SystemExit("there is no draft model or head that could be used")
    drafter = engine.speculator.drafters[-1]
    where = engine.speculator.placements[drafter.name].device
    costs = stretch(engine.session, one)
    plain, seconds = answer(engine, n_tokens, None)
    figures(engine, drafter, costs, plain, seconds)  # type: ignore[arg-type]
    return {where: figures(engine, drafter, costs, plain, seconds)}  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--pass-ms", type=float, default=40.0)
    parser.add_argument("--right", type=float, default=0.85)
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--draft")
    parser.add_argument("--draft-device", default="auto")
    parser.add_argument("--timeline", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or str(default_model())
    draft = "none" if arguments.draft is None else [arguments.draft]
    options = {"n_ctx": 1024, "n_threads": arguments.threads, "draft_device": arguments.draft_device}
    with edgeinfer.load(model, draft=draft, **options) as engine:
        engine.tokenizer.stop_ids = frozenset()
        one = 1e-3 * arguments.pass_ms
        if arguments.draft is None:
            results = with_stub(engine, one, arguments.tokens, arguments.right)
        else:
            results = with_model(engine, one, arguments.tokens)
        title = f"{engine.path.name}, {engine.device.n_threads} thread(s), passes stretched to {arguments.pass_ms:g} ms"
    for name, result in results.items():
        timeline = result.pop("timeline")
        print(name, result, file=sys.stderr)
        if arguments.timeline is not None:
            draw_timeline(timeline.rounds(8), f"{title}; drafts: {name}", arguments.timeline)
    record = {"model": model, "pass_ms": arguments.pass_ms, "right": arguments.right, "results": results}
    print(json.dumps(record | {"machine": machine()}))


if __name__ == "__main__":
    main()
