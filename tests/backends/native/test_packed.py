"""Packed weights beside a model: bound to all bytes of all of its files, and refused with one error otherwise."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from exactness import same_bits
from split_models import split_model
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.native import NativeBackend, packed
from edgeinfer.backends.native.packing.packed import LAYOUT, MAGIC, packed_path
from edgeinfer.cli import main
from edgeinfer.common import devices
from edgeinfer.common.errors import BadPack, ModelFileError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

LARGE = {"n_embd": 256, "n_ff": 2048, "n_layers": 4}  # 3.8 MB: most bytes are in no sample


def pack(path: Path) -> Path:
    with ModelFile.open(path) as file:
        target = packed_path(file.paths[0])
        NativeBackend().pack(file, read_spec(file), target)
    return target


def logits(path: Path, verify: bool = False) -> np.ndarray:
    with ModelFile.open(path) as file:
        backend, spec = NativeBackend(verify=verify), read_spec(file)
        session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(64)), Device(1)).session()
        found = session.forward(np.arange(40), logits="all").logits
        session.close()
    return found


def copied(source: Path, target: Path) -> None:
    """As `cp -p`: the time too."""
    shutil.copy2(source, target)
    times = source.stat()
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two models of the same sizes and the same time."""
    models = [write_tiny_model(tmp_path / f"{seed}.gguf", "qwen2", "Q8_0", seed=seed) for seed in (1, 2)]
    for path in models:
        os.utime(path, (10**9, 10**9))
    assert models[0].stat().st_size == models[1].stat().st_size
    return models[0], models[1]


# ---- of which model --------------------------------------------------------------------------------------------------


def test_another_model_of_the_same_size_and_time_is_refused(two: tuple[Path, Path]) -> None:
    pack(two[0])
    copied(two[1], two[0])
    with pytest.raises(BadPack, match=r"stale, .*1\.gguf has changed .*pack it again: edgeinfer pack .*1\.gguf$"):
        logits(two[0])


def test_a_pack_of_another_model_is_refused(two: tuple[Path, Path]) -> None:
    copied(pack(two[1]), packed_path(two[0]))
    with pytest.raises(BadPack, match="stale"):
        logits(two[0])


@pytest.mark.parametrize("n_files, replaced", [(2, 1), (2, 0), (3, 1), (3, 2)])
def test_a_file_of_a_split_model_replaced_by_anothers_is_refused(
    two: tuple[Path, Path], tmp_path: Path, n_files: int, replaced: int
) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    parts, others = (split_model(path, folder, n_files) for path, folder in zip(two, folders, strict=True))
    plain = logits(parts[0])
    assert same_bits(plain, logits(two[0]))
    pack(parts[0])
    assert same_bits(logits(parts[0]), plain) and same_bits(logits(parts[1]), plain)
    renamed = parts[replaced].with_name(others[replaced].name)
    copied(others[replaced], renamed)
    renamed.replace(parts[replaced])
    with pytest.raises(BadPack, match=f"stale, .*{parts[replaced].name} has changed"):
        logits(parts[0])


def test_any_file_of_a_split_model_has_the_same_pack(two: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    parts = split_model(two[0], tmp_path / "parts")
    assert pack(parts[1]) == packed_path(parts[0])
    whole = packed_path(two[0])
    shutil.copy(packed_path(parts[0]), whole)
    with pytest.raises(BadPack, match="stale, .* is split into 1 files, 2 were packed"):
        logits(two[0])


def test_a_model_may_be_moved_and_touched_with_its_pack(two: tuple[Path, Path], tmp_path: Path) -> None:
    plain, target = logits(two[0]), pack(two[0])
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "an other name.gguf"
    two[0].rename(moved)
    target.rename(packed_path(moved))
    os.utime(moved)
    assert same_bits(logits(moved), plain) and same_bits(logits(moved, verify=True), plain)
    written = packed_path(moved).stat().st_mtime_ns
    logits(moved)
    assert packed_path(moved).stat().st_mtime_ns == written


def test_each_byte_at_the_edge_of_a_tensor_counts(two: tuple[Path, Path]) -> None:
    pack(two[0])
    whole = two[0].read_bytes()
    with ModelFile.open(two[0]) as file:
        infos = list(file.tensors.values())
    for place in [20, len(whole) - 1, *(info.offset for info in infos), *(i.offset + i.n_bytes - 1 for i in infos)]:
        two[0].write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ModelFileError):  # BadPack, or what a broken header is
            logits(two[0])


def test_a_byte_between_the_samples_is_found_by_verify(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F16", **LARGE)
    pack(path)
    logits(path, verify=True)
    whole = path.read_bytes()
    with ModelFile.open(path) as file:
        info = max(file.tensors.values(), key=lambda info: info.n_bytes)
    rng, unseen = np.random.default_rng(0), 0
    for place in info.offset + 4096 + rng.integers(0, info.n_bytes - 8192, 12):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        with pytest.raises(BadPack, match="pack it again"):
            logits(path, verify=True)
        try:
            logits(path)
            unseen += 1
        except BadPack:
            pass
    assert unseen  # else this would not have tested it


def test_a_byte_of_the_packed_weights_is_found_by_verify(two: tuple[Path, Path]) -> None:
    target = pack(two[0])
    whole = target.read_bytes()
    for place in (-1, len(whole) // 2, 8192):
        changed = bytearray(whole)
        changed[place] ^= 1
        target.write_bytes(changed)
        logits(two[0])
        with pytest.raises(BadPack, match="damaged, the SHA-256 of its weights"):
            logits(two[0], verify=True)


def test_samples_are_few_however_large_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F16", **LARGE)
    monkeypatch.setattr(packed, "_MAX_EDGES", 4)
    monkeypatch.setattr(packed, "_EVEN_PLACES", 4)
    read: list[tuple[int, int]] = []
    with ModelFile.open(path) as file:
        monkeypatch.setattr(file, "prefetch", lambda part, runs: read.extend(runs))
        packed.samples_of(file, 0)
        header = min(info.offset for info in file.tensors.values())
    assert read[0][0] == 0 and read[-1][1] == path.stat().st_size
    assert sum(last - first for first, last in read) <= header + 9 * 4096


# ---- what is no pack -------------------------------------------------------------------------------------------------


def with_header(whole: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    n = struct.unpack_from("<Q", whole, len(MAGIC))[0]
    text = change(json.loads(whole[len(MAGIC) + 8 :][:n]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    start = MAGIC + struct.pack("<Q", len(text)) + text
    return start + bytes(-len(start) % 4096) + whole[4096:]


def replaced(*keys: str | int, by: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        inner: Any = header
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = by
        return header

    return change


ODD = [float("inf"), float("nan"), -1, -(2**70), 2**70, 1.5, True, "1", None, [], {}]
HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"n_bytes {odd!r}": replaced("n_bytes", by=odd) for odd in ODD},
    **{f"size {odd!r}": replaced("sources", 0, "size", by=odd) for odd in ODD},
    **{f"layout {odd!r}": replaced("layout", by=odd) for odd in ODD},
    **{f"samples {odd!r}": replaced("sources", 0, "samples", by=odd) for odd in [1, None, "", "x" * 64, "\ud800"]},
    **{f"sources {odd!r}": replaced("sources", by=odd) for odd in [0, None, {}, [], [1], [[]], "ab", [{}]]},
    "1e999": lambda header: json.dumps(header).replace(f'"n_bytes": {header["n_bytes"]}', '"n_bytes": 1e999').encode(),
    "60,000 brackets": lambda header: b"[" * 60000,
    "60,000 objects": lambda header: b'{"a":' * 60000,
    "no header": lambda header: b"",
    "no object": lambda header: b"3",
    "a list": lambda header: [header],
    "a key twice": lambda header: b'{"layout": 5, ' + json.dumps(header).encode()[1:],
    "no UTF-8": lambda header: json.dumps(header).encode() + b"\xff",
    "UTF-16": lambda header: json.dumps(header).encode("utf-16"),
    "5,000 digits": lambda header: b'{"layout": ' + b"9" * 5000 + b"}",
    "more behind it": lambda header: json.dumps(header).encode() + b"{}",
    "other bits": replaced("ternary_bits", by="7"),
    "bits that are a list": replaced("ternary_bits", by=["2"]),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_with_anything_else_is_a_bad_pack(case: str, packed_model: tuple[Path, bytes]) -> None:
    path, whole = packed_model
    packed_path(path).write_bytes(with_header(whole, HEADERS[case]))
    with pytest.raises(BadPack, match="edgeinfer pack"):
        logits(path)


@pytest.fixture(scope="module")
def packed_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", "qwen2", "Q8_0")
    return path, pack(path).read_bytes()


def test_an_older_layout_is_refused_with_the_command_that_mends_it(packed_model: tuple[Path, bytes]) -> None:
    path, whole = packed_model
    packed_path(path).write_bytes(with_header(whole, replaced("layout", by=LAYOUT - 1)))
    found = rf"packed layout {LAYOUT - 1}, this version reads {LAYOUT}"
    with pytest.raises(BadPack, match=rf"{found}; pack it again: edgeinfer pack .*m\.gguf$"):
        logits(path)


def test_a_pack_that_is_cut_anywhere_or_too_long_is_a_bad_pack(packed_model: tuple[Path, bytes]) -> None:
    path, whole = packed_model
    sizes = [0, 1, 15, 16, 20, 23, 24, 25, 100, 400, 4095, 4096, 4097, 8192, len(whole) // 2, len(whole) - 1]
    for content in [*(whole[:size] for size in sizes), whole + b"\0", bytes(len(whole)), b"GGUF" + whole[4:]]:
        packed_path(path).write_bytes(content)
        with pytest.raises(BadPack, match="edgeinfer pack"):
            logits(path)
    packed_path(path).write_bytes(MAGIC + struct.pack("<Q", 2**64 - 1) + whole[24:])
    with pytest.raises(BadPack, match="not a file of packed weights"):
        logits(path)


def test_what_is_no_file_is_a_bad_pack_at_once(two: tuple[Path, Path]) -> None:
    path, place = two[0], packed_path(two[0])
    makers: list[Callable[[], object]] = [
        place.mkdir,
        lambda: place.symlink_to(place),
        lambda: place.symlink_to("nowhere"),
        lambda: place.symlink_to("/dev/null"),
        *([lambda: os.mkfifo(place)] if hasattr(os, "mkfifo") else []),
    ]
    for make in makers:
        make()
        with pytest.raises(BadPack, match="remove it"):
            logits(path)
        place.rmdir() if place.is_dir() else place.unlink()
    logits(path)


def test_a_pack_that_may_not_be_read_is_a_bad_pack(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pack(two[0])

    def refuse(path: Path, flags: int, open_file: Callable[[Path, int], int] = os.open) -> int:
        if path == packed_path(two[0]):
            raise PermissionError(13, "Permission denied")
        return open_file(path, flags)

    monkeypatch.setattr(packed.os, "open", refuse)
    with pytest.raises(BadPack, match="cannot be read: Permission denied; remove it, or pack it again"):
        logits(two[0])


# ---- as users have it ------------------------------------------------------------------------------------------------


def test_load_and_the_commands_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F16")
    monkeypatch.setattr(devices, "available_memory", lambda: 1 << 30)

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, list(arguments))
        return result.exit_code, result.output

    assert run("pack", "--verify", str(path))[0] == 3
    assert run("pack", str(path))[0] == 0
    assert run("pack", "--verify", str(path)) == (0, f"{path}.packed: as it was packed from {path}\n")
    edgeinfer.load(path, verify=True, draft="none").close()
    whole = bytearray(packed_path(path).read_bytes())
    whole[-100] ^= 1
    packed_path(path).write_bytes(whole)
    edgeinfer.load(path, draft="none").close()
    with pytest.raises(BadPack):
        edgeinfer.load(path, verify=True, draft="none")
    code, output = run("generate", "-m", str(path), "--verify", "-n", "1", "hello")
    assert code == 3 and "damaged" in output and "Traceback" not in output
    code, output = run("pack", "--verify", str(path))
    assert code == 3 and "damaged" in output
