"""Texts of models with a cache of experts in processes whose reads fail, or that are killed."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from faults import SUPPORT, compile_faults, environment_of
from split_models import split_model
from tiny_experts import write_tiny_experts
from try_texts import sizes_of, texts

from edgeinfer.backends.native import NativeBackend
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_TEXTS = 4
SECONDS = 120  # of a process: what takes longer hangs
NAME = "faulty"  # of the files whose reads fail


@dataclass(frozen=True)
class FaultRun:
    """One process.  reads: see faulty_reads.c.  killed_after: seconds, None where it may end.  can_fail: whether an
    error is what should come of that, not only a right text."""

    model: Path
    cache_bytes: int
    n_threads: int
    reads: str
    past_the_cache: bool
    can_fail: bool
    killed_after: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a run: texts with the right logits, errors, and what should not be, empty for nothing."""

    n_right: int
    errors: tuple[str, ...]
    wrong: str = ""


class FaultRuns:
    """Models of which the runs are, in a folder, and what is right."""

    def __init__(self, folder: Path) -> None:
        self._library = compile_faults(folder)
        self.models = _models(folder)
        self._right = [each["sha256"] for each in texts(self.models[0], None, 1, N_TEXTS)]
        self._hashes = {path: _hash(path) for model in self.models for path in model.parent.iterdir()}
        self._sizes = sizes_of(self.models[0])

    def random_run(self, rng: random.Random) -> FaultRun:
        """A run of one of the models with some fault."""
        share = rng.choice([0, 0.25, 0.5, 0.75])
        first, every = rng.randint(2, 250), rng.choice([0, 0, rng.randint(5, 300)])
        kind = rng.choice(["eio", "eio", "short", "slow", "late", "cut", "kill"])
        reads = {
            "eio": f"eio:{first}:{every}",
            "short": f"short:{first}:{max(1, every % 4)}",
            "slow": f"slow:{first}:{max(9, every)}",
            "late": f"late:{first}:{max(2, every)}",
            "cut": f"end:{first}:1",
            "kill": f"slow:{first}:{max(9, every)}",
        }[kind]
        return FaultRun(
            model=rng.choice(self.models),
            cache_bytes=max(self._sizes.least, int(self._sizes.total * share)),
            n_threads=rng.choice([1, 2]),
            reads=reads,
            past_the_cache=rng.random() < 0.8,
            can_fail=kind in ("eio", "cut"),
            killed_after=rng.uniform(0.2, 1.5) if kind == "kill" else None,
        )

    def outcome(self, run: FaultRun) -> Outcome:
        """Start the process and look at what it says."""
        environment = environment_of(self._library, NAME, run.reads, run.past_the_cache)
        command = [sys.executable, str(SUPPORT / "try_texts.py"), str(run.model), str(run.cache_bytes)]
        command += [str(run.n_threads), str(N_TEXTS)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if run.killed_after is not None:
            time.sleep(run.killed_after)
            process.send_signal(signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Outcome(0, (), f"hangs: nothing came within {SECONDS} s")
        if run.killed_after is None and process.returncode:
            return Outcome(0, (), f"exit code {process.returncode}: {err[-500:]}")
        return self._judged(run, [json.loads(line) for line in out.splitlines() if line.endswith("}")])

    def _judged(self, run: FaultRun, found: list[dict[str, str]]) -> Outcome:
        errors = tuple(each["error"] for each in found if "error" in each)
        shas = [(each["sha256"], self._right[i]) for i, each in enumerate(found) if "sha256" in each]
        wrong = ""
        if any(sha != right for sha, right in shas):
            wrong = "a text has wrong logits"
        elif errors and not run.can_fail:
            wrong = f"an error where there is none: {errors[0]}"
        elif any("at byte" not in error and "cannot be read" not in error for error in errors):
            wrong = f"an error that does not say where: {errors}"
        elif run.reads.startswith("eio") and run.reads.endswith(":0") and len(errors) > 1:
            wrong = f"one read failed, and more than one text: {errors}"
        elif any(_hash(path) != before for path, before in self._hashes.items()):
            wrong = "a file has changed"
        return Outcome(len(shas), errors, wrong)


def _models(folder: Path) -> list[Path]:
    """The same model in one file, in three, and packed."""
    paths = []
    for kind in ("whole", "split", "packed"):
        (folder / kind).mkdir()
        path = write_tiny_experts(folder / kind / f"{NAME}.gguf", "qwen3moe", "Q4_K", n_experts=16, n_used=3)
        if kind == "split":
            path, whole = split_model(path, folder / kind, 3)[0], path
            whole.unlink()
        paths.append(path)
    with ModelFile.open(paths[-1]) as file:
        NativeBackend(tuned=False).pack(file, read_spec(file), packed_path(paths[-1]))
    return paths


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
