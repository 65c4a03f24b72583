"""Prompts that ask for what is between two texts, of models that were trained for that."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.engine import Engine
from edgeinfer.server.problem import Problem

# Marks before what comes first, before what comes last, and before what is to be filled in; as models have them.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
_FILES = ("<|file_sep|>", "<file_sep>")


def marks_of(engine: Engine) -> tuple[int, int, int] | None:
    """Ids of the marks, None for a model without them."""
    for names in _MARKS:
        first, last, middle = map(engine.tokenizer.token_id, names)
        if first is not None and last is not None and middle is not None:
            return first, last, middle
    return None


def fill_in_prompt(
    engine: Engine, before: str, after: str, files: Sequence[tuple[str, str]] = (), begun: str = ""
) -> list[int]:
    """Tokens of a prompt for what lies between two texts.

    files: (name, text) of others of the project.  begun: the beginning of what is to be filled in. Raises Problem for
    a model that was not trained for it.
    """
    marks = marks_of(engine)
    if marks is None:
        raise Problem(501, f"{engine.name} has no tokens for text between two others", code="not_supported")

    def tokens(text: str) -> list[int]:
        return engine.tokenize(text, add_special=False, parse_special=False)

    first, last, middle = marks
    separator = next((id for name in _FILES if (id := engine.tokenizer.token_id(name)) is not None), None)
    tokenizer = engine.tokenizer
    prompt = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    for name, text in files:
        prompt += [separator, *tokens(f"{name}\n{text}\n")] if separator is not None else tokens(f"{name}\n{text}\n")
    return [*prompt, first, *tokens(before), last, *tokens(after), middle, *tokens(begun)]
