"""`report.json` of a folder for a board: bytes, bits a weight, and what the model of boards says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.exporters.fpga.content import Content
from edgeinfer.exporters.fpga.sizes import weight_bits
from edgeinfer.hls.board.counted import counts_of
from edgeinfer.hls.board.model import Design
from edgeinfer.hls.board.report import Report, report
from edgeinfer.hls.board.workload import workload_of


def board_report(content: Content) -> Report:
    """What the model of boards says of this export; every speed in it is modelled, none is measured."""
    geometry = content.options.geometry
    has_first_stage, embeddings = bool(content.options.rescored), content.options.embeddings
    design = Design(content.options.board, geometry, ternary_head=has_first_stage, embeddings=embeddings)
    name = str(content.source.metadata.get("general.name", content.source.path.name))
    return report(design, workload_of(name, content.spec), content.n_ctx, counts_of(geometry))


def report_json(content: Content, files: Mapping[str, int]) -> dict[str, Any]:
    """The content of report.json. files: bytes by name."""
    kinds: dict[str, int] = {}
    for name, n_bytes in files.items():
        kind = name.split("/")[0].split(".")[0]
        kinds[kind] = kinds.get(kind, 0) + n_bytes
    return {
        "bytes": dict(sorted(kinds.items())),
        "ddr_bits_a_trit": round(weight_bits(content), 6),
        "board": board_report(content).as_dict(),
    }
