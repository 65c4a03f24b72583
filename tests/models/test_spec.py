"""What a model file says, and what of it is refused."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tiny_models import write_tiny_model

from edgeinfer.errors import UnsupportedModel
from edgeinfer.gguf import ModelFile
from edgeinfer.models import ModelSpec, read_spec, supported_architectures


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", "F32", n_embd=64, n_heads=4)
    with ModelFile.open(path) as model:
        yield model


def changed(
    model: ModelFile, metadata: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> ModelFile:
    """The model with other metadata or tensors; what is None is taken away."""
    both = [{**old, **(new or {})} for old, new in [(model.metadata, metadata), (model.tensors, tensors)]]
    kept = [{name: value for name, value in every.items() if value is not None} for every in both]
    return cast(ModelFile, SimpleNamespace(path=model.path, metadata=kept[0], tensors=kept[1], data=model.data))


def refusal(model: ModelFile) -> str:
    with pytest.raises(UnsupportedModel) as refused:
        read_spec(model)
    return str(refused.value)


def test_sizes_are_read_from_the_keys_and_the_embedding(tiny_llama: ModelFile) -> None:
    spec = read_spec(tiny_llama)
    assert (spec.architecture, spec.n_vocab, spec.n_ctx_train, spec.n_layers) == ("llama", 291, 512, 2)
    assert (spec.n_embd, spec.n_ff, spec.n_heads, spec.n_kv_heads, spec.head_dim) == (64, 192, 4, 2, 16)
    assert spec.norm_epsilon == np.float32(1e-5) and not spec.tied_embeddings


def test_sizes_with_a_default_may_be_absent(tiny_llama: ModelFile) -> None:
    absent = ["attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"]
    assert read_spec(changed(tiny_llama, {f"llama.{key}": None for key in absent})) == read_spec(tiny_llama)


def test_without_an_output_matrix_the_embeddings_are_tied(tiny_llama: ModelFile) -> None:
    spec = read_spec(changed(tiny_llama, tensors={"output.weight": None}))
    assert spec.tied_embeddings and spec.output == "token_embd.weight"


def test_every_tensor_of_the_file_has_a_shape_in_the_spec(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen2", "F32", n_embd=64, n_heads=4, n_kv_heads=1, head_dim=24)
    with ModelFile.open(path) as model:
        assert read_spec(model).tensor_shapes() == {name: info.shape for name, info in model.tensors.items()}


def test_optional_biases_are_used_where_the_file_has_them(tmp_path: Path, tiny_llama: ModelFile) -> None:
    assert read_spec(tiny_llama).layers[1].attn_output_bias is None
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32", output_biases=True)
    with ModelFile.open(path) as model:
        assert read_spec(model).layers[1].attn_output_bias == "blk.1.attn_output.bias"


# ---- rope ------------------------------------------------------------------------------------------------------


def rope_of(model: ModelFile, **scaling: Any) -> tuple[list[float], float]:
    keys = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    rope = read_spec(changed(model, keys)).attention[0].rope
    assert rope is not None
    return list(rope.inverse_frequencies), rope.magnitude


PLAIN = [10000 ** (-2 * i / 16) for i in range(8)]


def test_frequencies_fall_with_the_power_of_the_base(tiny_llama: ModelFile) -> None:
    frequencies, magnitude = rope_of(tiny_llama)
    assert frequencies == pytest.approx(PLAIN, rel=1e-14) and magnitude == 1.0
    assert read_spec(tiny_llama).rope.kind == "interleaved"


def test_linear_scaling_divides_every_frequency(tiny_llama: ModelFile) -> None:
    assert rope_of(tiny_llama, type="linear", factor=4.0)[0] == pytest.approx([f / 4 for f in PLAIN])


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(tiny_llama: ModelFile) -> None:
    # Pair i turns 1024 PLAIN[i] / 2 pi times in the old context, which is 32 at i = 1.4 and 1 at i = 4.4: the ramp
    # goes from floor(1.4) to ceil(4.4), and pairs 2, 3 and 4 stand on a quarter, a half and three quarters of it.
    frequencies, magnitude = rope_of(tiny_llama, type="yarn", factor=4.0, original_context_length=1024)
    stretched = [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert frequencies == pytest.approx([f / 4 * s + f * (1 - s) for f, s in zip(PLAIN, stretched, strict=True)])
    assert magnitude == pytest.approx(1 + 0.1 * math.log(4))


def test_the_attention_factor_multiplies_the_magnitude(tiny_llama: ModelFile) -> None:
    assert rope_of(tiny_llama, attn_factor=0.5)[1] == 0.5
    assert rope_of(tiny_llama, type="yarn", factor=math.e, attn_factor=0.5)[1] == pytest.approx(0.55)


def test_rope_freqs_divide_the_frequencies(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32", n_embd=64, n_heads=4, rope_freqs=True)
    with ModelFile.open(path) as model:
        factors = model.data("rope_freqs.weight").view("<f4")
        assert rope_of(model)[0] == pytest.approx([f / by for f, by in zip(PLAIN, factors, strict=True)])


# ---- refused ---------------------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_refused_with_the_known_ones(tiny_llama: ModelFile) -> None:
    assert {"llama", "qwen2"} <= set(supported_architectures())
    for name in ["mamba", "spec", "", None, 7]:
        message = refusal(changed(tiny_llama, {"general.architecture": name}))
        assert repr(name) in message and "supported: llama, qwen2" in message


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.ffn_down.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(tiny_llama: ModelFile, name: str) -> None:
    message = refusal(changed(tiny_llama, tensors={name: None}))
    assert name in message and "is missing" in message and str(tiny_llama.path) in message


def test_qwen2_needs_its_biases(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen2", "F32")
    with ModelFile.open(path) as model:
        message = refusal(changed(model, tensors={"blk.0.attn_v.bias": None}))
    assert "blk.0.attn_v.bias (48,) is missing, qwen2 needs it" in message


@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_k.weight", "blk.1.attn_norm.weight"])
def test_a_misshapen_tensor_is_named_with_both_shapes(tiny_llama: ModelFile, name: str) -> None:
    shape = tiny_llama.tensors[name].shape
    message = refusal(changed(tiny_llama, tensors={name: SimpleNamespace(shape=(*shape[:-1], 65))}))
    assert f"{name} must have shape {shape}: found {(*shape[:-1], 65)}" in message


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.2.attn_q.weight", "blk.0.ffn_up.bias"])
def test_a_tensor_that_nobody_would_read_is_refused(tiny_llama: ModelFile, name: str) -> None:
    message = refusal(changed(tiny_llama, tensors={name: SimpleNamespace(shape=(64,))}))
    assert name in message and "1 tensors are not part of a llama model" in message


@pytest.mark.parametrize(
    "values, kind", [([1.0] * 8, "F16"), ([1.0] * 7, "F32"), ([1.0] * 7 + [0.0], "F32"), ([math.nan] * 8, "F32")]
)
def test_rope_freqs_that_are_no_factors_are_refused(tiny_llama: ModelFile, values: list[float], kind: str) -> None:
    info = SimpleNamespace(shape=(len(values),), type=SimpleNamespace(name=kind))
    model = changed(tiny_llama, tensors={"rope_freqs.weight": info})
    cast(Any, model).data = lambda name: np.array(values, dtype="<f4").view(np.uint8)
    assert "rope_freqs.weight must be" in refusal(model)


@pytest.mark.parametrize(
    "key, value",
    [
        ("block_count", None),
        ("block_count", 0),
        ("block_count", 1 << 40),
        ("embedding_length", "64"),
        ("embedding_length", 64.0),
        ("embedding_length", True),
        ("context_length", None),
        ("feed_forward_length", -1),
        ("feed_forward_length", [192, 192]),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 3),
        ("attention.head_count_kv", 8),
        ("attention.key_length", 1),
        ("attention.value_length", 8),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("attention.layer_norm_rms_epsilon", "1e-5"),
        ("attention.causal", False),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 18),
        ("rope.freq_base", 1.0),
        ("rope.freq_base", -10000.0),
        ("rope.freq_base", math.inf),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.type", 3),
        ("rope.scaling.factor", 0.0),
        ("rope.scaling.factor", "4"),
        ("rope.scaling.attn_factor", -1.0),
        ("rope.scaling.yarn_beta_fast", 16.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("expert_count", 8),
    ],
)
def test_a_hyper_parameter_out_of_its_range_is_refused_by_its_key(
    tiny_llama: ModelFile, key: str, value: object
) -> None:
    message = refusal(changed(tiny_llama, {f"llama.{key}": value}))
    assert f"llama.{key} " in message and str(tiny_llama.path) in message


def test_yarn_needs_a_context_of_at_least_one(tiny_llama: ModelFile) -> None:
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 0}
    assert "llama.rope.scaling.original_context_length must be" in refusal(changed(tiny_llama, keys))


def test_values_that_ask_for_nothing_new_are_accepted(tiny_llama: ModelFile) -> None:
    keys = {"expert_count": 0, "attention.causal": True, "rope.scaling.yarn_beta_fast": 32.0}
    assert read_spec(changed(tiny_llama, {f"llama.{key}": value for key, value in keys.items()})) == read_spec(
        tiny_llama
    )


@pytest.mark.parametrize(
    "key", ["general.architecture", "llama.block_count", "llama.rope.freq_base", "llama.rope.scaling.type"]
)
def test_a_huge_value_is_cut_short_in_the_message(tiny_llama: ModelFile, key: str) -> None:
    assert len(refusal(changed(tiny_llama, {key: "x" * 10000}))) < 1000


def test_the_spec_of_the_default_model(default_model: Path) -> None:
    with ModelFile.open(default_model) as model:
        spec: ModelSpec = read_spec(model)
    assert (spec.n_layers, spec.n_embd, spec.n_heads, spec.n_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert spec.tied_embeddings and spec.rope.inverse_frequencies[1] == pytest.approx(1e5 ** (-1 / 32))
