"""The model that a drafter is chosen for: its own texts, and what its passes cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.native.model import NativeModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.calibration.prompts import HELD_OUT, PROMPTS
from edgeinfer.exporters.calibration.running import N_BATCH, greedy_tokens, logits_of
from edgeinfer.exporters.calibration.texts import ANSWER_TOKENS, answer_context, asked, texts_of_file
from edgeinfer.exporters.source import open_source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.speculation.cost import MAX_TOKENS
from edgeinfer.speculation.open import costs_of

_EVERY = 8  # prompt is answered for the texts by which losses are measured
_MOST_TEXT, _PIECES = 384, 2  # tokens of a piece of a file, and pieces
_CALIBRATION_SECONDS = 2.0


@dataclass(frozen=True)
class TargetText:
    """A text of the target. rows: consecutive ones.  chosen: (n,) the target's token behind each of them."""

    tokens: Sequence[int]
    rows: Sequence[int]
    chosen: NDArray[np.int64]


@dataclass(frozen=True)
class MeasuredTarget:
    """A target in memory. verify_ms: (MAX_TOKENS + 1,) of passes by number of tokens."""

    file: ModelFile
    model: NativeModel
    verify_ms: Sequence[float]

    def texts(self, calibration: Path | None, n_tokens: int, n_least: int) -> list[TargetText]:
        """Some of the pieces of a file, or answers to built-in prompts: as many as have n_tokens together.

        n_least: rows of each, see `answers`.
        """
        if calibration is None:
            return _up_to(self.answers(PROMPTS[::_EVERY], n_least), n_tokens)
        pieces = [piece[:_MOST_TEXT] for piece in texts_of_file(calibration, self.file)[:_PIECES]]
        return _up_to([self._read(piece) for piece in pieces if len(piece) >= n_least], n_tokens)

    def held_out(self, n_least: int) -> list[TargetText]:
        """Answers to prompts that nothing else is measured on. n_least: see `answers`."""
        return self.answers(HELD_OUT, n_least)

    def answers(self, prompts: Sequence[str], n_least: int) -> list[TargetText]:
        """Prompts with the target's greedy answers, those of n_least tokens or more.

        A target that ends all of them earlier has to go on behind the end.
        """
        tokenizer = Tokenizer.from_file(self.file)
        texts = [asked(self.file, tokenizer, prompt) for prompt in prompts]
        answers = greedy_tokens(self.model, texts, ANSWER_TOKENS, tokenizer.stop_ids)
        if max(map(len, answers)) < n_least:
            answers = greedy_tokens(self.model, texts, ANSWER_TOKENS)
        return [_answered(*pair) for pair in zip(texts, answers, strict=True) if len(pair[1]) >= n_least]

    def _read(self, tokens: Sequence[int]) -> TargetText:
        """A text of somebody else, with what the target would go on with."""
        chosen = logits_of(self.model, tokens).argmax(axis=1)
        return TargetText(tokens, range(len(tokens)), chosen)


def _answered(prompt: Sequence[int], answer: Sequence[int]) -> TargetText:
    tokens = [*prompt, *answer]
    rows = range(len(prompt) - 1, len(tokens) - 1)
    return TargetText(tokens, rows, np.array(answer, dtype=np.int64))


def _up_to(texts: Sequence[TargetText], n_tokens: int) -> list[TargetText]:
    """The first texts until there are so many tokens."""
    found, n = [], 0
    for text in texts:
        if n < n_tokens:
            found.append(text)
            n += len(text.tokens)
    return found


@contextmanager
def open_target(path: Path, device: Device) -> Iterator[MeasuredTarget]:
    """A target as it runs when something drafts for it, calibrated.

    Raises UnsupportedModel, ModelFileError, BudgetExceeded.
    """
    backend = NativeBackend()
    with open_source(path) as source, model_file_of(source) as file:
        spec, n_ctx = read_spec(file), max(answer_context(file), _MOST_TEXT) + MAX_TOKENS
        plan = backend.plan(file, spec, LoadSettings(n_ctx, n_batch=N_BATCH, n_threads=device.n_threads))
        model = backend.load(file, spec, plan, device)
        try:
            session = model.session()
            costs = costs_of(file, session, plan, device, _CALIBRATION_SECONDS)
            verify_ms = list(costs.milliseconds(0))
            session.close()
            yield MeasuredTarget(file, model, verify_ms)
        finally:
            model.close()
