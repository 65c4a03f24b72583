"""Constraints: read once for a grammar and a vocabulary, and followed along each text."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice, takewhile
from typing import Any

from edgeinfer.common.errors import ConstraintError, InvalidConstraint
from edgeinfer.common.types import Logits
from edgeinfer.constraints.beginning import Beginning, Place
from edgeinfer.constraints.compiling import MAX_SECONDS, WORKER, in_time
from edgeinfer.constraints.library import one_line, open_library, open_matcher
from edgeinfer.constraints.mask import Mask
from edgeinfer.constraints.matching import LookAhead, MatcherPath
from edgeinfer.constraints.memory import Room
from edgeinfer.constraints.options import Wanted
from edgeinfer.constraints.refusals import with_place
from edgeinfer.constraints.values import value_of
from edgeinfer.constraints.vocabulary import end_ids_of, vocabulary_of
from edgeinfer.models.reasoning import OutputParser
from edgeinfer.models.tokenizer import Tokenizer

FEW = 512  # tokens that may follow: white space and brackets in all their spellings are some hundred
_MOST_HABITS = 8192
_MOST_KEPT = 16  # constraints that a Constraints keeps
_REASONS = {  # by Completion.finish_reason
    "stop": "a stop string ended it",
    "length": "max_tokens or the end of the context cut it (finish_reason length)",
    "repetition": "it only repeated itself (loop_guard)",
    "interrupted": "it was interrupted",
}


class Constraints:
    """The constraints of one tokeniser, each of which is read once. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, room: int | None = None) -> None:
        """room: bytes that a budget leaves for constraints, None without a budget."""
        self._tokenizer = tokenizer
        self._room = Room(room, tokenizer.n_vocab)
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[Wanted, Constraint] = OrderedDict()

    @cached_property
    def _vocabulary(self) -> Any:
        return vocabulary_of(self._tokenizer)

    def read(self, wanted: Wanted) -> Constraint:
        """The constraint.

        Raises InvalidConstraint, BudgetExceeded where there is no room for it, BackendUnavailable without llguidance.
        """
        found = self._known(wanted)
        if found is not None:
            return found
        self._room.check(len(wanted.source), _TITLES[wanted.name])
        open_library()
        with self._reading:  # one at a time; who wants one that is known does not wait
            found = self._known(wanted)
            if found is None:
                self._make_room(wanted)
                found = self._read(wanted)
                with self._lock:
                    self._kept[wanted] = found
        return found

    @property
    def planned_bytes(self) -> int:
        """Memory of what is kept now, by its estimate; 0 before the first constraint."""
        with self._lock:
            return self._room.planned([len(wanted.source) for wanted in self._kept])

    def _make_room(self, wanted: Wanted) -> None:
        """Forget those that were not used for the longest time; texts that run with one keep it to their end."""
        with self._lock:
            while self._kept:
                sizes = [len(each.source) for each in (wanted, *self._kept)]
                if len(sizes) <= _MOST_KEPT and self._room.has_room(sizes):
                    break
                self._kept.popitem(last=False)

    def _known(self, wanted: Wanted) -> Constraint | None:
        with self._lock:
            found = self._kept.get(wanted)
            if found is not None:
                self._kept.move_to_end(wanted)
            return found

    def _read(self, wanted: Wanted) -> Constraint:
        end_ids_of(self._tokenizer)  # raises where there are none
        vocabulary = self._vocabulary
        try:
            WORKER.start()
            deadline = time.monotonic() + MAX_SECONDS
            grammar = WORKER.grammar(wanted.form, wanted.source, deadline)
            return in_time(deadline, lambda: Constraint(grammar, vocabulary, self._tokenizer))
        except InvalidConstraint as error:
            message = with_place(str(error), wanted.source) if wanted.form == "schema" else str(error)
            raise InvalidConstraint(f"{_TITLES[wanted.name]} cannot be used: {message}") from None


_TITLES = {
    "schema": "the schema",
    "json": "json",
    "regex": "the regular expression",
    "grammar": "the grammar",
    "choices": "the choices",
    "tools": "the tools",
}


class Constraint:
    """A grammar with a vocabulary. Thread-safe."""

    def __init__(self, grammar: str, vocabulary: Any, tokenizer: Tokenizer) -> None:
        """vocabulary: the LLTokenizer of the tokeniser. Raises InvalidConstraint if no text is of this grammar."""
        self.tokenizer = tokenizer
        self.n_vocab = tokenizer.n_vocab
        self.end_mask = Mask.of(end_ids_of(tokenizer), self.n_vocab)
        self._grammar, self._vocabulary = grammar, vocabulary
        self._habits: dict[int, int] = {}
        self._matcher = open_matcher(vocabulary, grammar)
        if self._matcher.is_error():
            raise InvalidConstraint(one_line(self._matcher.get_error()))
        # The first mask takes longer than the others, and shows that some text exists.
        first = self._matcher.deep_copy()
        bits = first.compute_bitmask()
        if not any(bits) and first.stop_reason() in ("NoExtension", "NoExtensionBias"):
            raise InvalidConstraint("there is no text that it allows")
        if not any(bits) or first.is_error():
            raise InvalidConstraint(one_line(first.get_error()))

    def state(self, wanted: Wanted, n_prompt: int, output: OutputParser | None = None) -> ConstraintState:
        """The constraint along a text whose first n_prompt tokens are no part of the answer.

        output: what splits the answer, as before its first token: the constraint begins behind the reasoning. None
        where the answer has no parts.
        """
        return ConstraintState(self, wanted, n_prompt, None if output is None else Beginning(output, self.tokenizer))

    def note(self, mask: Mask, token: int) -> None:
        """Note what was drawn under a mask of few tokens: white space and brackets mostly, in which a model has habits.

        They are guesses for drafts, and change no text.
        """
        if 1 < mask.count <= FEW:
            if len(self._habits) >= _MOST_HABITS:
                self._habits.clear()
            self._habits[mask.key] = token

    def habit(self, mask: Mask) -> int | None:
        """The token that was drawn the last time under this mask, None for nothing known."""
        return self._habits.get(mask.key) if mask.count <= FEW else None

    def matcher(self) -> Any:
        """An LLMatcher before the first token. It shares what it learns about the grammar with the others."""
        return self._matcher.deep_copy()

    def new_matcher(self) -> Any:
        """An LLMatcher that shares nothing."""
        return open_matcher(self._vocabulary, self._grammar)


class ConstraintState:
    """A constraint along one text. Not thread-safe, but for `result`.

    All its answers are functions of the tokens of the text that it is asked about; texts may be asked about in any
    order, but one that continues the last one is the cheapest.
    """

    def __init__(
        self, constraint: Constraint, wanted: Wanted, n_prompt: int, beginning: Beginning | None = None
    ) -> None:
        """n_prompt: tokens of the text before the answer.  beginning: None where the constraint begins with it."""
        self._constraint = constraint
        self._wanted = wanted
        self._n_prompt = n_prompt
        self._beginning = beginning
        self._path = MatcherPath(constraint)
        self._ahead = LookAhead(self._path)

    def mask_at(self, text: Sequence[int]) -> Mask:
        """The tokens that may follow a text, prompt included. Raises ConstraintError where that cannot be told."""
        answer = list(text[self._n_prompt :])
        start, also = self._place(answer)
        if start is None:
            return also or self._constraint.end_mask
        own = answer[start:]
        mask = self._ahead.known(own) or self._path.mask(own)
        return mask if also is None else mask | also

    def draw(self, logits: Logits, text: Sequence[int], choose: Callable[[Logits], int]) -> int:
        """The token after a text: what `choose` takes of the logits (n_vocab,), where more than one may follow.

        The logits of all others are -inf. Raises ConstraintError as `mask_at`.
        """
        mask = self.mask_at(text)
        token = choose(mask.apply(logits)) if mask.only is None else mask.only
        self._constraint.note(mask, token)
        return token

    def forced(self, text: Sequence[int], limit: int) -> list[int]:
        """The tokens that follow a text because each is the only one that may, at most limit and without an end.

        Raises ConstraintError as `mask_at`.
        """
        found = takewhile(lambda step: step[1] == 1, self.likely(text))
        return [token for token, _ in islice(found, limit)]

    def likely(self, text: Sequence[int]) -> Iterator[tuple[int, int]]:
        """What will probably follow a text: each token with the number of those that may stand in its place.

        Where there is one it is certain; where there are few, it is the one that was drawn the last time. Ends before
        an end, and where many tokens may follow. Raises ConstraintError as `mask_at`.
        """
        is_settled = self._look_from(text)
        path: tuple[int, ...] = ()
        while is_settled or not path:
            mask = self._ahead.mask(path) if is_settled else self.mask_at(text)
            token = self._constraint.habit(mask) if mask.only is None else mask.only
            if token is None or self._constraint.end_mask.allows(token):
                return
            yield token, mask.count
            path = (*path, token)

    def kept(self, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The nodes of a draft tree after a text that may follow, each with its parent, in their order.

        tokens, parents: as in DraftTree. Where the constraint has not begun, all nodes after the first ones are kept.
        Raises ConstraintError as `mask_at`.
        """
        is_settled = self._look_from(text)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        kept: list[int] = []
        waiting: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
        while waiting:  # branch after branch, so that the matcher goes back as rarely as possible
            above, path = waiting.pop()
            nodes = children.get(above, [])
            if nodes and (is_settled or not path):
                mask = self._ahead.mask(path) if is_settled else self.mask_at(text)
                nodes = [node for node in nodes if mask.allows(tokens[node])]
            kept += nodes
            waiting += [(node, (*path, tokens[node])) for node in reversed(nodes)]
        return sorted(kept)

    def is_complete(self, text: Sequence[int]) -> bool:
        """Whether nothing but an end may follow a text. Raises ConstraintError as `mask_at`."""
        return self.mask_at(text).is_within(self._constraint.end_mask)

    def result(self, answer: Sequence[int], reason: str) -> tuple[object, str | None]:
        """(value of an answer, None), or (None, why there is none). Callable while another thread draws.

        answer: its tokens without the one that ended it.  reason: why it ended, as Completion has it.
        """
        if not self._wanted.has_value:
            return None, None
        why = _REASONS.get(reason, f"it ended ({reason})")
        start = 0 if self._beginning is None else self._beginning.anew().place(answer).start
        if start is None:
            return None, f"the answer had not begun when {why}"
        own, path = list(answer[start:]), MatcherPath(self._constraint)
        try:
            mask = path.mask(own)
        except ConstraintError as error:
            return None, str(error)
        is_whole = path.is_accepting if reason == "stop" else mask.is_within(self._constraint.end_mask)
        if not is_whole:
            return None, f"the answer was not complete when {why}"
        return value_of(self._constraint.tokenizer.decode(own, skip_special=True), self._wanted)

    def _place(self, answer: Sequence[int]) -> Place:
        return Place(0) if self._beginning is None else self._beginning.place(answer)

    def _look_from(self, text: Sequence[int]) -> bool:
        """Look ahead from this text; gives whether the constraint has begun, so that all that follows belongs to it."""
        answer = list(text[self._n_prompt :])
        start, also = self._place(answer)
        if start is None or also is not None:
            return False
        self._ahead.start(answer[start:])
        return True
