"""Cells of a synthesised design as the resources of an UltraScale+ device: logic estimates."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgeinfer.common.errors import EdgeInferError
from edgeinfer.hls.synth import yosys
from edgeinfer.hls.synth.designs import Design, sources

# LUTs of each memory or shift register in LUTs. A slice of eight LUTs is one RAM32M16 or RAM64M8.
_MEMORY = {"RAM32M16": 8, "RAM64M8": 8, "RAM32M": 4, "RAM64M": 4, "RAM32X1D": 2, "RAM64X1D": 2, "RAM128X1D": 4}
_MEMORY |= {"RAM32X1S": 1, "RAM64X1S": 1, "RAM128X1S": 2, "SRL16E": 1, "SRLC32E": 1}
_FREE = re.compile(r"\$scopeinfo|BUFG|MUXF[789]")
_KINDS = (
    ("lut", re.compile(r"LUT[1-6]|INV")),  # an inverter left over feeds a carry or a memory, and takes a LUT
    ("ff", re.compile(r"FD[RSCP]E")),
    ("carry", re.compile(r"CARRY[48]")),
    ("ramb18", re.compile(r"RAMB18E2")),
    ("ramb36", re.compile(r"RAMB36E2")),
    ("uram", re.compile(r"URAM288")),
    ("dsp", re.compile(r"DSP48E2")),
)


@dataclass(frozen=True)
class Counts:
    """Of a design. lut: LUTs as logic; lut_memory: LUTs as memory and shift registers."""

    lut: int = 0
    lut_memory: int = 0
    ff: int = 0
    carry: int = 0
    ramb18: int = 0
    ramb36: int = 0
    uram: int = 0
    dsp: int = 0

    @property
    def luts(self) -> int:
        """All LUTs."""
        return self.lut + self.lut_memory

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return asdict(self)


def synthesis(design: Design, netlist: Path | None = None, flat: bool = True) -> list[str]:
    """Commands of yosys that map a design to UltraScale+. netlist: where it is written. flat: modules are dissolved."""
    files = " ".join(str(path) for path in sources())
    values = " ".join(f"-chparam {name} {value}" for name, value in design.parameters.items())
    written = [] if netlist is None else [f"write_verilog -noattr {netlist}"]
    return [
        f"read_verilog -sv -defer -DEI_XILINX {files}",
        f"hierarchy -top {design.top} {values}",
        f"synth_xilinx -family xcup -noiopad -noclkbuf {'-flatten' if flat else ''}",
        "tee -q -o stat.json stat -json",
        *written,
    ]


def count(design: Design, flat: bool = True) -> tuple[Counts, dict[str, Counts]]:
    """Resources of a design, and of each module in it that was kept, all its instances together.

    flat: modules are dissolved, but for those that are marked. Raises EdgeInferError for a cell that is not known.
    """
    with TemporaryDirectory() as folder:
        yosys.run(synthesis(design, flat=flat), Path(folder))
        modules = json.loads(Path(folder, "stat.json").read_text())["modules"]
    cells = {_plain(name): _own_cells(module) for name, module in modules.items()}
    instances = _instances(cells, design.top)
    parts = {name: _counts(_without(cells[name], cells), n) for name, n in instances.items()}
    total = {kind: sum(part.as_dict()[kind] for part in parts.values()) for kind in Counts().as_dict()}
    return Counts(**total), parts


def _plain(name: str) -> str:
    return name.removeprefix("\\")


def _own_cells(module: Mapping[str, Any]) -> Counter[str]:
    return Counter({_plain(name): int(n) for name, n in module["num_cells_by_type"].items()})


def _without(cells: Counter[str], modules: Mapping[str, object]) -> Counter[str]:
    return Counter({name: n for name, n in cells.items() if name not in modules})


def _instances(cells: Mapping[str, Counter[str]], top: str) -> Counter[str]:
    """How often each module is in the design."""
    (root,) = (name for name in cells if top in name.split("\\") and not any(name in inner for inner in cells.values()))
    found: Counter[str] = Counter()

    def visit(name: str, n: int) -> None:
        found[name] += n
        for inner, n_inner in cells[name].items():
            if inner in cells:
                visit(inner, n * n_inner)

    visit(root, 1)
    return found


def _counts(cells: Counter[str], n_instances: int) -> Counts:
    found = Counter({kind: 0 for kind in Counts().as_dict()})
    for name, n in cells.items():
        kind = next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), None)
        if name in _MEMORY:
            found["lut_memory"] += _MEMORY[name] * n * n_instances
        elif kind is not None:
            found[kind] += n * n_instances
        elif not _FREE.fullmatch(name):
            raise EdgeInferError(f"cells must be those of {__name__}: found {name}; add what it takes there")
    return Counts(**found)
