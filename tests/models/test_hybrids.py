"""Recurrent layers in model files: what is read, and what is refused."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_hybrids import HYBRID_ARCHITECTURES, HybridArchitecture, write_tiny_hybrid

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import Attention, Dense, Experts, GatedDeltaNet, Recurrence, ShortConv, read_nextn, read_spec
from edgeinfer.models.gguf import ModelFile


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModelFile]]:
    folder = tmp_path_factory.mktemp("hybrids")
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(ModelFile.open(write_tiny_hybrid(folder / f"{name}.gguf", name)))
            for name in HYBRID_ARCHITECTURES
        }


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


def with_keys(tiny: dict[str, ModelFile], architecture: str, **values: Any) -> ModelFile:
    """With other keys; a double underscore is a point."""
    keys = {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}
    return changed(tiny[architecture], keys)


@pytest.mark.parametrize("architecture", HYBRID_ARCHITECTURES)
def test_every_tensor_has_a_shape_in_the_spec(tiny: dict[str, ModelFile], architecture: str) -> None:
    shapes = {name: info.shape for name, info in tiny[architecture].tensors.items()}
    assert read_spec(tiny[architecture]).tensor_shapes() == shapes


@pytest.mark.parametrize("architecture", HYBRID_ARCHITECTURES)
def test_every_tensor_is_needed(tiny: dict[str, ModelFile], architecture: str) -> None:
    for name in tiny[architecture].tensors:
        without = changed(tiny[architecture], tensors={name: None})
        if name == "output.weight":
            assert read_spec(without).tied_embeddings
        else:
            assert f"tensor {name} " in refusal(without) and "is missing" in refusal(without)


@pytest.mark.parametrize("architecture", HYBRID_ARCHITECTURES)
def test_every_misshapen_tensor_is_named_with_both_shapes(tiny: dict[str, ModelFile], architecture: str) -> None:
    for name, info in tiny[architecture].tensors.items():
        if name == "token_embd.weight":
            continue  # whose rows are what there is
        shape = (info.shape[0] + 1, *info.shape[1:])
        message = refusal(changed(tiny[architecture], tensors={name: SimpleNamespace(shape=shape)}))
        assert f"{name} must have shape {info.shape}: found {shape}" in message


@pytest.mark.parametrize("architecture", HYBRID_ARCHITECTURES)
@pytest.mark.parametrize("name", ["blk.0.ssm_conv1d.bias", "blk.0.attn_q.weight", "blk.3.attn_output.bias", "v.patch"])
def test_a_tensor_that_nobody_would_read_is_refused(tiny: dict[str, ModelFile], architecture: str, name: str) -> None:
    message = refusal(changed(tiny[architecture], tensors={name: SimpleNamespace(shape=(64,))}))
    assert name in message and f"1 tensors are not part of a {architecture} model" in message


def test_three_of_four_layers_of_qwen_have_a_recurrence(tiny: dict[str, ModelFile]) -> None:
    spec = read_spec(tiny["qwen35"])
    assert [type(layer.mixer) for layer in spec.layers] == [GatedDeltaNet] * 3 + [Attention]
    assert [layer.mixer.state_kind for layer in spec.layers] == ["recurrent"] * 3 + ["full_kv"]
    assert [layer.ffn.norm for layer in spec.layers if isinstance(layer.ffn, Dense)] == [
        f"blk.{layer}.post_attention_norm.weight" for layer in range(4)
    ]
    attention = spec.layers[3].mixer
    assert isinstance(attention, Attention) and attention.output_gate == "in_q"
    assert attention.shapes()["q"] == (2 * 4 * 32, 96)
    assert attention.rope is not None and (attention.rope.n_dims, attention.rope.kind) == (8, "halves")


def test_value_heads_take_turns_with_key_heads_but_in_qwen3next(tiny: dict[str, ModelFile]) -> None:
    found = {}
    for name in ("qwen35", "qwen35moe", "qwen3next"):
        block = read_spec(tiny[name]).layers[0].mixer
        assert isinstance(block, GatedDeltaNet)
        found[name] = [block.key_head(head) for head in range(6)]
        assert (block.beta is None) == (block.alpha is None) == (block.beta_alpha is not None) == (name == "qwen3next")
    assert found == {"qwen35": [0, 1] * 3, "qwen35moe": [0, 1] * 3, "qwen3next": [0, 0, 0, 1, 1, 1]}


def test_lfm2_convolves_where_heads_have_no_keys(tiny: dict[str, ModelFile]) -> None:
    for name in ("lfm2", "lfm2moe"):
        spec = read_spec(tiny[name])
        assert [type(layer.mixer) for layer in spec.layers] == [ShortConv, ShortConv, Attention, ShortConv]
        assert spec.output_norm == "token_embd_norm.weight" and spec.tied_embeddings
        attention = spec.layers[2].mixer
        assert isinstance(attention, Attention) and attention.output_gate is None and attention.n_kv_heads == 2
    kinds = [type(layer.ffn) for layer in read_spec(tiny["lfm2moe"]).layers]
    assert kinds == [Dense, Experts, Experts, Experts]


def test_the_routing_of_hybrids(tiny: dict[str, ModelFile]) -> None:
    for name, function in (("qwen35moe", "softmax"), ("qwen3next", "softmax"), ("lfm2moe", "sigmoid")):
        experts = read_spec(tiny[name]).layers[3].ffn
        assert isinstance(experts, Experts)
        assert (experts.router_function, experts.is_normalised, experts.n_ff) == (function, True, 32)
        is_lfm2 = name == "lfm2moe"
        assert (experts.selection_bias is not None, experts.shared_router is None) == (is_lfm2, is_lfm2)
        assert experts.n_ff_shared == (0 if is_lfm2 else 64)


def test_a_state_has_one_size_and_a_draft_node_a_smaller_one(tiny: dict[str, ModelFile]) -> None:
    delta = read_spec(tiny["qwen35"]).layers[0].mixer
    assert isinstance(delta, Recurrence)
    n_channels = (2 + 2 + 6) * 32
    for n_ctx in (1, 5000):
        for cache_type in ("f16", "q8_0", "k6v4"):
            assert delta.state_bytes(n_ctx, cache_type) == 4 * (6 * 32 * 32 + 3 * n_channels)
    assert delta.node_bytes == 4 * (2 * 32 + 6 * 32 + 6 + n_channels)
    assert delta.refused_cache("k6v4") is None
    products = (n_channels + 6 * 32 + 2 * 6 + 6 * 32) * 96 + 4 * n_channels
    assert delta.multiply_adds() == delta.multiply_adds(4000) == products + 3 * 6 * 32 * 32
    conv = read_spec(tiny["lfm2"]).layers[0].mixer
    assert isinstance(conv, Recurrence)
    assert (conv.state_bytes(9, "f16"), conv.node_bytes) == (4 * 2 * 96, 4 * 96)
    assert (conv.n_seen(100), conv.n_seen_in_prompt(100)) == (0, 0)


def test_the_state_of_a_released_model_is_as_large_as_it_is_said_to_be() -> None:
    """Qwen3.5-35B-A3B: 30 layers of 16 and 32 heads; figures of its 62.9 MB state and 1.7 MB a node."""
    names = ("conv", "qkv", "gate", "decay", "step_bias", "out_norm", "output")
    tensors: dict[str, Any] = dict.fromkeys(names, "t")
    block = GatedDeltaNet(
        n_embd=2048, n_conv=4, n_key_heads=16, n_value_heads=32, head_dim=128, key_heads="modulo", **tensors
    )
    assert 30 * 4 * block.n_state == 62_914_560
    assert 30 * block.state_bytes(1, "f16") == 65_863_680
    assert 30 * block.node_bytes == 1_724_160


def test_which_layers_recur_is_a_list_or_an_interval(tiny: dict[str, ModelFile]) -> None:
    def kinds(**values: Any) -> list[bool]:
        """Of what can be read without the tensors that other layers would need."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("edgeinfer.models.reader.Reader._check_tensors", lambda *_: None)
            spec = read_spec(with_keys(tiny, "qwen35", **values))
        return [isinstance(layer.mixer, GatedDeltaNet) for layer in spec.layers]

    absent = {"attention__recurrent_layers": None}
    assert kinds() == kinds(**absent) == kinds(**absent, full_attention_interval=4) == [True, True, True, False]
    assert kinds(**absent, full_attention_interval=2) == [True, False, True, False]
    assert kinds(**absent, full_attention_interval=3) == [True, True, False, True]
    assert kinds(**absent, full_attention_interval=1) == [False] * 4
    assert kinds(attention__recurrent_layers=[False, True, True, True]) == [False, True, True, True]


def test_another_interval_than_the_tensors_have_is_refused(tiny: dict[str, ModelFile]) -> None:
    message = refusal(with_keys(tiny, "qwen35", attention__recurrent_layers=None, full_attention_interval=3))
    assert "tensor blk.2.attn_q.weight" in message and "is missing" in message


def test_blocks_that_draft_are_left_out(tiny: dict[str, ModelFile]) -> None:
    model = with_keys(
        tiny, "qwen35", block_count=5, nextn_predict_layers=1, attention__recurrent_layers=[True] * 3 + [False] * 2
    )
    names = ("nextn.eh_proj.weight", "nextn.enorm.weight", "attn_q.weight", "ffn_up.weight")
    tensors = {f"blk.4.{name}": SimpleNamespace(shape=(3, 3)) for name in names}
    assert read_spec(changed(model, tensors=tensors)) == read_spec(tiny["qwen35"])


def test_a_window_of_lfm2_is_in_every_layer_with_attention(tiny: dict[str, ModelFile]) -> None:
    spec = read_spec(with_keys(tiny, "lfm2", attention__sliding_window=9))
    assert [getattr(layer.mixer, "window", "none") for layer in spec.layers] == ["none", "none", 9, "none"]


def test_the_scale_of_attention_may_be_in_the_file(tiny: dict[str, ModelFile]) -> None:
    attention = read_spec(with_keys(tiny, "qwen35", attention__scale=0.25)).layers[3].mixer
    assert isinstance(attention, Attention) and attention.scale == 0.25


@pytest.mark.parametrize(
    "architecture, key, value",
    [
        ("qwen35", "ssm.conv_kernel", 1),
        ("qwen35", "ssm.conv_kernel", None),
        ("qwen35", "ssm.state_size", 0),
        ("qwen35", "ssm.group_count", 4),  # which does not divide 6 value heads
        ("qwen35", "ssm.group_count", None),
        ("qwen35", "ssm.time_step_rank", 7),
        ("qwen35", "ssm.inner_size", 193),
        ("qwen35", "ssm.inner_size", "192"),
        ("qwen35", "attention.recurrent_layers", [True, True, True]),
        ("qwen35", "attention.recurrent_layers", [True, True, 2, False]),
        ("qwen35", "attention.recurrent_layers", 4),
        ("qwen35", "rope.dimension_sections", [2, 1, 1]),
        ("qwen35", "rope.dimension_sections", [0, 0, 0, 0]),
        ("qwen35", "rope.dimension_sections", [2, -1, 1, 0]),
        ("qwen35", "attention.scale", -1.0),
        ("qwen35moe", "expert_gating_func", 2),
        ("qwen35moe", "expert_count", None),
        ("lfm2", "shortconv.l_cache", 1),
        ("lfm2", "shortconv.l_cache", None),
        ("lfm2", "attention.head_count_kv", [0, 0, 0, 0]),
        ("lfm2", "attention.head_count_kv", [0, 1, 2, 0]),
        ("lfm2", "attention.head_count_kv", [0, 0, 2]),
        ("lfm2", "attention.head_count_kv", [0, 0, 3, 0]),
        ("lfm2", "attention.head_count_kv", [0, 0, -2, 0]),
        ("lfm2", "attention.head_count_kv", [0.0, 0.0, 2.0, 0.0]),
        ("lfm2", "attention.sliding_window", -1),
        ("lfm2moe", "expert_gating_func", 9),
    ],
)
def test_a_key_that_does_not_fit_is_refused_by_its_name(
    tiny: dict[str, ModelFile], architecture: HybridArchitecture, key: str, value: object
) -> None:
    message = refusal(changed(tiny[architecture], {f"{architecture}.{key}": value}))
    expected = "ssm.time_step_rank" if key == "ssm.group_count" and value == 4 else key
    assert f"{architecture}.{expected} " in message


@pytest.mark.parametrize("interval", [0, -1, True, 2.0, "4"])
def test_an_interval_that_is_none_is_refused(tiny: dict[str, ModelFile], interval: object) -> None:
    model = with_keys(tiny, "qwen35", attention__recurrent_layers=None, full_attention_interval=interval)
    assert "qwen35.full_attention_interval must be an integer" in refusal(model)


# ---- Blocks that draft -----------------------------------------------------------------------------------------------

QWEN = ("qwen35", "qwen35moe", "qwen3next")
N_EMBD, N_VOCAB = 96, 291


def drafting(tiny: dict[str, ModelFile], architecture: str, own: bool = False) -> ModelFile:
    """With a block behind the layers, like the last one. own: whether it has embeddings and an output of its own."""
    model = tiny[architecture]
    keys = {"block_count": 5, "nextn_predict_layers": 1, "attention.recurrent_layers": None}
    shapes: dict[str, tuple[int, ...]] = {"eh_proj": (N_EMBD, 2 * N_EMBD), "enorm": (N_EMBD,), "hnorm": (N_EMBD,)}
    if own:
        shapes |= {"shared_head_norm": (N_EMBD,)}
        shapes |= dict.fromkeys(("embed_tokens", "shared_head_head"), (N_VOCAB, N_EMBD))
    tensors = {name.replace("blk.3.", "blk.4."): info for name, info in model.tensors.items() if "blk.3." in name}
    tensors |= {f"blk.4.nextn.{name}.weight": SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    return changed(model, {f"{architecture}.{key}": value for key, value in keys.items()}, tensors)


@pytest.mark.parametrize("architecture", QWEN)
def test_a_block_that_drafts_is_read_with_its_layer(tiny: dict[str, ModelFile], architecture: str) -> None:
    """Its layer has attention, as the interval of four would not have it."""
    model = drafting(tiny, architecture)
    spec, (block,) = read_spec(model), read_nextn(model)
    assert spec.n_layers == 4 and block.index == 4
    last, layer = spec.layers[3], block.layer
    assert isinstance(layer.mixer, Attention) and isinstance(last.mixer, Attention)
    assert (layer.mixer.q, layer.mixer.output_gate) == ("blk.4.attn_q.weight", "in_q")
    assert (layer.mixer.rope, layer.mixer.scale) == (last.mixer.rope, last.mixer.scale)
    assert type(layer.ffn) is type(last.ffn) and layer.ffn.shapes() == last.ffn.shapes()
    assert (block.token_embd, block.output, block.output_norm) == (
        *("token_embd.weight", "output.weight"),
        "output_norm.weight",
    )
    (own,) = read_nextn(drafting(tiny, architecture, own=True))
    assert (own.token_embd, own.output, own.output_norm) == tuple(
        f"blk.4.nextn.{name}.weight" for name in ("embed_tokens", "shared_head_head", "shared_head_norm")
    )


@pytest.mark.parametrize("own", [False, True])
def test_every_tensor_of_a_block_that_drafts_is_checked(tiny: dict[str, ModelFile], own: bool) -> None:
    model = drafting(tiny, "qwen35moe", own)
    optional = {f"blk.4.nextn.{name}.weight" for name in ("embed_tokens", "shared_head_head", "shared_head_norm")}
    for name in [name for name in model.tensors if name.startswith("blk.4.")]:
        shape = (model.tensors[name].shape[0] + 1, *model.tensors[name].shape[1:])
        wrong, without = (changed(model, tensors={name: new}) for new in (SimpleNamespace(shape=shape), None))
        assert read_spec(wrong) == read_spec(without) == read_spec(model)  # whose texts do not depend on it
        with pytest.raises(UnsupportedModel, match=rf"tensor {name} must have shape .*: found \({shape[0]},"):
            read_nextn(wrong)
        if name in optional:
            assert read_nextn(without)
        else:
            with pytest.raises(UnsupportedModel, match=rf"tensor {name} .* is missing"):
                read_nextn(without)
    for name in ("blk.4.nextn.other.weight", "blk.4.ssm_a"):
        with pytest.raises(UnsupportedModel, match=f"1 tensors are not part of a block that drafts .*, first {name}"):
            read_nextn(changed(model, tensors={name: SimpleNamespace(shape=(3,))}))


def test_a_model_without_such_a_block_has_none(tiny: dict[str, ModelFile]) -> None:
    assert [read_nextn(model) for model in tiny.values()] == [()] * len(tiny)
