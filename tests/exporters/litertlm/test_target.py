"""`--to litertlm`: whole files or none, the same bytes each time, and the source's text in the real runtime."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from parts import is_there, missing
from tiny_models import Architecture, write_tiny_model

from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checks.runtime import GreedyRun
from edgeinfer.exporters.from_gguf import FromGguf
from edgeinfer.exporters.litertlm import LitertlmTarget
from edgeinfer.exporters.litertlm import target as module
from edgeinfer.exporters.litertlm.graph import ARCHITECTURES
from edgeinfer.exporters.request import Request
from edgeinfer.models.chat_template import CHATML
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.tokenizer import Tokenizer

if not is_there("litert"):
    missing("litert", "ai-edge-litert and LiteRT-LM are not installed")


BEGUN = "{{ bos_token }}" + CHATML


def no_progress(share: float) -> None:
    """Nobody looks."""


@pytest.fixture
def request_of_tiny(tmp_path: Path) -> Request:
    source = write_tiny_model(tmp_path / "model.gguf", "qwen3", "F32", types={"attn_q": "Q8_0", "ffn_down": "Q4_0"})
    leave_printable(source)
    return Request(source, tmp_path / "out.litertlm", n_ctx=320)


def leave_printable(source: Path) -> None:
    """Take the rows of all tokens out of the output matrix but of single printable characters.

    The runtime gives a text, and tokens that are parts of characters would not be in it.
    """
    with ModelFile.open(source) as file:
        info, tokenizer = file.tensors["output.weight"], Tokenizer.from_file(file)
        printable = [re.fullmatch(rb"[!-~]", tokenizer.token_bytes(id)) is not None for id in range(tokenizer.n_vocab)]
    rows = np.memmap(source, np.float32, "r+", info.offset, info.shape)
    rows[~np.array(printable)] = 0
    rows.flush()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gives_the_text_of_its_source(architecture: Architecture, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model.gguf", architecture, "F32")
    leave_printable(source)
    result = LitertlmTarget().write(Request(source, tmp_path / "out.litertlm", n_ctx=320), no_progress)
    assert result.check is not None and "greedy tokens equal the source in LiteRT-LM" in result.check


@pytest.mark.parametrize("vocabulary", ["bpe", "spm"])
def test_the_begin_token_stands_once_before_a_text(vocabulary: Literal["bpe", "spm"], tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model.gguf", "llama", "F32", vocabulary=vocabulary, template=BEGUN)
    leave_printable(source)
    key = b"tokenizer.ggml.add_bos_token" + (7).to_bytes(4, "little")  # a bool
    source.write_bytes(source.read_bytes().replace(key + b"\0", key + b"\1"))
    with ModelFile.open(source) as file:
        assert Tokenizer.from_file(file).add_bos
    result = LitertlmTarget().write(Request(source, tmp_path / "out.litertlm", n_ctx=320), no_progress)
    assert result.check is not None and "greedy tokens equal the source in LiteRT-LM" in result.check


def test_a_checked_file_is_as_planned(request_of_tiny: Request) -> None:
    target = LitertlmTarget()
    plan = target.plan(request_of_tiny)
    result = target.write(request_of_tiny, no_progress)
    assert result.check is not None and "greedy tokens equal the source in LiteRT-LM" in result.check
    (path,) = result.files
    assert path == request_of_tiny.out and plan.files[path] > path.stat().st_size > 0.1 * plan.files[path]
    written = {tensor.name: tensor.written for tensor in plan.tensors}
    assert written["blk.0.attn_q.weight"] == GGMLType.I8 and written["blk.0.ffn_down.weight"] == GGMLType.Q4_0
    assert any("rounded again" in note for note in plan.notes)
    assert sorted(path.parent.iterdir()) == [request_of_tiny.source, path]
    assert result.facts["n_ctx"] == 320 and result.facts["estimated_peak_bytes"] > 0


def test_the_same_input_gives_the_same_bytes(request_of_tiny: Request) -> None:
    request = replace(request_of_tiny, check=False)
    found = []
    for _ in range(2):
        LitertlmTarget().write(request, no_progress)
        found.append(request.out.read_bytes())
    assert found[0] == found[1] and found[0].startswith(b"LITERTLM")


def test_a_failure_leaves_the_old_file(request_of_tiny: Request) -> None:
    request_of_tiny.out.write_bytes(b"old")

    def fail(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LitertlmTarget().write(replace(request_of_tiny, check=False), fail)
    assert request_of_tiny.out.read_bytes() == b"old"
    assert sorted(request_of_tiny.out.parent.iterdir()) == [request_of_tiny.source, request_of_tiny.out]


def test_another_text_than_the_source_is_no_export(request_of_tiny: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_run(file: ModelFile, n_tokens: int) -> GreedyRun:
        run = real(file, n_tokens)
        run.logits[:, run.tokens[0]] = -1e9
        return replace(run, tokens=[int(row.argmax()) for row in run.logits[: len(run.tokens)]])

    real = module.run_greedily
    monkeypatch.setattr(module, "run_greedily", other_run)
    with pytest.raises(ModelFileError, match="another text than its source"):
        LitertlmTarget().write(request_of_tiny, no_progress)
    assert not request_of_tiny.out.exists()


def test_another_type_is_made_first_and_leaves_nothing(request_of_tiny: Request) -> None:
    request = replace(request_of_tiny, type="Q4_0")
    plan = FromGguf(LitertlmTarget()).plan(request)
    written = {tensor.name: tensor.written for tensor in plan.tensors}
    assert written["blk.0.attn_q.weight"] == GGMLType.Q4_0 and plan.disk_bytes > 2 * request.source.stat().st_size / 8
    shares: list[float] = []
    result = FromGguf(LitertlmTarget()).write(request, shares.append)
    assert result.check is not None and shares == sorted(shares) and shares[-1] == 1.0
    assert sorted(request.out.parent.iterdir()) == [request.source, request.out]


def test_drafts_are_refused(request_of_tiny: Request) -> None:
    with pytest.raises(UnsupportedModel, match="runs one model alone"):
        LitertlmTarget().plan(replace(request_of_tiny, draft="ngram"))


def test_the_default_model_gives_its_text_in_the_runtime(tmp_path: Path) -> None:
    if not is_there("demo"):
        missing("demo", "the default model is not installed")
    from edgeinfer.loading.open import default_model

    source = default_model()
    assert source is not None
    request = Request(Path(source), tmp_path / "out.litertlm", n_ctx=256)
    result = LitertlmTarget().write(request, no_progress)
    assert result.check is not None and result.check.startswith("32 of 32 greedy tokens equal")
