"""Weights that are NaN or infinite: every target refuses them by name, and no check passes without numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints
from checkpoints import byte_level, write_packed_llama
from click.testing import CliRunner, Result
from parts import is_there, missing
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.common.errors import ModelFileError, NumericalError
from edgeinfer.exporters.calibration.running import check_logits
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.checks.comparison import compare
from edgeinfer.exporters.checks.runtime import GreedyRun, compare_tokens, run_greedily
from edgeinfer.exporters.finite import FiniteFile
from edgeinfer.exporters.source import open_source
from edgeinfer.models.gguf import GGMLType, ModelFile

NAN, INF, MINUS_INF = np.nan, np.inf, -np.inf
SCALE_AT = {"Q8_0": 0, "Q4_0": 0, "Q4_K": 2, "Q6_K": 208, "Q2_K": 82, "Q3_K": 108, "TQ2_0": 64}  # of a block
FLOATS = {"F32": "<f4", "F16": "<f2"}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def poison(path: Path, name: str, value: float, block: int = 0) -> None:
    """Put a value into a float, or into the scale of a block, of a tensor."""
    with ModelFile.open(path) as file:
        info = file.tensors[name]
    data = bytearray(path.read_bytes())
    if info.type == GGMLType.I2_S:
        at, new = info.offset + info.n_bytes - 32, np.array([value], "<f4").tobytes()
    elif info.type == GGMLType.BF16:
        at, new = info.offset + 2 * block, np.array([value], "<f4").tobytes()[2:]
    else:
        at = info.offset + block * info.type.block_bytes + SCALE_AT.get(info.type.name, 0)
        new = np.array([value], FLOATS.get(info.type.name, "<f2")).tobytes()
    data[at : at + len(new)] = new
    path.write_bytes(data)


def check_refused(result: Result, name: str, folder: Path, *there: str) -> None:
    said = " ".join(result.stderr.split())
    assert result.exit_code == 3, said
    assert f"tensor {name} (" in said and "must have numbers: found NaN or infinity in row" in said
    assert "(a bug" not in said and "equal" not in said
    assert sorted(path.name for path in folder.iterdir()) == sorted(there)


@pytest.mark.parametrize("value", [NAN, INF, MINUS_INF])
@pytest.mark.parametrize("type", ["F32", "F16", "BF16", *SCALE_AT, "I2_S"])
def test_a_copied_tensor_with_others_than_numbers_is_refused(type: str, value: float, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", type)
    poison(source, "blk.1.ffn_up.weight", value, block=3)
    check_refused(
        run("export", source, "--to", "gguf", "-o", tmp_path / "b.gguf"), "blk.1.ffn_up.weight", tmp_path, "a.gguf"
    )


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "token_embd.weight", "output_norm.weight"])
@pytest.mark.parametrize("to", ["gguf", "onnx", "genai", "litertlm", "mnn", "pte"])
def test_every_target_names_the_tensor(to: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"genai": "genai", "litertlm": "litert", "onnx": "onnx"}.get(to)
    if part is not None and not is_there(part):
        missing(part, f"--to {to} cannot be written")
    if to in ("mnn", "pte"):  # the weights are read before the libraries are asked
        from edgeinfer.exporters.mnn import target as mnn
        from edgeinfer.exporters.pte import target as pte

        monkeypatch.setattr(mnn, "check_installed", lambda: None)
        monkeypatch.setattr(pte.importlib.util, "find_spec", lambda name: name)
    if to == "mnn" and not is_there("onnx"):
        missing("onnx", "graphs for MNN are made with it")
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16", vocabulary="bpe")
    poison(source, name, NAN, block=7)
    if to == "mnn" and name == "token_embd.weight":  # which is read behind MNN's converter
        with FiniteFile.open(source) as file, pytest.raises(ModelFileError, match=f"tensor {name} "):
            mnn.place(file, name, None, (tmp_path / "w").open("wb"))
        return
    check_refused(run("export", source, "--to", to, "-o", tmp_path / "out.litertlm"), name, tmp_path, "a.gguf")


@pytest.mark.parametrize("to", ["ternary", "fpga"])
@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "token_embd.weight", "blk.1.ffn_down.weight"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_ternary_targets_name_the_tensor(to: str, name: str, value: float, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "bitnet-b1.58", "I2_S", tied=True, types={"token_embd": "BF16"})
    poison(source, name, value)
    options = ["--format", "tq1_0"] if to == "ternary" else []
    result = run("export", source, "--to", to, "-o", tmp_path / "out", *options)
    check_refused(result, name, tmp_path, "a.gguf")


def test_draft_heads_and_draft_vocabularies(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "t.gguf", "llama", "F16")
    head = write_tiny_head(tmp_path / "h.gguf", target)
    with ModelFile.open(head) as file:
        name = next(name for name, info in file.tensors.items() if info.type == GGMLType.F16)
    poison(head, name, NAN)
    out = tmp_path / "out.gguf"
    check_refused(
        run("export", head, "--to", "gguf", "--target", target, "-o", out), name, tmp_path, "h.gguf", "t.gguf"
    )
    poison(target, "blk.0.ffn_gate.weight", INF)
    result = run("export", target, "--to", "gguf", "--draft-vocab", "64", "-o", out)
    check_refused(result, "blk.0.ffn_gate.weight", tmp_path, "h.gguf", "t.gguf")


Arrays = tiny_checkpoints.Stored


def spoilt(name: str, value: float, tensors: Arrays) -> Arrays:
    dtype, values = tensors[name]
    values = values.copy()
    if dtype == "BF16" and values.dtype == np.uint16:
        values.reshape(-1)[5] = np.array([value], "<f4").view(np.uint16)[1]
    else:
        values.reshape(-1)[5] = value
    return {**tensors, name: (dtype, values)}


@pytest.mark.parametrize("type", [None, "F32", "Q8_0"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_folder_of_hugging_face(value: float, name: str, type: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level(folder)
    config = {"vocab_size": 640, "bos_token_id": 0, "eos_token_id": 1}
    tiny_checkpoints.write(folder, "llama", config, partial(spoilt, name, value))
    options = [] if type is None else ["--type", type]
    result = run("export", folder, "--to", "gguf", "-o", tmp_path / "b.gguf", *options)
    check_refused(result, name, tmp_path, "model")


@pytest.mark.parametrize("to", ["ternary", "fpga"])
@pytest.mark.parametrize("name, dtype", [("model.norm.weight", "F32"), ("lm_head.weight", "F16")])
def test_a_ternary_folder(name: str, dtype: str, to: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_packed_llama(folder, rng)
    at = Checkpoint.open(folder)._stored(name).offset
    with (folder / "model.safetensors").open("r+b") as written:
        written.seek(at + 4)
        written.write(np.array([np.nan], "<f2").tobytes() if dtype == "F16" else b"\x00\x00\x80\x7f")
    check_refused(run("export", folder, "--to", to, "-o", tmp_path / "out"), name, tmp_path, "model")


# ---- Checks ----------------------------------------------------------------------------------------------------------


def without_numbers(path: Path) -> Path:
    """A model whose weights are numbers, and whose logits are none: what a norm gives is too large."""
    source = write_tiny_model(path, "llama", "F32")
    with ModelFile.open(source) as file:
        info = file.tensors["output_norm.weight"]
    values = np.memmap(source, np.float32, "r+", info.offset, info.shape)
    values[:] = 3e38
    values.flush()
    return source


@pytest.mark.parametrize("type", [None, "Q8_0"])
def test_a_source_without_numbers_is_no_check(type: str | None, tmp_path: Path) -> None:
    source = without_numbers(tmp_path / "a.gguf")
    options = [] if type is None else ["--type", type]
    result = run("export", source, "--to", "gguf", "-o", tmp_path / "b.gguf", *options)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 3 and f"{source}: its logits are not numbers" in said and "equal" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    assert run("export", source, "--to", "gguf", "-o", tmp_path / "b.gguf", "--no-check").exit_code == 0


def test_what_was_written_without_numbers_is_no_export(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F32")
    written = without_numbers(tmp_path / "b.gguf")
    for is_lossless in (True, False):
        with open_source(source) as opened, pytest.raises(NumericalError, match="b.gguf: its logits are not numbers"):
            compare(opened, written, is_lossless)


def test_packages_are_not_compared_with_a_source_without_numbers(tmp_path: Path) -> None:
    source = without_numbers(tmp_path / "a.gguf")
    with ModelFile.open(source) as file, pytest.raises(NumericalError, match="a.gguf: its logits are not numbers"):
        run_greedily(file)
    with pytest.raises(NumericalError):
        check_logits(np.array([[0.0, -np.inf]], np.float32))


def test_a_check_of_nothing_is_none() -> None:
    run = GreedyRun("a", [0], [], [1], np.zeros((1, 4), np.float32))
    with pytest.raises(ModelFileError, match="the check has compared nothing: .* ends at its first token"):
        compare_tokens(run, [], "R 1")


@pytest.mark.parametrize("change", [lambda path: poison(path, "blk.0.attn_norm.weight", NAN), None])
def test_importance_of_a_model_without_numbers_is_refused(
    change: Callable[[Path], None] | None, tmp_path: Path
) -> None:
    source = tmp_path / "a.gguf"
    if change is None:
        without_numbers(source)
    else:
        change(write_tiny_model(source, "llama", "F16"))
    (tmp_path / "t.txt").write_text("some text to calibrate on, again and again " * 20)
    result = run("imatrix", source, "--calibration", tmp_path / "t.txt", "-o", tmp_path / "i.gguf")
    assert result.exit_code == 3 and "number" in result.stderr and "(a bug" not in result.stderr
    assert not (tmp_path / "i.gguf").exists()
