"""Dialogues with fixed questions: a model answers, its answers go on as history, and what was found is reported."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from machine import machine

import edgeinfer
from edgeinfer.engine import Engine
from edgeinfer.message import Message
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.stats import Speculation


class Dialogue:
    """What was said so far."""

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self._engine = engine
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def asked(self, text: str) -> list[int]:
        """The tokens of a prompt that asks this after all that was said."""
        self.messages.append({"role": "user", "content": text})
        return self._engine.template.encode(self._engine.tokenizer, self.messages, add_generation_prompt=True)

    def answered(self, text: str) -> None:
        """Go on after this answer."""
        self.messages.append({"role": "assistant", "content": text})


def held(
    engine: Engine, dialogue: Dialogue, said: Sequence[str], n_tokens: int, params: SamplingParams
) -> list[edgeinfer.Completion]:
    """The answers of a dialogue, each drawn with a seed of its own where params have one."""
    answers = []
    for number, text in enumerate(said):
        seed = None if params.seed is None else params.seed + number
        prompt = dialogue.asked(text)
        answers.append(engine.generate(prompt, max_tokens=n_tokens, params=replace(params, seed=seed)))
        dialogue.answered(answers[-1].text)
    return answers


class Drafts:
    """Draft tokens of some answers, counted."""

    def __init__(self) -> None:
        self.tokens = self.passes = 0  # tokens after the first of each answer, and the passes that gave them
        self._by_depth: Counter[int] = Counter()  # passes in which so many draft tokens or more were accepted
        self._by_drafter: dict[str, Counter[str]] = {}

    def add(self, n_tokens: int, of: Speculation | None) -> None:
        """Count an answer of that many tokens. of: its figures, None without speculation."""
        self.tokens += n_tokens - 1
        self.passes += n_tokens - 1 if of is None else of.steps
        for depth, counts in enumerate(of.by_depth if of else (), start=1):
            self._by_depth[depth] += counts.accepted
        for name, counts in (of.by_drafter if of else {}).items():
            self._by_drafter.setdefault(name, Counter()).update(drafted=counts.drafted, accepted=counts.accepted)

    def figures(self, n_depths: int = 6) -> dict[str, object]:
        """Tokens a pass; how often the draft token at each depth was accepted where those before were; by drafter."""
        n_accepted = [self.passes, *(self._by_depth[depth + 1] for depth in range(n_depths))]
        pairs = zip(n_accepted, n_accepted[1:], strict=False)
        return {
            "tokens": self.tokens,
            "tokens_per_pass": round(self.tokens / self.passes, 3),
            "accepted_by_depth": [round(n / before, 3) if before else 0.0 for before, n in pairs],
            "by_drafter": self._by_drafter,
        }


def finish(benchmark: str, model: Path, out: Path | None, found: dict[str, Any]) -> NoReturn:
    """Say what was found as one JSON line, and in a file; ends with 1 if texts were "different"."""
    record = {"benchmark": benchmark, "machine": machine(), "model": model.name, "date": time.strftime("%Y-%m-%d")}
    record |= {"command": " ".join(["python", *sys.argv]), **found}
    print(json.dumps(record))
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if found["different"] else 0)
