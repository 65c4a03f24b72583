"""`edgeinfer export`: a model in another format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgeinfer.cli.board_folder import BOARD_OPTIONS, board_options, missing, run_on_folder
from edgeinfer.cli.endings import ended_by_signals
from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import FileName, MayNameFile, OutputName, warnings_as_notes
from edgeinfer.cli.streams import check_stdout
from edgeinfer.cli.terminal import ReportLines, note, show

if TYPE_CHECKING:
    from edgeinfer.exporters.request import Plan, Request, Result

_TARGETS = ("gguf", "genai", "litertlm", "mnn", "pte", "onnx", "ternary", "fpga")
_PACKAGES = ("genai", "litertlm", "mnn", "pte")
_QUANTISED = ("gguf", *_PACKAGES, "onnx")
_ONLY_FOR = {  # the targets of options that not all of them have
    **dict.fromkeys(("type", "imatrix", "calibration", "size", "fit", "cost"), _QUANTISED),
    **dict.fromkeys(("draft",), _PACKAGES),
    **dict.fromkeys(("n_ctx",), (*_QUANTISED, "fpga")),
    **dict.fromkeys(("resume",), ("gguf",)),
    **dict.fromkeys(("check",), (*_QUANTISED, "fpga")),
    **dict.fromkeys(("model",), ("gguf", "onnx")),
    **dict.fromkeys(("draft_vocab",), ("gguf",)),
    **dict.fromkeys(("format", "head"), ("ternary",)),
    **dict.fromkeys(("operators", "external_data"), ("onnx",)),
    **dict.fromkeys(BOARD_OPTIONS, ("fpga",)),
}
# What comes with OUT: a manifest; of gguf what an export that goes on needs, and what it measured; of onnx the weights.
_BESIDE = (".manifest.json", ".partial", ".partial.journal", ".partial.journal.new", ".auto.jsonl", ".data")
_FIELDS = ("type", "imatrix", "calibration", "draft", "n_ctx", "resume", "check", "cost")  # of Request


@click.command(cls=ModelCommand, model="source", others=("model",), may_be_folder=True)
@click.argument("source", type=FileName())
@click.option("--to", type=click.Choice(_TARGETS), help="Target format.  [required]")
@click.option("-o", "--out", type=OutputName(*_BESIDE), help="The file or folder to write.  [required]")
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
@click.option("--size", metavar="SIZE", help="--type auto: most bytes of the weights, such as 900MB.")
@click.option("--fit", metavar="SIZE", help="--type auto: the memory that the model may take when it runs.")
@click.option(
    "--cost",
    metavar="verify[:N]",
    help="--type auto: the pass whose time counts, such as verify:4; verify: as many tokens as drafting verifies here.",
)
@click.option(
    "--draft", type=MayNameFile.but("ngram"), metavar="FILE|ngram", help="Packages: a draft model or n-grams inside."
)
@click.option(
    "-c",
    "--ctx",
    "n_ctx",
    type=click.IntRange(min=1),
    help="Context size, of packages and onnx, and for --fit.  [default: as trained, at most 4096]",
)
@click.option("--dry-run", is_flag=True, help="Print what would be written, and stop.")
@click.option("--resume", is_flag=True, help="gguf: go on where an export that was stopped ended.")
@click.option("--check/--no-check", default=True, help="Run what was written against the source.  [default: check]")
@click.option(
    "--format",
    type=click.Choice(["i2_s", "tq1_0", "tq2_0"]),
    default="i2_s",
    show_default=True,
    help="ternary: i2_s has one scale per matrix and rounds activations per token; the others one per 256 inputs.",
)
@click.option(
    "--head",
    type=click.Choice(["keep", "q6_k", "f16"]),
    default="keep",
    show_default=True,
    help="ternary: type of the output matrix; q6_k takes 40 % of f16.",
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
    help="gguf: a draft model, with logits for the N most frequent tokens of a text only.",
)
@click.option(
    "--operators",
    type=click.Choice(["contrib", "plain"]),
    default="contrib",
    show_default=True,
    help="onnx: contrib uses ONNX Runtime's operators for quantised products and attention; plain the standard's.",
)
@click.option("--external-data", is_flag=True, help="onnx: weights in a separate file, as always above 1 GiB.")
@board_options
@click.pass_context
def export(
    context: click.Context, /, source: Path, to: str | None, out: Path | None, dry_run: bool, unpack: bool, **flags: Any
) -> None:
    """Convert a model to another format.

    SOURCE is a GGUF file or a folder of Hugging Face (config.json, tokenizer.json, .safetensors files). What is planned
    is printed first; the output is whole or not there. --to ternary and fpga take models with ternary matrices alone.
    docs/exporting.md describes the targets.

    Without --to, SOURCE is a folder that --to fpga wrote: --check looks for faults in it, --unpack gives its matrices
    back.
    """
    if to is None or unpack:
        run_on_folder(context, source, to, out)
        return
    if out is None:
        raise missing(context, "out")
    _check_options(context, to)
    request = _request(to, source, out, flags)
    with ended_by_signals(lambda: _left(to, request)):
        _export(to, request, dry_run)


def _export(to: str, request: Request, dry_run: bool) -> None:
    """Plan, write and check; the notes, and what came of it."""
    from edgeinfer.exporters.manifest import read_records, write_manifest
    from edgeinfer.exporters.targets import TARGETS, check_gguf_files, check_places, check_room, open_target

    check_places(to, request)
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
        # Of the files as they are now: afterwards they may be gone.
        read = read_records(request) if TARGETS[to].has_manifest else {}
        result = _written(target, request, plan)
        if TARGETS[to].has_manifest:
            write_manifest(to, request, plan, result, read)
    _report(result, request)


def _left(to: str, request: Request) -> str:
    """What an export that was stopped leaves, a part of a sentence."""
    from edgeinfer.exporters.auto.choice import state_path
    from edgeinfer.exporters.gguf.partial import journal_path, partial_path

    if to == "gguf" and not request.out.is_dir() and journal_path(request.out).exists():
        return f"what is written stays in {partial_path(request.out)}: the same command with --resume goes on there"
    if state_path(request).exists():
        return f"what was measured stays in {state_path(request)}: the same command goes on there"
    return "nothing is left of it"


def _check_options(context: click.Context, to: str) -> None:
    """Raises InvalidArgument for options that do not go with the target or with one another."""
    from edgeinfer.common.errors import InvalidArgument

    for option in context.command.params:
        wanted = _ONLY_FOR.get(option.name or "", (to,))
        if to not in wanted and context.get_parameter_source(option.name or "") == ParameterSource.COMMANDLINE:
            names = " or ".join((", ".join(wanted[:-1]), wanted[-1]) if len(wanted) > 1 else wanted)
            raise InvalidArgument(f"{option.opts[-1]} goes with --to {names}, not with --to {to}")
    _check_measured(context.params)
    given = context.params
    if to == "gguf" and given["n_ctx"] is not None and given["fit"] is None:
        raise InvalidArgument("--ctx goes with --to gguf only for --fit: a GGUF file has no context size of its own")


def _check_measured(given: dict[str, Any]) -> None:
    """Raises InvalidArgument for options of --type auto and --imatrix that lack their partner, before a long pass."""
    from edgeinfer.common.errors import InvalidArgument

    is_auto = (given["type"] or "").lower() == "auto"
    for name in ("size", "fit", "cost"):
        if given[name] is not None and not is_auto:
            raise InvalidArgument(f"--{name} goes with --type auto, not with --type {given['type'] or '(none)'}")
    if given["size"] is not None and given["fit"] is not None:
        raise InvalidArgument("--size and --fit both say how large the weights may be: give one of them")
    if is_auto and given["size"] is None and given["fit"] is None and given["model"] is None:
        raise InvalidArgument("--type auto needs --size, the most bytes of the weights, or --fit")
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
    from edgeinfer.library.names import find_model

    rest = {name: value for name, value in flags.items() if name not in (*_FIELDS, "size", "fit") and value is not None}
    more = {name: value for name, value in rest.items() if to in _ONLY_FOR.get(name, (to,))}
    if "draft_vocab" in more:
        more["draft_vocab"], _, text = more["draft_vocab"].partition(":")
        more |= {"draft_text": FileName().convert(text, None, None)} if text else {}
    fields = {name: flags[name] for name in _FIELDS}
    if flags["imatrix"] not in (None, "auto"):
        fields["imatrix"] = FileName().convert(flags["imatrix"], None, None)
    if flags["draft"] not in (None, "ngram"):
        fields["draft"] = find_model(flags["draft"], "--draft")
    fit = _bytes(flags["fit"], "--fit")
    size = _bytes(flags["size"], "--size") if fit is None else _size_that_fits(source, fit, flags["n_ctx"])
    return Request(source, out, size=size, fit=fit, more=more, **fields)


def _size_that_fits(source: Path, memory: int, n_ctx: int | None) -> int:
    """Bytes of weights with which a load takes no more than that. Raises BudgetExceeded, ModelFileError."""
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
    """The plan, with the progress of what it measures."""
    with ReportLines() as lines:
        plan: Plan = target.plan(replace(request, told=lines))
    return plan


def _written(target: Any, request: Request, plan: Plan) -> Result:
    """What the target writes, with its progress in bytes."""
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
