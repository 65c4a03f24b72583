"""The vocabulary of a model as llguidance takes it."""

from __future__ import annotations

from typing import Any

from edgeinfer.common.errors import InvalidConstraint
from edgeinfer.constraints.library import open_vocabulary
from edgeinfer.models.tokenizer import Tokenizer


def end_ids_of(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a text. Raises InvalidConstraint if there are none."""
    ids = sorted(tokenizer.stop_ids)
    if not ids:
        raise InvalidConstraint(
            "the vocabulary of this model has no token that ends a text, which has to follow a text that is complete"
        )
    return ids


def vocabulary_of(tokenizer: Tokenizer) -> Any:
    """The LLTokenizer of a tokeniser: the same ids, in the same canonical order where bytes are forced.

    Control tokens and those that end a text are special. User-defined ones stand for their text, as they do in a
    prompt.
    """
    end_ids = end_ids_of(tokenizer)
    special = {id for id in range(tokenizer.n_vocab) if tokenizer.is_control(id)} | set(end_ids)

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special=False, continues=True)
        if special.isdisjoint(ids):
            return ids
        # A user-defined token that ends texts stands in it, and is to be spelt.
        return [id for char in text for id in tokenizer.encode(char, add_special=False, continues=True)]

    tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.n_vocab)]
    return open_vocabulary(tokens, sorted(special), end_ids, encode)
