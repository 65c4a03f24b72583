"""Whether drafts pay, measured on a virtual clock: drafting rests while they do not, and comes back when they do."""

import random
from collections.abc import Callable

import pytest

from edgeinfer.speculation.payoff import REST_OF_SEVERAL, Payoff, Rest

Step = Callable[[int], tuple[int, float]]  # tokens of a step with drafts and its seconds, by the tokens so far


class Run:
    """Decoding of n tokens, as the pipeline does it. plain: seconds of a step of one token."""

    def __init__(self, payoff: Payoff, n: int, plain: Callable[[int], float], drafted: Step) -> None:
        self.seconds = self.n_drafted = self.n_plain = 0.0
        self.n_tokens = 0
        while self.n_tokens < n:
            if payoff.measured_without_patch():
                seconds, new = plain(self.n_tokens), 1
                payoff.count_plain(seconds)
                payoff.count(1, seconds, False)
                self.n_plain += 1
            else:
                new, seconds = drafted(self.n_tokens)
                payoff.count(new, seconds, True)
                self.n_drafted += 1
            self.n_tokens += new
            self.seconds += seconds


class Unpatched(Payoff):
    """The property as it is: other tests are not to depend on it, and have it replaced."""

    def measured_without_patch(self) -> bool:
        return NEEDS_PLAIN_STEP.__get__(self)


from needs_plain_step import NEEDS_PLAIN_STEP  # noqa: E402


def noisy(seed: int, share: float) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.uniform(1.0 - share, 1.0 + share)


@pytest.mark.parametrize("seed", range(5))
def test_drafts_that_pay_are_made_and_cost_little_to_be_sure_of(seed: int) -> None:
    noise, rng = noisy(seed, 0.2), random.Random(seed)
    run = Run(
        Unpatched(), 4000, lambda i: 0.010 * noise(), lambda i: (rng.choice((1, 1, 2, 3)), 0.0125 * noise())
    )  # 1.4 times as fast
    assert run.n_plain <= 0.03 * run.n_tokens


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [1.1, 1.3, 2.0])
def test_drafts_that_do_not_pay_rest(seed: int, factor: float) -> None:
    noise = noisy(seed, 0.2)
    run = Run(Unpatched(), 4000, lambda i: 0.010 * noise(), lambda i: (1, 0.010 * factor * noise()))
    assert run.seconds < 1.025 * 4000 * 0.010  # of plain decoding


@pytest.mark.parametrize("seed", range(5))
def test_drafting_comes_back_where_the_text_changes(seed: int) -> None:
    noise, rng = noisy(seed, 0.1), random.Random(seed)

    def drafted(i: int) -> tuple[int, float]:
        return (1, 0.012 * noise()) if i < 1500 else (rng.choice((2, 4)), 0.015 * noise())

    run = Run(Unpatched(), 4000, lambda i: 0.010 * noise(), drafted)
    alone = 1500 * 0.010 + 2500 * 0.005
    assert run.seconds < 1.15 * alone


@pytest.mark.parametrize("seed", range(5))
def test_load_that_comes_and_goes_is_in_both_speeds(seed: int) -> None:
    noise, rng = noisy(seed, 0.1), random.Random(seed)

    def load(i: int) -> float:
        return 3.0 if i // 200 % 2 else 1.0

    run = Run(
        Unpatched(),
        4000,
        lambda i: 0.010 * noise() * load(i),
        lambda i: (rng.choice((1, 2, 3)), 0.0125 * noise() * load(i)),
    )
    assert run.n_plain <= 0.1 * run.n_tokens


def test_what_drafters_took_for_a_prompt_counts_and_a_new_text_gets_a_sooner_trial() -> None:
    payoff = Unpatched()
    Run(payoff, 400, lambda i: 0.010, lambda i: (1, 0.02))
    assert payoff.is_resting
    payoff.start_request(0.0)
    assert Run(payoff, 300, lambda i: 0.010, lambda i: (3, 0.015)).n_drafted > 20
    payoff = Unpatched()
    assert Run(payoff, 200, lambda i: 0.010, lambda i: (2, 0.015)).n_plain < 10
    payoff.start_request(3.0)
    assert Run(payoff, 50, lambda i: 0.010, lambda i: (2, 0.015)).n_plain > 20


def test_after_a_rest_the_next_trial_is_shorter() -> None:
    first, second = [0.0] * 30, [0.0] * 30
    for seed in range(30):
        payoff, noise = Unpatched(), noisy(seed, 0.15)

        def step(payoff: Unpatched = payoff, noise: Callable[[], float] = noise) -> float:
            return Run(payoff, 1, lambda i: 0.010 * noise(), lambda i: (1, 0.0105 * noise())).n_drafted

        while not payoff.is_resting:
            first[seed] += step()
        while payoff.is_resting:
            step()
        while not payoff.is_resting:
            second[seed] += step()
    assert sum(second) < 0.8 * sum(first) and sum(n < 20 for n in second) >= 20 > sum(n < 20 for n in first)


def test_nothing_is_known_before_the_first_plain_step() -> None:
    payoff = Unpatched()
    assert payoff.plain_seconds is None
    payoff.count(3, 0.02, True)
    assert payoff.plain_seconds is None
    payoff.count_plain(0.01)
    assert payoff.plain_seconds == pytest.approx(0.01)


def test_where_drafts_do_not_pay_with_some_texts_they_rest_with_any_number() -> None:
    """The number of texts changes as some end; each begins a trial of its own only where drafting does not rest."""
    rest = Rest(REST_OF_SEVERAL)
    payoffs = {n: Unpatched(n, rest) for n in range(2, 9)}
    n_drafted, n_steps = 0, 0
    for n in (*range(8, 1, -1), *range(2, 9)):
        for _ in range(30):
            payoff = payoffs[n]
            if payoff.measured_without_patch():
                payoff.count_plain(0.010 * n, n)
                payoff.count(n, 0.010 * n, False)
            else:
                payoff.count(n, 0.014 * n, True)
                n_drafted += 1
            n_steps += 1
    assert n_steps == 420 and 6 <= n_drafted <= 40
    assert all(each.is_resting for each in payoffs.values())
    for _ in range(600):
        payoffs[4].count(4, 0.04, False)
    assert not any(each.is_resting for each in payoffs.values())
