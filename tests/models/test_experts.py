"""What model files say about experts: the block that it becomes, and what is refused by its key or tensor."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_experts import EXPERT_ARCHITECTURES, ExpertArchitecture, write_tiny_experts
from tiny_gemma4 import write_tiny_gemma4
from tiny_models import write_tiny_model

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import Dense, ExpertRows, Experts, ModelSpec, read_nextn, read_spec
from edgeinfer.models.expert_reader import MAY_BE_ROWS
from edgeinfer.models.gguf import ModelFile

QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
OPTIONAL = {  # tensors that a file may lack
    **{name: ("output.weight",) for name in ("qwen3moe", "llama", "granitemoe")},
    "ernie4_5-moe": ("output.weight", "exp_probs_b.bias"),
    "glm4moe": ("output.weight", *QKV_BIASES),
    **{name: QKV_BIASES for name in ("qwen2moe", "gpt-oss")},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModelFile]]:
    folder = tmp_path_factory.mktemp("experts")
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(ModelFile.open(write_tiny_experts(folder / f"{name}.gguf", name, "F32")))
            for name in EXPERT_ARCHITECTURES
        }


def changed(
    model: ModelFile, metadata: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> ModelFile:
    """The model with other metadata or tensors; what is None is taken away."""
    both = [{**old, **(new or {})} for old, new in [(model.metadata, metadata), (model.tensors, tensors)]]
    kept = [{name: value for name, value in every.items() if value is not None} for every in both]
    return cast(ModelFile, SimpleNamespace(path=model.path, metadata=kept[0], tensors=kept[1], data=model.data))


def spec_of(tiny: dict[str, ModelFile], architecture: str, **values: Any) -> ModelSpec:
    """With other keys."""
    return read_spec(changed(tiny[architecture], {f"{architecture}.{key}": value for key, value in values.items()}))


def experts_of(spec: ModelSpec, layer: int = -1) -> Experts:
    ffn = spec.layers[layer].ffn
    assert isinstance(ffn, Experts)
    return ffn


def refusal(model: ModelFile) -> str:
    with pytest.raises(UnsupportedModel) as refused:
        read_spec(model)
    return str(refused.value)


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", EXPERT_ARCHITECTURES)
def test_every_tensor_has_a_shape_in_the_spec(tiny: dict[str, ModelFile], architecture: str) -> None:
    shapes = {name: info.shape for name, info in tiny[architecture].tensors.items()}
    shapes |= {name: shape[-1:] for name, shape in shapes.items() if name.endswith(MAY_BE_ROWS)}
    assert read_spec(tiny[architecture]).tensor_shapes() == shapes


@pytest.mark.parametrize("architecture", EXPERT_ARCHITECTURES)
def test_every_tensor_is_needed(tiny: dict[str, ModelFile], architecture: str) -> None:
    for name in tiny[architecture].tensors:
        without = changed(tiny[architecture], tensors={name: None})
        if name.removeprefix(f"blk.{name[4]}.") in OPTIONAL.get(architecture, ()):
            read_spec(without)
        else:
            assert f"tensor {name} " in refusal(without) and "is missing" in refusal(without)


@pytest.mark.parametrize("architecture", EXPERT_ARCHITECTURES)
def test_a_tensor_that_nobody_would_read_is_refused(tiny: dict[str, ModelFile], architecture: str) -> None:
    for name in ["blk.1.ffn_norm_exps.weight", "blk.1.attn_q.scale", "blk.1.ffn_up_shexp.bias"]:
        message = refusal(changed(tiny[architecture], tensors={name: SimpleNamespace(shape=(64,))}))
        assert name in message and f"1 tensors are not part of a {architecture} model" in message


def test_the_routing_of_each_architecture(tiny: dict[str, ModelFile]) -> None:
    """The table of llama.cpp's build_moe_ffn and of what calls it."""
    specs = {name: read_spec(model) for name, model in tiny.items()}
    found = {}
    for name, spec in specs.items():
        block = experts_of(spec)
        assert (block.n_experts, block.n_used, block.n_ff, block.n_embd) == (8, 3, 64, 96)
        found[name] = (block.router_function, block.is_normalised, block.activation, block.n_ff_shared)
    assert found == {
        "qwen3moe": ("softmax", True, "silu", 0),
        "olmoe": ("softmax", False, "silu", 0),
        "llama": ("softmax", True, "silu", 0),
        "qwen2moe": ("softmax", False, "silu", 128),
        "granitemoe": ("softmax", True, "silu", 64),
        "gpt-oss": ("softmax_of_top_k", False, "clamped_swiglu", 0),
        "ernie4_5-moe": ("softmax", True, "silu", 128),
        "glm4moe": ("sigmoid", True, "silu", 64),
    }
    scales = {name: experts_of(spec).weight_scale for name, spec in specs.items()}
    assert {name for name, scale in scales.items() if scale != 1.0} == {"glm4moe"}
    biased = {name for name, spec in specs.items() if experts_of(spec).selection_bias}
    assert biased == {"ernie4_5-moe", "glm4moe"}
    assert {name for name, spec in specs.items() if experts_of(spec).shared_router} == {"qwen2moe"}
    kinds = {name: spec.layers[0].mixer.rope.kind for name, spec in specs.items() if spec.layers[0].mixer.rope}
    interleaved = {"llama", "granitemoe", "ernie4_5-moe"}
    assert kinds == {name: "interleaved" if name in interleaved else "halves" for name in EXPERT_ARCHITECTURES}


def test_gpt_oss_has_windows_sinks_and_biases_everywhere(tiny: dict[str, ModelFile]) -> None:
    spec = read_spec(tiny["gpt-oss"])
    first, second = spec.layers
    assert (first.mixer.window, second.mixer.window) == (20, None)
    assert (second.mixer.sinks, second.mixer.output_bias) == ("blk.1.attn_sinks.weight", "blk.1.attn_output.bias")
    block = experts_of(spec)
    assert (block.norm, block.router_bias) == ("blk.1.post_attention_norm.weight", "blk.1.ffn_gate_inp.bias")
    assert (block.gate_bias, block.down_bias) == ("blk.1.ffn_gate_exps.bias", "blk.1.ffn_down_exps.bias")
    assert first.mixer.rope is not None and first.mixer.rope.magnitude > 1  # YaRN


def test_leading_layers_and_those_between_are_dense(tiny: dict[str, ModelFile]) -> None:
    for name, norm in [("ernie4_5-moe", "ffn_norm"), ("glm4moe", "post_attention_norm")]:
        first, *others = read_spec(tiny[name]).layers
        assert isinstance(first.ffn, Dense) and all(isinstance(layer.ffn, Experts) for layer in others)
        assert (first.ffn.norm, first.ffn.n_ff) == (f"blk.0.{norm}.weight", 128)


def test_of_every_second_layer_that_has_experts_the_others_are_dense(tiny: dict[str, ModelFile]) -> None:
    model = tiny["ernie4_5-moe"]
    as_first = {name.replace("blk.0", "blk.2"): info for name, info in model.tensors.items() if "blk.0.ffn" in name}
    tensors = dict.fromkeys(name for name in model.tensors if name.startswith(("blk.2.ffn", "blk.2.exp")))
    spec = read_spec(changed(model, {"ernie4_5-moe.interleave_moe_layer_step": 2}, tensors | as_first))
    assert [type(layer.ffn) for layer in spec.layers] == [Dense, Experts, Dense]


def test_a_llama_without_experts_is_dense(tmp_path: Path) -> None:
    metadata = {"llama.expert_count": 0, "llama.expert_used_count": 0}
    with ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "F32", metadata=metadata)) as model:
        assert all(isinstance(layer.ffn, Dense) for layer in read_spec(model).layers)


def test_widths_come_from_the_keys_that_llama_cpp_reads(tiny: dict[str, ModelFile]) -> None:
    for name in ("qwen3moe", "qwen2moe"):  # feed_forward_length over the experts of a token, where the other is absent
        spec = spec_of(tiny, name, expert_feed_forward_length=None, feed_forward_length=194)
        assert experts_of(spec).n_ff == 64
    for name in ("olmoe", "llama", "granitemoe"):
        assert experts_of(spec_of(tiny, name, expert_feed_forward_length=7)).n_ff == 64
    spec = spec_of(tiny, "qwen2moe", expert_shared_feed_forward_length=0)
    assert experts_of(spec).n_ff_shared == 128  # feed_forward_length
    for name in ("gpt-oss", "ernie4_5-moe", "glm4moe"):
        key = f"{name}.expert_feed_forward_length"
        assert f"{key} must be an integer in 1.." in refusal(changed(tiny[name], {key: None}))
    message = refusal(changed(tiny["glm4moe"], {"glm4moe.expert_shared_count": 2}))
    assert "blk.1.ffn_gate_shexp.weight must have shape (128, 96): found (64, 96)" in message


def test_weights_are_scaled_and_normalised_where_the_architecture_reads_these_keys(tiny: dict[str, ModelFile]) -> None:
    block = experts_of(spec_of(tiny, "glm4moe", expert_weights_scale=None, expert_weights_norm=None))
    assert (block.weight_scale, block.is_normalised) == (1.0, False)
    block = experts_of(spec_of(tiny, "glm4moe", expert_weights_scale=2.5, expert_gating_func=1))
    assert (block.weight_scale, block.router_function) == (2.5, "softmax")
    assert experts_of(spec_of(tiny, "glm4moe", expert_weights_scale=0.0)).weight_scale == 1.0
    assert experts_of(spec_of(tiny, "glm4moe", expert_gating_func=None)).router_function == "sigmoid"
    assert experts_of(spec_of(tiny, "glm4moe", expert_gating_func=4)).router_function == "sqrt_softplus"
    for name in ("qwen3moe", "olmoe", "ernie4_5-moe"):
        plain = experts_of(read_spec(tiny[name]))
        assert experts_of(spec_of(tiny, name, expert_weights_scale=2.5, expert_weights_norm=False)) == plain


def test_groups_are_read_for_every_architecture(tiny: dict[str, ModelFile]) -> None:
    for name in EXPERT_ARCHITECTURES:
        block = experts_of(spec_of(tiny, name, expert_group_count=4, expert_group_used_count=2))
        assert (block.n_groups, block.n_used_groups) == (4, 2)
        assert experts_of(spec_of(tiny, name, expert_group_count=1)).n_groups == 1


def test_fused_gate_and_up_are_parts_of_one_tensor_and_scales_are_found(tmp_path: Path) -> None:
    for name in ("qwen3moe", "gpt-oss"):
        with ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", name, "F32", fused=True, scales=True)) as model:
            spec = read_spec(model)
            assert spec.tensor_shapes() == {name: info.shape for name, info in model.tensors.items()}
        block, fused = experts_of(spec, 0), "blk.0.ffn_gate_up_exps"
        assert (block.gate, block.up) == (ExpertRows(f"{fused}.weight", 0, 64), ExpertRows(f"{fused}.weight", 64, 128))
        assert (block.gate_scale, block.up_scale) == (f"{fused}.scale", f"{fused}.scale")
        assert block.down_scale == "blk.0.ffn_down_exps.scale"
        if name == "gpt-oss":
            assert block.up_bias == ExpertRows(f"{fused}.bias", 64, 128)


def test_the_draft_layers_of_glm4moe_are_left_out_and_nothing_else(tiny: dict[str, ModelFile]) -> None:
    model, keys = tiny["glm4moe"], {"glm4moe.nextn_predict_layers": 1, "glm4moe.block_count": 4}
    drafting = {
        **{name.replace("blk.2", "blk.3"): info for name, info in model.tensors.items() if name.startswith("blk.2")},
        "blk.3.nextn.eh_proj.weight": SimpleNamespace(shape=(96, 192)),
    }
    assert read_spec(changed(model, keys, drafting)) == read_spec(model)
    with pytest.raises(UnsupportedModel, match=r"the blocks that draft \(nextn\) of glm4moe are not read"):
        read_nextn(changed(model, keys, drafting))
    for name in ("blk.2.nextn.eh_proj.weight", "blk.4.nextn.eh_proj.weight", "blk.30.attn_norm.weight"):
        message = refusal(changed(model, keys, drafting | {name: SimpleNamespace(shape=(96, 192))}))
        assert f"1 tensors are not part of a glm4moe model that edgeinfer knows, first {name}" in message
    others = changed(tiny["qwen3moe"], {"qwen3moe.nextn_predict_layers": 1})
    assert "qwen3moe.nextn_predict_layers is set" in refusal(others)
    assert "nextn_predict_layers must be an integer in 0..2: found 3" in refusal(
        changed(model, {"glm4moe.nextn_predict_layers": 3})
    )


def test_norms_of_queries_and_keys_are_both_there_or_neither_is(tmp_path: Path, tiny: dict[str, ModelFile]) -> None:
    assert {layer.mixer.qk_norm for layer in read_spec(tiny["glm4moe"]).layers} == {None}
    with ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", "glm4moe", "F32", qk_norms=True)) as model:
        assert {layer.mixer.qk_norm for layer in read_spec(model).layers} == {"per_head"}
        for name in ("blk.1.attn_q_norm.weight", "blk.1.attn_k_norm.weight"):
            assert f"tensor {name} (24,) is missing" in refusal(changed(model, tensors={name: None}))


def test_some_vectors_may_be_matrices_of_one_row(tiny: dict[str, ModelFile]) -> None:
    """As checkpoints have them; ggml does not tell the two apart."""
    assert tiny["ernie4_5-moe"].tensors["blk.1.exp_probs_b.bias"].shape == (1, 8)
    name = "blk.{}.ffn_gate_inp_shexp.weight"
    routers = [tiny["qwen2moe"].tensors[name.format(layer)].shape for layer in (0, 1)]
    assert routers == [(96,), (1, 96)]
    wide = changed(tiny["qwen2moe"], tensors={name.format(1): SimpleNamespace(shape=(2, 96))})
    assert f"tensor {name.format(1)} must have shape (96,): found (2, 96)" in refusal(wide)
    norm = changed(tiny["qwen2moe"], tensors={"blk.1.ffn_norm.weight": SimpleNamespace(shape=(1, 96))})
    assert "tensor blk.1.ffn_norm.weight must have shape (96,): found (1, 96)" in refusal(norm)


def test_every_field_of_the_block_is_read_by_some_architecture(tmp_path: Path, tiny: dict[str, ModelFile]) -> None:
    with ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", "qwen3moe", "F32", scales=True)) as model:
        blocks = [experts_of(read_spec(each)) for each in (*tiny.values(), model)]
    with ModelFile.open(write_tiny_gemma4(tmp_path / "gemma4.gguf", "experts")) as model:
        blocks.append(experts_of(read_spec(model)))
    keys = {"expert_group_count": 4, "expert_group_used_count": 2, "expert_groups_by_best": True}
    groups = experts_of(spec_of(tiny, "olmoe", **keys))
    defaults = {field.name: field.default for field in fields(Experts)}
    used = {name for name in defaults for block in (*blocks, groups) if getattr(block, name) != defaults[name]}
    assert set(defaults) - used == set()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture, values, words",
    [
        ("qwen3moe", {"expert_count": None}, "expert_count must be an integer in 1..4096: found None"),
        ("qwen3moe", {"expert_count": 0}, "expert_count must be an integer in 1..4096: found 0"),
        ("llama", {"expert_count": -1}, "expert_count must be an integer in 1..4096: found -1"),
        ("olmoe", {"expert_used_count": 9}, "expert_used_count must be an integer in 1..8: found 9"),
        ("olmoe", {"expert_used_count": 0}, "expert_used_count must be an integer in 1..8: found 0"),
        ("olmoe", {"expert_used_count": [3, 2]}, "expert_used_count must be an integer in 1..8: found [3, 2]"),
        ("glm4moe", {"expert_gating_func": 5}, "expert_gating_func must be 1 (softmax), 2 (sigmoid), 3"),
        ("qwen3moe", {"expert_gating_func": 2}, "expert_gating_func must be 1 (softmax): found 2"),
        ("gpt-oss", {"expert_gating_func": 1}, "expert_gating_func must be 3 (softmax_of_top_k): found 1"),
        ("glm4moe", {"expert_gating_func": "sigmoid"}, "expert_gating_func must be an integer in 0..65536: found 'si"),
        ("glm4moe", {"expert_weights_norm": 1}, "expert_weights_norm must be true or false: found 1"),
        ("glm4moe", {"expert_weights_scale": -1.0}, "expert_weights_scale must be a number above 0"),
        ("glm4moe", {"expert_group_count": 3}, "must divide the 8 experts into groups of 2 or more: found 3"),
        ("glm4moe", {"expert_group_count": 8}, "must divide the 8 experts into groups of 2 or more: found 8"),
        ("glm4moe", {"expert_group_count": 9}, "expert_group_count must be an integer in 0..8: found 9"),
        ("glm4moe", {"expert_group_count": 4}, "expert_group_used_count must be an integer in 1..4: found None"),
        (
            "glm4moe",
            {"expert_group_count": 4, "expert_group_used_count": 1},
            "expert_group_used_count must be enough to have 3 experts in groups of 2: found 1",
        ),
        ("glm4moe", {"rope.dimension_sections": [4, 4, 4, 0]}, "rope.dimension_sections is set"),
        ("granitemoe", {"rope.scaling.finetuned": False}, "rope.scaling.finetuned must be True, others are not supp"),
        ("ernie4_5-moe", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step must be an integer in 1..4096"),
        ("gpt-oss", {"attention.sliding_window": None}, "attention.sliding_window must be an integer in 1.."),
        ("gpt-oss", {"rope.dimension_count": 12}, "rope.dimension_count must be an integer in 24..24: found 12"),
        ("qwen3moe", {"feed_forward_length": 0, "expert_feed_forward_length": 0}, "feed_forward_length must be"),
    ],
)
def test_a_key_that_does_not_fit_is_refused_by_its_name(
    tiny: dict[str, ModelFile], architecture: ExpertArchitecture, values: dict[str, object], words: str
) -> None:
    keys = {f"{architecture}.{key}": value for key, value in values.items()}
    message = refusal(changed(tiny[architecture], keys))
    assert words in message and f"{architecture}." in message and str(tiny[architecture].path) in message


@pytest.mark.parametrize(
    "architecture, name, expected",
    [
        ("qwen3moe", "blk.1.ffn_gate_inp.weight", (8, 96)),
        ("olmoe", "blk.0.ffn_gate_exps.weight", (8, 64, 96)),
        ("llama", "blk.0.ffn_down_exps.weight", (8, 96, 64)),
        ("gpt-oss", "blk.1.ffn_up_exps.bias", (8, 64)),
        ("gpt-oss", "blk.1.attn_sinks.weight", (4,)),
        ("qwen2moe", "blk.0.ffn_down_shexp.weight", (96, 128)),
        ("glm4moe", "blk.2.exp_probs_b.bias", (8,)),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(
    tiny: dict[str, ModelFile], architecture: str, name: str, expected: tuple[int, ...]
) -> None:
    for shape in [(7, *expected[1:]), (*expected, 1), (*expected[:-1], expected[-1] + 32)]:
        message = refusal(changed(tiny[architecture], tensors={name: SimpleNamespace(shape=shape)}))
        assert f"tensor {name} must have shape {expected}: found {shape}" in message


def test_a_wrong_number_of_experts_is_refused_by_the_first_tensor(tiny: dict[str, ModelFile]) -> None:
    message = refusal(changed(tiny["qwen3moe"], {"qwen3moe.expert_count": 16}))
    assert "tensor blk.0.ffn_gate_inp.weight must have shape (16, 96): found (8, 96)" in message


def test_experts_in_an_architecture_that_has_none_are_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen3", "F32", metadata={"qwen3.expert_count": 8})
    with ModelFile.open(path) as model:
        assert "qwen3.expert_count is set: experts are not supported in this architecture" in refusal(model)
