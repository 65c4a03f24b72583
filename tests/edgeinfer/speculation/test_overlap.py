"""How much of drafting overlaps the target's passes, on a clock of its own: no machine's speed decides."""

import random

import pytest
from tiny_models import write_tiny_model
from virtual_time import SlowDrafter, VirtualClock, slow_target

import edgeinfer
from edgeinfer.speculation import drafter_state, pipeline
from edgeinfer.speculation.cost import CostCurve, CostModel
from edgeinfer.speculation.drafters.overlapped import overlapped
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.throughput import chain_rate, overlapped_rate
from edgeinfer.speculation.timeline import Event, Timeline

PROMPT = "hello world, there is the one, there is the one and hello"
N_TOKENS = 200
PASS = 0.1  # seconds of the target's pass of one token


pytestmark = pytest.mark.usefixtures("native")


def seconds(n):
    """Of a pass of the target; of the prompt, nothing."""
    return PASS * (1.0 + 0.03 * (n - 1)) if n <= 32 else 0.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=512)


@pytest.fixture(scope="module")
def plain_tokens(model):
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        return engine.generate(PROMPT, max_tokens=N_TOKENS, temperature=0.0).tokens


@pytest.fixture
def answer(model, plain_tokens, monkeypatch):
    """answer(share, of_pass, is_ahead): figures and events of an answer whose drafter takes that part of a pass for a
    token, and is right in that share of places."""

    def run(share, of_pass, is_ahead=True, reading=0.0):
        clock, rng = VirtualClock(n_threads=2 if is_ahead else 1), random.Random(5)
        right = [rng.random() < share for _ in range(512)]
        for module in (pipeline, drafter_state):
            monkeypatch.setattr(module, "perf_counter", clock.now)
        with edgeinfer.load(model, draft="none") as engine:
            engine.tokenizer.stop_ids = frozenset()
            text = [*engine.tokenize(PROMPT), *plain_tokens]
            slow_target(engine.session, seconds, clock.sleep)
            drafter = SlowDrafter(text, right.__getitem__, of_pass * PASS, clock.sleep)
            drafter.reading = reading * PASS
            costs = CostModel(CostCurve(0, {n: seconds(n) for n in range(1, 33)}, 0, {}))
            used = overlapped(drafter, clock=clock) if is_ahead else drafter
            if is_ahead:
                clock.wait_for_the_other()
            speculator = Speculator(engine.session, [used], costs, engine.tokenizer.n_vocab, 31)
            speculator.timeline = Timeline()
            engine.speculator = speculator
            try:
                completion = engine.generate(PROMPT, max_tokens=N_TOKENS, temperature=0.0)
            finally:
                clock.end()
                used.close()
        assert completion.tokens == plain_tokens
        assert completion.timings.speculation.dropped == {}
        return completion.timings.speculation, speculator.timeline

    return run


@pytest.mark.parametrize("of_pass", [0.05, 0.1, 0.2, 0.3, 0.45, 0.6])
@pytest.mark.parametrize("share", [1.0, 0.85, 0.7, 0.5])
def test_at_most_a_tenth_of_the_time_is_spent_waiting_for_drafts(answer, share, of_pass):
    speculation, timeline = answer(share, of_pass)
    assert speculation.waited_seconds <= 0.1 * speculation.step_seconds
    assert speculation.waited_seconds <= 0.1 * timeline.seconds("draft")
    assert speculation.tokens_per_step > 1.05


@pytest.mark.parametrize("share, of_pass", [(1.0, 0.2), (1.0, 0.6), (0.85, 0.1), (0.85, 0.3), (0.7, 0.2), (0.7, 0.45)])
def test_overlapped_drafting_is_faster_than_sequential_drafting(answer, share, of_pass):
    ahead, in_turns = (answer(share, of_pass, is_ahead)[0] for is_ahead in (True, False))
    assert ahead.step_seconds < 0.95 * in_turns.step_seconds
    assert ahead.waited_seconds < 0.2 * in_turns.waited_seconds


def test_a_drafter_that_is_always_right_never_lets_the_target_wait(answer):
    speculation, timeline = answer(1.0, 0.2)
    assert speculation.tokens_per_step > 5.0  # as many as are drafted while the target checks
    drafts = [event for event in timeline.events if event.kind == "draft"]
    checks = [event for event in timeline.events if event.kind == "verify"]
    assert sum(draft.start < check.end and check.start < draft.end for draft in drafts for check in checks) > 100
    longest = max(b.start - a.end for a, b in zip(checks[4:], checks[5:], strict=False))
    assert longest < 0.11 * PASS


def test_a_prompt_that_takes_longer_to_read_than_a_pass_is_read_to_its_end(answer):
    """While the target goes on without drafts."""
    speculation, timeline = answer(1.0, 0.2, reading=7.0)
    assert speculation.tokens_per_step > 3.0 and speculation.waited_seconds <= 0.1 * speculation.step_seconds
    assert timeline.rounds(7, first=0)[-1].n == 1


def test_a_drafter_that_is_slower_than_the_target_is_not_asked(answer):
    speculation, timeline = answer(1.0, 1.5)
    assert speculation.tokens_per_step == 1.0 and speculation.waited_seconds < 0.01 * speculation.step_seconds
    assert timeline.seconds("draft") <= 2 * 1.5 * PASS  # until that was known


def test_the_overlapped_rate_grows_with_speed_and_acceptance_rate():
    milliseconds = [0.0, *(1e3 * seconds(n) for n in range(1, 33))]
    one = 1.0 / milliseconds[1]
    assert overlapped_rate(0.8, 100.0, milliseconds, 31) == overlapped_rate(0.0, 1.0, milliseconds, 31) == one
    rates = [overlapped_rate(0.8, of_pass * 100.0, milliseconds, 31) for of_pass in (0.0, 0.1, 0.3, 0.6, 0.9, 1.5)]
    assert rates == sorted(rates, reverse=True) and rates[0] > 2.0 * one and rates[-1] == one
    assert overlapped_rate(1.0, 60.0, milliseconds, 31) == pytest.approx(
        one * 100 / 60, rel=0.02
    )  # all that it can draft
    for of_pass in (0.2, 0.4, 0.6):
        in_turns = chain_rate(0.8, of_pass * 100.0, milliseconds, 31)
        assert overlapped_rate(0.8, of_pass * 100.0, milliseconds, 31) > in_turns


def test_a_timeline_has_the_rounds_that_are_asked_for():
    timeline = Timeline()
    timeline.add("draft", 0.0, 1.5, 1)
    timeline.add("verify", 1.0, 2.0, 3)
    timeline.add("wait", 2.0, 2.1, 0)
    timeline.add("verify", 2.1, 3.0, 2)
    timeline.add("draft", 1.5, 3.5, 1)
    assert timeline.seconds("verify") == pytest.approx(1.9)
    assert timeline.rounds(1, first=1) == [Event("verify", 2.1, 3.0, 2), Event("draft", 1.5, 3.5, 1)]
    assert len(timeline.rounds(2)) == 5 and timeline.rounds(1, first=2) == [] == Timeline().rounds(3)
