"""What `--type auto` gives for a drafter whose target is named: types, what is printed of them, keys and facts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.common import devices
from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import InvalidArgument, UnsupportedModel
from edgeinfer.common.types import Device
from edgeinfer.exporters.auto.chains import Drafting
from edgeinfer.exporters.auto.choice import bytes_of_chosen, parse_cost, state_path
from edgeinfer.exporters.auto.draft_search import Drafted, DraftSearch
from edgeinfer.exporters.auto.drafters import DraftHead, DraftModel
from edgeinfer.exporters.auto.progress import State
from edgeinfer.exporters.auto.speed import MOST_LOAD
from edgeinfer.exporters.auto.target import MeasuredTarget, TargetText, open_target
from edgeinfer.exporters.auto.trial import Types, fingerprint_of
from edgeinfer.exporters.calibration.imatrix import Imatrix
from edgeinfer.exporters.request import Request, TypeChoice
from edgeinfer.exporters.source import Source
from edgeinfer.models.draft_head import HEADS
from edgeinfer.models.draft_vocab import AS_STORED
from edgeinfer.models.gguf import MetadataValue

_TEXT_TOKENS = 384  # of the target, by which losses are measured
_MOST_OF_MODEL, _MOST_OF_HEAD = 8, 4  # tokens of a draft that are considered
_CHOICE = "auto"


def choose_draft_types(source: Source, request: Request, imatrix: Imatrix | None) -> TypeChoice:
    """The types with the most accepted tokens a millisecond beside the target that a request names.

    What is measured is kept in OUT.auto.jsonl, as in choose_types. Raises InvalidArgument, UnsupportedModel,
    BudgetExceeded, ModelFileError.
    """
    lengths = lengths_of(request, _MOST_OF_HEAD if is_head(source) else _MOST_OF_MODEL)
    device = Device(devices.default_n_threads())
    request.told("target: its answers", 0.0)
    with open_target(request.more["model"], device) as target:
        n_least = max(lengths) + 1
        texts, held_out = target.texts(request.calibration, _TEXT_TOKENS, n_least), target.held_out(n_least)
        request.told("target: its answers", 1.0)
        search = _search(source, request, imatrix, target, texts, lengths, device)
        try:
            search.measure(request.told)
            mix = search.choose(_bytes(request, source, search), request.told)
        finally:
            search.close()
        mixes = {_CHOICE: mix.types, **search.uniform()}
        return told(search, mixes, search.compare(mixes, held_out, request.told), target)


def is_head(source: Source) -> bool:
    """Whether it is a draft head."""
    return source.metadata.get("general.architecture") in HEADS


def lengths_of(request: Request, most: int) -> list[int]:
    """The draft tokens of a step that are considered: those that --cost leaves. Raises InvalidArgument."""
    if request.cost is None:
        return list(range(1, most + 1))
    n_tokens, seconds = parse_cost(request.cost)
    if seconds is not None or n_tokens == 1:
        raise InvalidArgument(
            f"--cost of a drafter must be verify, or verify:N with N of at least 2, one more than the draft tokens of "
            f"a step: found {request.cost}"
        )
    return list(range(1, most + 1)) if n_tokens is None else [n_tokens - 1]


def _search(
    source: Source,
    request: Request,
    imatrix: Imatrix | None,
    target: MeasuredTarget,
    texts: Sequence[TargetText],
    lengths: Sequence[int],
    device: Device,
) -> DraftSearch:
    drafter = DraftHead(source, target, device) if is_head(source) else DraftModel(source, target, imatrix, device)
    if not drafter.subjects:
        raise UnsupportedModel(f"{source.path}: --type auto needs weights in F32, F16 or BF16: there are none")
    measured_by = [(list(text.tokens), list(text.rows), text.chosen.tolist()) for text in texts]
    prints = fingerprint_of(drafter.subjects, (), drafter.importance, repr((measured_by, lengths)))
    state = State(state_path(request), prints)
    drafting = Drafting([_kept(state, f"verify {n}", ms) for n, ms in enumerate(target.verify_ms)], lengths)
    return DraftSearch(source, drafter, drafting, texts, device, state)


def _kept(state: State, name: str, value: float) -> float:
    known = state.get(name)
    return state.add(name, value) if known is None else known


def told(
    search: DraftSearch,
    mixes: Mapping[str, Types],
    measured: Mapping[str, tuple[Drafted, float]],
    target: MeasuredTarget,
) -> TypeChoice:
    """What is printed, written into the file and into the manifest. mixes: what was chosen, and others."""
    rows = {name: _row(search, types, *measured[name]) for name, types in mixes.items()}
    chosen, types = rows[_CHOICE], mixes[_CHOICE]
    counts = Counter(type.name for type in types.values())
    notes = [f"auto: for {target.file.path.name}; measured on other texts of it, predicted in brackets:"]
    notes += [f"auto: {_line(name, row)}" for name, row in rows.items()]
    if max(load for _, load in measured.values()) > MOST_LOAD:
        notes.append("auto: other programs kept the machine busy, so that measured times are too long")
    facts: dict[str, Any] = {
        "draft_for": target.file.path.name,
        "verify_ms": {str(n): ms for n, ms in enumerate(search.drafting.verify_ms) if 1 <= n <= 1 + _MOST_OF_MODEL},
        "types": rows,
        "tensors": {name: type.name for name, type in types.items()},
    }
    keys: dict[str, MetadataValue] = {
        "edgeinfer.export.type": "auto",
        "edgeinfer.export.draft_for": str(target.file.metadata.get("general.name") or target.file.path.stem),
        "edgeinfer.export.acceptance": float(chosen["acceptance"]),
        "edgeinfer.export.draft_tokens": int(chosen["draft_tokens"]),
        "edgeinfer.export.formats": [f"{name} {count}" for name, count in sorted(counts.items())],
        AS_STORED: True,
    }
    return TypeChoice(types, notes, {"auto": facts}, keys)


def _row(search: DraftSearch, types: Types, found: Drafted, load: float) -> dict[str, Any]:
    """Figures of a mix, measured and predicted."""
    row: dict[str, Any] = {"n_bytes": search.n_bytes(types), "others_load": load}
    for drafted, before in ((found, ""), (search.predicted(types), "predicted_")):
        rate, n = drafted.best(search.drafting)
        row[f"{before}acceptance"] = drafted.acceptance
        row[f"{before}draft_ms"] = drafted.draft_ms
        row[f"{before}draft_tokens"] = n
        row[f"{before}tokens_a_pass"] = 1.0 + drafted.accepted[n - 1]
        row[f"{before}tokens_a_ms"] = rate
    return row


def _line(name: str, row: Mapping[str, Any]) -> str:
    return (
        f"{name:5} {human_bytes(row['n_bytes']):>9}, acceptance {100 * row['acceptance']:.1f} % "
        f"({100 * row['predicted_acceptance']:.1f}), {row['draft_ms']:.2f} ms ({row['predicted_draft_ms']:.2f}) a "
        f"draft token, {row['tokens_a_pass']:.2f} tokens ({row['predicted_tokens_a_pass']:.2f}) a pass with "
        f"{row['draft_tokens']} drafted, {row['tokens_a_ms']:.4f} tokens a ms ({row['predicted_tokens_a_ms']:.4f})"
    )


def _bytes(request: Request, source: Source, search: DraftSearch) -> float:
    """What a request leaves for the tensors that are chosen for."""
    return math.inf if request.size is None else bytes_of_chosen(request.size, source, search.subjects)
