"""Packages for ExecuTorch in its runtime: greedy tokens and logits against the native engine.

    python tests/benchmarks/check_pte.py MODEL ... [--type F32|Q4_0] [-c N] [--package FOLDER] [--out RECORD.json]

Each model, a GGUF file or a folder of Hugging Face, is exported with the check that the command makes, into a folder
that is gone afterwards; float types give float32, others 4 bits. Needs edgeinfer[executorch], and some ten minutes a
model. --package checks a folder that is there, made of the model with that type and context, in half a minute. The
last line on stdout is JSON with every figure; --out puts it in a file, beside what a run with other arguments found.
The exit code is 1 where a package was refused, or one in float32 has other greedy tokens than its source that are no
ties.
"""

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edgeinfer.common.errors import EdgeInferError
from edgeinfer.exporters.checks.runtime import TIE
from edgeinfer.exporters.pte.check import check_package
from edgeinfer.exporters.pte.target import FILES
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.targets import open_target
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_WANTED = 24
FLOAT_TYPES = ("F32", "F16", "BF16")


def exported(source: Path, type: str | None, n_ctx: int | None) -> dict[str, Any]:
    """Figures of a package that is made here."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        request = Request(source, Path(folder) / "package", type=type, n_ctx=n_ctx)
        planned = open_target("pte").plan(request).peak_bytes
        written = open_target("pte").write(request, lambda share: None)
        n_bytes = sum(path.stat().st_size for path in written.files)
    seconds = round(time.monotonic() - start)
    found = {"check": written.check, "n_bytes": n_bytes, "seconds": seconds, "peak_bytes": written.check_bytes}
    export_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10  # no other process takes as much
    return found | {"planned_peak_bytes": planned, "export_peak_bytes": export_bytes, **written.facts}


def there(source: Path, folder: Path, type: str | None, n_ctx: int | None) -> dict[str, Any]:
    """Figures of a package that is there."""
    rounded = type not in FLOAT_TYPES
    with ModelFile.open(source) as file:
        check, facts, peak = check_package(file, folder, n_ctx or read_spec(file).n_ctx_train, rounded)
    n_bytes = sum((folder / name).stat().st_size for name in FILES)
    weights = "8da4w" if rounded else "float32"
    return {"check": check, "n_bytes": n_bytes, "peak_bytes": peak, "weights": weights, **facts}


def checked(source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one package, and whether it is good."""
    result = {"model": source.name, "type": options.type, "n_ctx": options.n_ctx}
    try:
        if options.package is None:
            facts = exported(source, options.type, options.n_ctx)
        else:
            facts = there(source, options.package, options.type, options.n_ctx)
    except EdgeInferError as error:
        return result | {"passed": False, "error": str(error)}
    passed = facts["weights"] != "float32" or facts["n_equal_tokens"] >= N_WANTED or facts["most_apart"] < TIE
    return result | {"passed": passed, **facts}


def record(options: argparse.Namespace, packages: list[dict[str, Any]]) -> dict[str, Any]:
    """What this run found, as it stands in docs/measurements."""
    from machine import machine

    words = ["python", "tests/benchmarks/check_pte.py", *(source.name for source in options.models)]
    words += ["--type", options.type] if options.type else []
    words += ["-c", str(options.n_ctx)] if options.n_ctx else []
    words += ["--package", options.package.name] if options.package else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "command": shlex.join(words),
        "commit": commit.stdout.strip(),
        "machine": machine(),
        "packages": packages,
    }


def keep(path: Path, found: dict[str, Any]) -> None:
    """Add a run to a file of them, in place of one with the same command."""
    what = "Packages for ExecuTorch in its runtime: greedy tokens and logits against the native engine"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [run for run in runs if run["command"] != found["command"]]
    path.write_text(json.dumps({"what": what, "runs": [*runs, found]}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--type", help="of the weights, as in edgeinfer export; else those of the file")
    parser.add_argument("-c", "--ctx", type=int, dest="n_ctx")
    parser.add_argument("--package", type=Path, metavar="FOLDER", help="check this one, and make none")
    parser.add_argument("--out", type=Path, metavar="RECORD.json")
    options = parser.parse_args()
    packages = []
    for source in options.models:
        packages.append(checked(source, options))
        print(packages[-1], file=sys.stderr)
    found = record(options, packages)
    if options.out is not None:
        keep(options.out, found)
    print(json.dumps(found))
    return 0 if all(package["passed"] for package in packages) else 1


if __name__ == "__main__":
    sys.exit(main())
