"""An engine of a tiny model that says what a test tells it to, and then ends."""

from __future__ import annotations

import re
from typing import Any

import pytest

from edgeinfer import engine as engine_module
from edgeinfer.engine import Engine
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.scheduling.request import Request


class Script:
    """Puts its tokens in the place of those that the model would draw.

    tokens: of the next answer.  prompts: the ids of each prompt that was answered.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        self.prompts: list[list[int]] = []
        self._request = engine._request
        monkeypatch.setattr(engine, "_request", self._requesting)
        monkeypatch.setattr(engine_module, "sample", self._sample)

    def _requesting(self, prompt: list[int], *rest: Any) -> Request:
        self.prompts.append(list(prompt))
        return self._request(prompt, *rest)

    def _sample(self, logits: object, params: object, position: int, *rest: object) -> int:
        place = position - len(self.prompts[-1])
        return self.tokens[place] if place < len(self.tokens) else int(self.engine.tokenizer.eos_id or 0)

    def emit(self, text: str) -> None:
        """What comes next, as `emitted` reads it."""
        self.tokens = emitted(self.engine.tokenizer, text)


def emitted(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text in which special tokens are meant by their texts, but after a ~ it is spelled in ordinary ones."""
    marks = "|".join(map(re.escape, tokenizer.special_texts))
    ids: list[int] = []
    for part in re.split(f"(~?(?:{marks}))", text):
        id = tokenizer.token_id(part)
        if id is not None:
            ids.append(id)
        else:
            for char in part.removeprefix("~"):  # no special token comes out of a character alone
                ids += tokenizer.encode(char, add_special=False, continues=True)
    return ids
