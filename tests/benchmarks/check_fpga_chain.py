"""Ternary products of random shapes: are all implementations equal, from the files of `edgeinfer export --to fpga`?

Each model has one layer, so four matrices; each is exported for one engine, with golden vectors. numpy, the kernels of
the CPU, the C simulation with both sets of headers, the Verilog in Verilator and the netlist of yosys in Icarus read
these files and no others, and every sum must be that of the golden files.

    python tests/benchmarks/check_fpga_chain.py [--models 50] [--vectors 20] [--seed 0] [--without netlist]

Exits with 1 if a sum differs. One JSON line on stdout at the end. The netlist, some hundred cycles a second, gets
the first vector of the matrices that take at most --netlist-cycles.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fpga_chain import Cells, ChainError, CSim, Implementation, Rtl, compared, exported, on_cpu  # noqa: E402
from machine import machine  # noqa: E402
from ternary_shapes import Shapes, random_shapes, write_ternary_model  # noqa: E402

from edgeinfer.common.errors import BackendUnavailable  # noqa: E402
from edgeinfer.hls.csim import Headers  # noqa: E402
from edgeinfer.hls.cycles import cycles  # noqa: E402
from edgeinfer.hls.geometry import Geometry  # noqa: E402

GEOMETRIES = (Geometry("base3", 4, 4), Geometry("g3x5", 8, 4), Geometry("2bit", 4, 16), Geometry("base3", 3, 2))


@dataclass
class Counts:
    """By implementation."""

    matrices: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--vectors", type=int, default=20)
    parser.add_argument("--vendor-vectors", type=int, default=5, help="of the C simulation with the vendor's headers")
    parser.add_argument("--netlist-cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", default="", help="netlist, verilog, csim: what is left out, with commas between")
    options = parser.parse_args()
    shapes, counts, wrong = random_shapes(options.models, options.seed), Counts(), []
    with tempfile.TemporaryDirectory() as work:
        for number, geometry in enumerate(GEOMETRIES):
            of_geometry = [(i, each) for i, each in enumerate(shapes) if i % len(GEOMETRIES) == number]
            wrong += checked(Path(work) / str(number), geometry, of_geometry, options, counts)
    return report(options, shapes, counts, wrong)


def checked(
    work: Path, geometry: Geometry, models: Sequence[tuple[int, Shapes]], options: argparse.Namespace, counts: Counts
) -> list[str]:
    """Export models for an engine and compare; gives what is wrong."""
    work.mkdir()
    folders = []
    for i, each in models:
        model = write_ternary_model(work / f"{i}.gguf", each, options.seed * 1000 + i)
        folders.append(exported(model, geometry, work / f"{i}.board", options.vectors))
    print(f"{geometry}: {len(folders)} models exported", file=sys.stderr)
    products = [shape for _, each in models for shape in each.products]
    wrong = []
    for implementation, limits in implementations(geometry, products, work, options):
        started = time.perf_counter()
        for folder in folders:
            try:
                n_matrices, n_sums = compared(folder, implementation, *limits)
            except ChainError as error:
                wrong.append(f"{geometry}: {folder.stem}: {error}")
                continue
            counts.matrices[implementation.name] += n_matrices
            counts.sums[implementation.name] += n_sums
        counts.seconds[implementation.name] += time.perf_counter() - started
        print(f"  {implementation.name}: {counts.sums[implementation.name]} sums so far", file=sys.stderr)
    return wrong


def implementations(
    geometry: Geometry, products: Sequence[tuple[int, int]], work: Path, options: argparse.Namespace
) -> Iterator[tuple[Implementation, tuple[int | None, int | None]]]:
    """All that are here, with the most vectors and cycles that each gets. products: (n_out, n_in)."""
    sizes = largest(products)
    most = options.netlist_cycles
    of_netlist = largest([each for each in products if cycles(geometry, each[1], each[0]) <= most])
    made: dict[str, Callable[[], Implementation]] = {
        "csim": lambda: CSim(geometry, *sizes, Headers.OWN),
        "csim of the vendor": lambda: CSim(geometry, *sizes, Headers.VENDOR),
        "verilog": lambda: Rtl(geometry, *sizes),
        "netlist": lambda: Cells(geometry, *of_netlist, work / "netlist"),
    }
    limits = {"csim of the vendor": (options.vendor_vectors, None), "netlist": (1, most)}
    yield from ((each, (None, None)) for each in on_cpu(geometry))
    for name, make in made.items():
        if name.split()[0] in options.without.split(","):
            continue
        try:
            yield make(), limits.get(name, (None, None))
        except BackendUnavailable as error:
            print(f"  without {name}: {error}", file=sys.stderr)


def largest(products: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(most inputs, most outputs)."""
    return max(n_in for _, n_in in products), max(n_out for n_out, _ in products)


def report(options: argparse.Namespace, shapes: Sequence[Shapes], counts: Counts, wrong: Sequence[str]) -> int:
    """Print what was compared; gives the exit code."""
    for fault in wrong:
        print(f"wrong: {fault}", file=sys.stderr)
    by_name = {
        name: {"matrices": counts.matrices[name], "sums": n, "seconds": round(counts.seconds[name], 1)}
        for name, n in counts.sums.items()
    }
    for name, found in by_name.items():
        print(
            f"{name:32} {found['matrices']:5} matrices {found['sums']:9} sums {found['seconds']:7} s", file=sys.stderr
        )
    record = {
        "command": f"python {' '.join(sys.argv)}",
        "commit": commit(),
        "machine": machine(),
        "geometries": [f"{each.encoding} {each.rows}x{each.tables}" for each in GEOMETRIES],
        "matrices": 4 * len(shapes),
        "largest_n_in": max(n_in for each in shapes for _, n_in in each.products),
        "sums": sum(counts.sums.values()),
        "wrong": len(wrong),
        "implementations": by_name,
    }
    print(json.dumps(record))
    return 1 if wrong else 0


def commit() -> str:
    """Of the tree that this script lies in."""
    ask = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(ask, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
