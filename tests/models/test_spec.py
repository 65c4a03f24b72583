"""What a model file says, and what of it is refused."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tiny_experts import EXPERT_ARCHITECTURES
from tiny_hybrids import HYBRID_ARCHITECTURES
from tiny_models import ARCHITECTURES, Architecture, write_tiny_model

from edgeinfer.backends.native import _core
from edgeinfer.backends.native.config import decoder_config
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.settings import CacheType
from edgeinfer.models import (
    Attention,
    Dense,
    Experts,
    Layer,
    LongRope,
    ModelSpec,
    QueryTemperature,
    RopeSpec,
    TensorRows,
    check_blocks,
    query_factors,
    read_spec,
    supported_architectures,
)
from edgeinfer.models.arrays import Numbers
from edgeinfer.models.gguf import ModelFile


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
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    assert (spec.architecture, spec.n_vocab, spec.n_ctx_train, spec.n_layers) == ("llama", 291, 512, 2)
    assert (spec.n_embd, ffn.n_ff, mixer.n_heads, mixer.n_kv_heads, mixer.head_dim) == (64, 192, 4, 2, 16)
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
    assert read_spec(tiny_llama).layers[1].mixer.output_bias is None
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32", output_biases=True)
    with ModelFile.open(path) as model:
        assert read_spec(model).layers[1].mixer.output_bias == "blk.1.attn_output.bias"


# ---- rope ------------------------------------------------------------------------------------------------------


def rope_of(model: ModelFile, **scaling: Any) -> tuple[list[float], float]:
    keys = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    rope = read_spec(changed(model, keys)).layers[0].mixer.rope
    assert rope is not None
    return list(rope.inverse_frequencies), rope.magnitude


PLAIN = [10000 ** (-2 * i / 16) for i in range(8)]


def test_frequencies_fall_with_the_power_of_the_base(tiny_llama: ModelFile) -> None:
    frequencies, magnitude = rope_of(tiny_llama)
    assert frequencies == pytest.approx(PLAIN, rel=1e-14) and magnitude == 1.0
    rope = read_spec(tiny_llama).layers[1].mixer.rope
    assert rope is not None and rope.kind == "interleaved"


def test_linear_scaling_divides_every_frequency(tiny_llama: ModelFile) -> None:
    assert rope_of(tiny_llama, type="linear", factor=4.0)[0] == pytest.approx([f / 4 for f in PLAIN])


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(tiny_llama: ModelFile) -> None:
    # Pair i turns 1024 PLAIN[i] / 2 pi times in the old context, which is 32 at i = 1.4 and 1 at i = 4.4: the ramp
    # goes from floor(1.4) to ceil(4.4), and pairs 2, 3 and 4 stand on a quarter, a half and three quarters of it.
    frequencies, magnitude = rope_of(tiny_llama, type="yarn", factor=4.0, original_context_length=1024)
    stretched = [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert frequencies == pytest.approx([f / 4 * s + f * (1 - s) for f, s in zip(PLAIN, stretched, strict=True)])
    assert magnitude == pytest.approx(1 + 0.1 * math.log(4))


def test_a_ramp_of_yarn_may_begin_and_end_between_pairs(tiny_llama: ModelFile) -> None:
    given = {"type": "yarn", "factor": 4.0, "original_context_length": 1024, "yarn_truncate": False}
    first, last = (16 * math.log(1024 / (n * 2 * math.pi)) / (2 * math.log(10000)) for n in (32, 1))
    stretched = [min(max((i - first) / (last - first), 0), 1) for i in range(8)]
    expected = [f / 4 * s + f * (1 - s) for f, s in zip(PLAIN, stretched, strict=True)]
    assert rope_of(tiny_llama, **given)[0] == pytest.approx(expected, rel=1e-12)
    assert rope_of(tiny_llama, **{**given, "yarn_truncate": True}) != rope_of(tiny_llama, **given)


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
    known = sorted({*ARCHITECTURES, *EXPERT_ARCHITECTURES, *HYBRID_ARCHITECTURES, "gemma4"})
    assert supported_architectures() == known
    for name in ["mamba", "spec", "reader", "rope", "", None, 7]:
        message = refusal(changed(tiny_llama, {"general.architecture": name}))
        assert repr(name) in message and f"supported: {', '.join(known)}" in message


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
        ("context_length", 1 << 32),
        ("context_length", 1 << 63),
        ("context_length", (1 << 64) - 1),
        ("block_count", (1 << 64) - 1),
        ("embedding_length", 1 << 62),
        ("attention.head_count", (1 << 32) - 1),
        ("attention.key_length", 1 << 31),
        ("feed_forward_length", -1),
        ("feed_forward_length", [192, 200]),
        ("feed_forward_length", [192, 192, 192]),
        ("feed_forward_length", [192.0, 192.0]),
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
        ("rope.scaling.type", ["linear"]),
        ("rope.scaling.factor", 0.0),
        ("rope.scaling.factor", "4"),
        ("rope.scaling.attn_factor", -1.0),
        ("rope.scaling.yarn_beta_fast", 16.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.yarn_attn_factor", 1.2),
        ("attention.key_length_swa", 32),
        ("attention.value_length_swa", 8),
        ("rope.dimension_count_swa", 8),
        ("nextn_predict_layers", 1),
        ("expert_count", -1),
        ("expert_count", 1 << 20),
        ("expert_count", "8"),
    ],
)
def test_a_hyper_parameter_out_of_its_range_is_refused_by_its_key(
    tiny_llama: ModelFile, key: str, value: object
) -> None:
    message = refusal(changed(tiny_llama, {f"llama.{key}": value}))
    assert f"llama.{key} " in message and str(tiny_llama.path) in message


@pytest.mark.parametrize("key", ["feed_forward_length", "attention.head_count", "attention.head_count_kv"])
def test_a_size_may_be_there_for_each_layer_if_it_is_the_same(tiny_llama: ModelFile, key: str) -> None:
    value = tiny_llama.metadata[f"llama.{key}"]
    n_layers = tiny_llama.metadata["llama.block_count"]
    assert isinstance(value, int) and isinstance(n_layers, int)
    for values in ([value] * n_layers, Numbers(np.full(n_layers, value, np.uint32))):
        assert read_spec(changed(tiny_llama, {f"llama.{key}": values})) == read_spec(tiny_llama)


def test_a_context_of_all_that_32_bits_hold_is_read(tiny_llama: ModelFile) -> None:
    spec = read_spec(changed(tiny_llama, {"llama.context_length": (1 << 32) - 1}))
    assert spec.n_ctx_train == (1 << 32) - 1


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


# ---- the other architectures -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModelFile]]:
    """A model of every architecture, with heads of 16 in 64 numbers."""
    folder = tmp_path_factory.mktemp("every")
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                ModelFile.open(write_tiny_model(folder / f"{name}.gguf", name, "F32", n_embd=64, n_kv_heads=1))
            )
            for name in ARCHITECTURES
        }


def spec_of(tiny: dict[str, ModelFile], architecture: Architecture, **values: Any) -> ModelSpec:
    """With other keys; a double underscore is a point."""
    return read_spec(changed(tiny[architecture], whole_keys(architecture, values)))


def whole_keys(architecture: Architecture, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}


def windows_of(spec: ModelSpec) -> list[int | None]:
    return [layer.mixer.window for layer in spec.layers]


def bases_of(spec: ModelSpec) -> list[float | None]:
    """Base of the frequencies of each layer, of which the second is base ** (-1/8)."""
    ropes = [layer.mixer.rope for layer in spec.layers]
    return [None if rope is None else round(rope.inverse_frequencies[1] ** -8, 6) for rope in ropes]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_every_architecture_has_a_shape_in_the_spec(
    tiny: dict[str, ModelFile], architecture: Architecture
) -> None:
    shapes = {name: info.shape for name, info in tiny[architecture].tensors.items()}
    assert read_spec(tiny[architecture]).tensor_shapes() == shapes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_refuses_a_tensor_that_nobody_would_read(
    tiny: dict[str, ModelFile], architecture: Architecture
) -> None:
    for name in ["blk.0.ffn_gate_inp.weight", "blk.1.attn_v.scale", "output.bias"]:
        message = refusal(changed(tiny[architecture], tensors={name: SimpleNamespace(shape=(64,))}))
        assert name in message and f"1 tensors are not part of a {architecture} model" in message


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_every_architecture_is_needed(tiny: dict[str, ModelFile], architecture: Architecture) -> None:
    for name in tiny[architecture].tensors:
        if name != "output.weight" or architecture == "olmo2":
            message = refusal(changed(tiny[architecture], tensors={name: None}))
            assert name.replace("attn_qkv", "attn_q") in message  # which may take the place of the fused one


def test_llama_and_qwen2_have_the_plain_recipe(tiny: dict[str, ModelFile]) -> None:
    for architecture in ("llama", "qwen2", "mistral3"):
        spec = read_spec(tiny[architecture])
        mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
        assert spec.layers[1].mixer.rope == mixer.rope and mixer.window is None
        assert (ffn.activation, mixer.qk_norm, mixer.scale) == ("silu", None, 0.25)
        assert (spec.embedding_scale, spec.residual_scale, spec.logit_scale) == (1.0, 1.0, 1.0)
        assert (mixer.soft_cap, spec.logit_soft_cap, mixer.query_temperature) == (None, None, None)


def test_norms_of_queries_and_keys_are_over_a_head_or_over_all(tiny: dict[str, ModelFile]) -> None:
    for architecture, kind, shapes in [("qwen3", "per_head", (16, 16)), ("olmo2", "whole", (64, 16))]:
        spec = read_spec(tiny[architecture])
        assert spec.layers[0].mixer.qk_norm == kind and spec.layers[0].mixer.q_norm == "blk.0.attn_q_norm.weight"
        for name, n in zip(["blk.1.attn_q_norm.weight", "blk.1.attn_k_norm.weight"], shapes, strict=True):
            assert spec.tensor_shapes()[name] == (n,)


def test_olmo2_has_norms_after_and_none_before(tiny: dict[str, ModelFile]) -> None:
    layer = read_spec(tiny["olmo2"]).layers[1]
    assert (layer.mixer.norm, layer.ffn.norm) == (None, None)
    assert layer.mixer.post_norm == "blk.1.post_attention_norm.weight"
    assert layer.ffn.post_norm == "blk.1.post_ffw_norm.weight"


def test_bitnet_has_norms_inside_and_silu_or_the_square_of_relu(tiny: dict[str, ModelFile]) -> None:
    for architecture, activation in [("bitnet", "silu"), ("bitnet-25", "relu2"), ("bitnet-b1.58", "relu2")]:
        spec = read_spec(tiny[architecture])
        assert (spec.architecture, spec.layers[0].ffn.activation) == (architecture, activation)
        assert (spec.layers[1].mixer.sub_norm, spec.layers[1].ffn.sub_norm) == (
            "blk.1.attn_sub_norm.weight",
            "blk.1.ffn_sub_norm.weight",
        )
        assert spec.layers[0].mixer.rope is not None and spec.layers[0].mixer.rope.kind == "halves"


def test_smollm3_does_not_turn_every_fourth_layer(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "smollm3", "F32", n_layers=9)) as model:
        spec = read_spec(model)
    assert [layer for layer, part in enumerate(spec.layers) if part.mixer.rope is None] == [3, 7]


def test_exaone4_has_norms_after_and_windows_where_it_turns_if_it_has_64_layers(
    tiny: dict[str, ModelFile], tmp_path: Path
) -> None:
    small = read_spec(tiny["exaone4"])
    mixer = small.layers[1].mixer
    assert (mixer.norm, small.layers[1].ffn.norm, mixer.qk_norm) == (None, None, "per_head")
    assert mixer.post_norm == "blk.1.post_attention_norm.weight" and mixer.rope == small.layers[0].mixer.rope
    assert windows_of(small) == [None, None] and mixer.rope is not None and mixer.rope.kind == "halves"
    path = write_tiny_model(tmp_path / "m.gguf", "exaone4", "F32", n_layers=64, n_embd=64)
    with ModelFile.open(path) as large:
        assert windows_of(read_spec(large)) == [4096, 4096, 4096, None] * 16
        assert bases_of(read_spec(large)) == [10000, 10000, 10000, None] * 16
        pattern = {"exaone4.attention.sliding_window_pattern": [True, True, True, False] * 16}
        assert read_spec(changed(large, pattern)) == read_spec(large)
        for key, value, words in [
            ("sliding_window_pattern", 3, "must be three of four layers"),
            ("sliding_window_pattern", [True, False] * 32, "must be three of four layers"),
            ("sliding_window", 0, "must be set with 64 layers only: found 0"),
        ]:
            assert words in refusal(changed(large, {f"exaone4.attention.{key}": value}))


def test_glm4_has_norms_on_both_sides_and_turns_a_part_of_each_head(tiny: dict[str, ModelFile]) -> None:
    spec = spec_of(tiny, "glm4", rope__dimension_count=8)
    layer, rope = spec.layers[1], spec.layers[1].mixer.rope
    assert rope is not None and (rope.kind, rope.n_dims) == ("interleaved", 8)
    assert (layer.mixer.norm, layer.mixer.post_norm) == ("blk.1.attn_norm.weight", "blk.1.post_attention_norm.weight")
    assert (layer.ffn.norm, layer.ffn.post_norm) == ("blk.1.ffn_norm.weight", "blk.1.post_ffw_norm.weight")
    assert layer.ffn.gate == TensorRows("blk.1.ffn_up.weight", 0, 192)
    assert layer.ffn.up == TensorRows("blk.1.ffn_up.weight", 192, 384)


def test_gemma_scales_embeddings_and_has_gelu(tiny: dict[str, ModelFile]) -> None:
    for architecture in ("gemma2", "gemma3"):
        spec = read_spec(tiny[architecture])
        layer = spec.layers[1]
        assert (spec.embedding_scale, layer.ffn.activation, layer.mixer.scale) == (8.0, "gelu_tanh", 0.25)


def test_gemma2_has_windows_in_every_second_layer_and_caps(tiny: dict[str, ModelFile]) -> None:
    spec = spec_of(tiny, "gemma2")
    assert (windows_of(spec), spec.layers[0].mixer.soft_cap, spec.logit_soft_cap) == ([20, None], 2.0, 10.0)
    bare = {"attention__sliding_window": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = spec_of(tiny, "gemma2", **bare)
    assert (windows_of(spec), spec.layers[0].mixer.soft_cap, spec.logit_soft_cap) == ([4096, None], 50.0, 30.0)
    assert spec.tied_embeddings and bases_of(spec) == [10000, 10000]
    assert bases_of(spec_of(tiny, "gemma2", rope__freq_base_swa=500.0)) == [500, 10000]


def test_gemma3_turns_layers_with_windows_by_a_base_of_their_own(tiny: dict[str, ModelFile]) -> None:
    spec = spec_of(tiny, "gemma3", rope__freq_base=1e6)
    assert windows_of(spec) == [20] * 5 + [None]
    assert bases_of(spec) == [300] * 5 + [1e6]
    assert bases_of(spec_of(tiny, "gemma3", rope__freq_base=1e6, rope__freq_base_swa=None)) == [1e4] * 5 + [1e6]
    for absent in (None, 0):
        spec = spec_of(tiny, "gemma3", attention__sliding_window=absent)
        assert (windows_of(spec), bases_of(spec)) == ([None] * 6, [10000] * 6)
    assert spec.logit_soft_cap is None
    assert spec_of(tiny, "gemma3", final_logit_softcapping=30.0).logit_soft_cap == 30.0


def test_linear_scaling_stretches_the_layers_of_gemma3_that_see_everything(tiny: dict[str, ModelFile]) -> None:
    spec = spec_of(tiny, "gemma3", rope__scaling__factor=8.0)
    plain = spec_of(tiny, "gemma3")
    assert spec.layers[0] == plain.layers[0]
    ropes = [each.layers[5].mixer.rope for each in (spec, plain)]
    assert ropes[0] and ropes[1]
    assert ropes[0].inverse_frequencies == tuple(f / 8 for f in ropes[1].inverse_frequencies)


@pytest.mark.parametrize(
    "pattern, windows",
    [
        (1, [None] * 6),
        (0, [20] * 6),
        (3, [20, 20, None] * 2),
        (7, [20] * 6),
        ([True, False, False, True, True, False], [20, None, None, 20, 20, None]),
        ([0, 0, 0, 0, 0, 1], [None] * 5 + [20]),
    ],
)
def test_the_pattern_of_windows_is_a_period_or_a_list(
    tiny: dict[str, ModelFile], pattern: object, windows: list[int | None]
) -> None:
    spec = spec_of(tiny, "gemma3", attention__sliding_window_pattern=pattern)
    assert windows_of(spec) == windows
    assert bases_of(spec) == [300 if window else 10000 for window in windows]


def test_the_windows_of_olmo_3_are_not_scaled_with_the_rest(tmp_path: Path) -> None:
    yarn: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_attn_factor": 1.13863}
    metadata = {"olmo2.attention.sliding_window": 20}
    path = write_tiny_model(
        tmp_path / "m.gguf", "olmo2", "F32", n_layers=5, rope_scaling=yarn, metadata=metadata, n_embd=64
    )
    with ModelFile.open(path) as model:
        spec = read_spec(model)
    assert windows_of(spec) == [20, 20, 20, None, 20]
    assert bases_of(spec)[0] == 10000 and bases_of(spec)[3] != 10000
    magnitudes = [layer.mixer.rope.magnitude for layer in spec.layers if layer.mixer.rope]
    assert magnitudes == pytest.approx([1, 1, 1, 1.138629, 1], rel=1e-6)


def test_granite_has_four_scales_of_which_logits_are_divided(tiny: dict[str, ModelFile]) -> None:
    spec = spec_of(tiny, "granite", logit_scale=8.0)
    assert spec.logit_scale == 0.125
    assert [spec.embedding_scale, spec.residual_scale, spec.layers[1].mixer.scale] == pytest.approx([1.5, 0.7, 0.3])
    for absent in (None, 0.0):
        values = {"embedding_scale": absent, "residual_scale": absent, "attention__scale": absent}
        spec = spec_of(tiny, "granite", **values)
        assert (spec.embedding_scale, spec.residual_scale, spec.layers[1].mixer.scale) == (1.0, 1.0, 0.25)


def test_granite_that_is_not_finetuned_for_it_has_no_rotation(tiny: dict[str, ModelFile]) -> None:
    for value in (None, True):
        assert spec_of(tiny, "granite", rope__scaling__finetuned=value) == read_spec(tiny["granite"])
    ropes = [layer.mixer.rope for layer in spec_of(tiny, "granite", rope__scaling__finetuned=False).layers]
    assert ropes == [None, None]


def test_phi3_names_rows_of_its_fused_tensors(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "phi3", "F32", n_embd=64, n_kv_heads=1, n_ff=160, qkv_biases=True)
    with ModelFile.open(path) as model:
        spec = read_spec(model)
    layer, shapes = spec.layers[1], spec.tensor_shapes()
    assert layer.mixer.q == TensorRows("blk.1.attn_qkv.weight", 0, 64)
    assert layer.mixer.k == TensorRows("blk.1.attn_qkv.weight", 64, 80)
    assert layer.mixer.v == TensorRows("blk.1.attn_qkv.weight", 80, 96)
    assert layer.mixer.v_bias == TensorRows("blk.1.attn_qkv.bias", 80, 96)
    assert layer.ffn.gate == TensorRows("blk.1.ffn_up.weight", 0, 160)
    assert layer.ffn.up == TensorRows("blk.1.ffn_up.weight", 160, 320)
    assert (shapes["blk.1.attn_qkv.weight"], shapes["blk.1.attn_qkv.bias"]) == ((96, 64), (96,))
    assert shapes["blk.1.ffn_up.weight"] == (320, 64)


def test_phi3_may_have_queries_keys_and_values_apart(tiny: dict[str, ModelFile]) -> None:
    tensors: dict[str, Any] = {f"blk.{layer}.attn_qkv.weight": None for layer in range(2)}
    for layer in range(2):
        for role, n in [("q", 64), ("k", 16), ("v", 16)]:
            tensors[f"blk.{layer}.attn_{role}.weight"] = SimpleNamespace(shape=(n, 64))
    assert read_spec(changed(tiny["phi3"], tensors=tensors)).layers[1].mixer.k == "blk.1.attn_k.weight"


def test_phi3_has_long_factors_after_its_first_context(tmp_path: Path) -> None:
    path = write_tiny_model(
        tmp_path / "m.gguf", "phi3", "F32", n_embd=64, rope_freqs=True, rope_scaling={"original_context_length": 100}
    )
    with ModelFile.open(path) as model:
        rope = read_spec(model).layers[1].mixer.rope
        factors = {kind: model.data(f"rope_factors_{kind}.weight").view("<f4").tolist() for kind in ("long", "short")}
    assert rope is not None and rope.long is not None and rope.long.n_ctx == 100
    short, long = rope.of_context(100), rope.of_context(101)
    assert short.long is None and long.long is None
    assert short.inverse_frequencies == pytest.approx([f / by for f, by in zip(PLAIN, factors["short"], strict=True)])
    assert long.inverse_frequencies == pytest.approx([f / by for f, by in zip(PLAIN, factors["long"], strict=True)])


def test_the_window_of_phi3_is_not_applied(tiny: dict[str, ModelFile]) -> None:
    assert spec_of(tiny, "phi3", attention__sliding_window=2047) == read_spec(tiny["phi3"])


def test_a_rotation_without_long_factors_is_the_same_in_every_context() -> None:
    rope = RopeSpec("halves", 2, (0.5,), 1.5)
    assert rope.of_context(1 << 20) == rope
    long = RopeSpec("halves", 2, (0.5,), 1.5, LongRope(8, (0.25,)))
    assert long.of_context(9) == RopeSpec("halves", 2, (0.25,), 1.5)


def test_mistral3_has_a_temperature_where_the_file_has_one(tiny: dict[str, ModelFile]) -> None:
    values = {"attention__temperature_scale": 0.1, "rope__scaling__original_context_length": 64}
    assert spec_of(tiny, "mistral3", **values).layers[0].mixer.query_temperature == QueryTemperature(0.1, 64)
    values = {"attention__temperature_scale": 0.1}
    assert spec_of(tiny, "mistral3", **values).layers[0].mixer.query_temperature == QueryTemperature(0.1, 512)
    assert spec_of(tiny, "mistral3", attention__temperature_scale=0.0).layers[0].mixer.query_temperature is None


def test_query_factors_come_for_each_run_of_positions() -> None:
    temperature = QueryTemperature(0.1, 16)
    expected = [1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)]
    assert query_factors(temperature, 48) == pytest.approx(expected, rel=1e-15)
    assert query_factors(temperature, 33) == query_factors(temperature, 48)
    assert query_factors(temperature, 16) == [1.0]


def test_the_log_multiplier_of_yarn_divides_the_magnitude(tiny: dict[str, ModelFile]) -> None:
    def magnitude(**values: Any) -> float:
        scaling = {"rope__scaling__type": "yarn", **{f"rope__scaling__{key}": each for key, each in values.items()}}
        rope = spec_of(tiny, "mistral3", **scaling).layers[0].mixer.rope
        assert rope is not None
        return rope.magnitude

    grown = 1 + 0.1 * math.log(16)
    assert magnitude(factor=16.0) == pytest.approx(grown)
    assert magnitude(factor=16.0, yarn_log_multiplier=1.0) == 1.0
    assert magnitude(factor=16.0, yarn_log_multiplier=0.5) == pytest.approx(grown / (1 + 0.05 * math.log(16)))
    assert magnitude(factor=0.5, yarn_log_multiplier=0.5) == 1.0


@pytest.mark.parametrize(
    "architecture, key, value",
    [
        ("gemma2", "attention.sliding_window", 0),
        ("gemma2", "attention.sliding_window", True),
        ("gemma2", "attention.sliding_window_pattern", [True]),
        ("gemma2", "attention.sliding_window_pattern", [True, 2]),
        ("gemma2", "attention.sliding_window_pattern", [1.0, 0.0]),
        ("gemma2", "attention.sliding_window_pattern", -1),
        ("gemma2", "attention.sliding_window_pattern", "LG"),
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma2", "final_logit_softcapping", -30.0),
        ("gemma2", "rope.scaling.type", "none"),
        ("gemma2", "rope.scaling.type", "yarn"),
        ("gemma2", "rope.scaling.attn_factor", 1.5),
        ("gemma2", "attention.key_length_swa", 32),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "final_logit_softcapping", -1.0),
        ("gemma3", "rope.scaling.type", "yarn"),
        ("gemma3", "rope.freq_base_swa", 0.0),
        ("gemma3", "rope.dimension_count_swa", 8),
        ("olmo2", "rope.freq_base_swa", 500.0),
        ("granite", "logit_scale", None),
        ("granite", "logit_scale", 0.0),
        ("granite", "attention.scale", -0.1),
        ("granite", "embedding_scale", "12"),
        ("granite", "rope.scaling.finetuned", 1),
        ("granite", "rope.scaling.type", "longrope"),
        ("granite", "deepstack_mapping", [-1, 1]),
        ("mistral3", "attention.temperature_scale", -0.1),
        ("mistral3", "rope.scaling.yarn_beta_fast", 16.0),
        ("phi3", "rope.scaling.type", "su"),
        ("qwen3", "expert_count", 128),
        ("qwen3", "rope.scaling.yarn_log_multiplier", 1.0),
        ("smollm3", "attention.causal", False),
        ("exaone4", "attention.sliding_window", 20),
        ("exaone4", "rope.dimension_count", 8),
        ("exaone4", "rope.freq_base_swa", 500.0),
        ("exaone4", "nextn_predict_layers", 1),
        ("glm4", "rope.dimension_sections", [8, 4, 4, 0]),
        ("glm4", "nextn_predict_layers", 1),
    ],
)
def test_what_an_architecture_cannot_follow_is_refused_by_its_key(
    tiny: dict[str, ModelFile], architecture: Architecture, key: str, value: object
) -> None:
    message = refusal(changed(tiny[architecture], {f"{architecture}.{key}": value}))
    assert f"{architecture}.{key} " in message


@pytest.mark.parametrize(
    "architecture, name, shape",
    [
        ("gemma2", "output.weight", (291, 64)),
        ("qwen3", "rope_freqs.weight", (8,)),
        ("phi3", "rope_freqs.weight", (8,)),
        ("phi3", "blk.0.ffn_gate.weight", (192, 64)),
        ("phi3", "blk.0.attn_q.weight", (64, 64)),
        ("olmo2", "blk.0.attn_norm.weight", (64,)),
        ("qwen3", "blk.0.attn_output.bias", (64,)),
        ("granite", "blk.0.ffn_up.bias", (192,)),
        ("gemma3", "dense_2.weight", (64, 64)),
        ("exaone4", "blk.0.attn_norm.weight", (64,)),
        ("exaone4", "blk.0.attn_output.bias", (64,)),
        ("glm4", "rope_freqs.weight", (8,)),
        ("glm4", "blk.0.ffn_gate.weight", (192, 64)),
        ("glm4", "blk.0.attn_q_norm.weight", (16,)),
    ],
)
def test_a_tensor_outside_the_recipe_is_refused(
    tiny: dict[str, ModelFile], architecture: Architecture, name: str, shape: tuple[int, ...]
) -> None:
    message = refusal(changed(tiny[architecture], tensors={name: SimpleNamespace(shape=shape)}))
    assert name in message and "not part of" in message


@pytest.mark.parametrize(
    "architecture, name, shape",
    [
        ("phi3", "blk.1.attn_qkv.weight", (95, 64)),
        ("phi3", "blk.0.ffn_up.weight", (192, 64)),
        ("qwen3", "blk.0.attn_q_norm.weight", (64,)),
        ("olmo2", "blk.0.attn_q_norm.weight", (16,)),
        ("gemma2", "blk.0.post_ffw_norm.weight", (65,)),
    ],
)
def test_a_misshapen_tensor_of_a_recipe_is_refused(
    tiny: dict[str, ModelFile], architecture: Architecture, name: str, shape: tuple[int, ...]
) -> None:
    message = refusal(changed(tiny[architecture], tensors={name: SimpleNamespace(shape=shape)}))
    assert f"{name} must have shape" in message and f"found {shape}" in message


def test_the_spec_of_the_default_model(default_model: Path) -> None:
    with ModelFile.open(default_model) as model:
        spec: ModelSpec = read_spec(model)
    mixer = spec.layers[0].mixer
    assert (spec.n_layers, spec.n_embd, mixer.n_heads, mixer.n_kv_heads, mixer.head_dim) == (30, 576, 9, 3, 64)
    rope = spec.layers[0].mixer.rope
    assert rope is not None
    assert spec.tied_embeddings and rope.inverse_frequencies[1] == pytest.approx(1e5 ** (-1 / 32))


# ---- blocks ----------------------------------------------------------------------------------------------------


def test_every_weight_is_named_once_by_its_block_and_role(tiny: dict[str, ModelFile]) -> None:
    weights = list(read_spec(tiny["gemma3"]).weights())
    names = [(weight.block, weight.role) for weight in weights]
    assert len(set(names)) == len(names) == 6 * (4 + 4 + 5) + 2
    assert names[0] == ("layers.0.mixer", "norm") and names[-2:] == [("", "output_norm"), ("", "output")]
    assert ("layers.5.ffn", "down") in names and ("layers.5.mixer", "q_bias") not in names
    assert {weight.tensor: weight.shape for weight in weights} | {"token_embd.weight": (291, 64)} == {
        name: info.shape for name, info in tiny["gemma3"].tensors.items()
    }


@dataclass(frozen=True)
class Recurrence:
    """A kind of block that no backend has."""

    n_embd: int = 8


@dataclass(frozen=True)
class AttentionWithGates(Attention):
    """A kind that could be taken for one that is known."""

    head_gate: str | None = None


FIELDS = {Attention: tuple(field.name for field in fields(Attention)), Dense: ("n_embd", "n_ff", "gate", "up", "down")}


def test_a_block_of_an_unknown_kind_is_refused_by_name(tiny_llama: ModelFile) -> None:
    mixer = read_spec(tiny_llama).layers[0].mixer
    gates = AttentionWithGates(**vars(mixer))
    for block, name in [(Recurrence(), "Recurrence"), (gates, "AttentionWithGates")]:
        with pytest.raises(UnsupportedModel, match=rf"layers\.3\.mixer is a block {name}.* it runs Attention, Dense"):
            check_blocks([("layers.3.mixer", block)], FIELDS, "tiny", "m.gguf")


def test_a_field_that_a_backend_does_not_name_is_refused_where_it_asks_for_something(tiny_llama: ModelFile) -> None:
    spec = read_spec(tiny_llama)
    blocks = [(name, block) for name, block in spec.blocks() if isinstance(block, Attention)]
    check_blocks(blocks, FIELDS, "tiny", "m.gguf")
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.ffn has norm, which the tiny backend does not know"):
        check_blocks(spec.blocks(), FIELDS, "tiny", "m.gguf")
    without = tuple(name for name in FIELDS[Attention] if name != "soft_cap")
    check_blocks(blocks, {Attention: without}, "tiny", "m.gguf")
    capped = [("layers.1.mixer", replace(spec.layers[1].mixer, soft_cap=2.0))]
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mixer has soft_cap"):
        check_blocks(capped, {Attention: without}, "tiny", "m.gguf")


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "k6v4"])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_knows_the_bytes_of_its_state(window: int | None, cache_type: CacheType) -> None:
    block = Attention(256, 256, 4, 2, 64, 0.125, "q", "k", "v", "output", window=window)
    spec = ModelSpec("tiny", 20, 512, 1, 256, 1e-5, "t", "n", "t", 20, (Layer(block, Dense(256, 48, "g", "u", "d")),))
    seen = 512 if window is None else window
    assert block.state_bytes(512, cache_type) == seen * 2 * {"f16": 256, "q8_0": 144, "k6v4": 84}[cache_type]
    if window is None:  # the engine adds whole segments, which 512 tokens fill
        held = decoder_config(spec, 512, 16).kv_bytes(_core.KvType[cache_type], 512)
        assert block.state_bytes(512, cache_type) == held


@pytest.mark.parametrize("window, seen, in_prompt", [(None, 50, 5000.0), (20, 20, 1800.0), (80, 50, 4800.0)])
def test_attention_knows_how_many_positions_are_read(window: int | None, seen: int, in_prompt: float) -> None:
    block = Attention(96, 96, 4, 2, 24, 0.2, "q", "k", "v", "output", window=window)
    assert (block.n_seen(50), block.n_seen_in_prompt(100)) == (seen, in_prompt)
    weights = 96 * (2 * 96 + 2 * 48)
    assert (block.multiply_adds(), block.multiply_adds(50)) == (weights, weights + 2 * 96 * seen)


def test_a_token_uses_the_experts_that_were_chosen() -> None:
    block = Experts(96, 64, 8, 2, "r", "g", "u", "d", n_ff_shared=32, shared_gate="a", shared_up="b", shared_down="c")
    assert block.multiply_adds() == 8 * 96 + 2 * 3 * 64 * 96 + 3 * 32 * 96
    assert replace(block, gate_bias="x").multiply_adds() - block.multiply_adds() == 2 * 64
