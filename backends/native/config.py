"""Specs as the C++ decoder needs them. What it does not know is refused by name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edgeinfer.backends.native import _core
from edgeinfer.backends.query_scales import QueryScales
from edgeinfer.common.arguments import MAX_INT32
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.models import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    LayerEnd,
    LayerInputs,
    Mamba2,
    Mixer,
    ModelSpec,
    NoFeedForward,
    PlainDense,
    PlainExperts,
    RopeSpec,
    ShortConv,
    attention_of,
)
from edgeinfer.models.draft_head import (
    Clusters,
    ConcatenatedInput,
    FeatureProjection,
    GatedFusion,
    HeadSpec,
    ProjectedInput,
    TargetInput,
)
from edgeinfer.models.spec import StateKind

SEGMENT = 128  # slots, kSegment of kv_head.h

# The fields of blocks that decoder_config and the weights take up; see check_blocks.
_OF_ATTENTION = (
    *("n_embd", "n_in", "n_heads", "n_kv_heads", "head_dim", "scale", "q", "k", "v", "output", "rope", "window"),
    *("soft_cap", "query_temperature", "qk_norm", "norm", "post_norm", "sub_norm", "q_norm", "k_norm"),
    *("q_bias", "k_bias", "v_bias", "output_bias", "sinks", "output_gate", "gate", "gate_function"),
    *("post_norm_epsilon", "normed_values", "kv_of", "of_target"),
)
_OF_DELTA_NET = (
    *("n_embd", "n_conv", "conv", "n_key_heads", "n_value_heads", "head_dim", "key_heads", "qkv", "gate", "decay"),
    *("step_bias", "out_norm", "output", "norm", "beta", "alpha", "beta_alpha"),
)
_OF_SHORT_CONV = ("n_embd", "n_conv", "conv", "input", "output", "norm")
_OF_LATENTS = (
    *("n_embd", "n_heads", "n_plain", "n_turned", "n_latent", "n_value", "scale", "rope", "kv", "kv_norm", "k_b"),
    *("v_b", "output", "norm", "q", "n_q_latent", "q_a", "q_norm", "q_b"),
)
_OF_MAMBA2 = (
    *("n_embd", "n_conv", "conv", "n_heads", "head_dim", "n_groups", "n_per_key", "input", "decay", "skip"),
    *("step_bias", "output", "norm", "conv_bias", "out_norm"),
)
_OF_DENSE = (
    *("n_embd", "n_ff", "gate", "up", "down", "activation", "norm", "post_norm", "sub_norm", "post_norm_epsilon"),
)
_OF_EXPERTS = (
    *("n_embd", "n_ff", "n_experts", "n_used", "router", "gate", "up", "down", "router_function", "is_normalised"),
    *(
        "weight_scale",
        "n_groups",
        "n_used_groups",
        "groups_by_best",
        "activation",
        "norm",
        "post_norm",
        "router_bias",
        "selection_bias",
    ),
    *("gate_bias", "up_bias", "down_bias", "gate_scale", "up_scale", "down_scale", "n_ff_shared", "shared_router"),
    *("shared_gate", "shared_up", "shared_down", "router_norm", "router_scale", "shared_norm"),
    *("routed_post_norm", "shared_post_norm"),
)
_OF_LAYER_END = ("n_embd", "n_inputs", "gate", "projection", "post_norm", "scale", "activation")
_OF_LAYER_INPUTS = (
    *("n_embd", "n_layers", "n_inputs", "n_vocab", "table", "projection", "norm", "projection_scale", "table_scale"),
)
BLOCKS: dict[type, Sequence[str]] = {
    Attention: _OF_ATTENTION,
    GatedDeltaNet: _OF_DELTA_NET,
    ShortConv: _OF_SHORT_CONV,
    LatentAttention: _OF_LATENTS,
    Mamba2: _OF_MAMBA2,
    Dense: _OF_DENSE,
    PlainDense: ("n_embd", "n_ff", "up", "down", "activation", "norm"),
    NoFeedForward: ("n_embd",),
    Experts: _OF_EXPERTS,
    PlainExperts: (*_OF_EXPERTS, "n_latent", "latent_down", "latent_up"),
    LayerEnd: _OF_LAYER_END,
    LayerInputs: _OF_LAYER_INPUTS,
}
# numbers that are computed together: heads and channels of recurrent layers, and inputs of layers, are whole multiples
_LANES = 16
# Those of the parts of heads around their decoder.
PARTS_OF_HEADS: dict[type, Sequence[str]] = {
    GatedFusion: ("n_embd", "feature", "token_norm", "token", "mix"),
    ConcatenatedInput: ("n_embd", "token_norm", "feature_norm", "normed_residual"),
    ProjectedInput: ("n_embd", "token_norm", "feature_norm", "projection"),
    TargetInput: ("n_embd", "n_target", "projection"),
    Clusters: ("n_embd", "n_clusters", "n_used", "centroids"),
    FeatureProjection: ("n_embd", "n_rows", "n_normed", "matrix", "norm"),
}


def decoder_config(spec: ModelSpec, n_ctx: int, n_batch: int) -> _core.DecoderConfig:
    """Sizes and layers; without what matrices read, see add_inputs, and without the values of the query scales.

    These grow with n_ctx, see add_query_scales.
    """
    config = _core.DecoderConfig(
        n_vocab=spec.n_vocab,
        n_logits=spec.n_logits,
        n_embd=spec.n_embd,
        n_ctx=n_ctx,
        n_batch=n_batch,
        norm_epsilon=spec.norm_epsilon,
    )
    config.embedding_scale = spec.embedding_scale
    config.residual_scale = spec.residual_scale
    config.logit_scale = spec.logit_scale
    config.logit_soft_cap = spec.logit_soft_cap or 0.0
    config.embedding_norm = spec.embedding_norm
    config.centred_output = spec.centred_output
    if (inputs := spec.layer_inputs) is not None:
        config.set_layer_inputs(inputs.n_inputs, inputs.projection_scale, inputs.table_scale)
    ropes: dict[RopeSpec, int] = {}
    scales = [_scales_of(attention) for attention in _with_own_scales(spec)]
    for layer in spec.layers:
        mixer, ffn = _mixer(config, layer.mixer, ropes, scales), _feed_forward(layer.ffn)
        config.add_layer(mixer, ffn, _end(layer.end), layer.is_beside)
    return config


@dataclass(frozen=True)
class CacheSizes:
    """What the KV cache of all sequences of a model is to have, and the bytes that it takes."""

    n_positions: int  # of all sequences together
    n_bytes: int
    windows: int  # of n_bytes, what layers with a sliding window have; 0 where the windows would hold all of the texts
    states: int  # of n_bytes, what recurrent layers have: states, earlier ones, and rows of tokens


def cache_sizes(spec: ModelSpec, settings: LoadSettings) -> CacheSizes:
    """The cache of texts of up to n_ctx positions together, and of what is kept of finished ones."""
    config, n_needed = decoder_config(spec, settings.n_ctx, settings.n_batch), positions_of(settings)
    n_positions = n_needed + _further_positions(config, settings, n_needed)
    n_bytes = _bytes_of(config, settings, n_positions)
    windows, states = (of(spec, settings, n_positions) for of in (_window_bytes, _recurrent_bytes))
    return CacheSizes(n_positions, n_bytes, windows, states)


def positions_of(settings: LoadSettings) -> int:
    """Positions of texts of up to n_ctx positions together, each of which may end within a segment of its own."""
    return min(settings.n_ctx + SEGMENT * (settings.n_texts - 1), MAX_INT32)


def _further_positions(config: _core.DecoderConfig, settings: LoadSettings, n_needed: int) -> int:
    """Positions, in whole segments, that cache_ram has room for beyond those that are needed."""
    if not (room := settings.cache_ram_bytes):
        return 0
    most = _bytes_of(config, settings, n_needed) + room
    numbers = range(1, (MAX_INT32 - n_needed) // SEGMENT)  # of segments
    return SEGMENT * bisect_right(numbers, most, key=lambda n: _bytes_of(config, settings, n_needed + SEGMENT * n))


def _bytes_of(config: _core.DecoderConfig, settings: LoadSettings, n_positions: int) -> int:
    return config.kv_bytes(_core.KvType[settings.cache_type], settings.n_ctx, settings.n_texts, n_positions)


def _window_bytes(spec: ModelSpec, settings: LoadSettings, n_positions: int) -> int:
    layers = _with_own_state(spec, "window_kv")
    whole = tuple(replace(layer, mixer=replace(attention_of(layer), window=None)) for layer in layers)

    def n_bytes(of: tuple[Layer, ...]) -> int:
        config = decoder_config(replace(spec, layers=of), settings.n_ctx, settings.n_batch)
        return _bytes_of(config, settings, n_positions) if of else 0

    of_windows, others = n_bytes(layers), n_bytes(whole)
    return of_windows if of_windows < others else 0


def _with_own_state(spec: ModelSpec, kind: StateKind) -> tuple[Layer, ...]:
    """The layers that keep a state of that kind, without those that read the keys and values of others."""
    own = (layer for layer in spec.layers if not isinstance(layer.mixer, Attention) or layer.mixer.has_own_keys)
    alone = (replace(layer, ffn=NoFeedForward(spec.n_embd), is_beside=False) for layer in own)
    return tuple(layer for layer in alone if layer.mixer.state_kind == kind)


def _recurrent_bytes(spec: ModelSpec, settings: LoadSettings, n_positions: int) -> int:
    layers = _with_own_state(spec, "recurrent")
    config = decoder_config(replace(spec, layers=layers), settings.n_ctx, settings.n_batch)
    return _bytes_of(config, settings, n_positions) if layers else 0


def most_rows_of_tree(spec: ModelSpec) -> int:
    """Tokens of the largest tree that a model runs; 32 where no recurrent layer has large rows."""
    return decoder_config(spec, n_ctx=1, n_batch=1).most_rows_of_tree


def add_inputs(config: _core.DecoderConfig, matrices: Iterable[tuple[int, int]]) -> None:
    """Make room for what matrices (packed format, n_in) read; without it a decoder refuses them."""
    for packed_as, n_in in set(matrices):
        config.add_inputs(packed_as, n_in)


def add_query_scales(config: _core.DecoderConfig, spec: ModelSpec, n_ctx: int) -> None:
    """Add the values that queries are multiplied by at the positions below n_ctx, which only a decoder needs."""
    for attention in _with_own_scales(spec):
        scales = QueryScales.of(attention, n_ctx)
        config.add_query_scales(scales.values.tolist(), scales.n_positions)


def front_config(head: HeadSpec) -> _core.FrontConfig:
    """What a head begins with."""
    if isinstance(head.front, GatedFusion):
        return _core.FrontConfig(_core.FrontKind.gated_fusion)
    if isinstance(head.front, ProjectedInput):
        return _core.FrontConfig(_core.FrontKind.projected_input)
    if isinstance(head.front, TargetInput):
        return _core.FrontConfig(_core.FrontKind.target_input)
    return _core.FrontConfig(_core.FrontKind.concatenated_input, head.front.normed_residual)


def check_recurrences(spec: ModelSpec, path: object) -> None:
    """Raises UnsupportedModel for recurrent layers, and for inputs of layers, of sizes that no kernel has."""
    for name, block in spec.blocks():
        sizes: dict[str, int] = {}
        if isinstance(block, GatedDeltaNet):
            sizes = {"heads": block.head_dim}
        elif isinstance(block, Mamba2):
            sizes = {"heads": block.head_dim, "keys": block.n_per_key}
        elif isinstance(block, ShortConv):
            sizes = {"rows": block.n_embd}
        elif isinstance(block, LatentAttention):
            sizes = {"latents": block.n_latent, "turned parts": block.n_turned, "values": block.n_value}
        elif isinstance(block, LayerInputs):
            sizes = {"inputs": block.n_inputs}
        for what, n in sizes.items():
            if n % _LANES:
                raise UnsupportedModel(
                    f"{path}: {name} has {what} of {n} numbers, and the native engine needs a multiple of {_LANES}"
                )


def _mixer(
    config: _core.DecoderConfig, block: Mixer, ropes: dict[RopeSpec, int], scales: list[tuple[object, ...]]
) -> _core.AttentionConfig | _core.DeltaNetConfig | _core.Mamba2Config | _core.ShortConvConfig | _core.LatentConfig:
    """A mixer; ropes: those that the config has, to which its own is added."""
    if isinstance(block, GatedDeltaNet):
        return _core.DeltaNetConfig(
            n_key_heads=block.n_key_heads,
            n_value_heads=block.n_value_heads,
            head_dim=block.head_dim,
            n_conv=block.n_conv,
            modulo=block.key_heads == "modulo",
            joint_steps=block.beta_alpha is not None,
        )
    if isinstance(block, Mamba2):
        return _core.Mamba2Config(
            n_heads=block.n_heads,
            head_dim=block.head_dim,
            n_groups=block.n_groups,
            n_per_key=block.n_per_key,
            n_conv=block.n_conv,
        )
    if isinstance(block, ShortConv):
        return _core.ShortConvConfig(n_channels=block.n_embd, n_conv=block.n_conv)
    if isinstance(block, LatentAttention):
        return _latents(block, _rope_number(config, block.rope, ropes))
    if not isinstance(block, Attention):
        raise UnsupportedModel(f"the mixer must be one that the native engine has: found {type(block).__name__}")
    rope = -1 if block.rope is None else _rope_number(config, block.rope, ropes)
    return _attention(block, rope, scales.index(_scales_of(block)))


def _rope_number(config: _core.DecoderConfig, rope: RopeSpec, ropes: dict[RopeSpec, int]) -> int:
    if rope not in ropes:
        ropes[rope] = _add_rope(config, rope)
    return ropes[rope]


def _latents(block: LatentAttention, rope: int) -> _core.LatentConfig:
    return _core.LatentConfig(
        n_heads=block.n_heads,
        n_plain=block.n_plain,
        n_turned=block.n_turned,
        n_latent=block.n_latent,
        n_value=block.n_value,
        n_q_latent=block.n_q_latent,
        rope=rope,
        scale=block.scale,
    )


def _attention(block: Attention, rope: int, query_scales: int) -> _core.AttentionConfig:
    return _core.AttentionConfig(
        n_in=block.n_in,
        n_heads=block.n_heads,
        n_kv_heads=block.n_kv_heads,
        head_dim=block.head_dim,
        rope=rope,
        query_scales=query_scales,
        window=block.window or 0,
        soft_cap=block.soft_cap or 0.0,
        qk_norm=_core.QKNorm[block.qk_norm if block.q_norm and block.qk_norm else "none"],
        key_bias=block.separate_key_bias is not None,
        gate=_core.OutputGate[block.output_gate or "none"],
        gate_is_softplus=block.gate_function == "softplus",
        post_norm_epsilon=block.post_norm_epsilon or 0.0,
        normed_values=block.normed_values,
        keys_are_values=block.has_own_keys and not block.has_own_values,
        kv_of=-1 if block.kv_of is None else block.kv_of,
        of_target=block.of_target,
    )


def _end(block: LayerEnd | None) -> _core.LayerEndConfig | None:
    if block is None:
        return None
    n_inputs = 0 if block.gate is None else block.n_inputs
    return _core.LayerEndConfig(n_inputs=n_inputs, activation=_core.Activation[block.activation])


def _feed_forward(block: FeedForward) -> _core.DenseConfig | _core.ExpertsConfig | _core.NoFeedForwardConfig:
    if isinstance(block, NoFeedForward):
        return _core.NoFeedForwardConfig()
    if isinstance(block, PlainDense):
        return _core.DenseConfig(n_ff=block.n_ff, activation=_core.Activation[block.activation], is_plain=True)
    if isinstance(block, Dense):
        return _core.DenseConfig(
            n_ff=block.n_ff,
            activation=_core.Activation[block.activation],
            post_norm_epsilon=block.post_norm_epsilon or 0.0,
        )
    if not isinstance(block, Experts):
        raise UnsupportedModel(f"the feed-forward network must be Dense or Experts: found {type(block).__name__}")
    return _core.ExpertsConfig(
        n_ff=block.n_ff,
        n_experts=block.n_experts,
        n_used=block.n_used,
        router_function=_core.RouterFunction[block.router_function],
        is_normalised=block.is_normalised,
        weight_scale=block.weight_scale,
        n_groups=block.n_groups,
        n_used_groups=block.n_used_groups,
        groups_by_best=block.groups_by_best,
        activation=_core.Activation[block.activation],
        n_ff_shared=block.n_ff_shared,
        router_scale=block.router_scale,
        own_inputs=block.router_norm is not None,
        n_latent=block.n_latent if isinstance(block, PlainExperts) else 0,
    )


def _add_rope(config: _core.DecoderConfig, rope: RopeSpec) -> int:
    long = rope.long
    others = ([], 0) if long is None else (list(long.inverse_frequencies), long.n_ctx)
    return config.add_rope(rope.kind == "halves", list(rope.inverse_frequencies), rope.magnitude, *others)


def _scales_of(attention: Attention) -> tuple[object, ...]:
    return attention.scale, attention.query_temperature


def _with_own_scales(spec: ModelSpec) -> list[Attention]:
    """One attention for each way in which queries are scaled, always in the same order."""
    blocks = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    return list({_scales_of(block): block for block in blocks}.values())
