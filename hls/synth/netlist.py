"""An engine as the netlist that yosys makes for UltraScale+ devices, simulated by Icarus."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import BackendUnavailable, EdgeInferError, InvalidArgument, ShapeError
from edgeinfer.hls.geometry import Geometry
from edgeinfer.hls.packing import Bytes
from edgeinfer.hls.synth import yosys
from edgeinfer.hls.synth.counts import synthesis
from edgeinfer.hls.synth.designs import engine, harness_macros

_FOLDER = Path(__file__).parent
_CONTENTS = (("CONTENT", "INIT"), ("PARITY", "INITP"))
_SECONDS = 600  # that a simulation may take


class Netlist:
    """The netlist of an engine, made when this is created.

    most_inputs, most_outputs: of the matrices that it is to multiply with. folder: where its files lie; must exist.
    Raises BackendUnavailable without pyosys or Icarus.
    """

    def __init__(self, geometry: Geometry, most_inputs: int, most_outputs: int, folder: Path) -> None:
        for tool in ("iverilog", "vvp"):
            if shutil.which(tool) is None:
                raise BackendUnavailable(
                    f"Icarus Verilog is needed to simulate a netlist: {tool} not found; install iverilog"
                )
        self.geometry = geometry
        self._design = engine(geometry, most_inputs, most_outputs)
        self._folder = folder.absolute()
        path = self._folder / "netlist.v"
        yosys.run(synthesis(self._design, path), self._folder)
        self.take(simulated(path.read_text()))

    def take(self, text: str) -> None:
        """Simulate this netlist of the engine from now on."""
        self.text = text
        path = self._folder / "netlist.v"
        path.write_text(text)
        macros = (f"-D{name}={value}" for name, value in harness_macros(self._design).items())
        files = (_FOLDER / "bench.sv", _FOLDER / "block_ram.v", yosys.cell_models(), path)
        self._run("iverilog", "-g2012", "-s", "bench", "-o", "engine.vvp", *macros, *map(str, files))

    def product(
        self, x: NDArray[np.int8], stream: Bytes, n_out: int, stalls: int = 0
    ) -> tuple[NDArray[np.int32], list[int]]:
        """(y, cycles): y int32 (n, n_out), and the cycles of each row from its start to its last result.

        x: int8 (n, n_in). stream: of `packing.pack`, or of the file of an exporter. stalls: seed of random pauses of
        the streams of the engine; 0 for none. Raises ShapeError for a stream of another size, EdgeInferError for a
        simulation that fails.
        """
        n_steps, n_tiles = self._sizes(x.shape[1], stream.size, n_out)
        padded = np.zeros((len(x), n_steps * self.geometry.step_inputs), dtype=np.int8)
        padded[:, : x.shape[1]] = x
        stream[: n_steps * n_tiles * self.geometry.beat_bytes].tofile(self._folder / "w.bin")
        facts = (f"+steps={n_steps}", f"+tiles={n_tiles}", f"+stalls={stalls}")
        rows = [self._product(row, n_tiles * self.geometry.rows, facts) for row in padded]
        return np.array([y[:n_out] for y, _ in rows], dtype=np.int32), [cycles for _, cycles in rows]

    def _product(self, x: NDArray[np.int8], n_sums: int, facts: tuple[str, ...]) -> tuple[NDArray[np.int32], int]:
        x.tofile(self._folder / "x.bin")
        said = self._run("vvp", "-n", "engine.vvp", *(f"+{name}={name}.bin" for name in "xwy"), *facts)
        done = re.search(r"done after (\d+) cycles", said)
        y = np.fromfile(self._folder / "y.bin", dtype="<i4")
        if done is None or y.size != n_sums:
            raise EdgeInferError(f"the netlist must give {n_sums} sums: found {y.size}: {said[-1000:]}")
        return y, int(done[1])

    def _sizes(self, n_in: int, n_bytes: int, n_out: int) -> tuple[int, int]:
        """Steps and tiles."""
        wanted = self.geometry.stream_bytes(n_out, n_in)
        if n_bytes != wanted:
            raise ShapeError(
                f"({n_out}, {n_in}) must take {wanted} bytes: found {n_bytes}; the file is of another matrix"
            )
        n_steps, n_tiles = self.geometry.n_steps(n_in), self.geometry.n_tiles(n_out)
        most = self._design.parameters
        if n_steps > most["MAX_STEPS"] or n_tiles > most["MAX_TILES"]:
            raise InvalidArgument(
                f"this netlist has room for {most['MAX_STEPS']} steps and {most['MAX_TILES']} tiles: found {n_steps} "
                f"and {n_tiles}; create it for larger matrices"
            )
        return n_steps, n_tiles

    def _run(self, *command: str) -> str:
        run = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
        said = run.stdout + run.stderr
        if run.returncode != 0 or "failed: " in said:
            raise EdgeInferError(
                f"{command[0]} must simulate the netlist of {self._design.name}: {said.strip()[-1000:]}"
            )
        return said


def simulated(netlist: str) -> str:
    """A netlist for block_ram.v: what block RAMs hold at the start is one number, CONTENT, and one for the parity."""
    rams = re.compile(r"(?:\s*\.INITP?_[0-9A-F]{2}\(\d+'[bh][0-9a-fx]+\),?)+")
    return rams.sub(lambda ram: _content(ram[0]), netlist)


def _content(parameters: str) -> str:
    """Of consecutive parameters INIT_00 to INIT_3F or 7F, and INITP_00 on."""
    words = sorted(re.findall(r"\.(INITP?)_([0-9A-F]{2})\((\d+'[bh][0-9a-fx]+)\)", parameters), reverse=True)
    given = ((name, [word for kind, _, word in words if kind == own]) for name, own in _CONTENTS)
    return "\n" + "".join(f".{name}({{{', '.join(of_name)}}}),\n" for name, of_name in given if of_name)
