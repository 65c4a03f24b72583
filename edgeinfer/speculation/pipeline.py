"""Speculation in a pass: ask the drafters, select trees, and after the pass keep what is accepted, and learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from edgeinfer.backends.base import Session
from edgeinfer.common.errors import BackendLost, EdgeInferError, Interrupted
from edgeinfer.common.other_work import Preemptions
from edgeinfer.common.settings import DEFAULT_DRAFT_MAX
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.common.types import Features, Logits, Output
from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.cost import MAX_TOKENS, CostModel
from edgeinfer.speculation.drafted_text import DraftedText, Step
from edgeinfer.speculation.drafter_state import DrafterPlacement, DrafterState
from edgeinfer.speculation.drafters.base import Context, Drafter, HoldingDrafter, SharedDrafter
from edgeinfer.speculation.drafters.forced import NAME as FORCED
from edgeinfer.speculation.drafters.forced import allowed_part, forced_draft
from edgeinfer.speculation.drafters.joint import Running, draft_together
from edgeinfer.speculation.expert_cost import ExpertCostModel
from edgeinfer.speculation.expert_forecast import ExpertForecast
from edgeinfer.speculation.padding import PassPadding
from edgeinfer.speculation.payoff import REST_OF_SEVERAL, Payoff, Rest
from edgeinfer.speculation.policy import (
    Proposal,
    VerifyTree,
    min_useful_probability,
    select_tree,
    select_trees,
)
from edgeinfer.speculation.stats import StatsCounter
from edgeinfer.speculation.timeline import Timeline
from edgeinfer.speculation.tree import DraftTree, checked
from edgeinfer.speculation.verify import accept

_ANSWER_TOKENS = 256  # expected length of the first answer
_MAX_WAIT = 0.1  # of a pass of one token: how long the target waits for overlapped drafts
# Least expected speed of a model-based drafter relative to plain decoding, and relative to the model-free drafts of the
# step; the latter is below 1 because its drafts are merged with them.
_MIN_GAIN, _MIN_GAIN_OVER_FREE = 1.05, 0.9


@dataclass(slots=True)
class VerifyPass:
    """A pass that decodes some texts, one step of each."""

    steps: list[Step]
    is_plain: bool  # no drafter was asked
    n_past: int  # mean length of the texts
    started: float  # seconds of perf_counter: when it was begun, and when drafts were there
    drafted: float

    @property
    def n_rows(self) -> int:
        """Rows of all texts."""
        return sum(len(step.tokens) for step in self.steps)


class Speculator:
    """Drafts for texts, and learns from what comes of it; the part that all texts share.

    What the drafters know and what was learnt about them is kept across requests. A text has a place, from its prompt
    to its end: the first has all drafters, the others those that can work for several texts.

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
        self._n_ctx = session.n_ctx
        self._forecast = forecast
        self.costs = costs
        self._n_vocab = n_vocab
        self._draft_max = min(draft_max, DEFAULT_DRAFT_MAX, session.n_batch - 1)
        self._acceptance_rates = dict(acceptance_rates or {})
        self._states = [self._new_state(drafter) for drafter in drafters]
        self._taken: list[bool] = []  # places of texts
        self._beside: dict[int, list[DrafterState]] = {}  # drafters of places after the first
        self.placements = dict(placements or {})
        self._padding = PassPadding()
        self._preemptions = Preemptions()
        self._payoffs: dict[int, Payoff] = {}  # by number of texts in a pass
        self._rest_of_several = Rest(REST_OF_SEVERAL)
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

    def taps_of(self, place: int) -> bool | tuple[int, ...]:
        """The hidden states that a drafter needs of the prompt of a text with that place."""
        return self.taps if any(state.feature_drafter for state in self._states_of(place)) else False

    def observe_features(
        self, place: int, text: Sequence[int], first: int, features: Features, stats: StatsCounter
    ) -> None:
        """Pass on the target's hidden states (n, n_taps * n_embd) of the tokens from text[first] on."""
        if place == 0:
            self._replace_lost(stats)
        for state in self._states_of(place):
            if state.feature_drafter and state.drafter.name not in stats.dropped:
                with state.guarded(stats):
                    state.feature_drafter.observe_features(text, first, features)

    def take_place(self) -> int:
        """A place for a text that begins; `end` or `leave` gives it back."""
        place = next((place for place, text in enumerate(self._taken) if not text), len(self._taken))
        self._taken[place : place + 1] = [True]
        return place

    def leave(self, place: int) -> None:
        """Give a place back."""
        self._taken[place] = False

    def held(self) -> dict[str, int]:
        """Bytes of main memory that the drafters hold now, by part; see HoldingDrafter."""
        parts: dict[str, int] = {}
        beside = [state.drafter for states in self._beside.values() for state in states]
        for drafter in {id(each): each for each in [*self.drafters, *beside]}.values():
            for part, n_bytes in drafter.held().items() if isinstance(drafter, HoldingDrafter) else ():
                parts[part] = parts.get(part, 0) + n_bytes
        return parts

    def interrupt(self) -> None:
        """Stop a drafter that is working; callable from any thread."""
        for state in self._states:
            if state.model_based:  # others have sessions of the same model
                state.model_based.interrupt()

    def close(self) -> None:
        """Free the drafters, and keep the corrected cost curves."""
        self.costs.close()
        for state in [*(state for states in self._beside.values() for state in states), *self._states]:
            with suppress(BackendLost):  # a device that hangs keeps its memory
                state.drafter.close()

    # ---- A text begins and ends --------------------------------------------------------------------------------------

    def begin(self, text: DraftedText, logits: Logits | None) -> None:
        """Begin with a text whose last token was drawn from logits (n_vocab,), None where it is taken up again.

        Drafters dropped in the last one are back, unless they failed on this prompt already.
        """
        started, stats = perf_counter(), text.stats
        if text.place == 0:
            self._replace_lost(stats)
        text.states = self._states_of(text.place)
        before = text.tokens if logits is None else text.tokens[:-1]
        context = text.context = Context(
            list(before),
            text.free_draw or text.draw,
            text.is_greedy,
            is_plain=text.is_plain,
            params=text.params,
            constraint=text.constraint,
        )
        verify_ms = self.costs.milliseconds(text.session.n_past)
        for state in text.states:
            state.is_dropped = state.drafter.name in stats.dropped
            state.table.start_request()
            if not state.is_dropped:
                with state.guarded(stats):
                    if state.target_drafter is not None:
                        state.target_drafter.follow(text.session)
                    state.drafter.start(context)
            state.start_request(verify_ms[1])
        if logits is not None:
            self._observe(text, text.tokens[-1:], [logits])
        for state in text.states:
            context.acceptance = state.table
            with state.guarded(stats):
                if state.model_based and self._is_worth_asking(state, text, 1.0 / verify_ms[1], verify_ms):
                    state.model_based.prefill(context)
        if self._n_taken == 1:
            self._payoff(1).start_request(perf_counter() - started)

    def end(self, text: DraftedText) -> None:
        """No more of a text is drafted."""
        # An answer that was cut at its limit counts at least as the usual length.
        n_tokens = text.n_drawn if text.n_left > 0 else max(text.n_drawn, self._answer_tokens)
        self._answer_tokens = (self._answer_tokens + n_tokens) / 2
        text.context.is_over = True
        for state in text.states:
            if state.background:  # else it would continue to draft after the answer
                state.background.interrupt()
        self._rest(text)

    def put_aside(self, text: DraftedText) -> None:
        """A text makes room for others, and begins again later; nothing is learnt of its half."""
        text.context.is_over = True
        text.context.tokens.clear()
        self._stop_background(text)
        self._rest(text)

    def _rest(self, text: DraftedText) -> None:
        """Other texts may have what drafters keep of this one."""
        for state in text.states:
            if state.joint is not None:
                with suppress(EdgeInferError):
                    state.joint.rest()

    @property
    def _n_taken(self) -> int:
        return sum(self._taken)

    def _payoff(self, n_texts: int) -> Payoff:
        """Whether drafting pays in passes of so many texts."""
        payoff = self._payoffs.get(n_texts)
        if payoff is None:
            payoff = self._payoffs[n_texts] = Payoff(n_texts, None if n_texts == 1 else self._rest_of_several)
        return payoff

    def _states_of(self, place: int) -> list[DrafterState]:
        """The drafters of a place. Those after the first learn with the first."""
        if place == 0:
            return self._states
        if place not in self._beside:
            states = []
            for state in self._states:
                other = state.drafter.beside() if isinstance(state.drafter, SharedDrafter) else None
                if other is not None:
                    states.append(DrafterState(other, state.table))
            self._beside[place] = states
        return self._beside[place]

    def _new_state(self, drafter: Drafter) -> DrafterState:
        return DrafterState(drafter, AcceptanceTable(self._acceptance_rates.get(drafter.name)))

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

    # ---- A pass ------------------------------------------------------------------------------------------------------

    def draft(self, texts: Sequence[DraftedText]) -> VerifyPass:
        """What the next pass verifies of these texts."""
        started = perf_counter()
        payoff, n_past = self._payoff(len(texts)), sum(text.session.n_past for text in texts) // len(texts)
        is_plain = payoff.needs_plain_step or len(texts) > MAX_TOKENS
        is_resting = is_plain and payoff.is_resting and len(texts) <= MAX_TOKENS
        if len(texts) > 1:
            steps = self._joint_steps(texts, is_plain, is_resting, n_past)
        else:
            steps = [self._resting_step(texts[0]) if is_resting else self._step(texts[0], is_plain)]
        return VerifyPass(steps, is_plain, n_past, started, perf_counter())

    def plain(self, texts: Sequence[DraftedText]) -> VerifyPass:
        """The same without drafts, for a pass that reads prompts too."""
        started = perf_counter()
        for text in texts:
            self._stop_background(text)
        steps = [self._made(text, [], VerifyTree(), 0) for text in texts]
        return VerifyPass(steps, True, 0, started, perf_counter())

    def settle(self, verify_pass: VerifyPass, outputs: Sequence[Output], is_alone: bool = True) -> None:
        """Accept what was right, commit it, and learn. Step.new are the tokens drawn, at least one, or there is an
        error.

        is_alone: the pass had no other rows, so that its time is that of these.
        """
        verified = perf_counter()
        paths = [self._accept(step, out) for step, out in zip(verify_pass.steps, outputs, strict=True)]
        committed = perf_counter()
        for step, out, path in zip(verify_pass.steps, outputs, paths, strict=True):
            if step.error is None:
                self._learn_from(step, out, path)
        self._count(verify_pass, verified, committed, is_alone)

    def _step(self, text: DraftedText, is_plain: bool) -> Step:
        """The step of a text that is alone in its pass."""
        max_nodes = self._max_nodes(text)
        if is_plain:
            self._stop_background(text)
        proposals, tree = ([], VerifyTree()) if is_plain else self._draft(text, max_nodes)
        if not is_plain and text.n_left > len(tree.path) + 1:
            self._start_background(text, [tree.tokens[node] for node in tree.path], max_nodes)
        return self._made(text, proposals, tree, self._padding.n_tokens(len(tree.tokens), max_nodes, self.costs))

    def _resting_step(self, text: DraftedText) -> Step:
        """The same while drafting rests: no drafter is asked, but what a constraint forces costs nothing to draft."""
        self._stop_background(text)
        max_nodes, tree = self._max_nodes(text), VerifyTree()
        proposals: list[Proposal] = []
        if text.constraint is not None and max_nodes > 0 and text.n_left > 1:
            verify_ms = self.costs.milliseconds(text.session.n_past)
            least = min_useful_probability(verify_ms)
            proposals = self._ask_forced(text, max_nodes, least)
            tree = self._select(text, proposals, verify_ms, (max_nodes, text.n_left - 1, least))
        return self._made(text, proposals, tree, self._padding.n_tokens(len(tree.tokens), max_nodes, self.costs))

    def _joint_steps(self, texts: Sequence[DraftedText], is_plain: bool, is_resting: bool, n_past: int) -> list[Step]:
        """The steps of several texts, whose drafts compete for the rows of the pass."""
        nothing: list[Proposal] = []
        if is_plain and not (is_resting and any(text.constraint is not None for text in texts)):
            return [self._made(text, nothing, VerifyTree(), 0) for text in texts]
        verify_ms = self.costs.milliseconds(n_past)
        useful = min_useful_probability(verify_ms, len(texts))
        proposals, limits = [], []
        ask = self._ask_forced if is_resting else self._ask_free
        for text in texts:
            self._stop_background(text)
            max_nodes, max_depth = self._max_nodes(text), text.n_left - 1
            proposals.append(ask(text, max_nodes, useful) if max_nodes and max_depth > 0 else nothing)
            limits.append((max_nodes, max_depth))
        max_rows = min(self._draft_max + len(texts), MAX_TOKENS)
        trees = select_trees(proposals, verify_ms, max_rows - len(texts), limits, useful)
        asked = [] if is_resting else texts
        of_models = self._ask_models(asked, trees, verify_ms, max_rows, limits, useful)
        if any(of_models):  # more reliable than those that copy
            proposals = [[*first, *others] for first, others in zip(of_models, proposals, strict=True)]
            trees = select_trees(proposals, verify_ms, max_rows - len(texts), limits, useful)
        return [self._made(text, of_text, tree, 0) for text, of_text, tree in zip(texts, proposals, trees, strict=True)]

    def _ask_models(
        self,
        texts: Sequence[DraftedText],
        trees: Sequence[VerifyTree],
        verify_ms: Sequence[float],
        max_rows: int,
        limits: Sequence[tuple[int, int]],
        min_probability: float,
    ) -> list[list[Proposal]]:
        """What draft models and heads propose for several texts, in passes of all of them, where they are expected to
        be faster than these trees; for each text."""
        n_texts, found = len(texts), list[list[Proposal]]()
        if not any(state.joint for text in texts for state in text.states):
            return found
        n_own = max_rows // n_texts - 1  # nodes of a text, if all have as many
        of_each = [verify_ms[n * n_texts] / n_texts for n in range(n_own + 2)]  # of a pass, by rows of each text
        rate = sum(tree.expected for tree in trees) / verify_ms[n_texts + sum(len(tree.tokens) for tree in trees)]
        asked: list[tuple[int, DrafterState, Running]] = []
        for place, (text, (max_nodes, max_depth)) in enumerate(zip(texts, limits, strict=True)):
            found.append([])
            for state in text.states:
                if state.joint is None or state.is_dropped or min(max_nodes, max_depth, n_own) < 1:
                    continue
                state.table.min_probability, text.context.acceptance = min_probability, state.table
                with state.guarded(text.stats):
                    self._prepare(state, text, rate, of_each, min(n_own, max_nodes, max_depth), n_texts)
                if state.is_asked and not state.is_dropped:
                    drafting = state.joint.drafting(text.context, min(max_nodes, max_depth), is_alone=False)
                    asked.append((place, state, Running(drafting, state.guarded(text.stats))))
        started = perf_counter()
        seconds = draft_together([running for _, _, running in asked])
        if self._timeline is not None and asked:
            self._timeline.add("draft", started, perf_counter(), 0)
        for place, state, running in asked:
            text = texts[place]
            text.stats.waited_seconds += seconds / len(asked)
            if running.tree is not None:
                with running.guard:
                    self._add(state, text, running.tree, limits[place][0], found[place])
        return found

    def _max_nodes(self, text: DraftedText) -> int:
        return min(self._draft_max, self._n_ctx - text.session.n_past - 1)

    def _made(self, text: DraftedText, proposals: list[Proposal], tree: VerifyTree, n_padding: int) -> Step:
        tokens, parents = _batch(text.tokens[-1], tree, n_padding)
        return Step(text, proposals, tree, tokens, parents, n_padding, self._needed_taps(text))

    def _accept(self, step: Step, out: Output) -> list[int]:
        """Draw the tokens of a step and commit it; gives the rows of its path."""
        text = step.text
        try:
            step.new, path = accept(out.logits, _children(step.tree), text.draw, text.tokens, text.stop_ids)
        except EdgeInferError as error:
            if is_from_handler(error) or isinstance(error, Interrupted):
                raise
            step.error, path = error, []
        text.session.commit(path)
        if text.note is not None:
            for row, token in zip(path, step.new, strict=True):
                text.note(out.logits[row], token)
        return path

    def _learn_from(self, step: Step, out: Output, path: Sequence[int]) -> None:
        text, tree = step.text, step.tree
        accepted = [row - 1 for row in path[1:]]
        self._learn(step, accepted)
        features = out.features
        features = None if features is None else features[list(path)]
        self._observe(text, step.new, [out.logits[row] for row in path], features)
        text.stats.count(len(step.new), tree.depths, tree.owners, accepted)

    def _count(self, verify_pass: VerifyPass, verified: float, committed: float, is_alone: bool) -> None:
        """Count the time of a pass: in its costs, in what drafting brings, and for each text its share."""
        steps, n_rows, n_past = verify_pass.steps, verify_pass.n_rows, verify_pass.n_past
        drafted, n_texts = verify_pass.drafted, len(verify_pass.steps)
        if is_alone:
            self._observe_cost(n_rows, n_past, verified - drafted, steps[0].n_padding)
            if self._timeline is not None:
                self._timeline.add("verify", drafted, verified, n_rows)
        ended = perf_counter()
        payoff, n_new = self._payoff(n_texts), sum(len(step.new) for step in steps)
        if is_alone:
            if n_rows == n_texts:
                payoff.count_plain(committed - drafted, n_texts)
            payoff.count(n_new, ended - verify_pass.started, not verify_pass.is_plain)
        plain = payoff.plain_seconds
        if plain is None:
            plain = 1e-3 * self.costs.milliseconds(n_past)[min(n_texts, MAX_TOKENS)] / n_texts
        for step in steps:
            stats = step.text.stats
            stats.verify_seconds += (verified - drafted) / n_texts
            stats.draft_seconds += (drafted - verify_pass.started + ended - committed) / n_texts
            stats.step_seconds += (ended - verify_pass.started) / n_texts
            stats.count_plain(len(step.new), payoff.plain_seconds, plain)

    def _observe_cost(self, n: int, n_past: int, seconds: float, n_padding: int) -> None:
        """Correct the costs by a pass of n tokens, n_padding of which are dummies."""
        is_disturbed = self._preemptions.are_new()
        if n_padding:  # only lowers costs: that it was fast does not mean that the machine became faster
            self.costs.correct(n, n_past, 1e3 * seconds)
        else:
            self.costs.observe(n, n_past, 1e3 * seconds, is_disturbed)

    def _needed_taps(self, text: DraftedText) -> bool | tuple[int, ...]:
        """The hidden states that a text's step must return."""
        is_needed = any(state.feature_drafter and not state.is_dropped for state in text.states)
        return self.taps if is_needed else False

    def _ask_free(self, text: DraftedText, max_nodes: int, min_probability: float) -> list[Proposal]:
        """What drafters without a model propose, the most reliable first."""
        proposals: list[Proposal] = []
        for state in text.states:
            if not state.model_based and state.is_active:
                state.table.min_probability = min_probability
                self._ask(state, text, max_nodes, proposals)
        proposals += self._ask_forced(text, max_nodes, min_probability)
        proposals.sort(key=lambda proposal: proposal.of_first, reverse=True)
        return proposals

    def _ask_forced(self, text: DraftedText, max_nodes: int, min_probability: float) -> list[Proposal]:
        """What the constraint of a text proposes, if anything."""
        self._forced.min_probability = min_probability
        forced = forced_draft(text.context, self._forced, max_nodes)
        return [Proposal(FORCED, forced, self._forced)] if forced.tokens else []

    def _draft(self, text: DraftedText, max_nodes: int) -> tuple[list[Proposal], VerifyTree]:
        """The drafters' proposals, and the tree to verify: model-free drafters first, then model-based ones."""
        verify_ms = self.costs.milliseconds(text.session.n_past)
        if max_nodes < 1 or text.n_left < 2:
            return [], VerifyTree()
        min_probability, max_depth = min_useful_probability(verify_ms), text.n_left - 1
        limits = max_nodes, max_depth, min_probability
        proposals = self._ask_free(text, max_nodes, min_probability)
        tree = VerifyTree()
        if proposals:
            tree = self._select(text, proposals, verify_ms, limits)
        model_free_rate = tree.expected / verify_ms[len(tree.tokens) + 1]
        started = perf_counter()
        for state in text.states:
            if state.model_based and not state.is_dropped:
                asked = perf_counter()
                state.table.min_probability, state.table.max_wait_ms = min_probability, _MAX_WAIT * verify_ms[1]
                with state.guarded(text.stats):
                    self._prepare(state, text, model_free_rate, verify_ms, min(max_nodes, max_depth))
                    if not state.is_asked:
                        continue
                of_model: list[Proposal] = []
                self._ask(state, text, max_nodes, of_model)
                proposals = of_model + proposals  # more reliable than those that copy
                self._record_wait(state, asked)
                spent_ms = 1e3 * (perf_counter() - started)
                tree = self._select(text, proposals, verify_ms, limits, spent_ms)
        return proposals, tree

    def _select(
        self,
        text: DraftedText,
        proposals: Sequence[Proposal],
        verify_ms: Sequence[float],
        limits: tuple[int, int, float],
        spent_ms: float = 0.0,
    ) -> VerifyTree:
        """See select_tree: without nodes whose experts would have to be waited for, where these can be told."""
        costs, forecast = self.costs, self._forecast
        if forecast is None or not forecast.is_trusted or not isinstance(costs, ExpertCostModel):
            return select_tree(proposals, verify_ms, *limits, spent_ms)
        n_past, last = text.session.n_past, text.context.tokens[-1]

        def keep(tree: VerifyTree, order: list[int], path_probabilities: Sequence[float]) -> list[int]:
            return forecast.kept(last, tree, order, path_probabilities, costs, n_past)

        return select_tree(proposals, verify_ms, *limits, spent_ms, keep)

    def _prepare(
        self,
        state: DrafterState,
        text: DraftedText,
        model_free_rate: float,
        verify_ms: Sequence[float],
        max_nodes: int,
        n_texts: int = 1,
    ) -> None:
        """Decide whether a model-based drafter is asked in this step, and set when its chain is long enough."""
        is_worth_it = self._is_worth_asking(state, text, model_free_rate, verify_ms, max_nodes, n_texts)
        was_asked, state.is_asked = state.is_asked, is_worth_it
        if state.is_asked:
            token_ms, prefill_ms = state.cost(text.context, n_texts)
            state.table.length_rule = ChainLengthRule(verify_ms, token_ms, prefill_ms, max_nodes)
        elif state.background and was_asked:
            state.background.interrupt()

    def _start_background(self, text: DraftedText, path: Sequence[int], max_nodes: int) -> None:
        """Let overlapped drafters continue the path that is about to be verified."""
        for state in text.states:
            if state.background and state.is_asked and not state.is_dropped:
                text.context.acceptance = state.table
                with state.guarded(text.stats):
                    state.background.start_drafting(text.context, path, max_nodes)

    def _stop_background(self, text: DraftedText) -> None:
        """Let no drafter work beside a step whose time is to be that of plain decoding."""
        for state in text.states:
            if state.background and state.is_asked:
                state.is_asked = False
                state.background.interrupt()

    def _ask(self, state: DrafterState, text: DraftedText, max_nodes: int, proposals: list[Proposal]) -> None:
        """Add a drafter's proposal, unless it is empty or malformed."""
        if state.is_dropped:
            return
        text.context.acceptance = state.table
        with state.guarded(text.stats):
            self._add(state, text, state.drafter.propose(text.context, max_nodes), max_nodes, proposals)

    def _add(
        self, state: DrafterState, text: DraftedText, tree: DraftTree, max_nodes: int, proposals: list[Proposal]
    ) -> None:
        """Add what a drafter proposed. Raises ShapeError if it is malformed."""
        tree = allowed_part(text.context, checked(tree, self._n_vocab, max_nodes))
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
        self,
        state: DrafterState,
        text: DraftedText,
        model_free_rate: float,
        verify_ms: Sequence[float],
        max_nodes: int | None = None,
        n_texts: int = 1,
    ) -> bool:
        """Whether a model-based drafter is expected to be faster than model_free_rate tokens per millisecond.

        The cost of its prefill is compared with what it saves over the tokens to come: those that an answer usually
        has, or as many again as there are by now.
        """
        if state.model_based is None or state.is_dropped or self._draft_max < 1:
            return False
        max_nodes = self._draft_max if n_texts == 1 or max_nodes is None else max_nodes
        own_rate, prefill_ms = state.rate(text.context, verify_ms, max_nodes, n_texts)
        n_left = min(text.n_left, max(self._answer_tokens - text.n_drawn, text.n_drawn))
        other_rate = max(1.0 / verify_ms[1], _MIN_GAIN_OVER_FREE * model_free_rate)
        return own_rate * verify_ms[1] > _MIN_GAIN and (1.0 / other_rate - 1.0 / own_rate) * n_left > prefill_ms

    def _learn(self, step: Step, accepted: Sequence[int]) -> None:
        """Compare every draft with the new tokens, and what each drafter saved with what it took."""
        for _, draft, table in step.proposals:
            table.learn(draft, step.new)
        tree = step.tree
        n_nodes = len(tree.tokens)
        verify_ms = self.costs.milliseconds(step.text.session.n_past) if n_nodes else ()
        owners = [tree.owners[node] for node in accepted]
        for state in step.text.states:
            name = state.drafter.name
            state.count(verify_ms, n_nodes, tree.owners.count(name), owners.count(name))

    def _observe(
        self, text: DraftedText, new: Sequence[int], rows: Sequence[Logits], features: Features | None = None
    ) -> None:
        """Show new tokens to the drafters, with the logits that each was sampled from."""
        context, stats = text.context, text.stats
        first = len(context.tokens) - 1
        context.tokens.extend(new)
        if features is not None:
            self.observe_features(text.place, context.tokens, first, features, stats)
        rows = [row[: self._n_vocab] for row in rows]
        for state in text.states:
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
