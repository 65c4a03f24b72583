"""ONNX files: what is in them gives the logits of the source, and they are whole or not there."""

import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from checkpoints import TEXTS, byte_level
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from reference_head import open_reference_head
from tiny_checkpoints import to_gguf
from tiny_checkpoints import write as write_checkpoint
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.onnx import choose_provider
from edgeinfer.backends.onnx import files as files_module
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import BudgetExceeded, ModelFileError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters import onnx as exporter
from edgeinfer.exporters.huggingface import open_folder
from edgeinfer.exporters.onnx import export_onnx
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import read_head
from edgeinfer.models.gguf import ModelFile

pytestmark = pytest.mark.usefixtures("onnx_provider")


BESIDE = ("out.onnx.tokenizer.json", "out.onnx.tokenizer_config.json", "out.onnx.manifest.json")
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
IN_FOLDER = ["manifest.json", "model.onnx", "tokenizer.json", "tokenizer_config.json"]


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
        value.name: np.zeros([n if isinstance(n, int) else n_ctx for n in value.shape], dtype=np.float32)
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
        for window in facts["windows"]:
            near = bias.copy()
            near[..., : max(0, position + 1 - window)] = facts["hidden_bias"]
            given[f"attention_bias.{window}"] = near
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
    expected = {"a.gguf", "out.onnx", *BESIDE} | ({"out.onnx.data"} if external else set())
    assert {path.name for path in tmp_path.iterdir()} == expected
    # Two tokens of the random model may have nearly the same logit.
    assert re.search("check: 3[12] of 32 greedy tokens equal the source in ONNX Runtime", result.stderr)
    tokens = [5, 80, 200, 7, 7, 31]
    with ModelFile.open(source) as file:
        reference = ReferenceBackend()
        spec = reference.read_spec(file)
        session = reference.load(file, spec, reference.plan(file, spec, LoadSettings(64)), Device(1)).session()
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
    assert "check: 32 of 32 greedy tokens equal the source in ONNX Runtime" in result.stderr
    assert not (tmp_path / "tokenizer.json").exists() and (tmp_path / "manifest.json").exists()
    assert difference(logits_of(tmp_path / "model.onnx", tokens, features), theirs) < 1e-3
    other = write_tiny_model(tmp_path / "b.gguf", "granite", "F16", n_embd=256, seed=1)
    refused = run("export", head, *arguments, "--target", other)
    assert refused.exit_code == 3 and "use the head of this model" in refused.stderr
    write_tiny_head(head, model, taps=(0, 1))
    refused = run("export", head, *arguments, "--target", model)
    assert refused.exit_code == 3 and "a head with taps is fed by what several layers" in refused.stderr


# ---- Folders of Hugging Face -----------------------------------------------------------------------------------------


def write_folder(folder: Path, case: str, n_vocab: int = 640, **config: Any) -> None:
    write_checkpoint(folder, case, {"vocab_size": n_vocab, "max_position_embeddings": 256, **ENDS, **config})
    byte_level(folder)


@pytest.mark.parametrize("case", ["llama", "qwen2_fractions", "gemma3", "phi3"])
def test_a_folder_of_hugging_face_becomes_a_folder(case: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"head_dim": 8} if case != "phi3" else {}
    write_folder(tmp_path / "model", case, **config)
    out = tmp_path / "made"
    n_ctx = "32" if case == "phi3" else "128"  # which is where its rotation changes
    dry = run("export", tmp_path / "model", "--to", "onnx", "-o", out, "-c", n_ctx, "--dry-run")
    assert dry.exit_code == 0 and not out.exists() and "F32" in dry.stdout, dry.output
    result = run("export", tmp_path / "model", "--to", "onnx", "-o", out, "-c", n_ctx)
    assert result.exit_code == 0, result.output
    assert f"check: {min(32, int(n_ctx) // 2)} of" in result.stderr and "equal the source in ONNX" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == IN_FOLDER
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "model"]
    manifest = json.loads((out / "manifest.json").read_text())
    sources = {each["name"]: each["sha256"] for each in manifest["source"]}
    files = {path.name: path for path in (tmp_path / "model").iterdir()}
    assert sources == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert {each["name"] for each in manifest["files"]} == {*IN_FOLDER} - {"manifest.json"}
    assert manifest["checked"] and manifest["kl_divergence"] < 1e-4 and manifest["types"]["F32"] > 10
    tokens = [5, 80, 200, 7, 7, 31, 599, 11, 12, 13, 14, 15]
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    wanted = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.encode(text).ids == wanted.encode(text).ids
    found = logits_of(out / "model.onnx", tokens)
    expected = of_transformers(tmp_path / "model", tokens)[:, : found.shape[1]]  # Gemma 3 has rows without tokens
    assert difference(found, expected) < 1e-3
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


def of_transformers(folder: Path, tokens: list[int]) -> NDArray[np.float32]:
    """Logits of all tokens; of the numpy backend where transformers is missing."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        to_gguf(open_folder(folder), folder.with_name("oracle.gguf"))
        with ModelFile.open(folder.with_name("oracle.gguf")) as file:
            reference = ReferenceBackend()
            spec = reference.read_spec(file)
            session = reference.load(file, spec, reference.plan(file, spec, LoadSettings(64)), Device(1)).session()
        return session.forward(tokens, logits="all").logits
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens])).logits[0])


def test_a_folder_may_be_quantised_on_the_way(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    arguments = ("export", tmp_path / "model", "--to", "onnx", "--type", "Q8_0", "-c", "64")
    result = run(*arguments, "-o", tmp_path / "out.onnx", "--no-check")
    assert result.exit_code == 0 and "check: left out" in result.stderr, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out.onnx", *BESIDE}
    manifest = json.loads((tmp_path / "out.onnx.manifest.json").read_text())
    assert manifest["check"] is None and "Q8_0" in manifest["types"] and manifest["options"]["type"] == "Q8_0"
    again = run(*arguments, "-o", tmp_path / "again")
    assert (
        again.exit_code == 0
        and "ONNX Runtime" in json.loads((tmp_path / "again" / "manifest.json").read_text())["check"]
    )
    assert (tmp_path / "again" / "model.onnx").read_bytes() == (tmp_path / "out.onnx").read_bytes()
    assert run(*arguments, "-o", tmp_path / "again").exit_code == 0  # is replaced
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == IN_FOLDER


@pytest.mark.parametrize("n_ctx", [1, 2, 3, 17])
def test_a_small_context_is_checked_as_far_as_it_goes(n_ctx: int, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    result = run("export", source, "--to", "onnx", "-c", str(n_ctx), "-o", tmp_path / "b.onnx")
    assert result.exit_code == 0, result.output
    n = max(1, n_ctx // 2)
    assert f"check: {n} of {n} greedy tokens equal the source" in result.stderr


@pytest.mark.parametrize("of_head", [False, True])
def test_a_file_of_another_model_is_found_and_not_kept(
    of_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    other = write_tiny_model(tmp_path / "b.gguf", "llama", "F16", seed=7)
    made = exporter.build_model
    monkeypatch.setattr(exporter, "build_model", lambda _, spec, *rest: made(ModelFile.open(other), spec, *rest))
    source, more = model, []
    if of_head:
        source = write_tiny_head(tmp_path / "h.gguf", model)
        heads, head = exporter.build_head, write_tiny_head(tmp_path / "i.gguf", model, seed=7)
        monkeypatch.setattr(exporter, "build_head", lambda _, *rest: heads(ModelFile.open(head), *rest))
        more = ["--target", str(model)]
    result = run("export", source, "--to", "onnx", "-o", tmp_path / "out.onnx", *more)
    assert result.exit_code == 3 and "gives another text than its source" in result.stderr, result.output
    assert not list(tmp_path.glob("out.onnx*"))


def test_a_tokenizer_that_no_export_wrote_stays(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    (tmp_path / "tokenizer.json").write_text("mine")
    result = run("export", source, "--to", "onnx", "-o", tmp_path)
    assert result.exit_code == 1 and "has a tokenizer.json that no export wrote" in result.stderr
    assert (tmp_path / "tokenizer.json").read_text() == "mine" and not (tmp_path / "model.onnx").exists()
    write_folder(tmp_path / "model", "llama")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    result = run("export", tmp_path / "model", "--to", "onnx", "-o", tmp_path / "model")
    assert result.exit_code == 2 and "must be another file than those that are read" in result.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_what_has_no_graph_is_refused_by_the_name_of_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "mixtral")
    result = run("export", tmp_path / "model", "--to", "onnx", "-o", tmp_path / "made")
    assert result.exit_code == 3 and f"{tmp_path / 'model'}: " in result.stderr, result.output
    assert "model.gguf" not in result.stderr and [path.name for path in tmp_path.iterdir()] == ["model"]


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
    with ModelFile.open(source) as file, pytest.raises(ModelFileError, match="not all numbers") as told:
        export_onnx(file, tmp_path / "m.onnx", n_ctx=64)
    assert str(told.value).startswith(f"{tmp_path / 'm.onnx'}: ")
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
