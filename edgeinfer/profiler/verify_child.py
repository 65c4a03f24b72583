"""The process that verify starts: reads what to load from stdin, writes what it measured to stdout, as JSON."""

from __future__ import annotations

import itertools
import json
import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from edgeinfer.common.errors import EdgeInferError

if TYPE_CHECKING:
    from edgeinfer.completion import Timings
    from edgeinfer.engine import Engine

_ANSWER = 32  # tokens that are timed
_DRAFTED = 128  # the same with drafts, whose speed changes from one part of a text to another
_SHORT = 32  # tokens of a short prompt


def main() -> None:
    """One load, some answers, one line of JSON; an error becomes a line too."""
    asked = json.loads(sys.stdin.read())
    try:
        found = _measure(asked)
    except EdgeInferError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(found))


def _measure(asked: dict[str, Any]) -> dict[str, Any]:
    from edgeinfer.backends.native.busy import Busy
    from edgeinfer.loading.open import load
    from edgeinfer.loading.options import LoadOptions

    options = asked["options"]
    if isinstance(options["draft"], list):
        options["draft"] = tuple(options["draft"])
    with load(asked["path"], LoadOptions(**options)) as engine:
        busy = Busy(engine.device.n_threads)
        speeds: list[dict[str, Any]] = []
        busy.seconds(lambda: speeds.extend(_speeds(engine, asked["prompt_tokens"])))
        n_tokens = engine.scheduler.longest
        with ExitStack() as others:  # as if they ran
            _fill(engine, others)
            found = {"ledger": engine.memory.as_json(), "n_tokens": n_tokens, "speeds": speeds}
        is_cached = engine.memory_plan.expert_cache is not None  # then threads wait for the disk, not for the cores
        return found | {"was_disturbed": busy.was_disturbed and not is_cached}


def _speeds(engine: Engine, prompt_tokens: int) -> Iterator[dict[str, Any]]:
    """Speeds of answers, after ever longer prompts; at the end the context is full."""
    answer = max(1, min(_ANSWER, engine.n_ctx // 4))
    text = _text(engine)
    drafting, engine.speculator = engine.speculator, None
    short = max(1, min(_SHORT, engine.n_ctx - answer))
    _run(engine, text[:short], answer)  # warm-up
    timings = _run(engine, text[:short], answer)
    yield _speed("short context", timings, short, answer)
    if drafting is not None:
        engine.speculator = drafting
        longer = min(_DRAFTED, engine.n_ctx - short)
        timings = _run(engine, text[:short], longer)
        yield _speed(f"short context, drafts{_per_step(timings)}", timings, short, longer, is_drafted=True)
    full = engine.n_ctx - answer
    if prompt_tokens < full:
        yield _first_token("first token", _run(engine, text[1 : 1 + prompt_tokens], 1), prompt_tokens)
    timings = _run(engine, text[2 : 2 + full], answer)
    yield _first_token("first token, full context", timings, full)
    engine.speculator = None
    timings = _run(engine, text[2 : 2 + full], answer)
    yield _speed("full context", timings, full, answer)
    engine.speculator = drafting


def _fill(engine: Engine, others: ExitStack) -> None:
    """Fill what the first text leaves of a KV cache for several. others: gets what closes their sessions."""
    from edgeinfer.backends.base import PooledModel, run_sequence

    model = engine.session.model
    if not isinstance(model, PooledModel) or model.n_sequences == 1 and not engine.memory_plan.settings.cache_ram:
        return
    model.forget_parked()
    text = _text(engine)
    for number in itertools.count(1):
        session = model.session()
        others.callback(session.close)
        n = bisect_left(range(1, engine.n_ctx + 1), True, key=lambda n: not session.has_room(n))
        if not n:
            return
        run_sequence(session, text[number % len(text) :][:n], logits="none")


def _text(engine: Engine) -> list[int]:
    """Tokens for prompts of any length."""
    from edgeinfer.speculation.calibration_text import TEXT

    tokens = engine.tokenize(TEXT, add_special=False)
    return list(itertools.islice(itertools.cycle(tokens), engine.n_ctx + len(tokens)))


def _run(engine: Engine, prompt: list[int], n: int) -> Timings:
    return engine.generate(prompt, max_tokens=n, temperature=0.0, loop_guard=0).timings


def _speed(name: str, timings: Timings, n_prompt: int, n: int, is_drafted: bool = False) -> dict[str, Any]:
    found = {"name": name, "unit": "tokens/s", "n_past": n_prompt + n // 2, "n_prompt": n_prompt}
    return found | {"measured": timings.decode_tokens_per_second, "is_drafted": is_drafted}


def _per_step(timings: Timings) -> str:
    """Tokens that a step gave, for the name of a speed."""
    speculation = timings.speculation
    return "" if speculation is None else f" ({speculation.tokens_per_step:.1f} tokens a step)"


def _first_token(name: str, timings: Timings, n_prompt: int) -> dict[str, Any]:
    found = {"name": f"{name} ({n_prompt})", "unit": "s", "n_past": 0, "n_prompt": n_prompt}
    return found | {"measured": timings.prompt_seconds, "is_drafted": False}
