"""`edgeinfer inspect`: the contents of a model file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import FileName, json_option, warnings_as_notes
from edgeinfer.cli.terminal import one_line, show

if TYPE_CHECKING:
    from edgeinfer.models.gguf import MetadataValue, ModelFile, TensorInfo

_LONGEST_ARRAY = 16  # elements in the JSON document; longer ones are cut
_WIDEST_VALUE = 80  # characters in the text
_SCALARS = (str, int, float)


@click.command(cls=ModelCommand, model="file")
@click.argument("file", type=FileName())
@click.option("--tensors", is_flag=True, help="List the tensors.")
@click.option("--metadata", is_flag=True, help="List all metadata; long values are shortened.")
@json_option
def inspect(file: Path, tensors: bool, metadata: bool, as_json: bool) -> None:
    """Show the contents of a GGUF file. The whole header is checked; no weights are read.

    Of a split model, name any file.
    """
    from edgeinfer.models.gguf import ModelFile

    with warnings_as_notes():
        opened = ModelFile.open(file)
    with opened as model:
        summary = _summary(model)
        if as_json:
            if tensors:
                summary["tensors"] = [_tensor(info) for info in model.tensors.values()]
            if metadata:
                summary["metadata"] = {key: _json_value(value) for key, value in model.metadata.items()}
            show(json.dumps(summary, allow_nan=False))  # in ASCII: no control character
            return
        lines = [*_summary_lines(summary)]
        lines += ["", *_tensor_lines(model)] if tensors else []
        lines += ["", *_metadata_lines(model)] if metadata else []
        show("\n".join(lines))


def _summary(model: ModelFile) -> dict[str, Any]:
    """The figures of both outputs; None for those that the file lacks."""
    from edgeinfer.offload.file_experts import experts_of

    def said(key: str) -> Any:
        value = model.metadata.get(key)
        return None if value is None else _json_value(value)

    architecture = said("general.architecture")
    experts = experts_of(model)
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    return {
        "path": str(model.path),
        "n_files": len(model.paths),
        "file_bytes": model.n_bytes,
        "architecture": architecture,
        "name": said("general.name"),
        "license": said("general.license"),
        "n_parameters": sum(info.n_elements for info in model.tensors.values()),
        "n_ctx_train": said(f"{architecture}.context_length"),
        "n_tensors": len(model.tensors),
        "tensor_bytes": sum(info.n_bytes for info in model.tensors.values()),
        "tensor_types": _types(model),
        "experts": None if experts is None else asdict(experts),
        "tokenizer": {
            "model": said("tokenizer.ggml.model"),
            "pre": said("tokenizer.ggml.pre"),
            "n_tokens": None if tokens is None or isinstance(tokens, _SCALARS) else len(tokens),
        },
        "has_chat_template": "tokenizer.chat_template" in model.metadata,
    }


def _types(model: ModelFile) -> dict[str, dict[str, int]]:
    """Tensors, parameters and bytes by type, the largest first."""
    types: dict[str, dict[str, int]] = {}
    for info in sorted(model.tensors.values(), key=lambda info: info.type):
        of_type = types.setdefault(info.type.name, {"n_tensors": 0, "n_parameters": 0, "n_bytes": 0})
        of_type["n_tensors"] += 1
        of_type["n_parameters"] += info.n_elements
        of_type["n_bytes"] += info.n_bytes
    return dict(sorted(types.items(), key=lambda item: -item[1]["n_bytes"]))


# ---- text ------------------------------------------------------------------------------------------------------------


def _summary_lines(summary: dict[str, Any]) -> Iterator[str]:
    from edgeinfer.common.arguments import human_bytes

    tokenizer = summary["tokenizer"]
    files = f" in {summary['n_files']} files" if summary["n_files"] > 1 else ""
    bits = 8 * summary["tensor_bytes"] / max(summary["n_parameters"], 1)
    fields = {
        "file": f"{_line(summary['path'])} ({human_bytes(summary['file_bytes'])}{files})",
        "architecture": _said(summary["architecture"]),
        "name": _said(summary["name"]),
        "license": _said(summary["license"]),
        "parameters": _human_count(summary["n_parameters"]),
        "context length": _said(summary["n_ctx_train"]),
        "tokenizer": f"{_said(tokenizer['model'])}, pre-tokeniser {_said(tokenizer['pre'])}, "
        f"{_said(tokenizer['n_tokens'])} tokens",
        "chat template": "yes" if summary["has_chat_template"] else "no",
        "weights": f"{human_bytes(summary['tensor_bytes'])} in {summary['n_tensors']} tensors, "
        f"{bits:.2f} bits a parameter",
    }
    if (of := summary["experts"]) is not None:
        low, high = of["expert_bytes"]
        size = human_bytes(low) if low == high else f"{human_bytes(low)} to {human_bytes(high)}"
        fields["experts"] = (
            f"{of['n_layers']} layers of {of['n_experts']}, {of['n_used']} for a token; {size} an expert, "
            f"{human_bytes(of['token_bytes'])} a token, {human_bytes(of['total_bytes'])} in all"
        )
    yield from (f"{label:<16}{text}" for label, text in fields.items())
    for name, of_type in summary["tensor_types"].items():
        yield f"  {name:<14}{of_type['n_tensors']:>5} tensors  {human_bytes(of_type['n_bytes']):>10}"


def _tensor_lines(model: ModelFile) -> Iterator[str]:
    """A line per tensor: name, shape in numpy's order, type, bytes, offset."""
    from edgeinfer.common.arguments import human_bytes

    for info in model.tensors.values():
        shape = " x ".join(map(str, info.shape))
        place = f"{info.part + 1}:{info.offset}" if len(model.paths) > 1 else str(info.offset)
        yield f"{_line(info.name):<32}{info.type.name:<9}{shape:<22}{human_bytes(info.n_bytes):>10}  at {place}"


def _metadata_lines(model: ModelFile) -> Iterator[str]:
    for key, value in model.metadata.items():
        yield f"{_line(key)} = {_shown(value)}"


def _shown(value: MetadataValue) -> str:
    """A value on one line; of an array its length and first elements."""
    if isinstance(value, _SCALARS):
        return _cut(_line(value) if isinstance(value, str) else str(value))
    first = ", ".join(_line(element) if isinstance(element, str) else str(element) for element in value[:8])
    return _cut(f"[{len(value)}] {first}{', ...' if len(value) > 8 else ''}")


def _said(value: object) -> str:
    """A value that the file may lack, or have in another type."""
    return "-" if value is None else _cut(_line(str(value)))


def _line(text: str) -> str:
    """A text from the file on one line, without control characters."""
    return one_line(text[: 4 * _WIDEST_VALUE])


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST_VALUE else f"{text[: _WIDEST_VALUE - 3]}..."


def _human_count(n: int) -> str:
    """A number with separators, and a short form if it is large: "1,543,714,304 (1.54 B)"."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if n >= size:
            return f"{n:,} ({n / size:.3g} {letter})"
    return f"{n:,}"


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _tensor(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "type": info.type.name,
        "shape": info.shape,
        "n_bytes": info.n_bytes,
        "part": info.part,
        "offset": info.offset,
    }


def _json_value(value: MetadataValue) -> Any:
    """The value itself; of a long array its length and first elements, and of an infinity or NaN its name."""
    if isinstance(value, _SCALARS):
        return _json_number(value)
    first = [_json_number(element) for element in value[:_LONGEST_ARRAY]]
    return first if len(value) <= _LONGEST_ARRAY else {"n_elements": len(value), "first": first}


def _json_number(element: str | float) -> str | float:
    return str(element) if isinstance(element, float) and not math.isfinite(element) else element
