"""Speculation on tiny models: whatever is drafted, the tokens are those of decoding one by one."""

import random
from collections import Counter

import numpy as np
import pytest
from drafting import (
    FAILURES,
    MALICIOUS,
    PROMPT,
    FixedCosts,
    FunctionDrafter,
    knowing,
    let_fail,
    random_tree,
    tokens_of,
    with_drafters,
)
from interrupts import raise_from
from tiny_heads import write_tiny_head

import edgeinfer
from edgeinfer.common.errors import Interrupted
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.tree import DraftTree

REAL_PROMPT = "<|im_start|>user\nName five rivers of Europe, one a line.<|im_end|>\n<|im_start|>assistant\n"
REQUESTS = [
    {"temperature": 0.0},
    *({"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in (1, 2, 3)),
    {"temperature": 0.0, "repeat_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.9, "seed": 4, "presence_penalty": 0.7, "penalty_last_n": 8},
    {"temperature": 2.0, "seed": 5, "top_k": 0, "min_p": 0.0},
    {"temperature": 0.0, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["one"]},
    {"temperature": 0.7, "seed": 6, "dry_multiplier": 0.8, "logit_bias": {261: 3.0, 262: False, 270: -1.5}},
    {"temperature": 0.0, "logit_bias": {104: 6.0, 111: 6.0, 260: False}},
]


pytestmark = pytest.mark.usefixtures("native")


# ---- The same text ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft_head(model, tmp_path_factory):
    """A head that is right on what the model writes after the prompt, greedily."""
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        text = [*engine.tokenize(PROMPT), *tokens_of(engine, REQUESTS[0])]
    return write_tiny_head(tmp_path_factory.mktemp("head") / "head.gguf", model, [text])


@pytest.mark.parametrize(
    "draft", ["auto", "suffix", "answers", "recycling", "FILE", ["suffix", "FILE"], ["HEAD"]], ids=str
)
@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_each_drafter_gives_the_tokens_of_plain_decoding(
    opened, plain, model, draft_model, draft_head, draft, request_
):
    files = {"FILE": str(draft_model), "HEAD": str(draft_head)}
    named = [files.get(one, one) for one in ([draft] if isinstance(draft, str) else draft)]
    engine = opened(model, draft=named[0] if isinstance(draft, str) else named)
    engine.speculator.costs = FixedCosts()
    for prompt in (PROMPT, PROMPT + " again", "something else"):
        assert tokens_of(engine, request_, prompt=prompt) == tokens_of(plain, request_, prompt=prompt)


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_a_draft_model_with_logits_of_the_first_tokens_only_changes_no_token(
    opened, plain, model, draft_model, request_, monkeypatch
):
    monkeypatch.setattr("edgeinfer.backends.native.weights.DRAFT_TOKENS", 64)
    engine = opened(model, draft=[str(draft_model)])
    engine.speculator.costs = FixedCosts()
    assert engine.speculator.drafters[-1].session.spec.n_logits == 64
    completion = engine.generate(PROMPT, max_tokens=48, **request_)
    assert completion.tokens == tokens_of(plain, request_)
    assert completion.timings.speculation.dropped == {}


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_change_no_token(opened, plain, model, seed):
    rng, engine = random.Random(seed), opened(model)
    n_vocab = engine.tokenizer.n_vocab
    with_drafters(engine, FunctionDrafter(lambda context, limit: random_tree(n_vocab, rng, limit)))
    for request in REQUESTS:
        assert tokens_of(engine, request) == tokens_of(plain, request)


@pytest.mark.parametrize("seed", range(6))
def test_trees_with_the_text_in_them_are_accepted_and_change_no_token(opened, plain, model, seed):
    rng, engine = random.Random(seed), opened(model, n_batch=16)
    n_vocab = engine.tokenizer.n_vocab
    for request in REQUESTS:
        text = engine.tokenize(PROMPT) + list(tokens_of(plain, request))

        def propose(context, limit, text=text):
            return knowing(text, n_vocab, rng, limit, len(context.tokens))

        with_drafters(engine, FunctionDrafter(propose))
        completion = engine.generate(PROMPT, max_tokens=48, **request)
        assert list(completion.tokens) == text[-48:]
        speculation = completion.timings.speculation
        assert speculation.tokens_per_step > 2 and speculation.dropped == {}
        assert speculation.tokens == 47 and sum(of.accepted for of in speculation.by_depth) == 47 - speculation.steps


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_drafter_does_no_harm(opened, plain, model, name):
    bad = FunctionDrafter(MALICIOUS[name], "bad")
    engine = with_drafters(opened(model), bad)
    for request in REQUESTS[:2]:
        completion = engine.generate(PROMPT, max_tokens=24, **request)
        assert completion.tokens == tokens_of(plain, request, 24)
        if name == "empties the text it was shown":
            continue
        assert list(completion.timings.speculation.dropped) == ["bad"]
    if name != "empties the text it was shown":
        assert bad.n_asked == 2, "once a request: then it sits out"


def test_a_drafter_that_fails_half_way_leaves_the_answer_as_it_is(opened, plain, model):
    text = opened(model).tokenize(PROMPT) + list(tokens_of(plain, {"temperature": 0.0}))

    def propose(context, limit):
        if len(context.tokens) > len(text) - 30:
            raise MemoryError("gone")
        return knowing(text, 40, random.Random(1), limit, len(context.tokens))

    engine = with_drafters(opened(model), FunctionDrafter(propose, "mortal"))
    completion = engine.generate(PROMPT, max_tokens=48, temperature=0.0)
    assert list(completion.tokens) == text[-48:]
    assert completion.timings.speculation.dropped == {"mortal": "MemoryError: gone"}
    assert completion.timings.speculation.by_drafter["mortal"].accepted > 0


@pytest.mark.parametrize("failure", FAILURES)
def test_a_draft_model_killed_mid_answer_changes_no_token(opened, plain, model, draft_model, tmp_path, failure):
    copy = tmp_path / "draft.gguf"
    copy.write_bytes(draft_model.read_bytes())
    engine = opened(model, draft=["suffix", str(copy)])
    engine.speculator.costs = FixedCosts()
    n_calls = let_fail(engine.speculator.drafters[-1].session, failure, copy)
    completion = engine.generate(PROMPT, max_tokens=60, temperature=0.0)
    assert completion.tokens == tokens_of(plain, {"temperature": 0.0}, 60) and n_calls() > 6
    for _ in range(2):
        dropped = completion.timings.speculation.dropped
        assert list(dropped) == ([] if failure == "cut file" else ["model"]), dropped
        completion = engine.generate(PROMPT + " again", max_tokens=20, temperature=0.0)
        assert completion.tokens == tokens_of(plain, {"temperature": 0.0}, 20, PROMPT + " again")


@pytest.fixture(scope="module")
def real_texts(default_model):
    """What the default model writes after a prompt, greedily and drawn."""
    with edgeinfer.load(default_model, n_ctx=512, draft="none") as engine:
        return [tokens_of(engine, request, 48, REAL_PROMPT) for request in REQUESTS[:2]]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_draft_of_the_default_model_killed_mid_answer_changes_no_token(default_model, real_texts, tmp_path, failure):
    """It drafts for itself, from a copy of its file."""
    copy = tmp_path / "draft.gguf"
    copy.write_bytes(default_model.read_bytes())
    with edgeinfer.load(default_model, n_ctx=512, draft=[str(copy)]) as engine:
        engine.speculator.costs = FixedCosts()
        n_calls = let_fail(engine.speculator.drafters[-1].session, failure, copy, after=12)
        completion = engine.generate(REAL_PROMPT, max_tokens=48, temperature=0.0)
        assert completion.tokens == real_texts[0] and n_calls() > 12
        for _ in range(2):
            speculation = completion.timings.speculation
            assert list(speculation.dropped) == ([] if failure == "cut file" else ["model"])
            completion = engine.generate(REAL_PROMPT, max_tokens=48, **REQUESTS[1])
            assert completion.tokens == real_texts[1]


@pytest.mark.parametrize("max_tokens", range(0, 8))
def test_nothing_is_drafted_past_max_tokens(opened, plain, model, max_tokens):
    text = opened(model).tokenize(PROMPT) + list(tokens_of(plain, {"temperature": 0.0}))
    engine = opened(model)
    rng = random.Random(1)
    with_drafters(engine, FunctionDrafter(lambda c, limit: knowing(text, 40, rng, limit, len(c.tokens))))
    completion = engine.generate(PROMPT, max_tokens=max_tokens, temperature=0.0)
    assert list(completion.tokens) == text[-48:][:max_tokens]
    if max_tokens:
        assert engine.session.n_past == len(text) - 48 + max_tokens - 1  # the last token was not forwarded


@pytest.mark.parametrize("room", range(1, 10))
@pytest.mark.parametrize("n_batch", [1, 2, 5, 512])
def test_a_context_that_is_nearly_full_is_filled_to_the_end(opened, plain, model, room, n_batch):
    n_prompt = len(plain.tokenize(PROMPT))
    expected = tokens_of(plain, {"temperature": 0.0}, room)
    small = opened(model, n_ctx=n_prompt + room, n_batch=n_batch)
    rng = random.Random(room)
    with_drafters(small, FunctionDrafter(lambda c, limit: random_tree(small.tokenizer.n_vocab, rng, limit)))
    completion = small.generate(PROMPT, temperature=0.0)
    assert completion.tokens == expected and completion.finish_reason == "length"


def test_stop_strings_and_stop_tokens_end_where_plain_decoding_ends(opened, plain, model):
    whole = plain.generate(PROMPT, max_tokens=48, temperature=0.0)
    text = plain.tokenize(PROMPT) + list(whole.tokens)
    engine = opened(model)
    rng = random.Random(3)
    with_drafters(engine, FunctionDrafter(lambda c, limit: knowing(text, 40, rng, limit, len(c.tokens))))
    for start in range(3, 40, 3):
        stop = plain.detokenize(whole.tokens[start : start + 2], skip_special=True)
        if not stop.isascii() or not stop:
            continue
        for one in (engine, plain):
            one.tokenizer.stop_ids = frozenset()
        assert tokens_of(engine, {"temperature": 0.0}, stop=stop) == tokens_of(plain, {"temperature": 0.0}, stop=stop)
    for token in sorted(set(whole.tokens[2:]))[::4]:
        for one in (engine, plain):
            one.tokenizer.is_control = lambda id, token=token: id == token
        stop = plain.tokenizer.token_bytes(token).decode(errors="replace")
        mine, theirs = (one.generate(PROMPT, max_tokens=48, temperature=0.0, stop=stop) for one in (engine, plain))
        assert (mine.text, mine.tokens, mine.finish_reason) == (theirs.text, theirs.tokens, "stop")
    for one in (engine, plain):
        del one.tokenizer.is_control
    for token in set(whole.tokens[2:]):
        for one in (engine, plain):
            one.tokenizer.stop_ids = frozenset([token])
        mine, theirs = (one.generate(PROMPT, max_tokens=48, temperature=0.0) for one in (engine, plain))
        assert (mine.tokens, mine.finish_reason) == (theirs.tokens, theirs.finish_reason)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize("call", [2, 3, 5])
@pytest.mark.parametrize("where", ["forward", "before commit", "after commit"])
def test_an_interrupt_anywhere_in_a_step_leaves_the_engine_as_new(opened, plain, model, monkeypatch, where, call, kind):
    request = {"temperature": 0.8, "seed": 2}
    expected = tokens_of(plain, request)
    text = plain.tokenize(PROMPT) + list(expected)
    engine, rng = opened(model), random.Random(1)
    with_drafters(engine, FunctionDrafter(lambda c, limit: knowing(text, 40, rng, limit, len(c.tokens))))
    raise_from(engine.session, where, call, kind, monkeypatch)
    stream = engine.stream(PROMPT, max_tokens=48, **request)
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    else:
        assert list(stream)[-1].finish_reason == "interrupted"
    monkeypatch.undo()
    assert expected[: len(stream.completion.tokens)] == stream.completion.tokens
    assert tokens_of(engine, request) == expected


def test_a_stream_left_in_the_middle_of_a_step_frees_the_engine(opened, plain, model):
    engine, request = opened(model), {"temperature": 0.0}
    text = plain.tokenize(PROMPT) + list(tokens_of(plain, request))
    rng = random.Random(1)
    with_drafters(engine, FunctionDrafter(lambda c, limit: knowing(text, 40, rng, limit, len(c.tokens))))
    for n in range(1, 12):
        with engine.stream(PROMPT, **request) as stream:
            for _ in range(n):
                next(stream)
        assert list(stream.completion.tokens) == text[-48:][:n]
        assert list(tokens_of(engine, request)) == text[-48:]


def test_sampling_with_drafts_follows_the_targets_distribution(opened, model):
    """Chi-squared over seeds, of the token after the first, where the tree holds the most probable ones."""
    engine, n_draws = opened(model, draft="none"), 1500
    params = SamplingParams(temperature=1.5, top_k=6, top_p=1.0, min_p=0.0)
    prompt = engine.tokenize(PROMPT)
    first = engine.generate(prompt, max_tokens=1, temperature=0.0).tokens[0]
    engine.session.truncate(0)
    logits = engine.session.forward([*prompt, first]).logits[0][: engine.tokenizer.n_vocab]
    likely = np.argsort(-logits)[:6]
    weights = np.exp((logits[likely].astype(float) - logits[likely[0]]) / params.temperature)
    expected = n_draws * weights / weights.sum()
    engine.session.truncate(0)
    tree = DraftTree([int(token) for token in likely[:4]], [-1] * 4, [0.5, 0.3, 0.1, 0.05], [0, 1, 2, 3])
    with_drafters(engine, FunctionDrafter(lambda context, limit: tree))
    text = prompt + [first]
    counts, accepted = Counter(), 0
    for seed in range(n_draws):
        completion = engine.generate(text[:-1], max_tokens=3, params=params, seed=seed)
        if completion.tokens[0] != first:  # the first token is drawn too: only the texts that go on like this one count
            continue
        counts[completion.tokens[1]] += 1
        accepted += completion.timings.speculation.steps == 1
    n = sum(counts.values())
    expected *= n / n_draws
    assert set(counts) <= {int(token) for token in likely} and accepted > 0
    statistic = sum((counts[int(token)] - of) ** 2 / of for token, of in zip(likely, expected, strict=True))
    assert n > 100 and statistic < 20.5  # the 99.9 % quantile at 5 degrees of freedom


# ---- Loops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["auto", ["suffix"], ["FILE"]], ids=str)
@pytest.mark.parametrize("request_", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 1}], ids=str)
def test_a_loop_ends_at_the_same_token_with_drafts_and_without(opened, plain, model, draft_model, draft, request_):
    engine = opened(
        model, draft=draft if isinstance(draft, str) else [str(draft_model) if draft == ["FILE"] else "suffix"]
    )
    engine.speculator.costs = FixedCosts()
    (word,) = engine.tokenizer.encode("h", add_special=False)
    for n in (64, 70, 101):
        request = request_ | {"logit_bias": {word: 1000.0}, "loop_guard": n}
        mine, theirs = (one.generate(PROMPT, **request) for one in (engine, plain))
        assert mine.tokens == theirs.tokens == (word,) * n
        assert mine.finish_reason == theirs.finish_reason == "repetition" and mine.text == theirs.text == "h" * n
    assert mine.timings.speculation.tokens_per_step > 1.5
    assert engine.generate(PROMPT, max_tokens=150, **request | {"loop_guard": 0}).tokens == (word,) * 150
