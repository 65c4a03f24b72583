"""llama.cpp's process as a test needs it: its calls noted, held up, or ending in a crash.

The process that edgeinfer starts looks for modules where the test's own does; it finds `staged/llama_cpp` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_until

_FOLDER = Path(__file__).parent / "staged"
_PASSES = """
import pathlib, time
_folder, _decode = pathlib.Path({folder!r}), llama_cpp.llama_decode

def noted_decode(context, batch):
    with open(_folder / "passes", "a") as file:
        file.write(f"{{batch.n_tokens}}\\n")
    hold = _folder / "hold"
    if hold.exists() and len((_folder / "passes").read_text().split()) == int(hold.read_text()):
        hold.unlink()
        (_folder / "held").touch()
        while not (_folder / "go").exists():
            time.sleep(0.001)
    return _decode(context, batch)

llama_cpp.llama_decode = noted_decode
"""
CRASH = """
import ctypes, os
def crash(words):
    os.write(2, words.encode() + b"\\n")
    ctypes.string_at(0)
"""
CRASH_WITH_EXTRA_BUFFERS = (
    CRASH
    + """
_load, _decode_before, _has_extra_buffers = llama_cpp.llama_model_load_from_file, llama_cpp.llama_decode, False

def load(path, params):
    global _has_extra_buffers
    _has_extra_buffers = params.use_extra_bufts
    return _load(path, params)

def crashing_decode(context, batch):
    return crash("in the tiles") if _has_extra_buffers else _decode_before(context, batch)

llama_cpp.llama_model_load_from_file, llama_cpp.llama_decode = load, crashing_decode
"""
)


class Stage:
    """Processes of llama.cpp that start from now on note each pass, and do what `play` says."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._source = folder / "stage.py"
        self._n_seen = 0
        self.play("")
        patch.syspath_prepend(str(_FOLDER))
        patch.setenv("PYTHONPATH", str(_FOLDER))  # of other hosts that a test starts
        patch.setenv("LLAMA_CPP_STAGE", str(self._source))

    def play(self, source: str) -> None:
        """Change llama_cpp by this source, in which it has that name, in processes that start later."""
        self._source.write_text(_PASSES.format(folder=str(self.folder)) + source)

    def passes(self) -> list[int]:
        """Numbers of tokens of the passes since the last call of this."""
        path = self.folder / "passes"
        every = [int(n) for n in path.read_text().split()] if path.exists() else []
        new, self._n_seen = every[self._n_seen :], len(every)
        return new

    @contextmanager
    def meanwhile(self, at: int, act: Callable[[], object]) -> Iterator[None]:
        """Within, the pass of that number from now on, 1 or more, waits until another thread has acted."""
        self.passes()
        for name in ("held", "go"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "hold").write_text(str(self._n_seen + at))

        def act_once() -> None:
            wait_for(self.folder / "held")
            act()
            (self.folder / "go").touch()

        thread = threading.Thread(target=act_once)
        thread.start()
        try:
            yield
        finally:
            thread.join()


def wait_for(path: Path, seconds: float = 60.0) -> None:
    """Wait until there is such a file."""
    wait_until(path.exists, seconds, f"there is no {path}")
