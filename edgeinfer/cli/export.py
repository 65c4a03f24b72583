"""`edgeinfer export`: a model in another format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgeinfer.cli.endings import ended_by_signals
from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    Choice,
    FileName,
    MayNameFile,
    OutputName,
    long_name,
    out_option,
    overwrite_option,
    warnings_as_notes,
)
from edgeinfer.cli.outputs import check_new
from edgeinfer.cli.streams import check_stdout
from edgeinfer.cli.terminal import ReportLines, note, show

if TYPE_CHECKING:
    from edgeinfer.exporters.request import Plan, Request, Result

_TARGETS = ("gguf", "genai", "litertlm", "mnn", "pte", "onnx", "ternary")
_PACKAGES = ("genai", "litertlm", "mnn", "pte")
_QUANTISED = ("gguf", *_PACKAGES, "onnx")
_ONLY_FOR = {  # targets of an option, where not all have it
    **dict.fromkeys(("type", "imatrix", "calibration", "size", "fit", "cost"), _QUANTISED),
    **dict.fromkeys(("model_draft", "hf_repo_draft", "drafter"), _PACKAGES),
    **dict.fromkeys(("n_ctx", "no_check"), _QUANTISED),
    **dict.fromkeys(("resume",), ("gguf",)),
    **dict.fromkeys(("model",), ("gguf", "onnx")),
    **dict.fromkeys(("draft_vocab",), ("gguf",)),
    **dict.fromkeys(("format", "head"), ("ternary",)),
    **dict.fromkeys(("operators", "external_data"), ("onnx",)),
}
# Files beside OUT: a manifest; of gguf, the state of an export to resume and its measurements; of onnx, the weights.
_BESIDE = (".manifest.json", ".partial", ".partial.journal", ".partial.journal.new", ".auto.jsonl", ".data")
_FIELDS = ("type", "imatrix", "calibration", "n_ctx", "resume", "cost")  # fields of Request, unchanged
_OTHERS = ("size", "fit", "model_draft", "hf_repo_draft", "drafter", "no_check")  # from which fields are made


@click.command(cls=ModelCommand, model="source", draft="model_draft", others=("model",), may_be_folder=True)
@click.argument("source", type=FileName())
@click.option(
    "--to",
    type=Choice(_TARGETS, fpga="`edgeinfer fpga export SOURCE` writes folders for boards."),
    required=True,
    help="Target format.",
)
@out_option(OutputName(*_BESIDE, keeps=True), required=True, help="The file or folder to write.")
@overwrite_option
@click.option(
    "--type",
    metavar="TYPE",
    help="Type of the weights, as llama.cpp names them: Q4_K_M, Q8_0, F16 and so on; auto: a type for each tensor by "
    "measured loss.  [default: as in SOURCE; packages: as they need]",
)
@click.option(
    "--imatrix",
    type=MayNameFile.but("auto"),
    metavar="FILE|auto",
    help="Importance matrix; auto: made first, with --calibration.",
)
@click.option("--calibration", type=FileName(), help="Text for --imatrix auto and --type auto.  [default: built in]")
@click.option("--size", metavar="SIZE", help="Most bytes of the weights, such as 900MB.")
@click.option("--fit-into", "fit", metavar="SIZE", help="Instead, the memory that the model may use when it runs.")
@click.option(
    "--cost",
    metavar="verify[:N]",
    help="Also bound the time of an N-token forward pass, such as verify:4; verify: N as drafting verifies here.",
)
@click.option(
    "-md", "--model-draft", "--spec-draft-model", type=FileName(), help="A draft model inside the package, a GGUF file."
)
@click.option("--drafter", type=click.Choice(["ngram"]), help="Drafts from n-grams of the text, inside the package.")
@click.option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(min=1),
    help="Context size, of packages and onnx, and for --fit-into.  [default: as trained, at most 4096]",
)
@click.option("--dry-run", is_flag=True, help="Print what would be written, and stop.")
@click.option("--resume", is_flag=True, help="gguf: go on where an export that was stopped ended.")
@click.option("--no-check", is_flag=True, help="Do not run what was written against the source.")
@click.option(
    "--format",
    type=click.Choice(["i2_s", "tq1_0", "tq2_0"]),
    default="i2_s",
    show_default=True,
    help="i2_s has one scale per matrix and rounds activations per token; the others one per 256 inputs.",
)
@click.option(
    "--head",
    type=click.Choice(["keep", "q6_k", "f16"]),
    default="keep",
    show_default=True,
    help="Type of the output matrix; q6_k takes 40 % of f16.",
)
@click.option(
    "--target",
    "model",
    type=FileName(),
    help="The model that SOURCE drafts for: a draft head, or with --type auto a draft model.",
)
@click.option(
    "--draft-vocab",
    type=MayNameFile(lambda text: text.partition(":")[2] or None),
    metavar="N[:FILE]",
    help="gguf: a draft model with logits for only the N most frequent tokens of FILE, or of a built-in text.",
)
@click.option(
    "--operators",
    type=click.Choice(["contrib", "plain"]),
    default="contrib",
    show_default=True,
    help="contrib uses ONNX Runtime's operators for quantised products and attention; plain the standard's.",
)
@click.option("--external-data", is_flag=True, help="Weights in a separate file, as always above 1 GiB.")
@click.pass_context
def export(
    context: click.Context, /, source: Path, to: str, out: Path, dry_run: bool, overwrite: bool, **flags: Any
) -> None:
    """Convert a model to another format.

    SOURCE is a GGUF file or a folder of Hugging Face (config.json, tokenizer.json, .safetensors files). What is planned
    is printed first; the output is written atomically. --to ternary takes models with ternary matrices alone.
    docs/exporting.md describes the targets.
    """
    _check_options(context, to)
    run_export(to, _request(to, source, out, flags), dry_run, overwrite)


def run_export(to: str, request: Request, dry_run: bool, overwrite: bool) -> None:
    """Plan, write and check, with notes and a report.

    Raises InvalidArgument where something would be replaced without `overwrite`, and the errors of the target.
    """
    from edgeinfer.exporters.targets import check_places, files_replaced

    check_places(to, request)
    if not overwrite and not dry_run:
        check_new(request.out, files_replaced(to, request.out), "--out")
    with ended_by_signals(lambda: _left(to, request)):
        _export(to, request, dry_run)


def _export(to: str, request: Request, dry_run: bool) -> None:
    from edgeinfer.exporters.manifest import read_records, write_manifest
    from edgeinfer.exporters.targets import TARGETS, check_gguf_files, check_room, open_target

    check_gguf_files(to, request)
    target = open_target(to)
    with warnings_as_notes():
        if "auto" in (str(request.type).lower(), request.imatrix):
            note(f"running {request.source} first, to measure what is important; this takes a while")
        plan = _planned(target, request)
        if dry_run:
            check_stdout()
            show("\n".join(plan_lines(plan)))
            return
        for line in plan_lines(plan):
            note(line)
        check_room(plan, request.out)
        # Read now, as the files may be gone afterwards.
        read = read_records(request) if TARGETS[to].has_manifest else {}
        result = _written(target, request, plan)
        if TARGETS[to].has_manifest:
            write_manifest(to, request, plan, result, read)
    _report(result, request)


def _left(to: str, request: Request) -> str:
    """What an interrupted export leaves, as a part of a sentence."""
    from edgeinfer.exporters.auto.choice import state_path
    from edgeinfer.exporters.gguf.partial import journal_path, partial_path

    if to == "gguf" and not request.out.is_dir() and journal_path(request.out).exists():
        return f"what is written stays in {partial_path(request.out)}: the same command with --resume goes on there"
    if state_path(request).exists():
        return f"what was measured stays in {state_path(request)}: the same command goes on there"
    return "nothing is left of it"


def _check_options(context: click.Context, to: str) -> None:
    """Raises InvalidArgument for options in conflict with the target or with one another."""
    from edgeinfer.common.errors import InvalidArgument

    for option in context.command.params:
        targets = _ONLY_FOR.get(option.name or "", (to,))
        if to not in targets and context.get_parameter_source(option.name or "") == ParameterSource.COMMANDLINE:
            names = " or ".join((", ".join(targets[:-1]), targets[-1]) if len(targets) > 1 else targets)
            raise InvalidArgument(f"{long_name(option)} goes with --to {names}, not with --to {to}")
    _check_measured(context.params)
    given = context.params
    if to == "gguf" and given["n_ctx"] is not None and given["fit"] is None:
        raise InvalidArgument(
            "--ctx-size goes with --to gguf only for --fit-into: a GGUF file has no context size of its own"
        )
    if given["model_draft"] is not None and given["drafter"] is not None:
        raise InvalidArgument("-md and --drafter both say what drafts in the package: leave one out")


def _check_measured(given: dict[str, Any]) -> None:
    """Raises InvalidArgument, before a long pass, if --type auto or --imatrix lacks an option that it needs."""
    from edgeinfer.common.errors import InvalidArgument

    is_auto = (given["type"] or "").lower() == "auto"
    for name in ("size", "fit", "cost"):
        if given[name] is not None and not is_auto:
            flag = "--fit-into" if name == "fit" else f"--{name}"
            raise InvalidArgument(f"{flag} goes with --type auto, not with --type {given['type'] or '(none)'}")
    if given["size"] is not None and given["fit"] is not None:
        raise InvalidArgument("--size and --fit-into both say how large the weights may be: give one of them")
    if is_auto and given["size"] is None and given["fit"] is None and given["model"] is None:
        raise InvalidArgument("--type auto needs --size, the most bytes of the weights, or --fit-into")
    if given["imatrix"] is not None and given["type"] is None:
        raise InvalidArgument("--imatrix goes with --type: without one no tensor is quantised")
    if given["calibration"] is not None and given["imatrix"] != "auto" and not is_auto:
        raise InvalidArgument("--calibration goes with --imatrix auto or --type auto")
    if given["cost"] is not None:
        from edgeinfer.exporters.auto.choice import parse_cost

        parse_cost(given["cost"])


def _request(to: str, source: Path, out: Path, flags: dict[str, Any]) -> Request:
    """The request of a command line. Raises InvalidArgument."""
    from edgeinfer.exporters.request import Request

    rest = {name: value for name, value in flags.items() if name not in (*_FIELDS, *_OTHERS) and value is not None}
    more = {name: value for name, value in rest.items() if to in _ONLY_FOR.get(name, (to,))}
    if "draft_vocab" in more:
        more["draft_vocab"], _, text = more["draft_vocab"].partition(":")
        more |= {"draft_text": FileName().convert(text, None, None)} if text else {}
    fields = {name: flags[name] for name in _FIELDS}
    if flags["imatrix"] not in (None, "auto"):
        fields["imatrix"] = FileName().convert(flags["imatrix"], None, None)
    fields |= {"draft": flags["model_draft"] or flags["drafter"], "check": not flags["no_check"]}
    fit = _bytes(flags["fit"], "--fit-into")
    size = _bytes(flags["size"], "--size") if fit is None else _size_that_fits(source, fit, flags["n_ctx"])
    return Request(source, out, size=size, fit=fit, more=more, **fields)


def _size_that_fits(source: Path, memory: int, n_ctx: int | None) -> int:
    """Most bytes of weights with which a load fits into memory. Raises BudgetExceeded, ModelFileError."""
    from edgeinfer.exporters.source import open_source
    from edgeinfer.exporters.virtual_file import model_file_of
    from edgeinfer.loading.weight_size import weight_bytes_that_fit

    with open_source(source) as opened, model_file_of(opened) as file:
        return weight_bytes_that_fit(file, memory, n_ctx)


def _bytes(text: str | None, name: str) -> int | None:
    from edgeinfer.common.arguments import shown
    from edgeinfer.common.errors import InvalidArgument
    from edgeinfer.common.sizes import parse_size

    if text is None:
        return None
    try:
        found = parse_size(text, name, "the memory").n_bytes
    except InvalidArgument:  # which tells of "auto" and of shares, too
        found = None
    if found is None:
        raise InvalidArgument(
            f"{name} must be bytes, or a number and a unit (kB, MB, GB, KiB, MiB, GiB), such as 900MB or 4GiB: found "
            f"{shown(text)}"
        )
    return found


def plan_lines(plan: Plan) -> list[str]:
    """A plan as text: types with counts and bytes, files, memory, disk, notes."""
    from edgeinfer.common.arguments import human_bytes

    lines, types = [], sorted({tensor.written for tensor in plan.tensors})
    for type in types:
        sizes = [tensor.n_bytes for tensor in plan.tensors if tensor.written == type]
        lines.append(f"{type.name:6} {len(sizes):5} tensors {human_bytes(sum(sizes)):>10}")
    lines += [f"{path}: {human_bytes(n_bytes)}" for path, n_bytes in plan.files.items()]
    lines.append(f"memory at most {human_bytes(plan.peak_bytes)}, disk {human_bytes(plan.disk_bytes)}")
    return [*lines, *(f"note: {text}" for text in plan.notes)]


def _planned(target: Any, request: Request) -> Plan:
    """The plan, with progress while it measures."""
    with ReportLines() as lines:
        plan: Plan = target.plan(replace(request, report=lines))
    return plan


def _written(target: Any, request: Request, plan: Plan) -> Result:
    """Write, with progress in bytes."""
    from edgeinfer.common.arguments import human_bytes

    total = sum(plan.files.values())
    with ReportLines() as lines:
        result: Result = target.write(
            request, lambda share: lines(f"writing: {human_bytes(int(share * total))} of {human_bytes(total)}", share)
        )
    return result


def _report(result: Result, request: Request) -> None:
    from edgeinfer.common.arguments import human_bytes

    for path in result.files:
        note(f"{path}: {path.stat().st_size / 1e6:.0f} MB")
    if result.check is not None:
        memory = "" if result.check_bytes is None else f"; at most {human_bytes(result.check_bytes)} of memory"
        note(f"check: {result.check}{memory}")
    elif not request.check:
        note("check: left out (--no-check)")
