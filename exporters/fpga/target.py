"""`edgeinfer export --to fpga`: plan, write and check a folder for an FPGA board."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from edgeinfer.common.files import check_folder, whole_folder
from edgeinfer.common.overriding import override
from edgeinfer.exporters.fpga.content import Content, content_of, model_facts
from edgeinfer.exporters.fpga.doctor import check_against
from edgeinfer.exporters.fpga.options import BoardOptions
from edgeinfer.exporters.fpga.sizes import file_sizes, weight_bits
from edgeinfer.exporters.fpga.stages import write_stages
from edgeinfer.exporters.fpga.writing import head_facts, write_model
from edgeinfer.exporters.manifest import record, source_files, tool_version
from edgeinfer.exporters.request import ExportTarget, Plan, Progress, Request, Result
from edgeinfer.exporters.ternary.reading import open_ternary
from edgeinfer.exporters.ternary.source import PIECE_WEIGHTS, TernarySource
from edgeinfer.exporters.tokenizer_json import write_tokenizer
from edgeinfer.hls.board.counted import counts_of
from edgeinfer.hls.board.model import Design
from edgeinfer.hls.board.report import Report, report
from edgeinfer.hls.board.workload import workload_of
from edgeinfer.hls.files.writer import BoardWriter
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.tokenizer import Tokenizer

NAMES = (
    *("weights.*.bin", "head_t.*.bin", "scales.bin", "norms.bin", "embed.bin", "head_i8.bin", "rope.bin", "golden"),
    *("edgeinfer_model.h", "config.hpp", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("manifest.json", "report.json"),
)
_TEXT_BYTES = 4 << 20


class FpgaTarget(ExportTarget):
    """`--to fpga`, see ExportTarget. Options: board, encoding, rows, tables, golden, embeddings, rescored."""

    @override
    def plan(self, request: Request) -> Plan:
        check_folder(request.out, NAMES)
        with _opened(request) as (content, file):
            sizes = file_sizes(content)
            files = {request.out / name: n_bytes for name, n_bytes in sizes.items()}
            disk = sum(sizes.values()) + _TEXT_BYTES + 80 * Tokenizer.size_in(file)
            return Plan([], files, _peak(content), disk, list(_notes(content)))

    @override
    def write(self, request: Request, progress: Progress) -> Result:
        """See ExportTarget.write. Raises BadBoardFolder where the check finds a fault of what was written."""
        with _opened(request) as (content, file), whole_folder(request.out, NAMES) as folder:
            with BoardWriter(folder, content.options.geometry) as writer:
                write_model(writer, content, progress)
                write_stages(writer, content)
                _write_texts(writer, content, file)
                facts = _facts(request, content)
                writer.finish(facts)
            check = check_against(folder, content) if request.check else None
            progress(1.0)
            names = [name for name in file_sizes(content) if name.endswith(".bin")]
        return Result([request.out / name for name in (*names, "manifest.json")], check)


@contextmanager
def _opened(request: Request) -> Iterator[tuple[Content, ModelFile]]:
    """What a request makes of a model, and that model as a GGUF file. Raises InvalidArgument, UnsupportedModel."""
    options = BoardOptions.of(request)
    with open_ternary(request.source) as source, source.as_model_file() as file:
        yield content_of(source, read_spec(file), options), file


def _facts(request: Request, content: Content) -> dict[str, Any]:
    """What the manifest says beside the places of tensors."""
    return {
        "board": content.options.board.name,
        "model": model_facts(content),
        "embeddings": {"array": "embed", "type": content.options.embeddings},
        "head": head_facts(content),
        "source": [record(path) for path in source_files(request.source)],
        "licence": licence_of(content.source),
        "tool": {"edgeinfer": tool_version()},
    }


def licence_of(source: TernarySource) -> str:
    """What the source says: the key of a GGUF file, or the model card of a checkpoint."""
    card = source.path / "README.md"
    if source.path.is_dir() and card.is_file():
        head = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
        found = re.search(r"^license:\s*(\S+)", head[1], re.MULTILINE) if head else None
        if found:
            return found[1]
    return str(source.metadata.get("general.license", "not said by the source"))


def _write_texts(writer: BoardWriter, content: Content, file: ModelFile) -> None:
    """Tokenizer, chat template and report."""
    for path in write_tokenizer(file, writer.folder):
        writer.take_file(path.name)
    template = Tokenizer.from_file(file).chat_template
    if template is not None:
        writer.write_text("chat_template.jinja", template)
    sizes = {name: facts["bytes"] for name, facts in writer.content({})["files"].items()}
    text = json.dumps(_report_json(content, sizes), indent=1, sort_keys=True)
    writer.write_text("report.json", text + "\n")


def _peak(content: Content) -> int:
    """Most memory at once: the trits of two products with their streams, or some rows of the embeddings as floats."""
    largest = max(n_out * n_in for n_out, n_in in (product.shape for product in content.products))
    golden = (
        5 * content.options.n_golden * max(n_out + n_in for n_out, n_in in (each.shape for each in content.products))
    )
    head = 3 * content.spec.n_logits * content.spec.n_embd // 2 if content.options.rescored else 0
    return max(6 * largest + 2 * golden, head) + 5 * 4 * PIECE_WEIGHTS


def _notes(content: Content) -> Iterator[str]:
    options, geometry = content.options, content.options.geometry
    yield (
        f"{geometry.encoding} for {geometry.rows} rows and {geometry.tables} tables, {geometry.n_ports} ports: "
        f"{weight_bits(content):.4f} bits a ternary weight with padding."
    )
    if content.n_ctx > content.spec.n_ctx_train:
        yield f"The model was trained on {content.spec.n_ctx_train} positions, fewer than the {content.n_ctx} of --ctx."
    if options.embeddings == "int8":
        yield "Embeddings are rounded to 8 bits a number, with a scale a row (--embeddings bf16 for 16)."
    kinds = {tensor.found for product in content.products for tensor in product.tensors}
    if kinds - {GGMLType.I2_S, None}:
        names = ", ".join(sorted(kind.name for kind in kinds if kind is not None))
        yield (
            f"The source has {names}: the CPU then rounds activations in blocks of the format, a board has one scale "
            "a token; texts may differ."
        )
    token = _board_report(content).tokens[0]
    yield (
        f"{token.tokens_per_second:.1f} tokens/s (model, not measured) at the beginning of a text on "
        f"{options.board.name}; report.json has the rest."
    )


def _board_report(content: Content) -> Report:
    """What the model of boards says of this export; every speed in it is modelled, none is measured."""
    geometry = content.options.geometry
    has_first_stage, embeddings = bool(content.options.rescored), content.options.embeddings
    design = Design(content.options.board, geometry, ternary_head=has_first_stage, embeddings=embeddings)
    name = str(content.source.metadata.get("general.name", content.source.path.name))
    return report(design, workload_of(name, content.spec), content.n_ctx, counts_of(geometry))


def _report_json(content: Content, files: Mapping[str, int]) -> dict[str, Any]:
    """The content of report.json. files: bytes by name."""
    kinds: dict[str, int] = {}
    for name, n_bytes in files.items():
        kind = name.split("/")[0].split(".")[0]
        kinds[kind] = kinds.get(kind, 0) + n_bytes
    return {
        "bytes": dict(sorted(kinds.items())),
        "ddr_bits_a_trit": round(weight_bits(content), 6),
        "board": _board_report(content).as_dict(),
    }
