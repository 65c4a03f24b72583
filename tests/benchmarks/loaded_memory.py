"""What a model takes when it is loaded and its context is full, and the peak before that, each in a process of its own.

    python tests/benchmarks/loaded_memory.py MODEL... [--n-ctx 512] [--draft none,auto] [--expert-cache SIZE] [--packed]
    python tests/benchmarks/loaded_memory.py --gemma3-vocabulary

The context is filled with tokens from all over the vocabulary. --packed: the model has a file of packed weights beside
it. --gemma3-vocabulary: instead of a model, one is written with the 262,144 tokens of Gemma 3 and small matrices, whose
output matrix is its embedding. Linux only. One JSON line on stdout, in MiB. To compare with another commit, run this
file with that commit's Python.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

GEMMA3_VOCABULARY = 262_144
MIB = 1 << 20


def status() -> dict[str, int]:
    """Bytes of this process: VmRSS, VmHWM, RssAnon, RssFile."""
    found = re.findall(r"^(VmRSS|VmHWM|RssAnon|RssFile):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return {name: int(n) << 10 for name, n in found}


def mapped(path: Path) -> int:
    """Resident bytes of a file that is mapped here."""
    n_bytes, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            n_bytes += is_of_file * int(line.split()[1]) << 10
        elif re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_file = line.endswith(str(path))
    return n_bytes


def load(path: Path, draft: str, n_ctx: int, expert_cache: str | None) -> dict[str, float | str]:
    """Figures of one load in this process."""
    import edgeinfer
    import edgeinfer.loading.open
    from edgeinfer.backends.base import run_sequence

    imported = status()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    options = {} if expert_cache is None else {"expert_cache": expert_cache}
    with edgeinfer.load(path, draft=draft, n_ctx=n_ctx, **options) as engine:
        loaded, of_model = status(), mapped(path.resolve())
        tokens = np.linspace(0, engine.session.spec.n_vocab - 1, n_ctx - 2).astype(np.int32)  # all of the vocabulary
        run_sequence(engine.session, tokens)
        full, use = status(), engine.memory_plan.use
        of_model = max(of_model, mapped(path.resolve()))
    sizes = {
        "imported": imported,
        "planned_weights": use.weights,
        "planned_kv_cache": use.kv_cache,
        "planned_activations": use.activations,
        "planned_drafters": use.drafters,
        "planned_experts": use.experts,
        "loaded": loaded["VmRSS"],
        "loading_peak": loaded["VmHWM"],
        "full": full["VmRSS"],
        "full_anonymous": full["RssAnon"],
        "mapped_of_the_model": of_model,
    }
    figures: dict[str, float | str] = {name: round(n / MIB, 1) for name, n in sizes.items()}
    above = max(loaded["VmHWM"], full["VmHWM"]) / max(loaded["VmRSS"], full["VmRSS"]) - 1
    return figures | {"peak_above_steady_percent": round(100 * above, 1)}


def write_gemma3_vocabulary(folder: Path) -> Path:
    """A tiny model of Gemma 3's vocabulary."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from tiny_models import write_tiny_model

    sizes = {"n_embd": 128, "n_ff": 256, "n_layers": 2}
    return write_tiny_model(
        folder / "gemma3-vocabulary.gguf", "llama", "Q8_0", n_vocab=GEMMA3_VOCABULARY, tied=True, **sizes
    )


def in_a_process(path: Path, *arguments: str) -> dict[str, float | str]:
    """The figures that this file gives in a process of its own."""
    command = [sys.executable, __file__, "--alone", str(path), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float | str] = json.loads(run.stdout.splitlines()[-1])
    return figures


@click.command()
@click.argument("models", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--n-ctx", default=512)
@click.option("--draft", default="none,auto")
@click.option("--expert-cache")
@click.option("--packed", is_flag=True)
@click.option("--gemma3-vocabulary", is_flag=True)
@click.option("--alone", is_flag=True, hidden=True)
def main(
    models: tuple[Path, ...],
    n_ctx: int,
    draft: str,
    expert_cache: str | None,
    packed: bool,
    gemma3_vocabulary: bool,
    alone: bool,
) -> None:
    """See the top of this file."""
    if alone:
        print(json.dumps(load(models[0], draft, n_ctx, expert_cache)))
        return
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for path in [write_gemma3_vocabulary(Path(folder))] if gemma3_vocabulary else models:
            if path.with_name(path.name + ".packed").exists() != packed:
                raise click.UsageError(f"{path}: --packed says whether it is packed")
            for drafts in draft.split(","):
                options = ["--draft", drafts, "--n-ctx", str(n_ctx)]
                options += ["--expert-cache", expert_cache] if expert_cache else []
                facts = {"model": path.name, "draft": drafts, "packed": packed, "expert_cache": expert_cache}
                runs.append(facts | in_a_process(path, *options))
                print(runs[-1], file=sys.stderr)
    print(json.dumps({"benchmark": "loaded_memory", "n_ctx": n_ctx, "mib": runs}))


if __name__ == "__main__":
    main()
