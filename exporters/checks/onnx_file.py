"""Whether an ONNX file gives the logits of its source, in ONNX Runtime and in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.onnx import library_version, open_file
from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.common.files import temporary_folder
from edgeinfer.exporters.calibration.running import greedy_tokens, logits_of, native_model
from edgeinfer.exporters.calibration.texts import check_tokens
from edgeinfer.exporters.checks.comparison import N_TEXT, Checked
from edgeinfer.exporters.checks.head import drafted
from edgeinfer.exporters.checks.runtime import N_TOKENS, GreedyRun, compare_logits
from edgeinfer.exporters.checks.runtime_process import ask_runtime, peak_bytes
from edgeinfer.models import attention_of, read_spec
from edgeinfer.models.gguf import ModelFile

Floats = NDArray[np.float32]


def compare_model(source: ModelFile, written: Path, n_ctx: int) -> tuple[Checked, int | None]:
    """Run a file against its source in the native engine; gives what that showed, and the runtime's peak memory.

    The source continues a text greedily; the file gets the same tokens, the text in one pass and then one by one, each
    behind the caches that it gave before. Raises ModelFileError where it is another model; UnsupportedModel where the
    native engine does not run the source. BudgetExceeded of running it becomes words.
    """
    n_tokens = max(1, min(N_TOKENS, n_ctx // 2))
    text = check_tokens(source)[: max(1, min(N_TEXT, n_ctx) - n_tokens)]
    try:
        with native_model(source, _context(source, n_ctx, len(text) + n_tokens)) as model:
            forced = greedy_tokens(model, [text], n_tokens)[0]
            expected = logits_of(model, [*text, *forced[:-1]])[len(text) - 1 :]
    except BudgetExceeded as error:
        return Checked(f"not run: {error}", {"checked": False}), None
    rows, peak = _rows_of(written, [*text, *forced[:-1]], len(text))
    return _compared(GreedyRun("", text, forced, forced, expected), rows), peak


def _context(source: ModelFile, n_ctx: int, n_needed: int) -> int:
    """Positions of the native engine: those of the file where a rotation depends on how many there are (LongRoPE)."""
    ropes = [attention_of(layer).rope for layer in read_spec(source).layers]
    depends = any(rope is not None and rope.long for rope in ropes)
    return max(n_ctx, n_needed) if depends else n_needed


def compare_head(head: ModelFile, target: ModelFile, written: Path, n_ctx: int) -> tuple[Checked, int | None]:
    """The same of a draft head beside its target: the logits behind the tokens of a text."""
    tokens = check_tokens(target)[: min(N_TOKENS, n_ctx) + 1]
    try:
        with native_model(target, len(tokens)) as model:
            expected = drafted(head, target, model, tokens)
    except BudgetExceeded as error:
        return Checked(f"not run: {error}", {"checked": False}), None
    chosen = expected.logits.argmax(axis=1).tolist()
    rows, peak = _rows_of(written, tokens[1:], 1, expected.features)
    return _compared(GreedyRun("", tokens, chosen, chosen, expected.logits), rows), peak


def _compared(run: GreedyRun, rows: Floats) -> Checked:
    version = library_version()
    said, figures = compare_logits(run, rows, f"ONNX Runtime {version}")
    return Checked(said, {"checked": True, "checked_in": f"onnxruntime {version}", **figures})


def _rows_of(
    path: Path, tokens: Sequence[int], n_first: int, features: Floats | None = None
) -> tuple[Floats, int | None]:
    """Logits (len(tokens) - n_first + 1, n_logits) of a file, and the most memory of the process that ran it."""
    with temporary_folder() as scratch:
        question = {
            "path": str(path),
            "tokens": list(tokens),
            "n_first": n_first,
            "logits": str(scratch / "logits.npy"),
        }
        if features is not None:
            question["features"] = str(scratch / "features.npy")
            np.save(scratch / "features.npy", features)
        found = ask_runtime(__name__, question, "ONNX Runtime")
        return np.load(scratch / "logits.npy"), found["peak_bytes"]


# ---- In the process of the runtime -----------------------------------------------------------------------------------


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Run a file: question has path, tokens, n_first, the number of them that go through one pass, logits, a file to
    write, and of a head features, a file. Gives peak_bytes.
    """
    features = np.load(question["features"]) if "features" in question else None
    run = _Run(question["path"], features)
    tokens, n_first = question["tokens"], question["n_first"]
    rows = [run.last_row(tokens[:n_first]), *(run.last_row([token]) for token in tokens[n_first:])]
    np.save(question["logits"], np.stack(rows))
    return {"peak_bytes": peak_bytes()}


class _Run:
    """A text that goes through a file; see edgeinfer.backends.onnx.decoder for its inputs and outputs."""

    def __init__(self, path: str, features: Floats | None) -> None:
        self._session = open_file(Path(path))
        self._facts: Mapping[str, Any] = json.loads(self._session.get_modelmeta().custom_metadata_map["edgeinfer"])
        self._names = [value.name for value in self._session.get_outputs()]
        self._inputs = {value.name: value.shape for value in self._session.get_inputs()}
        self._features, self._n = features, 0
        self._caches: dict[str, Floats] = {
            name: np.zeros([n if isinstance(n, int) else self._facts["n_ctx"] for n in shape], np.float32)
            for name, shape in self._inputs.items()
            if name.startswith("past_")
        }

    def last_row(self, tokens: Sequence[int]) -> Floats:
        """The logits behind these tokens, which follow those before."""
        first, last = self._n, self._n + len(tokens)
        own = np.arange(first, last)
        given: dict[str, Any] = {"input_ids": np.array([tokens]), "position_ids": own[None], "cache_slots": own}
        given["logit_rows"] = np.array([len(tokens) - 1])
        if self._features is not None:
            given["features"] = self._features[None, first:last]
        has_slots = self._facts["cache"] == "slots"
        seen = np.arange(self._facts["n_ctx"] if has_slots else last)
        for name in self._inputs:
            if name.startswith("attention_bias"):
                given[name] = self._bias(name, own, seen)
        wanted = {name: value for name, value in (given | self._caches).items() if name in self._inputs}
        out = dict(zip(self._names, self._session.run(None, wanted), strict=True))
        self._caches = {name: out[name.replace("past_", "present_", 1)] for name in self._caches}
        self._n = last
        row: Floats = out["logits"][0]
        return row

    def _bias(self, name: str, own: NDArray[np.int64], seen: NDArray[np.int64]) -> Floats:
        """(1, 1, n, t) which positions each token sees; the number behind the name is that of a window."""
        visible = seen <= own[:, None]
        window = name.partition(".")[2]
        if window:
            visible &= own[:, None] - seen < int(window)
        return np.where(visible, np.float32(0), np.float32(self._facts["hidden_bias"]))[None, None]
