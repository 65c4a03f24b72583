"""Nemotron-H, Nemotron Nano 2 and Nemotron-3: blocks of one branch, Mamba2, attention, or a network without gates.

What drafts (`mtp.*`) is a layer of attention and one of experts, which become one block of GGUF.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer.exporters.architectures.granitehybrid import MAMBA, mamba_tensor
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.conversion.model import Model
from edgeinfer.exporters.conversion.recipe import Keys, Recipe
from edgeinfer.exporters.source import SourceTensor

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
_ALIKE = {"linear_attention": "mamba", "full_attention": "attention"}  # as transformers 5 calls them
# What a block of each kind has at least, after "mixer.".
_FIRST = {"mamba": "in_proj.weight", "attention": "q_proj.weight", "mlp": "up_proj.weight", "moe": "gate.weight"}
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_NETWORKS = {
    "up_proj.weight": "ffn_up.weight",
    "down_proj.weight": "ffn_down.weight",
    "gate.weight": "ffn_gate_inp.weight",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "fc1_latent_proj.weight": "ffn_latent_down.weight",
    "fc2_latent_proj.weight": "ffn_latent_up.weight",
}
# What drafts, after "mtp.layers.": as it becomes the block behind the others.
_DRAFTING = {
    "0.eh_proj.weight": "nextn.eh_proj.weight",
    "0.enorm.weight": "nextn.enorm.weight",
    "0.hnorm.weight": "nextn.hnorm.weight",
    "1.norm.weight": "post_attention_norm.weight",
    "1.final_layernorm.weight": "nextn.shared_head_norm.weight",
}
_MTP, _ATTENDS, _HAS_EXPERTS = "mtp.layers.", "mtp.layers.0.", "mtp.layers.1."
_MIXERS = {**MAMBA, **{f"{theirs}.weight": f"{ours}.weight" for theirs, ours in _ATTENTION.items()}, **_NETWORKS}


def kinds(model: Model) -> list[str]:
    """What each block is, see _FIRST. Raises UnsupportedModel where its tensors are of another kind."""
    config, key = model.config, "hybrid_override_pattern"
    if key in config:
        letters = list(config.text(key))
        if len(letters) != model.n_layers or not set(letters) <= _LETTERS.keys():
            model.refuse(key, f"must be {model.n_layers} of {' '.join(_LETTERS)}: found {''.join(letters):.80}")
        found = [_LETTERS[letter] for letter in letters]
    else:
        key = "layers_block_type"
        found = [_ALIKE.get(kind, kind) for kind in config.texts(key, model.n_layers)]
    for block, kind in enumerate(found):
        if kind not in _FIRST or f"{model.blocks[block]}mixer.{_FIRST[kind]}" not in model:
            model.refuse(key, f"says that block {block} is {kind:.40}, and its tensors are not those of that")
    return found


def _check(model: Model) -> None:
    kinds(model)


def _changed(model: Model, tensor: SourceTensor) -> SourceTensor:
    return mamba_tensor(model.config.integer("n_groups"), tensor)


def _nextn_blocks(model: Model) -> Sequence[str]:
    """What stands before the names of the attention that drafts; none where there is none that GGUF can have."""
    names = {name for name in model.checkpoint.names if name.startswith("mtp.")}
    if not names:
        if model.config.integer("num_nextn_predict_layers", 0, least=0):
            model.note("config.json names a block that drafts (MTP), which the checkpoint does not have")
        return ()
    layers = {name.removeprefix(_MTP).partition(".")[0] for name in names}
    firsts = {f"{_ATTENDS}mixer.{_FIRST['attention']}", f"{_HAS_EXPERTS}mixer.{_FIRST['moe']}"}
    if layers == {"0", "1"} and firsts <= names:
        return (_ATTENDS,)
    model.taken |= names
    model.note("the block that drafts (MTP) is not one layer of attention and one of experts: it is left out")
    return ()


def _experts(model: Model) -> list[SourceTensor]:
    """The matrices of all experts, and what the block that drafts has beside its attention."""
    found = []
    for block, kind in enumerate(kinds(model)):
        if kind == "moe":
            found += _stacked_experts(model, f"{model.blocks[block]}mixer.experts", block)
    if (block := model.n_layers) == len(model.blocks):
        return found
    networks = {
        f"1.mixer.{theirs}": ours for theirs, ours in _NETWORKS.items() if f"{_HAS_EXPERTS}mixer.{theirs}" in model
    }
    for theirs, ours in {**_DRAFTING, **networks}.items():
        found.append(replace(model.take(_MTP + theirs), name=f"blk.{block}.{ours}"))
    return [*found, *_stacked_experts(model, f"{_HAS_EXPERTS}mixer.experts", block)]


def _stacked_experts(model: Model, module: str, block: int) -> list[SourceTensor]:
    """The matrices of all experts of a block, (n_experts, n_out, n_in)."""
    found, n_experts = [], model.config.integer("n_routed_experts", 0, least=0)
    for role in ("up", "down"):
        if f"{module}.{role}_proj" in model:
            joined = model.take(f"{module}.{role}_proj")
        else:
            joined = rows.stacked([model.take(f"{module}.{n}.{role}_proj.weight") for n in range(n_experts)])
        found.append(replace(joined, name=f"blk.{block}.ffn_{role}_exps.weight"))
    return found


def _keys(model: Model) -> Keys:
    config, found = model.config, [*kinds(model), *("drafting" for _ in model.blocks[model.n_layers :])]
    width = config.integer("intermediate_size" if "moe" not in found else "moe_intermediate_size")
    n_heads = config.integer("mamba_num_heads")
    keys: Keys = {
        "attention.head_count_kv": [model.n_kv_heads * (kind in ("attention", "drafting")) for kind in found],
        "attention.layer_norm_epsilon": config.number("rms_norm_eps", 1e-5, most=1.0),
        "feed_forward_length": [width * (kind in ("mlp", "moe", "drafting")) for kind in found],
        "ssm.conv_kernel": config.integer("conv_kernel"),
        "ssm.state_size": config.integer("ssm_state_size"),
        "ssm.group_count": config.integer("n_groups"),
        "ssm.time_step_rank": n_heads,
        "ssm.inner_size": n_heads * config.integer("mamba_head_dim"),
    }
    keys |= {"nextn_predict_layers": 1} if "drafting" in found else {}
    return keys | (_of_experts(model) if "moe" in found else {})


def _of_experts(model: Model) -> Keys:
    config = model.config
    keys: Keys = {
        "expert_count": config.integer("n_routed_experts"),
        "expert_used_count": config.integer("num_experts_per_tok"),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.integer("moe_shared_expert_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts", 1),
        "expert_weights_norm": config.flag("norm_topk_prob", True),
        "expert_weights_scale": config.number("routed_scaling_factor", 1.0),
        "expert_group_count": config.integer("n_group", 1),
        "expert_group_used_count": config.integer("topk_group", 1),
    }
    return keys | ({"moe_latent_size": config.integer("moe_latent_size")} if "moe_latent_size" in config else {})


def _with_experts(checkpoint: Checkpoint) -> Recipe | None:
    return MOE if any(".mixer.gate." in name for name in checkpoint.names) else None


NEMOTRON = Recipe(
    name="nemotron_h",
    classes=("NemotronHForCausalLM",),
    model_types=("nemotron_h",),
    spellings={"layer_norm_epsilon": "rms_norm_eps", "attention_head_dim": "head_dim"},
    fixed={
        "mlp_hidden_act": (None, "relu2"),
        "mamba_hidden_act": (None, "silu"),
        "mamba_proj_bias": (None, False),
        "mlp_bias": (None, False),
        "use_bias": (None, False),
        "use_conv_bias": (None, True),
        "sliding_window": (None,),
    },
    reads=frozenset(
        {"hybrid_override_pattern", "layers_block_type", "mtp_layers_block_type", "mtp_hybrid_override_pattern"}
    )
    | {"conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim", "expand", "chunk_size"}
    | {"n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"}
    | {"moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "norm_topk_prob", "routed_scaling_factor"}
    | {"moe_latent_size", "num_nextn_predict_layers", "rescale_prenorm_residual", "residual_in_fp32", "time_step_limit"}
    | {"time_step_min", "time_step_max", "time_step_floor", "use_mamba_kernels", "num_logits_to_keep"},
    attention={},
    norms={"norm.weight": "attn_norm.weight"},
    dense={},
    optional={f"mixer.{theirs}": ours for theirs, ours in _MIXERS.items()},
    special=_experts,
    nextn=_nextn_blocks,
    interleaved=True,  # which without positions changes nothing; llama.cpp's converter does it
    changed=_changed,
    check=_check,
    keys=_keys,
    instead=_with_experts,
)
MOE = replace(NEMOTRON, name="nemotron_h_moe")
RECIPES = (NEMOTRON,)
