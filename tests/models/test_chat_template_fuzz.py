"""Templates and messages at random: a text or a TemplateError, in little time and memory, and jinja2's text."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Sequence
from typing import Any

import pytest
from plain_jinja import CONVERSATIONS, plainly_rendered
from template_sources import FEATURES, MAX_SECONDS, Expressions, mutated

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.chat_template import CHATML, ChatTemplate

MAX_KIB = 512 << 10


def rendered(source: str, messages: Sequence[Any]) -> str | None:
    """The text, None where the template is refused; within the limits."""
    start = time.process_time()
    try:
        text = ChatTemplate(source, "<s>", "</s>").render(messages)
    except TemplateError as error:
        assert str(error)
        text = None
    assert time.process_time() - start < MAX_SECONDS, source
    return text


@pytest.mark.parametrize("source", FEATURES.values(), ids=FEATURES.keys())
def test_what_templates_in_use_do_is_written_as_in_jinja2(source: str) -> None:
    texts = [rendered(source, messages) for messages in CONVERSATIONS]
    assert texts == [plainly_rendered(source, messages) for messages in CONVERSATIONS]
    assert len(set(texts)) >= 3


@pytest.mark.parametrize("seed", range(2))
def test_expressions_at_random_are_written_as_in_jinja2(seed: int) -> None:
    rng = random.Random(seed)
    expressions = Expressions(rng)
    n_texts = 0
    for _ in range(250):
        source = expressions.template()
        messages = rng.choice(CONVERSATIONS)
        text = rendered(source, messages)
        assert text == plainly_rendered(source, messages), (source, messages)
        n_texts += text is not None
    assert n_texts > 150


@pytest.mark.parametrize("seed", range(2))
def test_a_template_with_something_wrong_in_it_is_a_text_or_an_error(seed: int) -> None:
    rng = random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    n_texts = 0
    for _ in range(250):
        source = mutated(rng.choice([CHATML, *FEATURES.values()]), rng)
        messages = rng.choice(CONVERSATIONS)
        text = rendered(source, messages)
        if text is not None:
            n_texts += 1
            assert text == plainly_rendered(source, messages), (source, messages)
    assert 20 < n_texts < 230
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_KIB


def any_value(rng: random.Random, depth: int) -> Any:
    """What a message may be made of, and may not."""
    leaves = [None, True, 0, -1.5, float("nan"), 10**30, 10**5000, "", "a", "\ud800", "<|im_end|>", b"x", object(), {1}]
    if depth <= 0 or rng.random() < 0.5:
        return rng.choice(leaves)
    inside = [any_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    keys = ["role", "content", "tool_calls", "", 1, None, "system", (1, 2)]
    return rng.choice([inside, tuple(inside), dict(zip(rng.sample(keys, len(inside)), inside, strict=True))])


def test_messages_of_anything_are_a_text_or_an_error() -> None:
    rng = random.Random(1)
    n_texts = 0
    for _ in range(600):
        messages = [
            any_value(rng, 3)
            if rng.random() < 0.2
            else {"role": rng.choice(["user", "assistant", "system", any_value(rng, 1)]), "content": any_value(rng, 2)}
            for _ in range(rng.randint(0, 3))
        ]
        n_texts += rendered(rng.choice([CHATML, *FEATURES.values()]), messages) is not None
    assert 50 < n_texts < 550
