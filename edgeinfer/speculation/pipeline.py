"""The loop: ask the drafters, choose a tree, check it, take what was right, learn. The engine drives it."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter

from edgeinfer.backends.base import Session
from edgeinfer.errors import BackendLost, EdgeInferError, Interrupted
from edgeinfer.speculation.cost import DEFAULT_DRAFT_MAX, CostModel
from edgeinfer.speculation.drafters.base import Context, CostlyDrafter, Drafter, DraftsAhead, FeatureDrafter
from edgeinfer.speculation.policy import (
    ChanceTable,
    Choice,
    Proposal,
    Reward,
    choose,
    floor_of,
    rate_ahead,
    rate_of_chain,
)
from edgeinfer.speculation.stats import Tally
from edgeinfer.speculation.timeline import Timeline
from edgeinfer.speculation.tree import checked
from edgeinfer.speculation.verify import Draw, accept
from edgeinfer.types import Features, Logits

_ASKED_EVERY = 8  # steps, of a free drafter that gains less than its own time
_GAIN_DECAY = 0.97  # of what a drafter gained, each step
_LEAST_CREDIT = 0.25  # of a pass of one token: what a free drafter that lost lately may cost the next text
_ANSWER = 256  # tokens that an answer is taken to have before there was one
_PATIENCE = 0.1  # of a pass of one token: the target waits no longer for drafts that are made while it works
# By how much a drafter that takes time must be better alone than one by one, and than drafts that cost nothing: beside
# those it is worth more than alone.
_GAIN, _BESIDE = 1.05, 0.9
# Steps without a draft after which doubtful costs are measured again, and how many times as many the next time.
_IDLE, _LATER = 32, 4
_RECHECKED = (2, 4)  # tokens that the next passes are filled up to
# Steps without a long pass after which one is filled up to so many tokens, and the most of them as they grow: what was
# measured once, on a machine that was busy just then, would else keep drafts short for ever.
_LONG, _UNTRIED, _SELDOM = 8, 64, 4096


@dataclass(slots=True)
class Job:
    """What the engine wants decoded.

    text: the tokens so far, the last of which is not committed; extended by what is drawn.  limit: most to draw.
    draw: the target's way to draw.  is_greedy: it takes the likeliest.  stop_ids: tokens that end the text.  is_plain:
    see Context.  n_drawn: so far.
    """

    text: list[int]
    limit: int
    draw: Draw
    is_greedy: bool
    stop_ids: Container[int]
    is_plain: bool = False
    n_drawn: int = 0

    @property
    def n_left(self) -> int:
        """Most tokens to draw from here on."""
        return self.limit - self.n_drawn


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a drafter works, for people.

    spare: makes the one that takes its place when that fails; None for nothing.  takes_memory: the spare has only the
    memory that the drafter gives back.
    """

    where: str
    spare: Callable[[], Drafter] | None = field(default=None, repr=False)
    takes_memory: bool = False


class _Seat:
    """A drafter, what was learnt about it, and whether it is asked."""

    def __init__(self, drafter: Drafter, share_right: float | None = None) -> None:
        self.drafter = drafter
        self.table = ChanceTable(share_right)
        self.costly = drafter if isinstance(drafter, CostlyDrafter) else None
        self.follower = drafter if isinstance(drafter, FeatureDrafter) else None
        self.ahead = drafter if isinstance(drafter, DraftsAhead) else None
        self.is_dropped = False
        self.lost = ""  # how what it ran on failed
        self.is_asked = False  # in this step
        self.gain = math.inf  # milliseconds that a free drafter saved lately, less what it took
        self.n_steps = 0

    @property
    def is_awake(self) -> bool:
        """Whether a free drafter is to work in this step. One that does not pay is tried again now and then."""
        return not self.is_dropped and (self.gain >= 0.0 or self.n_steps % _ASKED_EVERY == 0)

    def count(self, milliseconds: Sequence[float], n_nodes: int, n_own: int, n_right: int) -> None:
        """A step checked n_nodes, of them n_own of this drafter, n_right of which were right."""
        self.n_steps += 1
        self.gain *= _GAIN_DECAY
        if n_own:
            cost = (milliseconds[n_nodes + 1] - milliseconds[1]) / n_nodes
            self.gain += n_right * milliseconds[1] - n_own * cost

    @contextmanager
    def working(self, tally: Tally) -> Iterator[None]:
        """Around what the drafter does: takes its time, and drops it for this request if it raises, noting why."""
        started = perf_counter()
        try:
            yield
        except Interrupted:
            raise
        except Exception as error:  # whatever a drafter does, the text goes on
            self.is_dropped = True
            if isinstance(error, (BackendLost, MemoryError)):
                self.lost = str(error) or "out of memory"
            tally.dropped[self.drafter.name] = f"{type(error).__name__}: {error}"
        seconds = perf_counter() - started
        self.gain -= 1e3 * seconds
        if self.costly is not None:
            tally.waited_seconds += seconds

    def rate(self, context: Context, milliseconds: Sequence[float], max_nodes: int) -> tuple[float, float]:
        """Tokens a millisecond that a drafter which takes time promises, and milliseconds before its first draft."""
        if self.costly is None:
            return 0.0, 0.0
        each, before = self.costly.cost(context)
        rate_of = rate_of_chain if self.ahead is None else rate_ahead
        return rate_of(self.table.mean, each, milliseconds, max_nodes), before


class Speculator:
    """Decodes with drafts. What the drafters know and what was learnt about them outlives a request.

    session: the target's.  costs: of its forward passes.  n_vocab: tokens that exist, a first part of the logits.
    draft_max: most nodes of a tree.  placed: by the names of drafters that have a place; kept as it changes.
    shares_right: by the names of drafters of which it was measured, the share of their tokens that are right.
    """

    def __init__(
        self,
        session: Session,
        drafters: Sequence[Drafter],
        costs: CostModel,
        n_vocab: int,
        draft_max: int,
        placed: Mapping[str, Placed] | None = None,
        shares_right: Mapping[str, float] | None = None,
    ) -> None:
        self._session = session
        self.costs = costs
        self._n_vocab = n_vocab
        self._draft_max = min(draft_max, DEFAULT_DRAFT_MAX, session.n_batch - 1)
        self._shares_right = dict(shares_right or {})
        self._seats = [self._seat(drafter) for drafter in drafters]
        self.placed = dict(placed or {})
        self._n_idle, self._idle_limit = 0, _IDLE
        self._to_recheck: list[int] = []  # sizes of passes
        self._n_short, self._short_limit = 0, _UNTRIED
        self._usual = float(_ANSWER)  # tokens of an answer: the mean of the last ones, each counting half of the next
        self._timeline: Timeline | None = None

    @property
    def drafters(self) -> list[Drafter]:
        """Those that were given."""
        return [seat.drafter for seat in self._seats]

    @property
    def timeline(self) -> Timeline | None:
        """Where checks, drafts and waits are noted, None for nowhere; may be set between requests."""
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        for seat in self._seats:
            if seat.ahead:
                seat.ahead.timeline = timeline

    @property
    def taps(self) -> bool | tuple[int, ...]:
        """The target's hidden rows that the drafter wants which goes on from them; see FeatureDrafter."""
        return next((seat.follower.taps for seat in self._seats if seat.follower), False)

    def follow(self, text: Sequence[int], first: int, features: Features, tally: Tally) -> None:
        """Hand on the target's hidden rows (n, n_taps * n_embd) of the tokens from text[first] on."""
        self._replace_lost(tally)
        for seat in self._seats:
            if seat.follower and seat.drafter.name not in tally.dropped:
                with seat.working(tally):
                    seat.follower.follow(text, first, features)

    def tokens(self, job: Job, logits: Logits, tally: Tally) -> Iterator[int]:
        """The token that job.text ends with, drawn from logits (n_vocab,), and up to job.limit that follow it."""
        context = self._start(job, logits, tally)
        yield job.text[-1]
        try:
            while job.n_left > 0:
                new = self._step(job, context, tally)
                job.n_drawn += len(new)
                yield from new
        finally:
            # An answer that came to its limit would have gone on.
            self._usual = (self._usual + (job.n_drawn if job.n_left else max(job.n_drawn, self._usual))) / 2
            for seat in self._seats:
                if seat.ahead:  # it would draft on behind the answer
                    seat.ahead.interrupt()

    def interrupt(self) -> None:
        """Stop a drafter that works; callable from any thread."""
        for seat in self._seats:
            if seat.costly:
                seat.costly.interrupt()

    def close(self) -> None:
        """Give the drafters' memory back, and keep what was learnt of the costs."""
        self.costs.close()
        for seat in self._seats:
            with suppress(BackendLost):  # what hangs keeps what it has
                seat.drafter.close()

    # ---- A request ---------------------------------------------------------------------------------------------------

    def _start(self, job: Job, logits: Logits, tally: Tally) -> Context:
        """Begin a request. Drafters that were dropped in the last one are back, unless the prompt was too much."""
        self._replace_lost(tally)
        context = Context(job.text[:-1], job.draw, job.is_greedy, is_plain=job.is_plain)
        milliseconds = self.costs.milliseconds(self._session.n_past)
        for seat in self._seats:
            seat.is_dropped = seat.drafter.name in tally.dropped
            seat.table.forget_half()
            if not seat.is_dropped:
                with seat.working(tally):
                    seat.drafter.start(context)
            seat.gain = min(max(seat.gain, _LEAST_CREDIT * milliseconds[1]), milliseconds[1])
        self._observe(context, job.text[-1:], [logits], tally)
        for seat in self._seats:
            context.outlook = seat.table
            with seat.working(tally):
                if seat.costly and self._pays(seat, context, 1.0 / milliseconds[1], milliseconds, job):
                    seat.costly.read(context)
        return context

    def _seat(self, drafter: Drafter) -> _Seat:
        return _Seat(drafter, self._shares_right.get(drafter.name))

    def _replace_lost(self, tally: Tally) -> None:
        """Put spares in the places of drafters whose devices failed in an earlier request."""
        for seat in [seat for seat in self._seats if seat.lost and seat.drafter.name not in tally.dropped]:
            name, why = seat.drafter.name, seat.lost
            placed, seat.lost = self.placed.get(name, Placed("")), ""
            if placed.spare is None or (not _closed(seat.drafter) and placed.takes_memory):
                continue
            try:
                spares = [self._seat(placed.spare())]
                self.placed[name] = Placed(f"the CPU; it was {placed.where}: {why}")
            except (EdgeInferError, OSError, MemoryError) as error:
                spares = []
                tally.dropped[name] = str(error)
            place = self._seats.index(seat)
            self._seats[place : place + 1] = spares

    def _step(self, job: Job, context: Context, tally: Tally) -> list[int]:
        """Draft, check, take; gives the new tokens, at least one."""
        started = perf_counter()
        n_past = self._session.n_past
        milliseconds = self.costs.milliseconds(n_past)
        max_nodes = min(self._draft_max, self._session.n_ctx - n_past - 1)
        proposals, choice = self._draft(job, context, milliseconds, max_nodes, tally)
        if job.n_left > len(choice.path) + 1:
            self._go_on(context, [choice.tokens[node] for node in choice.path], max_nodes, tally)
        batch = [job.text[-1], *choice.tokens]
        parents = [-1, *(parent + 1 for parent in choice.parents)]
        n_filled = self._n_filled(len(choice.tokens), max_nodes)
        parents += range(len(batch) - 1, len(batch) - 1 + n_filled)
        batch += [0] * n_filled  # nobody looks at what comes of them
        drafted = perf_counter()
        follows = any(seat.follower and not seat.is_dropped for seat in self._seats)
        out = self._session.forward(batch, parents, logits="all", hidden=self.taps if follows else False)
        rows = out.logits
        passed = perf_counter()
        nodes = enumerate(zip(choice.parents, choice.tokens, strict=True), start=1)
        children = {(parent + 1, token): row for row, (parent, token) in nodes}
        new, path = accept(rows, children, job.draw, job.text, job.stop_ids)
        self._session.commit(path)
        walked = perf_counter()
        accepted = [row - 1 for row in path[1:]]
        self._learn(proposals, choice, accepted, new)
        features = out.features
        features = None if features is None else features[path]
        self._observe(context, new, [rows[row] for row in path], tally, features)
        # What was doubtful and is corrected does not say that the machine became faster.
        note_cost = self.costs.correct if n_filled else self.costs.observe
        note_cost(len(batch), n_past, 1e3 * (passed - drafted))
        tally.count(len(new), choice.depths, choice.owners, accepted)
        tally.verify_seconds += passed - drafted
        tally.plain_seconds += 1e-3 * milliseconds[1] * len(new) + walked - passed
        ended = perf_counter()
        if self._timeline is not None:
            self._timeline.add("verify", drafted, passed, len(batch))
        tally.draft_seconds += drafted - started + ended - walked
        tally.step_seconds += ended - started
        return new

    def _n_filled(self, n_nodes: int, max_nodes: int) -> int:
        """Tokens to fill a pass up with, to time it: wrong costs of passes that none needs would otherwise stay."""
        self._n_idle = 0 if n_nodes else self._n_idle + 1
        self._n_short = 0 if n_nodes + 1 >= _LONG else self._n_short + 1
        if self._n_short >= self._short_limit and max_nodes + 1 >= _LONG:
            self._n_short, self._short_limit = 0, min(_LATER * self._short_limit, _SELDOM)
            return _LONG - 1 - n_nodes
        if self._n_idle >= self._idle_limit and self.costs.is_doubtful:
            self._n_idle, self._idle_limit, self._to_recheck = 0, _LATER * self._idle_limit, list(_RECHECKED)
        if n_nodes or not self._to_recheck or self._to_recheck[0] > max_nodes + 1:
            return 0
        return self._to_recheck.pop(0) - 1

    def _draft(
        self, job: Job, context: Context, milliseconds: Sequence[float], max_nodes: int, tally: Tally
    ) -> tuple[list[Proposal], Choice]:
        """What the drafters propose, and the tree to check."""
        if max_nodes < 1 or job.n_left < 2:
            return [], Choice()
        proposals: list[Proposal] = []
        floor = floor_of(milliseconds)
        for seat in self._seats:
            if not seat.costly and seat.is_awake:
                seat.table.floor = floor
                self._ask(seat, context, max_nodes, proposals, tally)
        max_depth = job.n_left - 1
        choice = choose(proposals, milliseconds, max_nodes, max_depth, floor) if proposals else Choice()
        rate = choice.expected / milliseconds[len(choice.tokens) + 1]
        started = perf_counter()
        for seat in self._seats:
            if seat.costly and not seat.is_dropped:
                asked = perf_counter()
                seat.table.floor, seat.table.patience = floor, _PATIENCE * milliseconds[1]
                with seat.working(tally):
                    was_asked, seat.is_asked = seat.is_asked, self._pays(seat, context, rate, milliseconds, job)
                    if not seat.is_asked:
                        if seat.ahead and was_asked:
                            seat.ahead.interrupt()
                        continue
                    each, before = seat.costly.cost(context)
                    seat.table.reward = Reward(milliseconds, each, before, min(max_nodes, max_depth))
                costly: list[Proposal] = []
                self._ask(seat, context, max_nodes, costly, tally)
                proposals = costly + proposals  # it knows more than those who copy
                self._note_wait(seat, asked)
                spent = 1e3 * (perf_counter() - started)
                choice = choose(proposals, milliseconds, max_nodes, max_depth, floor, spent)
        return proposals, choice

    def _go_on(self, context: Context, path: Sequence[int], max_nodes: int, tally: Tally) -> None:
        """Let drafters on other devices draft behind what is about to be checked."""
        for seat in self._seats:
            if seat.ahead and seat.is_asked and not seat.is_dropped:
                context.outlook = seat.table
                with seat.working(tally):
                    seat.ahead.go_on(context, path, max_nodes)

    def _ask(self, seat: _Seat, context: Context, max_nodes: int, proposals: list[Proposal], tally: Tally) -> None:
        """Add the drafter's proposal, unless it is empty or wrong."""
        if seat.is_dropped:
            return
        context.outlook = seat.table
        with seat.working(tally):
            tree = checked(seat.drafter.propose(context, max_nodes), self._n_vocab, max_nodes)
            if tree.tokens:
                proposals.append(Proposal(seat.drafter.name, tree, seat.table))

    def _note_wait(self, seat: _Seat, started: float) -> None:
        """Put the time since a drafter was asked into the timeline."""
        if self._timeline is not None:
            ended = perf_counter()
            self._timeline.add("wait", started, ended, 0)
            if not seat.ahead:  # else it notes what it does
                self._timeline.add("draft", started, ended, 0)

    def _pays(self, seat: _Seat, context: Context, rate: float, milliseconds: Sequence[float], job: Job) -> bool:
        """Whether a drafter that takes time is worth it against that many tokens a millisecond.

        What it has to read first must be earned back by the tokens that are still to come: those that an answer usually
        has, or as many again as there are.
        """
        if seat.costly is None or seat.is_dropped or self._draft_max < 1:
            return False
        own_rate, before = seat.rate(context, milliseconds, self._draft_max)
        n_left = min(job.n_left, max(self._usual - job.n_drawn, job.n_drawn))
        other = max(1.0 / milliseconds[1], _BESIDE * rate)
        return own_rate * milliseconds[1] > _GAIN and (1.0 / other - 1.0 / own_rate) * n_left > before

    def _learn(
        self, proposals: Sequence[Proposal], choice: Choice, accepted: Sequence[int], new: Sequence[int]
    ) -> None:
        """Compare every draft with what came, and what each drafter saved with what it took."""
        for _, tree, table in proposals:
            table.learn(tree, new)
        n_nodes, milliseconds = len(choice.tokens), self.costs.milliseconds(self._session.n_past)
        right = [choice.owners[node] for node in accepted]
        for seat in self._seats:
            name = seat.drafter.name
            seat.count(milliseconds, n_nodes, choice.owners.count(name), right.count(name))

    def _observe(
        self,
        context: Context,
        new: Sequence[int],
        rows: Sequence[Logits],
        tally: Tally,
        features: Features | None = None,
    ) -> None:
        first = len(context.tokens) - 1
        context.tokens.extend(new)
        if features is not None:
            self.follow(context.tokens, first, features, tally)
        rows = [row[: self._n_vocab] for row in rows]
        for seat in self._seats:
            if seat.is_awake:
                with seat.working(tally):
                    seat.drafter.observe(context, len(new), rows)


def _closed(drafter: Drafter) -> bool:
    """Whether a drafter could be closed, and gave back what it had."""
    try:
        drafter.close()
    except Exception:  # its device failed, and may fail in any way
        return False
    return True
