"""Budgets on tiny models: nothing is killed or above its budget, and what does not fit is refused with what does.

    python tests/benchmarks/check_budget.py --json docs/measurements/budget-zen3.json

Random settings (architecture, context, batch, cache type, drafts, expert cache) load within a random budget between
the least that they need and all that they use, in a process under a memory cgroup whose limit is the budget. Killed is
a process that the system ended; above is one whose peak of resident memory (VmHWM) was larger; the tokens are compared
with those without a budget. Others get a budget below the least: all must end with exit code 4, and what the error
proposes (a context, a cache type, a file) must load within that budget. Where no cgroup may be made, the limit is
RLIMIT_DATA.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from budget_run import Job
from machine import machine
from memory_group import MemoryGroup
from tiny_experts import write_tiny_experts
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

DENSE = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "exaone4", "smollm3", "olmo2")
EXPERTS = ("qwen3moe", "olmoe", "granitemoe", "gpt-oss")
TYPES = ("F16", "Q8_0", "Q4_0")  # the last one is what a smaller quantisation is tried with
MIB = 1 << 20
SIZES = {"n_embd": 256, "n_layers": 4, "n_ff": 512, "n_ctx_train": 2048}


@dataclass
class Found:
    """What the checks found."""

    n_fitting: int = 0
    n_killed: int = 0
    n_above: int = 0
    n_other_text: int = 0
    n_refused: int = 0
    n_not_refused: int = 0
    proposals: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    failed: list[dict[str, Any]] = field(default_factory=list)
    peak_over_budget: list[float] = field(default_factory=list)


class Models:
    """Tiny models in a folder, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self, architecture: str, kind: str) -> Path:
        path = self._folder / f"{architecture}-{kind}.gguf"
        if not path.exists():
            if architecture in EXPERTS:
                sizes = {"n_experts": 32, "n_layers": 3, "n_embd": 256, "n_ff": 256}
                write_tiny_experts(path, architecture, kind, **sizes)  # type: ignore[arg-type]
            else:
                write_tiny_model(path, architecture, kind, **SIZES)  # type: ignore[arg-type]
        return path

    def wide(self, kind: str) -> Path:
        """A model with weights of some MiB: 26 in F16."""
        path = self._folder / f"wide-{kind}.gguf"
        return path if path.exists() else write_tiny_model(path, "llama", kind, **SIZES | {"n_embd": 512, "n_ff": 2048})

    def head(self, target: Path) -> Path:
        path = target.with_suffix(".head")
        return path if path.exists() else write_tiny_head(path, target)


def random_job(rng: random.Random, models: Models) -> Job:
    """Settings without a budget."""
    architecture, kind = rng.choice((*DENSE, *EXPERTS)), rng.choice(TYPES)
    path = models.model(architecture, kind)
    options: dict[str, Any] = {
        "n_ctx": rng.choice((64, 200, 512, 1024, 2048)),
        "n_batch": rng.choice((32, 128, 512)),
        "n_threads": rng.choice((1, 2)),
        "draft_device": "cpu",
        "cache_type": rng.choice(("f16", "q8_0")),
    }
    drafts: list[Any] = ["none", "auto", ["suffix"], ["recycling"]]
    if architecture in ("llama", "qwen2", "qwen3"):
        other = models.model("qwen2" if architecture == "llama" else "llama", "Q4_0")
        drafts += [str(other), str(models.head(path)), [str(models.head(path))]]
    options["draft"] = rng.choice(drafts)
    if architecture in EXPERTS:
        options["expert_cache"] = rng.choice(("auto", None, "50%", "25%"))
    return Job(str(path), options)


def run(job: Job, limit: int | None = None) -> dict[str, Any]:
    """What a job in a process of its own says, under a limit of its memory; {"killed": signal} if it said nothing."""
    group, enter = _limited(limit) if limit is not None else (None, None)
    try:
        command = [sys.executable, str(Path(__file__).with_name("budget_run.py"))]
        text = json.dumps(asdict(job))
        done = subprocess.run(command, input=text, capture_output=True, text=True, preexec_fn=enter, timeout=600)
    finally:
        if group is not None:
            group.remove()
    if done.returncode or not done.stdout:
        return {"killed": done.returncode, "stderr": done.stderr[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _limited(limit: int) -> tuple[MemoryGroup | None, Callable[[], None]]:
    """A memory cgroup of that limit and what enters it, or what sets RLIMIT_DATA."""
    with suppress(SystemExit):
        group = MemoryGroup(limit)
        return group, group.enter
    return None, lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def with_budget(job: Job, budget: int, **changes: Any) -> Job:
    return Job(job.path, {**job.options, "budget": budget, **changes})


def check_fitting(job: Job, share: float, whole: dict[str, Any], found: Found) -> None:
    """Load within a budget between the least (share 0) and all (1). whole: what the job says without a budget."""
    budget = whole["least"] + MIB + round(share * max(0, whole["planned"] - whole["least"]))
    said = run(with_budget(job, budget), budget)
    found.n_fitting += 1
    if "killed" in said or "error" in said:
        found.n_killed += 1
        found.failed.append({"job": asdict(job), "budget": budget, **said})
        return
    found.steps.update(_kind(note) for note in said["notes"])
    found.peak_over_budget.append(round(said["peak_taken"] / budget, 4))
    is_above, is_other = said["peak_taken"] > budget, said["tokens"] != whole["tokens"]
    found.n_above += is_above
    found.n_other_text += is_other
    if is_above or is_other:
        found.failed.append({"job": asdict(job), "budget": budget, **said})


def _kind(note: str) -> str:
    """What a note is about, without its numbers."""
    about = note.partition("reduced: ")[2] or note
    return re.sub(r"[\d./]+ ?(B|KiB|MiB|GiB)?", "N ", re.sub(r"\([^)]*\)", "", about))


def job_to_refuse(rng: random.Random, models: Models) -> Job:
    """Settings of which the context, or the weights, take some MiB."""
    job = random_job(rng, models)
    if rng.random() < 0.5:
        return Job(job.path, {**job.options, "n_ctx": rng.choice((4096, 8192))})
    return Job(str(models.wide("F16")), {**job.options, "draft": "auto", "expert_cache": "auto"})


def check_refused(job: Job, share: float, models: Models, found: Found) -> None:
    """Load within a budget that is too small, and try what is proposed. share: of what a smaller context would save."""
    least = run(Job(job.path, job.options, with_least=True, loads=False))["least"]
    small = {**job.options, "n_ctx": 64, "cache_type": "f16"}
    smaller = run(Job(job.path, small, with_least=True, loads=False))["least"]
    if job.path == str(models.wide("F16")):
        smaller -= 10 * MIB
    budget = min(least - MIB, smaller + 2 * MIB + round(share * max(0, least - smaller - 3 * MIB)))
    said = run(with_budget(job, budget), budget)
    if said.get("exit_code") != 4:
        found.n_not_refused += 1
        found.failed.append({"job": asdict(job), "budget": budget, **said})
        return
    found.n_refused += 1
    for name, proposed in proposals(job, said["error"], models):
        found.proposals[name] += 1
        answer = run(with_budget(Job(proposed.path, proposed.options), budget), budget)
        if "tokens" not in answer or answer["peak_taken"] > budget:
            found.proposals[f"{name} that failed"] += 1
            found.failed.append({"job": asdict(proposed), "budget": budget, "said": said["error"], **answer})


def proposals(job: Job, message: str, models: Models) -> list[tuple[str, Job]]:
    """The jobs that an error proposes; a file only if there is one so small."""
    made = []
    if n_ctx := re.search(r"\(-c (\d+)\)", message):
        made.append(("n_ctx", Job(job.path, {**job.options, "n_ctx": int(n_ctx[1])})))
    if cache_type := re.search(r"--cache-type (\w+) fits", message):
        made.append(("cache type", Job(job.path, {**job.options, "cache_type": cache_type[1]})))
    if most := re.search(r"a file of at most ([\d.]+) (KiB|MiB)", message):
        n_bytes = float(most[1]) * (MIB if most[2] == "MiB" else 1 << 10)
        architecture = Path(job.path).stem.rpartition("-")[0]
        for kind in TYPES:
            path = models.wide(kind) if architecture == "wide" else models.model(architecture, kind)
            if path.stat().st_size <= n_bytes:
                made.append(("file", Job(str(path), {**job.options, "draft": "none"})))
                break
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fitting", type=int, default=200)
    parser.add_argument("--refused", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rng, found = random.Random(arguments.seed), Found()
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for number in range(max(arguments.fitting, arguments.refused)):
            if number < arguments.fitting:
                job = random_job(rng, models)
                whole = run(Job(job.path, {**job.options, "budget": "100%"}, with_least=True))
                check_fitting(job, rng.random(), whole, found)
            if number < arguments.refused:
                check_refused(job_to_refuse(rng, models), rng.random(), models, found)
            print(number, found.n_killed, found.n_above, found.n_other_text, dict(found.proposals), file=sys.stderr)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report(found), indent=1) + "\n")
    print(json.dumps(report(found)))
    sys.exit(bool(found.failed))


def report(found: Found) -> dict[str, Any]:
    """What was found so far."""
    about = {"command": " ".join(sys.argv), "limit": kind_of_limit(), "machine": machine(), "commit": commit()}
    return {**about, **vars(found)}


@cache
def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


@cache
def kind_of_limit() -> str:
    group, _ = _limited(64 * MIB)
    if group is None:
        return "RLIMIT_DATA"
    group.remove()
    return "memory cgroup"


if __name__ == "__main__":
    main()
