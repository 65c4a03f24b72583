"""Files that change while their model is in use: the right text or one typed error, never the end of the process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from changes import (
    CHANGES,
    HARMLESS,
    Change,
    copy_over,
    copy_over_with_its_time,
    cut,
    let_its_time_pass,
    remove,
    rename_over,
)
from exactness import same_bits
from tiny_experts import write_tiny_experts
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.base import Rows
from edgeinfer.backends.native import NativeBackend, NativeModel
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.common.errors import ModelFileChanged, ModelFileError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

TOKENS = np.arange(40, dtype=np.int32)
N_CTX = 64


def pack(path: Path) -> Path:
    with ModelFile.open(path) as file:
        NativeBackend().pack(file, read_spec(file), packed_path(path))
    return packed_path(path)


@contextmanager
def loaded(path: Path, n_threads: int = 2, is_cached: bool = False) -> Iterator[NativeModel]:
    """A model whose ModelFile is closed already."""
    backend = NativeBackend(tuned=False)
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        least = backend.expert_sizes(file, spec).least if is_cached else None
        plan = backend.plan(file, spec, LoadSettings(N_CTX, n_threads=n_threads, expert_cache=least, parallel=2))
        model = backend.load(file, spec, plan, Device(n_threads))
    yield model
    model.close()


class Case:
    """A kind of file that passes read from: `used`, of the model `path`; `other` is of the same size."""

    def __init__(self, folder: Path, kind: str) -> None:
        (folder / "other").mkdir()
        self.is_cached = kind.startswith("experts")
        self.path, other = folder / "m.gguf", folder / "other" / "m.gguf"
        for seed, path in enumerate((self.path, other)):
            if self.is_cached:
                write_tiny_experts(path, "qwen3moe", "Q8_0", seed=seed)
            else:
                write_tiny_model(path, "llama", "Q8_0", seed=seed)
        is_packed = kind in ("packed", "experts packed")
        self.used, self.other = (pack(each) if is_packed else each for each in (self.path, other))
        assert self.used.stat().st_size == self.other.stat().st_size
        let_its_time_pass(self.used)


@pytest.fixture(params=["rows", "packed", "experts", "experts packed"])
def case(tmp_path: Path, request: pytest.FixtureRequest) -> Case:
    return Case(tmp_path, request.param)


@pytest.mark.parametrize("change", CHANGES)
def test_each_pass_on_a_changed_file_is_the_same_error(case: Case, change: Change) -> None:
    with loaded(case.path, is_cached=case.is_cached) as model:
        session, other = model.session(), model.session()
        session.forward(TOKENS[:8])
        session.commit(range(4))
        change(case.used, case.other)
        for _ in range(2):
            with pytest.raises(ModelFileError, match=rf"{case.used.name}: .*(the file has changed|was cut off)"):
                session.forward(TOKENS[8:16])
            with pytest.raises(ModelFileError, match="the file has changed|was cut off"):
                model.forward([Rows(session, TOKENS[8:16]), Rows(other, TOKENS[:4])])
        assert (session.n_past, other.n_past) == (4, 0)  # nothing was committed
        assert session.truncate(2) == 2


@pytest.mark.parametrize("change", HARMLESS)
def test_names_and_rights_may_change(case: Case, change: Change) -> None:
    with loaded(case.path, is_cached=case.is_cached) as model:
        session = model.session()
        expected = session.forward(TOKENS, logits="all").logits
        change(case.used, case.other)
        assert same_bits(session.forward(TOKENS, logits="all").logits, expected)
        moved = case.used.with_name("moved")
        still = moved if moved.exists() else case.used
        if change not in (rename_over, remove):  # a change that comes afterwards is found
            copy_over_with_its_time(still, case.other)
            with pytest.raises(ModelFileError):
                session.forward(TOKENS)


def test_weights_can_be_packed_again_while_they_are_in_use(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0")
    pack(path)
    with loaded(path) as model:
        session = model.session()
        expected = session.forward(TOKENS, logits="all").logits
        pack(path)
        assert same_bits(session.forward(TOKENS, logits="all").logits, expected)


def test_what_reads_nothing_after_loading_goes_on(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", tied=True)
    with loaded(path) as model:
        session = model.session()
        expected = session.forward(TOKENS, logits="all").logits
        os.truncate(path, 0)
        assert same_bits(session.forward(TOKENS, logits="all").logits, expected)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_change_while_a_model_is_loaded(tmp_path: Path, is_packed: bool, share: float) -> None:
    case = Case(tmp_path, "packed" if is_packed else "rows")
    changed = []

    def progress(done: float) -> None:
        if done >= share and not changed:
            changed.append(copy_over(case.path, case.other))

    with pytest.raises(ModelFileChanged, match=f"{case.path}: the file has changed"):
        edgeinfer.load(case.path, n_ctx=N_CTX, draft="none", progress=progress)
    assert changed


@pytest.mark.parametrize("change", [copy_over, cut])
def test_a_text_in_progress_ends_with_the_error_and_so_does_the_next(tmp_path: Path, change: Change) -> None:
    case = Case(tmp_path, "packed")
    with edgeinfer.load(case.path, n_ctx=N_CTX, draft="none") as engine:
        stream = engine.stream("hello", max_tokens=20, temperature=0.0)
        next(stream)
        change(case.used, case.other)
        with pytest.raises(ModelFileChanged, match=r"load it again.*renaming \(mv\)"):
            list(stream)
        for _ in range(2):
            with pytest.raises(ModelFileChanged):
                engine.generate("hello", max_tokens=2)


# ---- signals ---------------------------------------------------------------------------------------------------------

_LATE = """
import faulthandler, os, signal, sys
from pathlib import Path
sys.path.insert(0, {support!r})
import numpy as np
from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.errors import ModelFileChanged
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
path, packed, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if when == "before":
    faulthandler.enable()
backend = NativeBackend(tuned=False)
with ModelFile.open(path) as file:
    spec = read_spec(file)
    session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(64, n_threads=4)), Device(4)).session()
session.forward(np.arange(20))
if when == "after":
    faulthandler.enable()
    session.forward(np.arange(20))
os.truncate(packed, 8192)
for _ in range(3):
    try:
        session.forward(np.arange(20))
    except ModelFileChanged as error:
        print("error")
if when != "never":
    os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_a_pack_that_is_cut_in_use_is_no_signal(tmp_path: Path, when: str) -> None:
    # With the handler of faulthandler below ours or put on top of it; a signal that is sent still ends the process.
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_embd=256, n_ff=2048)
    script = _LATE.format(support=str(Path(__file__).parents[2] / "support"))
    command = [sys.executable, "-c", script, str(path), str(pack(path)), when]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["error"] * 3, run.stderr
    assert run.returncode == (0 if when == "never" else -signal.SIGBUS)
    assert ("Fatal Python error: Bus error" in run.stderr) == (when != "never")


def test_another_bus_error_still_ends_the_process(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0")
    script = (
        "import mmap, os, sys\n"
        "from edgeinfer.models.gguf import ModelFile\n"
        "file = ModelFile.open(sys.argv[1])\n"
        "file.data('token_embd.weight')\n"
        "own = open(sys.argv[2], 'w+b'); own.write(bytes(8192)); own.flush()\n"
        "mapping = mmap.mmap(own.fileno(), 8192)\n"
        "os.truncate(sys.argv[2], 0)\n"
        "print(mapping[5000])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(path), str(tmp_path / "own")], capture_output=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (-signal.SIGBUS, b"")


def test_the_handler_goes_with_the_last_mapping(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0")
    script = (
        "import sys\n"
        "from edgeinfer.models.gguf import ModelFile\n"
        "caught = lambda: [line.split()[1] for line in open('/proc/self/status') if line.startswith('SigCgt')][0]\n"
        "is_there = lambda: bool(int(caught(), 16) >> 6 & 1)\n"
        "found = [is_there()]\n"
        "for _ in range(3):\n"
        "    with ModelFile.open(sys.argv[1]) as file:\n"
        "        array = file.data('token_embd.weight')\n"
        "        found.append(is_there())\n"
        "    found.append(is_there())\n"
        "    del array\n"
        "    found.append(is_there())\n"
        "print(found)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == str([False, *[True, True, False] * 3]), run.stderr
