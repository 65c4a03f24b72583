"""`edgeinfer export --to fpga`: what is written, what is refused, and the way back."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_packed_llama
from click.testing import CliRunner, Result
from numpy.testing import assert_array_equal
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import InvalidArgument, UnsupportedModel
from edgeinfer.common.files import file_sha256
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.fpga import FpgaTarget, writing
from edgeinfer.exporters.fpga.content import content_of
from edgeinfer.exporters.fpga.options import BoardOptions
from edgeinfer.exporters.fpga.tables import sines_and_cosines, ternary_rows
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.ternary.reading import open_ternary
from edgeinfer.exporters.ternary.source import StoredTensor
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.hls.files.integrity import check_folder
from edgeinfer.hls.files.manifest import ALIGNMENT
from edgeinfer.hls.geometry import Geometry
from edgeinfer.models import read_spec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def export(source: Path, out: Path, *options: str) -> Result:
    result = run("export", source, "--to", "fpga", "--board", "kv260", "--out", out, *options)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_tiny_model(path, "bitnet-b1.58", "I2_S", tied=True, types={"token_embd": "BF16"})


@pytest.fixture(scope="module")
def written(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("board") / "out"
    export(tiny, out, "--embeddings", "bf16", "--rescored", "1000")
    return out


def trits_of(source: Path) -> dict[str, tuple[np.ndarray, float]]:
    """Trits and scale of each ternary matrix of a GGUF file in I2_S, by what `dequantize` says."""
    found = {}
    with ModelFile.open(source) as file:
        for name, info in file.tensors.items():
            if info.type == GGMLType.I2_S:
                weights = dequantize(info.type, file.data(name), info.shape)
                found[name] = (np.sign(weights).astype(np.int8), float(np.abs(weights).max()))
    return found


@pytest.mark.parametrize("encoding", ["base3", "g3x5", "2bit"])
def test_all_matrices_are_in_the_streams_and_come_back(
    encoding: str, tiny: Path, written: Path, tmp_path: Path
) -> None:
    path = written
    if encoding != "base3":
        path = tmp_path / "out"
        result = export(tiny, path, "--encoding", encoding, "--golden", "3")
        assert "8 matrices unpack to the trits and scales of the source" in result.stderr
    folder, wanted = check_folder(path), trits_of(tiny)
    assert folder.geometry.encoding == encoding and len(wanted) == 14
    for tensor in (each for each in folder.tensors.values() if each.phase != "head"):
        for part in tensor.parts:
            trits, scale = wanted[part.name]
            assert_array_equal(folder.trits(tensor.name)[part.first : part.last], trits)
            assert folder.scales(tensor.name)[part.first : part.last].tolist() == [scale] * len(trits)
    out = tmp_path / "back.gguf"
    assert run("export", "--unpack", path, "--out", out).exit_code == 0
    with ModelFile.open(tiny) as before, ModelFile.open(out) as after:
        assert set(after.tensors) == set(wanted)
        for name in wanted:
            assert after.tensors[name].type == GGMLType.I2_S
            assert_array_equal(after.data(name), before.data(name))


def test_a_packed_checkpoint_comes_back_as_arrays(tmp_path: Path, rng: np.random.Generator) -> None:
    """Its rows are those of a GGUF file: rotary pairs side by side."""
    model = tmp_path / "model"
    model.mkdir()
    write_packed_llama(model, rng)
    (model / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    export(model, tmp_path / "out", "--rows", "8", "--tables", "8", "--no-check")
    ternary = tmp_path / "i2_s.gguf"
    assert run("export", model, "--to", "ternary", "--out", ternary).exit_code == 0
    assert run("export", "--unpack", tmp_path / "out", "--out", tmp_path / "back.npz").exit_code == 0
    with np.load(tmp_path / "back.npz") as arrays:
        for name, (trits, scale) in trits_of(ternary).items():
            assert_array_equal(arrays[name], trits)
            assert_array_equal(arrays[f"{name}.scales"], np.full(len(trits), scale, dtype=np.float32))
        assert len(arrays) == 28
    facts = check_folder(tmp_path / "out").manifest.facts
    assert facts["model"]["rope"] == {"kind": "interleaved", "n_dims": 64, "base": 10000.0, "magnitude": 1.0}
    assert facts["head"] == {"array": "head", "scales": "head_scales", "tied": False, "first_stage": None}
    assert [each["name"] for each in facts["source"]][:1] == ["config.json"] and facts["licence"] == "mit"


def test_rows_of_one_scale_each_are_taken_and_others_refused_by_name(tmp_path: Path) -> None:
    floats = {"token_embd": "F16", "output": "F16"}
    one = write_tiny_model(tmp_path / "one.gguf", "llama", "TQ2_0", n_ff=256, types=floats)
    assert "the CPU then rounds activations in blocks" in export(one, tmp_path / "out").stderr
    assert run("export", "--unpack", tmp_path / "out", "--out", tmp_path / "back.gguf").exit_code == 0
    with ModelFile.open(one) as before, ModelFile.open(tmp_path / "back.gguf") as after:
        for name, info in after.tensors.items():
            assert info.type == GGMLType.TQ2_0
            assert_array_equal(
                dequantize(info.type, after.data(name), info.shape),
                dequantize(info.type, before.data(name), info.shape),
            )
    several = write_tiny_model(tmp_path / "several.gguf", "llama", "TQ2_0", n_ff=512, types=floats)
    result = run("export", several, "--to", "fpga", "--out", tmp_path / "no")
    assert result.exit_code == 3 and not (tmp_path / "no").exists()
    assert "tensor blk.0.ffn_down.weight: each row must have one scale: found 2 in row 0" in result.stderr


@pytest.mark.parametrize(
    "architecture, type, words",
    [
        ("llama", "Q4_K", "tensor blk.0.attn_q.weight is Q4_K, which is not ternary"),
        ("gemma2", "I2_S", "which the FPGA backend does not know"),
        ("granite", "I2_S", "embedding_scale must be 1.0 for a board: found 1.5"),
        ("phi3", "I2_S", "matrices of their own: found a part of blk.0.attn_qkv.weight, a part of"),
        ("smollm3", "I2_S", "all layers must be alike for a board: layer 3 differs from 0"),
        ("qwen2", "I2_S", "has q_bias, which the FPGA backend does not know"),
    ],
)
def test_a_model_that_no_board_runs_is_refused(architecture: str, type: str, words: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", architecture, type)  # type: ignore[arg-type]
    result = run("export", source, "--to", "fpga", "--out", tmp_path / "out")
    assert result.exit_code == 3 and words in result.stderr, result.output


def test_the_same_model_gives_the_same_files(tiny: Path, written: Path, tmp_path: Path) -> None:
    export(tiny, tmp_path / "again", "--embeddings", "bf16", "--rescored", "1000", "--no-check")
    files = sorted(path.relative_to(written) for path in written.rglob("*") if path.is_file())
    assert len(files) > 30
    for file in files:
        assert file_sha256(written / file) == file_sha256(tmp_path / "again" / file), file


def test_the_plan_has_the_bytes_that_are_written(tiny: Path, written: Path, tmp_path: Path) -> None:
    more = {"embeddings": "bf16", "rescored": 1000}
    plan = FpgaTarget().plan(Request(tiny, tmp_path / "out", more=more))
    for path, n_bytes in plan.files.items():
        found = written / path.name
        if found.is_file():
            assert found.stat().st_size == n_bytes, path.name
    assert (
        0.5
        < sum(path.stat().st_size for path in (written / "golden").iterdir()) / plan.files[tmp_path / "out" / "golden"]
        <= 1
    )
    dry = run("export", tiny, "--to", "fpga", "--out", tmp_path / "out", "--dry-run")
    assert "bits a ternary weight with padding" in dry.stdout and "tokens/s (model, not measured)" in dry.stdout
    assert not (tmp_path / "out").exists()


def test_the_report_counts_bytes_and_says_what_is_modelled(written: Path) -> None:
    folder, report = BoardFolder.open(written), json.loads((written / "report.json").read_text())
    n_trits = sum(tensor.n_out * tensor.n_in for tensor in folder.tensors.values() if tensor.phase != "head")
    n_bytes = sum((written / f"weights.{port}.bin").stat().st_size for port in range(4))
    assert report["bytes"]["weights"] == n_bytes
    assert report["ddr_bits_a_trit"] == pytest.approx(8 * n_bytes / n_trits, abs=1e-6)
    memory = report["board"]["memory_bytes"]
    assert memory["embeddings"] == (written / "embed.bin").stat().st_size
    assert memory["output matrix"] == pytest.approx((written / "head_i8.bin").stat().st_size, abs=64)
    assert report["board"]["bits_a_trit"] == pytest.approx(report["ddr_bits_a_trit"], rel=0.02)
    assert set(report["board"]["modelled"]) == {"tokens", "first_token_seconds", "floor_seconds"}


@pytest.mark.parametrize(
    "n_layers, n_embd, n_kv, n_ff, most", [(30, 2560, 640, 6912, 1.603), (24, 1536, 1536, 4096, 1.658)]
)
def test_weights_take_few_bits_with_their_padding(
    n_layers: int, n_embd: int, n_kv: int, n_ff: int, most: float
) -> None:
    """BitNet b1.58 2B-4T and 0.7B, with each matrix from a multiple of ALIGNMENT on in the file of each port."""
    geometry = Geometry("base3", 4, 16)
    shapes = [(n_embd + 2 * n_kv, n_embd), (n_embd, n_embd), (2 * n_ff, n_embd), (n_embd, n_ff)]
    ports = [geometry.stream_bytes(*shape) // 4 for shape in shapes]
    padded = sum(-(-each // ALIGNMENT) * ALIGNMENT for each in ports)
    assert 8 * 4 * padded / sum(n_out * n_in for n_out, n_in in shapes) <= most


def test_the_golden_layer_is_that_of_the_reference(tiny: Path, written: Path) -> None:
    folder = BoardFolder.open(written)
    tokens = folder.array("golden.layers.0.tokens")
    backend = ReferenceBackend(activations="int8")
    with ModelFile.open(tiny) as file:
        spec = read_spec(file)
        session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(8)), Device(1)).session()
    hidden = session.forward(tokens, hidden=[0]).hidden
    assert hidden is not None
    found = folder.array("golden.layers.0.output")
    assert found.shape == (4, spec.n_embd)
    # Both round activations to 8 bits; a sum in another order moves one over the edge of a rounding now and then.
    assert np.abs(found - hidden[0]).max() <= 2e-2 * np.abs(found).max()
    q, y = folder.array("golden.layers.0.qkv.x"), folder.array("golden.layers.0.qkv.y")
    assert_array_equal(q.astype(np.int64) @ folder.trits("layers.0.qkv").T.astype(np.int64), y)


def test_the_first_stage_of_the_head_finds_the_best_tokens(tiny: Path, written: Path, rng: np.random.Generator) -> None:
    folder = check_folder(written)
    assert folder.manifest.facts["head"] == {
        "array": "head",
        "scales": "head_scales",
        "tied": True,
        "first_stage": {"tensor": "head", "rescored": 291},
    }
    with open_ternary(tiny) as source:
        output = next(tensor for tensor in source.tensors if tensor.name == source.output)
        assert isinstance(output, StoredTensor)
        weights = dequantize(output.type, output.data(), output.shape)
        trits, scales = ternary_rows(output)
    assert_array_equal(folder.trits("head"), trits)
    x = rng.standard_normal((256, 50)).astype(np.float32)
    best, found = (weights @ x).argmax(axis=0), (folder.trits("head") @ x) * scales[:, None]
    among = (found > np.take_along_axis(found, best[None], axis=0)).sum(axis=0)
    assert (among < 16).mean() >= 0.9
    rounded = folder.array("head") * folder.array("head_scales")[:, None]
    assert np.abs(rounded - weights).max() <= np.abs(weights).max() / 127


def test_embeddings_are_rounded_by_row(tiny: Path, tmp_path: Path) -> None:
    export(tiny, tmp_path / "out", "--golden", "0")
    folder = check_folder(tmp_path / "out")
    assert folder.manifest.facts["head"]["array"] == "embed" and not (tmp_path / "out" / "golden").exists()
    with ModelFile.open(tiny) as file:
        info = file.tensors["token_embd.weight"]
        weights = dequantize(info.type, file.data(info.name), info.shape)
    error = np.abs(folder.array("embed") * folder.array("embed_scales")[:, None] - weights)
    assert (error <= 0.501 * folder.array("embed_scales")[:, None]).all()


def test_rotations_are_sines_and_cosines() -> None:
    x = np.concatenate([np.linspace(0, 10, 10_001), np.linspace(0, 2**20, 10_001)])
    sines, cosines = sines_and_cosines(x)
    assert np.abs(sines - np.sin(x)).max() < 1e-14 and np.abs(cosines - np.cos(x)).max() < 1e-14


def test_a_folder_with_other_files_is_not_replaced(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pytorch_model.bin").write_bytes(b"mine")
    result = run("export", tiny, "--to", "fpga", "--out", tmp_path / "out")
    assert result.exit_code != 0 and "This folder has other files, such as 'pytorch_model.bin'" in result.stderr


def test_a_fault_leaves_the_older_folder(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(tiny, tmp_path / "out", "--golden", "0")
    before = (tmp_path / "out" / "manifest.json").read_bytes()

    def fail(*_: object) -> None:
        raise UnsupportedModel("no")

    monkeypatch.setattr(writing, "_write_embeddings", fail)
    assert run("export", tiny, "--to", "fpga", "--out", tmp_path / "out", "--golden", "1").exit_code == 3
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_embeddings_in_three_values_are_refused_by_name(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "I2_S", types={"token_embd": "I2_S"})
    result = run("export", source, "--to", "fpga", "--out", tmp_path / "out", "--dry-run")
    assert result.exit_code == 3 and "tensor token_embd.weight must not be ternary: found I2_S" in result.stderr


def test_a_tensor_that_would_be_left_out_is_refused_by_name(tiny: Path) -> None:
    with open_ternary(tiny) as source, source.as_model_file() as file:
        more = StoredTensor("blk.0.attn_q.bias", GGMLType.F32, (256,), lambda *_: np.zeros(1024, dtype=np.uint8))
        options = BoardOptions.of(Request(tiny, tiny))
        with pytest.raises(UnsupportedModel, match="tensor blk.0.attn_q.bias has no place in a folder for a board"):
            content_of(replace(source, tensors=[*source.tensors, more]), read_spec(file), options)


@pytest.mark.parametrize(
    "scaling",
    [{"type": "linear", "factor": 4.0}, {"type": "yarn", "factor": 4.0, "original_context_length": 128}],
    ids=["linear", "yarn"],
)
def test_rotations_have_the_scaling_of_the_context(scaling: dict[str, str | float], tmp_path: Path) -> None:
    is_yarn = scaling["type"] == "yarn"
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "I2_S", rope_scaling=scaling, rope_freqs=not is_yarn)
    result = run("export", source, "--to", "fpga", "-o", tmp_path / "out", "-c", "600", "--no-check", "--golden", "0")
    assert result.exit_code == 0 and "trained on 512 positions, fewer than the 600" in result.stderr, result.output
    with ModelFile.open(source) as file:
        rope = read_spec(file).layers[0].mixer.rope
    assert (rope.magnitude > 1.1) == is_yarn and (rope.inverse_frequencies[0] == 0.25) != is_yarn
    angles = np.arange(600)[:, None] * np.array(rope.inverse_frequencies)
    table = BoardFolder.open(tmp_path / "out").array("rope")
    assert np.abs(table - rope.magnitude * np.stack([np.cos(angles), np.sin(angles)])).max() < 1e-6


def test_what_is_written_is_compared_with_the_source(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = writing._packed
    monkeypatch.setattr(writing, "_packed", lambda *of: replace(packed(*of), scales=2 * packed(*of).scales))
    result = run("export", tiny, "--to", "fpga", "--out", tmp_path / "out", "--golden", "0")
    assert result.exit_code == 3 and not (tmp_path / "out").exists()
    assert "layers.0.qkv: scales must be those of the source: found others" in result.stderr


def test_values_of_callers_are_checked(tmp_path: Path) -> None:
    for more, n_ctx, words in (
        ({"embeddings": "int4"}, None, "--embeddings must be int8 or bf16: found 'int4'"),
        ({"golden": -1}, None, "--golden must be an integer in 0..4096: found -1"),
        ({"rescored": 1.5}, None, "--rescored must be an integer"),
        ({}, 1 << 21, "--ctx must be at most 1048576"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            BoardOptions.of(Request(tmp_path, tmp_path, n_ctx=n_ctx, more=more))
