"""Texts under constraints beside others: each is what it is alone, whatever it is drafted with."""

import json
import threading

import pytest
from constrained import OPTIONS, PERSON, check_answer
from drafting import PROMPT, FixedCosts
from random_requests import passes_of
from waiting import wait_until

from edgeinfer.common.errors import ConstraintError
from edgeinfer.constraints.constraint import ConstraintState

pytestmark = pytest.mark.usefixtures("grammar")

# Every third text is free.
REQUESTS = [
    ({"temperature": temperature, "seed": seed, "max_tokens": 120}, options)
    for seed in (1, 2, 3)
    for temperature in (0.0, 0.8)
    for options in (*list(OPTIONS.values())[:4], {}, *list(OPTIONS.values())[4:], {})
]


@pytest.mark.parametrize("draft", ["none", "auto"])
def test_texts_with_and_without_constraints_side_by_side(loaded, engine, model, draft, monkeypatch):
    together = loaded(model, draft=draft, parallel=4)
    if together.speculator is not None:
        together.speculator.costs = FixedCosts()
    sizes, found = passes_of(together, monkeypatch), [None] * len(REQUESTS)

    def ask(first):
        for n in range(first, len(REQUESTS), 8):
            sampling, options = REQUESTS[n]
            found[n] = together.generate(f"{PROMPT} {n % 5}", **sampling, **options)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(8)]
    with together.scheduler.alone():  # none runs before all have asked
        for thread in threads:
            thread.start()
        wait_until(lambda: len(together.scheduler.texts) == 8)
    for thread in threads:
        thread.join()
    for n, (sampling, options) in enumerate(REQUESTS):
        alone = engine.generate(f"{PROMPT} {n % 5}", **sampling, **options)
        assert found[n].tokens == alone.tokens and found[n].finish_reason == alone.finish_reason
        assert found[n].parsed == alone.parsed and found[n].parse_error == alone.parse_error
        if alone.finish_reason == "stop":
            check_answer(options, found[n].text)
    assert max(sizes) == 4, "four at once"


def test_many_prompts_and_samples_take_a_schema(loaded, engine, model):
    together = loaded(model, parallel=4)
    prompts = [f"{PROMPT} {n}" for n in range(6)]
    found = list(together.generate_many(prompts, schema=PERSON, seed=3))
    assert [each.parsed for each in found] == [engine.generate(p, schema=PERSON, seed=3).parsed for p in prompts]
    samples = together.generate(PROMPT, n=4, schema=PERSON, seed=3)
    assert [each.parsed for each in samples] == [json.loads(each.text) for each in samples]
    alone = [engine.generate(PROMPT, schema=PERSON, seed=3 + n).tokens for n in range(4)]
    assert [each.tokens for each in samples] == alone


def test_a_text_whose_constraint_fails_ends_alone(loaded, engine, model, monkeypatch):
    together = loaded(model, parallel=4)
    mask_at, wrong = ConstraintState.mask_at, []

    def failing(self, text):
        if self._wanted.source == "[ab]{40}" and len(text) - self._n_prompt > 9:
            raise ConstraintError("too complex")
        return mask_at(self, text)

    monkeypatch.setattr(ConstraintState, "mask_at", failing)
    prompts = [f"{PROMPT} {n}" for n in range(3)]
    expected = [engine.generate(prompt, max_tokens=60, seed=1).tokens for prompt in prompts]
    streams = [together.stream(prompt, max_tokens=60, seed=1) for prompt in prompts]
    bad = threading.Thread(
        target=lambda: wrong.append(pytest.raises(ConstraintError, together.generate, PROMPT, regex="[ab]{40}"))
    )
    bad.start()
    found = [[token for piece in stream for token in piece.tokens] for stream in streams]
    bad.join()
    assert [tuple(tokens) for tokens in found] == expected and "too complex" in str(wrong[0].value)
