"""ERNIE 4.5 with experts: dense layers first, and biases that count for the choice of experts only.

Layers that draft tokens (multi-token prediction) are left out.
"""

from __future__ import annotations

from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import ExpertNames, Keys, Recipe, shared_experts

_MTP = ("model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.")


def _step(model: Model) -> int:
    return model.config.integer("moe_layer_interval", 1)


def _first(model: Model) -> int:
    return model.config.integer("moe_layer_start_index", 1, least=0)


def _has_experts(model: Model, layer: int) -> bool:
    return layer >= _first(model) and (layer + 1) % _step(model) == 0


def _check(model: Model) -> None:
    last = model.config.get("moe_layer_end_index")
    if last not in (None, -1, model.n_layers - 1):
        model.refuse("moe_layer_end_index", f"must be the last layer, {model.n_layers - 1}: found {last!r:.80}")
    left = {name for name in model.checkpoint.names if name.startswith(_MTP)}
    if left:
        model.note(f"the layers that predict tokens further ahead (MTP) are left out: {len(left)} tensors")
    model.taken |= left


def _keys(model: Model) -> Keys:
    config = model.config
    n_ff, n_shared = config.integer("moe_intermediate_size"), config.integer("moe_num_shared_experts", 0, least=0)
    keys: Keys = {
        "interleave_moe_layer_step": _step(model),
        "leading_dense_block_count": _first(model),
        "expert_feed_forward_length": n_ff,
        "expert_shared_count": n_shared,
    }
    return keys | ({"expert_shared_feed_forward_length": n_ff * n_shared} if n_shared else {})


RECIPES = (
    Recipe(
        name="ernie4_5-moe",
        classes=("Ernie4_5_MoeForCausalLM",),
        model_types=("ernie4_5_moe",),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
        fixed={
            "hidden_act": (None, "silu"),
            "moe_norm_min": (None, 1e-12),
            "moe_gate": (None, "topk"),
            "moe_gate_act": (None, "softmax"),
        },
        reads=frozenset(
            {"moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index", "moe_intermediate_size"}
            | {"moe_num_shared_experts", "num_nextn_predict_layers", "moe_use_aux_free", "moe_capacity"}
        ),
        experts=ExpertNames(
            count=("moe_num_experts",),
            used="moe_k",
            optional={
                "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
                **shared_experts("mlp.shared_experts"),
            },
        ),
        has_experts=_has_experts,
        check=_check,
        keys=_keys,
    ),
)
