"""`edgeinfer export`, and GGUF files from one ternary format to another."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_packed_llama, write_safetensors
from click.testing import CliRunner, Result
from numpy.testing import assert_array_equal
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.common.errors import InvalidGGUF, ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint import TernaryCheckpoint
from edgeinfer.exporters.ternary import Format, export_ternary
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def weights_of(path: Path) -> dict[str, np.ndarray]:
    with ModelFile.open(path) as file:
        return {name: dequantize(info.type, file.data(name), info.shape) for name, info in file.tensors.items()}


def converted(source: Path, target: Path, **options: Any) -> dict[str, np.ndarray]:
    with ModelFile.open(source) as file:
        export_ternary(file, target, **options)
    return weights_of(target)


@pytest.mark.parametrize("first", ["tq1_0", "tq2_0"])
def test_a_file_of_one_scale_a_matrix_goes_through_all_formats(first: Format, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "I2_S")
    weights = weights_of(source)
    one = converted(source, tmp_path / "b.gguf", format=first)
    back = converted(tmp_path / "b.gguf", tmp_path / "c.gguf", format="i2_s")
    with ModelFile.open(source) as before, ModelFile.open(tmp_path / "b.gguf") as after:
        assert {**before.metadata, "general.file_type": 36 if first == "tq1_0" else 37} == dict(after.metadata)
        assert {info.type.name for name, info in after.tensors.items() if ".attn_q." in name} == {first.upper()}
    for name, expected in weights.items():
        assert_array_equal(np.sign(one[name]), np.sign(expected))
        assert np.abs(one[name] - expected).max() <= 5e-4 * np.abs(expected).max()  # scales in float16
        assert_array_equal(back[name], one[name])


@pytest.mark.parametrize("source_type", ["TQ1_0", "TQ2_0"])
def test_scales_of_256_inputs_are_kept(source_type: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", source_type, types={"output": "F16", "token_embd": "F16"})
    for format in ("tq1_0", "tq2_0"):
        found = converted(source, tmp_path / "b.gguf", format=format)
        for name, expected in weights_of(source).items():
            assert_array_equal(found[name], expected)
    with pytest.raises(UnsupportedModel, match="tensor blk.0.attn_q.weight: i2_s has one scale a matrix: found"):
        converted(source, tmp_path / "c.gguf", format="i2_s")
    assert not list(tmp_path.glob("c.gguf*"))


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_takes_the_format_that_is_wanted(tied: bool, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "I2_S", tied=tied)
    name, other = ("token_embd.weight", None) if tied else ("output.weight", "token_embd.weight")
    weights = weights_of(source)
    for head, kind, error in [("q6_k", GGMLType.Q6_K, 0.02), ("keep", GGMLType.F16, 0), ("f16", GGMLType.F16, 0)]:
        found = converted(source, tmp_path / "b.gguf", head=head)
        with ModelFile.open(tmp_path / "b.gguf") as file:
            assert file.tensors[name].type == kind
            assert other is None or file.tensors[other].type == GGMLType.F16
        assert np.sqrt(np.mean((found[name] - weights[name]) ** 2)) <= error * weights[name].std()


def test_a_file_that_is_not_ternary_is_refused_by_tensor(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "Q4_K")
    with pytest.raises(UnsupportedModel, match=r"tensor blk.0.attn_q.weight is Q4_K, which is not ternary"):
        converted(source, tmp_path / "b.gguf")
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16", n_embd=256)
    with pytest.raises(UnsupportedModel, match=r"blk.0.attn_q.weight: .* must be -s, 0 or s"):
        converted(source, tmp_path / "b.gguf", format="i2_s")
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "Q2_0", n_embd=256)
    whole = source.read_bytes()
    with ModelFile.open(source) as file:
        at = file.tensors["blk.0.attn_q.weight"].offset + 2
    source.write_bytes(whole[:at] + bytes([whole[at] | 3]) + whole[at + 1 :])
    with pytest.raises(UnsupportedModel, match=r"tensor blk.0.attn_q.weight: .* this matrix is not ternary"):
        converted(source, tmp_path / "b.gguf", format="tq2_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf"]


def test_a_draft_head_is_refused_with_what_is_wanted(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    head = write_tiny_head(tmp_path / "h.gguf", target)
    result = run("export", head, "--to", "ternary", "--out", tmp_path / "b.gguf")
    said = " ".join(result.stderr.split())
    assert result.exit_code == 3 and "is a draft head with matrices in F16: --to ternary rounds nothing" in said
    assert "ternary matrices (I2_S, TQ1_0, TQ2_0, Q2_0) alone; for a smaller head take --to gguf --type Q4_0" in said
    assert not list(tmp_path.glob("b.gguf*"))


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["a.gguf", "--to", "onnx", "--target", "SOURCE"], "--target"),
        *((["a.gguf", "--to", target, "--draft", "SOURCE"], "--draft") for target in ("genai", "litertlm", "mnn")),
    ],
)
def test_a_folder_in_place_of_a_file_is_told_how_to_become_one(
    arguments: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "config.json").write_text('{"model_type": "llama"}')
    result = run("export", *("a model" if each == "SOURCE" else each for each in arguments), "-o", "out")
    said = (
        f"a model: {what} reads GGUF files, and this is a folder: make one of it first: edgeinfer export 'a model' --to"
    )
    assert result.exit_code == 2 and f"{said} gguf -o 'a model.gguf'" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_cut_short_is_refused_by_tensor(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "TQ2_0")
    with ModelFile.open(source) as file:
        last = max(file.tensors.values(), key=lambda info: info.offset)
    source.write_bytes(source.read_bytes()[: last.offset + last.n_bytes - 1])
    with pytest.raises(InvalidGGUF, match=f"tensor '{last.name}' offset"):
        converted(source, tmp_path / "b.gguf")


def test_rows_that_a_format_cannot_have_are_refused_by_tensor(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "I2_S", n_ff=384)
    assert run("export", source, "--to", "ternary", "--out", tmp_path / "b.gguf").exit_code == 0
    result = run("export", source, "--to", "ternary", "--out", tmp_path / "c.gguf", "--format", "tq2_0")
    assert result.exit_code == 3
    assert "tensor blk.0.ffn_down.weight: tq2_0 needs rows of a multiple of 256 inputs: found 384" in result.stderr


@pytest.mark.parametrize("format, head", [("i2_s", "keep"), ("tq1_0", "q6_k"), ("tq2_0", "f16")])
def test_an_exported_checkpoint_answers(format: str, head: str, tmp_path: Path, rng: np.random.Generator) -> None:
    write_packed_llama(tmp_path, rng)
    target = tmp_path / "m.gguf"
    arguments = ("--to", "ternary", "--out", target, "--format", format, "--head", head)
    result = run("export", tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    assert "m.gguf" in result.stderr and result.stdout == ""
    with ModelFile.open(target) as file:
        assert file.tensors["token_embd.weight"].type == GGMLType.F16
        assert file.tensors["output.weight"].type.name == ("Q6_K" if head == "q6_k" else "F16")
    answer = run("chat", "-m", target, "-p", "Hello", "-n", "8", "--temp", "0", "--json", "--draft", "none")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["timings"]
    assert format.upper() in run("inspect", target).stdout


@pytest.mark.parametrize(
    "change, error, words",
    [
        (
            {"hidden_size": "256"},
            ModelFileError,
            "config.json: hidden_size must be an integer in 1..2147483647: found '256'",
        ),
        (
            {"num_key_value_heads": 0},
            ModelFileError,
            "num_key_value_heads must be an integer in 1..2147483647: found 0",
        ),
        ({"rms_norm_eps": 0}, ModelFileError, "rms_norm_eps must be a number above 0, at most 1e[+]30: found 0"),
        ({"rope_theta": "much"}, ModelFileError, "rope_theta must be a number above 0, at most 1e[+]12: found 'much'"),
        ({"rope_scaling": {"type": "linear"}}, UnsupportedModel, "rope_type must be default: found 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, UnsupportedModel, "rope_type must be default: found 'yarn'"),
        ({"rope_scaling": "yarn"}, ModelFileError, "rope_scaling must be an object: found 'yarn'"),
        ({"intermediate_size": 1024}, ModelFileError, "mlp.gate_proj.weight must be .1024, 256. with four rows"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(
    change: dict[str, Any], error: type[Exception], words: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    write_packed_llama(tmp_path, rng)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error, match=words):
        export_ternary(TernaryCheckpoint.open(tmp_path), tmp_path / "m.gguf")
    assert not list(tmp_path.glob("m.gguf*"))


def test_a_tied_checkpoint_may_have_its_one_table_under_either_name(tmp_path: Path) -> None:
    written = []
    for name in ("model.embed_tokens", "lm_head"):
        folder = tmp_path / name / "model"
        folder.mkdir(parents=True)
        write_packed_llama(folder, np.random.default_rng(3), (name,))
        result = run("export", folder, "--to", "ternary", "-o", tmp_path / name / "out.gguf")
        assert result.exit_code == 0, result.output
        written.append((tmp_path / name / "out.gguf").read_bytes())
    assert written[0] == written[1]


def test_a_tensor_that_would_be_left_out_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    write_packed_llama(tmp_path, rng)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    more = {"model.layers.0.mlp.up_proj.bias": ("F32", np.ones(512))}
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", more)
    with pytest.raises(UnsupportedModel, match="tensor model.layers.0.mlp.up_proj.bias has no place"):
        export_ternary(TernaryCheckpoint.open(tmp_path), tmp_path / "m.gguf")


def test_the_command_refuses_with_the_exit_code_of_the_error(tmp_path: Path, rng: np.random.Generator) -> None:
    write_packed_llama(tmp_path, rng)
    (tmp_path / "tokenizer.json").unlink()
    result = run("export", tmp_path, "--to", "ternary", "--out", tmp_path / "m.gguf")
    assert result.exit_code == 3 and "tokenizer.json: is missing" in result.stderr
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "I2_S")
    before = source.read_bytes()
    result = run("export", source, "--to", "ternary", "--out", source)
    assert result.exit_code == 2 and "must be another file" in result.stderr
    assert source.read_bytes() == before
    assert run("export", source, "--out", tmp_path / "b.gguf").exit_code == 2


def test_rows_with_scales_of_their_own_keep_them_where_heads_are_reordered(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """As TriLM is published: no word of quantisation, and scales for some rows each."""
    write_packed_llama(tmp_path, rng)
    checkpoint = TernaryCheckpoint.open(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = {}
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name in checkpoint.names:
        if ".weight" in name and "proj" in name and not name.endswith("scale"):
            n_out, n_in = 4 * checkpoint.shape(name)[0], checkpoint.shape(name)[1]
            scales = np.repeat(rng.uniform(0.1, 1, n_out // 32).astype(np.float16), 32)[:, None]
            expected[name] = (rng.integers(-1, 2, (n_out, n_in)) * scales).astype(np.float32)
            tensors[name] = ("F16", expected[name])
        elif not name.endswith("scale"):
            tensors[name] = ("F32", checkpoint.floats(name))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    export_ternary(TernaryCheckpoint.open(tmp_path), tmp_path / "m.gguf", "tq2_0")
    found = weights_of(tmp_path / "m.gguf")
    assert_array_equal(found["blk.1.ffn_down.weight"], expected["model.layers.1.mlp.down_proj.weight"])
    assert_array_equal(found["blk.0.attn_v.weight"], expected["model.layers.0.self_attn.v_proj.weight"])
    for ours, theirs, n_heads in [("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)]:
        weights = expected[f"model.layers.1.self_attn.{theirs}.weight"]
        pairs = weights.reshape(n_heads, 2, 32, 256).transpose(0, 2, 1, 3).reshape(weights.shape)
        assert_array_equal(found[f"blk.1.{ours}.weight"], pairs)
