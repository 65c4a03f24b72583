"""Packages for ONNX Runtime GenAI, run in that library: the tokens of the source, whole or not there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from parts import missing
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.common.errors import EdgeInferError, InvalidArgument, ModelFileError, UnsupportedModel
from edgeinfer.exporters.from_gguf import FromGguf
from edgeinfer.exporters.genai import GenaiTarget, target
from edgeinfer.exporters.request import Request, Result

if importlib.util.find_spec("onnx") is None or importlib.util.find_spec("onnxruntime_genai") is None:
    missing("genai", "onnxruntime-genai is not installed: pip install 'edgeinfer[genai]'")

FILES = ["genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json"]


def exported(source: Path, out: Path, draft: Path | str | None = None, check: bool = True, **more: Any) -> Result:
    request = Request(source, out, draft=draft, n_ctx=128, check=check, **more)
    plan = FromGguf(GenaiTarget()).plan(request)
    shares: list[float] = []
    result = FromGguf(GenaiTarget()).write(request, shares.append)
    assert shares == sorted(shares) and shares[-1] == 1
    assert {path.name for path in plan.files} == {path.name for path in result.files if "onnx" in path.name}
    for path, n_bytes in plan.files.items():
        assert path.suffix == ".onnx" or path.stat().st_size == n_bytes
    return result


def is_near(facts: Any) -> bool:
    """Whether the logits are those of the source but for rounding: a tiny random model has many near ties."""
    return bool(facts["n_equal_tokens"] >= 24 and facts["kl_divergence"] < 2e-3)


def test_the_default_model_gives_the_tokens_of_the_native_engine(default_model: Path, tmp_path: Path) -> None:
    result = exported(default_model, tmp_path / "out")
    assert result.facts["n_equal_tokens"] == 32 and result.facts["kl_divergence"] < 2e-3
    assert result.check is not None and result.check.startswith(
        "32 of 32 greedy tokens equal the source in onnxruntime-"
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert config["search"] | {"temperature": 0.2, "top_k": 50, "top_p": 0.9} == config["search"]  # of SmolLM2
    peak = result.check_bytes
    assert peak is None or 0.6 * peak < result.facts["estimated_peak_bytes"]


def test_a_draft_model_takes_fewer_passes_of_the_target(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "gemma3", "Q4_K", vocabulary="spm")  # with windows
    result = exported(source, tmp_path / "out", draft=source)
    assert is_near(result.facts), result.check
    assert result.facts["n_passes"] < result.facts["n_tokens"] and result.facts["n_accepted"] > 0
    assert result.check is not None and result.check.endswith(
        f"passes of the model for {result.facts['n_tokens']} tokens"
    )


def test_ngrams_give_the_same_text(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "qwen2", "F16")
    result = exported(source, tmp_path / "out", draft="ngram", type="Q5_0")  # made first
    assert is_near(result.facts), result.check
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert config["speculative"]["ngram_size"] == 3
    notes = " ".join(FromGguf(GenaiTarget()).plan(Request(source, tmp_path / "out", type="Q5_0")).notes)
    assert "are Q5_0 and get codes of 8 bits" in notes and "onnxruntime-genai 0.18.0 or newer" in notes


def test_two_exports_give_the_same_bytes_with_their_manifests(tmp_path: Path) -> None:
    source, packages = write_tiny_model(tmp_path / "a.gguf", "llama", "Q4_0"), []
    for _ in range(2):
        arguments = ["--to", "genai", "-o", str(tmp_path / "out"), "-c", "128", "--draft", "ngram"]
        result = CliRunner().invoke(cli.main, ["export", str(source), *arguments])
        assert result.exit_code == 0 and "iB of memory" in result.stderr.partition("check: ")[2], result.output
        packages.append({path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()})
    assert packages[0] == packages[1] and b"checked_in" in packages[0]["manifest.json"]


def test_a_package_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_tiny_model(tmp_path / "a.gguf", "llama", "Q4_0"), tmp_path / "out"
    monkeypatch.setattr(target, "MAX_FILE_BYTES", 200_000)
    exported(source, out, check=False)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {"model.onnx.data", "model.onnx.data.1"} < before.keys()
    assert all(len(data) <= 200_000 for name, data in before.items() if ".data" in name)
    check_and_damage = target._checked

    def damaged(package: Any, folder: Path) -> Any:
        data = bytearray((folder / "model.onnx.data.1").read_bytes())
        data[:60_000] = bytes(60_000)
        (folder / "model.onnx.data.1").write_bytes(data)
        return check_and_damage(package, folder)

    monkeypatch.setattr(target, "_checked", damaged)
    with pytest.raises(ModelFileError, match="gives another text than its source"):
        exported(source, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "out"]
    (out / "notes.txt").touch()
    with pytest.raises(FileExistsError, match="has other files, such as 'notes.txt'"):
        exported(source, out)


def test_what_genai_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    head = write_tiny_head(tmp_path / "h.gguf", source)
    other = write_tiny_model(tmp_path / "b.gguf", "llama", "F16", n_vocab=300)
    odd = write_tiny_model(tmp_path / "c.gguf", "llama", "F16", n_embd=80, head_dim=20)
    cases: list[tuple[Path, Path | None, type[EdgeInferError], str]] = [
        (head, None, UnsupportedModel, "is a draft head: ONNX Runtime GenAI runs whole models"),
        (source, head, UnsupportedModel, "drafts with a whole model of the same vocabulary"),
        (source, other, InvalidArgument, "must have the vocabulary of the model, 291 logits: found 300"),
        (odd, None, UnsupportedModel, "heads have 20 numbers"),
    ]
    for model, draft, error, words in cases:
        with pytest.raises(error, match=words):
            GenaiTarget().plan(Request(model, tmp_path / "out", draft=draft))
        with pytest.raises(error, match=words):
            GenaiTarget().write(Request(model, tmp_path / "out", draft=draft), lambda share: None)
    assert not (tmp_path / "out").exists()
