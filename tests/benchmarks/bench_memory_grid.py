"""What a process takes against what was planned, for made-up models of many vocabularies, sizes, types and settings.

    python tests/benchmarks/bench_memory_grid.py [SMOLLM2.gguf] --folder MODELS --json grid.json

Each cell is one load in a process of its own. It fills the context, draws from all of a flat distribution, repeats a
text so that drafts are long, and answers in a chat; in a hybrid all texts have had all states and rows before that they
can have. The peak of the process is compared with the plan. --cells "gemma 512": those whose line has all these words.
--parts: print purposes and stages too. The models are written to the folder where they are missing, 2.5 GB; SMOLLM2 is
the default model. --json: also to a file after each cell, which is read first, so that a run goes on where another one
ended. Linux only. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[1] / "support"
MIB = 1 << 20
N_ANSWER, N_REPEATED = 16, 48  # tokens of an answer, and of one that repeats a text
ROWS = 32  # tokens of a recurrence that are pending, and as many that are in no state yet
CHAIN = ROWS + 1  # tokens of a pass that leaves a checkpoint
MEMORY = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Shape:
    """A made-up model."""

    architecture: str
    type: str
    tokenizer: str  # "spm", "spm joined" with "▁" within pieces, "bpe", "bpe unordered", "bpe pairs"
    n_vocab: int
    n_embd: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_ff: int
    tied: bool = True
    window: int = 0
    head_dim: int | None = None


@dataclass(frozen=True)
class Cell:
    """One load."""

    model: str  # a name of SHAPES, or "smollm2"
    n_ctx: int
    cache_type: str = "f16"
    draft: str = "none"
    packed: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)  # further options of `load`

    @property
    def name(self) -> str:
        """The cell in words."""
        more = "".join(f" {key} {value}" for key, value in self.more.items())
        return f"{self.model} {self.n_ctx} {self.cache_type} {self.draft}{' packed' if self.packed else ''}{more}"


SHAPES = {
    "gemma-262k": Shape("gemma3", "Q8_0", "spm", 262144, 640, 18, 4, 1, 2048, window=512, head_dim=256),
    "gemma-262k-q4": Shape("gemma3", "Q4_0", "spm joined", 262144, 1152, 6, 4, 1, 3072, window=512, head_dim=256),
    "unordered-262k": Shape("gemma3", "Q8_0", "bpe unordered", 262144, 256, 6, 4, 1, 1024, window=512),
    "llama-32k": Shape("llama", "Q4_K", "spm", 32000, 1536, 6, 16, 4, 4096, tied=False),
    "llama-49k": Shape("llama", "F16", "bpe", 49152, 576, 8, 9, 3, 1536, tied=False),
    "llama-128k": Shape("llama", "Q6_K", "bpe pairs", 128256, 1024, 4, 8, 2, 3072, tied=False),
    "qwen-152k": Shape("qwen2", "Q4_0", "bpe", 151936, 896, 12, 14, 2, 4864),
    "phi-200k": Shape("phi3", "Q8_0", "bpe pairs", 200064, 768, 4, 6, 2, 2048),
    "qwen-256k": Shape("qwen3", "F16", "bpe", 256000, 256, 4, 4, 2, 768, tied=False),
}
# What is less than in make_hybrids.ALL_SHAPES, so that a model takes 2 GB. With few recurrent layers there are more
# checkpoints than the texts of these cells leave.
HYBRIDS = {
    "qwen3.5-0.8b": {},
    "lfm2-8b-a1b": {"layers": 8},
    "gemma4-e2b": {},
    "gemma4-e4b": {"layers": 12},
    "gemma4-26b-a4b": {"layers": 3},
    "granite-4-h-tiny": {"layers": 12},
    "nemotron-3-nano": {"layers": 22, "experts": 16},
    "glm-4.7-flash": {"layers": 4},
}


def cells() -> list[Cell]:
    """All of the grid."""
    found = []
    for model in HYBRIDS:
        for n in (1, 4, 8):  # eight texts need more tokens for all their checkpoints
            found.append(Cell(model, 3072 if n == 8 else 2048, draft="none", more={"parallel": n, "n_batch": 256}))
        found += [Cell(model, 2048, draft="auto", more={"parallel": 4, "n_batch": 256})]
    for model in ("gemma4-e2b", "gemma4-e4b", "gemma4-26b-a4b", "glm-4.7-flash"):  # without states, which fill no 512
        found += [Cell(model, 512), Cell(model, 2048, "q8_0", "auto")]
    for model in ("smollm2", *SHAPES):
        found += [Cell(model, 512), Cell(model, 512, draft="auto"), Cell(model, 1024, "k6v4", "auto")]
    for model in ("smollm2", "gemma-262k"):
        found += [Cell(model, 16), Cell(model, 64), Cell(model, 64, draft="auto"), Cell(model, 512, "q8_0")]
        found += [Cell(model, 512, packed=True), Cell(model, 2048, "q8_0", "auto", packed=True)]
        found += [Cell(model, 512, more={"n_threads": 1}), Cell(model, 1024, more={"n_batch": 256})]
    found += [Cell("unordered-262k", 8192), Cell("qwen-256k", 8192, "q8_0", "auto")]
    return found


# ---- the models ------------------------------------------------------------------------------------------------------


def write_model(path: Path, shape: Shape) -> None:
    """Write a made-up model."""
    sys.path.insert(0, str(SUPPORT))
    from large_vocabularies import add_large_bpe, add_large_spm
    from tiny_models import write_tiny_model

    vocabularies = {
        "spm": add_large_spm,
        "spm joined": partial(add_large_spm, is_apart=False),
        "bpe": add_large_bpe,
        "bpe unordered": partial(add_large_bpe, in_order=False),
        "bpe pairs": partial(add_large_bpe, merges_per_token=2),
    }
    sizes = {key: value for key, value in asdict(shape).items() if key.startswith("n_") or key == "head_dim"}
    window = {f"{shape.architecture}.attention.sliding_window": shape.window} if shape.window else {}
    write_tiny_model.__wrapped__(  # type: ignore[attr-defined]
        path,
        shape.architecture,
        shape.type,
        vocabulary=vocabularies[shape.tokenizer],
        tied=shape.tied,
        metadata=window,
        n_ctx_train=32768,
        n_distinct=256,
        **sizes,
    )


def write_hybrid(path: Path, name: str, vocabulary: Path | None) -> None:
    """Write a model with a shape of make_hybrids. vocabulary: a model that has one."""
    import make_hybrids

    from edgeinfer.loading.open import default_model

    shape = replace(make_hybrids.ALL_SHAPES[name], **HYBRIDS[name])
    make_hybrids.write_model(path, shape, vocabulary or default_model())


def model_of(cell: Cell, folder: Path, smollm2: Path | None) -> Path:
    """The file of a cell, which is written if it is not there."""
    if cell.model == "smollm2":
        from edgeinfer.loading.open import default_model

        path = default_model() if smollm2 is None else smollm2
    else:
        path = folder / f"{cell.model}.gguf"
        if cell.model in HYBRIDS and not path.exists():
            write_hybrid(path, cell.model, smollm2)
        elif not path.exists():
            write_model(path, SHAPES[cell.model])
    if cell.packed:
        from bench_memory import packed_beside

        path = packed_beside(path, folder)
    return path


# ---- one cell, in its process ----------------------------------------------------------------------------------------


def run_cell(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Load, use all of it, and say what was planned and taken. stages: (VmRSS, VmHWM) after each part."""
    import edgeinfer

    stages: dict[str, tuple[int, ...]] = {}

    def mark(name: str) -> None:
        stages[name] = tuple(int(n) << 10 for _, n in sorted(MEMORY.findall(Path("/proc/self/status").read_text())))

    mark("imported")
    with edgeinfer.load(path, **options) as engine:
        mark("loaded")
        use(engine, mark)
        ledger = engine.memory
    taken = ledger.peak_taken or 0
    return {"error": ledger.peak / taken - 1.0, "stages": stages, **ledger.as_json()}


def use(engine: Any, mark: Any) -> None:
    """Answers of several kinds, of which the first two fill the context."""
    from edgeinfer.chat import Conversation

    n_ctx, n_answer = engine.n_ctx, min(N_ANSWER, engine.n_ctx // 4)
    n_prompt = n_ctx - n_answer
    text = engine.tokenize((SUPPORT.parents[1] / "LICENSE").read_text()[: 8 * n_ctx])
    prompt = (text * (1 + n_ctx // len(text)))[:n_prompt]
    if engine.memory_plan.use.states:
        fill_states(engine, prompt)
        mark("states")
    engine.generate(prompt, max_tokens=n_answer, temperature=0.0, loop_guard=0)
    mark("long prompt")
    n_vocab = engine.tokenizer.n_vocab
    scattered = [300 + i * 7919 % (n_vocab - 1300) for i in range(n_prompt)]
    flat = {"temperature": 5.0, "top_k": 0, "top_p": 0.99, "min_p": 0.0, "repeat_penalty": 1.1, "dry_multiplier": 0.5}
    engine.generate(scattered, max_tokens=n_answer, seed=1, loop_guard=0, **flat)
    mark("flat distribution")
    period = text[:9]
    n_repeated = min(N_REPEATED, n_ctx // 4)
    engine.generate((period * n_prompt)[: n_ctx // 4], max_tokens=n_repeated, temperature=0.0, loop_guard=0)
    mark("repeated text")
    if n_ctx >= 512:
        "".join(piece.text for piece in Conversation(engine).send("Say something of the sea.", max_tokens=n_answer))
        mark("chat")


def fill_states(engine: Any, text: list[int]) -> None:
    """Texts that run at once with all states and rows that they can have."""
    from edgeinfer.backends.base import Rows, run_sequence

    model, n_texts = engine.session.model, engine.memory_plan.n_sequences
    engine.session.truncate(0)
    model.forget_parked()
    sessions = [model.session() for _ in range(n_texts)]
    for first in range(0, engine.n_ctx - 5 * ROWS * n_texts - CHAIN, CHAIN):  # one text has those of all others too
        run_sequence(sessions[0], text[first : first + CHAIN])
    model.forward([Rows(session, text[: 2 * ROWS]) for session in sessions])  # states before it and after it
    for _ in range(2):
        model.forward([Rows(session, text[:ROWS]) for session in sessions])
        for session in sessions:
            session.commit(range(ROWS))
    model.forward([Rows(session, text[:ROWS]) for session in sessions])  # beside those that are in no state
    for session in sessions:
        session.close()


def in_a_process(cell: Cell, path: Path, cache: Path) -> dict[str, Any]:
    """The same, in a new process with its own folder for measurements."""
    options = {"n_ctx": cell.n_ctx, "cache_type": cell.cache_type, "draft": cell.draft, **cell.more}
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, __file__, "--child", json.dumps({"path": str(path), "options": options})]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {"cell": cell.name, **json.loads(result.stdout.splitlines()[-1])}


# ---- all cells -------------------------------------------------------------------------------------------------------


def line(result: dict[str, Any]) -> str:
    """A cell as a line of the table."""
    planned, taken = result["peak"] / MIB, result["peak_taken"] / MIB
    mark = "ABOVE" if result["error"] < 0.0 else "loose" if result["error"] > 0.05 and planned > 100 else ""
    return (
        f"{result['cell']:46} planned {planned:6.1f} MiB, taken {taken:6.1f}  {result['error']:+6.2%}  "
        f"{planned - taken:+5.1f}  {mark}"
    )


def details(result: dict[str, Any]) -> str:
    """Purposes, planned and taken, and stages, in MiB."""
    items = (
        f"{item['purpose']}{' ' if item['detail'] else ''}{item['detail']} {item['planned'] / MIB:.2f}"
        f"/{'?' if item['taken'] is None else round(item['taken'] / MIB, 2)}"
        for item in result["items"]
    )
    stages = (f"{name} {now / MIB:.1f} (peak {peak / MIB:.1f})" for name, (peak, now) in result["stages"].items())
    return f"    {', '.join(items)}\n    {', '.join(stages)}"


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst cells, and how many took more than planned or were planned with more than 5 % too much."""
    large = [result for result in results if result["peak"] > 100 * MIB]
    return {
        "cells": len(results),
        "above_planned": [result["cell"] for result in results if result["error"] < 0.0],
        "more_than_5_percent_below": [result["cell"] for result in large if result["error"] > 0.05],
        "least_error": round(min(result["error"] for result in results), 4),
        "most_error": round(max(result["error"] for result in large), 4) if large else None,
        "mean_error": round(sum(result["error"] for result in results) / len(results), 4),
    }


def main() -> None:
    """Read the command line, run the cells, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smollm2", type=Path, nargs="?")
    parser.add_argument("--folder", type=Path, help="where the models are written, and kept")
    parser.add_argument("--cells", default="", help="words that the cells have")
    parser.add_argument("--parts", action="store_true", help="print purposes and stages of each cell")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        job = json.loads(arguments.child)
        print(json.dumps(run_cell(Path(job["path"]), job["options"])))
        return
    words = set(arguments.cells.split())
    requested = [cell for cell in cells() if words <= set(cell.name.split())]
    with tempfile.TemporaryDirectory() as scratch:
        report = run_all(requested, arguments, Path(scratch))
    print(report)


def run_all(requested: list[Cell], arguments: argparse.Namespace, scratch: Path) -> str:
    """The report of the requested cells, and of those that its file has; each is printed as it ends."""
    folder = arguments.folder or scratch
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    if arguments.json and arguments.json.exists():
        results = {result["cell"]: result for result in json.loads(arguments.json.read_text())["cells"]}
    for cell in requested:
        if cell.name in results:
            continue
        result = in_a_process(cell, model_of(cell, folder, arguments.smollm2), scratch / "cache")
        results[cell.name] = result
        print(line(result), flush=True)
        if arguments.parts:
            print(details(result), flush=True)
        if arguments.json:
            arguments.json.write_text(report_of(results) + "\n")
    return report_of(results)


def report_of(results: Mapping[str, dict[str, Any]]) -> str:
    """All results as JSON, in the order of the grid."""
    from machine import machine

    known = [results[cell.name] for cell in cells() if cell.name in results]
    return json.dumps({**machine(), "summary": summary(known), "cells": known})


if __name__ == "__main__":
    main()
