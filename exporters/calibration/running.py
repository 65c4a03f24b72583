"""Sources and written files in the native engine: to check an export, and to measure what it depends on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Rows
from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.native.model import NativeModel
from edgeinfer.backends.native.session import NativeSession
from edgeinfer.common import devices
from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import BudgetExceeded, NumericalError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_draft_spec
from edgeinfer.models.gguf import ModelFile

Logits = NDArray[np.float32]
N_TEXTS = 16  # go through a pass together
N_BATCH = 128  # tokens of a pass: the logits of all of them are in memory


@contextmanager
def native_model(file: ModelFile, n_ctx: int, n_threads: int | None = None, beside: int = 0) -> Iterator[NativeModel]:
    """A model in the native engine, for texts of up to n_ctx tokens.

    beside: bytes that the caller takes while it has the model.
    Raises UnsupportedModel for one that the engine does not run, BudgetExceeded for one that memory has no room for. A
    NumericalError within gets the name of the file.
    """
    backend = NativeBackend(packed=False, tuned=False)
    spec, n_threads = read_draft_spec(file), n_threads or devices.default_n_threads()
    plan = backend.plan(file, spec, LoadSettings(n_ctx, n_batch=min(n_ctx, N_BATCH), n_threads=n_threads))
    n_bytes = plan.use.total + beside
    if n_bytes > (available := devices.available_memory()):
        raise BudgetExceeded(f"running it needs {human_bytes(n_bytes)}, available are {human_bytes(available)}")
    model = backend.load(file, spec, plan, Device(n_threads))
    try:
        yield model
    except NumericalError as error:
        raise NumericalError(f"{file.path}: {error}") from error
    finally:
        model.close()


def check_logits(logits: Logits) -> Logits:
    """The logits. Raises NumericalError where some are no numbers."""
    if not np.isfinite(logits).all():
        raise NumericalError(
            "its logits are not numbers, so that nothing can be compared with them or measured by them: the file is "
            "damaged or its hyper-parameters are wrong"
        )
    return logits


def logits_of(model: NativeModel, tokens: Sequence[int]) -> Logits:
    """(n, n_vocab) the logits behind each token of a text. Raises NumericalError."""
    session = model.session(len(tokens))
    rows = []
    try:
        for first in range(0, len(tokens), N_BATCH):
            piece = list(tokens[first : first + N_BATCH])
            rows.append(check_logits(session.forward(piece, logits="all").logits).copy())
            session.commit(list(range(len(piece))))
    finally:
        session.close()
    return np.concatenate(rows)


def greedy_tokens(
    model: NativeModel, prompts: Sequence[Sequence[int]], n_tokens: int, ends: Collection[int] = ()
) -> list[list[int]]:
    """The most likely tokens behind each prompt, each behind the one before: n_tokens, or up to one that ends the text.

    Some texts go through a pass together. Raises NumericalError.
    """
    answers = []
    for first in range(0, len(prompts), N_TEXTS):
        answers += _together(model, prompts[first : first + N_TEXTS], n_tokens, ends)
    return answers


def _together(
    model: NativeModel, prompts: Sequence[Sequence[int]], n_tokens: int, ends: Collection[int]
) -> list[list[int]]:
    sessions = [model.session(len(prompt) + n_tokens) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    try:
        for session, prompt, answer in zip(sessions, prompts, answers, strict=True):
            answer.append(_last(read_text(session, prompt)))
        for _ in range(n_tokens - 1):
            open_ = [n for n, answer in enumerate(answers) if answer[-1] not in ends]
            if not open_:
                break
            outs = model.forward([Rows(sessions[n], answers[n][-1:]) for n in open_])
            for n, out in zip(open_, outs, strict=True):
                sessions[n].commit([0])
                answers[n].append(_last(out.logits))
    finally:
        for session in sessions:
            session.close()
    return answers


def read_text(session: NativeSession, tokens: Sequence[int]) -> Logits:
    """(1, n_vocab) the logits behind a text, which the session has read and committed. Raises NumericalError."""
    for first in range(0, len(tokens), N_BATCH):
        piece = list(tokens[first : first + N_BATCH])
        logits = session.forward(piece).logits
        session.commit(list(range(len(piece))))
    return check_logits(logits)


def _last(logits: Logits) -> int:
    return int(check_logits(logits)[-1].argmax())
