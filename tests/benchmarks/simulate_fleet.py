"""How many replicas of `edgeinfer serve` a number of users takes: a queueing simulation of one replica, scaled up.

    python tests/benchmarks/simulate_fleet.py MEASURED.json --prefill TOKENS_PER_SECOND [--users 1000,100000,10000000]

MEASURED.json is of bench_server.py: tokens a second of all texts by how many run. Replicas share nothing, and a user's
conversation stays with one of them, so that a fleet is as many copies of one replica. Of that one this simulates users
who think (exponential), ask (prompt and answer of lognormal lengths), and wait: for a place, for their prompt, for
their tokens. A prompt is read before tokens of others, but for the share that keeps them at the target of the time
between tokens, as the scheduler does it. The most users that a replica can have are those with which the 95th
percentile of the time to the first token, and the mean time between tokens, stay within their limits.

This is a model with measured speeds, no measurement of a fleet. One JSON line on stdout.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np


@dataclass(frozen=True)
class Replica:
    """speeds: (number of running texts, tokens a second of all of them), ascending.  prefill: prompt tokens a second.

    tbt: seconds between tokens of running texts while a prompt is read.
    """

    speeds: tuple[tuple[int, float], ...]
    prefill: float
    n_places: int
    tbt: float

    def decoding(self, n: int) -> float:
        """Tokens a second of n texts."""
        return float(np.interp(n, [each[0] for each in self.speeds], [each[1] for each in self.speeds]))

    def rates(self, n_reading: int, n_decoding: int) -> tuple[float, float]:
        """Tokens a second of the prompt that is read, and of each text that decodes."""
        if not n_reading:
            return 0.0, self.decoding(n_decoding) / n_decoding if n_decoding else 0.0
        if not n_decoding:
            return self.prefill, 0.0
        each = min(1.0 / self.tbt, self.decoding(n_decoding) / n_decoding)
        share = min(0.9, each * n_decoding / self.decoding(n_decoding))
        return (1.0 - share) * self.prefill, each


@dataclass(frozen=True)
class Habits:
    """Of a user.  think: mean seconds between an answer and the next question.  prompt, answer: median tokens, of a

    prompt those that are not in the cache.  spread: of the logarithm of both.
    """

    think: float
    prompt: float
    answer: float
    spread: float = 0.7


@dataclass
class _Text:
    asked: float
    prompt: float  # tokens that are still to be read
    answer: float  # that are still to be drawn
    n_answer: float
    first: float = math.nan


@dataclass(frozen=True)
class Waits:
    """first_p95: seconds to the first token.  between: mean seconds between tokens.  busy: share of the time."""

    first_p95: float
    between: float
    busy: float


def simulate(replica: Replica, habits: Habits, n_users: int, seconds: float, seed: int = 0) -> Waits:
    """What users of one replica wait for. The first tenth of the time is left out."""
    rng = random.Random(seed)
    arrivals = [rng.expovariate(1.0 / habits.think) for _ in range(n_users)]
    heapq.heapify(arrivals)
    waiting: list[_Text] = []
    running: list[_Text] = []
    firsts, betweens = [], []
    now = busy = 0.0
    while now < seconds:
        while waiting and len(running) < replica.n_places:
            running.append(waiting.pop(0))
        reading = [text for text in running if text.prompt > 0]
        decoding = [text for text in running if text.prompt <= 0]
        read, draw = replica.rates(len(reading), len(decoding))
        shortest = min(reading, key=lambda text: text.prompt, default=None)
        step = arrivals[0] - now if arrivals else math.inf
        if shortest is not None:
            step = min(step, shortest.prompt / read)
        if decoding:
            step = min(step, min(text.answer for text in decoding) / draw)
        step, now = max(0.0, step), now + max(0.0, step)
        busy += step if running else 0.0
        if shortest is not None:
            shortest.prompt -= step * read
            if shortest.prompt <= 1e-9:
                shortest.prompt, shortest.first = 0.0, now
        for text in decoding:
            text.answer -= step * draw
            if text.answer <= 1e-9:
                running.remove(text)
                heapq.heappush(arrivals, now + rng.expovariate(1.0 / habits.think))
                if now > 0.1 * seconds:
                    firsts.append(text.first - text.asked)
                    betweens.append((now - text.first) / text.n_answer)
        while arrivals and arrivals[0] <= now:
            heapq.heappop(arrivals)
            prompt, answer = (
                max(1.0, rng.lognormvariate(math.log(median), habits.spread))
                for median in (habits.prompt, habits.answer)
            )
            waiting.append(_Text(now, prompt, answer, answer))
    if len(firsts) < 20:
        return Waits(math.inf, math.inf, busy / now)
    return Waits(statistics.quantiles(firsts, n=20)[-1], statistics.mean(betweens), busy / now)


def most_users(replica: Replica, habits: Habits, first: float, between: float, seconds: float) -> tuple[int, Waits]:
    """The most users of a replica whose waits are within both limits, and these; 0 where one user waits longer."""

    def waits(n: int) -> Waits:
        return simulate(replica, habits, n, seconds)

    def is_fine(found: Waits) -> bool:
        return found.first_p95 <= first and found.between <= between

    least, most = 0, 1
    while is_fine(waits(most)) and most < 1 << 16:
        least, most = most, 2 * most
    while most - least > max(1, least // 50):
        middle = (least + most) // 2
        least, most = (middle, most) if is_fine(waits(middle)) else (least, middle)
    return least, waits(least) if least else Waits(math.inf, math.inf, 0.0)


@click.command()
@click.argument("measured", type=click.Path(exists=True, path_type=Path))
@click.option("--server", default="edgeinfer", show_default=True, help="Whose speeds of MEASURED.")
@click.option("--prefill", type=float, required=True, help="Prompt tokens a second.")
@click.option("--memory", default=0.0, help="GiB that a replica takes.")
@click.option("--users", default="1000,100000,10000000", show_default=True)
@click.option("--places", default=8, show_default=True, help="Texts that run at once.")
@click.option("--think", default=60.0, show_default=True, help="Mean seconds between an answer and the next question.")
@click.option("--prompt", default=150.0, show_default=True, help="Median tokens of a prompt that are not cached.")
@click.option("--answer", default=200.0, show_default=True, help="Median tokens of an answer.")
@click.option("--first", default=2.0, show_default=True, help="Most seconds to the first token, 95th percentile.")
@click.option("--between", default=0.1, show_default=True, help="Most seconds between tokens, mean.")
@click.option("--seconds", default=6000.0, show_default=True, help="Simulated time.")
def main(
    measured: Path,
    server: str,
    prefill: float,
    memory: float,
    users: str,
    places: int,
    think: float,
    prompt: float,
    answer: float,
    first: float,
    between: float,
    seconds: float,
) -> None:
    """See the top of this file."""
    found = json.loads(measured.read_text())
    speeds = sorted((int(n), float(each["tokens_per_second"])) for n, each in found[server].items())
    replica = Replica(tuple(speeds), prefill, places, between)
    habits = Habits(think, prompt, answer)
    n_users, waits = most_users(replica, habits, first, between, seconds)
    fleets = {}
    for number in map(int, users.split(",")):
        n_replicas = math.ceil(number / n_users) if n_users else None
        fleets[number] = {
            "replicas": n_replicas,
            "memory_gib": None if n_replicas is None else round(memory * n_replicas, 1),
            "requests_per_second": round(number / (think + answer * waits.between + waits.first_p95), 1)
            if n_users
            else None,
        }
    report = {
        "simulated": True,
        "model": found["model"],
        "speeds": dict(speeds),
        "users_per_replica": n_users,
        "waits": {
            "first_p95_s": round(waits.first_p95, 3),
            "between_ms": round(1e3 * waits.between, 1),
            "busy": round(waits.busy, 3),
        },
        "fleets": fleets,
        "options": {"think": think, "prompt": prompt, "answer": answer, "places": places, "prefill": prefill},
        "limits": {"first": first, "between": between},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
