"""`edgeinfer export --to gguf`: files of any type, whole or not there, and the same bytes after any interruption."""

import errno
import hashlib
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import byte_level
from click.testing import CliRunner, Result
from numpy.testing import assert_array_equal
from tiny_checkpoints import write as write_checkpoint
from tiny_experts import write_tiny_experts
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.common import files
from edgeinfer.common.errors import EdgeInferError
from edgeinfer.exporters import auto
from edgeinfer.exporters import manifest as manifest_module
from edgeinfer.exporters.calibration.imatrix import Imatrix, Squares, write_imatrix
from edgeinfer.exporters.gguf import partial as partial_module
from edgeinfer.exporters.gguf.file_types import FILE_TYPES
from edgeinfer.exporters.gguf.target import GgufTarget
from edgeinfer.exporters.manifest import manifest_path
from edgeinfer.exporters.request import Request, TypeChoice
from edgeinfer.exporters.source import Source
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile


def run(source: Path, *arguments: str | Path, to: str = "gguf") -> Result:
    return CliRunner().invoke(cli.main, ["export", str(source), "--to", to, *map(str, arguments)])


def weights_of(path: Path) -> dict[str, np.ndarray]:
    with ModelFile.open(path) as file:
        return {name: dequantize(info.type, file.data(name), info.shape) for name, info in file.tensors.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "a.gguf", "llama", "F16", n_embd=256, tied=True)


def test_a_file_has_the_types_that_were_planned_and_the_keys_of_its_source(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.gguf"
    dry = run(source, "--type", "Q8_0", "-o", out, "--dry-run")
    assert dry.exit_code == 0 and "Q8_0" in dry.stdout and "memory at most" in dry.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    result = run(source, "--type", "Q8_0", "-o", out)
    assert result.exit_code == 0 and result.stdout == "", result.output
    assert dry.stdout.strip() in result.stderr
    assert "check: KL 0.0" in result.stderr and "over 192 tokens in the native engine" in result.stderr
    reader = gguf.GGUFReader(out)  # another reader of the format
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors if tensor.name.endswith("v.weight")} == {
        "blk.0.attn_v.weight": "Q8_0",
        "blk.1.attn_v.weight": "Q8_0",
    }
    before, after = weights_of(source), weights_of(out)
    assert before.keys() == after.keys()
    for name, weights in before.items():
        assert np.abs(after[name] - weights).max() <= np.abs(weights).max() / 250
    with ModelFile.open(source) as one, ModelFile.open(out) as other:
        assert {**one.metadata, "general.file_type": 7, "general.quantization_version": 2} == dict(other.metadata)


def test_without_a_type_the_tensors_are_copied_and_the_text_is_the_same(tmp_path: Path) -> None:
    source = write_tiny_experts(tmp_path / "a.gguf", "gpt-oss", "MXFP4", types={"attn_q": "Q5_1", "output": "BF16"})
    result = run(source, "-o", tmp_path / "b.gguf")
    assert result.exit_code == 0, result.output
    assert "check: 32 of 32 greedy tokens equal the source in the native engine" in result.stderr
    with ModelFile.open(source) as one, ModelFile.open(tmp_path / "b.gguf") as other:
        assert list(one.tensors) == list(other.tensors)
        for name, info in one.tensors.items():
            assert info.type == other.tensors[name].type
            assert_array_equal(one.data(name), other.data(name))


def test_experts_of_mxfp4_pass_through_and_what_is_quantised_twice_is_said(tmp_path: Path) -> None:
    source = write_tiny_experts(tmp_path / "a.gguf", "gpt-oss", "MXFP4", types={"attn_q": "Q4_0"})
    result = run(source, "--type", "Q8_0", "-o", tmp_path / "b.gguf", "--no-check")
    assert result.exit_code == 0 and "check: left out (--no-check)" in result.stderr
    assert "2 tensors are quantised already (Q4_0): quantising them again loses twice" in " ".join(
        result.stderr.split()
    )
    with ModelFile.open(tmp_path / "b.gguf") as file:
        types = {name: info.type.name for name, info in file.tensors.items()}
    assert types["blk.0.ffn_down_exps.weight"] == "MXFP4" and types["blk.0.attn_q.weight"] == "Q8_0"
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.ffn_gate_exps.bias"] == "F32"


def test_ternary_matrices_are_copied_unless_floats_are_asked_for(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "TQ2_0", types={"output": "F16", "token_embd": "F16"})
    for type, expected in (("Q4_K_M", "TQ2_0"), ("F16", "F16")):
        result = run(source, "--type", type, "-o", tmp_path / "b.gguf", "--no-check")
        assert result.exit_code == 0, result.output
        with ModelFile.open(tmp_path / "b.gguf") as file:
            assert file.tensors["blk.0.ffn_up.weight"].type.name == expected
    before, after = weights_of(source), weights_of(tmp_path / "b.gguf")
    for name, weights in before.items():
        assert_array_equal(after[name], weights)


def test_a_split_source_gives_the_file_of_a_whole_one(source: Path, tmp_path: Path) -> None:
    from split_models import split_model

    (tmp_path / "parts").mkdir()
    parts = split_model(source, tmp_path / "parts", 3)
    for number, path in enumerate((source, parts[1])):
        assert run(path, "--type", "Q4_0", "-o", tmp_path / f"{number}.gguf", "--no-check").exit_code == 0
    assert (tmp_path / "0.gguf").read_bytes() == (tmp_path / "1.gguf").read_bytes()


def test_the_manifest_says_what_was_read_and_written_and_is_the_same_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", 1 << 16)
    texts = []
    for folder in (tmp_path / "x", tmp_path / "y"):
        folder.mkdir()
        (folder / "b.gguf").write_bytes(b"what was there before")
        manifest_module.sha256_of(folder / "b.gguf")
        assert run(source, "--type", "F32", "-o", folder / "b.gguf", "--no-check").exit_code == 0
        texts.append((folder / "b.gguf.manifest.json").read_text())
    assert texts[0] == texts[1]
    manifest = json.loads(texts[0])
    assert manifest["source"][0] == {"name": "a.gguf", "n_bytes": source.stat().st_size, "sha256": sha256(source)}
    assert manifest["files"][0]["sha256"] == sha256(tmp_path / "x" / "b.gguf")
    assert manifest["options"] == {"type": "F32"} and set(manifest["types"]) == {"F32"}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- interruptions ---------------------------------------------------------------------------------------------------


class _Limited:
    """Makes writing a partial file end after so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_bytes: int, end: Any) -> None:
        self.left, self.end, self.write = n_bytes, end, partial_module._write_all
        monkeypatch.setattr(partial_module, "_write_all", self)

    def __call__(self, file: Any, data: memoryview) -> None:
        data = data.cast("B") if data.ndim > 1 else memoryview(bytes(data))
        self.write(file, data[: self.left])
        if len(data) > self.left:
            self.end()
        self.left -= len(data)


class _Counted:
    def __init__(self, function: Any) -> None:
        self.function, self.n_calls = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.n_calls += 1
        return self.function(*arguments)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_nothing_that_looks_whole_and_resuming_gives_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "b.gguf", tmp_path / "whole.gguf"
    assert run(source, "--type", "Q8_0", "-o", whole, "--no-check").exit_code == 0
    rng = random.Random(0)
    for _ in range(6):
        there = partial_module.partial_path(out).stat().st_size if partial_module.partial_path(out).exists() else 0
        with monkeypatch.context() as patched:
            _Limited(patched, rng.randrange(max(1, whole.stat().st_size - there - 4096)), full)
            result = run(source, "--type", "Q8_0", "-o", out, "--no-check", "--resume")
        assert result.exit_code == 1 and "No space left on device" in result.stderr, result.output
        assert "--resume goes on there" in result.stderr and not out.exists()
        if rng.random() < 0.5:  # once more in the same file, or from the start
            assert run(source, "--type", "Q8_0", "-o", out, "--no-check", "--resume").exit_code == 0
            assert out.read_bytes() == whole.read_bytes()
            assert not list(tmp_path.glob("*.partial*"))
            out.unlink()


def test_a_killed_export_leaves_the_old_file_and_resuming_gives_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "b.gguf", tmp_path / "whole.gguf"
    assert run(source, "--type", "Q8_0", "-o", whole, "--no-check").exit_code == 0
    rng = random.Random(1)
    for _ in range(4):
        out.write_bytes(b"what was there before")
        n_bytes = rng.randrange(whole.stat().st_size)
        child = os.fork()
        if child == 0:
            _Limited(pytest.MonkeyPatch(), n_bytes, lambda: os._exit(9))
            run(source, "--type", "Q8_0", "-o", out, "--no-check")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert out.read_bytes() == b"what was there before"
        n_tensors = len(partial_module.journal_path(out).read_text().splitlines()) - 1
        with monkeypatch.context() as patched:
            write = _Counted(partial_module.PartialFile._write)
            patched.setattr(partial_module.PartialFile, "_write", lambda self, tensor, write=write: write(self, tensor))
            assert run(source, "--type", "Q8_0", "-o", out, "--no-check", "--resume").exit_code == 0
        with ModelFile.open(out) as file:
            assert write.n_calls == len(file.tensors) - n_tensors  # what was done is not done again
        assert out.read_bytes() == whole.read_bytes()


def test_a_partial_file_of_another_export_or_with_other_bytes_is_not_relied_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "b.gguf", tmp_path / "whole.gguf"
    assert run(source, "--type", "Q8_0", "-o", whole, "--no-check").exit_code == 0
    with monkeypatch.context() as patched:
        _Limited(patched, whole.stat().st_size * 3 // 4, full)
        assert run(source, "--type", "Q8_0", "-o", out, "--no-check").exit_code == 1
    result = run(source, "--type", "F32", "-o", out, "--no-check", "--resume")
    assert result.exit_code == 2 and "is of another export (header, n_bytes differs)" in result.stderr
    partial = partial_module.partial_path(out)
    damaged = bytearray(partial.read_bytes())
    damaged[whole.stat().st_size // 4] ^= 1
    partial.write_bytes(damaged)
    journal = partial_module.journal_path(out)
    journal.write_bytes(journal.read_bytes() + b'{"name": "blk.1.ffn')  # as a power cut leaves it
    assert run(source, "--type", "Q8_0", "-o", out, "--no-check", "--resume").exit_code == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("kind", ["file", "folder", "with an importance matrix"])
@pytest.mark.parametrize("is_named", [False, True])
def test_an_output_whose_source_is_gone_has_its_manifest_or_is_not_there(
    is_named: bool, kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gone before the output has its name, or after."""
    read, more = [source], []
    if kind == "folder":
        write_checkpoint(tmp_path / "model", "qwen3", {"vocab_size": 640})
        byte_level(tmp_path / "model")
        source = tmp_path / "model"
        read = sorted(source.iterdir())
        more = ["--no-check"]
    elif kind != "file":
        imatrix = tmp_path / "i.gguf"
        write_imatrix(imatrix, Imatrix({"blk.0.attn_v.weight": Squares(np.ones((1, 256)), np.ones(1))}))
        read, more = [source, imatrix], ["--type", "Q4_0", "--imatrix", str(imatrix)]
    hashes = {path.name: sha256(path) for path in read}
    finish = partial_module.PartialFile.finish

    def gone(self: partial_module.PartialFile) -> None:
        for path in read if not is_named else ():
            path.unlink()
        finish(self)
        for path in read if is_named else ():
            path.unlink()

    monkeypatch.setattr(partial_module.PartialFile, "finish", gone)
    result = run(source, "-o", tmp_path / "out.gguf", *more)
    if not is_named:
        assert result.exit_code == 3 and "it was removed" in result.stderr, result.output
        assert not list(tmp_path.glob("out.gguf*"))
        return
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "out.gguf.manifest.json").read_text())
    found = [*manifest["source"], *([manifest["imatrix"]] if "imatrix" in manifest else [])]
    assert {each["name"]: each["sha256"] for each in found} == hashes


@pytest.mark.parametrize("flag", ["--size", "--fit"])
@pytest.mark.parametrize("text", ["abc", "50%", "auto", "-5", "0", "9e99GB", "1.5", ""])
def test_a_size_says_the_form_that_it_has(flag: str, text: str, source: Path, tmp_path: Path) -> None:
    result = run(source, "--type", "auto", f"{flag}={text}", "-o", tmp_path / "b.gguf")
    assert result.exit_code == 2
    assert f"{flag} must be bytes, or a number and a unit" in result.stderr and "such as 900MB or 4GiB" in result.stderr
    assert f"found {text!r}" in result.stderr and "None" not in result.stderr


def test_an_export_that_went_on_has_the_manifest_of_one_that_nothing_disturbed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "b.gguf"
    manifest = manifest_path(out)
    assert run(source, "--type", "Q8_0", "-o", out, "--no-check").exit_code == 0
    expected = manifest.read_bytes()
    out.unlink()
    manifest.unlink()
    with monkeypatch.context() as patched:
        _Limited(patched, 1_000_000, full)
        assert run(source, "--type", "Q8_0", "-o", out, "--no-check").exit_code == 1
    assert not manifest.exists()
    assert run(source, "--type", "Q8_0", "-o", out, "--no-check", "--resume").exit_code == 0
    assert manifest.read_bytes() == expected


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["a.gguf.partial", "a.gguf.partial.journal", "a.gguf.manifest.json"])
def test_a_source_that_the_export_would_write_over_stays(read: str, source: Path, tmp_path: Path) -> None:
    moved = source.rename(tmp_path / read)
    before = moved.read_bytes()
    result = run(moved, "--type", "Q8_0", "-o", source, "--no-check")
    assert result.exit_code == 2 and f"would overwrite {moved}" in "".join(result.stderr.splitlines()), result.output
    assert moved.read_bytes() == before


def test_files_of_a_checkpoint_and_parts_of_a_split_model_are_not_written_over(source: Path, tmp_path: Path) -> None:
    from split_models import split_model

    parts = split_model(source, tmp_path, 3)
    before = parts[2].read_bytes()
    assert run(parts[0], "--type", "Q8_0", "-o", parts[2], "--no-check").exit_code == 2
    assert CliRunner().invoke(cli.main, ["imatrix", str(parts[0]), "-o", str(parts[2])]).exit_code == 2
    assert parts[2].read_bytes() == before
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    assert run(folder, "--type", "Q8_0", "-o", folder / "model.safetensors").exit_code == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_an_importance_matrix_of_the_user_beside_the_output_is_not_replaced(source: Path, tmp_path: Path) -> None:
    beside = tmp_path / "b.gguf.imatrix.gguf"
    write_imatrix(beside, Imatrix({}, n_chunks=1))
    before = beside.read_bytes()
    result = run(source, "--type", "Q4_0", "--imatrix", "auto", "-o", tmp_path / "b.gguf", "--no-check")
    assert result.exit_code == 2 and "was not made by --imatrix auto" in result.stderr
    assert beside.read_bytes() == before


def test_a_partial_file_of_a_source_or_matrix_that_has_changed_since_is_not_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, imatrix = tmp_path / "b.gguf", tmp_path / "i.gguf"
    arguments = ["--type", "Q4_0", "--imatrix", imatrix, "-o", out, "--no-check"]
    squares = np.arange(1, 257, dtype=np.float32)[None]
    write_imatrix(imatrix, Imatrix({"blk.0.attn_q.weight": Squares(squares, np.ones(1, np.float32))}))
    with monkeypatch.context() as patched:
        _Limited(patched, 500_000, full)
        assert run(source, *arguments).exit_code == 1
    write_imatrix(imatrix, Imatrix({"blk.0.attn_q.weight": Squares(squares[:, ::-1], np.ones(1, np.float32))}))
    os.utime(source, ns=(0, 0))
    result = run(source, *arguments, "--resume")
    assert result.exit_code == 2 and "is of another export (source, imatrix differs)" in " ".join(result.stderr.split())


def test_a_partial_file_that_another_export_has_just_named_is_not_written(tmp_path: Path) -> None:
    path, out = tmp_path / "b.gguf.partial", tmp_path / "b.gguf"
    with path.open("w+b", buffering=0) as file:
        path.rename(out)
        with pytest.raises(EdgeInferError, match="another export has just finished this file"):
            partial_module._lock(file, path)


def test_what_has_no_room_is_refused_with_the_shortfall(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeinfer.exporters import targets

    with monkeypatch.context() as patched:
        patched.setattr(targets.devices, "available_memory", lambda: 1 << 10)
        result = run(source, "--type", "Q8_0", "-o", tmp_path / "b.gguf")
        assert result.exit_code == 4 and "are missing" in result.stderr
    usage = type("Usage", (), {"free": 1 << 10})
    monkeypatch.setattr(targets.shutil, "disk_usage", lambda folder: usage)
    result = run(source, "--type", "Q8_0", "-o", tmp_path / "b.gguf")
    assert result.exit_code == 1 and "free are 1.0 KiB" in " ".join(result.stderr.split())
    assert not list(tmp_path.glob("b.gguf*"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--size", "1MB"], "--size goes with --type auto, not with --type (none)"),
        (["--type", "auto", "--size", "1MB", "--fit", "1GB"], "--size and --fit both say"),
        (["--type", "Q8_0", "--calibration", "x.txt"], "--calibration goes with --imatrix auto or --type auto"),
        (["--imatrix", "SOURCE"], "--imatrix goes with --type"),
        (["--draft", "ngram"], "--draft goes with --to genai, litertlm, mnn or pte, not with --to gguf"),
        (["--type", "Q9"], "there is no type 'Q9'"),
        (["--type", "auto"], "--type auto needs --size"),
        (["--type", "auto", "--size", "1MB", "--cost", "fast"], "--cost must be verify:N"),
        (["--type", "auto", "--size", "50%"], "such as 900MB or 4GiB: found '50%'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], words: str, source: Path, tmp_path: Path
) -> None:
    filled = [str(source) if each == "SOURCE" else each for each in arguments]
    result = run(source, "-o", tmp_path / "b.gguf", *filled)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split()), result.output


def test_weights_that_are_no_numbers_are_refused_by_tensor_and_nothing_stays(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F32")
    with ModelFile.open(source) as file:
        at = file.tensors["blk.1.ffn_up.weight"].offset
    data = bytearray(source.read_bytes())
    data[at : at + 4] = np.float32(np.nan).tobytes()
    source.write_bytes(data)
    result = run(source, "--type", "Q8_0", "-o", tmp_path / "b.gguf")
    assert result.exit_code == 3 and "tensor blk.1.ffn_up.weight (F32) must have numbers" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_the_numbers_of_the_file_types_are_those_of_the_format() -> None:
    for name, kind in FILE_TYPES.items():
        theirs = "ALL_F32" if name == "F32" else f"MOSTLY_{name}"
        assert gguf.LlamaFileType[theirs] == kind.number
        assert name.startswith(kind.type.name)


def test_what_a_plan_measured_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = write_tiny_model(tmp_path / "a.gguf", "llama", "F16"), list[Request]()

    def choose(source: Source, request: Request, imatrix: object) -> TypeChoice:
        asked.append(request)
        kind = GGMLType.Q8_0 if len(asked) == 1 else GGMLType.Q4_0
        return TypeChoice({tensor.name: kind for tensor in source.tensors if len(tensor.shape) == 2})

    monkeypatch.setattr(auto, "choose_types", choose)
    target = GgufTarget()
    request = Request(source, tmp_path / "b.gguf", type="auto", size=1 << 20, check=False)
    planned = target.plan(request).files[request.out]
    target.write(request, lambda share: None)
    assert len(asked) == 1 and request.out.stat().st_size == planned
    assert target.plan(replace(request, size=1 << 19)).files[request.out] < planned and len(asked) == 2
