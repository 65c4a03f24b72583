"""When model-based drafters are asked, and what they run."""

import pytest
from drafting import PROMPT, FixedCosts, FunctionDrafter, tokens_of, with_drafters
from needs_plain_step import NEEDS_PLAIN_STEP
from steady_clock import SteadyClock
from virtual_time import slow_target

from edgeinfer.speculation import drafter_state, pipeline
from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.drafter_state import DrafterState
from edgeinfer.speculation.drafters.lookup import NgramLookup
from edgeinfer.speculation.payoff import Payoff
from edgeinfer.speculation.stats import StatsCounter
from edgeinfer.speculation.tree import DraftTree

GREEDY = {"temperature": 0.0}

pytestmark = pytest.mark.usefixtures("native")


class ReadsFirst(FunctionDrafter):
    """Drafts one token for little, once it has read the text, which takes as long as some passes."""

    def __init__(self, milliseconds):
        super().__init__(lambda context, limit: DraftTree([1], [-1], [0.9], [0]), "slow")
        self.milliseconds = milliseconds
        self.read_at = []  # numbers of tokens

    def start(self, context):
        self.has_read = False

    def cost(self, context):
        return 1.0, 0.0 if self.has_read else self.milliseconds

    def prefill(self, context):
        self.has_read = True
        self.read_at.append(len(context.tokens))

    def propose(self, context, limit):
        if not self.has_read:
            self.prefill(context)
        return super().propose(context, limit)

    def interrupt(self):
        pass


def test_the_cost_of_a_prefill_is_compared_with_what_an_answer_of_usual_length_saves(opened, plain, model):
    # A right token saves most of a pass of 10 s, so that 50 tokens earn back what reading takes.
    engine = with_drafters(opened(model), drafter := ReadsFirst(50 * 9e3))
    n_prompt = len(engine.tokenize(PROMPT))
    has_read = []
    for _ in range(6):
        with engine.stream(PROMPT, max_tokens=150, temperature=0.0) as stream:
            for _ in range(5):
                next(stream)
        has_read.append(drafter.has_read)
    assert has_read == sorted(has_read, reverse=True) and has_read[0] and not has_read[3], "short ones were learnt"
    drafter.read_at.clear()
    assert tokens_of(engine, GREEDY, 150) == tokens_of(plain, GREEDY, 150)
    (n,) = drafter.read_at
    assert 40 <= n - n_prompt <= 80, "an answer that has come so far may come as far again"


class Slow(FunctionDrafter):
    """Takes 30 ms a token."""

    def cost(self, context):
        return 30.0, 0.0

    def prefill(self, context): ...

    def interrupt(self): ...


@pytest.mark.parametrize("p, is_asked", [(0.5, True), (0.78, True), (0.95, False)])
def test_a_drafter_with_a_model_is_asked_beside_free_drafts_that_are_little_better(
    opened, plain, model, monkeypatch, p, is_asked
):
    # In passes of 100 ms, tokens a second: 10 one by one, 16 with its chains alone, 15, 17 and 19 with the free draft.
    text = tokens_of(plain, GREEDY, 4)
    free = FunctionDrafter(lambda context, limit: DraftTree([text[1] ^ 1], [-1], [p], [0]))
    slow = Slow(lambda context, limit: DraftTree([text[1]], [-1], [0.9], [0]), "slow")
    engine = with_drafters(opened(model), free, slow, costs=FixedCosts(lambda n: 0.1 + 0.001 * n))
    merged, original = [], pipeline.select_tree

    def select_tree(proposals, *arguments):
        choice = original(proposals, *arguments)
        merged.append(([proposal.drafter for proposal in proposals], choice.expected))
        return choice

    monkeypatch.setattr(pipeline, "select_tree", select_tree)
    assert tokens_of(engine, GREEDY, 3) == text[:3]
    assert slow.n_asked == is_asked
    drafters, expected = merged[-1]
    assert drafters == (["slow", "function"] if is_asked else ["function"])
    # The free draft is right where the other one is wrong, not the other way round.
    assert expected == pytest.approx(1.9 + 0.1 * p if is_asked else 1.0 + p)


def test_the_draft_model_decodes_no_token_twice(opened, model, draft_model, monkeypatch):
    monkeypatch.setattr(NgramLookup, "find", lambda *arguments: [])  # which are read too, right or wrong
    engine = opened(model, draft=[str(draft_model)])
    engine.speculator.costs = FixedCosts()
    session = engine.speculator.drafters[-1].session
    fed, original = [], session.forward

    def forward(tokens, *args, **options):
        fed.append((session.n_past, len(tokens)))
        return original(tokens, *args, **options)

    session.forward = forward
    completion = engine.generate(PROMPT, max_tokens=60, temperature=0.0)
    accepted = completion.timings.speculation.by_drafter["model"].accepted
    assert accepted > 20
    # A token is fed once, but for drafted ones that were wrong.
    n_text = completion.usage.prompt_tokens + 60
    wrong = completion.timings.speculation.rejected
    assert sum(n for _, n in fed) <= n_text + wrong
    assert max(n for _, n in fed[1:]) <= 3, "after the prompt only what is new is read"


def test_drafts_that_take_more_than_they_save_are_soon_not_asked_for(opened, plain, model, monkeypatch):
    monkeypatch.setattr(Payoff, "needs_plain_step", NEEDS_PLAIN_STEP)
    asked, clock = [], SteadyClock()
    for module in (pipeline, drafter_state):
        monkeypatch.setattr(module, "perf_counter", clock.now)

    def slow(context, limit):
        asked.append(len(context.tokens))
        clock.sleep(0.03)
        return DraftTree([0], [-1], [0.9], [0])

    engine = with_drafters(opened(model), FunctionDrafter(slow))
    slow_target(engine.session, lambda n: 0.001, clock.sleep)
    completion = engine.generate(PROMPT, max_tokens=200, temperature=0.0)
    assert completion.tokens == tokens_of(plain, GREEDY, 200)
    assert 6 <= len(asked) < 80
    assert completion.timings.speculation.speedup < 1.0, "as it was measured"


def test_a_drafter_that_takes_more_time_than_it_saves_is_asked_seldom_until_it_saves_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(drafter_state, "perf_counter", lambda: now[0])
    drafter = FunctionDrafter(lambda context, limit: DraftTree([], [], [], []))
    state, stats = DrafterState(drafter, AcceptanceTable()), StatsCounter()
    state.start_request(10.0)  # ms of a pass
    asked = []
    for _ in range(24):
        asked.append(state.is_active)
        if state.is_active:
            with state.guarded(stats):
                now[0] += 0.050
        state.count([0.0, 10.0, 11.0], 0, 0, 0)
    assert asked == [step % 8 == 0 for step in range(24)]
    for _ in range(40):
        state.count([0.0, 10.0, 11.0], 1, 1, 1)
    assert state.is_active and not stats.dropped
