"""Drafts with a smaller model of another vocabulary: through text, both ways (after Timor et al., arXiv:2502.05202).

The target's tokens become text and that the draft model's tokens, piece by piece, so that only the end of a text is
read again when it goes on; what the draft model writes becomes text and the target's tokens. Control tokens are those
of the same name. Where the two cut a word differently the draft is wrong, which is all: nothing here reaches the text.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from edgeinfer.backends.base import DraftingSession, Session
from edgeinfer.backends.checks import common_length
from edgeinfer.backends.native import top_k
from edgeinfer.errors import NumericalError
from edgeinfer.models.arrays import Array
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.speculation.cost import CostModel
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.drafters.candidates import class_of
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.tree import DraftTree, no_draft

# Tokens of the target that become text together: from how many on a word's beginning ends them, and at most.
_PIECE, _LONG_PIECE = 16, 256
_LAST, _DRAWN = 10, 20  # kinds: class of the probability; the same for a word that may go on, and for drawn texts


class CrossVocabularyText:
    """A text of the target's tokens, as the draft model's.

    tokens: the draft model's.  is_whole: the text ends with a whole character; of one that does not, its beginning is
    left out of `tokens`.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target, self._draft = target, draft
        self._head = [draft.bos_id] if draft.add_bos and draft.bos_id is not None else []
        self.tokens = list(self._head)
        self.is_whole = True
        self._read: list[int] = []  # the target's tokens
        self._source: Sequence[int] = ()  # the list that they came in, which only grows
        # Where pieces end: numbers of tokens of the target and of the draft model.
        self._ends = [(0, len(self._head))]
        self._controls: dict[int, list[int]] = {}

    def update(self, text: Sequence[int]) -> int:
        """Take over a text of the target; gives how many of the first tokens are as they were."""
        read, self._read = self._read, []  # after a failure nothing is known
        grows = text is self._source and len(text) >= len(read)
        n_common, self._source = len(read) if grows else common_length(read, text), text
        if n_common == len(text) == len(read):
            self._read = read
            return len(self.tokens)
        while len(self._ends) > 1 and self._ends[-1][0] >= n_common:  # whether it was an end, the next token decides
            self._ends.pop()
        n_read, n_kept = self._ends[-1]
        before = self.tokens[n_kept:]
        del self.tokens[n_kept:]
        self._translate(text, n_read)
        self._read = list(text)
        return n_kept + common_length(before, self.tokens[n_kept:])

    def back(self, drafted: Sequence[int]) -> list[tuple[int, list[int]]]:
        """The target's tokens for what the draft model writes behind the text; with each, which of them begin in it.

        A control token may be the last of them. What is no whole character at the end is left out.
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

    def _translate(self, text: Sequence[int], n_read: int) -> None:
        """Add the tokens of a text from there on."""
        begin = n_read
        for i in range(n_read, len(text)):
            if self._target.is_control(text[i]):
                self._add_piece(text, begin, i)
                begins = i == 0 and self._target.add_bos and text[i] == self._target.bos_id
                self.tokens += [] if begins and self._head else self._control(text[i])
                begin = i + 1
                self._ends.append((begin, len(self.tokens)))
            elif i > begin and self._is_end(text, begin, i):
                self._add_piece(text, begin, i)
                begin = i
                self._ends.append((begin, len(self.tokens)))
        self.is_whole = self._add_piece(text, begin, len(text))

    def _is_end(self, text: Sequence[int], begin: int, i: int) -> bool:
        """Whether a piece may end before token i: where a word begins, all vocabularies cut."""
        piece, before = (self._target.token_bytes(id) for id in (text[i], text[i - 1]))
        if i - begin >= _LONG_PIECE:
            return not piece or not 0x80 <= piece[0] < 0xC0  # at least not within a character
        starts_word = piece[:1] == b" " and piece[1:2].isalnum() and not before[-1:].isspace()
        return i - begin >= _PIECE and starts_word

    def _add_piece(self, text: Sequence[int], first: int, last: int) -> bool:
        """Add what the target's tokens first..last - 1 are; gives whether they end with a whole character."""
        if first == last:
            return True
        raw = b"".join(map(self._target.token_bytes, text[first:last]))
        continues = first > 0 and not self._target.is_control(text[first - 1])
        if first > 0 and self._target.hides_space(text[first - 1]):
            raw = raw.removeprefix(b" ")
        piece, is_whole = _decoded(raw)
        self.tokens += self._draft.encode(piece, add_special=False, continues=continues)
        return is_whole

    def _control(self, id: int) -> list[int]:
        """The draft model's tokens for a control token: that of the same name, else its name; none for a begin."""
        if id not in self._controls:
            name = self._target.token_bytes(id).decode()
            same = self._draft.token_id(name)
            if same is None and id != self._target.bos_id:
                self._controls[id] = self._draft.encode(name, add_special=False)
            else:
                self._controls[id] = [] if same is None else [same]
        return self._controls[id]


class CrossVocabularyDrafter(ModelDrafter):
    """A draft model whose tokens are not the target's."""

    def __init__(self, session: Session, target: Tokenizer, own: Tokenizer, costs: CostModel) -> None:
        super().__init__(session, own.n_vocab, costs)
        self._own = own
        self._translation = CrossVocabularyText(target, own)

    def cost(self, context: Context) -> tuple[float, float]:
        """See CostlyDrafter. A token of the target takes as many of the draft model's as in the text so far."""
        text, n_unverified = self._text(context)
        if not 0 < len(text) < self.session.n_ctx:
            return math.inf, 0.0
        one, before = self._cost_of(text, n_unverified)
        return one * len(text) / max(1, len(context.tokens)), before

    def propose(self, context: Context, limit: int) -> DraftTree:
        """A chain as long as it pays."""
        text, n_unverified = self._text(context)
        if not text or not self._translation.is_whole:
            return no_draft()
        unread = text[self._align(text, n_unverified) :]
        drafted: list[int] = []
        p: list[float] = []
        path_probability: list[float] = []
        room = min(limit, self.session.n_ctx - len(text))
        while len(drafted) < room and context.acceptance.should_extend(path_probability):
            token, of_token = self._likeliest(unread)
            drafted.append(token)
            p.append(of_token)
            bucket = class_of(of_token) + (0 if context.is_greedy else _DRAWN)
            probability = context.acceptance.probability(bucket, len(path_probability), of_token)
            path_probability.append((path_probability[-1] if path_probability else 1.0) * probability)
            unread = [token]
            if self._own.is_control(token):
                break
        return self._tree(drafted, p, limit, context.is_greedy)

    def _text(self, context: Context) -> tuple[list[int], int]:
        """See ModelDrafter. What comes otherwise is noticed when it comes."""
        n_same = self._translation.update(context.tokens)
        self._n_agreed = min(self._n_agreed, n_same)
        return self._translation.tokens, 0

    def _likeliest(self, tokens: Sequence[int]) -> tuple[int, float]:
        """Read and keep tokens; the likeliest to follow, and its probability."""
        ((token, p),) = top_k(self._forward(tokens), 1)
        if not math.isfinite(p):
            raise NumericalError("the draft model's logits are no numbers")
        return token, p

    def _tree(self, drafted: Sequence[int], p: Sequence[float], limit: int, is_greedy: bool) -> DraftTree:
        """The drafted tokens as a chain of the target's."""
        nodes = self._translation.back(drafted)[:limit]
        is_open = bool(drafted) and not self._own.is_control(drafted[-1])
        probabilities = [math.prod(p[i] for i in begun) for _, begun in nodes]
        buckets = [class_of(probability) + (0 if is_greedy else _DRAWN) for probability in probabilities]
        if nodes and is_open:
            buckets[-1] += _LAST
        return DraftTree([id for id, _ in nodes], list(range(-1, len(nodes) - 1)), probabilities, buckets)


def model_drafter(
    session: Session,
    draft: ModelFile,
    target: ModelFile,
    n_vocab: int,
    costs: CostModel,
    device_drafting: DeviceDrafting[DraftingSession] | None = None,
) -> ModelDrafter:
    """The drafter of a draft model that is open, by its vocabulary. n_vocab: tokens that the target has.

    chains: see ModelDrafter.
    """
    if has_vocabulary_of(draft, target, n_vocab):
        return ModelDrafter(session, n_vocab, costs, device_drafting)
    return CrossVocabularyDrafter(session, Tokenizer.from_file(target), Tokenizer.from_file(draft), costs)


def check_vocabulary(draft: ModelFile, target: ModelFile, n_vocab: int) -> None:
    """Raises UnsupportedModel, TokenizerError where nothing can be translated."""
    if not has_vocabulary_of(draft, target, n_vocab):
        Tokenizer.from_file(draft)


def has_vocabulary_of(draft: ModelFile, target: ModelFile, n_vocab: int) -> bool:
    """Whether the target's n_vocab tokens are the same in a draft model, but for padding at the end."""
    own, wanted = (file.metadata.get("tokenizer.ggml.tokens") for file in (draft, target))
    if not isinstance(own, (Array, list)) or not isinstance(wanted, (Array, list)):
        return False
    n = min(len(own), n_vocab)
    return own[:n] == wanted[:n] and all(str(token).startswith("[PAD") for token in wanted[n:n_vocab])


def _decoded(raw: bytes) -> tuple[str, bool]:
    """The whole characters of some bytes, and whether that is all."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(raw)
    return text, not decoder.getstate()[0]
