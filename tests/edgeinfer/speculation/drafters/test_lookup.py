"""NgramLookup in the passes of a draft model: the drafts of single levels, in fewer passes."""

import pytest
from drafting import FixedCosts, cost_model

from edgeinfer.speculation import open as opening
from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.cost import MAX_TOKENS
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.drafters.lookup import LookupToken, NgramLookup

PROMPT = "hello world, there is the one, there is the one and hello"
REQUESTS = [
    {"max_tokens": 60, "temperature": 0.0},
    {"max_tokens": 60, "temperature": 0.0, "repeat_penalty": 1.3},
    {"max_tokens": 60, "temperature": 0.8, "seed": 1},
]
FLAT = [1.0 + 0.01 * n for n in range(MAX_TOKENS)]


def tokens_of(guesses):
    return [guess.token for guess in guesses]


# ---- The table -------------------------------------------------------------------------------------------------------


def test_the_longest_ngram_and_its_last_follower_are_found():
    guesses = NgramLookup()
    guesses.add([1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6], 0)
    assert tokens_of(guesses.find([1, 2, 3], 1, FLAT)) == [4]
    assert tokens_of(guesses.find([7, 2, 3], 1, FLAT)) == [5]
    assert tokens_of(guesses.find([7, 7, 3], 1, FLAT)) == [6]
    assert guesses.find([1, 2, 7], 1, FLAT) == []
    guesses.add([1, 2, 3, 7], 3)
    assert tokens_of(guesses.find([1, 2, 3], 1, FLAT)) == [7]
    assert [guess.order for text in ([1, 2, 3], [3], [9, 3]) for guess in guesses.find(text, 1, FLAT)] == [0, 2, 2]


def test_guesses_are_extended_by_guesses():
    guesses = NgramLookup()
    guesses.add(list(range(20)), 0)
    assert tokens_of(guesses.find([3, 4, 5], 4, FLAT)) == [6, 7, 8, 9]
    assert tokens_of(guesses.find([0], 2, FLAT)) == [1, 2]
    assert guesses.find([17, 18, 19], 4, FLAT) == [] == guesses.find([], 4, FLAT)


def test_no_more_guesses_are_made_than_are_expected_to_save_time():
    guesses = NgramLookup()
    guesses.add(list(range(20)), 0)
    assert guesses.find([3, 4, 5], 8, [1.0 + n for n in range(MAX_TOKENS)]) == []
    steep_after_two = [1.0, 1.01, 1.02, *(2.0 + n for n in range(MAX_TOKENS))]
    assert len(guesses.find([3, 4, 5], 8, steep_after_two)) == 2
    assert len(guesses.find([3, 4, 5], 8, [1.0, 1.0])) == 1  # the longest pass whose cost is known


def test_an_order_whose_guesses_are_always_rejected_is_not_used_any_more():
    guesses = NgramLookup()
    guesses.add(list(range(20)), 0)
    made = 0
    while found := guesses.find([3, 4, 5], 1, FLAT):
        guesses.learn(found, [0])
        made += 1
    assert 5 < made < 200 and guesses.levels_per_pass == 1.0
    assert guesses.find([9, 5], 1, FLAT), "shorter n-grams were never rejected"


def test_the_mean_of_levels_is_of_those_that_were_made():
    guesses = NgramLookup()
    for _ in range(300):
        guesses.learn([LookupToken(1, 0), LookupToken(2, 1), LookupToken(3, 2)], [1, 2, 7])
    assert guesses.levels_per_pass == pytest.approx(3.0, rel=0.01)
    right = [right / all_ for right, all_ in guesses._counts]
    assert right == pytest.approx([1.0, 1.0, 0.0], abs=0.01)


def test_the_table_takes_what_the_plan_counts_whatever_it_sees():
    guesses = NgramLookup()
    guesses.add(list(range(100_000)), 0)
    table = guesses._keys, guesses._tokens
    assert sum(part.itemsize * len(part) for part in table) == NgramLookup.memory() < 1 << 20
    assert tokens_of(guesses.find([99_997, 99_998], 1, FLAT)) == [99_999]


# ---- In the drafter --------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def open_drafter(opened, model, monkeypatch):
    """An engine whose drafter is the model itself, and what its passes read."""
    monkeypatch.setattr(opening, "costs_of", lambda *facts: FixedCosts())

    def open_it():
        engine = opened(model, draft=[str(model)], draft_device="cpu")
        drafter, read = engine.speculator.drafters[-1], []
        drafter._costs = cost_model(lambda n: 1.0 + 0.01 * (n - 1))
        drafter._costs.observe = lambda n, n_past, milliseconds: None
        forward = drafter.session.forward

        def recorded(tokens, *arguments, **options):
            read.append(list(tokens))
            return forward(tokens, *arguments, **options)

        drafter.session.forward = recorded
        return engine, drafter, read

    return open_it


def context_of(tokens):
    """A context in which every draft token is worth making."""
    context = Context(list(tokens), lambda logits, text: int(logits.argmax()), True)
    context.acceptance = AcceptanceTable()
    context.acceptance.length_rule = ChainLengthRule([10.0] * (MAX_TOKENS + 1))
    return context


@pytest.mark.parametrize("n_wrong", [0, 1, 2, 5])
@pytest.mark.parametrize("limit", [1, 2, 7, 20])
def test_any_guesses_give_the_draft_of_single_levels(open_drafter, monkeypatch, n_wrong, limit):
    """NgramLookup of which each n_wrong-th is another token."""
    _, plain, _ = open_drafter()
    _, guessing, read = open_drafter()
    text = list(range(20, 40))
    monkeypatch.setattr(NgramLookup, "find", lambda *arguments: [])
    needed = plain.propose(context_of(text), 31)
    chain, node = [], -1
    while node in needed.parents:
        node = needed.parents.index(node)
        chain.append(needed.tokens[node])

    def oracle(guesses, after, most, milliseconds):
        assert list(after[: len(text)]) == text
        first = len(after) - len(text)
        right = chain[first : first + min(most, 6)]
        return [LookupToken(token + (n_wrong > 0 and i % n_wrong == n_wrong - 1), 0) for i, token in enumerate(right)]

    monkeypatch.setattr(NgramLookup, "find", oracle)
    drafted = guessing.propose(context_of(text), limit)
    n = len(drafted)
    assert n == limit and drafted.tokens == needed.tokens[:n] and drafted.parents == needed.parents[:n]
    assert drafted.p == needed.p[:n] and drafted.buckets == needed.buckets[:n]
    n_past = guessing.session.n_past
    assert guessing._tokens[:n_past] == [*text, *chain][:n_past]
    if n_wrong == 0 and limit > 6:
        assert len(read) < len(chain[:limit]) / 2
    monkeypatch.setattr(NgramLookup, "find", lambda *arguments: [])
    came = [*text, chain[0], 3, 4]
    assert guessing.propose(context_of(came), 8) == plain.propose(context_of(came), 8)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_the_text_is_that_of_plain_decoding_and_passes_are_saved(open_drafter, plain, request_):
    engine, drafter, read = open_drafter()
    for prompt in (PROMPT, PROMPT, PROMPT + " again"):
        del read[:]
        completion = engine.generate(prompt, **request_)
        assert completion.tokens == plain.generate(prompt, **request_).tokens
        speculation = completion.timings.speculation
        assert speculation.dropped == {} and speculation.by_drafter["model"].accepted > 10
    assert any(len(tokens) > 2 for tokens in read) and drafter._lookup.levels_per_pass > 1.2


def test_accepted_guesses_make_a_draft_token_cheaper(open_drafter):
    _, drafter, _ = open_drafter()
    context = context_of(range(20, 40))
    one, _ = drafter.cost(context)
    for _ in range(300):
        drafter._lookup.learn([LookupToken(1, 0)], [1, 2])
    assert drafter.cost(context)[0] == pytest.approx(one / 2, rel=0.01)


def test_guesses_stay_within_the_context(open_drafter, monkeypatch):
    _, drafter, read = open_drafter()
    monkeypatch.setattr(
        NgramLookup, "find", lambda guesses, text, most, milliseconds: [LookupToken(7, 0)] * min(most, 20)
    )
    for n in (256, 255, 254, 250):
        tree = drafter.propose(context_of([*range(20, 40)] * 12 + [*range(n - 240)]), 31)
        assert (len(tree) > 0) == (n < 256) and drafter.session.n_past <= 256
    assert read
