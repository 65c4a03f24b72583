"""Drafting with a head: the same text whatever fails, and nothing computed twice or from the wrong features."""

import random
import shutil

import numpy as np
import pytest
from drafting import FixedCosts, cost_model, let_head_draft
from exactness import same_bits
from tiny_heads import write_tiny_eagle3, write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.base import DraftingHead
from edgeinfer.backends.native import load_head, plan_head
from edgeinfer.common.errors import Interrupted, NumericalError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.loading import plan as load_plan
from edgeinfer.memory.process import Process
from edgeinfer.models.draft_head import read_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.sampling import SamplingParams, sample
from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.drafters.base import Context, FeatureDrafter
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.drafters.head import HeadDrafter
from edgeinfer.speculation.tree import checked

PROMPT = "hello world, there is the one, there is the one and hello"
GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.8, "seed": 1}


pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def texts(model):
    """What the model writes after the prompt, greedily and drawn."""
    with edgeinfer.load(model, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        prompt = engine.tokenize(PROMPT)
        return [[*prompt, *engine.generate(PROMPT, max_tokens=60, **one).tokens] for one in (GREEDY, DRAWN)]


@pytest.fixture(
    scope="module", params=[0, 1, 2, "taps", "eagle3"], ids=["0 blocks", "1 block", "2 blocks", "taps", "eagle3"]
)
def head(request, model, texts, tmp_path_factory):
    """A head that is mostly right on these texts."""
    path = tmp_path_factory.mktemp("head") / "head.gguf"
    if request.param == "eagle3":
        return write_tiny_eagle3(path, model, texts)
    if request.param == "taps":
        return write_tiny_head(path, model, texts, taps=(0, 1))
    return write_tiny_head(path, model, texts, n_layers=request.param)


@pytest.fixture
def drafting(opened, model, head):
    """An engine that drafts with the head alone, wherever it can."""
    return always(opened(model, draft=[str(head)]))


def always(engine):
    engine.speculator.costs = FixedCosts()
    return engine


def drafter_of(engine):
    return engine.speculator.drafters[-1]


def n_rows_of(drafter):
    """Numbers of the target's rows that a feature is made of."""
    return drafter.session.spec.n_rows


def greedy_context(text, n_unverified=0):
    """A greedy request in which nearly every draft token is worth making."""
    draw = SamplingParams(**GREEDY)
    context = Context(list(text), lambda logits, own: sample(logits, draw, len(own), own), True, n_unverified, True)
    context.acceptance = AcceptanceTable()
    context.acceptance.length_rule = ChainLengthRule(FixedCosts().milliseconds(0))
    return context


def tokens_of(engine, request=GREEDY, n=60, prompt=PROMPT):
    return engine.generate(prompt, max_tokens=n, **request).tokens


# ---- Drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [GREEDY, DRAWN, {**GREEDY, "repeat_penalty": 1.3}], ids=str)
def test_drafts_of_a_head_are_taken_and_the_text_is_that_of_plain_decoding(drafting, plain, request_):
    for prompt in (PROMPT, PROMPT + " again", "something else"):
        completion = drafting.generate(prompt, max_tokens=60, **request_)
        assert completion.tokens == tokens_of(plain, request_, prompt=prompt)
        assert completion.timings.speculation.dropped == {}
        if prompt == PROMPT and "repeat_penalty" not in request_:
            assert completion.timings.speculation.by_drafter["head"].accepted > 25


def test_a_draft_is_a_tree_of_known_tokens_in_few_passes(drafting, texts):
    drafter, n_passes = drafter_of(drafting), []
    forward = drafter.session.forward
    drafter.session.forward = lambda tokens, *a, **o: n_passes.append(len(tokens)) or forward(tokens, *a, **o)
    trees = []
    propose = drafter.propose

    def recorded(context, limit):
        before = len(n_passes)
        tree = propose(context, limit)
        trees.append((tree, len(n_passes) - before))
        return tree

    drafter.propose = recorded
    drafting.generate(PROMPT, max_tokens=60, **GREEDY)
    known = set(drafter._ids.tolist())
    for tree, n in trees:
        assert set(tree.tokens) <= known and checked(tree, drafting.tokenizer.n_vocab, 31) == tree
        assert n <= 1 + len({*tree.parents}) and (n > 1 or len(tree) <= 3)
    assert any(len(set(tree.parents)) < len(tree) for tree, _ in trees), "no tree had a fork"
    assert max(n_passes[1:]) <= 31


@pytest.mark.parametrize("matches, is_asked", [([0.3, 0.3], False), ([0.9, 0.9], True), (None, True)])
def test_a_head_with_a_low_acceptance_rate_is_not_asked(opened, model, texts, tmp_path, matches, is_asked):
    metadata = {"draft-head.matches": matches}
    engine = opened(model, draft=[str(write_tiny_head(tmp_path / "h.gguf", model, texts, metadata=metadata))])
    engine.speculator.costs = FixedCosts(lambda n: 6.0 + 4.0 * n)
    speculation = engine.generate(PROMPT, max_tokens=40, **GREEDY).timings.speculation
    assert ("head" in speculation.by_drafter) == is_asked
    assert (drafter_of(engine).session.n_past > 0) == is_asked, "what is not asked need not read"


@pytest.mark.parametrize("limit", [1, 2, 5, 31])
def test_a_draft_keeps_to_its_limit_and_stops_where_a_level_is_not_worth_it(drafting, texts, limit):
    drafter, text = drafter_of(drafting), texts[0][:40]
    drafting.generate(text[:-1], max_tokens=1, **GREEDY)
    context = greedy_context(text)
    assert 1 <= len(drafter.propose(context, limit)) <= limit
    context.acceptance.length_rule = ChainLengthRule([float(n) for n in range(40)], draft_ms=1.0)
    assert len(drafter.propose(context, limit)) == 0


# ---- Trees that a device makes by itself -----------------------------------------------------------------------------


def make_trees_at_once(drafter, head, of_level=0.3, of_call=0.0):
    """Let a drafter have them at that price, where a level made here takes 1.02; the numbers of levels asked for."""
    with ModelFile.open(head) as file:
        asked = let_head_draft(drafter.session, read_head(file).draft_vocab)
    assert isinstance(drafter.session, DraftingHead)
    drafter._costs = FixedCosts(lambda n: 1e-3 * (1.0 + 0.01 * n))
    drafter._device_drafting = DeviceDrafting(drafter.session, FixedCosts(lambda n: 1e-3 * (of_call + of_level * n)))
    return asked


def after(drafter, engine, text, n_unverified=0):
    """A context after a text of which the target has decoded all but the unverified tokens."""
    engine.generate(text[: len(text) - n_unverified - 1], max_tokens=1, **GREEDY)
    drafter.session.truncate(min(drafter.session.n_past, 8))  # something is to be read, in every way the same
    return greedy_context(text, n_unverified)


def paths_of(tree):
    """What each node of a tree stands for, and its p and kind."""
    paths = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, zip(tree.p, tree.buckets, strict=True), strict=True))


def path_probabilities_of(tree, context):
    """The path probability of each node, by its path of tokens."""
    path_probabilities = {}
    for path, (p, kind) in paths_of(tree).items():
        path_probabilities[path] = path_probabilities.get(path[:-1], 1.0) * context.acceptance.probability(
            kind, len(path) - 1, p
        )
    return path_probabilities


@pytest.mark.parametrize("request_", [GREEDY, DRAWN, {**GREEDY, "repeat_penalty": 1.3}], ids=str)
def test_trees_of_one_call_change_no_token_and_are_made_for_plain_requests_only(drafting, plain, head, request_):
    asked = make_trees_at_once(drafter_of(drafting), head)
    for prompt in (PROMPT, PROMPT + " again", "something else"):
        completion = drafting.generate(prompt, max_tokens=60, **request_)
        assert completion.tokens == tokens_of(plain, request_, prompt=prompt)
        assert completion.timings.speculation.dropped == {}
        if prompt == PROMPT and "repeat_penalty" not in request_:
            assert completion.timings.speculation.by_drafter["head"].accepted > 25
    assert bool(asked) == (request_ is GREEDY) and min(asked, default=2) > 1


@pytest.mark.parametrize("n_unverified", [0, 1, 3])
@pytest.mark.parametrize("limit", [2, 5, 31])
def test_a_tree_of_one_call_is_a_part_of_the_tree_made_level_by_level(drafting, head, texts, limit, n_unverified):
    drafter, text = drafter_of(drafting), texts[0][:40]
    asked = make_trees_at_once(drafter, head, 0.1, of_call=0.5)
    device_drafting, drafter._device_drafting = drafter._device_drafting, None
    device_drafting.learn = lambda probability: None  # as many levels are needed each time
    level_by_level = drafter.propose(after(drafter, drafting, text, n_unverified), 400)
    drafter._device_drafting = device_drafting
    context = after(drafter, drafting, text, n_unverified)
    at_once = drafter.propose(context, limit)
    assert 2 <= asked[0] <= limit and 2 <= len(at_once) <= limit
    assert checked(at_once, drafting.tokenizer.n_vocab, limit) == at_once
    known = paths_of(level_by_level)
    gone_on_from = {path[:-1] for path in known}  # not from what is too unlikely to be worth a row
    common = {path: drafted for path, drafted in paths_of(at_once).items() if path[:-1] in gone_on_from}
    assert len(common) > len(at_once) // 2
    for path, (p, kind) in common.items():
        assert known[path] == (pytest.approx(p, rel=1e-4), kind), path
    assert drafter.propose(context, limit) == at_once, "what is read already is not missing"
    whole = path_probabilities_of(drafter.propose(context, 31), context)
    least = sorted(whole.values())[-limit:][0]
    assert all(
        path_probability >= least for path, path_probability in path_probabilities_of(at_once, context).items()
    ), "others were likelier"
    drafter._device_drafting = None
    again = drafter.propose(context, 400)
    assert paths_of(again).keys() == known.keys()


@pytest.mark.parametrize("of_level, is_used", [(0.3, True), (0.6, True), (0.97, False), (1.2, False)])
def test_trees_are_made_in_one_call_where_an_accepted_level_costs_less(drafting, head, texts, of_level, is_used):
    """With 85 % of the levels right, two give 1.85 for the price of two."""
    drafter = drafter_of(drafting)
    asked = make_trees_at_once(drafter, head, of_level)
    context = after(drafter, drafting, texts[0][:40])
    assert drafter.cost(context)[0] == pytest.approx(of_level if is_used else 1.02)
    drafter.propose(context, 12)
    assert bool(asked) == is_used


def test_no_more_levels_are_made_in_one_call_than_are_useful(drafting, head, texts):
    drafter = drafter_of(drafting)
    asked = make_trees_at_once(drafter, head, 0.1, of_call=0.5)
    context = after(drafter, drafting, texts[0][:40])
    context.acceptance.length_rule = ChainLengthRule(FixedCosts().milliseconds(0), max_nodes=3)
    drafter.propose(context, 31)
    assert asked == [3]
    drafter._device_drafting = DeviceDrafting(
        drafter.session, FixedCosts(lambda n: 1e-3 * (3.0 + 0.1 * n))
    )  # a fourth level is not worth it
    assert drafter.cost(context)[0] < 1.02
    drafter.propose(context, 31)
    assert asked == [3]


def test_the_extra_cost_of_a_first_pass_is_not_a_cost_of_levels(drafting, texts, monkeypatch):
    """Its weights come from memory, those of the next passes from the caches."""
    drafter, clock, passes = drafter_of(drafting), [0.0], []
    forward = drafter.session.forward

    def timed(*arguments, **options):
        is_first = not options.get("n_pending") and options.get("logits") == "last"
        passes.append(is_first)
        clock[0] += 2.5e-3 if is_first else 1e-3
        return forward(*arguments, **options)

    monkeypatch.setattr("edgeinfer.speculation.drafters.head.perf_counter", lambda: clock[0])
    drafter._costs, drafter.session.forward = cost_model(lambda n: 1.0), timed
    context = after(drafter, drafting, texts[0][:40])
    drafter.prefill(context)
    passes.clear()
    for _ in range(100):
        drafter._last = None
        drafter.propose(context, 12)
    assert sum(passes) == 100 and len(passes) >= 200
    each, before = drafter.cost(context)
    assert each == pytest.approx(1.0, rel=0.02) and before == pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize("room", range(1, 12, 2))
def test_trees_of_one_call_fit_into_the_context(opened, plain, model, head, room):
    n_prompt = len(plain.tokenize(PROMPT))
    small = always(opened(model, draft=[str(head)], n_ctx=n_prompt + room))
    make_trees_at_once(drafter_of(small), head)
    completion = small.generate(PROMPT, temperature=0.0)
    assert completion.tokens == tokens_of(plain, n=room)
    assert completion.finish_reason == "length" and completion.timings.speculation.dropped == {}


def test_a_tree_of_one_call_with_nan_is_dropped_with_the_reason(drafting, plain, head):
    drafter = drafter_of(drafting)
    make_trees_at_once(drafter, head)
    draft = drafter.session.draft

    def failing(*arguments):
        nodes = draft(*arguments)
        nodes.probabilities[-1] = np.nan
        return nodes

    drafter.session.draft = failing
    completion = drafting.generate(PROMPT, max_tokens=40, **GREEDY)
    assert completion.tokens == tokens_of(plain, n=40)
    assert NumericalError.__name__ in completion.timings.speculation.dropped["head"]


# ---- What it reads ---------------------------------------------------------------------------------------------------


def fresh_logits(engine, head, text, path):
    """Logits of the head after a text, in one pass with the target's features of one pass, then one by one."""
    with ModelFile.open(head) as file:
        spec = read_head(file)
        plan = plan_head(file, spec, LoadSettings(256, n_batch=256, n_threads=1))
        session = load_head(file, spec, engine.session.model, plan, engine.device).session()
        with edgeinfer.load(engine.path, draft="none") as other:
            rows = other.session.forward(text[:-1], hidden=spec.taps).features
        out = session.forward(text[1:], session.combine(rows))
        session.commit(range(len(text) - 1))
        for token in path:
            out = session.forward([token], out.hidden[0, -1:])
            session.commit([0])
        session.close()
        return out.logits[0]


def test_what_is_drafted_from_is_what_a_new_head_gives_for_the_whole_text(drafting, head, plain, monkeypatch):
    """Over requests that go on, go back, change in the middle and change the text altogether."""
    monkeypatch.setattr("edgeinfer.backends.native.session.WORTH_KEEPING", 1000)  # nothing is parked
    drafter, found = drafter_of(drafting), []
    children = drafter._children

    def spy(growth, above, depth, guess, is_sampled=True):
        found.append((list(growth.context.tokens), above.path, guess.logits.copy()))
        return children(growth, above, depth, guess, is_sampled)

    drafter._children = spy
    ids = plain.tokenize(PROMPT)
    first = ids + list(tokens_of(plain, n=20))
    other = [*ids[:7], 40, *ids[8:]]
    for prompt in (ids, first, first[:12], other, first, [9, *ids]):
        before = len(found)
        assert tokens_of(drafting, n=12, prompt=prompt) == tokens_of(plain, n=12, prompt=prompt)
        assert len(found) > before
        deep = max(found[before:], key=lambda one: len(one[1]))
        fork = next((one for one in found[before:] if len(one[1]) > 2 and len(set(one[1])) > 2), deep)
        for text, path, logits in (found[before], deep, fork, found[-1]):
            assert same_bits(logits, fresh_logits(drafting, head, text, path))
    assert max(len(path) for _, path, _ in found) > 3


def test_a_text_that_another_was_parked_for_is_gone_on_with_from_where_features_are_known(opened, plain, model, head):
    """The target finds the first text again in its cache, so that no features of its beginning come."""
    drafting = always(opened(model, draft=[str(head)], n_ctx=1024))
    drafter = drafter_of(drafting)
    one, two = plain.tokenize(PROMPT * 2), plain.tokenize("something else " * 16)
    assert len(one) + 12 < len(two)
    for prompt in (one, two, [*one, 5, 6]):
        assert tokens_of(drafting, n=12, prompt=prompt) == tokens_of(plain, n=12, prompt=prompt)
    completion = drafting.generate([*one, 5, 6], max_tokens=12, **GREEDY)
    assert completion.timings.speculation.dropped == {} and drafter._known.start > 0


def test_each_token_passes_once_and_drafts_take_few_rows(drafting):
    drafter, fed = drafter_of(drafting), []
    forward = drafter.session.forward

    def counted(tokens, features, parents=None, **options):
        fed.append((drafter.session.n_past, len(tokens), parents is None))
        return forward(tokens, features, parents, **options)

    drafter.session.forward = counted
    completion = drafting.generate(PROMPT, max_tokens=60, **GREEDY)
    of_text = [(n_past, n) for n_past, n, is_text in fed if is_text]
    n_text = completion.usage.prompt_tokens + 60
    if drafter.session.spec.decoder.n_layers:
        assert [n_past for n_past, _ in of_text] == np.cumsum([0, *(n for _, n in of_text[:-1])]).tolist()
        assert sum(n for _, n in of_text) <= n_text
    else:
        assert {n for _, n in of_text} == {1}
    assert max(n for _, n, is_text in fed if not is_text) <= 4


def test_hidden_states_are_requested_only_where_a_drafter_needs_them(opened, model, head):
    for draft, needed in (("auto", False), ([str(head)], True)):
        engine = always(opened(model, draft=draft))
        forward, asked = engine.session.forward, set()

        def recorded(*arguments, asked=asked, forward=forward, **options):
            asked.add(bool(options.get("hidden", False)))
            return forward(*arguments, **options)

        engine.session.forward = recorded
        tokens_of(engine, n=20)
        assert asked == {needed}
        assert isinstance(drafter_of(engine), FeatureDrafter) == needed


@pytest.mark.parametrize("room", range(1, 12))
def test_a_context_that_is_nearly_full_is_filled_to_the_end(opened, plain, model, head, room):
    n_prompt = len(plain.tokenize(PROMPT))
    for n_batch in (1, 4, 512):
        small = always(opened(model, draft=[str(head)], n_ctx=n_prompt + room, n_batch=n_batch))
        completion = small.generate(PROMPT, temperature=0.0)
        assert completion.tokens == tokens_of(plain, n=room)
        assert completion.finish_reason == "length" and completion.timings.speculation.dropped == {}


def test_tokens_that_the_tokenizer_lacks_are_never_drafted(drafting, texts):
    drafter = drafter_of(drafting)
    few = HeadDrafter(drafter.session, np.arange(0, 291, dtype=np.int32), 100, FixedCosts())
    few.observe_features(texts[0], 0, np.zeros((30, n_rows_of(drafter)), dtype=np.float32))
    context = Context(texts[0][:31], lambda logits, text: int(logits.argmax()), True)
    context.acceptance = AcceptanceTable()
    context.acceptance.length_rule = ChainLengthRule(FixedCosts().milliseconds(0))
    tree = few.propose(context, 20)
    assert len(tree) and max(tree.tokens) < 100


# ---- What fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["raises", "NaN of the head", "NaN of the target", "closed", "cut file"])
def test_a_head_that_fails_mid_answer_changes_no_token(opened, plain, model, head, tmp_path, failure):
    copy = tmp_path / "head.gguf"
    shutil.copy(head, copy)
    engine = always(opened(model, draft=["suffix", str(copy)]))
    drafter, n_calls = drafter_of(engine), 0
    of_head, of_target = drafter.session.forward, engine.session.forward
    is_failing = True

    def forward(*args, **options):
        nonlocal n_calls
        n_calls += 1
        output = of_head(*args, **options)
        if is_failing and n_calls > 6 and failure == "raises":
            raise OSError("the disk is gone")
        if n_calls > 6 and failure == "closed":
            drafter.session.close()
        if is_failing and n_calls > 6 and failure == "NaN of the head":
            output.logits[:] = np.nan
        return output

    def target(*args, **options):
        output = of_target(*args, **options)
        if is_failing and n_calls > 6 and failure == "NaN of the target" and output.hidden is not None:
            output.hidden[:] = np.nan
        return output

    drafter.session.forward, engine.session.forward = forward, target
    if failure == "cut file":
        copy.write_bytes(b"")
    completion = engine.generate(PROMPT, max_tokens=60, temperature=0.0)
    assert completion.tokens == tokens_of(plain) and n_calls > 6
    dropped = completion.timings.speculation.dropped
    assert list(dropped) == ([] if failure == "cut file" else ["head"]), dropped
    is_failing = False
    for prompt in (PROMPT + " again", PROMPT + " again and again"):
        completion = engine.generate(prompt, max_tokens=20, temperature=0.0)
        assert completion.tokens == tokens_of(plain, n=20, prompt=prompt)
        assert list(completion.timings.speculation.dropped) == (["head"] if failure == "closed" else [])


def test_a_head_that_fails_while_the_prompt_is_read_sits_out_the_request(drafting, plain):
    drafter = drafter_of(drafting)
    observe, is_failing = drafter.observe_features, True

    def failing(*arguments):
        if is_failing:
            raise MemoryError("gone")
        observe(*arguments)

    drafter.observe_features = failing
    completion = drafting.generate(PROMPT, max_tokens=20, temperature=0.0)
    assert completion.tokens == tokens_of(plain, n=20)
    assert completion.timings.speculation.dropped == {"head": "MemoryError: gone"}
    is_failing = False
    completion = drafting.generate(PROMPT + " again", max_tokens=20, temperature=0.0)
    assert completion.tokens == tokens_of(plain, n=20, prompt=PROMPT + " again")
    assert completion.timings.speculation.dropped == {} and completion.timings.speculation.by_drafter["head"].drafted


def test_features_that_were_no_numbers_are_not_gone_on_with(drafting, texts):
    drafter, text = drafter_of(drafting), texts[0]
    n_rows = n_rows_of(drafter)
    drafter.observe_features(text, 0, np.full((30, n_rows), np.nan, dtype=np.float32))
    context = greedy_context(text[:31])
    with pytest.raises(NumericalError):
        drafter.propose(context, 8)
    drafter.observe_features(text, 30, np.ones((5, n_rows), dtype=np.float32))
    context.tokens.extend(text[31:36])
    assert len(drafter.propose(context, 8)) > 0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Interrupted])
def test_an_interrupt_in_a_draft_leaves_the_engine_as_new(drafting, plain, kind, monkeypatch):
    drafter, n_calls = drafter_of(drafting), 0
    forward = drafter.session.forward

    def failing(*args, **options):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 5:
            raise kind
        return forward(*args, **options)

    monkeypatch.setattr(drafter.session, "forward", failing)
    stream = drafting.stream(PROMPT, max_tokens=60, **GREEDY)
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    else:
        assert list(stream)[-1].finish_reason == "interrupted"
    assert tokens_of(drafting) == tokens_of(plain)


def test_failures_at_random_change_no_token(drafting, plain):
    """70 requests a head. Whatever is called may raise, give nonsense, or be interrupted, at any time."""
    rng, drafter, is_failing = random.Random(1), drafter_of(drafting), True
    n_failures = 0

    def fragile(function):
        def call(*arguments, **options):
            nonlocal n_failures
            kind = rng.choice(["raise", "nonsense", "late"]) if is_failing and rng.random() < 0.03 else ""
            n_failures += bool(kind)
            if kind == "raise":
                raise RuntimeError("injected")
            output = function(*arguments, **options)
            if kind == "late":
                raise RuntimeError("injected")
            if kind == "nonsense" and output is not None:
                for rows in (output.logits, output.hidden):
                    rows[:] = rng.choice([np.nan, np.inf, -np.inf, 0.0, 1e30])
            return output

        return call

    for name in ("forward", "commit", "truncate"):
        setattr(drafter.session, name, fragile(getattr(drafter.session, name)))
    drafter.observe_features = fragile(drafter.observe_features)
    prompts = [PROMPT, PROMPT + " again", "something else", PROMPT * 2]
    expected = {}
    for i in range(70):
        prompt, request = prompts[i % 4], (GREEDY, DRAWN, {"temperature": 1.2, "seed": 9})[i % 3]
        if (i % 4, i % 3) not in expected:
            expected[i % 4, i % 3] = tokens_of(plain, request, 24, prompt)
        assert tokens_of(drafting, request, 24, prompt) == expected[i % 4, i % 3]
    assert n_failures > 20
    is_failing = False
    completion = drafting.generate(PROMPT, max_tokens=60, **GREEDY)
    assert completion.tokens == tokens_of(plain) and completion.timings.speculation.dropped == {}
    assert completion.timings.speculation.by_drafter["head"].accepted > 20


# ---- Loading ---------------------------------------------------------------------------------------------------------


def test_a_head_is_in_the_plan(opened, model, head):
    with_head, without = opened(model, draft=str(head)), opened(model)
    with ModelFile.open(head) as file:
        n_threads, n_ctx = with_head.device.n_threads, with_head.n_ctx
        n_texts = with_head.memory_plan.n_sequences
        settings = LoadSettings(n_ctx, n_batch=128, n_threads=n_threads, parallel=n_texts)
        plan = plan_head(file, read_head(file), settings)
    drafter, n_batch = drafter_of(with_head), with_head.memory_plan.n_batch
    n_rows = 0 if drafter.taps is True else n_rows_of(drafter)
    n_logits = drafter.session.spec.decoder.n_logits
    kept = sum(HeadDrafter.memory(n_ctx, n_batch, 256, 291, n_rows, n_logits, n_texts).values())
    own = drafter._known.memory.rows.nbytes + n_texts * (drafter._level.nbytes + drafter._logits.nbytes)
    assert kept == own + 4 * (256 + 2 * n_rows) * n_batch + n_texts * 4 * 5 * n_logits
    assert with_head.memory_plan.use.drafters - without.memory_plan.use.drafters == plan.use.total + kept
    assert [one.name for one in with_head.speculator.drafters] == ["suffix", "answers", "recycling", "head"]


@pytest.mark.parametrize("why", ["another model", "damaged", "no room"])
def test_a_head_that_cannot_be_used_is_left_out_with_the_reason(opened, plain, model, head, tmp_path, monkeypatch, why):
    path, budget = head, None
    if why == "another model":
        other = write_tiny_model(tmp_path / "other.gguf", seed=3)
        path, expected = write_tiny_head(tmp_path / "head.gguf", other), "without head: .*fingerprint .*fingerprint"
    elif why == "damaged":
        path, expected = tmp_path / "damaged.gguf", "without head: .*draft-head.kind"
        write_tiny_head(path, model, metadata={"draft-head.kind": "unheard of"})
    else:
        monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
        budget = opened(model, draft="none").memory.peak + 1000
        expected = f"reduced: no draft head \\({head.name}\\)$"
    with pytest.warns(RuntimeWarning, match=expected):
        engine = opened(model, draft=[str(path)], budget=budget)
    assert tokens_of(engine) == tokens_of(plain)
