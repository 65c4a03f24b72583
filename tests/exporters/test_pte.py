"""Packages for ExecuTorch: what its exporter gets, and where it is installed a whole package in its runtime."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from parts import is_there, missing
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.backends.onnx.matrices import part_of
from edgeinfer.common.errors import EdgeInferError, InvalidArgument, UnsupportedModel
from edgeinfer.exporters.from_gguf import FromGguf
from edgeinfer.exporters.pte import PteTarget
from edgeinfer.exporters.pte.checkpoint import params_of, weights_of
from edgeinfer.exporters.request import Request
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile


@pytest.mark.parametrize(
    "architecture, halves, biases, norms",
    [("llama", False, False, False), ("qwen2", True, True, False), ("qwen3", True, False, True)],
)
def test_the_exporter_gets_every_tensor_and_how_the_heads_turn(
    architecture: str, halves: bool, biases: bool, norms: bool, tmp_path: Path
) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "a.gguf", architecture, "Q8_0")) as file:
        spec = read_spec(file)
        params, weights = params_of(file, spec), dict(weights_of(spec))
        assert (params["use_hf_rope"], params["attention_qkv_bias"], params["use_qk_norm"]) == (halves, biases, norms)
        assert params["rope_theta"] == file.metadata[f"{architecture}.rope.freq_base"]
        named = {ref if isinstance(ref, str) else ref.name for ref in weights.values()}
        assert named == set(file.tensors) - {"rope_freqs.weight"}
        for name, shape in {
            "output.weight": (params["vocab_size"], params["dim"]),
            "layers.0.attention.wk.weight": (params["n_kv_heads"] * params["head_dim"], params["dim"]),
            "layers.0.feed_forward.w2.weight": (params["dim"], params["hidden_dim"]),
        }.items():
            assert part_of(file, weights[name]).shape == shape


def test_what_executorch_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    head = write_tiny_head(tmp_path / "h.gguf", source)
    other = write_tiny_model(tmp_path / "b.gguf", "gemma2", "F16")
    cases: list[tuple[Path, str | None, type[EdgeInferError], str]] = [
        (head, None, UnsupportedModel, "is a draft head: ExecuTorch runs whole models only"),
        (source, "ngram", InvalidArgument, "packages for ExecuTorch have no drafts here"),
        (other, None, UnsupportedModel, "gets llama, qwen2, qwen3 from here: found 'gemma2'"),
    ]
    for model, draft, error, words in cases:
        with pytest.raises(error, match=words):
            PteTarget().plan(Request(model, tmp_path / "out", draft=draft))
    plan = PteTarget().plan(Request(source, tmp_path / "out"))
    assert {tensor.written.name for tensor in plan.tensors} == {"F32"}
    plan = FromGguf(PteTarget()).plan(Request(source, tmp_path / "out", type="Q8_0"))
    assert {tensor.written.name for tensor in plan.tensors} == {"Q4_0", "Q8_0"}


@pytest.mark.timeout(1800)  # a minute of a core each
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_package_gives_the_logits_of_its_source(architecture: str, tmp_path: Path) -> None:
    """llama has its rows of queries and keys in pairs, the others in halves; a wrong order gives other tokens."""
    if not is_there("executorch"):
        missing("executorch", "ExecuTorch is not installed: pip install 'edgeinfer[executorch]'")
    source = write_tiny_model(tmp_path / "a.gguf", architecture, "F32")
    result = PteTarget().write(Request(source, tmp_path / "out", n_ctx=128), lambda share: None)
    assert result.facts["kl_divergence"] < 1e-5 and result.facts["n_equal_tokens"] == 32
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in result.files}
    assert "tokenizer_class" in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert np.all([path.stat().st_size for path in result.files])
