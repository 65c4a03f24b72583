"""What a loaded model takes: one copy of a tied embedding, nothing of its file, and little more while it is loaded."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from changes import let_its_time_pass
from exactness import same_bits
from resident_pages import resident_bytes
from tiny_models import write_tiny_model

from edgeinfer.backends.native import NativeBackend, NativeSession, available_isas
from edgeinfer.backends.native import backend as backend_module
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.backends.native.weights import EmbeddingRows
from edgeinfer.common.errors import ModelFileChanged, ModelFileError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

IDS = np.array([3, 290, 0, 17, 16, 15, 255, 256, 3], dtype=np.int32)
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def loaded(file: ModelFile, isa: str | None = None, **options: bool) -> NativeSession:
    backend, spec = NativeBackend(tuned=False, **options), read_spec(file)
    plan = backend.plan(file, spec, LoadSettings(64, n_threads=2))
    session = backend.load(file, spec, plan, Device(2, isa)).session()
    assert replace(session.memory(), kv_cache=plan.use.kv_cache) == plan.use
    return session


def logits(path: Path, isa: str | None = None, **options: bool) -> np.ndarray:
    with ModelFile.open(path) as file:
        session = loaded(file, isa, **options)
    found = session.forward(IDS, logits="all").logits  # after the end of the file's own time
    session.close()
    return found


def weights_of(path: Path, **options: bool) -> int:
    with ModelFile.open(path) as file:
        return NativeBackend(**options).plan(file, read_spec(file), LoadSettings(64)).use.weights


# ---- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["F16", "Q2_K", "Q3_K", "Q4_1", "Q5_0", "Q6_K", "Q8_0", "TQ2_0"])
def test_rows_of_the_output_matrix_give_the_bits_of_a_copy(
    tmp_path: Path, type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen2", type, tied=True)
    found = [logits(path, isa) for isa in {"scalar", available_isas()[-1]}]
    NativeBackend().pack(file := ModelFile.open(path), read_spec(file), packed_path(path))
    found += [logits(path), logits(path, packed=False, for_drafts=type == "Q4_1")]
    place = backend_module.embedding_of
    for other in ("memory", "file"):

        def elsewhere(*arguments: object, other: str = other, **held: bool) -> EmbeddingRows:
            rows = place(*arguments, **held)  # type: ignore[arg-type]
            assert rows is not None and rows.place == "output"
            return replace(rows, place=other)  # type: ignore[arg-type]

        monkeypatch.setattr(backend_module, "embedding_of", elsewhere)
        found.append(logits(path, packed=False))
    assert all(same_bits(each, found[0]) for each in found)


def test_a_tied_embedding_is_held_once_and_another_not_at_all(tmp_path: Path) -> None:
    tied, untied = (write_tiny_model(tmp_path / f"{tied}.gguf", "llama", "Q8_0", tied=tied) for tied in (True, False))
    with ModelFile.open(untied) as file:
        n_bytes = file.tensors["token_embd.weight"].n_bytes
    assert weights_of(tied) == weights_of(untied) == weights_of(untied, resident=True) - n_bytes
    assert weights_of(tied, resident=True) == weights_of(tied)
    assert same_bits(logits(untied), logits(untied, resident=True))
    with_rounding = write_tiny_model(tmp_path / "Q8_0.gguf", "llama", "Q8_0", tied=True)
    assert logits(with_rounding, for_drafts=True).shape == (len(IDS), 291)  # rows of Q8_0, an output matrix of Q4_0


def test_a_file_that_was_cut_off_is_an_error_of_the_pass(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0")
    whole = path.read_bytes()
    let_its_time_pass(path)
    with ModelFile.open(path) as file:
        session, embedding = loaded(file), file.tensors["token_embd.weight"]
    row_bytes = embedding.n_bytes // 291
    session.forward(IDS, logits="all")
    session.commit([0])
    os.truncate(path, embedding.offset + 40 * row_bytes - 1)
    with pytest.raises(ModelFileError, match=r"the embedding of token \d+, bytes \d+\.\.\d+ .* was cut off since"):
        session.forward(IDS[1:])
    assert session.n_past == 1
    for contents in (None, whole):  # rows that are still there, and the file as it was: nobody can know what it is
        if contents is not None:
            path.write_bytes(contents)
        with pytest.raises(ModelFileChanged, match="has changed while it was in use"):
            session.forward([3, 0])


# ---- logits ----------------------------------------------------------------------------------------------------------


def test_rows_that_are_reserved_are_those_of_all_passes(tmp_path: Path) -> None:
    def place(session: NativeSession, n: int) -> int:
        session.truncate(0)
        found: int = session.forward(IDS[:n], logits="all").logits.ctypes.data
        session.commit(())
        return found

    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_vocab=40_000)) as file:
        session = loaded(file)
        before = resident_bytes()
        session.reserve_rows(9)
        assert resident_bytes() - before > 0.9 * 9 * 4 * 40_000 or not resident_bytes()
        assert place(session, 2) == place(session, 9) == place(session, 5)
        kept = session.forward(IDS[:3], logits="all").logits  # whose memory is in use
        logits = kept.copy()
        session.commit(())
        assert place(session, 4) != kept.ctypes.data and same_bits(kept, logits)


def test_a_row_uses_the_memory_of_the_last_one_unless_somebody_has_it(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_vocab=40_000)) as file:
        session = loaded(file)
        prompt = session.forward(IDS[:3]).logits  # of many tokens: a request has it as long as it decodes
        session.commit(range(3))
        places = set()
        for token in IDS[:4]:
            for logits in ("last", "all"):
                places.add(session.forward([token], logits=logits).logits.ctypes.data)
        assert len(places) == 1 and prompt.ctypes.data not in places
        kept = session.forward([IDS[0]]).logits.reshape(-1)[:100]  # a part of a view
        before = kept.copy()
        others = [session.forward([token]).logits for token in IDS[1:4]]
        assert len({each.ctypes.data for each in [kept, *others]}) == 4 and same_bits(kept, before)


# ---- files and memory ------------------------------------------------------------------------------------------------


def mapped_bytes(path: Path) -> int:
    """Of a file, in the memory of this process."""
    n_bytes, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            n_bytes += is_of_file * int(line.split()[1]) << 10
        elif "-" in line.split()[0]:
            is_of_file = line.endswith(str(path))
    return n_bytes


@linux_only
@pytest.mark.parametrize("prepare", [lambda _: None, lambda path: logits(path)], ids=["first", "again"])
def test_nothing_of_a_model_file_stays_in_memory(tmp_path: Path, prepare: Callable[[Path], object]) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", n_embd=256)
    prepare(path)
    with ModelFile.open(path) as file:
        file.data("token_embd.weight").max()
        assert mapped_bytes(path) >= file.tensors["token_embd.weight"].n_bytes
        for packed in (False, True):
            if packed:
                NativeBackend().pack(file, read_spec(file), packed_path(path))
            session = loaded(file)
            session.forward(IDS)
            assert mapped_bytes(path) == 0
            assert (session.memory().mapped == session.memory().weights) == packed
            assert (mapped_bytes(packed_path(path)) > 0) == packed


def test_a_mapping_that_is_looked_at_stays(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf")) as file:
        rows = file.data("output_norm.weight")
        before = rows.copy()
        file.unmap()
        assert np.array_equal(rows, before) and np.array_equal(file.data("output_norm.weight"), before)
    assert np.array_equal(rows, before)


LOAD = """
import json, sys
from pathlib import Path
from edgeinfer.backends.native import NativeBackend
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

def resident():  # by its pages: counts that the system keeps lag behind on each core
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))

with ModelFile.open(sys.argv[1]) as file:
    spec, backend = read_spec(file), NativeBackend(tuned=False)
    plan = backend.plan(file, spec, LoadSettings(64))
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins now
    model = backend.load(file, spec, plan, Device(1))
    print(json.dumps([before, resident(), status("VmHWM"), plan.use.weights]))
"""


@linux_only
def test_the_peak_while_loading_is_near_what_is_held_then(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F16", n_embd=1024, n_ff=8192, n_layers=2)  # 123 MB
    run = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True)
    before, held, peak, weights = json.loads(run.stdout)
    assert weights > 100 << 20 and held - before > 0.99 * weights  # or there is nothing to see
    assert peak <= 1.05 * held
    assert held - before <= weights + (4 << 20)
