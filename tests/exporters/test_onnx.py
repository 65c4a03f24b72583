"""ONNX files: what is in them gives the logits of the source, and they are whole or not there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.onnx import choose_provider
from edgeinfer.backends.onnx import files as files_module
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.backends.reference_head import open_reference_head
from edgeinfer.errors import BudgetExceeded, ModelFileError
from edgeinfer.exporters import onnx as exporter
from edgeinfer.exporters.onnx import export_onnx
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import read_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import Device

pytestmark = pytest.mark.usefixtures("onnx_provider")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def logits_of(path: Path, tokens: list[int], features: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """(n, n_logits), from the file alone and what its metadata says: token by token, each behind the cache it got."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=[choose_provider("CPU").full_name])
    facts = json.loads(session.get_modelmeta().custom_metadata_map["edgeinfer"])
    n_ctx = facts["n_ctx"]
    names = [value.name for value in session.get_outputs()]
    caches = {
        value.name: np.zeros((1, facts["n_kv_heads"], n_ctx, facts["head_dim"]), dtype=np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_")
    }
    rows = []
    for position, token in enumerate(tokens):
        n_seen = n_ctx if facts["cache"] == "slots" else position + 1
        bias = np.full((1, 1, 1, n_seen), facts["hidden_bias"], dtype=np.float32)
        bias[..., : position + 1] = 0
        given: dict[str, Any] = {"input_ids": [[token]], "position_ids": [[position]], "logit_rows": [0], **caches}
        given["attention_bias"] = bias
        if facts["cache"] == "slots" and caches:
            given["cache_slots"] = [position]
        if features is not None:
            given["features"] = features[None, position : position + 1]
        wanted = {value.name for value in session.get_inputs()}
        out = dict(
            zip(names, session.run(None, {k: np.array(v) for k, v in given.items() if k in wanted}), strict=True)
        )
        caches = {name: out[name.replace("past", "present")] for name in caches}
        rows.append(out["logits"][0])
    return np.stack(rows)


def difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("operators", ["contrib", "plain"])
@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("architecture, format", [("llama", "Q4_0"), ("qwen2", "Q4_K"), ("llama", "F16")])
def test_a_file_gives_the_logits_of_its_source(
    architecture: Any, format: str, external: bool, operators: str, tmp_path: Path
) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", architecture, format, tied=architecture == "qwen2")
    target = tmp_path / "out.onnx"
    options = ["--external-data"] if external else []
    result = run("export", source, "--to", "onnx", "-o", target, "-c", "64", "--operators", operators, *options)
    assert result.exit_code == 0, result.output
    assert "out.onnx" in result.stderr and result.stdout == ""
    expected = {"a.gguf", "out.onnx"} | ({"out.onnx.data"} if external else set())
    assert {path.name for path in tmp_path.iterdir()} == expected
    tokens = [5, 80, 200, 7, 7, 31]
    with ModelFile.open(source) as file:
        reference = ReferenceBackend()
        spec = reference.read_spec(file)
        session = reference.load(file, spec, reference.plan(file, spec, 64), Device(1)).session()
    theirs = session.forward(tokens, logits="all").logits
    is_rounded = operators == "contrib" and format != "F16"
    assert difference(logits_of(target, tokens), theirs) < (6e-2 if is_rounded else 1e-3)


@pytest.mark.parametrize("operators", ["contrib", "plain"])
@pytest.mark.parametrize("n_layers", [0, 2])
def test_a_head_goes_with_its_targets_embeddings_and_its_vocabulary(
    n_layers: int, operators: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = write_tiny_model(tmp_path / "a.gguf", "granite", "F16", n_embd=256)
    head = write_tiny_head(tmp_path / "h.gguf", model, n_layers=n_layers)
    arguments = ("--to", "onnx", "-o", tmp_path, "--operators", operators)
    refused = run("export", head, *arguments)
    assert refused.exit_code == 2 and "needs its target's embeddings: name that model" in refused.stderr
    result = run("export", head, *arguments, "--target", model)
    assert result.exit_code == 0, result.output
    tokens, features = [5, 80, 200, 7], rng.standard_normal((4, 256), dtype=np.float32)
    with ModelFile.open(head) as file, ModelFile.open(model) as of_target:
        target_spec = read_spec(of_target)
        spec = read_head_beside(file, of_target, target_spec)
        oracle = open_reference_head(file, spec, of_target, target_spec, 64, "float32")
    theirs = oracle.forward(tokens, features, logits="all").logits
    assert difference(logits_of(tmp_path / "model.onnx", tokens, features), theirs) < 1e-3
    other = write_tiny_model(tmp_path / "b.gguf", "granite", "F16", n_embd=256, seed=1)
    refused = run("export", head, *arguments, "--target", other)
    assert refused.exit_code == 3 and "use the head of this model" in refused.stderr
    write_tiny_head(head, model, taps=(0, 1))
    refused = run("export", head, *arguments, "--target", model)
    assert refused.exit_code == 3 and "a head with taps is fed by what several layers" in refused.stderr


def test_what_a_user_must_know_is_in_the_file(tmp_path: Path) -> None:
    import onnx

    model = write_tiny_model(tmp_path / "a.gguf", "llama", "Q4_0")
    head = write_tiny_head(tmp_path / "h.gguf", model, draft_vocab=[3, 9, 200])
    with ModelFile.open(model) as file, ModelFile.open(head) as of_head:
        export_onnx(file, tmp_path / "m.onnx", n_ctx=77)
        export_onnx(of_head, tmp_path / "h.onnx", file, n_ctx=77)
        fingerprint = read_head(of_head).target.fingerprint
        template = file.metadata["tokenizer.chat_template"]
    found = {entry.key: entry.value for entry in onnx.load(tmp_path / "m.onnx").metadata_props}
    facts = json.loads(found["edgeinfer"])
    assert facts["n_ctx"] == 77 and facts["n_kv_heads"] == 2 and facts["architecture"] == "llama"
    assert found["tokenizer.chat_template"] == template and "tokenizer.ggml.eos_token_id" in found
    of_head_file = {entry.key: entry.value for entry in onnx.load(tmp_path / "h.onnx").metadata_props}
    assert json.loads(of_head_file["draft_vocab"]) == [3, 9, 200]
    assert of_head_file["target.fingerprint"] == fingerprint


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "a.gguf", "gemma2", "Q4_1")) as file:
        written = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            paths = export_onnx(file, tmp_path / name, n_ctx=64, beside=True)
            written.append([path.read_bytes() for path in paths])
    assert written[0] == written[1]


def test_weights_go_beside_a_model_that_gets_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "MAX_WITHIN_BYTES", 1000)
    with ModelFile.open(write_tiny_model(tmp_path / "a.gguf", "llama", "Q4_1")) as file:
        assert [path.name for path in export_onnx(file, tmp_path / "m.onnx", n_ctx=64)] == ["m.onnx", "m.onnx.data"]


@pytest.mark.parametrize("fails", ["write_graph", "check_file"])
def test_nothing_is_left_of_an_export_that_fails_and_what_was_there_stays(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "m.onnx"
    before.write_text("what was there")
    original = getattr(exporter, fails)

    def failing(*arguments: Any) -> None:
        original(*arguments)
        raise OSError("no space left on device")

    monkeypatch.setattr(exporter, fails, failing)
    with ModelFile.open(write_tiny_model(tmp_path / "a.gguf", "llama", "Q4_1")) as file:
        with pytest.raises(OSError, match="no space"):
            export_onnx(file, before, n_ctx=64, beside=True)
    assert before.read_text() == "what was there"
    assert {path.name for path in tmp_path.iterdir()} == {"a.gguf", "m.onnx"}


def test_a_source_that_gives_no_numbers_is_refused(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F32")
    with ModelFile.open(source) as file:
        at = file.tensors["blk.0.attn_q.weight"].offset
    data = bytearray(source.read_bytes())
    data[at : at + 4] = np.float32(np.nan).tobytes()
    source.write_bytes(data)
    with ModelFile.open(source) as file, pytest.raises(ModelFileError, match="not all numbers"):
        export_onnx(file, tmp_path / "m.onnx", n_ctx=64)
    assert not list(tmp_path.glob("m.onnx*"))


def test_a_file_that_breaks_the_rules_is_found(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a")
    with pytest.raises(ModelFileError, match="not a sound ONNX model"):
        files_module.check_file(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--to", "onnx", "--format", "tq1_0"], "--format goes with --to ternary, not with --to onnx"),
        (["--to", "ternary", "-c", "64"], "--ctx goes with --to gguf, genai, litertlm, mnn, pte, onnx or fpga, not"),
        (["--to", "ternary", "--external-data"], "--external-data goes with --to onnx, not with --to ternary"),
        (["--to", "onnx", "--target", "SOURCE"], "is no draft head, which alone has a target"),
    ],
)
def test_options_of_another_target_are_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "Q4_0")
    filled = [str(source) if each == "SOURCE" else each for each in arguments]
    result = run("export", source, "-o", tmp_path / "b.onnx", *filled)
    assert result.exit_code == 2 and words in result.stderr


def test_tables_of_rotations_that_memory_cannot_hold_are_refused_at_once(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf")) as file:
        with pytest.raises(BudgetExceeded, match="2147483647 positions take .* available are"):
            export_onnx(file, tmp_path / "m.onnx", n_ctx=2**31 - 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]
