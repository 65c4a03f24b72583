"""Exactness on real models: the comparisons of tests/support/exactness.py, bit by bit.

    python tests/benchmarks/check_exact.py MODEL.gguf ... [--tokens 80] [--cache-type q8_0]

Exits with 1 if any bit differs. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from machine import machine
from text import LICENSE_TEXT

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from exactness import comparisons  # noqa: E402

from edgeinfer.backends.native import NativeBackend, NativeSession, available_isas  # noqa: E402
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device  # noqa: E402
from edgeinfer.models import read_spec  # noqa: E402
from edgeinfer.models.gguf import ModelFile  # noqa: E402
from edgeinfer.models.tokenizer import Tokenizer  # noqa: E402


def check(path: Path, n_tokens: int, cache_type: CacheType) -> dict[str, bool]:
    """What was compared, and whether all bits were equal."""
    import numpy as np

    with ModelFile.open(path) as file:
        spec = read_spec(file)
        tokens = np.array(Tokenizer.from_file(file).encode(LICENSE_TEXT)[:n_tokens], dtype=np.int32)
        backend = NativeBackend()

        def open_session(n_threads: int = 2, isa: str | None = None, n_batch: int = 512) -> NativeSession:
            plan = backend.plan(
                file, spec, LoadSettings(1024, n_batch=n_batch, n_threads=n_threads, cache_type=cache_type)
            )
            return backend.load(file, spec, plan, Device(n_threads, isa)).session()

        results = {}
        for what, equal in comparisons(open_session, available_isas(), tokens):
            print(f"{path.name}: {'equal' if equal else 'DIFFERENT'}: {what}", file=sys.stderr, flush=True)
            results[what] = equal
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--tokens", type=int, default=80, help="length of the text, at least 64")
    parser.add_argument("--cache-type", choices=["f16", "q8_0", "k6v4"], default="f16", help="of the KV cache")
    arguments = parser.parse_args()
    results = {path.name: check(path, arguments.tokens, arguments.cache_type) for path in arguments.models}
    different = sum(not equal for of_model in results.values() for equal in of_model.values())
    print(json.dumps({"benchmark": "exact", "machine": machine(), "different": different, "results": results}))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
