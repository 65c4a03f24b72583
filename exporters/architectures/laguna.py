"""Laguna: softplus gates on what heads give, windows in most layers, experts with sigmoid routers after dense ones."""

from __future__ import annotations

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ATTENTION, QK_NORMS, ExpertNames, Keys, Recipe, shared_experts
from edgeinfer.exporters.conversion.windows import has_window

_SIGMOID = 2  # as GGUF numbers the functions of a router
_PERIOD = 4  # of each period the first layer sees everything, where the file does not say it


def _is_sparse(model: Model) -> list[bool]:
    """Which layers have experts, all of them behind the others."""
    kinds = model.config.texts("mlp_layer_types", model.n_layers)
    found = [kind == "sparse" for kind in kinds]
    if found != sorted(found) or not {"dense", "sparse"} >= set(kinds):
        model.refuse("mlp_layer_types", f"must be dense layers and then sparse ones: found {kinds!r:.80}")
    return found


def _heads(model: Model) -> list[int]:
    key = "num_attention_heads_per_layer"
    if key not in model.config:
        return [model.n_heads] * model.n_layers
    return model.config.integers(key, model.n_layers, least=1, most=1 << 14)


def _check(model: Model) -> None:
    _is_sparse(model)
    local = model.config.rope("sliding_attention")
    if local.kind != "default":
        model.refuse("rope_parameters", f"must be default for sliding_attention: found {local.kind}")


def _windows(model: Model) -> Keys:
    """Nothing where all layers see everything."""
    windowed = has_window(model) or []
    if not any(windowed):
        return {}
    local = model.config.rope("sliding_attention")
    keys: Keys = {
        "attention.sliding_window": model.config.integer("sliding_window"),
        "rope.freq_base_swa": local.theta,
    }
    if windowed != [layer % _PERIOD != 0 for layer in range(model.n_layers)]:
        keys["attention.sliding_window_pattern"] = windowed
    return keys


def _keys(model: Model) -> Keys:
    config = model.config
    local = config.rope("sliding_attention")
    return {
        "attention.head_count": _heads(model),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
        "expert_weights_norm": True,
        "expert_weights_scale": config.number("moe_routed_scaling_factor"),
        "expert_gating_func": _SIGMOID,
        "leading_dense_block_count": _is_sparse(model).count(False),
        "rope.dimension_count_swa": int(model.head_dim * local.share),
        **_windows(model),
    }


RECIPES = (
    Recipe(
        name="laguna",
        classes=("LagunaForCausalLM",),
        model_types=("laguna",),
        defaults={
            "rms_norm_eps": 1e-6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "moe_routed_scaling_factor": 1.0,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "head_dim": 128,
            "num_key_value_heads": 8,
        },
        # What llama.cpp has no keys for.
        fixed={
            "hidden_act": (None, "silu"),
            "gating": (True, "per-head", "per-element", "per_head", "per_element"),  # the tensors tell which
            "moe_router_logit_softcapping": (None, 0, 0.0),
            "moe_apply_router_weight_on_input": (None, False),
        },
        reads=frozenset(
            {"moe_intermediate_size", "shared_expert_intermediate_size", "moe_routed_scaling_factor", "sliding_window"}
            | {"num_attention_heads_per_layer", "mlp_layer_types", "gating_types"}
        ),
        attention={**ATTENTION, **QK_NORMS, "self_attn.g_proj.weight": "attn_gate.weight"},
        experts=ExpertNames(
            more={"mlp.experts.e_score_correction_bias": "exp_probs_b.bias", **shared_experts("mlp.shared_expert")}
        ),
        has_experts=lambda model, layer: _is_sparse(model)[layer],
        part_rotated=True,
        check=_check,
        keys=_keys,
    ),
)
