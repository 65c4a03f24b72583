"""Texts and attributes of tokens, as a file has them."""

from __future__ import annotations

import re

import numpy as np

from edgeinfer.models._strings import StringIndex
from edgeinfer.models.arrays import Strings
from edgeinfer.models.tokenization.metadata import TokenizerMetadata
from edgeinfer.models.tokenization.special_tokens import Special

UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = (1 << bit for bit in range(6))
# By token_type; there is none below 1 or above 6.
_OF_TYPE = np.array([0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE, 0], np.uint8)
_SPECIAL_TYPES = (2, 3, 4)

# Texts that mean the end of a turn, and those of fill-in-the-middle tokens by their metadata keys.
_END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~["
).split()
_FILL_TEXTS = {
    ("fim_pre", "prefix"): (
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>"
    ),
    ("fim_suf", "suffix"): (
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>"
    ),
    ("fim_mid", "middle"): (
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>"
    ),
    ("fim_pad",): "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    ("fim_rep",): "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    ("fim_sep",): "<|file_sep|>",
}
_ENDING_FILLS = frozenset(["fim_pad", "fim_rep", "fim_sep"])
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss: parsed and shown always
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Texts and attributes of the tokens, and the roles that some of them have."""

    def __init__(self, metadata: TokenizerMetadata) -> None:
        self.metadata = metadata
        self.tokens = metadata.strings("tokens")
        n_vocab = len(self.tokens)
        self.ids = StringIndex(self.tokens.table)
        if "" in self.ids:
            del self.ids  # first: two of them are more than is planned
            self.tokens = Strings(self.tokens.table.named("[EMPTY_", "]"))
            self.ids = StringIndex(self.tokens.table)
        if self.ids.repeated is not None:
            raise metadata.error("tokens", "different texts", f"{self.tokens[self.ids.repeated]} twice")
        types = metadata.numbers("token_type", "iu", n_vocab)
        if types is None:
            self.attributes = np.full(n_vocab, NORMAL, np.uint8)
        else:
            self.attributes = _OF_TYPE[np.clip(types, 0, len(_OF_TYPE) - 1)]
        for id in np.flatnonzero(self.attributes & BYTE).tolist():
            if not _BYTE_TOKEN.fullmatch(self.tokens[id]):
                raise metadata.error("tokens", f"<0x00> to <0xFF> for the byte token {id}", self.tokens[id])

    def find_stop_ids(self, eos_id: int | None) -> frozenset[int]:
        """The tokens that end a generation; marks them and some others as control tokens by their text.

        After llama.cpp: files often give these tokens another type and do not name them in the metadata.
        """
        n_vocab = len(self.tokens)
        stops = {eos_id, *(self.metadata.token_id(key, n_vocab) for key in ("eot", "eom"))}
        for keys, texts in _FILL_TEXTS.items():
            named = [id for id in (self.metadata.token_id(key, n_vocab) for key in keys) if id is not None]
            found = [self.ids[text] for text in texts.split() if text in self.ids]
            if not named:
                self._mark(found[:1])
            if keys[0] in _ENDING_FILLS:
                stops.update(named[-1:] or found[:1])
        ends = [self.ids[text] for text in _END_TEXTS if text in self.ids]
        self._mark(ends)
        stops.update(ends)
        for text in _SHOWN_TEXTS:
            if text in self.ids:
                self.attributes[self.ids[text]] = USER_DEFINED
        present = {self.tokens[id] for id in stops if id is not None}
        calls = "<|call|>" in present or "<|calls|>" in present
        if "<|end|>" in present and calls and ("<|return|>" in present or "<|flush|>" in present):
            self._unstop("<|end|>", USER_DEFINED, stops)  # o200k_harmony, solar-open: a part of the answer ends
        if "</s>" in present and ("<|tool_response>" in present or "<|plamo:eos|>" in present):
            self._unstop("</s>", NORMAL, stops)  # gemma4: a tag of HTML
        return frozenset(id for id in stops if id is not None)

    def _mark(self, ids: list[int]) -> None:
        for id in ids:
            self.attributes[id] |= CONTROL

    def _unstop(self, text: str, attribute: int, stops: set[int | None]) -> None:
        stops.discard(self.ids[text])
        self.attributes[self.ids[text]] = attribute

    def specials(self) -> list[Special]:
        """Tokens to look for in a text, longest first."""
        ids = np.flatnonzero(self.attributes & (CONTROL | USER_DEFINED | UNKNOWN)).tolist()
        left, right = self._stripping(set(ids))
        found = [
            Special(self.tokens[id], id, bool(self.attributes[id] & (CONTROL | UNKNOWN)), id in left, id in right)
            for id in ids
        ]
        return sorted(found, key=lambda special: -len(bytes_of(special.text)))

    def controls(self) -> list[int]:
        """Tokens that stand for no text of their own."""
        ids: list[int] = np.flatnonzero(self.attributes & (CONTROL | UNKNOWN)).tolist()
        return ids

    def hide_controls(self) -> None:
        """Take the control tokens out of `ids`: whatever merges a file has, text alone must not make one."""
        for text in (self.tokens[id] for id in self.controls()):
            if len(text) > 1:  # a single character may be all there is for a byte
                self.ids.hide(text)

    def _stripping(self, specials: set[int]) -> tuple[set[int], set[int]]:
        """Tokens that swallow white space to the left and to the right; GGUF does not say it, so it goes by name."""
        name = str(self.metadata.values.get("general.name", "")).lower()
        pre = self.metadata.text("pre", "")
        if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
            return self._ids_of("<mask>"), set()
        if "phi-3" in name or "phi3" in name:
            return set(), (specials | self._ids_of("</s>")) - self._ids_of("<unk>", "<s>", "<|endoftext|>")
        if "modern-bert" in name:
            return self._ids_of("[MASK]"), set()
        return set(), set()

    def _ids_of(self, *texts: str) -> set[int]:
        return {self.ids[text] for text in texts if text in self.ids}


def n_specials(metadata: TokenizerMetadata, n_vocab: int) -> int:
    """Most tokens that are looked for in texts: those of such types, and those that find_stop_ids may mark."""
    types = metadata.get("token_type")
    by_type = 0 if types is None else int(np.isin(np.asarray(types)[:n_vocab], _SPECIAL_TYPES).sum())
    return by_type + len(_END_TEXTS) + len(_FILL_TEXTS) + len(_SHOWN_TEXTS)


def bytes_of(text: str) -> bytes:
    """The bytes of a text of the file, also of one that is no UTF-8."""
    return text.encode(errors="surrogateescape")
