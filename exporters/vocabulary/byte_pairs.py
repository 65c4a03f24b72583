"""Vocabularies of byte pair encoding in tokenizer.json: byte-level, and as models of SentencePiece become."""

from __future__ import annotations

import json
from collections.abc import Iterable

from edgeinfer.exporters.vocabulary.entries import (
    BYTE,
    BYTE_TEXT,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    AddedToken,
    Draft,
    Entries,
)
from edgeinfer.exporters.vocabulary.probes import probes
from edgeinfer.exporters.vocabulary.tokenizer_file import TokenizerFile
from edgeinfer.models.gguf import MetadataValue
from edgeinfer.models.tokenizer import PRE_TOKENIZERS, cut, keeps_tokens

# Of Gemma 4: always shown, so that thoughts and calls of tools can be read.
_SHOWN = frozenset(
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
)


def byte_level(file: TokenizerFile, n_rows: int, pre: str | None = None) -> Draft:
    """Byte-level BPE. pre: the pre-tokeniser that is named where several cut alike.

    Raises UnsupportedModel, ModelFileError.
    """
    entries = _entries(file, file.added, n_rows)
    merges = [" ".join(pair) for pair in file.merges]
    if any(merge.count(" ") != 1 for merge in merges):
        file.refuse("must have merges of tokens without spaces: found others")
    keys: dict[str, MetadataValue] = {"model": "gpt2", "pre": _pre_tokenizer(file, pre), "merges": merges}
    return Draft(entries, keys, scored=False)


def with_byte_fallback(file: TokenizerFile, n_rows: int) -> Draft:
    """BPE of characters, with tokens for bytes: what merges first has the best score.

    SentencePiece merges what makes the best token; the merges stand in the order of the tokens they make.
    """
    entries = _entries(file, (token.with_spaces() for token in file.added), n_rows)
    order: dict[str, int] = {}
    for left, right in file.merges:
        order.setdefault(left + right, len(order))
    unknown = file.model.get("unk_token")
    roles = {}
    for id, text in entries.texts.items():
        entries.scores[id] = -float(order.get(text, len(order)))
        if text == unknown:
            entries.types[id], roles["unknown"] = UNKNOWN, id
        elif entries.types[id] == NORMAL and BYTE_TEXT.fullmatch(text):
            entries.types[id] = BYTE
    keys: dict[str, MetadataValue] = {"model": "llama", "pre": "default", "add_space_prefix": _adds_space(file)}
    return Draft(entries, keys, scored=True, roles=roles)


def space_marked(file: TokenizerFile, n_rows: int) -> Draft:
    """The same with its merges, as GGUF has the vocabulary of Gemma 4. Raises UnsupportedModel, ModelFileError."""
    entries = _entries(file, file.added, n_rows)
    merges = [" ".join(pair) for pair in file.merges]
    if any(merge.count(" ") != 1 for merge in merges):
        file.refuse("must have merges of tokens without spaces: found others")
    unknown, roles = file.model.get("unk_token"), {}
    for id, text in entries.texts.items():
        if text in _SHOWN:
            entries.types[id] = USER_DEFINED
        elif text == unknown:
            entries.types[id], roles["unknown"] = UNKNOWN, id
        elif entries.types[id] == NORMAL and BYTE_TEXT.fullmatch(text):
            entries.types[id] = BYTE
    keys: dict[str, MetadataValue] = {"model": "gemma4", "merges": merges, "add_space_prefix": False}
    return Draft(entries, keys, scored=False, roles=roles)


def _entries(file: TokenizerFile, added: Iterable[AddedToken], n_rows: int) -> Entries:
    entries = Entries()
    largest = max(file.vocab, default=-1)
    if largest >= n_rows:
        file.refuse(f"has {largest + 1} tokens, and the model {n_rows} embeddings")
    for id, text in file.vocab.items():
        entries.set(id, text, NORMAL)
    entries.add(added, n_rows, str(file.path))
    return entries


def _pre_tokenizer(file: TokenizerFile, preferred: str | None) -> str:
    """The first one that cuts all probes as theirs does, the preferred one before the others."""
    expected = [_cut(file, text) for text in probes()]
    for name in sorted(PRE_TOKENIZERS, key=lambda name: name != preferred):
        if keeps_tokens(name) == file.keeps_tokens and all(
            list(cut(name, text)) == words for text, words in zip(probes(), expected, strict=True)
        ):
            return name
    found = json.dumps(file.source("pre_tokenizer"))
    return file.refuse(f"must cut texts as a pre-tokeniser that is known does; none cuts like this one: {found:.300}")


def _cut(file: TokenizerFile, text: str) -> list[str]:
    with file.theirs_may_fail("cannot cut a text with it"):
        return [text[first:last] for _, (first, last) in file.theirs.pre_tokenizer.pre_tokenize_str(text)]


def _adds_space(file: TokenizerFile) -> bool:
    """Whether a text gets a space before it."""
    if any(part.get("type") == "Prepend" for part in file.parts("normalizer")):
        return True
    marks = [part for part in file.parts("pre_tokenizer") if part.get("type") == "Metaspace"]
    return any(mark.get("prepend_scheme", "always") != "never" for mark in marks)
