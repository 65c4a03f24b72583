"""Random requests of several threads, whose results are compared with those of one request after the other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from edgeinfer.backends.base import PooledModel, Rows
from edgeinfer.common.types import Output
from edgeinfer.engine import Engine

WORDS = "hello world there is the one and some text a b c of many".split()
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RandomRequest:
    """A prompt with options, and what its reader does."""

    prompt: str
    options: dict[str, Any]
    leave_after: int | None = None  # pieces, after which the stream is closed; None reads to the end
    n_samples: int = 1
    scored: tuple[str, ...] = ()  # continuations to score instead

    def run(self, engine: Engine) -> object:
        """What is to be the same whenever it runs."""
        if self.scored:
            return engine.score(self.prompt, self.scored)
        if self.n_samples > 1:
            samples = engine.generate(self.prompt, n=self.n_samples, **self.options)
            return [(each.text, each.tokens, each.finish_reason) for each in samples]
        if self.leave_after is not None:
            tokens: list[int] = []
            with engine.stream(self.prompt, **self.options) as stream:
                for n, piece in enumerate(stream, start=1):
                    tokens += piece.tokens
                    if n == self.leave_after:
                        break
            return tokens
        completion = engine.generate(self.prompt, **self.options)
        return completion.text, completion.tokens, completion.finish_reason, completion.logprobs


def random_requests(
    n: int, seed: int, most_tokens: int = 40, n_words: Sequence[int] = (1, 8, 24)
) -> list[RandomRequest]:
    """Requests of all kinds, many of whose prompts begin alike, with so many words."""
    rng = random.Random(seed)
    beginnings = [" ".join(rng.choices(WORDS, k=rng.choice(n_words))) for _ in range(5)]
    found = []
    for _ in range(n):
        prompt = " ".join([rng.choice(beginnings), *rng.choices(WORDS, k=rng.randint(1, 12))])
        options: dict[str, Any] = {"max_tokens": rng.randint(1, most_tokens), "seed": rng.randrange(1 << 16)}
        options["temperature"] = rng.choice([0.0, 0.2, 0.8, 1.5])
        if rng.random() < 0.3:
            options["stop"] = [rng.choice("aeio ")]
        if rng.random() < 0.3:
            options |= {"repeat_penalty": 1.1, "penalty_last_n": rng.choice([16, 64])}
        if rng.random() < 0.2:
            options["logprobs"] = 2
        leave_after = rng.randint(1, 6) if rng.random() < 0.2 else None
        n_samples = rng.randint(2, 4) if rng.random() < 0.1 else 1
        scored = tuple(rng.choices(WORDS, k=3)) if rng.random() < 0.1 else ()
        found.append(RandomRequest(prompt, options, leave_after, n_samples, scored))
    return found


def in_threads(n: int, work: Callable[[int], _Result], seconds: float = 280.0) -> list[_Result]:
    """What `work` gives for 0..n - 1, each in a thread of its own. Raises what one of them raises."""
    results: dict[int, _Result] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a thread still waits"
    if errors:
        raise errors[0]
    return [results[number] for number in range(n)]


def served(engine: Engine, requests: Sequence[RandomRequest], n_threads: int) -> list[object]:
    """What the requests give, of which each thread makes every n_threads-th."""
    of_thread = in_threads(n_threads, lambda number: [request.run(engine) for request in requests[number::n_threads]])
    found: list[object] = [None] * len(requests)
    for number, results in enumerate(of_thread):
        found[number::n_threads] = results
    return found


def passes_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of texts of the joint passes from now on."""
    sizes: list[int] = []
    model = engine.session.model
    assert isinstance(model, PooledModel)
    forward = model.forward

    def noted(batch: Sequence[Rows]) -> list[Output]:
        sizes.append(len(batch))
        return forward(batch)

    monkeypatch.setattr(model, "forward", noted)
    return sizes
