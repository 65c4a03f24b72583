"""Answers of the target as it will run: the native engine writes them, several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import BranchingSession, run_text
from edgeinfer.backends.checks import common_length
from edgeinfer.engine import Engine
from edgeinfer.errors import InvalidArgument
from edgeinfer.models import ModelSpec
from edgeinfer.sampling import SamplingParams, sample
from edgeinfer.training.corpus import Request, Text
from edgeinfer.training.features import Halves, Taps, as_halves
from edgeinfer.types import Logits, LogitsRows, Output

MIN_ANSWER = 8
ROWS = 3072  # of a tree of answers: with more of them side by side, attention passes over more that is not theirs

Asked = tuple[int, list[int]]  # the number of a request, and the tokens of what it asks
Answer = tuple[list[int], Halves | None]  # its tokens, and the rows of the prompt and it


class NativeAuthor:
    """Writes the answers as branches of one tree: a pass of several tokens takes little longer than one of one, and
    every answer has the tokens that it would have alone.

    context, max_tokens: of prompt and answer, and of an answer. Prompts that leave no room for an answer of 8 tokens
    are left out.  engine: runs on the native backend; its n_ctx and n_batch are what a tree may hold, see `tree_rows`.
    taps: the rows that texts come with (Text.rows), those that NativeRecorder would record; None for texts without.
    """

    n_prompts = 16

    def __init__(self, engine: Engine, context: int, max_tokens: int, taps: Taps | None = None) -> None:
        if engine.backend != "native":
            raise InvalidArgument(
                f"{engine.name} must run on the native engine to be asked: it runs on {engine.backend}"
            )
        self._session = cast(BranchingSession, engine.session)
        self._engine = engine
        self._context = context
        self._max_tokens = max_tokens
        self._taps = taps

    def write(self, requests: Sequence[Request]) -> list[Text]:
        """See Author.write. A text for each turn of a request, with all that went before it."""
        messages: list[list[dict[str, str]]] = [[] for _ in requests]
        texts: list[list[Text]] = [[] for _ in requests]
        for turn in range(max((len(request.prompt.turns) for request in requests), default=0)):
            asked: list[Asked] = []
            for number, request in enumerate(requests):
                if len(texts[number]) == turn < len(request.prompt.turns):  # no turn before was left out
                    messages[number].append({"role": "user", "content": request.prompt.turns[turn]})
                    prompt = encode(self._engine, messages[number])
                    if len(prompt) + MIN_ANSWER <= self._context:
                        asked.append((number, prompt))
            for group in self._groups(asked):
                answers = self._answers(
                    [prompt for _, prompt in group], [requests[number].params for number, _ in group]
                )
                for (number, prompt), (answer, rows) in zip(group, answers, strict=True):
                    tokens = np.array(prompt + answer, dtype=np.int32)
                    texts[number].append(Text(tokens, len(prompt), requests[number].params.is_greedy, rows))
                    content = self._engine.output_format.answer(prompt, answer)
                    messages[number].append({"role": "assistant", "content": content})
        return [text for each in texts for text in each]

    def _groups(self, asked: Sequence[Asked]) -> Iterator[list[Asked]]:
        """Those that fit into one tree, however long their answers are."""
        group: list[Asked] = []
        for each in asked:
            if group and sum(len(prompt) + self._max_tokens for _, prompt in [*group, each]) > self._session.n_batch:
                yield group
                group = []
            group.append(each)
        if group:
            yield group

    def _answers(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        """The tokens that follow each prompt, the one that ends it included, and the rows of the whole text."""
        n_shared = min(common_length(prompts[0], prompt[:-1]) for prompt in prompts)
        shared = self._commit(prompts[0][:n_shared])
        texts, last, n_rows = [list(prompt) for prompt in prompts], [-1] * len(prompts), 0  # last: row of each text
        rows = [list(shared) for _ in prompts]
        for number, prompt in enumerate(prompts):
            own = prompt[n_shared:]
            out = self._pass(own, [-1, *range(n_rows, n_rows + len(own) - 1)], n_rows, logits="last")
            rows[number] += _features(out)
            n_rows += len(own)
            last[number] = n_rows - 1
            texts[number].append(self._drawn(out.logits[0], texts[number], params[number]))
        while writing := [n for n, text in enumerate(texts) if not self._has_ended(text, len(prompts[n]))]:
            out = self._pass([texts[n][-1] for n in writing], [last[n] for n in writing], n_rows, logits="all")
            for row, number in enumerate(writing):
                last[number] = n_rows + row
                rows[number] += [each[row : row + 1] for each in _features(out)]
                texts[number].append(self._drawn(out.logits[row], texts[number], params[number]))
            n_rows += len(writing)
        if self._taps is None:
            return [(text[len(prompt) :], None) for text, prompt in zip(texts, prompts, strict=True)]
        ends = _features(self._pass([text[-1] for text in texts], last, n_rows, logits=()))[0]
        wholes = [as_halves(np.concatenate([*parts, ends[n : n + 1]])) for n, parts in enumerate(rows)]
        return [(text[len(prompt) :], whole) for text, prompt, whole in zip(texts, prompts, wholes, strict=True)]

    def _pass(self, tokens: list[int], parents: list[int], n_pending: int, logits: LogitsRows) -> Output:
        return self._session.forward(tokens, parents, n_pending=n_pending, logits=logits, hidden=self._hidden)

    @property
    def _hidden(self) -> Taps:
        return False if self._taps is None else self._taps

    def _commit(self, tokens: list[int]) -> list[NDArray[np.float32]]:
        """Make tokens the committed text; gives their rows, if these are wanted."""
        if self._taps is not None:
            self._session.truncate(0)  # rows come of tokens that are passed, not of those that are reused
        n_known = 0 if self._taps is not None else self._session.reuse_prefix(tokens)
        if n_known == len(tokens):
            return []
        return _features(run_text(self._session, tokens[n_known:], logits="none", taps=self._hidden))

    def _drawn(self, logits: Logits, text: list[int], params: SamplingParams) -> int:
        """The token behind a text; of those that end it the one that all texts end with."""
        tokenizer = self._engine.tokenizer
        token = sample(logits[: tokenizer.n_vocab], params, len(text), text)
        if token not in tokenizer.stop_ids:
            return token
        return tokenizer.eos_id if tokenizer.eos_id in tokenizer.stop_ids else min(tokenizer.stop_ids)

    def _has_ended(self, text: list[int], n_prompt: int) -> bool:
        is_full = len(text) == self._context or len(text) - n_prompt == self._max_tokens
        return is_full or text[-1] in self._engine.tokenizer.stop_ids


def _features(out: Output) -> list[NDArray[np.float32]]:
    """The rows that a pass gave, in a list of one, or none."""
    return [] if out.features is None else [out.features]


def tree_rows(spec: ModelSpec, context: int) -> int:
    """n_ctx and n_batch for an engine that writes texts of a context side by side, so that the model stays the same."""
    ropes = [layer.mixer.rope for layer in spec.layers]
    changes = any(rope is not None and rope.long is not None for rope in ropes)  # in a longer one
    return context if changes else max(context, min(ROWS, spec.n_ctx_train))


def encode(engine: Engine, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens of a conversation that the assistant is to continue."""
    return engine.template.encode(engine.tokenizer, messages, add_generation_prompt=True)
