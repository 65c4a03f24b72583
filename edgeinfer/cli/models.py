"""`edgeinfer models`: the models on this machine, by the names that -m takes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.options import json_option
from edgeinfer.cli.streams import Command, check_stdout
from edgeinfer.cli.terminal import ProgressBar, note, one_line, show
from edgeinfer.common.errors import EdgeInferError

if TYPE_CHECKING:
    from edgeinfer.library.local import LocalModel, LocalModels

_HOW = (
    "-hf USER/REPO[:QUANT] fetches one from Hugging Face:\n"
    "  edgeinfer chat -hf Qwen/Qwen3-0.6B-GGUF:Q8_0\n"
    "and the folder {folder} is looked at for GGUF files"
)
_COLUMNS = ("NAME", "SIZE", "ARCHITECTURE", "QUANT", "RUNS ON", "MEMORY", "FROM")


@click.command(cls=Command)
@json_option
def models(as_json: bool) -> None:
    """List the models on this machine.

    These are the GGUF files in the folder of this program (EDGEINFER_MODELS), in the caches of Hugging Face and
    llama.cpp, and those of Ollama and LM Studio, which are read and never changed. -m takes their names. Headers alone
    are read: MEMORY is the planned peak with a context of at most 4096 tokens; `edgeinfer profile` tells more.
    """
    from edgeinfer.library.local import local_models, own_folder

    check_stdout()
    found = local_models()
    with ProgressBar("reading headers") as bar:
        rows: list[dict[str, Any]] = []
        for model in found.models:
            bar(len(rows) / len(found.models))
            rows.append(_row(model))
    listed = [row for row in rows if row["problem"] is not None or row["kind"] in ("model", "draft head")]
    if as_json:
        show(json.dumps(_document(found, listed)))
        return
    if listed:
        show("\n".join(_lines(listed)))
    for line in _notes(found, rows):
        note(line)
    if not any(row["origin"] != "default" for row in listed):
        note(("no models here: " if not listed else "no others: ") + _HOW.format(folder=own_folder() or "-"))


def _row(model: LocalModel) -> dict[str, Any]:
    """The facts about a model."""
    from edgeinfer.profiler.summary import summarise

    problem, summary = model.problem, None
    if problem is None:
        try:
            summary = summarise(model.path)
        except (EdgeInferError, OSError) as error:
            problem = str(error).removeprefix(f"{model.path}: ")
        except Exception as error:  # one file must not hide the others
            problem = f"{type(error).__name__}: {error} (a bug: edgeinfer --debug inspect FILE shows where)"
    return {
        "name": model.name,
        "names": list(model.names),
        "origin": model.origin,
        "path": str(model.path),
        "n_files": len(model.files),
        "n_bytes": model.n_bytes,
        "architecture": summary and summary.architecture,
        "quantisation": summary and summary.quantisation,
        "kind": summary and summary.kind,
        "runs_on": summary and summary.runs_on,
        "reason": summary and summary.reason,
        "n_ctx": summary and summary.n_ctx,
        "peak_bytes": summary and summary.peak_bytes,
        "problem": problem,
    }


def _document(found: LocalModels, listed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "models": listed,
        "folders": [{"origin": origin, "path": str(path)} for origin, path in found.folders],
        "skipped": [{"path": str(path), "reason": reason} for path, reason in found.skipped],
    }


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table; on a narrow terminal, names have lines of their own. Reasons stand below models that cannot be used."""
    cells = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_wide = not sys.stdout.isatty() or sum(widths) + 2 * len(widths) <= shutil.get_terminal_size().columns
    for line, end in zip(cells, ("", *(_end(row) for row in rows)), strict=True):
        name, *rest = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join([name if is_wide else f"{line[0]}\n   ", *rest]).rstrip()
        if end:
            yield f"    {end}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    from edgeinfer.common.arguments import human_bytes

    runs_on = "drafts" if row["kind"] == "draft head" else row["runs_on"] or "-"
    peak = row["peak_bytes"]
    return (
        one_line(row["name"]),
        human_bytes(row["n_bytes"]),
        one_line(row["architecture"] or "-")[:24],
        row["quantisation"] or "-",
        runs_on,
        "-" if peak is None else human_bytes(peak),
        row["origin"],
    )


def _end(row: dict[str, Any]) -> str:
    """Why a model cannot be used, or not natively."""
    if row["problem"] is not None:
        return f"cannot be used: {one_line(row['problem'])}"
    return "" if row["reason"] is None else f"not native: {one_line(row['reason'])}"


def _notes(found: LocalModels, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Notes on what is not in the table."""
    others: dict[str, int] = {}
    for row in rows:
        if row["problem"] is None and row["kind"] not in ("model", "draft head"):
            others[row["kind"]] = others.get(row["kind"], 0) + 1
    if others:
        yield "not listed: " + ", ".join(f"{kind} ({n})" if n > 1 else kind for kind, n in others.items())
    for path, reason in found.skipped:
        yield f"left out: {one_line(str(path))}: {reason}"
