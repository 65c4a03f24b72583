"""Speculation on tiny models: whatever is drafted, the tokens are those of decoding one by one."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from drafting import FAILURES, MALICIOUS, FixedCosts, FunctionDrafter, cost_model, knowing, let_fail, random_tree
from interrupts import raise_from
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import devices
from edgeinfer.backends.native import NativeBackend
from edgeinfer.errors import Interrupted, NumericalError, ShapeError
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.sampling import SamplingParams, sample
from edgeinfer.speculation import pipeline
from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.calibration import cost_key, default_folder, load_curve, measure_costs, save_curve
from edgeinfer.speculation.cost import MAX_TOKENS, CostCurve, CostModel
from edgeinfer.speculation.drafters.lookup import NgramLookup
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.speculation.policy import Proposal, select_tree
from edgeinfer.speculation.throughput import chain_rate
from edgeinfer.speculation.tree import DraftTree, checked, no_draft
from edgeinfer.speculation.verify import accept

PROMPT = "hello world, there is the one, there is the one and hello"
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    """The same floats in another type: it mostly agrees with the model."""
    return write_tiny_model(tmp_path_factory.mktemp("draft") / "draft.gguf", tensor_type="Q8_0", n_embd=256)


def with_drafters(engine, *drafters, costs=None, draft_max=MAX_TOKENS - 1):
    engine.speculator = Speculator(engine.session, drafters, costs or FixedCosts(), engine.tokenizer.n_vocab, draft_max)
    return engine


def tokens_of(engine, request, n=48, prompt=PROMPT, **more):
    return engine.generate(prompt, max_tokens=n, **request, **more).tokens


# ---- The same text ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft_head(model, tmp_path_factory):
    """A head that is right on what the model writes behind the prompt, greedily."""
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        text = [*engine.tokenize(PROMPT), *tokens_of(engine, REQUESTS[0])]
    return write_tiny_head(tmp_path_factory.mktemp("head") / "head.gguf", model, [text])


@pytest.mark.parametrize("draft", ["auto", "suffix", "recycling", "FILE", ["suffix", "FILE"], ["HEAD"]], ids=str)
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
def test_a_draft_model_that_knows_the_first_tokens_only_changes_nothing(
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
def test_trees_that_know_the_text_are_accepted_and_change_no_token(opened, plain, model, seed):
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
    """What the default model writes behind a prompt, greedily and drawn."""
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
    """Chi-squared over seeds, of the token after the first, where the tree holds the likeliest ones."""
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


# ---- The parts -------------------------------------------------------------------------------------------------------


def test_accept_walks_to_the_first_token_that_was_not_drafted():
    rows = np.array([[0, 9, 0], [9, 0, 0], [0, 0, 9], [9, 0, 0]], dtype=np.float32)
    text = [7]
    params = SamplingParams(temperature=0.0)

    def draw(logits, text):
        return sample(logits, params, len(text), text)

    verdict = accept(rows, {(0, 1): 2, (0, 2): 1, (2, 2): 3}, draw, text, ())
    assert verdict == ([1, 2, 0], [0, 2, 3]) and text == [7, 1, 2, 0]


def test_accept_ends_the_path_before_logits_that_are_not_numbers():
    rows = np.array([[0, 9, 0], [np.nan, 0, 0]], dtype=np.float32)
    text: list[int] = []
    params = SamplingParams(temperature=0.0)

    def draw(logits, text):
        return sample(logits, params, len(text), text)

    assert accept(rows, {(0, 1): 1}, draw, text, ()) == ([1], [0])
    with pytest.raises(NumericalError):
        accept(rows[1:], {}, draw, text, ())


def test_checked_takes_numpy_and_refuses_what_is_no_tree():
    tree = checked(DraftTree(np.array([3, 4]), np.array([-1, 0]), np.array([0.5, 1.0]), np.array([0, 1])), 10, 4)
    assert tree == DraftTree([3, 4], [-1, 0], [0.5, 1.0], [0, 1]) and type(tree.tokens[0]) is int
    for bad in (
        DraftTree([10], [-1], [0.5], [0]),
        DraftTree([1, 1], [-1, 1], [0.5, 0.5], [0, 0]),
        DraftTree([1], [-1], [float("nan")], [0]),
        DraftTree([1] * 5, [-1] * 5, [0.1] * 5, [0] * 5),
    ):
        with pytest.raises(ShapeError):
            checked(bad, 10, 4)


def proposal(tokens, parents, p):
    return Proposal("d", DraftTree(tokens, parents, p, [0] * len(tokens)), AcceptanceTable())


def test_the_policy_finds_the_optimum_that_a_search_over_all_trees_finds():
    rng = random.Random(1)
    for _ in range(300):
        n = rng.randint(1, 7)
        parents = [rng.randint(-1, node - 1) for node in range(n)]
        p = [rng.random() for _ in range(n)]
        slope = rng.choice([0.01, 0.1, 0.3, 1.0])
        milliseconds = [0.0] + [1.0 + slope * (m - 1) for m in range(1, 40)]
        path_probabilities = []
        for node in range(n):
            path_probabilities.append(p[node] * (1.0 if parents[node] < 0 else path_probabilities[parents[node]]))
        best = 1.06 / milliseconds[1]
        for mask in range(1, 1 << n):
            nodes = [node for node in range(n) if mask >> node & 1]
            if all(parents[node] < 0 or mask >> parents[node] & 1 for node in nodes):
                best = max(best, (1 + sum(path_probabilities[node] for node in nodes)) / milliseconds[len(nodes) + 1])
        choice = select_tree([proposal(list(range(n)), parents, p)], milliseconds, 31, 31)
        rate = choice.expected / milliseconds[len(choice.tokens) + 1]
        assert rate == pytest.approx(best) or (not choice.tokens and best == 1.06)


def test_plain_decoding_wins_where_a_token_costs_as_much_as_it_may_give():
    milliseconds = [float(n) for n in range(40)]
    assert select_tree([proposal([1, 2], [-1, 0], [0.9, 0.9])], milliseconds, 31, 31).tokens == []
    flat = [1.0] * 40
    assert select_tree([proposal([1, 2], [-1, 0], [0.9, 0.9])], flat, 31, 31).tokens == [1, 2]
    assert select_tree([proposal([1, 2], [-1, 0], [0.9, 0.9])], flat, 31, 1).tokens == [1]
    assert select_tree([proposal([1, 2], [-1, 0], [0.9, 0.9])], flat, 1, 31).tokens == [1]


def test_drafts_of_several_drafters_are_merged():
    flat = [1.0] * 40
    choice = select_tree([proposal([1, 2], [-1, 0], [0.9, 0.5]), proposal([1, 3], [-1, 0], [0.6, 0.4])], flat, 31, 31)
    assert (choice.tokens, choice.parents, choice.depths) == ([1, 2, 3], [-1, 0, 0], [0, 1, 1])
    # 0.9, then 0.5, and of the other half 0.4
    assert choice.expected == pytest.approx(1 + 0.9 + 0.45 + 0.9 * 0.4 * 0.5)


def test_chances_are_learnt_by_kind_and_depth_and_old_ones_fade():
    table = AcceptanceTable()
    tree = DraftTree([5, 6, 9], [-1, 0, -1], [0.5, 0.5, 0.5], [1, 1, 2])
    for _ in range(200):
        table.learn(tree, [5, 7])
    assert (
        table.probability(1, 0, 0.5) > 0.85
        and table.probability(1, 1, 0.5) < 0.1
        and table.probability(2, 0, 0.5) < 0.1
    )
    assert table.probability(1, 0, 0.5) / table.calibration <= 1.0 and table.probability(7, 1, 0.25) == 0.25
    for _ in range(200):
        table.learn(tree, [9, 7])
    assert table.probability(1, 0, 0.5) < 0.1 and table.probability(2, 0, 0.5) > 0.1


def test_a_drafter_that_lost_in_one_text_is_trusted_less_in_the_next_but_not_for_long():
    table, draft = AcceptanceTable(), DraftTree([5], [-1], [0.5], [0])
    for _ in range(20):
        table.learn(draft, [6])
    lost = table.calibration
    table.start_request()
    assert 0.1 < lost < table.calibration < 0.5
    for _ in range(6):
        table.learn(draft, [5])
    assert table.calibration > 0.8
    for _ in range(3):
        table.start_request()
    assert table.calibration > 0.9


def test_a_new_text_is_met_with_what_is_known_of_the_drafter():
    table, usual = AcceptanceTable(0.4), AcceptanceTable()
    assert table.acceptance_rate == pytest.approx(0.4) and usual.acceptance_rate == pytest.approx(0.85)
    for one in (table, usual):
        for _ in range(200):
            one.learn(DraftTree([5], [-1], [0.5], [0]), [5])
        assert one.acceptance_rate > 0.98
        for _ in range(12):
            one.start_request()
    assert table.acceptance_rate == pytest.approx(0.4, abs=0.01) and usual.acceptance_rate == pytest.approx(
        0.85, abs=0.01
    )


def test_a_chain_that_costs_goes_on_as_long_as_a_node_gives_more_than_the_rest():
    milliseconds = [0.0] + [1.0 + 0.1 * (n - 1) for n in range(1, 40)]
    length_rule = ChainLengthRule(milliseconds, draft_ms=0.3)
    path_probabilities: list[float] = []
    while length_rule.should_extend(path_probabilities, 0.8):
        path_probabilities.append(0.8 ** (len(path_probabilities) + 1))
    rates = [(1 + sum(0.8**i for i in range(1, k + 1))) / (milliseconds[k + 1] + 0.3 * k) for k in range(31)]
    assert len(path_probabilities) == int(np.argmax(rates))
    assert chain_rate(0.8, 0.3, milliseconds, 31) == pytest.approx(max(rates))


# ---- Costs -----------------------------------------------------------------------------------------------------------


def test_the_curve_is_measured_within_its_budget_and_leaves_the_session_empty(plain):
    curve = measure_costs(plain.session, 0.5)
    assert plain.session.n_past == 0 and set(curve.near) >= {1, 2, 4} and min(curve.near.values()) > 0
    assert measure_costs(plain.session, 0.0).near.keys() == {1}


def test_costs_between_and_behind_what_was_measured_lie_on_straight_lines():
    costs = CostModel(CostCurve(0, {1: 0.010, 2: 0.012, 4: 0.020, 8: 0.040}, 100, {1: 0.012, 8: 0.056}))
    near = list(costs.milliseconds(0))
    assert near[0] == 0.0 and near[1:5] == pytest.approx([10, 12, 16, 20]) and near[16] == pytest.approx(80)
    far = costs.milliseconds(96)
    assert far[1] == pytest.approx(10 + 0.02 * 96) and far[8] == pytest.approx(40 + 0.16 * 96)
    assert costs.chain_ms(64, 0) == pytest.approx(2 * near[32])


def test_a_size_that_took_longer_than_a_larger_one_costs_no_more_than_it(plain, monkeypatch):
    def time_passes(session, tokens, sizes, deadline, seconds):
        seconds.update({size: 0.060 if size == 2 else 0.010 * size for size in sizes})

    monkeypatch.setattr("edgeinfer.speculation.calibration._time", time_passes)
    near = measure_costs(plain.session, 0.5).near
    assert [near[size] for size in (1, 2, 3, 4)] == [0.010, 0.030, 0.030, 0.040]


def test_no_pass_costs_more_than_what_could_be_made_in_its_place():
    costs = CostModel(CostCurve(0, {1: 0.010, 2: 0.060, 4: 0.100, 8: 0.120}, 0, {}))
    assert costs.is_doubtful
    assert costs.milliseconds(0)[1:9] == pytest.approx([10, 20, 30, 40, 50, 60, 70, 80])
    costs.correct(4, 0, 14.0)
    costs.correct(2, 0, 12.0)
    costs.correct(2, 0, 500.0)
    assert not costs.is_doubtful
    assert costs.milliseconds(0)[1:9] == pytest.approx([10, 12, 14, 14, 17.5, 21, 24.5, 28]), "longer ones, never seen"


def test_a_measurement_that_was_disturbed_does_not_end_drafting(opened, plain, model):
    engine = opened(model)
    disturbed = CostModel(CostCurve(0, {n: 0.05 * n for n in range(1, 9)}, 0, {}))
    text = engine.tokenize(PROMPT) + list(tokens_of(plain, REQUESTS[0], n=200))
    drafter = FunctionDrafter(lambda context, limit: knowing(text, 259, random.Random(1), limit, len(context.tokens)))
    with_drafters(engine, drafter, costs=disturbed)
    completion = engine.generate(PROMPT, max_tokens=200, temperature=0.0)
    assert list(completion.tokens) == text[-200:]
    assert completion.timings.speculation.tokens_per_step > 1.2
    assert not disturbed.is_doubtful


def test_doubtful_costs_are_measured_by_passes_that_are_made_anyway(opened, plain, model):
    engine, sizes, costs = opened(model), [], Doubtful()
    with_drafters(engine, FunctionDrafter(lambda context, limit: no_draft()), costs=costs)
    forward = engine.session.forward
    engine.session.forward = lambda tokens, *given, **options: (
        sizes.append(len(tokens)) or forward(tokens, *given, **options)
    )
    completion = engine.generate(PROMPT, max_tokens=200, temperature=0.0)
    assert completion.tokens == tokens_of(plain, REQUESTS[0], n=200)
    of_steps = sizes[-completion.timings.speculation.steps :]
    assert len(of_steps) == 199 and {1, 2, 4, 8} == set(of_steps) and of_steps.count(1) > 190
    assert completion.timings.speculation.by_drafter == completion.timings.speculation.dropped == {}
    assert set(costs.observed) == {1} and costs.corrected == [2, 4, 8, 2, 4], "a wrong cost says nothing of the others"


def test_costs_of_long_passes_are_tried_now_and_then(opened, plain, model):
    engine, sizes = opened(model), []
    believed = CostCurve(0, {1: 2.0, 4: 2.1, 5: 6.0, 8: 12.0, 16: 24.0}, 0, {})  # far beyond any hiccup
    costs = CostModel(believed)
    text = engine.tokenize(PROMPT) + list(tokens_of(plain, REQUESTS[0], n=200))
    drafter = FunctionDrafter(lambda context, limit: knowing(text, 259, random.Random(1), limit, len(context.tokens)))
    with_drafters(engine, drafter, costs=costs)
    forward = engine.session.forward
    engine.session.forward = lambda tokens, *given, **options: (
        sizes.append(len(tokens)) or forward(tokens, *given, **options)
    )
    before = list(costs.milliseconds(0))
    for n in range(3):
        completion = engine.generate(PROMPT, max_tokens=200, temperature=0.0)
        assert list(completion.tokens) == text[-200:], n
    assert 8 in sizes
    assert costs.milliseconds(0)[8] < before[8] / 2 and costs.milliseconds(0)[16] < before[16] / 2


class Doubtful(FixedCosts):
    """Costs that stay in doubt whatever is measured, which is noted."""

    def __init__(self):
        super().__init__(lambda n: 0.05 * n)
        self.observed, self.corrected = [], []

    def observe(self, n, n_past, milliseconds):
        self.observed.append(n)

    def correct(self, n, n_past, milliseconds):
        self.corrected.append(n)


def test_a_doubtful_measurement_is_not_written(opened, model, tmp_path, monkeypatch):
    monkeypatch.setattr("edgeinfer.speculation.calibration.default_folder", lambda: tmp_path)
    for second, n_files in ((0.016, 0), (0.012, 1)):
        curve = CostCurve(0, {1: 0.010, 2: second}, 0, {})
        monkeypatch.setattr("edgeinfer.speculation.open.measure_costs", lambda session, budget, curve=curve: curve)
        opened(model)
        assert len(list(tmp_path.glob("*.json"))) == n_files


def test_a_model_that_drafts_for_itself_has_costs_of_its_own(opened, model, tmp_path, monkeypatch):
    monkeypatch.setattr("edgeinfer.speculation.calibration.default_folder", lambda: tmp_path)
    monkeypatch.setattr(
        "edgeinfer.speculation.open.measure_costs", lambda session, budget: CostCurve(0, {1: 0.010, 2: 0.012}, 0, {})
    )
    opened(model, draft=str(model))
    assert len(list(tmp_path.glob("*.json"))) == 2  # its weights are rounded


def test_costs_are_kept_as_they_were_found_to_be():
    kept: list[CostCurve] = []
    measured = CostCurve(0, {1: 0.030, 4: 0.060}, 100, {1: 0.032})
    costs = CostModel(measured, kept.append)
    for _ in range(63):
        costs.observe(1, 0, 10.0)
    costs.close()
    assert not kept  # a few passes tell less than the measurement
    for _ in range(40):
        costs.observe(1, 0, 10.0)
    costs.close()
    (curve,) = kept
    assert curve.near[1] == pytest.approx(0.010, rel=0.1) and curve.near[4] < 0.75 * measured.near[4]
    assert list(CostModel(curve).milliseconds(0)) == pytest.approx(list(costs.milliseconds(0)), rel=0.03)


def test_a_closed_engine_leaves_its_costs_to_the_next_one(opened, model, draft_model, tmp_path, monkeypatch):
    monkeypatch.setattr("edgeinfer.speculation.calibration.default_folder", lambda: tmp_path)
    engine = opened(model, draft=str(draft_model))
    (drafter,) = (one for one in engine.speculator.drafters if one.name == "model")
    for costs in (engine.speculator.costs, drafter._costs):
        for _ in range(200):
            costs.observe(1, 0, 50.0)
    engine.close()
    again = opened(model, draft=str(draft_model))
    (drafter,) = (one for one in again.speculator.drafters if one.name == "model")
    assert again.speculator.costs.milliseconds(0)[1] == pytest.approx(50.0, rel=0.1)
    assert drafter._costs.milliseconds(0)[1] == pytest.approx(50.0, rel=0.1)


def test_a_slower_machine_is_noticed_and_a_hiccup_is_not():
    costs = cost_model(lambda n: 10.0 + n)
    before = list(costs.milliseconds(0))
    costs.observe(1, 0, 5000.0)
    assert costs.milliseconds(0)[1] < 1.1 * before[1]
    for _ in range(60):
        costs.observe(1, 0, 2.0 * before[1])
    now = costs.milliseconds(0)
    assert now[1] == pytest.approx(2.0 * before[1], rel=0.1) and now[8] > 1.3 * before[8]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"null",
        b"[" * 100000,
        b'{"near": {"1": 1.0}}',
        json.dumps({"n_near": 0, "near": {"1": -1.0}, "n_far": 0, "far": {}}).encode(),
        json.dumps({"n_near": 0, "near": {"1": float("nan")}, "n_far": 0, "far": {}}).encode(),
        json.dumps({"n_near": 0, "near": {"2": 1.0}, "n_far": 0, "far": {}}).encode(),
        json.dumps({"n_near": 0, "near": {"1": 1.0}, "n_far": 0, "far": {"1": 1.0}}).encode(),
        json.dumps({"n_near": 0, "near": [1], "n_far": 0, "far": {}}).encode(),
        json.dumps({"n_near": 0, "near": {"99": 1.0, "1": 1.0}, "n_far": 0, "far": {}}).encode(),
    ],
)
def test_a_cost_file_that_is_damaged_is_as_none(tmp_path, content):
    (tmp_path / "key.json").write_bytes(content)
    assert load_curve("key", tmp_path) is None


def test_a_cost_file_is_written_whole_and_read_back(tmp_path):
    curve = CostCurve(0, {1: 0.01, 4: 0.02}, 64, {1: 0.011})
    folder = tmp_path / "costs"
    save_curve("key", curve, folder)
    assert load_curve("key", folder) == curve and [path.name for path in folder.iterdir()] == ["key.json"]
    assert load_curve("another", folder) is None
    (tmp_path / "file").write_text("")
    save_curve("key", curve, tmp_path / "file")  # no folder can be made there: nothing happens


def test_the_key_tells_models_and_machines_apart(plain, tmp_path):
    other = write_tiny_model(tmp_path / "other.gguf", n_ff=512)
    with ModelFile.open(plain.path) as one, ModelFile.open(other) as two:
        keys = {cost_key(one, "cpu", 1), cost_key(one, "cpu", 2), cost_key(one, "x", 1), cost_key(two, "cpu", 1)}
        assert len(keys) == 4 and cost_key(one, "cpu", 1) in keys


def test_the_curve_is_measured_once_and_then_read(opened, model, monkeypatch):
    opened(model)
    monkeypatch.setattr("edgeinfer.speculation.open.measure_costs", lambda *a: pytest.fail("measured again"))
    opened(model)
    for path in default_folder().iterdir():
        path.write_bytes(b"{")
    monkeypatch.undo()
    assert opened(model).speculator is not None


# ---- Loading ---------------------------------------------------------------------------------------------------------


def test_by_default_the_free_drafters_draft_and_are_in_the_plan(opened, model):
    engine = opened(model)
    assert [drafter.name for drafter in engine.speculator.drafters] == ["suffix", "recycling"]
    assert engine.memory_plan.use.drafters > 1_000_000
    assert opened(model, draft_max=0).speculator is None
    completion = engine.generate(PROMPT, max_tokens=40, temperature=0.0)
    assert completion.timings.speculation.tokens == 39 and completion.timings.speculation.plain_seconds > 0


def test_a_draft_model_is_in_the_plan(opened, model, draft_model):
    with_model, without = opened(model, draft=str(draft_model)), opened(model)
    with ModelFile.open(draft_model) as file:
        n_threads = with_model.device.n_threads
        plan = NativeBackend(for_drafts=True).plan(
            file, read_spec(file), with_model.n_ctx, with_model.memory_plan.n_batch, n_threads
        )
    assert (
        with_model.memory_plan.use.drafters - without.memory_plan.use.drafters == plan.use.total + NgramLookup.memory()
    )


@pytest.mark.parametrize("why", ["no file", "no model", "no room"])
def test_a_draft_model_that_cannot_be_used_is_left_out_with_the_reason(
    opened, plain, model, draft_model, tmp_path, monkeypatch, why
):
    path, expected = draft_model, ""
    if why == "no file":
        path, expected = tmp_path / "nothing.gguf", "nothing.gguf"
    elif why == "no model":
        path, expected = tmp_path / "text.gguf", "text.gguf"
        path.write_text("no model")
    else:
        n_bytes = opened(model).memory_plan.use.total
        monkeypatch.setattr(devices, "available_memory", lambda: n_bytes + 1000)
        expected = "are left"
    with pytest.warns(RuntimeWarning, match=expected):
        engine = opened(model, draft=str(path))
    assert tokens_of(engine, {"temperature": 0.0}) == tokens_of(plain, {"temperature": 0.0})


def test_another_backend_drafts_nothing_and_says_so_where_that_was_asked_for(opened, model):
    assert opened(model, backend="reference").speculator is None
    with pytest.warns(RuntimeWarning, match="nothing is drafted"):
        opened(model, backend="reference", draft="suffix")


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


def test_what_a_drafter_reads_first_is_to_be_earned_back_by_an_answer_as_long_as_the_last_ones(opened, plain, model):
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
    assert tokens_of(engine, REQUESTS[0], 150) == tokens_of(plain, REQUESTS[0], 150)
    (n,) = drafter.read_at
    assert 40 <= n - n_prompt <= 80, "an answer that has come so far may come as far again"


class Slow(FunctionDrafter):
    """Takes 30 ms a token."""

    def cost(self, context):
        return 30.0, 0.0

    def prefill(self, context): ...

    def interrupt(self): ...


@pytest.mark.parametrize("p, is_asked", [(0.5, True), (0.78, True), (0.95, False)])
def test_a_drafter_that_takes_time_is_asked_beside_free_drafts_that_are_little_better(
    opened, plain, model, monkeypatch, p, is_asked
):
    # In passes of 100 ms, tokens a second: 10 one by one, 16 with its chains alone, 15, 17 and 19 with the free draft.
    text = tokens_of(plain, REQUESTS[0], 4)
    free = FunctionDrafter(lambda context, limit: DraftTree([text[1] ^ 1], [-1], [p], [0]))
    slow = Slow(lambda context, limit: DraftTree([text[1]], [-1], [0.9], [0]), "slow")
    engine = with_drafters(opened(model), free, slow, costs=FixedCosts(lambda n: 0.1 + 0.001 * n))
    merged, original = [], pipeline.select_tree

    def select_tree(proposals, *arguments):
        choice = original(proposals, *arguments)
        merged.append(([proposal.drafter for proposal in proposals], choice.expected))
        return choice

    monkeypatch.setattr(pipeline, "select_tree", select_tree)
    assert tokens_of(engine, REQUESTS[0], 3) == text[:3]
    assert slow.n_asked == is_asked
    drafters, expected = merged[-1]
    assert drafters == (["slow", "function"] if is_asked else ["function"])
    # The free draft is right where the other one is wrong, not the other way round.
    assert expected == pytest.approx(1.9 + 0.1 * p if is_asked else 1.0 + p)


def test_the_draft_model_reads_nothing_twice(opened, model, draft_model, monkeypatch):
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
    assert max(n for _, n in fed[1:]) <= 3, "behind the prompt only what is new is read"


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
