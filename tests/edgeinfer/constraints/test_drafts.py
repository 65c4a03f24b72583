"""Drafts under a constraint: what must follow is drafted, what may not is left out, and no token changes."""

import random

import pytest
from constrained import OPTIONS, PERSON, check_masks
from drafting import MALICIOUS, PROMPT, FixedCosts, FunctionDrafter, knowing, random_tree, with_drafters

from edgeinfer.common.errors import ConstraintError
from edgeinfer.constraints.constraint import Constraints
from edgeinfer.constraints.matching import LookAhead
from edgeinfer.constraints.options import wanted_of
from edgeinfer.speculation.payoff import Payoff
from edgeinfer.speculation.tree import DraftTree

pytestmark = pytest.mark.usefixtures("grammar")

REQUESTS = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.5, "seed": 2, "top_k": 0}]


@pytest.fixture
def drafting(loaded, model):
    """An engine whose drafters a test chooses."""
    engine = loaded(model, draft="suffix")
    own = engine.speculator
    yield engine
    engine.speculator = own


def state_of(engine, options, n_prompt=0):
    wanted = wanted_of(options)
    return Constraints(engine.tokenizer).read(wanted).state(wanted, n_prompt)


def test_what_is_forced_is_drafted_and_accepted(engine, drafting):
    options = {"schema": {"const": {"temperature": [20.5, None], "unit": "celsius"}}}
    plain = engine.generate(PROMPT, temperature=0, **options)
    drafted = with_drafters(drafting).generate(PROMPT, temperature=0, **options)
    assert drafted.tokens == plain.tokens
    counts = drafted.timings.speculation.by_drafter["constraint"]
    assert counts.accepted > len(plain.tokens) // 2 and drafted.timings.tokens_per_step > 2
    state, forced = state_of(engine, {"regex": "ab?cdefgh"}), list(b"cdefgh")
    assert state.forced([], 9) == list(b"a") and state.forced(list(b"ab"), 9) == forced
    assert state.forced(list(b"ab"), 3) == forced[:3] and state.forced(list(b"abcdefgh"), 9) == []


@pytest.mark.parametrize("n_texts", [1, 2])
def test_what_is_forced_is_drafted_while_drafting_rests(engine, loaded, model, n_texts, monkeypatch):
    """It takes no drafter, and costs no more than the masks of its draws."""
    options = {"schema": {"const": {"temperature": [20.5, None], "unit": "celsius"}}}
    drafter = FunctionDrafter(lambda context, limit: pytest.fail("a drafter was asked"))
    resting = with_drafters(loaded(model, draft="suffix", parallel=2), drafter)
    monkeypatch.setattr(Payoff, "is_resting", True)
    monkeypatch.setattr(Payoff, "needs_plain_step", True)
    plain = [engine.generate(f"{PROMPT} {n}", temperature=0, max_tokens=40, **options) for n in range(n_texts)]
    found = list(
        resting.generate_many([f"{PROMPT} {n}" for n in range(n_texts)], temperature=0, max_tokens=40, **options)
    )
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    for each in found:
        assert each.timings.tokens_per_step > 2 and list(each.timings.speculation.by_drafter) == ["constraint"]
    free = resting.generate(PROMPT, temperature=0, max_tokens=8)
    assert free.tokens == engine.generate(PROMPT, temperature=0, max_tokens=8).tokens
    assert free.timings.tokens_per_step == 1


def test_forced_tokens_are_canonical(engine):
    """As the model's own tokeniser cuts the text: the tokens that a model has seen."""
    state = state_of(engine, {"choices": ["there is the one, hello"]})
    text = []
    while not state.is_complete(text):
        mask = state.mask_at(text)
        text += state.forced(text, 99) or [next(id for id in range(mask.n_vocab) if mask.allows(id))]
    assert text == engine.tokenizer.encode("there is the one, hello", add_special=False, continues=True)


def test_habits_are_drafted_and_change_no_token(engine, drafting):
    with_drafters(drafting)
    engine.generate(PROMPT, seed=1, schema=PERSON)
    for seed in range(4):
        plain = engine.generate(PROMPT, seed=seed, schema=PERSON)
        drafted = drafting.generate(PROMPT, seed=seed, schema=PERSON)
        assert drafted.tokens == plain.tokens
    state = state_of(engine, {"regex": "[ab]c[ab]d"})
    assert state.forced([], 4) == [] and list(state.likely([])) == []
    state.draw(engine.session.forward([0]).logits[0][: engine.tokenizer.n_vocab], [], lambda _: ord("b"))
    assert list(state.likely([])) == [(ord("b"), 2), (ord("c"), 1), (ord("b"), 2), (ord("d"), 1)]


@pytest.mark.parametrize("name", OPTIONS)
def test_no_row_is_spent_on_what_may_not_follow(engine, drafting, name, monkeypatch):
    """Each row of each pass after the prompt is a token that a mask lets through, and much of the drafts is not."""
    rng, n_vocab, passes = random.Random(3), engine.tokenizer.n_vocab, []
    plain = engine.generate(PROMPT, temperature=0, **OPTIONS[name])
    text = [*engine.tokenize(PROMPT), *plain.tokens]
    drafter = FunctionDrafter(lambda context, limit: knowing(text, n_vocab, rng, limit, len(context.tokens)))
    with_drafters(drafting, drafter)
    forward = drafting.session.forward

    def recording(tokens, parents=None, **options):
        if parents is not None and len(tokens) > 1:
            passes.append((drafting.session.n_past, list(tokens), list(parents)))
        return forward(tokens, parents, **options)

    monkeypatch.setattr(drafting.session, "forward", recording)
    drafted = drafting.generate(PROMPT, temperature=0, **OPTIONS[name])
    assert drafted.tokens == plain.tokens and passes
    state = state_of(engine, OPTIONS[name], len(text) - len(plain.tokens))
    for n_past, tokens, parents in passes:
        paths = {0: text[: n_past + 1]}
        assert paths[0][-1] == tokens[0]
        for row in range(1, len(tokens)):
            if parents[row] == row - 1 and tokens[row] == 0:
                break  # padding
            assert state.mask_at(paths[parents[row]]).allows(tokens[row])
            paths[row] = [*paths[parents[row]], tokens[row]]


@pytest.mark.parametrize("name", OPTIONS)
def test_any_tree_leaves_the_tokens_as_they_are(engine, drafting, name):
    n_vocab = engine.tokenizer.n_vocab
    for seed, request in enumerate(REQUESTS):
        rng = random.Random(seed)
        plain = engine.generate(PROMPT, max_tokens=80, **OPTIONS[name], **request)
        check_masks(engine.tokenizer, OPTIONS[name], plain.tokens)
        text = [*engine.tokenize(PROMPT), *plain.tokens]

        def known(context, limit, text=text, rng=rng):
            return knowing(text, n_vocab, rng, limit, len(context.tokens))

        def any_tree(context, limit, rng=rng):
            return random_tree(n_vocab, rng, limit)

        for propose in (known, any_tree):
            with_drafters(drafting, FunctionDrafter(propose))
            drafted = drafting.generate(PROMPT, max_tokens=80, **OPTIONS[name], **request)
            assert drafted.tokens == plain.tokens and drafted.parsed == plain.parsed
            assert drafted.timings.speculation is None or drafted.timings.speculation.dropped == {}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_drafter_does_no_harm(engine, drafting, name):
    with_drafters(drafting, FunctionDrafter(MALICIOUS[name], "bad"))
    plain = engine.generate(PROMPT, seed=2, schema=PERSON)
    assert drafting.generate(PROMPT, seed=2, schema=PERSON).tokens == plain.tokens


def test_masks_that_cannot_be_told_ahead_end_no_answer(engine, drafting, monkeypatch):
    """Only the draw itself raises: a draft may go where the text does not."""

    def failing(*_):
        raise ConstraintError("too far ahead")

    with_drafters(drafting, FunctionDrafter(lambda context, limit: DraftTree([97], [-1], [0.9], [0])))
    plain = engine.generate(PROMPT, seed=2, schema=PERSON)
    monkeypatch.setattr(LookAhead, "mask", failing)
    drafted = drafting.generate(PROMPT, seed=2, schema=PERSON)
    assert drafted.tokens == plain.tokens and list(drafted.timings.speculation.dropped) == ["function"]


def test_drafters_draw_without_the_constraint(drafting):
    """A draft model has its own logits and other texts: it gets the sampler alone."""
    seen = []

    def propose(context, limit):
        seen.append(context.draw)
        return DraftTree([], [], [], [])

    with_drafters(drafting, FunctionDrafter(propose), costs=FixedCosts())
    drafting.generate(PROMPT, temperature=0, max_tokens=8, regex="[ab]+")
    logits = drafting.session.forward([0]).logits[0].copy()
    logits[:] = 0.0
    logits[200] = 1.0
    assert seen and seen[0](logits, [1, 2, 3]) == 200
