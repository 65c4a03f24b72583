"""How many replicas of `edgeinfer serve` a number of users takes, and what hands out their requests.

    python tests/benchmarks/simulate_fleet.py MEASURED.json --prefill TOKENS_PER_SECOND [--users 1000,100000,10000000] \
        [--replicas 50 --routing hash] [--router ROUTER.json]

MEASURED.json is of bench_server.py: tokens a second of all texts by how many run. This is a queueing simulation of a
cell of replicas and its users, who think (exponential), ask (prompt and answer of lognormal lengths), and wait: for a
place, for their prompt, for their tokens. A prompt is read before tokens of others, but for the share that keeps them
at the target of the time between tokens, as the scheduler does it. A conversation belongs to the replica that a
consistent hash gives; with --most a replica that has so many requests passes one on to the next, which reads the whole
conversation. The most users of a replica are those with which the 95th percentile of the time to
the first token, and the mean time between tokens, stay within their limits. Replicas and cells share nothing, so that a
fleet is as many copies.

ROUTER.json is of bench_router.py: what a stream, an event of it and a health check cost. From these and the simulated
waits it counts what the routers of a fleet carry, and how many cores that is.

This is a model with measured speeds, no measurement of a fleet. One JSON line on stdout.
"""

from __future__ import annotations

import bisect
import heapq
import json
import math
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

Routing = Literal["even", "hash"]


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
    """Of a user.

    think: mean seconds between an answer and the next question.  prompt, answer: median tokens, of a prompt those that
    are not in the cache of its own replica.  history: tokens that another replica has to read besides.  spread: of the
    logarithm of prompt and answer.
    """

    think: float
    prompt: float
    answer: float
    history: float = 1000.0
    spread: float = 0.7


@dataclass
class _User:
    """home: places of its replicas, the first one before those that come after it.  missing: tokens that home lacks."""

    home: list[int]
    missing: float = 0.0


@dataclass
class _Text:
    user: _User
    asked: float
    prompt: float  # tokens that are still to be read
    answer: float  # that are still to be drawn
    n_answer: float
    first: float = math.nan


@dataclass
class _Queue:
    """A replica's texts at a time."""

    replica: Replica
    now: float = 0.0
    busy: float = 0.0
    waiting: list[_Text] = field(default_factory=list)
    running: list[_Text] = field(default_factory=list)
    version: int = 0  # of its next event, so that the heap's older ones are known

    @property
    def n_texts(self) -> int:
        return len(self.waiting) + len(self.running)

    def _state(self) -> tuple[_Text | None, list[_Text], float, float]:
        """(the text that is read, those that decode, tokens a second of the first and of each of the others)."""
        reading = [text for text in self.running if text.prompt > 0]
        decoding = [text for text in self.running if text.prompt <= 0]
        return (
            min(reading, key=lambda text: text.prompt, default=None),
            decoding,
            *self.replica.rates(len(reading), len(decoding)),
        )

    def seconds_to_event(self) -> float:
        """Until a prompt is read or a text ends, if nothing comes."""
        read, decoding, read_rate, rate = self._state()
        until = math.inf if read is None else read.prompt / read_rate
        return min(until, min(text.answer for text in decoding) / rate) if decoding else until

    def advance(self, to: float) -> list[_Text]:
        """Work until then, before the next event or at it; gives the texts that have ended."""
        read, decoding, read_rate, rate = self._state()
        step, self.now = max(0.0, to - self.now), to
        self.busy += step if self.running else 0.0
        if read is not None:
            read.prompt -= step * read_rate
            if read.prompt <= 1e-9:
                read.prompt, read.first = 0.0, to
        ended = []
        for text in decoding:
            text.answer -= step * rate
            if text.answer <= 1e-9:
                self.running.remove(text)
                ended.append(text)
        self.admit()
        return ended

    def admit(self) -> None:
        """Waiting texts take free places."""
        while self.waiting and len(self.running) < self.replica.n_places:
            self.running.append(self.waiting.pop(0))


@dataclass(frozen=True)
class Waits:
    """first_p95: seconds to the first token.  between: mean seconds between tokens.  busy: share of the time.

    moved: share of the requests that another replica than their own answered.  asked: requests a second of a user.
    stays: mean seconds from a request to the end of its answer.  tokens: mean number of an answer's.
    """

    first_p95: float
    between: float
    busy: float
    moved: float = 0.0
    asked: float = 0.0
    stays: float = 0.0
    tokens: float = 0.0


def homes(n_users: int, n_replicas: int, routing: Routing, rng: random.Random, n_points: int = 100) -> list[list[int]]:
    """The replicas of each user: one each in turn, or the first ones of a ring with so many points a replica."""
    if routing == "even" or n_replicas == 1:
        return [[number % n_replicas] for number in range(n_users)]
    ring = sorted((rng.random(), number) for number in range(n_replicas) for _ in range(n_points))
    places = [place for place, _ in ring]
    found = []
    for _ in range(n_users):
        at, mine = bisect.bisect(places, rng.random()), list[int]()
        while len(mine) < min(4, n_replicas):
            number = ring[at % len(ring)][1]
            mine += [] if number in mine else [number]
            at += 1
        found.append(mine)
    return found


class _Cell:
    """Replicas and their users."""

    def __init__(self, replica: Replica, habits: Habits, users: list[_User], n: int, rng: random.Random) -> None:
        self._habits, self._rng = habits, rng
        self._queues = [_Queue(replica) for _ in range(n)]
        self._arrivals = [(rng.expovariate(1.0 / habits.think), at) for at in range(len(users))]
        heapq.heapify(self._arrivals)
        self._users = users
        self._number = {id(user): at for at, user in enumerate(users)}
        self._events: list[tuple[float, int, int]] = []  # when, of which queue, its version
        self.ended: list[tuple[float, _Text]] = []
        self.n_asked = self.n_moved = 0

    def run(self, seconds: float, most: float) -> float:
        """Simulate so long; gives the share of the time in which a replica was busy. most: requests of a replica."""
        now = 0.0
        while now < seconds:
            while self._events and self._events[0][2] != self._queues[self._events[0][1]].version:
                heapq.heappop(self._events)
            event = self._events[0][0] if self._events else math.inf
            if event <= (self._arrivals[0][0] if self._arrivals else math.inf):
                now, at, _ = heapq.heappop(self._events)
                self._advance(at, now)
            else:
                now, number = heapq.heappop(self._arrivals)
                self._ask(self._users[number], now, most)
        return sum(queue.busy for queue in self._queues) / (now * len(self._queues))

    def _advance(self, at: int, now: float) -> None:
        queue = self._queues[at]
        for text in queue.advance(now):
            self.ended.append((now, text))
            again = now + self._rng.expovariate(1.0 / self._habits.think)
            heapq.heappush(self._arrivals, (again, self._number[id(text.user)]))
        queue.version += 1
        if (until := queue.seconds_to_event()) < math.inf:
            heapq.heappush(self._events, (now + until, at, queue.version))

    def _ask(self, user: _User, now: float, most: float) -> None:
        habits = self._habits
        prompt, answer = (
            max(1.0, self._rng.lognormvariate(math.log(median), habits.spread))
            for median in (habits.prompt, habits.answer)
        )
        free = (at for at in user.home if self._queues[at].n_texts < most)
        at = next(free, user.home[0])
        self.n_asked += 1
        if at == user.home[0]:
            text = _Text(user, now, prompt + user.missing, answer, answer)
            user.missing = 0.0
        else:
            self.n_moved += 1
            text = _Text(user, now, prompt + habits.history, answer, answer)
            user.missing += prompt + answer
        self._queues[at].advance(now)  # before its next event, so that none ends
        self._queues[at].waiting.append(text)
        self._queues[at].admit()
        self._advance(at, now)


def simulate(
    replica: Replica,
    habits: Habits,
    n_users: int,
    seconds: float,
    *,
    n_replicas: int = 1,
    routing: Routing = "even",
    most: float = math.inf,
    seed: int = 0,
) -> Waits:
    """What users of a cell wait for. The first tenth of the time is left out.

    most: requests that a replica has before the next one is asked.
    """
    rng = random.Random(seed)
    users = [_User(home) for home in homes(n_users, n_replicas, routing, random.Random(seed + 1))]
    cell = _Cell(replica, habits, users, n_replicas, rng)
    busy = cell.run(seconds, most)
    ended = [(now, text) for now, text in cell.ended if now > 0.1 * seconds]
    if len(ended) < 20:
        return Waits(math.inf, math.inf, busy)
    firsts = [text.first - text.asked for _, text in ended]
    between = statistics.mean((now - text.first) / text.n_answer for now, text in ended)
    return Waits(
        first_p95=statistics.quantiles(firsts, n=20)[-1],
        between=between,
        busy=busy,
        moved=cell.n_moved / cell.n_asked,
        asked=len(ended) / (0.9 * seconds * n_users),
        stays=statistics.mean(now - text.asked for now, text in ended),
        tokens=statistics.mean(text.n_answer for _, text in ended),
    )


def most_users(
    replica: Replica,
    habits: Habits,
    first: float,
    between: float,
    seconds: float,
    *,
    n_replicas: int = 1,
    routing: Routing = "even",
    most: float = math.inf,
) -> tuple[int, Waits]:
    """The most users of a cell whose waits are within both limits, and these; 0 where one user waits longer."""

    def waits(n: int) -> Waits:
        return simulate(replica, habits, n, seconds, n_replicas=n_replicas, routing=routing, most=most)

    def is_fine(found: Waits) -> bool:
        return found.first_p95 <= first and found.between <= between

    least, above = 0, n_replicas
    while is_fine(waits(above)) and above < n_replicas << 16:
        least, above = above, 2 * above
    while above - least > max(1, least // 50):
        middle = (least + above) // 2
        least, above = (middle, above) if is_fine(waits(middle)) else (least, middle)
    return least, waits(least) if least else Waits(math.inf, math.inf, 0.0)


@dataclass(frozen=True)
class Router:
    """What bench_router.py has counted. CPU seconds of a router's core, but for `replica_check`, of a replica's.

    replica_check: that a health check takes of a replica.  stream_bytes: of memory for an open stream.
    """

    request: float
    event: float
    check: float
    replica_check: float
    stream_bytes: float

    @classmethod
    def read(cls, path: Path) -> Router:
        """Of a line of bench_router.py."""
        found = json.loads(path.read_text())["router"]
        return cls(
            *(1e-6 * found[f"{name}_us"] for name in ("request", "event", "check", "replica_check")),
            1024.0 * found["stream_kib"],
        )


@dataclass(frozen=True)
class Fleet:
    """For so many users.  streams: that run or wait at a time."""

    users: int
    replicas: int
    requests_per_second: float
    streams: float
    tokens_per_second: float

    def routed(self, router: Router, cell: int, busy: float = 0.5) -> dict[str, Any]:
        """What its routers carry, which each check each of their replicas once a second, and how many cores that is.

        busy: share of its core that a router is to be busy at most.  In the reply: flat, one layer of routers that know
        all replicas, None where the checks alone take more than a core has; cells, of so many replicas each.
        """
        work = self.requests_per_second * router.request + self.tokens_per_second * router.event
        n_cells, per_router = math.ceil(self.replicas / cell), self.replicas * router.check
        of_cell = work / n_cells + min(cell, self.replicas) * router.check
        # Routers of a core each share the work, but each makes all checks.
        flat = math.ceil(work / (busy - per_router)) if per_router < busy else None
        return {
            "open_streams": round(self.streams),
            "events_per_second": round(self.tokens_per_second),
            "router_gib": round(self.streams * router.stream_bytes / (1 << 30), 2),
            "flat": {
                "router_cores": flat,
                "checks_per_second_of_a_router": self.replicas,
                "share_of_a_core_for_checks": round(per_router, 3),
                "share_of_a_replica_for_checks": None if flat is None else round(flat * router.replica_check, 4),
            },
            "cells": {
                "cells": n_cells,
                "router_cores": n_cells * math.ceil(of_cell / busy),
                "busy": round(of_cell, 3),
                "users_of_a_cell": round(self.users / n_cells),
            },
        }


def fleet_of(n_users: int, per_replica: float, waits: Waits) -> Fleet:
    """A fleet for so many users, of so many each, who wait as was simulated."""
    rate = n_users * waits.asked
    return Fleet(n_users, math.ceil(n_users / per_replica), rate, rate * waits.stays, rate * waits.tokens)


@click.command()
@click.argument("measured", type=click.Path(exists=True, path_type=Path))
@click.option("--server", default="edgeinfer", show_default=True, help="Whose speeds of MEASURED.")
@click.option("--section", help="Of MEASURED, where it has several models.")
@click.option("--prefill", type=float, required=True, help="Prompt tokens a second.")
@click.option("--memory", default=0.0, help="GiB that a replica takes.")
@click.option("--users", default="1000,100000,10000000", show_default=True)
@click.option("--places", default=8, show_default=True, help="Texts that run at once.")
@click.option("--think", default=60.0, show_default=True, help="Mean seconds between an answer and the next question.")
@click.option("--prompt", default=150.0, show_default=True, help="Median tokens of a prompt that are not cached.")
@click.option("--answer", default=200.0, show_default=True, help="Median tokens of an answer.")
@click.option("--history", default=1000.0, show_default=True, help="Tokens that another replica reads besides.")
@click.option("--first", default=2.0, show_default=True, help="Most seconds to the first token, 95th percentile.")
@click.option("--between", default=0.1, show_default=True, help="Most seconds between tokens, mean.")
@click.option("--seconds", default=6000.0, show_default=True, help="Simulated time.")
@click.option("--replicas", default=1, show_default=True, help="That are simulated together.")
@click.option("--routing", type=click.Choice(["even", "hash"]), default="even", show_default=True)
@click.option("--most", type=int, help="Requests of a replica before the next one is asked.")
@click.option("--router", type=click.Path(exists=True, path_type=Path), help="Of bench_router.py.")
@click.option("--cell", default=500, show_default=True, help="Replicas behind one router.")
def main(measured: Path, server: str, section: str | None, users: str, **options: Any) -> None:
    """See the top of this file."""
    found = json.loads(measured.read_text())
    found = found if section is None else found[section]
    speeds = sorted((int(n), float(each["tokens_per_second"])) for n, each in found[server].items())
    replica = Replica(tuple(speeds), options["prefill"], options["places"], options["between"])
    habits = Habits(options["think"], options["prompt"], options["answer"], options["history"])
    n_replicas, routing = options["replicas"], options["routing"]
    limits = {name: options[name] for name in ("first", "between")}
    most = math.inf if options["most"] is None else options["most"]
    n_users, waits = most_users(
        replica, habits, **limits, seconds=options["seconds"], n_replicas=n_replicas, routing=routing, most=most
    )
    if not n_users:
        raise click.ClickException("one user waits longer than the limits allow")
    per_replica = n_users / n_replicas
    router = None if options["router"] is None else Router.read(options["router"])
    fleets: dict[int, Any] = {}
    for number in map(int, users.split(",")):
        fleet = fleet_of(number, per_replica, waits)
        fleets[number] = {
            "replicas": fleet.replicas,
            "memory_gib": round(options["memory"] * fleet.replicas, 1),
            "requests_per_second": round(fleet.requests_per_second, 1),
            **({} if router is None else fleet.routed(router, options["cell"])),
        }
    report = {
        "simulated": True,
        "model": found["model"],
        "speeds": dict(speeds),
        "users_per_replica": round(per_replica, 2),
        "waits": {
            "first_p95_s": round(waits.first_p95, 3),
            "between_ms": round(1e3 * waits.between, 1),
            "busy": round(waits.busy, 3),
            "moved": round(waits.moved, 4),
        },
        "fleets": fleets,
        "options": {name: options[name] for name in ("think", "prompt", "answer", "history", "places", "prefill")}
        | {
            "replicas": n_replicas,
            "routing": routing,
            "most": options["most"],
            "seconds": options["seconds"],
            "cell": options["cell"],
        },
        "limits": limits,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
