"""What `--type auto` asks for, and what it gives: types, what is printed of them, keys and facts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgeinfer.common import devices
from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import BudgetExceeded, InvalidArgument, UnsupportedModel
from edgeinfer.common.types import Device
from edgeinfer.exporters.auto.candidates import Importance, Subject, drafting_types, subjects_of, table_types
from edgeinfer.exporters.auto.search import Limits, Mix, Search
from edgeinfer.exporters.auto.speed import Speeds, drafted_tokens
from edgeinfer.exporters.auto.trial import CalibrationText, windows_of
from edgeinfer.exporters.calibration.imatrix import Imatrix
from edgeinfer.exporters.calibration.prompts import HELD_OUT
from edgeinfer.exporters.calibration.running import native_model
from edgeinfer.exporters.calibration.texts import answer_context, own_answers, texts_of_file
from edgeinfer.exporters.divergence import Distance
from edgeinfer.exporters.request import Request, TypeChoice
from edgeinfer.exporters.source import Source
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, MetadataValue, ModelFile
from edgeinfer.speculation.cost import MAX_TOKENS

_WINDOW_TOKENS, _ROWS = 384, 192  # of a pass in which losses are measured, and its logits
_CHECK_WINDOWS = 2  # of other texts, in which the choice is compared with the source
_SHOWN = (1, 4, 8)  # tokens of the passes whose times are printed
_COST = re.compile(r"verify(?::(\d+))?(?::([\d.]+)ms)?")


def choose_types(source: Source, request: Request, imatrix: Imatrix | None) -> TypeChoice:
    """The types with the least measured loss that fit what a request says.

    What is measured is kept in OUT.auto.jsonl, so that a second call with the same request measures nothing. Raises
    InvalidArgument, UnsupportedModel, BudgetExceeded, ModelFileError.
    """
    with model_file_of(source) as file:
        spec = read_spec(file)
        request.report("texts: answers of the model", 0.0)
        texts, held_out = _texts(file, request.calibration)
    subjects = subjects_of(source, spec)
    if not subjects:
        raise UnsupportedModel(f"{source.path}: --type auto needs weights in F32, F16 or BF16: there are none")
    importance, device = importance_by_tensor(subjects, imatrix), Device(devices.default_n_threads())
    drafting = drafting_types(source, spec, subjects, request.size or 0) | table_types(source, spec)
    limits = limits_of(request, source, subjects, device, drafting)
    windows = windows_of(texts, _WINDOW_TOKENS, 1, _ROWS)
    search = Search(source, subjects, importance, windows, device, state=state_path(request))
    try:
        search.measure(request.report)
        mix = search.refine(limits, request.report)
    finally:
        search.close()
    others = windows_of(held_out, _WINDOW_TOKENS, _CHECK_WINDOWS, _ROWS)
    found = search.compare([mix.types], others, request.report)[0]
    chosen = type_choice(search, subjects, mix, found, limits)
    return replace(chosen, types={**chosen.types, **drafting})


def state_path(request: Request) -> Path:
    """The file in which measurements of a request are kept."""
    return request.out.with_name(f"{request.out.name}.auto.jsonl")


def limits_of(
    request: Request,
    source: Source,
    subjects: Sequence[Subject],
    device: Device,
    others: Mapping[str, GGMLType] = MappingProxyType({}),
) -> Limits:
    """The limits of a request: its bytes without those of the other tensors.

    others: types of those that do not keep theirs. Raises InvalidArgument, BudgetExceeded.
    """
    if request.size is None:
        raise InvalidArgument("--type auto needs --size, the most bytes of the weights, or --fit-into")
    n_bytes = bytes_of_chosen(request.size, source, subjects, others)
    n_tokens, seconds = parse_cost(request.cost)
    return Limits(n_bytes, n_tokens or drafted_tokens(subjects, n_bytes, Speeds(device.n_threads, device.isa)), seconds)


def bytes_of_chosen(
    size: int, source: Source, subjects: Sequence[Subject], others: Mapping[str, GGMLType] = MappingProxyType({})
) -> int:
    """What a size leaves for the tensors whose formats are chosen. others: see limits_of. Raises BudgetExceeded."""
    chosen = {subject.name for subject in subjects}
    kept = [each for each in source.tensors if each.name not in chosen]
    n_kept = sum(others.get(each.name, each.type).n_bytes(math.prod(each.shape)) for each in kept)
    least = n_kept + sum(subject.n_bytes(subject.formats[0]) for subject in subjects)
    if size < least:
        raise BudgetExceeded(
            f"{source.path}: --size must be at least {human_bytes(least)}, which the smallest formats take: found "
            f"{human_bytes(size)}"
        )
    return size - n_kept


def parse_cost(cost: str | None) -> tuple[int | None, float | None]:
    """The tokens of the forward pass whose time is bounded, and the seconds that its products may take; see Limits.

    "verify:4": not slower than uniform formats of that size; "verify:4:12.5ms": at most so many milliseconds.
    "verify" alone: the tokens are None, as many as drafting verifies. None: the time is not bounded. Raises
    InvalidArgument.
    """
    if cost is None:
        return 1, math.inf
    found = _COST.fullmatch(cost)
    if found is None or not 1 <= int(found[1] or 1) <= MAX_TOKENS:
        raise InvalidArgument(
            f"--cost must be verify:N with N from 1 to {MAX_TOKENS}, verify:N:MSms, or the same without N, such as "
            f"verify:4, verify:4:12.5ms or verify: found {cost}"
        )
    return None if found[1] is None else int(found[1]), None if found[2] is None else 1e-3 * float(found[2])


def type_choice(search: Search, subjects: Sequence[Subject], mix: Mix, found: Distance, limits: Limits) -> TypeChoice:
    """What is printed, written into the file and into the manifest of a mix."""
    shown = sorted({*_SHOWN, limits.n_tokens})
    milliseconds = {n: 1e3 * search.seconds(mix.types, n) for n in shown}
    counts = Counter(type.name for type in mix.types.values())
    times = ", ".join(f"{n} {'token' if n == 1 else 'tokens'} {ms:.2f} ms" for n, ms in milliseconds.items())
    notes = [
        f"auto: KL {found.divergence:.4f} measured on other texts, {mix.predicted:.4f} predicted; top-1 agreement "
        f"{100 * found.agreement:.1f} %",
        f"auto: {human_bytes(mix.n_bytes)} of {human_bytes(int(limits.n_bytes))}; products of a pass: {times}",
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


def _texts(file: ModelFile, calibration: Path | None) -> tuple[list[CalibrationText], list[CalibrationText]]:
    """The texts of calibration, of a file or answers of the model to built-in prompts; and answers that are held out.

    What is held out is in no importance matrix that `--imatrix auto` makes.
    """
    with native_model(file, answer_context(file)) as model:
        held_out = own_answers(model, file, HELD_OUT)
        texts = own_answers(model, file) if calibration is None else texts_of_file(calibration, file)
    return [CalibrationText(tokens) for tokens in texts], [CalibrationText(tokens) for tokens in held_out]


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
