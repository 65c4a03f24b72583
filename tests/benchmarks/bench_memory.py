"""What a loaded model takes against what the ledger planned for it, in 32 cells, each in a process of its own.

    python tests/benchmarks/bench_memory.py smollm2-135m.gguf qwen2.5-coder-0.5b.gguf qwen2.5-coder-1.5b.gguf

Beside the three files it uses two random models that it writes: one with sliding windows (gemma3), one with experts
(qwen3moe). A cell loads one with a context, a cache type and drafters, fills the context, and compares the peak that
the process takes with the plan. Cells of odd numbers are judged;
the others are for whoever changes the plan. --cells 3,7-9 runs some. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[1] / "support"
N_ANSWER = 40  # tokens after a prompt that fills the rest of the context
MODELS = ("small", "middle", "large", "windows", "experts")


@dataclass(frozen=True)
class Cell:
    """One load. draft: "model" is the middle model for the large one.  expert_cache: as for `load`."""

    model: str
    n_ctx: int
    cache_type: str = "f16"
    draft: str = "none"
    packed: bool = False
    expert_cache: str = "auto"


CELLS = (
    Cell("small", 512),
    Cell("small", 512, draft="auto"),
    Cell("small", 512, draft="auto", packed=True),
    Cell("small", 2048, "q8_0"),
    Cell("small", 2048, "q8_0", "auto"),
    Cell("small", 4096),
    Cell("small", 4096, draft="auto"),
    Cell("small", 4096, "q8_0", packed=True),
    Cell("middle", 512),
    Cell("middle", 512, draft="auto"),
    Cell("middle", 2048, "q8_0", "auto"),
    Cell("middle", 2048, packed=True),
    Cell("middle", 4096),
    Cell("middle", 4096, draft="auto", packed=True),
    Cell("middle", 4096, "q8_0"),
    Cell("large", 512),
    Cell("large", 512, draft="model"),
    Cell("large", 2048, draft="model", packed=True),
    Cell("large", 2048, "q8_0", "auto"),
    Cell("large", 4096, "q8_0", packed=True),
    Cell("large", 4096),
    Cell("windows", 512),
    Cell("windows", 512, draft="auto", packed=True),
    Cell("windows", 2048, draft="auto"),
    Cell("windows", 2048, "q8_0", packed=True),
    Cell("windows", 4096),
    Cell("windows", 4096, "q8_0", "auto"),
    Cell("experts", 512),
    Cell("experts", 2048, draft="auto"),
    Cell("experts", 4096, "q8_0", expert_cache="50%"),
    Cell("experts", 4096, draft="auto", expert_cache="30%"),
    Cell("experts", 2048, packed=True),
)


# ---- the models ------------------------------------------------------------------------------------------------------


def write_models(folder: Path) -> dict[str, Path]:
    """The two random models, of some 100 MB each."""
    sys.path.insert(0, str(SUPPORT))
    from tiny_experts import write_tiny_experts
    from tiny_models import write_tiny_model

    n_vocab = 16384
    windows = {"gemma3.attention.sliding_window": 512}
    sizes = {"n_embd": 1024, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "n_ff": 4096, "n_ctx_train": 4096}
    of_experts = {"n_embd": 512, "n_layers": 6, "n_heads": 8, "n_ff": 512, "n_experts": 32, "n_used": 4}
    paths = {name: folder / f"{name}.gguf" for name in ("windows", "experts")}
    write_tiny_model(paths["windows"], "gemma3", "Q8_0", n_vocab=n_vocab, tied=True, metadata=windows, **sizes)
    write_tiny_experts(paths["experts"], "qwen3moe", "Q4_0", n_vocab=n_vocab, n_ctx_train=4096, **of_experts)
    return paths


def packed_beside(path: Path, folder: Path) -> Path:
    """A link to the model with packed weights beside it."""
    from edgeinfer.backends.native import NativeBackend
    from edgeinfer.backends.native.packing.packed import packed_path
    from edgeinfer.models import read_spec
    from edgeinfer.models.gguf import ModelFile

    link = folder / f"packed-{path.name}"
    if not packed_path(link).exists():
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
        with ModelFile.open(link) as file:
            NativeBackend().pack(file, read_spec(file), packed_path(file.paths[0]))
    return link


# ---- one cell, in its process ----------------------------------------------------------------------------------------


def run_cell(cell: Cell, paths: dict[str, Path]) -> dict[str, Any]:
    """Load, fill the context, and say what was planned and taken."""
    import edgeinfer

    draft = str(paths["middle"]) if cell.draft == "model" else cell.draft
    keywords: Any = {"n_ctx": cell.n_ctx, "cache_type": cell.cache_type, "draft": draft}
    with edgeinfer.load(paths[cell.model], expert_cache=cell.expert_cache, **keywords) as engine:
        text = engine.tokenize((SUPPORT.parents[1] / "LICENSE").read_text()[: 5 * cell.n_ctx])
        prompt = (text * (1 + cell.n_ctx // len(text)))[: cell.n_ctx - N_ANSWER]
        engine.generate(prompt, max_tokens=N_ANSWER, temperature=0.0)
        engine.generate(prompt[: -N_ANSWER // 2], max_tokens=N_ANSWER, temperature=0.8, seed=1)
        ledger = engine.memory
    taken = ledger.peak_taken or 0
    return {**asdict(cell), "error": ledger.peak / taken - 1.0, **ledger.as_json()}


def in_a_process(cell: Cell, paths: dict[str, Path], cache: Path) -> dict[str, Any]:
    """The same, in a new process with its own folder for measurements."""
    job = json.dumps({"cell": asdict(cell), "paths": {name: str(path) for name, path in paths.items()}})
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, __file__, "--child", job]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


# ---- all cells -------------------------------------------------------------------------------------------------------


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean of the absolute errors, the worst, and the number of cells that took more than planned."""
    errors = [result["error"] for result in results]
    if not errors:
        return {}
    return {
        "cells": len(errors),
        "mean_absolute_error": round(sum(map(abs, errors)) / len(errors), 4),
        "worst": round(max(errors, key=abs), 4),
        "above_planned": sum(error < 0.0 for error in errors),
        "most_while_loading": round(max(result["loading"] / result["planned"] for result in results), 4),
    }


def line(number: int, result: dict[str, Any]) -> str:
    """A cell as a line of the table."""
    mib = {key: result[key] / 2**20 for key in ("planned", "peak", "peak_taken")}
    options = f"{result['n_ctx']} {result['cache_type']} {result['draft']}{' packed' if result['packed'] else ''}"
    options += "" if result["expert_cache"] == "auto" else f" experts {result['expert_cache']}"
    judged = "judged" if number % 2 else ""
    sizes = f"planned {mib['peak']:7.1f} MiB, taken {mib['peak_taken']:7.1f} MiB"
    return f"{number:2} {result['model']:8} {options:32} {sizes}  {result['error']:+7.2%}  {judged}"


def parts(result: dict[str, Any]) -> str:
    """The purposes of a cell, planned and taken, in MiB."""
    named = [(f"{item['purpose']} {item['detail']}".strip(), item) for item in result["items"]]
    shown = [
        f"{name} {item['planned'] / 2**20:.1f}/{'?' if item['taken'] is None else round(item['taken'] / 2**20, 1)}"
        for name, item in named
    ]
    return "     " + ", ".join(shown)


def numbers(text: str) -> list[int]:
    """Numbers of cells: "3,7-9"."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main() -> None:
    """Read the command line, run the cells, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="a small, a middle and a large model")
    parser.add_argument("--cells", type=numbers, default=list(range(len(CELLS))))
    parser.add_argument("--folder", type=Path, help="where the other models are written, and kept")
    parser.add_argument("--parts", action="store_true", help="print the purposes of each cell")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        job = json.loads(arguments.child)
        paths = {name: Path(path) for name, path in job["paths"].items()}
        print(json.dumps(run_cell(Cell(**job["cell"]), paths)))
        return
    if len(arguments.models) != 3:
        parser.error("three models are needed")
    with tempfile.TemporaryDirectory() as scratch:
        results = run_all(arguments, arguments.folder or Path(scratch), Path(scratch))
    report(results)


def run_all(arguments: argparse.Namespace, folder: Path, cache: Path) -> dict[int, dict[str, Any]]:
    """The wanted cells, by number; each is printed as it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: folder / f"{name}.gguf" for name in ("windows", "experts")}
    if not all(path.exists() for path in own.values()):
        write_models(folder)
    paths = {**dict(zip(MODELS, arguments.models, strict=False)), **own}
    results = {}
    for number in arguments.cells:
        cell = CELLS[number]
        used = {**paths, cell.model: packed_beside(paths[cell.model], folder)} if cell.packed else paths
        results[number] = in_a_process(cell, used, cache)
        print(line(number, results[number]), flush=True)
        if arguments.parts:
            print(parts(results[number]), flush=True)
    return results


def report(results: dict[int, dict[str, Any]]) -> None:
    """Print the summaries, and everything as JSON."""
    from machine import machine

    halves = {
        "judged": summary([result for number, result in results.items() if number % 2]),
        "not judged": summary([result for number, result in results.items() if not number % 2]),
    }
    for name, found in halves.items():
        print(f"{name}: {found}")
    cells = [{"number": number, **result} for number, result in results.items()]
    print(json.dumps({**machine(), "summary": halves, "cells": cells}))


if __name__ == "__main__":
    main()
