"""Where in an answer the constraint begins: behind the reasoning, if the model reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgeinfer.constraints.mask import Mask
from edgeinfer.models.reasoning import OutputParser
from edgeinfer.models.tokenizer import Tokenizer


class Place(NamedTuple):
    """Where an answer is.

    start: the number of its tokens before the constraint, None where it has not begun.  also: tokens that may follow
    beside those of the constraint, None for no others; all that may follow, before the constraint.
    """

    start: int | None
    also: Mask | None = None


class Beginning:
    """Follows the tokens of one answer until the constraint begins.

    An answer may begin with the mark of reasoning where the vocabulary has it as a token; no token ends the text before
    the answer. One token of line ends may stand between the reasoning and the answer; it belongs to neither.
    """

    def __init__(self, output: OutputParser, tokenizer: Tokenizer) -> None:
        """output: as for this answer; it is not changed."""
        self._output = output
        self._tokenizer = tokenizer
        self._endless_mask = ~Mask.of(tokenizer.stop_ids, tokenizer.n_vocab)
        self._line_end_mask: Mask | None = None  # made when it is needed
        self._restart()

    def _restart(self) -> None:
        self._parser = self._output.anew()
        self._seen: list[int] = []
        openings = self._parser.opening_ids
        first = Place(0, Mask.of(openings, self._tokenizer.n_vocab) if openings else None)
        self._place = self._before() if self._parser.precedes_answer else first

    def anew(self) -> Beginning:
        """The same before the first token of the answer."""
        return Beginning(self._output, self._tokenizer)

    def place(self, tokens: Sequence[int]) -> Place:
        """Where the answer is after these tokens."""
        n_seen = len(self._seen)
        if list(tokens[:n_seen]) != self._seen:
            self._restart()
            n_seen = 0
        for token in tokens[n_seen:]:
            if self._place.start is not None and self._place.also is None:
                break  # all further ones belong to the constraint
            self._push(token)
        return self._place

    def _push(self, token: int) -> None:
        self._seen.append(token)
        start, also = self._place
        if start is not None and (also is None or not also.allows(token)):
            self._place = Place(start)
        elif start is not None and also is self._line_end_mask:
            self._place = Place(len(self._seen))
        else:
            self._parser.push(token)
            is_before = self._parser.precedes_answer
            self._place = self._before() if is_before else Place(len(self._seen), self._line_ends())

    def _before(self) -> Place:
        next_ids, text = self._parser.next_ids, self._parser.next_text.encode()
        if text:
            return Place(None, self._mask_of(lambda piece: text.startswith(piece) or piece.startswith(text)))
        return Place(None, Mask.of(next_ids, self._tokenizer.n_vocab) if next_ids else self._endless_mask)

    def _line_ends(self) -> Mask:
        if self._line_end_mask is None:
            self._line_end_mask = self._mask_of(lambda piece: not piece.strip(b"\r\n"))
        return self._line_end_mask

    def _mask_of(self, fits: Callable[[bytes], bool]) -> Mask:
        """The ordinary tokens whose bytes are such."""
        n_vocab = self._tokenizer.n_vocab
        pieces = ((id, self._tokenizer.token_bytes(id)) for id in range(n_vocab))
        return Mask.of((id for id, piece in pieces if piece and fits(piece)), n_vocab)
