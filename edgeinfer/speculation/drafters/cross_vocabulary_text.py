"""A text in two vocabularies: the target's tokens as tokens of a draft model with another tokenizer, and back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import accumulate, pairwise

from edgeinfer.backends.checks import common_length
from edgeinfer.models.tokenizer import Tokenizer

# Target tokens that are encoded together: a piece ends where a word begins after _PIECE tokens, at the latest after
# _LONG_PIECE.
_PIECE, _LONG_PIECE = 16, 256


class CrossVocabularyText:
    """A text of the target's tokens, encoded for the draft model piece by piece.

    When a text grows, only its last piece is encoded again. Control tokens are mapped by name.

    tokens: the text in the draft model's tokens.  is_complete: the text ends with a complete UTF-8 character; the bytes
    of an incomplete one are left out of `tokens`.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target, self._draft = target, draft
        self._bos = [draft.bos_id] if draft.add_bos and draft.bos_id is not None else []
        self.tokens = list(self._bos)
        self.is_complete = True
        self._encoded: list[int] = []  # the target's tokens
        self._source: Sequence[int] = ()  # the list that they came in, which only grows
        self._ends = [(0, len(self._bos))]  # of pieces: numbers of tokens of the target and of the draft model
        self._controls: dict[int, list[int]] = {}

    def update(self, text: Sequence[int]) -> int:
        """Encode a text of the target; returns how many of the first draft-model tokens are unchanged."""
        encoded, self._encoded = self._encoded, []  # after a failure nothing is known
        has_grown = text is self._source and len(text) >= len(encoded)
        n_common, self._source = len(encoded) if has_grown else common_length(encoded, text), text
        if n_common == len(text) == len(encoded):
            self._encoded = encoded
            return len(self.tokens)
        while len(self._ends) > 1 and self._ends[-1][0] >= n_common:  # the token after an end decides whether it is one
            self._ends.pop()
        n_encoded, n_kept = self._ends[-1]
        before = self.tokens[n_kept:]
        del self.tokens[n_kept:]
        self._encode(text, n_encoded)
        self._encoded = list(text)
        return n_kept + common_length(before, self.tokens[n_kept:])

    def to_target(self, drafted: Sequence[int]) -> list[tuple[int, list[int]]]:
        """The target's tokens for draft tokens after the text, each with the indices of draft tokens that begin in it.

        The last one may be a control token. An incomplete character at the end is left out.
        """
        ending = drafted[-1:] if drafted and self._draft.is_control(drafted[-1]) else []
        pieces = [self._draft.token_bytes(id) for id in drafted[: len(drafted) - len(ending)]]
        text, _ = _decoded(b"".join(pieces))
        ids = self._target.encode(text.partition("\ufffd")[0], add_special=False, continues=True)
        ends = list(accumulate((len(self._target.token_bytes(id)) for id in ids), initial=0))
        starts = list(accumulate((len(piece) for piece in pieces), initial=0))[:-1]
        spans = zip(ids, pairwise(ends), strict=True)
        found = [(id, [i for i, at in enumerate(starts) if first <= at < last]) for id, (first, last) in spans]
        is_all = ends[-1] == sum(map(len, pieces))
        for id in ending if is_all else ():
            same = self._target.token_id(self._draft.token_bytes(id).decode())
            found += [] if same is None else [(same, [len(pieces)])]
        return found

    def _encode(self, text: Sequence[int], first: int) -> None:
        """Add the tokens from text[first] on."""
        begin = first
        for i in range(first, len(text)):
            if self._target.is_control(text[i]):
                self._add_piece(text, begin, i)
                is_bos = i == 0 and self._target.add_bos and text[i] == self._target.bos_id
                self.tokens += [] if is_bos and self._bos else self._control(text[i])
                begin = i + 1
                self._ends.append((begin, len(self.tokens)))
            elif i > begin and self._is_end(text, begin, i):
                self._add_piece(text, begin, i)
                begin = i
                self._ends.append((begin, len(self.tokens)))
        self.is_complete = self._add_piece(text, begin, len(text))

    def _is_end(self, text: Sequence[int], begin: int, i: int) -> bool:
        """Whether a piece may end before token i: where a word begins, as all vocabularies split there."""
        piece, before = (self._target.token_bytes(id) for id in (text[i], text[i - 1]))
        if i - begin >= _LONG_PIECE:
            return not piece or not 0x80 <= piece[0] < 0xC0  # anywhere but within a character
        starts_word = piece[:1] == b" " and piece[1:2].isalnum() and not before[-1:].isspace()
        return i - begin >= _PIECE and starts_word

    def _add_piece(self, text: Sequence[int], first: int, last: int) -> bool:
        """Encode the target's tokens first..last - 1; returns whether they end with a complete character."""
        if first == last:
            return True
        raw = b"".join(map(self._target.token_bytes, text[first:last]))
        continues = first > 0 and not self._target.is_control(text[first - 1])
        if first > 0 and self._target.hides_space(text[first - 1]):
            raw = raw.removeprefix(b" ")
        piece, is_complete = _decoded(raw)
        self.tokens += self._draft.encode(piece, add_special=False, continues=continues)
        return is_complete

    def _control(self, id: int) -> list[int]:
        """The draft model's tokens for a control token: the one of that name, else the encoded name; of a bos, none."""
        if id not in self._controls:
            name = self._target.token_bytes(id).decode()
            same = self._draft.token_id(name)
            if same is None and id != self._target.bos_id:
                self._controls[id] = self._draft.encode(name, add_special=False)
            else:
                self._controls[id] = [] if same is None else [same]
        return self._controls[id]


def _decoded(raw: bytes) -> tuple[str, bool]:
    """The complete characters of some bytes, and whether all bytes are in them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(raw)
    return text, not decoder.getstate()[0]
