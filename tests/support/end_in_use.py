"""A program that ends while daemon threads are in native code, each in another module.

Run: python end_in_use.py MODEL ENDING, where ENDING is one of ENDINGS.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import edgeinfer
from edgeinfer.backends.native import NativeBackend, _core
from edgeinfer.models import read_spec
from edgeinfer.models.formats.quantizing import quantize
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.tokenizer import Tokenizer

ENDINGS = {
    "return": 0,
    "exit": 7,
    "error": 1,
    "interrupt": -signal.SIGINT,
    "_exit": 9,
}  # and what subprocess says of each


def works(path: Path) -> Iterator[Callable[[], object]]:
    """What the threads do for ever: passes, sampling, tokenising, quantising, packing, reading headers, tuning."""
    # Names of this function, not of the module: what a module holds is cleared while the interpreter ends.
    for number in range(2):
        engine = edgeinfer.load(path, n_ctx=64, draft="none", n_threads=1 + number)
        yield lambda engine=engine: engine.generate("hello", max_tokens=24, temperature=1.0)  # type: ignore[misc]
    file = ModelFile.open(path)
    tokenizer = Tokenizer.from_file(file)
    yield lambda: tokenizer.encode("hello world, there is the one" * 40)
    weights = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    yield lambda: quantize(GGMLType.Q4_K, weights)
    packed = path.with_name(f"{os.getpid()}.packed")
    yield lambda: NativeBackend().pack(file, read_spec(file), packed)
    yield lambda: ModelFile.open(path).close()
    yield lambda: _core.time_format(int(GGMLType.Q4_K), "scalar", 2, 1, 1 << 12)


def _forever(work: Callable[[], object], began: threading.Event) -> None:
    for _ in itertools.count():
        work()
        began.set()


def main(path: Path, ending: str) -> None:
    """Start all threads, and end while they are at work."""
    everything = []
    for work in works(path):
        began = threading.Event()
        threading.Thread(target=_forever, args=(work, began), daemon=True).start()
        everything.append(began)
    for began in everything:
        began.wait()
    time.sleep(0.001 * (os.getpid() % 7))  # wherever they are
    if ending == "exit":
        sys.exit(7)
    if ending == "_exit":
        os._exit(9)
    if ending == "error":
        raise ValueError("the error of the program itself")
    if ending == "interrupt":
        raise KeyboardInterrupt


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
