"""What damaged checkpoints do, see checkpoint_mutations: typed errors only, bounded, and nothing else is opened."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from checkpoint_mutations import Mutation, damaged, mutations, write_bases

from edgeinfer.common.errors import EdgeInferError
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.huggingface import open_folder

SECONDS, BYTES = 5.0, 256 << 20  # of the processor; of memory that Python and numpy take
_opened: list[str] | None = None


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str | bytes):
        _opened.append(os.path.realpath(os.fsdecode(arguments[0])))


sys.addaudithook(_note_opened)


@dataclass(frozen=True)
class Outcome:
    """error: its class, "" for none.  crash: what is no EdgeInferError.  outside: files that were opened elsewhere."""

    family: str
    base: str
    error: str
    seconds: float
    n_bytes: int
    crash: str = ""
    outside: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return not self.crash and not self.outside and self.seconds < SECONDS and self.n_bytes < BYTES


def use(folder: Path, has_vocabulary: bool) -> None:
    """Do what an export does: read the header, the vocabulary, and all weights."""
    if not has_vocabulary:
        checkpoint = Checkpoint.open(folder)
        for name in checkpoint.names:
            shape = checkpoint.shape(name)
            if len(shape) > 1:
                checkpoint.rows(name, 0, min(4, shape[0]))
            checkpoint.floats(name)
            checkpoint.release(name)
        return
    source = open_folder(folder)
    for tensor in source.tensors:
        tensor.rows(0, tensor.n_rows)
        source.release(tensor.name)


def run(mutation: Mutation, folder: Path) -> Outcome:
    """What a damaged checkpoint does."""
    global _opened
    error = crash = ""
    tracemalloc.start()
    _opened, start = [], time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use(folder, mutation.base in ("single", "sharded"))
    except EdgeInferError as found:
        error = type(found).__name__
    except BaseException:  # noqa: B036  a panic of a library in Rust is no Exception
        crash = traceback.format_exc()
    seconds, opened = time.process_time() - start, _opened
    _opened = None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    here = [folder, tempfile.gettempdir(), sys.prefix, sys.base_prefix, Path(__file__).parents[2]]
    allowed = tuple(os.path.realpath(path) + os.sep for path in here)
    outside = {path for path in opened if not path.startswith(allowed)}
    return Outcome(mutation.family, mutation.base, error, seconds, peak, crash, tuple(sorted(outside)))


def outcomes(n: int, seed: int, only: Collection[int] | None = None) -> list[tuple[int, Outcome]]:
    """Of the first n mutations, or of some of them by their indices."""
    found = []
    import pytest

    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        home = Path(scratch)
        (home / "temporary").mkdir()
        patch.setattr(tempfile, "tempdir", str(home / "temporary"))
        bases = write_bases(home)
        (home / "secret.safetensors").write_bytes((bases["single"] / "model.safetensors").read_bytes())
        for base in bases:
            use(bases[base], base in ("single", "sharded"))  # sound, and imports are done
        for index, mutation in enumerate(islice(mutations(), n)):
            if only is None or index in only:
                folder = damaged(mutation, bases, home / "damaged", random.Random(f"{seed} {index}"))
                found.append((index, run(mutation, folder)))
    return found
