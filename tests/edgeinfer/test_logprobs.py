"""Log probabilities of tokens and scores of continuations: those of a plain forward pass, whatever is drafted."""

import math
from itertools import product

import numpy as np
import pytest
from drafting import FixedCosts
from sampling_reference import simple_candidates
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.base import run_sequence
from edgeinfer.common.errors import ContextOverflow, Interrupted, InvalidArgument, NumericalError, ShapeError
from edgeinfer.logprobs import token_logprob
from edgeinfer.sampling import adjusted

CHANGES = {"repeat_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {70: 3.0, 71: False}}
PROMPT = "hello world, there is the one"
FOLLOWING = [" again", " there is", " there was the one, and the other one that there was", "!", " there is", " a"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "gemma3.gguf", "gemma3", n_ctx_train=1024)


def load(path, **options):
    engine = edgeinfer.load(path, **options)
    engine.tokenizer.stop_ids = frozenset()
    if engine.speculator is not None:
        engine.speculator.costs = FixedCosts()
    return engine


@pytest.fixture(scope="module", params=["no drafts", "model-free", "head"])
def engine(request, model, tmp_path_factory):
    draft = {"no drafts": "none", "model-free": "auto"}.get(request.param)
    if draft is None:
        draft = [str(write_tiny_head(tmp_path_factory.mktemp("head") / "head.gguf", model))]
    with load(model, draft=draft) as opened:
        yield opened


def plain_rows(path, tokens, backend="native"):
    """(n, n_vocab) logits after each of the tokens, of one forward pass of a session of its own."""
    with edgeinfer.load(path, draft="none", backend=backend) as other:
        return run_sequence(other.session, tokens, logits="all").logits[:, : other.tokenizer.n_vocab].copy()


def expected_score(path, prompt, following, backend="native"):
    """[(token, log probability)], and whether all are the most likely ones."""
    rows = plain_rows(path, [*prompt, *following], backend)[len(prompt) - 1 : -1]
    found = [token_logprob(row, token) for row, token in zip(rows, following, strict=True)]
    greedy = [int(row.argmax()) for row in rows] == list(following)
    return [(one.token, one.logprob) for one in found], greedy


def pairs(score):
    return [(one.token, one.logprob) for one in score.tokens]


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 5000])
def test_a_log_probability_is_the_logit_less_the_logarithm_of_the_sum(n):
    logits = np.random.default_rng(n).normal(0, 6, n).astype(np.float32)
    logits[n // 2] = -np.inf if n > 1 else 3
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64) - logits.max()).sum()) - logits.max()
    for token in {0, n // 2, n - 1}:
        found = token_logprob(logits, token, 5)
        assert found.logprob == pytest.approx(exact[token], abs=1e-12) and found.token == token
    order = sorted(range(n), key=lambda id: (-logits[id], id))[:5]
    assert [id for id, _ in found.top] == order
    assert [value for _, value in found.top] == pytest.approx(exact[order].tolist(), abs=1e-12)
    assert len(token_logprob(logits, 0, n + 3).top) == n and token_logprob(logits, 0).top == ()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generated_tokens_come_with_those_of_a_plain_pass(engine, model, temperature):
    sampling = {"temperature": temperature, "seed": 7, "repeat_penalty": 1.2, "logit_bias": {40: 2.0}}
    stream = engine.stream(PROMPT, max_tokens=40, logprobs=3, **sampling)
    pieces = [each for piece in stream for each in piece.logprobs]
    completion = stream.completion
    prompt = engine.tokenize(PROMPT)
    rows = plain_rows(model, [*prompt, *completion.tokens])[len(prompt) - 1 : -1]
    expected = [token_logprob(row, token, 3) for row, token in zip(rows, completion.tokens, strict=True)]
    assert list(completion.logprobs) == pieces == expected and len(expected) == 40
    without = engine.generate(PROMPT, max_tokens=40, **sampling)
    assert without.tokens == completion.tokens and without.logprobs == ()
    alone = engine.generate(PROMPT, max_tokens=40, logprobs=0, **sampling).logprobs
    assert [(one.token, one.logprob, one.top) for one in alone] == [(one.token, one.logprob, ()) for one in expected]


def test_a_stop_token_and_what_a_stop_string_cuts_have_none(model):
    with edgeinfer.load(model) as engine:
        text = engine.generate(PROMPT, max_tokens=12, temperature=0, logprobs=1)
        engine.tokenizer.stop_ids = frozenset({text.tokens[5]})
        ended = engine.generate(PROMPT, max_tokens=12, temperature=0, logprobs=1)
    n = text.tokens.index(text.tokens[5])
    assert ended.finish_reason == "stop" and ended.tokens == text.tokens[:n] and ended.logprobs == text.logprobs[:n]


def test_scores_are_those_of_a_plain_pass(engine, model):
    prompt = engine.tokenize(PROMPT)
    before = engine.generate(PROMPT, max_tokens=30, temperature=0)
    following = [*FOLLOWING, list(before.tokens), list(before.tokens[:2]), [before.tokens[0]]]
    scores = engine.score(PROMPT, following)
    assert len(scores) == len(following)
    for text, score in zip(following, scores, strict=True):
        tokens = engine.tokenize(PROMPT + text)[len(prompt) :] if isinstance(text, str) else text
        expected, is_greedy = expected_score(model, prompt, tokens)
        assert pairs(score) == expected and score.is_greedy == is_greedy
        assert score.logprob == pytest.approx(math.fsum(value for _, value in expected))
    assert [score.is_greedy for score in scores[-3:]] == [True] * 3
    assert engine.score(prompt, following) == scores
    assert engine.generate(PROMPT, max_tokens=30, temperature=0).tokens == before.tokens


@pytest.mark.parametrize("n_prompt, n_following", [*product((5, 600), (1, 3, 200)), (800, 1)])
def test_windows_stay_the_same_after_a_score(windowed, n_prompt, n_following):
    rng = np.random.default_rng(3)
    prompt, *following = (rng.integers(5, 250, n).tolist() for n in (n_prompt, n_following, 2, n_following))
    with load(windowed) as engine, load(windowed, draft="none") as fresh:
        scores = engine.score(prompt, following)
        for tokens, score in zip(following, scores, strict=True):
            assert pairs(score) == expected_score(windowed, prompt, tokens)[0]
        greedy = {"max_tokens": 20, "temperature": 0}
        assert engine.generate(prompt, **greedy).tokens == fresh.generate(prompt, **greedy).tokens


def test_the_reference_scores_too(model):
    with load(model, backend="reference") as engine:
        prompt, tokens = engine.tokenize(PROMPT), [40, 41, 42]
        (score, _) = engine.score(PROMPT, [tokens, [7]])
    assert pairs(score) == expected_score(model, prompt, tokens, "reference")[0]


def test_many_continuations_and_the_end_of_the_context(engine, model, monkeypatch):
    following = [[a, b, c] for a, b, c in product((20, 21, 22), (30, 31, 32, 33), (40, 41, 42, 43, 44))]
    prompt = engine.tokenize(PROMPT)
    with monkeypatch.context() as patched:
        forward, sizes = engine.session.forward, []

        def noted(tokens, *rest, **options):
            sizes.append((len(tokens), options.get("logits")))
            return forward(tokens, *rest, **options)

        patched.setattr(engine.session, "forward", noted)
        scores = engine.score(PROMPT, following)
    n_rows = 4 if engine.speculator is None else engine.speculator.most_rows
    passes = [n for n, logits in sizes if logits == "all"]
    shared = 3 + 3 * 4  # beginnings of one and two tokens
    assert max(passes) <= n_rows and sum(passes) < (30 if n_rows == 4 else shared + 4)
    for tokens, score in list(zip(following, scores, strict=True))[::7]:
        assert pairs(score) == expected_score(model, prompt, tokens)[0]
    room = engine.n_ctx - len(prompt)
    (score,) = engine.score(PROMPT, [[9] * room])
    assert len(score.tokens) == room
    with pytest.raises(ContextOverflow):
        engine.score(PROMPT, [[5], [9] * (room + 1)])
    assert engine.score(PROMPT, []) == []


@pytest.mark.parametrize(
    "continuations, error, match",
    [
        (" again", InvalidArgument, "several texts or token lists"),
        ([""], InvalidArgument, "a continuation is empty"),
        ([[]], InvalidArgument, "a continuation is empty"),
        ([b"a"], InvalidArgument, "a text .str. or token ids"),
        ([7], InvalidArgument, "a text .str. or token ids"),
        ([[100_000]], ShapeError, "100000"),
    ],
)
def test_what_is_no_continuation_is_refused(engine, continuations, error, match):
    with pytest.raises(error, match=match):
        engine.score(PROMPT, continuations)


@pytest.mark.parametrize("value", [-1, 1001, 1.5, "3"])
def test_logprobs_must_be_a_small_number(engine, value):
    with pytest.raises(InvalidArgument, match="logprobs"):
        engine.generate(PROMPT, max_tokens=2, logprobs=value)


def test_documents_are_ranked_by_the_letter_that_the_model_would_say(engine):
    template = "{query}\n{documents}\nThe best is ["
    documents = ["one {query}", "two", "three"]
    ranked = engine.rank("which?", documents, template)
    prompt = "which?\n[A] one {query}\n[B] two\n[C] three\nThe best is ["
    scores = [score.tokens[0].logprob for score in engine.score(prompt, ["A", "B", "C"])]
    assert ranked == sorted(enumerate(scores), key=lambda pair: -pair[1]) and len(set(scores)) == 3
    assert sorted(place for place, _ in engine.rank("which?", documents)) == [0, 1, 2]
    for wrong, match in (((), "1 to 26 texts"), (["a"] * 27, "1 to 26"), ("text", "1 to 26"), ([3], "a document")):
        with pytest.raises(InvalidArgument, match=match):
            engine.rank("which?", wrong, template)
    with pytest.raises(InvalidArgument, match=r"\{query\} and \{documents\}"):
        engine.rank("which?", documents, "{documents}")


def test_the_default_model_finds_the_likely_word(default_model):
    with edgeinfer.load(default_model, n_ctx=512) as engine:
        likely, unlikely = engine.score("The capital of France is", [" Paris", " bread"])
        assert likely.is_greedy and not unlikely.is_greedy and likely.logprob > unlikely.logprob + 5


def test_interrupting_ends_scores_between_passes_and_the_engine_goes_on(engine, monkeypatch):
    forward, n_passes = engine.session.forward, 0

    def interrupting(*arguments, **options):
        nonlocal n_passes
        found = forward(*arguments, **options)
        n_passes += options.get("logits") == "all"
        if n_passes == 1:
            engine.scheduler.texts[0].is_interrupted = True  # as Engine.interrupt, where no pass runs
        return found

    following = [[token] * 3 for token in range(20, 90)]
    with monkeypatch.context() as patched:
        patched.setattr(engine.session, "forward", interrupting)
        with pytest.raises(Interrupted):
            engine.score(PROMPT, following)
    assert n_passes == 1 and len(engine.score(PROMPT, following)) == len(following)


def test_logits_that_are_no_numbers_have_no_log_probability():
    for value in (np.nan, np.inf):
        with pytest.raises(NumericalError, match="not numbers"):
            token_logprob(np.array([1.0, value, 0.0], np.float32), 0)


# ---- Of the distribution that tokens are drawn from ------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 2.0, "top_k": 5, "dry_multiplier": 0.8, **CHANGES},
    ],
)
def test_probabilities_of_what_is_drawn_are_those_of_the_chain(engine, model, sampling):
    asked = {"max_tokens": 12, "seed": 5, "logprobs": 6, **sampling}
    completion = engine.generate(PROMPT, sampled_logprobs=True, **asked)
    assert completion.tokens == engine.generate(PROMPT, **asked).tokens
    prompt = engine.tokenize(PROMPT)
    rows = plain_rows(model, [*prompt, *completion.tokens])
    breakers = engine._breakers(tuple(completion.params.dry_sequence_breakers))
    for at, found in enumerate(completion.logprobs):
        previous = [*prompt, *completion.tokens[:at]]
        logits = adjusted(rows[len(previous) - 1], completion.params, previous, breakers)
        ids = simple_candidates(logits, completion.params)
        weights = np.exp((logits[ids].astype(np.float64) - logits[ids].max()) / completion.params.temperature)
        expected = dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
        assert found.token == completion.tokens[at]
        assert math.exp(found.logprob) == pytest.approx(expected[found.token], rel=1e-9)
        assert len(found.top) == min(6, len(ids))
        assert [value for _, value in found.top] == sorted((value for _, value in found.top), reverse=True)
        best = sorted(expected.values(), reverse=True)[: len(found.top)]
        assert [math.exp(value) for _, value in found.top] == pytest.approx(best, rel=1e-9)


def test_a_greedy_token_is_certain(engine):
    completion = engine.generate(PROMPT, max_tokens=4, temperature=0, logprobs=3, sampled_logprobs=True)
    assert [(each.logprob, each.top) for each in completion.logprobs] == [
        (0.0, ((token, 0.0),)) for token in completion.tokens
    ]
    none = engine.generate(PROMPT, max_tokens=2, temperature=0, logprobs=0, sampled_logprobs=True)
    assert [each.top for each in none.logprobs] == [(), ()]


def test_probabilities_of_what_is_drawn_are_not_those_of_a_constraint(engine):
    with pytest.raises(InvalidArgument, match="sampled_logprobs are those of free texts"):
        engine.generate(PROMPT, logprobs=1, sampled_logprobs=True, choices=["a", "b"])
    with pytest.raises(InvalidArgument, match="sampled_logprobs must be True or False"):
        engine.generate(PROMPT, logprobs=1, sampled_logprobs=1)
