"""Packages for ExecuTorch in its runtime: greedy tokens and logits against the native engine.

    python tests/benchmarks/check_pte.py MODEL.gguf ... [--type F32|Q4_0] [-c N]

Each model is exported with the check that the command makes, into a folder that is gone afterwards; float types give
float32, others 4 bits. Needs edgeinfer[executorch]. The last line on stdout is JSON with every figure; the exit code is
1 where a package was refused, or one in float32 has other greedy tokens than its source that are no ties.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edgeinfer.errors import EdgeInferError
from edgeinfer.exporters.checks.runtime import TIE
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.targets import open_target

N_WANTED = 24


def checked(source: Path, type: str | None, n_ctx: int | None) -> dict[str, Any]:
    """Figures of one package."""
    result: dict[str, Any] = {"model": source.name, "type": type}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        request = Request(source, Path(folder) / "package", type=type, n_ctx=n_ctx)
        try:
            written = open_target("pte").write(request, lambda share: None)
        except EdgeInferError as error:
            return result | {"passed": False, "error": str(error)}
        n_bytes = sum(path.stat().st_size for path in written.files)
    facts = dict(written.facts)
    rounded = facts["weights"] != "float32"
    passed = rounded or facts["n_equal_tokens"] >= N_WANTED or facts["most_apart"] < TIE
    seconds = round(time.monotonic() - start)
    result |= {"peak_bytes": written.check_bytes, "seconds": seconds}
    return result | {"passed": passed, "check": written.check, "n_bytes": n_bytes, **facts}


def main() -> int:
    from machine import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--type", help="of the weights, as in edgeinfer export; else those of the file")
    parser.add_argument("-c", "--ctx", type=int, dest="n_ctx")
    options = parser.parse_args()
    packages = []
    for source in options.models:
        packages.append(checked(source, options.type, options.n_ctx))
        print(packages[-1], file=sys.stderr)
    print(json.dumps({"packages": packages, "machine": machine()}))
    return 0 if all(package["passed"] for package in packages) else 1


if __name__ == "__main__":
    sys.exit(main())
