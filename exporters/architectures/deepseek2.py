"""Latent attention with experts: DeepSeek-V2 and V3, GLM-4.7-Flash.

The matrix of keys and values of all heads (kv_b_proj) becomes two, with a matrix for each head; the keys' are
transposed. Layers behind the model's own, which draft (multi-token prediction), are kept where GGUF has them: of GLM.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ExpertNames, Keys, Recipe, shared_experts
from edgeinfer.exporters.source import SourceTensor

_SOFTMAX, _SIGMOID = 1, 2  # as GGUF numbers the functions of a router
_BY_BEST = "group_limited_greedy"  # what DeepSeek calls it
_ATTENTION = {
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
}
_QUERIES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
}
_NEXTN = {
    "eh_proj.weight": "eh_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "shared_head.norm.weight": "shared_head_norm.weight",
}
_OWN = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "shared_head_head.weight"}


def _sizes(model: Model) -> tuple[int, int, int, int]:
    """Numbers of a latent row, of what is turned, of what is not, and of a value."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    latent, turned, plain, value = (model.config.integer(name, most=1 << 14) for name in names)
    return latent, turned, plain, value


def _matrices_of_heads(model: Model) -> list[SourceTensor]:
    """attn_k_b and attn_v_b of each block. Raises ModelFileError."""
    latent, _, plain, value = _sizes(model)
    found = []
    for block, front in enumerate(model.blocks):
        name = f"{front}self_attn.kv_b_proj.weight"
        both = model.take(name)
        model.checkpoint.check_shape(name, (model.n_heads * (plain + value), latent))
        of_heads = replace(both, shape=(model.n_heads, plain + value, latent))
        keys, values = rows.part(of_heads, 0, plain), rows.part(of_heads, plain, plain + value)
        found += [
            replace(rows.transposed(keys), name=f"blk.{block}.attn_k_b.weight"),
            replace(values, name=f"blk.{block}.attn_v_b.weight"),
        ]
    return [*found, *_nextn_tensors(model)]


# ---- layers that draft -----------------------------------------------------------------------------------------------


def _left_blocks(model: Model) -> Sequence[str]:
    """GGUF has no such layers of DeepSeek's: they are left out."""
    after = re.compile(r"model\.layers\.(\d+)\..*")
    found = {name: int(match[1]) for name in model.checkpoint.names if (match := after.fullmatch(name))}
    n_more = model.config.integer("num_nextn_predict_layers", 0, least=0)
    left = {name for name, layer in found.items() if model.n_layers <= layer < model.n_layers + n_more}
    if left:
        model.note(f"the layers that predict tokens further ahead (MTP) are left out: {len(left)} tensors")
    model.taken |= left
    return ()


def _nextn_blocks(model: Model) -> Sequence[str]:
    front = f"model.layers.{model.n_layers}."
    return (front,) if f"{front}eh_proj.weight" in model else _left_blocks(model)


def _nextn_tensors(model: Model) -> list[SourceTensor]:
    """Those of the block that drafts beside its layer. Raises ModelFileError for a missing one."""
    if len(model.blocks) == model.n_layers:
        return []
    front, ours = model.blocks[-1], f"blk.{model.n_layers}.nextn."
    names = {**_NEXTN, **{name: to for name, to in _OWN.items() if front + name in model}}
    return [replace(model.take(front + name), name=ours + to) for name, to in names.items()]


# ---- keys ------------------------------------------------------------------------------------------------------------


def _n_dense(model: Model) -> int:
    """Layers without experts, which come first; transformers 5 says it of GLM layer by layer."""
    if "mlp_layer_types" not in model.config:
        return model.config.integer("first_k_dense_replace", least=0)
    kinds = model.config.texts("mlp_layer_types", model.n_layers)
    n_dense = kinds.count("dense")
    if kinds != ["dense"] * n_dense + ["sparse"] * (model.n_layers - n_dense):
        model.refuse("mlp_layer_types", f"must be dense layers and then sparse ones: found {kinds!r:.80}")
    return n_dense


def _check(model: Model) -> None:
    found = model.rope.values
    numbers = {found.get("mscale"), found.get("mscale_all_dim")}
    if model.rope.kind == "yarn" and (len(numbers) != 1 or numbers == {None}):
        model.refuse("rope_parameters", "must have one number as mscale and mscale_all_dim: GGUF has one for both")


def _yarn(model: Model) -> Keys:
    if model.rope.kind != "yarn":
        return {}
    # A tenth of it, as llama.cpp's converter has always written it here.
    return {"rope.scaling.yarn_log_multiplier": 0.1 * model.rope.values.number("mscale_all_dim")}


def _groups(model: Model) -> Keys:
    """Groups of experts. DeepSeek-V2's, where it has some, go by their best one, which GGUF has no key for but ours."""
    config = model.config
    if "n_group" not in config or "topk_group" not in config:
        return {}
    keys: Keys = {
        "expert_group_count": config.integer("n_group"),
        "expert_group_used_count": config.integer("topk_group"),
    }
    if model.recipe.model_types != ("deepseek_v2",) or config.integer("n_group") == 1:
        return keys
    if config.get("topk_method") != _BY_BEST:  # then it chooses from all of them
        return dict.fromkeys(keys, 1)
    model.note("experts are chosen from the groups with the best one, which llama.cpp does by the two best of each")
    return keys | {"expert_groups_by_best": True}


def _keys(model: Model) -> Keys:
    config = model.config
    latent, turned, plain, value = _sizes(model)
    keys: Keys = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + turned,
        "attention.value_length": latent,
        "attention.key_length_mla": plain + turned,
        "attention.value_length_mla": value,
        "attention.kv_lora_rank": latent,
        "rope.dimension_count": turned,
        "leading_dense_block_count": _n_dense(model),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts", least=0),
        "expert_weights_scale": config.number("routed_scaling_factor"),
        "expert_gating_func": _SOFTMAX if model.recipe.model_types == ("deepseek_v2",) else _SIGMOID,
        **_yarn(model),
    }
    keys |= {"expert_weights_norm": True} if config.flag("norm_topk_prob") else {}
    if "q_lora_rank" in config:
        keys["attention.q_lora_rank"] = config.integer("q_lora_rank", most=1 << 14)
    keys |= _groups(model)
    if len(model.blocks) > model.n_layers:
        keys["nextn_predict_layers"] = 1
    return keys


_BIAS = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
_EXPERTS = ExpertNames(
    count=("n_routed_experts", "num_experts", "num_local_experts"), more=shared_experts("mlp.shared_experts")
)
_V3 = Recipe(
    name="deepseek2",
    classes=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    defaults={
        "rms_norm_eps": 1e-6,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    fixed={
        "hidden_act": (None, "silu"),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "rope_interleave": (None, True),
        "moe_layer_freq": (None, 1),
    },
    reads=frozenset(
        {"kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "n_group"}
        | {"topk_group", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "mlp_layer_types"}
        | {"routed_scaling_factor", "norm_topk_prob", "num_nextn_predict_layers", "mscale_all_dim", "ep_size"}
    ),
    attention=_ATTENTION,
    optional=_QUERIES,
    experts=replace(_EXPERTS, more={**_EXPERTS.more, **_BIAS}),
    has_experts=lambda model, layer: layer >= _n_dense(model),
    special=_matrices_of_heads,
    nextn=_left_blocks,
    check=_check,
    keys=_keys,
)
RECIPES = (
    _V3,
    replace(
        _V3,
        classes=("DeepseekV2ForCausalLM",),
        model_types=("deepseek_v2",),
        defaults={
            **{key: value for key, value in _V3.defaults.items() if key not in ("n_group", "topk_group")},
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
        },
        fixed={**_V3.fixed, "scoring_func": (None, "softmax"), "topk_method": (None, "greedy", _BY_BEST)},
        experts=_EXPERTS,
    ),
    replace(
        _V3,
        classes=("Glm4MoeLiteForCausalLM",),
        model_types=("glm4_moe_lite",),
        defaults={
            **{key: value for key, value in _V3.defaults.items() if key != "first_k_dense_replace"},
            "rms_norm_eps": 1e-5,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
        },
        nextn=_nextn_blocks,
    ),
)
