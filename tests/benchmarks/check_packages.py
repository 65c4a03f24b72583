"""Packages for phones in their runtimes: greedy tokens and logits against the native engine.

python tests/benchmarks/check_packages.py MODEL.gguf ... [--to genai mnn] [--draft MODEL.gguf|ngram] [-c N]

Each model is exported to each target, with the check that the command makes, into a folder that is gone afterwards.
Needs edgeinfer[genai] and edgeinfer[mnn]. The last line on stdout is JSON with every figure; the exit code is 1 where a
package was refused, or its greedy tokens are others that are no ties.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from edgeinfer.common.errors import EdgeInferError
from edgeinfer.exporters.checks.runtime import TIE
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.targets import open_target

N_WANTED = 24


def checked(name: str, source: Path, draft: str | None, n_ctx: int | None) -> dict[str, Any]:
    """Figures of one package."""
    result: dict[str, Any] = {"target": name, "model": source.name}
    with tempfile.TemporaryDirectory() as folder:
        request = Request(source, Path(folder) / "package", draft=draft, n_ctx=n_ctx)
        try:
            written = open_target(name).write(request, lambda share: None)
        except EdgeInferError as error:
            return result | {"passed": False, "error": str(error)}
        n_bytes = sum(path.stat().st_size for path in written.files)
    facts = dict(written.facts)
    passed = facts["n_equal_tokens"] >= N_WANTED or facts["most_apart"] < TIE
    result |= {"passed": passed, "check": written.check, "peak_bytes": written.check_bytes}
    return result | {"n_bytes": n_bytes, **facts}


def main() -> int:
    from machine import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--to", nargs="+", default=["genai", "mnn"])
    parser.add_argument("--draft", help="of genai: a model with the same vocabulary, or ngram")
    parser.add_argument("-c", "--ctx", type=int, dest="n_ctx")
    options = parser.parse_args()
    packages = []
    for source in options.models:
        for name in options.to:
            draft = options.draft if name == "genai" else None
            packages.append(checked(name, source, draft, options.n_ctx))
            print(packages[-1], file=sys.stderr)
    print(json.dumps({"packages": packages, "machine": machine()}))
    return 0 if all(package["passed"] for package in packages) else 1


if __name__ == "__main__":
    sys.exit(main())
