"""Mamba2 in model files: what is read, and what is refused."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_mamba import MAMBA_MODELS, write_tiny_mamba

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import (
    Attention,
    Dense,
    Experts,
    Mamba2,
    NoFeedForward,
    PlainDense,
    PlainExperts,
    read_nextn,
    read_spec,
)
from edgeinfer.models.gguf import ModelFile

OPTIONAL = ("ssm_conv1d.bias",)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModelFile]]:
    folder = tmp_path_factory.mktemp("mamba")
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(ModelFile.open(write_tiny_mamba(folder / f"{name}.gguf", name)))
            for name in MAMBA_MODELS
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


@pytest.mark.parametrize("name", MAMBA_MODELS)
def test_every_tensor_has_a_shape_in_the_spec(tiny: dict[str, ModelFile], name: str) -> None:
    shapes = {tensor: info.shape for tensor, info in tiny[name].tensors.items()}
    assert read_spec(tiny[name]).tensor_shapes() == shapes


@pytest.mark.parametrize("name", MAMBA_MODELS)
def test_every_tensor_is_needed(tiny: dict[str, ModelFile], name: str) -> None:
    for tensor in tiny[name].tensors:
        without = changed(tiny[name], tensors={tensor: None})
        if tensor == "output.weight":
            assert read_spec(without).tied_embeddings
        elif tensor.endswith(OPTIONAL) or (name == "falcon-h1" and tensor.endswith("ssm_norm.weight")):
            read_spec(without)
        else:
            assert f"tensor {tensor} " in refusal(without) and "is missing" in refusal(without)


@pytest.mark.parametrize("name", MAMBA_MODELS)
@pytest.mark.parametrize("tensor", ["blk.0.ssm_x.weight", "blk.1.ffn_up.bias", "v.patch"])
def test_a_tensor_that_nobody_would_read_is_refused(tiny: dict[str, ModelFile], name: str, tensor: str) -> None:
    message = refusal(changed(tiny[name], tensors={tensor: SimpleNamespace(shape=(64,))}))
    assert tensor in message and f"1 tensors are not part of a {name.partition('+')[0]} model" in message


@pytest.mark.parametrize("name", ["granitehybrid", "granitehybrid+experts"])
def test_granite_recurs_where_heads_have_no_keys(tiny: dict[str, ModelFile], name: str) -> None:
    spec = read_spec(tiny[name])
    assert [type(layer.mixer) for layer in spec.layers] == [Mamba2, Attention, Mamba2]
    assert [layer.mixer.state_kind for layer in spec.layers] == ["recurrent", "full_kv", "recurrent"]
    assert all(isinstance(layer.ffn, Experts if "+" in name else Dense) for layer in spec.layers)
    attention = spec.layers[1].mixer
    assert isinstance(attention, Attention) and attention.rope is None and attention.scale == pytest.approx(0.3)
    assert (spec.embedding_scale, spec.residual_scale) == pytest.approx((1.5, 0.7))
    assert spec.logit_scale == pytest.approx(1 / 0.8)


def test_granite_turns_keys_where_the_file_says_so(tiny: dict[str, ModelFile]) -> None:
    model = changed(tiny["granitehybrid"], {"granitehybrid.rope.scaling.finetuned": True})
    attention = read_spec(model).layers[1].mixer
    assert isinstance(attention, Attention) and attention.rope is not None and attention.rope.kind == "interleaved"


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_moe", "nemotron_h_moe+latent"])
def test_a_network_of_nemotron_belongs_to_the_mixer_before_it(tiny: dict[str, ModelFile], name: str) -> None:
    spec = read_spec(tiny[name])
    network = PlainExperts if "moe" in name else PlainDense
    mixers = [Mamba2, Mamba2, Attention] if "moe" in name else [Mamba2, Attention, Mamba2]
    assert spec.n_layers == 3 and [type(layer.mixer) for layer in spec.layers] == mixers
    assert [type(layer.ffn) for layer in spec.layers] == [network, NoFeedForward, network]
    last = spec.layers[-1].ffn
    assert isinstance(last, (PlainDense, PlainExperts))
    assert last.norm == "blk.4.attn_norm.weight" and last.activation == "relu2"
    attention = next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention))
    assert attention.rope is None and attention.window is None
    if isinstance(last, PlainExperts):
        assert (last.router_function, last.is_normalised, last.weight_scale) == ("sigmoid", True, 2.5)
        assert last.gate == last.up and last.n_latent == (64 if "latent" in name else 0)
        assert not {"gate", "shared_gate"} & set(last.shapes())


def test_falcon_has_two_mixers_side_by_side(tiny: dict[str, ModelFile]) -> None:
    spec = read_spec(tiny["falcon-h1"])
    assert spec.n_layers == 4 and [type(layer.mixer) for layer in spec.layers] == [Mamba2, Attention] * 2
    assert [layer.is_beside for layer in spec.layers] == [False, True] * 2
    assert [type(layer.ffn) for layer in spec.layers] == [NoFeedForward, Dense] * 2
    first, second = (layer.mixer for layer in spec.layers[:2])
    assert isinstance(first, Mamba2) and isinstance(second, Attention) and first.norm == second.norm


def test_the_norm_of_one_group_may_be_a_vector_or_a_row(tiny: dict[str, ModelFile], tmp_path: Any) -> None:
    with ModelFile.open(write_tiny_mamba(tmp_path / "m.gguf", "granitehybrid", n_groups=1)) as model:
        spec = read_spec(model)
        names = [name for name in model.tensors if name.endswith("ssm_norm.weight")]
        rows = {name: SimpleNamespace(shape=(1, *model.tensors[name].shape)) for name in names}
        assert names and read_spec(changed(model, tensors=rows)) == spec


def test_the_epsilon_of_nemotron_may_be_under_either_key(tiny: dict[str, ModelFile]) -> None:
    keys = [f"nemotron_h.attention.layer_norm_{kind}epsilon" for kind in ("rms_", "")]
    model = tiny["nemotron_h"]
    assert read_spec(changed(model, {keys[0]: 1e-3})).norm_epsilon == pytest.approx(1e-3)
    assert read_spec(changed(model, {keys[0]: 1e-3, keys[1]: None})).norm_epsilon == pytest.approx(1e-3)
    assert read_spec(changed(model, {keys[0]: None, keys[1]: 1e-3})).norm_epsilon == pytest.approx(1e-3)
    assert "layer_norm_" in refusal(changed(model, dict.fromkeys(keys)))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    path = tmp_path_factory.mktemp("mamba") / "m.gguf"
    with ModelFile.open(write_tiny_mamba(path, "nemotron_h_moe+latent", n_nextn=1)) as model:
        yield model


def test_the_block_of_nemotron_that_drafts_is_attention_and_experts(
    tiny: dict[str, ModelFile], drafting: ModelFile
) -> None:
    spec, (block,) = read_spec(drafting), read_nextn(drafting)
    assert spec == read_spec(tiny["nemotron_h_moe+latent"]) and block.index == 5
    mixer, ffn = block.layer.mixer, block.layer.ffn
    assert isinstance(mixer, Attention) and (mixer.q, mixer.norm) == ("blk.5.attn_q.weight", "blk.5.attn_norm.weight")
    assert mixer.rope is None and isinstance(ffn, PlainExperts) and ffn.n_latent == 64
    assert (ffn.up, ffn.norm) == ("blk.5.ffn_up_exps.weight", "blk.5.post_attention_norm.weight")
    assert (block.output_norm, block.output) == ("blk.5.nextn.shared_head_norm.weight", "output.weight")
    assert block.centred_output and not spec.centred_output
    assert read_nextn(tiny["nemotron_h_moe"]) == ()


def test_every_tensor_of_the_block_of_nemotron_is_checked(drafting: ModelFile) -> None:
    spec, names = read_spec(drafting), [name for name in drafting.tensors if name.startswith("blk.5.")]
    for name in names:
        shape = (drafting.tensors[name].shape[0] + 1, *drafting.tensors[name].shape[1:])
        for wrong, message in ((SimpleNamespace(shape=shape), "must have shape"), (None, "is missing")):
            model = changed(drafting, tensors={name: wrong})
            assert read_spec(model) == spec  # whose texts do not depend on it
            with pytest.raises(UnsupportedModel, match=rf"tensor {name} .*{message}"):
                read_nextn(model)
    with pytest.raises(UnsupportedModel, match="not part of a block that drafts .*, first blk.5.ssm_a"):
        read_nextn(changed(drafting, tensors={"blk.5.ssm_a": SimpleNamespace(shape=(3,))}))


def test_a_block_of_nemotron_that_cannot_run_says_why(drafting: ModelFile) -> None:
    epsilons = {f"nemotron_h_moe.attention.layer_norm_{kind}epsilon": 1e-5 for kind in ("", "rms_")}
    assert read_nextn(changed(drafting, epsilons)) == read_nextn(drafting)
    for keys, message in (
        ({**epsilons, "nemotron_h_moe.attention.layer_norm_epsilon": 1e-6}, "must be 1e-05, as that of other norms"),
        ({"nemotron_h_moe.attention.head_count_kv": [0, 0, 0, 2, 0, 0]}, "must not be 0 in block 5, which drafts"),
    ):
        model = changed(drafting, keys)
        read_spec(model)
        with pytest.raises(UnsupportedModel, match=message):
            read_nextn(model)


def test_the_state_of_a_released_model_is_as_large_as_it_is_said_to_be() -> None:
    """Nemotron-3-Nano: 23 layers of 64 heads; its state of 48.2 MB, and what is kept of a node."""
    names = ("conv", "input", "decay", "skip", "step_bias", "output")
    tensors: dict[str, Any] = dict.fromkeys(names, "t")
    block = Mamba2(n_embd=2688, n_conv=4, n_heads=64, head_dim=64, n_groups=8, n_per_key=128, **tensors)
    assert 23 * 4 * block.n_state == 48_234_496
    assert 23 * block.state_bytes(1, "f16") == 49_930_240
    assert 23 * block.node_bytes == 23 * 4 * (1024 + 4096 + 64 + 6144) == 1_042_176
    products = (2 * 4096 + 2 * 1024 + 64 + 4096) * 2688 + 4 * 6144 + 2 * 64
    assert block.multiply_adds() - 2 * block.n_state in range(products - 200, products + 5000)


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("granitehybrid", "ssm.conv_kernel", 1),
        ("granitehybrid", "ssm.state_size", None),
        ("granitehybrid", "ssm.group_count", 3),
        ("granitehybrid", "ssm.inner_size", 257),
        ("granitehybrid", "ssm.time_step_rank", 0),
        ("granitehybrid", "attention.head_count_kv", [0, 0, 0]),
        ("granitehybrid", "logit_scale", 0.0),
        ("nemotron_h", "feed_forward_length", [0, 96, 0]),
        ("nemotron_h", "attention.value_length", 48),
        ("nemotron_h", "attention.head_count_kv", [0, 0, 3, 0, 0]),
        ("nemotron_h_moe", "expert_gating_func", 1),
        ("nemotron_h_moe", "expert_feed_forward_length", [0, 32, 0, 0, 48]),
        ("falcon-h1", "ssm.inner_size", None),
    ],
)
def test_a_key_that_does_not_fit_is_refused_by_its_name(
    tiny: dict[str, ModelFile], name: str, key: str, value: object
) -> None:
    assert f"{name}.{key} " in refusal(changed(tiny[name], {f"{name}.{key}": value}))


def test_a_network_without_a_mixer_before_it_is_refused(tiny: dict[str, ModelFile]) -> None:
    keys = {"feed_forward_length": [0, 96, 96, 0, 0], "attention.head_count_kv": [0, 0, 0, 0, 2]}
    message = refusal(changed(tiny["nemotron_h"], {f"nemotron_h.{key}": value for key, value in keys.items()}))
    assert "block 2 is a network, and edgeinfer needs attention or Mamba2 before it" in message
