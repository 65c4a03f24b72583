"""Drafting while the target checks: the same text, drafts that are there without waiting, and nothing left running."""

import random
import threading

import pytest
from drafting import FixedCosts
from tiny_heads import write_tiny_head

import edgeinfer
from edgeinfer.common.errors import Interrupted
from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.cost import MAX_TOKENS
from edgeinfer.speculation.drafters.base import BackgroundDrafter, Context, FeatureDrafter
from edgeinfer.speculation.drafters.overlapped import OverlappedDrafter, overlapped
from edgeinfer.speculation.drafters.overlapped_draft import subtree_after
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.tree import DraftTree

PROMPT = "hello world, there is the one, there is the one and hello"
REQUESTS = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.0, "repeat_penalty": 1.3}]


pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """A draft model that is the model itself, and heads that know what it writes."""
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        texts = [[*engine.tokenize(PROMPT), *tokens_of(engine, request)] for request in REQUESTS[:2]]
    folder = tmp_path_factory.mktemp("heads")
    heads = {f"head of {n}": write_tiny_head(folder / f"{n}.gguf", model, texts, n_layers=n) for n in (0, 1)}
    return {"model": model, **heads}


@pytest.fixture(params=["model", "head of 0", "head of 1"])
def ahead(request, model, files):
    """An engine whose only drafter is overlapped."""
    with edgeinfer.load(model, draft=[str(files[request.param])]) as engine:
        engine.tokenizer.stop_ids = frozenset()
        drafter = overlapped(engine.speculator.drafters[-1])
        n_vocab = engine.tokenizer.n_vocab
        engine.speculator = Speculator(engine.session, [drafter], FixedCosts(), n_vocab, MAX_TOKENS - 1)
        yield engine
        drafter.close()


@pytest.fixture
def patient(monkeypatch):
    """The target waits for each draft, so that no machine's speed decides which there are."""
    monkeypatch.setattr("edgeinfer.speculation.pipeline._MAX_WAIT", 1e6)


def tokens_of(engine, request=REQUESTS[0], n=60, prompt=PROMPT):
    return engine.generate(prompt, max_tokens=n, **request).tokens


def of(engine):
    return engine.speculator.drafters[0]


def make_passes_last(engine):
    """Each pass of the target lasts until the draft after it is made, however slow the other thread is."""
    drafter, forward = of(engine), engine.session.forward

    def lasting(*arguments, **options):
        draft = drafter._draft
        assert draft is None or drafter._clock.wait_for(lambda: not draft.is_running, 30)
        return forward(*arguments, **options)

    engine.session.forward = lasting


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
@pytest.mark.usefixtures("patient")
def test_the_tokens_are_those_of_plain_decoding_and_drafts_are_taken(ahead, plain, request_):
    make_passes_last(ahead)
    for prompt in (PROMPT, PROMPT + " again", "something else"):
        completion = ahead.generate(prompt, max_tokens=60, **request_)
        assert completion.tokens == tokens_of(plain, request_, prompt=prompt)
        speculation = completion.timings.speculation
        assert speculation.dropped == {}
        if prompt == PROMPT and request_ in REQUESTS[:2]:
            assert sum(drafted.accepted for drafted in speculation.by_drafter.values()) >= 10


@pytest.mark.usefixtures("patient")
def test_drafts_continue_the_path_that_is_being_verified(ahead):
    """All drafts are made in the other thread, many of them after tokens that are not verified yet."""
    drafter, main, n_unverified = of(ahead), threading.get_ident(), []
    propose = drafter._drafter.propose

    def recorded(context, limit):
        assert threading.get_ident() != main
        n_unverified.append(context.n_unverified)
        return propose(context, limit)

    drafter._drafter.propose = recorded
    make_passes_last(ahead)
    completion = ahead.generate(PROMPT, max_tokens=60, **REQUESTS[0])
    assert sum(n > 0 for n in n_unverified) > len(n_unverified) / 3 and max(n_unverified) > 1
    assert completion.timings.speculation.steps < 30
    if drafter.name == "model":
        assert len(n_unverified) < 60 + 2 * 33  # each token once, and what is drafted beyond the end


@pytest.mark.usefixtures("patient")
def test_the_drafter_works_while_the_target_does(ahead):
    """A draft after what is being verified is begun while the target's pass lasts, whichever of the threads is faster.

    The other thread makes no step but while the target waits for it or works, and each pass of the target lasts until
    the draft that is needed after it has had one.
    """
    drafter, n_begun, n_passes, is_open = of(ahead), 0, 0, False
    make, propose, forward = drafter._make, drafter.propose, ahead.session.forward

    def when_open(draft, *step):
        nonlocal n_begun
        assert drafter._clock.wait_for(lambda: is_open or draft.is_stopped, 30)
        n_begun += 1
        drafter._clock.notify()
        make(draft, *step)

    def opened(function, *arguments, **options):
        nonlocal is_open
        is_open = True
        drafter._clock.notify()
        try:
            return function(*arguments, **options)
        finally:
            is_open = False

    def passing(*arguments, **options):
        nonlocal n_passes
        draft, n_before = drafter._draft, n_begun
        if draft is not None and draft.is_running:
            opened(drafter._clock.wait_for, lambda: n_begun > n_before or not draft.is_running, 30)
            n_passes += n_begun > n_before
        return forward(*arguments, **options)

    drafter._make, ahead.session.forward = when_open, passing
    drafter.propose = lambda *arguments: opened(propose, *arguments)
    tokens_of(ahead, n=60)
    assert n_passes > 5


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, Interrupted])
@pytest.mark.usefixtures("patient")
def test_a_draft_that_fails_in_the_other_thread_changes_no_token(ahead, plain, kind):
    inner, n_calls = of(ahead)._drafter, 0
    propose = inner.propose

    def failing(context, limit):
        nonlocal n_calls
        if threading.current_thread() is not threading.main_thread():
            n_calls += 1
            if n_calls == 3:
                raise kind("injected")
        return propose(context, limit)

    inner.propose = failing
    make_passes_last(ahead)
    completion = ahead.generate(PROMPT, max_tokens=60, **REQUESTS[0])
    assert completion.tokens == tokens_of(plain) and n_calls >= 3
    assert bool(completion.timings.speculation.dropped) == (kind is not Interrupted)
    completion = ahead.generate(PROMPT + " again", max_tokens=60, **REQUESTS[0])
    assert completion.tokens == tokens_of(plain, prompt=PROMPT + " again")
    assert completion.timings.speculation.dropped == {}


def test_streams_left_and_interrupted_anywhere_leave_the_engine_as_new(ahead, plain):
    expected, rng = tokens_of(plain), random.Random(1)
    for n in [*range(1, 8), *(rng.randrange(60) for _ in range(10))]:
        with ahead.stream(PROMPT, temperature=0.0) as stream:
            for _ in range(n):
                next(stream)
            if n % 2:
                ahead.interrupt()
        assert tokens_of(ahead) == expected
    for n in range(5):
        timer = threading.Timer(0.01 * n, ahead.interrupt)
        timer.start()
        completion = ahead.generate(PROMPT, max_tokens=60, temperature=0.0)
        timer.join()
        assert expected[: len(completion.tokens)] == completion.tokens
    assert tokens_of(ahead) == expected


def test_closing_ends_the_thread(model, files):
    before = {*threading.enumerate()}  # other tests may have left some
    with edgeinfer.load(model, draft=[str(files["head of 1"])]) as engine:
        drafter = overlapped(engine.speculator.drafters[-1])
        engine.speculator = Speculator(engine.session, [drafter], FixedCosts(), engine.tokenizer.n_vocab, 31)
        with engine.stream(PROMPT, temperature=0.0) as stream:
            next(stream), next(stream)
            (thread,) = (each for each in {*threading.enumerate()} - before if each.name.startswith("edgeinfer-head"))
        drafter.close()
        assert not thread.is_alive()


def test_only_a_drafter_of_features_is_given_them(files, model):
    for name, needed in (("model", False), ("head of 1", True)):
        with edgeinfer.load(model, draft=[str(files[name])]) as engine:
            drafter = overlapped(engine.speculator.drafters[-1])
            assert isinstance(drafter, OverlappedDrafter) and isinstance(drafter, BackgroundDrafter)
            assert isinstance(drafter, FeatureDrafter) == needed
            assert not isinstance(engine.speculator.drafters[-1], BackgroundDrafter)


def test_a_draft_model_drops_unverified_tokens_that_were_rejected(model):
    """Drafts after a true text are those of a draft model that never saw another one."""
    with edgeinfer.load(model, draft=[str(model)]) as engine, edgeinfer.load(model, draft=[str(model)]) as other:
        used, fresh = engine.speculator.drafters[-1], other.speculator.drafters[-1]
        text = engine.tokenize(PROMPT)

        def proposed(drafter, tokens, n_unverified=0):
            context = Context(list(tokens), lambda logits, text: int(logits.argmax()), True, n_unverified=n_unverified)
            context.acceptance = AcceptanceTable()
            context.acceptance.length_rule = ChainLengthRule([10.0 + 0.01 * n for n in range(MAX_TOKENS + 1)])
            return drafter.propose(context, 8)

        wrong = [(token + 1) % 200 for token in text[:6]]
        for n in (3, 6):
            proposed(used, [*text, *wrong[:n]], n_unverified=n)
        came = [*text, *((token + 2) % 200 for token in text[:9])]
        tree = proposed(used, came)
        assert tree == proposed(fresh, came) and len(tree) > 1
        assert used._tokens[: len(came)] == came


def test_the_subtree_after_a_path_is_a_tree():
    tree = DraftTree([5, 6, 7, 8, 9, 6], [-1, -1, 0, 1, 2, 3], [0.9, 0.1, 0.8, 0.7, 0.6, 0.5], [0, 1, 2, 3, 4, 5])
    assert subtree_after(tree, []) == tree
    assert subtree_after(tree, [5]) == DraftTree([7, 9], [-1, 0], [0.8, 0.6], [2, 4])
    assert subtree_after(tree, [6, 8]) == DraftTree([6], [-1], [0.5], [5])
    assert (
        subtree_after(tree, [5, 7, 9]) is None
        and subtree_after(tree, [5, 8]) is None
        and subtree_after(tree, [1]) is None
    )
