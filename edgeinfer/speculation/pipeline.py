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
from edgeinfer.speculation.drafters.base import BackgroundDrafter, Context, CostlyDrafter, Drafter, FeatureDrafter
from edgeinfer.speculation.policy import (
    AcceptanceTable,
    ChainLengthRule,
    Proposal,
    VerifyTree,
    chain_rate,
    min_useful_probability,
    overlapped_rate,
    select_tree,
)
from edgeinfer.speculation.stats import StatsCounter
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
class DrafterPlacement:
    """Where a drafter works, for people.

    spare: makes the one that takes its place when that fails; None for nothing.  takes_memory: the spare has only the
    memory that the drafter gives back.
    """

    device: str
    fallback: Callable[[], Drafter] | None = field(default=None, repr=False)
    reuses_memory: bool = False


class _DrafterState:
    """A drafter, what was learnt about it, and whether it is asked."""

    def __init__(self, drafter: Drafter, acceptance_rate: float | None = None) -> None:
        self.drafter = drafter
        self.table = AcceptanceTable(acceptance_rate)
        self.costly = drafter if isinstance(drafter, CostlyDrafter) else None
        self.follower = drafter if isinstance(drafter, FeatureDrafter) else None
        self.background = drafter if isinstance(drafter, BackgroundDrafter) else None
        self.is_dropped = False
        self.lost = ""  # how what it ran on failed
        self.is_asked = False  # in this step
        self.gain = math.inf  # milliseconds that a free drafter saved lately, less what it took
        self.n_steps = 0

    @property
    def is_active(self) -> bool:
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
    def working(self, stats: StatsCounter) -> Iterator[None]:
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
            stats.dropped[self.drafter.name] = f"{type(error).__name__}: {error}"
        seconds = perf_counter() - started
        self.gain -= 1e3 * seconds
        if self.costly is not None:
            stats.waited_seconds += seconds

    def rate(self, context: Context, milliseconds: Sequence[float], max_nodes: int) -> tuple[float, float]:
        """Tokens a millisecond that a drafter which takes time promises, and milliseconds before its first draft."""
        if self.costly is None:
            return 0.0, 0.0
        each, before = self.costly.cost(context)
        rate_of = chain_rate if self.background is None else overlapped_rate
        return rate_of(self.table.mean, each, milliseconds, max_nodes), before


class Speculator:
    """Decodes with drafts. What the drafters know and what was learnt about them outlives a request.

    session: the target's.  costs: of its forward passes.  n_vocab: tokens that exist, a first part of the logits.
    draft_max: most nodes of a tree.  placed: by the names of drafters that have a place; kept as it changes.
    acceptance_rates: by the names of drafters of which it was measured, the share of their tokens that are right.
    """

    def __init__(
        self,
        session: Session,
        drafters: Sequence[Drafter],
        costs: CostModel,
        n_vocab: int,
        draft_max: int,
        placements: Mapping[str, DrafterPlacement] | None = None,
        acceptance_rates: Mapping[str, float] | None = None,
    ) -> None:
        self._session = session
        self.costs = costs
        self._n_vocab = n_vocab
        self._draft_max = min(draft_max, DEFAULT_DRAFT_MAX, session.n_batch - 1)
        self._acceptance_rates = dict(acceptance_rates or {})
        self._states = [self._new_state(drafter) for drafter in drafters]
        self.placements = dict(placements or {})
        self._n_idle, self._idle_limit = 0, _IDLE
        self._to_recheck: list[int] = []  # sizes of passes
        self._n_short, self._short_limit = 0, _UNTRIED
        self._usual = float(_ANSWER)  # tokens of an answer: the mean of the last ones, each counting half of the next
        self._timeline: Timeline | None = None

    @property
    def drafters(self) -> list[Drafter]:
        """Those that were given."""
        return [state.drafter for state in self._states]

    @property
    def timeline(self) -> Timeline | None:
        """Where checks, drafts and waits are noted, None for nowhere; may be set between requests."""
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        for state in self._states:
            if state.background:
                state.background.timeline = timeline

    @property
    def taps(self) -> bool | tuple[int, ...]:
        """The target's hidden rows that the drafter wants which goes on from them; see FeatureDrafter."""
        return next((state.follower.taps for state in self._states if state.follower), False)

    def observe_features(self, text: Sequence[int], first: int, features: Features, stats: StatsCounter) -> None:
        """Hand on the target's hidden rows (n, n_taps * n_embd) of the tokens from text[first] on."""
        self._replace_lost(stats)
        for state in self._states:
            if state.follower and state.drafter.name not in stats.dropped:
                with state.working(stats):
                    state.follower.observe_features(text, first, features)

    def tokens(self, job: Job, logits: Logits, stats: StatsCounter) -> Iterator[int]:
        """The token that job.text ends with, drawn from logits (n_vocab,), and up to job.limit that follow it."""
        context = self._start(job, logits, stats)
        yield job.text[-1]
        try:
            while job.n_left > 0:
                new = self._step(job, context, stats)
                job.n_drawn += len(new)
                yield from new
        finally:
            # An answer that came to its limit would have gone on.
            self._usual = (self._usual + (job.n_drawn if job.n_left else max(job.n_drawn, self._usual))) / 2
            for state in self._states:
                if state.background:  # it would draft on behind the answer
                    state.background.interrupt()

    def interrupt(self) -> None:
        """Stop a drafter that works; callable from any thread."""
        for state in self._states:
            if state.costly:
                state.costly.interrupt()

    def close(self) -> None:
        """Give the drafters' memory back, and keep what was learnt of the costs."""
        self.costs.close()
        for state in self._states:
            with suppress(BackendLost):  # what hangs keeps what it has
                state.drafter.close()

    # ---- A request ---------------------------------------------------------------------------------------------------

    def _start(self, job: Job, logits: Logits, stats: StatsCounter) -> Context:
        """Begin a request. Drafters that were dropped in the last one are back, unless the prompt was too much."""
        self._replace_lost(stats)
        context = Context(job.text[:-1], job.draw, job.is_greedy, is_plain=job.is_plain)
        milliseconds = self.costs.milliseconds(self._session.n_past)
        for state in self._states:
            state.is_dropped = state.drafter.name in stats.dropped
            state.table.start_request()
            if not state.is_dropped:
                with state.working(stats):
                    state.drafter.start(context)
            state.gain = min(max(state.gain, _LEAST_CREDIT * milliseconds[1]), milliseconds[1])
        self._observe(context, job.text[-1:], [logits], stats)
        for state in self._states:
            context.acceptance = state.table
            with state.working(stats):
                if state.costly and self._is_worth_asking(state, context, 1.0 / milliseconds[1], milliseconds, job):
                    state.costly.prefill(context)
        return context

    def _new_state(self, drafter: Drafter) -> _DrafterState:
        return _DrafterState(drafter, self._acceptance_rates.get(drafter.name))

    def _replace_lost(self, stats: StatsCounter) -> None:
        """Put spares in the places of drafters whose devices failed in an earlier request."""
        for state in [state for state in self._states if state.lost and state.drafter.name not in stats.dropped]:
            name, why = state.drafter.name, state.lost
            placements, state.lost = self.placements.get(name, DrafterPlacement("")), ""
            if placements.fallback is None or (not _closed(state.drafter) and placements.reuses_memory):
                continue
            try:
                fallbacks = [self._new_state(placements.fallback())]
                self.placements[name] = DrafterPlacement(f"the CPU; it was {placements.device}: {why}")
            except (EdgeInferError, OSError, MemoryError) as error:
                fallbacks = []
                stats.dropped[name] = str(error)
            place = self._states.index(state)
            self._states[place : place + 1] = fallbacks

    def _step(self, job: Job, context: Context, stats: StatsCounter) -> list[int]:
        """Draft, check, take; gives the new tokens, at least one."""
        started = perf_counter()
        n_past = self._session.n_past
        milliseconds = self.costs.milliseconds(n_past)
        max_nodes = min(self._draft_max, self._session.n_ctx - n_past - 1)
        proposals, choice = self._draft(job, context, milliseconds, max_nodes, stats)
        if job.n_left > len(choice.path) + 1:
            self._go_on(context, [choice.tokens[node] for node in choice.path], max_nodes, stats)
        batch = [job.text[-1], *choice.tokens]
        parents = [-1, *(parent + 1 for parent in choice.parents)]
        n_filled = self._n_filled(len(choice.tokens), max_nodes)
        parents += range(len(batch) - 1, len(batch) - 1 + n_filled)
        batch += [0] * n_filled  # nobody looks at what comes of them
        drafted = perf_counter()
        follows = any(state.follower and not state.is_dropped for state in self._states)
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
        self._observe(context, new, [rows[row] for row in path], stats, features)
        # What was doubtful and is corrected does not say that the machine became faster.
        note_cost = self.costs.correct if n_filled else self.costs.observe
        note_cost(len(batch), n_past, 1e3 * (passed - drafted))
        stats.count(len(new), choice.depths, choice.owners, accepted)
        stats.verify_seconds += passed - drafted
        stats.plain_seconds += 1e-3 * milliseconds[1] * len(new) + walked - passed
        ended = perf_counter()
        if self._timeline is not None:
            self._timeline.add("verify", drafted, passed, len(batch))
        stats.draft_seconds += drafted - started + ended - walked
        stats.step_seconds += ended - started
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
        self, job: Job, context: Context, milliseconds: Sequence[float], max_nodes: int, stats: StatsCounter
    ) -> tuple[list[Proposal], VerifyTree]:
        """What the drafters propose, and the tree to check."""
        if max_nodes < 1 or job.n_left < 2:
            return [], VerifyTree()
        proposals: list[Proposal] = []
        min_probability = min_useful_probability(milliseconds)
        for state in self._states:
            if not state.costly and state.is_active:
                state.table.min_probability = min_probability
                self._ask(state, context, max_nodes, proposals, stats)
        max_depth = job.n_left - 1
        choice = (
            select_tree(proposals, milliseconds, max_nodes, max_depth, min_probability) if proposals else VerifyTree()
        )
        rate = choice.expected / milliseconds[len(choice.tokens) + 1]
        started = perf_counter()
        for state in self._states:
            if state.costly and not state.is_dropped:
                asked = perf_counter()
                state.table.min_probability, state.table.max_wait_ms = min_probability, _PATIENCE * milliseconds[1]
                with state.working(stats):
                    was_asked, state.is_asked = (
                        state.is_asked,
                        self._is_worth_asking(state, context, rate, milliseconds, job),
                    )
                    if not state.is_asked:
                        if state.background and was_asked:
                            state.background.interrupt()
                        continue
                    each, before = state.costly.cost(context)
                    state.table.length_rule = ChainLengthRule(milliseconds, each, before, min(max_nodes, max_depth))
                costly: list[Proposal] = []
                self._ask(state, context, max_nodes, costly, stats)
                proposals = costly + proposals  # it knows more than those who copy
                self._note_wait(state, asked)
                spent = 1e3 * (perf_counter() - started)
                choice = select_tree(proposals, milliseconds, max_nodes, max_depth, min_probability, spent)
        return proposals, choice

    def _go_on(self, context: Context, path: Sequence[int], max_nodes: int, stats: StatsCounter) -> None:
        """Let drafters on other devices draft behind what is about to be checked."""
        for state in self._states:
            if state.background and state.is_asked and not state.is_dropped:
                context.acceptance = state.table
                with state.working(stats):
                    state.background.start_drafting(context, path, max_nodes)

    def _ask(
        self, state: _DrafterState, context: Context, max_nodes: int, proposals: list[Proposal], stats: StatsCounter
    ) -> None:
        """Add the drafter's proposal, unless it is empty or wrong."""
        if state.is_dropped:
            return
        context.acceptance = state.table
        with state.working(stats):
            tree = checked(state.drafter.propose(context, max_nodes), self._n_vocab, max_nodes)
            if tree.tokens:
                proposals.append(Proposal(state.drafter.name, tree, state.table))

    def _note_wait(self, state: _DrafterState, started: float) -> None:
        """Put the time since a drafter was asked into the timeline."""
        if self._timeline is not None:
            ended = perf_counter()
            self._timeline.add("wait", started, ended, 0)
            if not state.background:  # else it notes what it does
                self._timeline.add("draft", started, ended, 0)

    def _is_worth_asking(
        self, state: _DrafterState, context: Context, rate: float, milliseconds: Sequence[float], job: Job
    ) -> bool:
        """Whether a drafter that takes time is worth it against that many tokens a millisecond.

        What it has to read first must be earned back by the tokens that are still to come: those that an answer usually
        has, or as many again as there are.
        """
        if state.costly is None or state.is_dropped or self._draft_max < 1:
            return False
        own_rate, before = state.rate(context, milliseconds, self._draft_max)
        n_left = min(job.n_left, max(self._usual - job.n_drawn, job.n_drawn))
        other = max(1.0 / milliseconds[1], _BESIDE * rate)
        return own_rate * milliseconds[1] > _GAIN and (1.0 / other - 1.0 / own_rate) * n_left > before

    def _learn(
        self, proposals: Sequence[Proposal], choice: VerifyTree, accepted: Sequence[int], new: Sequence[int]
    ) -> None:
        """Compare every draft with what came, and what each drafter saved with what it took."""
        for _, tree, table in proposals:
            table.learn(tree, new)
        n_nodes, milliseconds = len(choice.tokens), self.costs.milliseconds(self._session.n_past)
        right = [choice.owners[node] for node in accepted]
        for state in self._states:
            name = state.drafter.name
            state.count(milliseconds, n_nodes, choice.owners.count(name), right.count(name))

    def _observe(
        self,
        context: Context,
        new: Sequence[int],
        rows: Sequence[Logits],
        stats: StatsCounter,
        features: Features | None = None,
    ) -> None:
        first = len(context.tokens) - 1
        context.tokens.extend(new)
        if features is not None:
            self.observe_features(context.tokens, first, features, stats)
        rows = [row[: self._n_vocab] for row in rows]
        for state in self._states:
            if state.is_active:
                with state.working(stats):
                    state.drafter.observe(context, len(new), rows)


def _closed(drafter: Drafter) -> bool:
    """Whether a drafter could be closed, and gave back what it had."""
    try:
        drafter.close()
    except Exception:  # its device failed, and may fail in any way
        return False
    return True
