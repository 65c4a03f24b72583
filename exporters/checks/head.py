"""The check of a written draft head: what it drafts beside its target, against what its source drafts there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.native import load_assistant, load_head, plan_head
from edgeinfer.backends.native.model import NativeModel
from edgeinfer.common import devices
from edgeinfer.common.errors import BudgetExceeded, NumericalError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, Features, MemoryPlan, Output
from edgeinfer.exporters.calibration.running import N_BATCH, Logits, check_logits, native_model
from edgeinfer.exporters.calibration.texts import check_tokens
from edgeinfer.exporters.checks.comparison import N_TEXT, Checked
from edgeinfer.exporters.divergence import distance
from edgeinfer.exporters.source import Source, open_source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import HeadSpec
from edgeinfer.models.gguf import ModelFile


@dataclass(frozen=True)
class Drafted:
    """What a head expects along a text."""

    logits: Logits  # (n - 1, n_logits), after tokens[1:]
    accepted: float  # share of its most likely tokens that are the target's too
    features: Features  # (n - 1, n_embd), what it was fed with


def compare_heads(source: Source, written: Path, target: Path | None) -> Checked:
    """Run a written head and its source beside their target.

    Raises UnsupportedModel for another target, NumericalError where target, source or file give no numbers;
    BudgetExceeded of running them becomes words.
    """
    if target is None:
        return Checked("not run: --target names the model that the head is for", {"checked": False})
    with open_source(target) as beside, model_file_of(beside) as file, model_file_of(source) as head:
        tokens = check_tokens(file)[:N_TEXT]
        try:
            with native_model(file, len(tokens)) as model, ModelFile.open(written) as other:
                expected, found = (drafted(each, file, model, tokens) for each in (head, other))
        except BudgetExceeded as error:
            return Checked(f"not run: {error}", {"checked": False})
    apart = distance(expected.logits, found.logits)
    sentence = (
        f"{apart.in_words(len(expected.logits))}; {found.accepted:.1%} of its tokens are the target's, of the "
        f"source's {expected.accepted:.1%}"
    )
    facts = {"kl": apart.divergence, "top_1_agreement": apart.agreement, "accepted": found.accepted}
    return Checked(sentence, {"checked": True, **{key: round(value, 6) for key, value in facts.items()}})


def drafted(head: ModelFile, target: ModelFile, model: NativeModel, tokens: list[int]) -> Drafted:
    """What a head expects along a text.  model: of the target, with room for the text.

    Raises UnsupportedModel for a head of another target.
    """
    spec = read_head_beside(head, target, read_spec(target))
    n_threads, n = devices.default_n_threads(), len(tokens) - 1
    plan = plan_head(head, spec, LoadSettings(len(tokens), n_batch=N_BATCH, n_threads=n_threads))
    if spec.reads_target:
        return _drafted_while_reading(head, spec, model, tokens, plan)
    rows, chosen = target_rows(model, tokens, spec)
    opened = load_head(head, spec, model, plan, Device(n_threads))
    found = []
    try:
        session, features = opened.session(), opened.combine(rows[:n])
        for first in range(0, n, plan.n_batch):
            last = min(first + plan.n_batch, n)
            found.append(
                session.forward(tokens[first + 1 : last + 1], features[first:last], logits="all").logits.copy()
            )
            session.commit(range(last - first) if spec.decoder.n_layers else ())
    finally:
        opened.close()
    logits = _numbers(np.concatenate(found), head)
    return Drafted(logits, float(np.mean(spec.draft_vocab[logits.argmax(axis=1)] == chosen[1:])), features)


def _drafted_while_reading(
    head: ModelFile, spec: HeadSpec, model: NativeModel, tokens: Sequence[int], plan: MemoryPlan
) -> Drafted:
    """The same of a head that attends to what its target has read, token by token."""
    opened = load_assistant(head, spec, model, plan, Device(devices.default_n_threads()))
    session, reader = model.session(len(tokens)), opened.session()
    found, chosen, features = [], [], []
    try:
        reader.follow(session)
        for token, after in pairwise(tokens):
            out = session.forward([token], hidden=True)
            assert out.hidden is not None
            session.commit([0])
            features.append(out.hidden[0, 0].copy())
            found.append(_of_all_tokens(reader.forward([after], out.hidden[0]), spec))
            chosen.append(int(check_logits(out.logits)[0].argmax()))
        chosen.append(int(check_logits(session.forward(tokens[-1:]).logits)[0].argmax()))
    finally:
        session.close()
        opened.close()
    logits = _numbers(np.stack(found), head)
    return Drafted(logits, float(np.mean(logits.argmax(axis=1) == chosen[1:])), np.stack(features))


def _of_all_tokens(out: Output, spec: HeadSpec) -> NDArray[np.float32]:
    """(n_vocab,) logits of a row; tokens of clusters that were not looked at come after all others."""
    row: NDArray[np.float32] = out.logits[0]
    if out.tokens is None:
        return row.copy()
    logits = np.full(spec.decoder.n_vocab, row.min() - 1, dtype=np.float32)
    logits[out.tokens[0]] = row
    return logits


def _numbers(logits: Logits, head: ModelFile) -> Logits:
    """Raises NumericalError for logits that are none."""
    if not np.isfinite(logits).all():
        raise NumericalError(f"what {head.path} drafts has logits that are not numbers: it is damaged")
    return logits


def target_rows(model: NativeModel, tokens: Sequence[int], spec: HeadSpec) -> tuple[Features, NDArray[np.int64]]:
    """The target's hidden rows that a head is fed by, and its most likely tokens, (n,) after each token."""
    session, rows, chosen = model.session(len(tokens)), [], []
    try:
        for first in range(0, len(tokens), N_BATCH):
            piece = list(tokens[first : first + N_BATCH])
            out = session.forward(piece, logits="all", hidden=spec.taps)
            assert out.features is not None
            rows.append(out.features.copy())
            chosen.append(check_logits(out.logits).argmax(axis=1))
            session.commit(range(len(piece)))
    finally:
        session.close()
    return np.concatenate(rows), np.concatenate(chosen)
