"""What `--type auto` asks for, and what it gives: types, what is printed of them, keys and facts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeinfer import devices
from edgeinfer.arguments import human_bytes
from edgeinfer.errors import BudgetExceeded, InvalidArgument, UnsupportedModel
from edgeinfer.exporters.auto.candidates import Subject, subjects_of
from edgeinfer.exporters.auto.divergence import Distance
from edgeinfer.exporters.auto.rounding import Importance
from edgeinfer.exporters.auto.search import Limits, Mix, Search
from edgeinfer.exporters.auto.windows import CalibrationText, Window, windows_of
from edgeinfer.exporters.calibration.imatrix import Imatrix
from edgeinfer.exporters.request import Progress, Request, TypeChoice
from edgeinfer.exporters.source import Source
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import MetadataValue, ModelFile
from edgeinfer.types import Device

_WINDOW_TOKENS, _ROWS = 384, 192  # of a pass in which losses are measured, and its logits
_CHECK_WINDOWS = 2  # of other texts, in which the choice is compared with the source
_SHOWN = (1, 4, 8)  # tokens of the passes whose times are told
_COST = re.compile(r"verify:(\d+)(?::([\d.]+)ms)?")


def choose_types(
    source: Source, request: Request, imatrix: Imatrix | None, progress: Progress = lambda share: None
) -> TypeChoice:
    """The types with the least measured loss that fit what a request says.

    What is measured is kept in OUT.auto.jsonl, so that a second call with the same request measures nothing. Raises
    InvalidArgument, UnsupportedModel, BudgetExceeded, ModelFileError.
    """
    from edgeinfer.exporters.calibration.running import model_file_of

    with model_file_of(source) as file:
        spec = read_spec(file)
        texts = _texts(file, request.calibration)
    subjects = subjects_of(source, spec)
    if not subjects:
        raise UnsupportedModel(f"{source.path}: --type auto needs weights in F32, F16 or BF16: there are none")
    importance = importance_by_tensor(subjects, imatrix)
    limits = limits_of(request, source, subjects)
    device = Device(devices.default_n_threads())
    windows, others = _split(texts)
    state = request.out.with_name(f"{request.out.name}.auto.jsonl")
    search = Search(source, subjects, importance, windows, device, state=state)
    try:
        search.measure(lambda share: progress(0.8 * share))
        mix = search.refine(limits, lambda share: progress(0.8 + 0.1 * share))
    finally:
        search.close()
    found = search.compare([mix.types], others)[0]
    return told(search, subjects, mix, found, limits)


def limits_of(request: Request, source: Source, subjects: Sequence[Subject]) -> Limits:
    """The limits of a request: its bytes without those of the tensors that keep their type.

    Raises InvalidArgument, BudgetExceeded.
    """
    if request.size is None:
        raise InvalidArgument("--type auto needs --size, the most bytes of the weights, or --fit")
    chosen = {subject.name for subject in subjects}
    kept = sum(each.type.n_bytes(math.prod(each.shape)) for each in source.tensors if each.name not in chosen)
    least = kept + sum(subject.n_bytes(subject.formats[0]) for subject in subjects)
    if request.size < least:
        raise BudgetExceeded(
            f"{source.path}: --size must be at least {human_bytes(least)}, which the smallest formats take: found "
            f"{human_bytes(request.size)}"
        )
    n_tokens, seconds = parse_cost(request.cost)
    return Limits(request.size - kept, n_tokens, seconds)


def parse_cost(cost: str | None) -> tuple[int, float | None]:
    """The tokens of the pass whose time counts, and the seconds that its products may take; see Limits.

    "verify:4", which is not to be slower than uniform formats of that size, or "verify:4:12.5ms". Without either, time
    does not count. Raises InvalidArgument.
    """
    if cost is None:
        return 1, math.inf
    found = _COST.fullmatch(cost)
    if found is None or not 1 <= int(found[1]) <= 32:
        raise InvalidArgument(
            f"--cost must be verify:N with N from 1 to 32, or verify:N:MSms, such as verify:4 or verify:4:12.5ms: "
            f"found {cost}"
        )
    return int(found[1]), None if found[2] is None else 1e-3 * float(found[2])


def told(search: Search, subjects: Sequence[Subject], mix: Mix, found: Distance, limits: Limits) -> TypeChoice:
    """What is printed, written into the file and into the manifest of a mix."""
    shown = sorted({*_SHOWN, limits.n_tokens})
    milliseconds = {n: 1e3 * search.seconds(mix.types, n) for n in shown}
    counts = Counter(type.name for type in mix.types.values())
    times = ", ".join(f"{n} {'token' if n == 1 else 'tokens'} {ms:.2f} ms" for n, ms in milliseconds.items())
    notes = [
        f"auto: KL {found.divergence:.4f} measured on other texts, {mix.predicted:.4f} predicted; top-1 agreement "
        f"{100 * found.agreement:.1f} %",
        f"auto: {human_bytes(mix.n_bytes)} of {human_bytes(limits.n_bytes)}; products of a pass: {times}",
    ]
    facts: dict[str, Any] = {
        "predicted_kl": mix.predicted,
        "measured_kl": found.divergence,
        "top1_agreement": found.agreement,
        "n_bytes": mix.n_bytes,
        "milliseconds": {str(n): ms for n, ms in milliseconds.items()},
        "tensors": {subject.name: mix.types[subject.name].name for subject in subjects},
    }
    keys: dict[str, MetadataValue] = {
        "edgeinfer.export.type": "auto",
        "edgeinfer.export.kl": float(found.divergence),
        "edgeinfer.export.top1_agreement": float(found.agreement),
        "edgeinfer.export.verify_tokens": limits.n_tokens,
        "edgeinfer.export.formats": [f"{name} {count}" for name, count in sorted(counts.items())],
    }
    return TypeChoice(mix.types, notes, {"auto": facts}, keys)


def _texts(file: ModelFile, calibration: Path | None) -> list[CalibrationText]:
    """The texts of a file, or answers of the model to prompts of our own."""
    from edgeinfer.exporters.calibration.running import native_model
    from edgeinfer.exporters.calibration.texts import answer_context, own_answers, texts_of_file

    if calibration is not None:
        return [CalibrationText(tokens) for tokens in texts_of_file(calibration, file)]
    with native_model(file, answer_context(file)) as model:
        return [CalibrationText(tokens) for tokens in own_answers(model, file)]


def _split(texts: Sequence[CalibrationText]) -> tuple[list[Window], list[Window]]:
    """The window in which losses are measured, and windows of other texts. Of a single text, both are the same."""
    first = windows_of(texts, _WINDOW_TOKENS, 1, _ROWS)
    n_read, n_used = 0, 0
    for text in texts:
        if n_read >= len(first[0].tokens):
            break
        n_read, n_used = n_read + len(text.tokens), n_used + 1
    return first, windows_of(texts[n_used:], _WINDOW_TOKENS, _CHECK_WINDOWS, _ROWS) or first


def importance_by_tensor(subjects: Sequence[Subject], imatrix: Imatrix | None) -> Importance:
    """Mean squares of the columns of each tensor that the importance matrix has."""
    if imatrix is None:
        return {}
    found = {}
    for subject in subjects:
        means = imatrix.means(subject.name, subject.n_matrices)
        if means is not None:
            found[subject.name] = means if subject.n_matrices > 1 else means.reshape(-1)
    return found
