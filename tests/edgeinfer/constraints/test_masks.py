"""A mask is a function of the tokens before it, whatever the matcher was asked about in between."""

import random

import numpy as np
import pytest
from constrained import OPTIONS

from edgeinfer.common.errors import ConstraintError
from edgeinfer.constraints import library
from edgeinfer.constraints.constraint import Constraints
from edgeinfer.constraints.mask import Mask
from edgeinfer.constraints.options import wanted_of

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
            return lambda *_: name in ("is_error", "rollback", "consume_tokens") or b""

    state._matcher = Exhausted()
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
