"""The native engine with its ternary products in simulated hardware: the text of the native engine alone."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from parts import is_there, missing
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.backends.fpga_sim import SMALL, FpgaSimBackend
from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.errors import BackendUnavailable, BadBoardFolder, ModelFileError, UnsupportedModel
from edgeinfer.common.files import file_sha256
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.hls.files.manifest import Part
from edgeinfer.hls.files.writer import BoardWriter
from edgeinfer.models.formats import codes_of
from edgeinfer.models.gguf import GGMLType, ModelFile

if not is_there("verilator"):
    missing("verilator", "it is not installed: apt install verilator g++")
pytestmark = pytest.mark.filterwarnings("ignore:fpga-sim computes:RuntimeWarning")
QKV = [f"blk.{{}}.attn_{role}.weight" for role in "qkv"]
REST = [f"blk.{{}}.{role}.weight" for role in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys and values of two rows: half a tile each, in one stream one behind the other."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_model(path, "bitnet-b1.58", "I2_S", n_heads=64, n_kv_heads=1, head_dim=2, n_ff=384)


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The matrices of the model as a board reads them, queries, keys and values in one stream."""
    path = tmp_path_factory.mktemp("board")
    with ModelFile.open(model) as file, BoardWriter(path, SMALL) as writer:
        for layer in range(2):
            for i, names in enumerate([QKV, *([name] for name in REST)]):
                add_matrix(writer, file, f"layers.{layer}.{i}", [name.format(layer) for name in names])
        writer.finish({})
    return path


def add_matrix(writer: BoardWriter, file: ModelFile, name: str, tensors: list[str]) -> None:
    found = [codes_of(GGMLType.I2_S, file.data(each)) for each in tensors]
    trits = [
        np.asarray(each.values, dtype=np.int8).reshape(file.tensors[t].shape)
        for each, t in zip(found, tensors, strict=True)
    ]
    ends = np.cumsum([0, *(len(each) for each in trits)])
    parts = [Part(each, int(ends[i]), int(ends[i + 1])) for i, each in enumerate(tensors)]
    scales = np.concatenate([np.full(len(t), each.scales[0, 0]) for each, t in zip(found, trits, strict=True)])
    writer.add_matrix(name, np.concatenate(trits), scales, parts=parts)


def logits_of(backend: NativeBackend | FpgaSimBackend, path: Path, tokens: np.ndarray) -> np.ndarray:
    """Of all tokens; what was planned is what is held."""
    with ModelFile.open(path) as file:
        spec = backend.read_spec(file)
        plan = backend.plan(file, spec, LoadSettings(64, n_batch=64, n_threads=1))
        model = backend.load(file, spec, plan, Device(1))
        use = model.memory()
        assert (use.weights, use.activations) == (plan.use.weights, plan.use.activations)
        return model.session().forward(tokens, logits="all").logits


def test_chat_gives_the_text_of_the_native_engine(model: Path) -> None:
    flags = ["-m", str(model), "-n", "64", "--temp", "1", "-s", "2", "What is a table?"]
    answers = {}
    for backend in ("native", "fpga-sim"):
        done = CliRunner().invoke(cli.main, ["chat", "--backend", backend, *flags])
        assert done.exit_code == 0 and "64 tokens, " in done.stderr, done.stderr
        assert ("clock cycle" in done.stderr) == (backend == "fpga-sim")
        answers[backend] = done.stdout
    assert answers["fpga-sim"] == answers["native"] and len(answers["native"]) > 64


def test_the_weights_of_an_exported_folder_are_used(model: Path, folder: Path, tmp_path: Path) -> None:
    tokens = np.arange(5, 17, dtype=np.int32)
    wanted = logits_of(NativeBackend(), model, tokens)
    assert np.array_equal(logits_of(FpgaSimBackend(folder), model, tokens), wanted)
    assert np.array_equal(logits_of(FpgaSimBackend(), model, tokens), wanted)
    changed = shutil.copytree(folder, tmp_path / "changed")
    stream = bytearray((changed / "weights.0.bin").read_bytes())
    stream[0] = 242 - stream[0]  # the other sign of five weights
    (changed / "weights.0.bin").write_bytes(stream)
    with pytest.raises(BadBoardFolder, match="weights.0.bin: sha256 must be"):
        FpgaSimBackend(changed)
    manifest = json.loads((changed / "manifest.json").read_text())
    manifest["files"]["weights.0.bin"]["sha256"] = file_sha256(changed / "weights.0.bin")
    (changed / "manifest.json").write_text(json.dumps(manifest))
    assert not np.array_equal(logits_of(FpgaSimBackend(changed), model, tokens), wanted)


def test_a_folder_of_another_model_or_engine_is_refused(model: Path, folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other.gguf", "bitnet-b1.58", "I2_S", n_layers=1, seed=3)
    with pytest.raises(
        ModelFileError, match=r"blk.0.attn_q.weight must be \(256, 256\) with the scale .*: found \(128,"
    ):
        logits_of(FpgaSimBackend(folder), other, np.arange(3))
    deeper = write_tiny_model(
        tmp_path / "deeper.gguf", "bitnet-b1.58", "I2_S", n_layers=3, n_heads=64, n_kv_heads=1, head_dim=2, n_ff=384
    )
    with pytest.raises(
        ModelFileError, match="has no blk.2.attn_q.weight; the folder must be exported from .*deeper.gguf"
    ):
        logits_of(FpgaSimBackend(folder), deeper, np.arange(3))
    manifest = folder / "manifest.json"
    changed = shutil.copytree(folder, tmp_path / "changed")
    text = manifest.read_text()
    (changed / "manifest.json").write_text(text.replace(SMALL.hash(), SMALL.hash()[::-1]))
    with pytest.raises(BadBoardFolder, match="the geometry hash must be"):
        FpgaSimBackend(changed)


def test_what_cannot_be_simulated_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "tq2.gguf", "llama", "TQ2_0")
    with ModelFile.open(path) as file, pytest.raises(UnsupportedModel, match="--to ternary --format i2_s --out FILE"):
        FpgaSimBackend().read_spec(file)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="needs verilator, which is not installed: apt install verilator"):
        FpgaSimBackend()
