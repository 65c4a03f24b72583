"""A mask is a function of the tokens before it, whatever the matcher was asked about in between."""

import random
import threading

import numpy as np
import pytest
from constrained import OPTIONS

from edgeinfer.common.errors import ConstraintError
from edgeinfer.constraints import library
from edgeinfer.constraints.constraint import Constraints
from edgeinfer.constraints.mask import Mask
from edgeinfer.constraints.options import wanted_of
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("grammar")


@pytest.fixture(scope="module")
def constraints(engine):
    return Constraints(engine.tokenizer)


def random_answer(state, rng, n_prompt, most=40):
    """Tokens that the masks let through, and the mask before each of them and after the last."""
    text, masks = [7] * n_prompt, []
    while True:
        masks.append(state.mask_at(text))
        if len(masks) > most or state.is_complete(text):
            return text, masks
        text.append(int(rng.choice(np.flatnonzero(masks[-1].flags))))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_mask_depends_on_the_text_alone(constraints, name):
    wanted, rng = wanted_of(OPTIONS[name]), random.Random(1)
    constraint = constraints.read(wanted)
    state = constraint.state(wanted, 3)
    known = [random_answer(constraint.state(wanted, 3), rng, 3) for _ in range(6)]
    for _ in range(200):
        text, masks = rng.choice(known)
        place = rng.randrange(len(masks))
        assert state.mask_at(text[: 3 + place]) == masks[place]
        if rng.random() < 0.3:  # what is refused, as in a draft, leaves no trace
            refused = np.flatnonzero(~masks[place].flags)
            with pytest.raises(ConstraintError):
                state.mask_at([*text[: 3 + place], int(rng.choice(refused)), 5])


def test_the_mask_after_a_limit_is_that_of_a_new_matcher(constraints, monkeypatch):
    """A matcher that has seen much may meet its limit where one that has seen this text alone does not."""
    wanted = wanted_of({"schema": {"type": "object", "properties": {"x": {"type": "string"}}}})
    state = constraints.read(wanted).state(wanted, 0)
    expected = state.mask_at([])

    class Exhausted:
        def __getattr__(self, name):
            return lambda *_: name in ("is_error", "consume_tokens") or b""

    state._path._matcher = Exhausted()
    assert state.mask_at([]) == expected


def test_a_limit_that_the_text_itself_meets_is_an_error_and_no_free_text(engine, monkeypatch):
    monkeypatch.setattr(library, "_LEXER_STATES", 150)
    monkeypatch.setattr(engine, "_constraints", Constraints(engine.tokenizer), raising=False)
    with pytest.raises(ConstraintError, match="cannot be told: .*too many states"):
        engine.generate("x", regex="(.*a.{12}|b.*c.{9})*x", max_tokens=200, seed=1, temperature=2.0)


def test_masks_join_and_compare():
    odd, few = Mask.of(range(1, 20, 2), 20), Mask.of([3, 5], 20)
    assert few.is_within(odd) and not odd.is_within(few) and (odd | few) == odd
    assert Mask.of([4], 20).only == 4 and odd.only is None and ~odd == Mask.of(range(0, 20, 2), 20)
    assert few.allows(3) and not few.allows(4) and not few.allows(99) and not few.allows(-1)
    logits = np.arange(20, dtype=np.float32)
    applied = few.apply(logits)
    assert applied.dtype == np.float32 and sorted(np.flatnonzero(np.isfinite(applied))) == [3, 5]
    assert (few.apply(logits[:4]) == [-np.inf] * 3 + [3]).all()
    assert (Mask.of([], 20).count, few.count, odd.count) == (0, 2, 10)
    assert few.key == Mask.of([5, 3], 20).key != odd.key


# A text of the schema below as it was drafted: tokens, and how many of the last ones were taken back.
_DRAFTED = [
    *("{", ' "_', '":', ' {"', '":', ' "', "Reason", " is", " a", " brief", " Cam", "el", "Case", " string", " that"),
    *(" describes", -11, " {", ' "', '":', " [", "\n     ", " {", "\n       ", -4, ' "', '.",', '"', "description"),
    *('":"', "A", " human", " readable", -5, "type", '":', ' "', "object", '"}', -3, ' ["', '",', ' "', "null", -6),
    *(':"', "\n   ", " :", ' "', -3, " :", " [", "\n     ", " {", "\n       ", -4, ' "', -1, '{"'),
]


def test_what_was_drafted_leaves_no_trace_in_a_mask(default_model):
    """llguidance 1.9.1 finds tokens too many after this, where its matcher is taken back by `rollback`."""
    file = ModelFile.open(default_model)
    tokenizer = Tokenizer.from_file(file)
    both = {"type": ["string", "null"]}
    wanted = wanted_of(
        {"schema": {"type": "object", "properties": dict.fromkeys(("message", "phase", "reason"), both)}}
    )
    constraint = Constraints(tokenizer).read(wanted)
    for draft_at in (1, 3):
        state, text = constraint.state(wanted, 0), []
        for step in _DRAFTED:
            if isinstance(step, int):
                del text[step:]
                continue
            (id,) = tokenizer.encode(step, add_special=False)
            if len(text) % draft_at == 0:
                state.kept(text, [id, id], [-1, 0])
            text.append(id)
        matcher = constraint.new_matcher()
        assert matcher.consume_tokens(text)
        assert state.mask_at(text) == Mask(matcher.compute_bitmask(), tokenizer.n_vocab)
    file.close()


@pytest.mark.parametrize("seed", range(3))
def test_masks_of_random_drafts_are_those_of_a_new_matcher(default_model, seed):
    file, rng = ModelFile.open(default_model), random.Random(seed)
    tokenizer = Tokenizer.from_file(file)
    wanted = wanted_of(
        {"schema": {"type": "object", "properties": {"a": {"enum": ["x", None]}, "b": {"type": "array"}}}}
    )
    constraint = Constraints(tokenizer).read(wanted)
    state, text = constraint.state(wanted, 0), []
    is_short = np.array([len(tokenizer.token_bytes(id)) < 3 for id in range(tokenizer.n_vocab)])
    is_short[list(tokenizer.stop_ids)] = False

    def drawn(text):
        ids = np.flatnonzero(state.mask_at(text).flags)
        return int(rng.choice(list(ids[is_short[ids]]) or list(ids)))

    while len(text) < 60 and not state.is_complete(text):
        tree, parents = [], []
        for node in range(rng.randrange(8)):
            parents.append(rng.randrange(-1, node))
            tree.append(rng.choice([drawn(text), rng.randrange(tokenizer.n_vocab)]))
        kept = state.kept(text, tree, parents)
        paths = {-1: text}
        for node, (token, parent) in enumerate(zip(tree, parents, strict=True)):
            if parent in paths:
                fresh = constraint.new_matcher()
                assert fresh.consume_tokens(paths[parent])
                mask = Mask(fresh.compute_bitmask(), tokenizer.n_vocab)
                assert mask.allows(token) == (node in kept) and state.mask_at(paths[parent]) == mask
                if node in kept and token not in tokenizer.stop_ids:
                    paths[node] = [*paths[parent], token]
        text = rng.choice(list(paths.values()))
        text = [*text, drawn(text)]
    file.close()


def test_texts_of_several_threads_share_a_constraint(default_model):
    """They share what was learnt about the grammar, behind a lock, and masks of forced bytes ask our tokeniser."""
    with ModelFile.open(default_model) as file:
        tokenizer = Tokenizer.from_file(file)
    wanted = wanted_of({"schema": {"type": "object", "properties": {"first name": {"const": "a b c"}, "x": {}}}})
    constraint = Constraints(tokenizer).read(wanted)
    answer = tokenizer.encode('{"first name": "a b c", "x": ["one", {"two": 3.5}]}', add_special=False)
    expected = [constraint.state(wanted, 0).mask_at(answer[:n]) for n in range(len(answer) + 1)]
    wrong = []

    def follow():
        for _ in range(10):
            state = constraint.state(wanted, 0)
            for n, mask in enumerate(expected):
                state.kept(answer[:n], answer[n : n + 3], [-1, 0, 1][: len(answer) - n])
                if state.mask_at(answer[:n]) != mask or state.result(answer[:n], "length")[1] is None:
                    wrong.append(n)

    threads = [threading.Thread(target=follow, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads) and set(wrong) <= {len(answer)}
