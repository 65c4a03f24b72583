"""The speculation loop: ask the drafters, select a tree, verify it, keep what is accepted, learn."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from edgeinfer.backends.base import Session
from edgeinfer.common.errors import BackendLost, EdgeInferError
from edgeinfer.common.other_work import Preemptions
from edgeinfer.common.settings import DEFAULT_DRAFT_MAX
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.common.types import Features, Logits
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.cost import CostModel
from edgeinfer.speculation.drafter_state import DrafterPlacement, DrafterState
from edgeinfer.speculation.drafters.base import Context, Drafter, Following, HoldingDrafter
from edgeinfer.speculation.drafters.forced import NAME as FORCED
from edgeinfer.speculation.drafters.forced import allowed_part, forced_draft
from edgeinfer.speculation.expert_cost import ExpertCostModel
from edgeinfer.speculation.expert_forecast import ExpertForecast
from edgeinfer.speculation.padding import PassPadding
from edgeinfer.speculation.payoff import Payoff
from edgeinfer.speculation.policy import Proposal, VerifyTree, min_useful_probability, select_tree
from edgeinfer.speculation.stats import StatsCounter
from edgeinfer.speculation.timeline import Timeline
from edgeinfer.speculation.tree import checked
from edgeinfer.speculation.verify import Draw, accept

_ANSWER_TOKENS = 256  # expected length of the first answer
_MAX_WAIT = 0.1  # of a pass of one token: how long the target waits for overlapped drafts
# Least expected speed of a model-based drafter relative to plain decoding, and relative to the model-free drafts of the
# step; the latter is below 1 because its drafts are merged with them.
_MIN_GAIN, _MIN_GAIN_OVER_FREE = 1.05, 0.9


@dataclass(slots=True)
class Job:
    """What the engine asks for."""

    text: list[int]  # the tokens so far, the last of which is not committed; extended by what is sampled
    limit: int  # most tokens
    draw: Draw  # the target's sampler
    is_greedy: bool  # it takes the most probable token
    stop_ids: Container[int]  # tokens that end the text
    # is_plain, params: see Context
    is_plain: bool = False
    params: SamplingParams | None = None
    # called with each token and the logits that it was drawn from, None for nobody
    note: Callable[[Logits, int], None] | None = None
    n_drawn: int = 0  # tokens so far
    # constraint, free_draw: what may follow, and the sampler without that, for drafters; None where anything may follow
    constraint: Following | None = None
    free_draw: Draw | None = None

    @property
    def n_left(self) -> int:
        """Most tokens from here on."""
        return self.limit - self.n_drawn


class Speculator:
    """Decodes with drafts. What the drafters know and what was learnt about them is kept across requests.

    session: the target's.  costs: of its forward passes.  n_vocab: tokens that exist, the first part of the logits.
    draft_max: most nodes of a tree.  placements: of model-based drafters, by name.  acceptance_rates: where measured
    beforehand, by name of the drafter.  forecast: of the target's experts, where some are read from disk.
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
        forecast: ExpertForecast | None = None,
    ) -> None:
        self._session = session
        self._forecast = forecast
        self.costs = costs
        self._n_vocab = n_vocab
        self._draft_max = min(draft_max, DEFAULT_DRAFT_MAX, session.n_batch - 1)
        self._acceptance_rates = dict(acceptance_rates or {})
        self._states = [self._new_state(drafter) for drafter in drafters]
        self.placements = dict(placements or {})
        self._padding = PassPadding()
        self._preemptions = Preemptions()
        self._payoff = Payoff()
        self._forced = AcceptanceTable()  # of the drafts of constraints
        self._answer_tokens = float(_ANSWER_TOKENS)  # mean length of the last answers, each half the weight of the next
        self._timeline: Timeline | None = None

    @property
    def drafters(self) -> list[Drafter]:
        """The drafters, replaced ones left out."""
        return [state.drafter for state in self._states]

    @property
    def most_rows(self) -> int:
        """Most rows of logits that a pass gives."""
        return self._draft_max + 1

    @property
    def timeline(self) -> Timeline | None:
        """Where verify passes, drafts and waits are recorded, None for nowhere; may be set between requests."""
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        for state in self._states:
            if state.background:
                state.background.timeline = timeline

    @property
    def taps(self) -> bool | tuple[int, ...]:
        """The target's hidden states that a drafter needs; see FeatureDrafter."""
        return next((state.feature_drafter.taps for state in self._states if state.feature_drafter), False)

    def observe_features(self, text: Sequence[int], first: int, features: Features, stats: StatsCounter) -> None:
        """Pass on the target's hidden states (n, n_taps * n_embd) of the tokens from text[first] on."""
        self._replace_lost(stats)
        for state in self._states:
            if state.feature_drafter and state.drafter.name not in stats.dropped:
                with state.guarded(stats):
                    state.feature_drafter.observe_features(text, first, features)

    def tokens(self, job: Job, logits: Logits, stats: StatsCounter) -> Iterator[int]:
        """The token that job.text ends with, sampled from logits (n_vocab,), and up to job.limit that follow it."""
        context = self._start(job, logits, stats)
        yield job.text[-1]
        try:
            while job.n_left > 0:
                new = self._step(job, context, stats)
                job.n_drawn += len(new)
                yield from new
        finally:
            # An answer that was cut at its limit counts at least as the usual length.
            n_tokens = job.n_drawn if job.n_left else max(job.n_drawn, self._answer_tokens)
            self._answer_tokens = (self._answer_tokens + n_tokens) / 2
            for state in self._states:
                if state.background:  # else it would continue to draft after the answer
                    state.background.interrupt()

    def held(self) -> dict[str, int]:
        """Bytes of main memory that the drafters hold now, by part; see HoldingDrafter."""
        parts: dict[str, int] = {}
        for drafter in self.drafters:
            for part, n_bytes in drafter.held().items() if isinstance(drafter, HoldingDrafter) else ():
                parts[part] = parts.get(part, 0) + n_bytes
        return parts

    def interrupt(self) -> None:
        """Stop a drafter that is working; callable from any thread."""
        for state in self._states:
            if state.model_based:
                state.model_based.interrupt()

    def close(self) -> None:
        """Free the drafters, and keep the corrected cost curves."""
        self.costs.close()
        for state in self._states:
            with suppress(BackendLost):  # a device that hangs keeps its memory
                state.drafter.close()

    # ---- Start of a request ------------------------------------------------------------------------------------------

    def _start(self, job: Job, logits: Logits, stats: StatsCounter) -> Context:
        """Begin a request. Drafters dropped in the last one are back, unless they failed on this prompt already."""
        started = perf_counter()
        self._replace_lost(stats)
        context = Context(
            job.text[:-1],
            job.free_draw or job.draw,
            job.is_greedy,
            is_plain=job.is_plain,
            params=job.params,
            constraint=job.constraint,
        )
        verify_ms = self.costs.milliseconds(self._session.n_past)
        for state in self._states:
            state.is_dropped = state.drafter.name in stats.dropped
            state.table.start_request()
            if not state.is_dropped:
                with state.guarded(stats):
                    state.drafter.start(context)
            state.start_request(verify_ms[1])
        self._observe(context, job.text[-1:], [logits], stats)
        for state in self._states:
            context.acceptance = state.table
            with state.guarded(stats):
                if state.model_based and self._is_worth_asking(state, context, 1.0 / verify_ms[1], verify_ms, job):
                    state.model_based.prefill(context)
        self._payoff.start_request(perf_counter() - started)
        return context

    def _new_state(self, drafter: Drafter) -> DrafterState:
        return DrafterState(drafter, self._acceptance_rates.get(drafter.name))

    def _replace_lost(self, stats: StatsCounter) -> None:
        """Replace drafters whose devices failed in an earlier request by their fallbacks."""
        for state in [state for state in self._states if state.lost and state.drafter.name not in stats.dropped]:
            name, why = state.drafter.name, state.lost
            placement, state.lost = self.placements.get(name, DrafterPlacement("")), ""
            if placement.fallback is None or (not _is_closed(state.drafter) and placement.reuses_memory):
                continue
            try:
                replacement = [self._new_state(placement.fallback())]
                self.placements[name] = DrafterPlacement(f"the CPU; it was {placement.device}: {why}")
            except (EdgeInferError, OSError, MemoryError) as error:
                if is_from_handler(error):
                    raise
                replacement = []
                stats.dropped[name] = str(error)
            place = self._states.index(state)
            self._states[place : place + 1] = replacement

    # ---- A step ------------------------------------------------------------------------------------------------------

    def _step(self, job: Job, context: Context, stats: StatsCounter) -> list[int]:
        """Draft, verify, commit; the new tokens, at least one."""
        started = perf_counter()
        n_past, is_plain = self._session.n_past, self._payoff.needs_plain_step
        max_nodes = min(self._draft_max, self._session.n_ctx - n_past - 1)
        if is_plain:
            self._stop_background()
        proposals, tree = ([], VerifyTree()) if is_plain else self._draft(job, context, max_nodes, stats)
        if not is_plain and job.n_left > len(tree.path) + 1:
            self._start_background(context, [tree.tokens[node] for node in tree.path], max_nodes, stats)
        n_padding = self._padding.n_tokens(len(tree.tokens), max_nodes, self.costs)
        batch, parents = _batch(job.text[-1], tree, n_padding)
        drafted = perf_counter()
        out = self._session.forward(batch, parents, logits="all", hidden=self._needed_taps())
        verified = perf_counter()
        new, path = accept(out.logits, _children(tree), job.draw, job.text, job.stop_ids)
        self._session.commit(path)
        committed = perf_counter()
        if job.note is not None:
            for row, token in zip(path, new, strict=True):
                job.note(out.logits[row], token)
        accepted = [row - 1 for row in path[1:]]
        self._learn(proposals, tree, accepted, new)
        features = out.features
        features = None if features is None else features[path]
        self._observe(context, new, [out.logits[row] for row in path], stats, features)
        self._observe_cost(len(batch), n_past, verified - drafted, n_padding)
        if self._timeline is not None:
            self._timeline.add("verify", drafted, verified, len(batch))
        stats.count(len(new), tree.depths, tree.owners, accepted)
        stats.verify_seconds += verified - drafted
        ended = perf_counter()
        stats.draft_seconds += drafted - started + ended - committed
        stats.step_seconds += ended - started
        if len(batch) == 1:
            self._payoff.count_plain(committed - drafted)
        self._payoff.count(len(new), ended - started, not is_plain)
        plain = self._payoff.plain_seconds
        stats.count_plain(len(new), plain, 1e-3 * self.costs.milliseconds(n_past)[1] if plain is None else plain)
        return new

    def _observe_cost(self, n: int, n_past: int, seconds: float, n_padding: int) -> None:
        """Correct the costs by a pass of n tokens, n_padding of which are dummies."""
        is_disturbed = self._preemptions.are_new()
        if n_padding:  # only lowers costs: that it was fast does not mean that the machine became faster
            self.costs.correct(n, n_past, 1e3 * seconds)
        else:
            self.costs.observe(n, n_past, 1e3 * seconds, is_disturbed)

    def _needed_taps(self) -> bool | tuple[int, ...]:
        """The hidden states that this step's pass must return."""
        is_needed = any(state.feature_drafter and not state.is_dropped for state in self._states)
        return self.taps if is_needed else False

    def _draft(
        self, job: Job, context: Context, max_nodes: int, stats: StatsCounter
    ) -> tuple[list[Proposal], VerifyTree]:
        """The drafters' proposals, and the tree to verify: model-free drafters first, then model-based ones."""
        verify_ms = self.costs.milliseconds(self._session.n_past)
        if max_nodes < 1 or job.n_left < 2:
            return [], VerifyTree()
        proposals: list[Proposal] = []
        min_probability, max_depth = min_useful_probability(verify_ms), job.n_left - 1
        limits = max_nodes, max_depth, min_probability
        for state in self._states:
            if not state.model_based and state.is_active:
                state.table.min_probability = min_probability
                self._ask(state, context, max_nodes, proposals, stats)
        self._forced.min_probability = min_probability
        forced = forced_draft(context, self._forced, max_nodes)
        if forced.tokens:
            proposals.append(Proposal(FORCED, forced, self._forced))
        proposals.sort(key=lambda proposal: proposal.of_first, reverse=True)
        tree = VerifyTree()
        if proposals:
            tree = self._select(context, proposals, verify_ms, limits)
        model_free_rate = tree.expected / verify_ms[len(tree.tokens) + 1]
        started = perf_counter()
        for state in self._states:
            if state.model_based and not state.is_dropped:
                asked = perf_counter()
                state.table.min_probability, state.table.max_wait_ms = min_probability, _MAX_WAIT * verify_ms[1]
                with state.guarded(stats):
                    self._prepare(state, context, model_free_rate, verify_ms, job, min(max_nodes, max_depth))
                    if not state.is_asked:
                        continue
                of_model: list[Proposal] = []
                self._ask(state, context, max_nodes, of_model, stats)
                proposals = of_model + proposals  # more reliable than those that copy
                self._record_wait(state, asked)
                spent_ms = 1e3 * (perf_counter() - started)
                tree = self._select(context, proposals, verify_ms, limits, spent_ms)
        return proposals, tree

    def _select(
        self,
        context: Context,
        proposals: Sequence[Proposal],
        verify_ms: Sequence[float],
        limits: tuple[int, int, float],
        spent_ms: float = 0.0,
    ) -> VerifyTree:
        """See select_tree: without nodes whose experts would have to be waited for, where these can be told."""
        costs, forecast = self.costs, self._forecast
        if forecast is None or not forecast.is_trusted or not isinstance(costs, ExpertCostModel):
            return select_tree(proposals, verify_ms, *limits, spent_ms)
        n_past = self._session.n_past

        def keep(tree: VerifyTree, order: list[int], path_probabilities: Sequence[float]) -> list[int]:
            return forecast.kept(context.tokens[-1], tree, order, path_probabilities, costs, n_past)

        return select_tree(proposals, verify_ms, *limits, spent_ms, keep)

    def _prepare(
        self,
        state: DrafterState,
        context: Context,
        model_free_rate: float,
        verify_ms: Sequence[float],
        job: Job,
        max_nodes: int,
    ) -> None:
        """Decide whether a model-based drafter is asked in this step, and set when its chain is long enough."""
        was_asked, state.is_asked = (
            state.is_asked,
            self._is_worth_asking(state, context, model_free_rate, verify_ms, job),
        )
        if state.is_asked and state.model_based:
            token_ms, prefill_ms = state.model_based.cost(context)
            state.table.length_rule = ChainLengthRule(verify_ms, token_ms, prefill_ms, max_nodes)
        elif state.background and was_asked:
            state.background.interrupt()

    def _start_background(self, context: Context, path: Sequence[int], max_nodes: int, stats: StatsCounter) -> None:
        """Let overlapped drafters continue the path that is about to be verified."""
        for state in self._states:
            if state.background and state.is_asked and not state.is_dropped:
                context.acceptance = state.table
                with state.guarded(stats):
                    state.background.start_drafting(context, path, max_nodes)

    def _stop_background(self) -> None:
        """Let no drafter work beside a step whose time is to be that of plain decoding."""
        for state in self._states:
            if state.background and state.is_asked:
                state.is_asked = False
                state.background.interrupt()

    def _ask(
        self, state: DrafterState, context: Context, max_nodes: int, proposals: list[Proposal], stats: StatsCounter
    ) -> None:
        """Add a drafter's proposal, unless it is empty or malformed."""
        if state.is_dropped:
            return
        context.acceptance = state.table
        with state.guarded(stats):
            tree = checked(state.drafter.propose(context, max_nodes), self._n_vocab, max_nodes)
            tree = allowed_part(context, tree)
            if tree.tokens:
                proposals.append(Proposal(state.drafter.name, tree, state.table))

    def _record_wait(self, state: DrafterState, started: float) -> None:
        """Record the time since a drafter was asked in the timeline."""
        if self._timeline is not None:
            ended = perf_counter()
            self._timeline.add("wait", started, ended, 0)
            if not state.background:  # else it records its drafts itself
                self._timeline.add("draft", started, ended, 0)

    def _is_worth_asking(
        self, state: DrafterState, context: Context, model_free_rate: float, verify_ms: Sequence[float], job: Job
    ) -> bool:
        """Whether a model-based drafter is expected to be faster than model_free_rate tokens per millisecond.

        The cost of its prefill is compared with what it saves over the tokens to come: those that an answer usually
        has, or as many again as there are by now.
        """
        if state.model_based is None or state.is_dropped or self._draft_max < 1:
            return False
        own_rate, prefill_ms = state.rate(context, verify_ms, self._draft_max)
        n_left = min(job.n_left, max(self._answer_tokens - job.n_drawn, job.n_drawn))
        other_rate = max(1.0 / verify_ms[1], _MIN_GAIN_OVER_FREE * model_free_rate)
        return own_rate * verify_ms[1] > _MIN_GAIN and (1.0 / other_rate - 1.0 / own_rate) * n_left > prefill_ms

    def _learn(
        self, proposals: Sequence[Proposal], tree: VerifyTree, accepted: Sequence[int], new: Sequence[int]
    ) -> None:
        """Compare every draft with the new tokens, and what each drafter saved with what it took."""
        for _, draft, table in proposals:
            table.learn(draft, new)
        n_nodes = len(tree.tokens)
        verify_ms = self.costs.milliseconds(self._session.n_past) if n_nodes else ()
        owners = [tree.owners[node] for node in accepted]
        for state in self._states:
            name = state.drafter.name
            state.count(verify_ms, n_nodes, tree.owners.count(name), owners.count(name))

    def _observe(
        self,
        context: Context,
        new: Sequence[int],
        rows: Sequence[Logits],
        stats: StatsCounter,
        features: Features | None = None,
    ) -> None:
        """Show new tokens to the drafters, with the logits that each was sampled from."""
        first = len(context.tokens) - 1
        context.tokens.extend(new)
        if features is not None:
            self.observe_features(context.tokens, first, features, stats)
        rows = [row[: self._n_vocab] for row in rows]
        for state in self._states:
            if state.is_active:
                with state.guarded(stats):
                    state.drafter.observe(context, len(new), rows)


def _batch(last_token: int, tree: VerifyTree, n_padding: int) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a verify pass: the last token of the text, the tree, and dummy tokens that are ignored."""
    n = 1 + len(tree.tokens)
    parents = [-1, *(parent + 1 for parent in tree.parents), *range(n - 1, n - 1 + n_padding)]
    return [last_token, *tree.tokens, *[0] * n_padding], parents


def _children(tree: VerifyTree) -> dict[tuple[int, int], int]:
    """Row of each node in the verify pass by (row of its parent, token)."""
    nodes = enumerate(zip(tree.parents, tree.tokens, strict=True), start=1)
    return {(parent + 1, token): row for row, (parent, token) in nodes}


def _is_closed(drafter: Drafter) -> bool:
    """Close a drafter; whether that freed its memory."""
    try:
        drafter.close()
    except Exception as error:  # its device failed, and may fail in any way
        if is_from_handler(error):
            raise
        return False
    return True
