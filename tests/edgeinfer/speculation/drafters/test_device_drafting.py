"""Chains that a draft model's device makes by itself: the drafts of single passes, where that is the cheaper way."""

import numpy as np
import pytest
from drafting import FixedCosts, cost_model, let_draft
from steady_clock import SteadyClock
from virtual_time import slow_target

from edgeinfer.backends.base import DraftingSession
from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.errors import NumericalError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation import open as opening
from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.cost import MAX_TOKENS
from edgeinfer.speculation.draft_source import DraftSource, levels_of_model
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.drafters.overlapped import overlapped
from edgeinfer.speculation.drafters.overlapped_draft import OverlappedChain, levels_of
from edgeinfer.speculation.open_on_device import device_drafting_of
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.tree import DraftTree

PROMPT = "hello world, there is the one, there is the one and hello"
GREEDY = {"max_tokens": 60, "temperature": 0.0}
PENALISED = {**GREEDY, "repeat_penalty": 1.3}
DRAWN = {"max_tokens": 60, "temperature": 0.8, "seed": 1}
CHEAP = 0.3  # milliseconds of a level made with others; a pass takes 1


pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def open_chains(opened, model, monkeypatch):
    """An engine whose drafter is the model itself, and the numbers of levels asked for of chains at that price."""

    monkeypatch.setattr(opening, "costs_of", lambda *facts: FixedCosts())

    def open_at(of_level, of_call=0.0):
        engine = opened(model, draft=[str(model)], draft_device="cpu")
        drafter = engine.speculator.drafters[-1]
        asked = let_draft(drafter.session)
        assert isinstance(drafter.session, DraftingSession)
        drafter._costs = cost_model(lambda n: 1.0 + 0.01 * (n - 1))
        drafter._device_drafting = DeviceDrafting(drafter.session, cost_model(lambda n: of_call + of_level * n))
        for costs in (drafter._costs, drafter._device_drafting.costs):  # as they are, whatever comes
            costs.observe = lambda n, n_past, milliseconds: None
        return engine, drafter, asked

    return open_at


def context_of(tokens, is_plain=True):
    context = Context(list(tokens), lambda logits, text: int(logits.argmax()), True, is_plain=is_plain)
    context.acceptance = AcceptanceTable()
    context.acceptance.length_rule = ChainLengthRule([10.0 + 0.01 * n for n in range(MAX_TOKENS + 1)])
    return context


@pytest.mark.parametrize("request_", [GREEDY, PENALISED, DRAWN], ids=str)
def test_the_text_is_that_of_plain_decoding_and_only_plain_texts_are_drafted_so(open_chains, plain, request_):
    engine, _, asked = open_chains(CHEAP)
    for prompt in (PROMPT, PROMPT + " again"):
        completion = engine.generate(prompt, **request_)
        assert completion.tokens == plain.generate(prompt, **request_).tokens
        speculation = completion.timings.speculation
        assert speculation.dropped == {} and speculation.by_drafter["model"].accepted > 10
    assert bool(asked) == (request_ is GREEDY) and min(asked, default=2) > 1


@pytest.mark.parametrize("limit", [1, 2, 5, 12, 31])
def test_a_chain_of_one_call_is_the_chain_of_single_passes(open_chains, limit):
    _, at_once, asked = open_chains(CHEAP)
    _, one_by_one, _ = open_chains(1.1)
    text = list(range(20, 40))
    for tokens in (text, [*text, 7, 8, 9], text[:12]):
        a, b = (drafter.propose(context_of(tokens), limit) for drafter in (at_once, one_by_one))
        n = min(len(a), len(b))  # either may have made a level more than was needed
        assert n >= min(limit, 2) and a.tokens[:n] == b.tokens[:n] and a.parents[:n] == b.parents[:n]
        np.testing.assert_allclose(a.p[:n], b.p[:n], rtol=1e-4)
        assert len(a) <= limit and at_once._tokens[: len(tokens)] == tokens
    assert bool(asked) == (limit > 1)


def test_what_was_made_and_is_not_text_is_forgotten(open_chains):
    _, used, _ = open_chains(CHEAP)
    _, fresh, _ = open_chains(CHEAP)
    text = list(range(20, 40))
    drafted = used.propose(context_of(text), 8)
    came = [*text, drafted.tokens[0], 3, 4]
    assert used.propose(context_of(came), 8) == fresh.propose(context_of(came), 8)
    assert used.session.n_past == len(used._tokens[: used.session.n_past])


@pytest.mark.parametrize("of_level, is_used", [(0.3, True), (0.6, True), (0.95, False), (1.2, False)])
def test_levels_are_made_in_one_call_where_an_accepted_level_costs_less(open_chains, of_level, is_used):
    """With 85 % of the levels right, two give 1.85 for the price of two."""
    _, drafter, asked = open_chains(of_level)
    context = context_of(range(20, 40))
    assert (drafter.levels_per_call(context, 1e9) > 1) == is_used
    assert drafter.cost(context)[0] == pytest.approx(of_level if is_used else 1.0)
    drafter.propose(context, 8)
    assert bool(asked) == is_used
    assert drafter.levels_per_call(context_of(range(20, 40), is_plain=False), 1e9) == 1
    assert drafter.levels_per_call(context, 2.5 * of_level) <= 2


def test_no_more_levels_are_made_than_are_useful(open_chains):
    _, drafter, asked = open_chains(0.1, of_call=0.5)
    context = context_of(range(20, 40))
    assert drafter.levels_per_call(context, 1e9) > 3
    context.acceptance.length_rule = ChainLengthRule([10.0 + 0.01 * n for n in range(MAX_TOKENS + 1)], max_nodes=3)
    drafter.propose(context, 31)
    assert asked == [3]


def test_at_the_end_of_the_context_less_is_made(open_chains):
    _, drafter, asked = open_chains(0.1, of_call=0.5)
    for n in (256, 255, 254, 253):
        tree = drafter.propose(context_of([*range(20, 40)] * 12 + [*range(n - 240)]), 31)
        assert (len(tree) > 0) == (n < 256) and drafter.session.n_past <= 256
    assert asked and max(asked) <= 3


def test_a_session_whose_logits_are_no_numbers_is_dropped_with_the_reason(open_chains, plain):
    engine, drafter, _ = open_chains(CHEAP)
    draft = drafter.session.draft

    def failing(*arguments, **options):
        nodes = draft(*arguments, **options)
        nodes.p[:] = np.nan
        return nodes

    drafter.session.draft = failing
    completion = engine.generate(PROMPT, **GREEDY)
    assert completion.tokens == plain.generate(PROMPT, **GREEDY).tokens
    assert NumericalError.__name__ in completion.timings.speculation.dropped["model"]


def test_an_overlapped_drafter_makes_several_levels_in_a_call(open_chains, plain, monkeypatch):
    monkeypatch.setattr("edgeinfer.speculation.pipeline._MAX_WAIT", 1e6)
    engine, drafter, asked = open_chains(CHEAP)
    ahead = overlapped(drafter)
    engine.speculator = Speculator(engine.session, [ahead], FixedCosts(), engine.tokenizer.n_vocab, MAX_TOKENS - 1)
    completion = engine.generate(PROMPT, **GREEDY)
    assert completion.tokens == plain.generate(PROMPT, **GREEDY).tokens
    assert completion.timings.speculation.by_drafter["model"].accepted > 10 and max(asked) > 1
    ahead.close()


@pytest.mark.parametrize("max_wait_ms, n_levels", [(0.0, 1), (0.14, 2), (0.2, 5)])
def test_an_overlapped_call_takes_at_most_half_a_pass_of_the_target(open_chains, max_wait_ms, n_levels):
    """The patience is a tenth of a pass."""
    _, drafter, _ = open_chains(0.1, of_call=0.5)
    context = context_of(range(20, 40))
    context.acceptance.max_wait_ms = max_wait_ms
    step = OverlappedChain(context, [], 31).step(drafter.levels_per_call)
    assert step is not None and step[2] == n_levels
    tree = drafter.propose(step[0], step[1])
    assert len(levels_of(tree)) == n_levels


def test_levels_of_a_tree_follow_the_first_nodes():
    tree = DraftTree([5, 6, 7, 8, 9], [-1, -1, 0, 2, 2], [0.9, 0.1, 0.8, 0.7, 0.2], [0, 1, 2, 3, 4])
    assert levels_of(tree) == [
        DraftTree([5, 6], [-1, -1], [0.9, 0.1], [0, 1]),
        DraftTree([7], [-1], [0.8], [2]),
        DraftTree([8, 9], [-1, -1], [0.7, 0.2], [3, 4]),
    ]
    assert levels_of(DraftTree([], [], [], [])) == []


def test_device_drafting_is_calibrated_by_number_of_levels(model, monkeypatch):
    clock = SteadyClock()
    monkeypatch.setattr("edgeinfer.speculation.calibration.time", clock.as_module())
    with ModelFile.open(model) as file:
        backend, spec = NativeBackend(for_drafts=True), read_spec(file)
        session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(256)), Device(1)).session()
        slow_target(session, lambda n: 0.001, clock.sleep)
        draft = DraftSource(file, spec, lambda *made: None, lambda own: own, levels_of_model)
        assert device_drafting_of(draft, session) is None
        asked = let_draft(session)
        device_drafting = device_drafting_of(draft, session)
        assert device_drafting is not None and session.n_past == 0 and {1, 2, 8} <= set(asked)
        of_chains = device_drafting.costs.milliseconds(0)
        assert [of_chains[1], of_chains[8]] == pytest.approx([1.0, 8.0], rel=0.01)
