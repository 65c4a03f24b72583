"""Damaged model files: each loads soundly or is refused with an EdgeInferError, in 2 s and 256 MiB, without a crash.

Seconds are those of the processor, so that no other program decides. Where native lacks something, llama.cpp is asked
in its own process, which may crash, and takes some seconds more.

    python tests/benchmarks/fuzz_gguf.py [--cases 2000] [--seed 0] [--only INDEX ...] [--model FILE.gguf]
    python tests/benchmarks/fuzz_gguf.py --hybrid qwen35 [...]
    python tests/benchmarks/fuzz_gguf.py --gemma4 small [...]
    python tests/benchmarks/fuzz_gguf.py --mamba nemotron_h_moe+latent [...]
    python tests/benchmarks/fuzz_gguf.py --latents glm [...]

Exits with 1 if a case does anything else. One JSON line on stdout at the end; a case is its index and the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from gguf_mutations import Mutation, mutations  # noqa: E402
from tiny_gemma4 import GEMMA4_VARIANTS, write_tiny_gemma4  # noqa: E402
from tiny_hybrids import HYBRID_ARCHITECTURES, write_tiny_hybrid  # noqa: E402
from tiny_latents import LATENT_KINDS, write_tiny_latents  # noqa: E402
from tiny_mamba import MAMBA_MODELS, write_tiny_mamba  # noqa: E402
from tiny_models import write_tiny_model  # noqa: E402

from edgeinfer.backends.native import NativeBackend  # noqa: E402, F401  imported once here, not in every child
from edgeinfer.common.errors import BackendCrashed, EdgeInferError, InvalidGGUF, ModelFileError  # noqa: E402
from edgeinfer.loading.open import load  # noqa: E402
from edgeinfer.models import read_spec  # noqa: E402
from edgeinfer.models.gguf import ModelFile  # noqa: E402
from edgeinfer.models.tokenizer import Tokenizer  # noqa: E402

TIME_LIMIT_SECONDS = 2.0
LLAMA_CPP_SECONDS = 6.0  # more where llama.cpp is asked too, in up to two processes: 0.25 s each on a quiet machine
WAITING_SECONDS = 120.0  # by the clock, for what hangs without using the processor
MEMORY_LIMIT_BYTES = 256 << 20
RESERVE_BYTES = 512 << 20  # address space, which the stacks of threads take more of than of memory
STRUCTURAL = frozenset(
    {"truncation", "counts", "lengths", "types", "dimensions and offsets", "tensor types", "version"}
    | {"bits of tensor infos", "special shapes"}
)


def load_everything(path: Path) -> None:
    """Do with a file what a user does: open it, read all of it, and make one token."""
    with ModelFile.open(path) as file:
        for name in file.tensors:
            file.data(name)[::512].sum()
            file.release(name)
        read_spec(file)
        tokenizer = Tokenizer.from_file(file)
        tokenizer.decode(tokenizer.encode("Hello, 12 worlds\n<|im_end|>", parse_special=True))
    with load(path, n_ctx=16, n_threads=1) as loaded:
        loaded.generate("Hi", max_tokens=1)


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    verdict: str  # loaded, refused, or what went wrong
    error: str = ""  # the exception's name and text
    exit_code: int = 0
    names_the_field: bool = False
    seconds: float = 0.0  # of the processor
    peak_bytes: int = 0


def run_case(path: Path, model_bytes: int) -> Outcome:
    """Load a file in a child process that may crash, hang and eat memory.

    model_bytes: size of the sound file. Twice that is this process's own, and the engine's copy is as large again.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(path, writer, RESERVE_BYTES + 4 * model_bytes)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        hung = not _answers(pipe, psutil.Process(child))
        if hung:
            os.kill(child, signal.SIGKILL)
        report = pipe.read()
    _, status, usage = os.wait4(child, 0)
    seconds, peak_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
    found: dict[str, Any] = json.loads(report) if report else {}
    if hung:
        found = {"verdict": "hung"}
    elif os.WIFSIGNALED(status):
        found = {"verdict": "crashed", "error": signal.Signals(os.WTERMSIG(status)).name}
    elif not found:
        found = {"verdict": "crashed", "error": f"exit status {os.waitstatus_to_exitcode(status)}"}
    elif peak_bytes > MEMORY_LIMIT_BYTES + 4 * model_bytes:
        found["verdict"] = "took too much memory"
    return Outcome(**found, seconds=seconds, peak_bytes=peak_bytes)


def _answers(pipe: IO[str], child: psutil.Process) -> bool:
    """Whether a child says something before its time is over."""
    end = time.monotonic() + WAITING_SECONDS
    while not select.select([pipe], [], [], 0.1)[0]:
        seconds, has_asked = _seconds_of(child)
        if seconds > TIME_LIMIT_SECONDS + LLAMA_CPP_SECONDS * has_asked or time.monotonic() > end:
            return False
    return True


def _seconds_of(child: psutil.Process) -> tuple[float, bool]:
    """Processor time of a child and of the processes that it started, and whether it started any."""
    times, running = child.cpu_times(), child.children(recursive=True)
    of_ended = times.children_user + times.children_system
    seconds = times.user + times.system + of_ended
    for each in running:
        with suppress(psutil.NoSuchProcess):
            seconds += sum(each.cpu_times()[:2])
    return seconds, bool(running) or of_ended > 0


def _run_child(path: Path, writer: int, reserve: int) -> None:
    """Load the file with `reserve` more bytes of address space, write the outcome as JSON and end the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + reserve
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        load_everything(path)
        found: dict[str, Any] = {"verdict": "loaded"}
    except EdgeInferError as error:
        found = {"verdict": "refused", "error": f"{type(error).__name__}: {error}"[:4000], "exit_code": error.exit_code}
        found["names_the_field"] = isinstance(error, InvalidGGUF)
    except BaseException:
        found = {"verdict": "failed", "error": traceback.format_exc()[-4000:]}
    os.write(writer, json.dumps(found).encode())
    os._exit(0)


def fault(mutation: Mutation, outcome: Outcome) -> str:
    """What is wrong with the outcome of a case; empty if nothing is."""
    if outcome.verdict not in ("loaded", "refused"):
        return outcome.verdict
    if mutation.must_be_refused and outcome.verdict == "loaded":
        return "loaded, though it cannot be sound"
    if mutation.family == "truncation" and not outcome.names_the_field:
        return "refused without naming field and offset"
    told_by_logits = outcome.error.startswith("NumericalError")  # F32 read as F16 is as sound as a file can say
    if mutation.family in STRUCTURAL and outcome.verdict == "refused" and not told_by_logits:
        # Where llama.cpp took a file for sound and ended its process on it, that is what is said.
        is_crash = outcome.error.startswith(BackendCrashed.__name__)
        expected = BackendCrashed.exit_code if is_crash else ModelFileError.exit_code
        return "" if outcome.exit_code == expected else f"refused with exit code {outcome.exit_code}"
    return ""


def fuzz(data: bytes, n: int, seed: int, only: Collection[int] = ()) -> dict[str, Any]:
    """Run n cases, or of them only some by index, and say what became of them."""
    verdicts: dict[str, Counter[str]] = {}
    faults, outcomes = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.gguf"
        for index, mutation in enumerate(mutations(data, n, seed)):
            if only and index not in only:
                continue
            path.write_bytes(mutation.data)
            outcome = run_case(path, len(data))
            outcomes.append(outcome)
            verdicts.setdefault(mutation.family, Counter())[outcome.verdict] += 1
            wrong = fault(mutation, outcome)
            if wrong:
                faults.append({"index": index, "fault": wrong, "what": mutation.what, **asdict(outcome)})
                print(f"case {index}: {mutation.family}: {mutation.what}: {wrong}: {outcome.error}", file=sys.stderr)
    return {
        "seed": seed,
        "cases": len(outcomes),
        "file_bytes": len(data),
        "verdicts": verdicts,
        "refused_with": Counter(outcome.error.partition(":")[0] for outcome in outcomes if outcome.error),
        "max_seconds": round(max(outcome.seconds for outcome in outcomes), 3),
        "max_peak_mib": round(max(outcome.peak_bytes for outcome in outcomes) / 2**20, 1),
        "faults": faults,
    }


_OLD = "old"  # a file of before April 2025


def sound_model(path: Path, asked: argparse.Namespace) -> Path:
    """The model that is damaged: written to that path unless it is there."""
    if asked.gemma4:
        return write_tiny_gemma4(path, asked.gemma4, "Q4_0")
    if asked.hybrid:
        n_nextn = 0 if asked.hybrid.startswith("lfm2") else 1
        return write_tiny_hybrid(path, asked.hybrid, "Q4_0", n_nextn=n_nextn)
    if asked.mamba:
        return write_tiny_mamba(path, asked.mamba, "Q4_0", n_nextn=int("moe" in asked.mamba))
    if asked.latents:
        is_old = asked.latents == _OLD
        return write_tiny_latents(path, "lite" if is_old else asked.latents, "Q4_0", is_old=is_old)
    return asked.model or write_tiny_model(path, "llama", "Q4_0", n_embd=64, n_layers=1)


def main() -> None:
    """Read the command line, fuzz, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", default=[], help="run these cases alone, by index")
    parser.add_argument("--model", type=Path, help="damage this file; default: a tiny model of 56 KB")
    parser.add_argument("--hybrid", choices=HYBRID_ARCHITECTURES, help="damage a tiny model with recurrent layers")
    parser.add_argument("--gemma4", choices=GEMMA4_VARIANTS, help="damage a tiny model of Gemma 4")
    parser.add_argument("--mamba", choices=MAMBA_MODELS, help="damage a tiny model with Mamba2")
    parser.add_argument("--latents", choices=(*LATENT_KINDS, _OLD), help="damage a tiny model with latent attention")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = sound_model(Path(folder) / "m.gguf", arguments)
        data = model.read_bytes()
        load_everything(model)  # what fails here is no fault of a mutation
    result = fuzz(data, arguments.cases, arguments.seed, arguments.only)
    print(json.dumps(result))
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
