"""Tiny checkpoints of Hugging Face with random weights, for every architecture that can be converted; without torch.

A case is a config.json and a table of names and shapes. Transformers loads the folders without a missing or an unknown
tensor (tests/exporters/test_chain.py), so the tables are right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write_safetensors

from edgeinfer.exporters.gguf.writer import Tensor, write_gguf
from edgeinfer.exporters.source import Source, SourceTensor
from edgeinfer.models.formats import quantize
from edgeinfer.models.gguf import GGMLType

Shapes = dict[str, tuple[int, ...]]
Stored = dict[str, tuple[str, np.ndarray]]
Change = Callable[[Stored], Stored]

N_VOCAB, N_EMBD, N_FF, HEADS, KV_HEADS, HEAD_DIM, N_CTX = 64, 32, 48, 4, 2, 8, 64
N_EXPERTS, N_FF_EXPERT, N_FF_SHARED = 4, 16, 24
GATED = ("gate_proj", "up_proj", "down_proj")
MTP_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
COMMON = {
    "vocab_size": N_VOCAB,
    "hidden_size": N_EMBD,
    "intermediate_size": N_FF,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": N_CTX,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_bias": False,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# Whose ramp goes from pair 0.54 to pair 2.55, and without the base, as transformers 4 wrote it.
FRACTIONS = {**YARN, "original_max_position_embeddings": 512, "truncate": False}
OLD_FRACTIONS = {key: value for key, value in FRACTIONS.items() if key != "rope_theta"}


@dataclass(frozen=True)
class Case:
    """A kind of checkpoint."""

    architecture: str
    model_type: str
    config: dict[str, Any]  # beyond COMMON
    shapes: Callable[[dict[str, Any]], Shapes]  # of all tensors
    norm_shift: float = 0.0  # what it adds to norms

    def full_config(self) -> dict[str, Any]:
        """What config.json says."""
        return {**COMMON, "architectures": [self.architecture], "model_type": self.model_type, **self.config}


# ---- Names and shapes ------------------------------------------------------------------------------------------------


def attention(config: dict[str, Any], biases: str = "", whole_norms: bool = False, norms: bool = False) -> Shapes:
    """Of a layer. biases: of which of q, k, v and o."""
    head_dim = config.get("head_dim", N_EMBD // HEADS)
    n_q, n_kv = HEADS * head_dim, KV_HEADS * head_dim
    found: Shapes = {}
    for name, n in (("q", n_q), ("k", n_kv), ("v", n_kv)):
        found[f"self_attn.{name}_proj.weight"] = (n, N_EMBD)
        if name in biases:
            found[f"self_attn.{name}_proj.bias"] = (n,)
    found["self_attn.o_proj.weight"] = (N_EMBD, n_q)
    if "o" in biases:
        found["self_attn.o_proj.bias"] = (N_EMBD,)
    if norms or whole_norms:
        found["self_attn.q_norm.weight"] = (n_q if whole_norms else head_dim,)
        found["self_attn.k_norm.weight"] = (n_kv if whole_norms else head_dim,)
    return found


def norms(*names: str) -> Shapes:
    return {f"{name}.weight": (N_EMBD,) for name in names or ("input_layernorm", "post_attention_layernorm")}


def network(module: str = "mlp", n_ff: int = N_FF, names: tuple[str, ...] = GATED) -> Shapes:
    shapes = ((n_ff, N_EMBD), (n_ff, N_EMBD), (N_EMBD, n_ff))
    return {f"{module}.{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def experts(module: str = "mlp.experts", n_ff: int = N_FF_EXPERT, **names: Any) -> Shapes:
    return {name: shape for n in range(N_EXPERTS) for name, shape in network(f"{module}.{n}", n_ff, **names).items()}


def router(name: str = "mlp.gate") -> Shapes:
    return {f"{name}.weight": (N_EXPERTS, N_EMBD)}


def model(config: dict[str, Any], layer: Callable[[int], Shapes]) -> Shapes:
    """Of a whole model."""
    found: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], N_EMBD), "model.norm.weight": (N_EMBD,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], N_EMBD)
    for n in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{n}.{name}": shape for name, shape in layer(n).items()}
    return found


def llama(config: dict[str, Any]) -> Shapes:
    biases = "qkvo" if config["attention_bias"] else ""
    return model(config, lambda _: attention(config, biases) | norms() | network())


def mixtral(config: dict[str, Any]) -> Shapes:
    of_experts = experts("block_sparse_moe.experts", N_FF, names=("w1", "w3", "w2"))
    return model(config, lambda _: attention(config) | norms() | router("block_sparse_moe.gate") | of_experts)


def qwen2(config: dict[str, Any]) -> Shapes:
    return model(config, lambda _: attention(config, "qkv") | norms() | network())


def qwen3(config: dict[str, Any]) -> Shapes:
    return model(config, lambda _: attention(config, norms=True) | norms() | network())


def qwen2moe(config: dict[str, Any]) -> Shapes:
    shared = network("mlp.shared_expert", N_FF_SHARED) | {"mlp.shared_expert_gate.weight": (1, N_EMBD)}
    return model(config, lambda _: attention(config, "qkv") | norms() | router() | experts() | shared)


def qwen3moe(config: dict[str, Any]) -> Shapes:
    return model(config, lambda _: attention(config, norms=True) | norms() | router() | experts())


def olmoe(config: dict[str, Any]) -> Shapes:
    of_experts = experts(n_ff=N_FF)
    return model(config, lambda _: attention(config, whole_norms=True) | norms() | router() | of_experts)


def granitemoe(config: dict[str, Any]) -> Shapes:
    n_shared = config.get("shared_intermediate_size", 0)
    found: Shapes = {}
    if config.get("num_local_experts"):
        found |= router("block_sparse_moe.router.layer")
        found["block_sparse_moe.input_linear.weight"] = (N_EXPERTS, 2 * N_FF, N_EMBD)
        found["block_sparse_moe.output_linear.weight"] = (N_EXPERTS, N_EMBD, N_FF)
    if n_shared:
        found["shared_mlp.input_linear.weight"] = (2 * n_shared, N_EMBD)
        found["shared_mlp.output_linear.weight"] = (N_EMBD, n_shared)
    return model(config, lambda _: attention(config) | norms() | found)


def gemma(with_qk_norms: bool) -> Callable[[dict[str, Any]], Shapes]:
    four = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return lambda config: model(config, lambda _: attention(config, norms=with_qk_norms) | norms(*four) | network())


def gemma4(config: dict[str, Any]) -> Shapes:
    config = {**config, **config.get("text_config", {})}
    front = "model.language_model." if "text_config" in config else "model."
    n_layers, n_inputs = config["num_hidden_layers"], config["hidden_size_per_layer_input"]
    n_own = n_layers - config["num_kv_shared_layers"]
    overridden = config.get("per_layer_config", {})

    def layer(n: int) -> Shapes:
        is_full = config["layer_types"][n] == FULL
        own = overridden.get(str(n), {})
        head_dim = own.get("head_dim", config.get("global_head_dim")) if is_full else HEAD_DIM
        n_kv_heads = own.get("num_key_value_heads", config.get("num_global_key_value_heads") or KV_HEADS)
        n_kv = (n_kv_heads if is_full else KV_HEADS) * head_dim
        four = ("input_layernorm", "post_attention_layernorm")
        four += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        found = norms(*four) | {
            "layer_scalar": (1,),
            "self_attn.q_proj.weight": (HEADS * head_dim, N_EMBD),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (N_EMBD, HEADS * head_dim),
        }
        if n < n_own:
            found |= {"self_attn.k_proj.weight": (n_kv, N_EMBD), "self_attn.k_norm.weight": (head_dim,)}
            if not (is_full and config["attention_k_eq_v"]):
                found["self_attn.v_proj.weight"] = (n_kv, N_EMBD)
        if n_inputs:
            found |= {
                "per_layer_input_gate.weight": (n_inputs, N_EMBD),
                "per_layer_projection.weight": (N_EMBD, n_inputs),
                **norms("post_per_layer_input_norm"),
            }
        if config.get("enable_moe_block"):
            found |= norms(
                "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
            )
            found |= router("router.proj") | {"router.scale": (N_EMBD,), "router.per_expert_scale": (N_EXPERTS,)}
            found["experts.gate_up_proj"] = (N_EXPERTS, 2 * N_FF_EXPERT, N_EMBD)
            found["experts.down_proj"] = (N_EXPERTS, N_EMBD, N_FF_EXPERT)
        return found | network(n_ff=N_FF * (1 + (config["use_double_wide_mlp"] and n >= n_own)))

    found = {name.replace("model.", front, 1): shape for name, shape in model(config, layer).items()}
    if n_inputs:
        found[f"{front}embed_tokens_per_layer.weight"] = (config["vocab_size_per_layer_input"], n_layers * n_inputs)
        found[f"{front}per_layer_model_projection.weight"] = (n_layers * n_inputs, N_EMBD)
        found[f"{front}per_layer_projection_norm.weight"] = (n_inputs,)
    return found


def phi3(config: dict[str, Any]) -> Shapes:
    layer: Shapes = {
        "self_attn.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * N_EMBD // HEADS, N_EMBD),
        "self_attn.o_proj.weight": (N_EMBD, N_EMBD),
        "mlp.gate_up_proj.weight": (2 * N_FF, N_EMBD),
        "mlp.down_proj.weight": (N_EMBD, N_FF),
    }
    return model(config, lambda _: layer | norms())


def olmo2(config: dict[str, Any]) -> Shapes:
    after = norms("post_attention_layernorm", "post_feedforward_layernorm")
    return model(config, lambda _: attention(config, whole_norms=True) | after | network())


def exaone4(config: dict[str, Any]) -> Shapes:
    after = norms("post_attention_layernorm", "post_feedforward_layernorm")
    return model(config, lambda _: attention(config, norms=True) | after | network())


def glm4(config: dict[str, Any]) -> Shapes:
    four = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    both: Shapes = {"mlp.gate_up_proj.weight": (2 * N_FF, N_EMBD), "mlp.down_proj.weight": (N_EMBD, N_FF)}
    return model(config, lambda _: attention(config, "qkv") | norms(*four) | both)


def glm4moe(config: dict[str, Any]) -> Shapes:
    more = router() | experts() | network("mlp.shared_experts", N_FF_EXPERT)
    more["mlp.gate.e_score_correction_bias"] = (N_EXPERTS,)
    return model(
        config,
        lambda n: attention(config, norms=config["use_qk_norm"]) | norms() | (more if n else network()),
    )


def gpt_oss(config: dict[str, Any]) -> Shapes:
    n_ff = config["intermediate_size"]
    layer = attention(config, "qkvo") | norms() | router("mlp.router")
    layer |= {
        "self_attn.sinks": (HEADS,),
        "mlp.router.bias": (N_EXPERTS,),
        "mlp.experts.gate_up_proj_bias": (N_EXPERTS, 2 * n_ff),
        "mlp.experts.down_proj_bias": (N_EXPERTS, N_EMBD),
    }
    sizes = {"gate_up_proj": (2 * n_ff, N_EMBD), "down_proj": (N_EMBD, n_ff)}
    for name, (n_out, n_in) in sizes.items():
        if "quantization_config" in config:
            layer[f"mlp.experts.{name}_blocks"] = (N_EXPERTS, n_out, n_in // 32, 16)
            layer[f"mlp.experts.{name}_scales"] = (N_EXPERTS, n_out, n_in // 32)
        else:
            layer[f"mlp.experts.{name}"] = (N_EXPERTS, n_in, n_out)
    return model(config, lambda _: layer)


def ernie(config: dict[str, Any]) -> Shapes:
    more = router() | experts(n_ff=12) | network("mlp.shared_experts", 24)
    more["mlp.moe_statics.e_score_correction_bias"] = (1, N_EXPERTS)
    first, step = config["moe_layer_start_index"], config["moe_layer_interval"]

    def layer(n: int) -> Shapes:
        return attention(config) | norms() | (more if n >= first and (n + 1) % step == 0 else network())

    return model(config, layer)


def delta_net(config: dict[str, Any]) -> Shapes:
    """Of a recurrent layer of Qwen, as its newer models have it."""
    heads, n_values, n_state = (config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "key_head_dim"))
    n_k, n_v, prefix = heads * n_state, n_values * n_state, "linear_attn."
    return {
        f"{prefix}in_proj_qkv.weight": (2 * n_k + n_v, N_EMBD),
        f"{prefix}in_proj_z.weight": (n_v, N_EMBD),
        f"{prefix}in_proj_b.weight": (n_values, N_EMBD),
        f"{prefix}in_proj_a.weight": (n_values, N_EMBD),
        f"{prefix}conv1d.weight": (2 * n_k + n_v, 1, config["linear_conv_kernel_dim"]),
        f"{prefix}A_log": (n_values,),
        f"{prefix}dt_bias": (n_values,),
        f"{prefix}norm.weight": (n_state,),
        f"{prefix}out_proj.weight": (N_EMBD, n_v),
    }


def fused_delta_net(config: dict[str, Any]) -> Shapes:
    """The same of Qwen3-Next, with matrices joined."""
    found, prefix = delta_net(config), "linear_attn."
    joined = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
    for name, parts in joined.items():
        found[f"{prefix}{name}.weight"] = (sum(found.pop(f"{prefix}{part}.weight")[0] for part in parts), N_EMBD)
    return found


def qwen_hybrid(recurrence: Callable[[dict[str, Any]], Shapes]) -> Callable[[dict[str, Any]], Shapes]:
    """Of a whole model, with the block that drafts where config.json names one."""

    def shapes(config: dict[str, Any]) -> Shapes:
        config = {**config, **config.get("text_config", {})}
        front = "model.language_model." if "text_config" in config else "model."
        ffn = network()
        if "num_experts" in config:
            ffn = router() | experts() | network("mlp.shared_expert", N_FF_SHARED)
            ffn["mlp.shared_expert_gate.weight"] = (1, N_EMBD)
        full = attention(config, norms=True)
        full["self_attn.q_proj.weight"] = (2 * HEADS * config["head_dim"], N_EMBD)
        kinds = hybrid_kinds(config)
        found = model(config, lambda n: (full if kinds[n] == FULL else recurrence(config)) | norms() | ffn)
        found = {name.replace("model.", front, 1): shape for name, shape in found.items()}
        if "text_config" in config:
            found["model.visual.patch_embed.proj.weight"] = (8, 3)
        if config.get("mtp_num_hidden_layers"):
            found |= {f"mtp.layers.0.{name}": shape for name, shape in (full | norms() | ffn).items()}
            found |= {f"mtp.{name}": shape for name, shape in norms(*MTP_NORMS).items()}
            found["mtp.fc.weight"] = (N_EMBD, 2 * N_EMBD)
        return found

    return shapes


def hybrid_kinds(config: dict[str, Any]) -> list[str]:
    """Of the layers, where config.json does not say them by itself: every fourth has attention."""
    n_layers = config["num_hidden_layers"]
    return config.get("layer_types") or [FULL if layer % 4 == 3 else "linear_attention" for layer in range(n_layers)]


def lfm2(config: dict[str, Any]) -> Shapes:
    head_dim, attends = N_EMBD // HEADS, config.get("full_attn_idxs", [])
    kinds = config.get("layer_types") or [FULL if n in attends else "conv" for n in range(config["num_hidden_layers"])]
    full = {
        **{name.replace("o_proj", "out_proj"): shape for name, shape in attention(config).items()},
        "self_attn.q_layernorm.weight": (head_dim,),
        "self_attn.k_layernorm.weight": (head_dim,),
    }
    convolution: Shapes = {
        "conv.in_proj.weight": (3 * N_EMBD, N_EMBD),
        "conv.conv.weight": (N_EMBD, 1, config["conv_L_cache"]),
        "conv.out_proj.weight": (N_EMBD, N_EMBD),
    }
    names = ("w1", "w3", "w2")
    of_experts = router("feed_forward.gate") | experts("feed_forward.experts", names=names)
    of_experts["feed_forward.expert_bias"] = (N_EXPERTS,)

    def layer(n: int) -> Shapes:
        ffn = of_experts if n >= config.get("num_dense_layers", n + 1) else network("feed_forward", N_FF, names)
        return (full if kinds[n] == FULL else convolution) | norms("operator_norm", "ffn_norm") | ffn

    found = model(config, layer)
    return {name.replace("model.norm.", "model.embedding_norm."): shape for name, shape in found.items()}


def laguna(config: dict[str, Any]) -> Shapes:
    more = router() | experts() | network("mlp.shared_expert", N_FF_SHARED)
    more["mlp.experts.e_score_correction_bias"] = (N_EXPERTS,)

    def layer(n: int) -> Shapes:
        n_heads = config["num_attention_heads_per_layer"][n]
        n_q = n_heads * HEAD_DIM
        of_layer = attention(config, norms=True) | norms()
        of_layer["self_attn.q_proj.weight"], of_layer["self_attn.o_proj.weight"] = (n_q, N_EMBD), (N_EMBD, n_q)
        of_layer["self_attn.g_proj.weight"] = (n_q if config["gating"] == "per-element" else n_heads, N_EMBD)
        return of_layer | (network() if config["mlp_layer_types"][n] == "dense" else more)

    return model(config, layer)


def muse_glimmer(config: dict[str, Any]) -> Shapes:
    """Its language model, beside one tensor of another part."""
    config = {**config, **config["text_config"]}
    four = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    gate: Shapes = {"self_attn.gate_proj.weight": (HEADS * HEAD_DIM, N_EMBD)}
    found = model(config, lambda _: attention(config) | gate | norms(*four) | network())
    return {name.replace("model.", "model.language_model.", 1): shape for name, shape in found.items()}


def deepseek(config: dict[str, Any]) -> Shapes:
    """With the block behind the layers that config.json names, in GLM."""
    latent, turned, plain, value = (
        config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    n_q, n_latent = HEADS * (plain + turned), config["q_lora_rank"]
    queries: Shapes = {"self_attn.q_proj.weight": (n_q, N_EMBD)}
    if n_latent:
        queries = {"self_attn.q_a_proj.weight": (n_latent, N_EMBD), "self_attn.q_a_layernorm.weight": (n_latent,)}
        queries |= {"self_attn.q_b_proj.weight": (n_q, n_latent)}
    attends = queries | {
        "self_attn.kv_a_proj_with_mqa.weight": (latent + turned, N_EMBD),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (HEADS * (plain + value), latent),
        "self_attn.o_proj.weight": (N_EMBD, HEADS * value),
    }
    more = router() | experts() | network("mlp.shared_experts", N_FF_EXPERT)
    if config["model_type"] != "deepseek_v2":
        more["mlp.gate.e_score_correction_bias"] = (N_EXPERTS,)
    found = model(config, lambda n: attends | norms() | (more if n else network()))
    if config.get("num_nextn_predict_layers"):
        block = attends | norms("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm")
        block |= {**more, "eh_proj.weight": (N_EMBD, 2 * N_EMBD)}
        n = config["num_hidden_layers"]
        found |= {f"model.layers.{n}.{name}": shape for name, shape in block.items()}
    return found


def mamba(module: str, heads: int, head_dim: int, n_groups: int, n_state: int) -> Shapes:
    """Of Mamba2."""
    n_inner, n_channels = heads * head_dim, heads * head_dim + 2 * n_groups * n_state
    return {
        f"{module}.in_proj.weight": (n_inner + n_channels + heads, N_EMBD),
        f"{module}.conv1d.weight": (n_channels, 1, 4),
        f"{module}.conv1d.bias": (n_channels,),
        f"{module}.dt_bias": (heads,),
        f"{module}.A_log": (heads,),
        f"{module}.D": (heads,),
        f"{module}.norm.weight": (n_inner,),
        f"{module}.out_proj.weight": (N_EMBD, n_inner),
    }


def granite_hybrid(config: dict[str, Any]) -> Shapes:
    both = granitemoe({**config, "num_hidden_layers": 1})
    front = "model.layers.0."
    of_layer = {name.removeprefix(front): shape for name, shape in both.items() if name.startswith(front)}
    others = {name: shape for name, shape in of_layer.items() if "self_attn" not in name}
    sizes = (config[f"mamba_{key}"] for key in ("n_heads", "d_head", "n_groups", "d_state"))
    recurrence = mamba("mamba", *sizes)
    return model(config, lambda n: (recurrence if config["layer_types"][n] == "mamba" else attention(config)) | others)


def falcon_h1(config: dict[str, Any]) -> Shapes:
    sizes = (config[f"mamba_{key}"] for key in ("n_heads", "d_head", "n_groups", "d_state"))
    layer = attention(config) | mamba("mamba", *sizes) | network("feed_forward")
    found = model(config, lambda _: layer | norms("input_layernorm", "pre_ff_layernorm"))
    return {name.replace("model.norm.", "model.final_layernorm."): shape for name, shape in found.items()}


def nemotron_h(config: dict[str, Any]) -> Shapes:
    """Of a whole model, by the names of NVIDIA's files."""
    sizes = (config[key] for key in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"))
    attends = attention(config)
    kinds: dict[str, Shapes] = {
        "M": mamba("mixer", *sizes),
        "*": {name.replace("self_attn", "mixer"): shape for name, shape in attends.items()},
        "-": {"mixer.up_proj.weight": (N_FF, N_EMBD), "mixer.down_proj.weight": (N_EMBD, N_FF)},
        "E": router("mixer.gate") | {"mixer.gate.e_score_correction_bias": (N_EXPERTS,)},
    }
    networks = {**{f"experts.{n}": N_FF_EXPERT for n in range(N_EXPERTS)}, "shared_experts": N_FF_SHARED}
    n_latent = config.get("moe_latent_size")
    for module, n_ff in networks.items():
        n_in = n_latent if n_latent and module != "shared_experts" else N_EMBD
        kinds["E"] |= {f"mixer.{module}.up_proj.weight": (n_ff, n_in)}
        kinds["E"] |= {f"mixer.{module}.down_proj.weight": (n_in, n_ff)}
    if n_latent:
        kinds["E"] |= {"mixer.fc1_latent_proj.weight": (n_latent, N_EMBD)}
        kinds["E"] |= {"mixer.fc2_latent_proj.weight": (N_EMBD, n_latent)}
    found = model(config, lambda n: kinds[config["hybrid_override_pattern"][n]] | {"norm.weight": (N_EMBD,)})
    found["backbone.embeddings.weight"] = found.pop("model.embed_tokens.weight")
    found["backbone.norm_f.weight"] = found.pop("model.norm.weight")
    found = {name.replace("model.layers.", "backbone.layers."): shape for name, shape in found.items()}
    if config.get("num_nextn_predict_layers"):
        drafting = {f"0.{norm}.weight": (N_EMBD,) for norm in ("enorm", "hnorm", "norm")}
        drafting |= {"1.norm.weight": (N_EMBD,), "1.final_layernorm.weight": (N_EMBD,)}
        drafting["0.eh_proj.weight"] = (N_EMBD, 2 * N_EMBD)
        drafting |= {f"{i}.{name}": shape for i, kind in enumerate("*E") for name, shape in kinds[kind].items()}
        found |= {f"mtp.layers.{name}": shape for name, shape in drafting.items()}
    return found


# ---- Cases -----------------------------------------------------------------------------------------------------------

QWEN_MOE = {"num_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": N_FF_EXPERT}
MOE = {"num_local_experts": N_EXPERTS, "num_experts_per_tok": 2}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0}
GEMMA = {
    **{"tie_word_embeddings": True, "head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM, "sliding_window": 6},
    **{"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"},
}
WINDOW, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    **{key: value for key, value in GEMMA.items() if key != "query_pre_attn_scalar"},
    **{"num_hidden_layers": 6, "layer_types": [WINDOW, WINDOW, FULL] * 2, "global_head_dim": 16},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": N_VOCAB, "num_kv_shared_layers": 0},
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_double_wide_mlp": False},
    **{"final_logit_softcapping": 2.0, "enable_moe_block": False, "num_experts": None, "top_k_experts": None},
    "rope_parameters": {
        WINDOW: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000.0},
    },
}
NEMOTRON = {
    **{
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "head_dim": 16,
    },
    **{"conv_kernel": 4, "layer_norm_epsilon": 1e-5, "rms_norm_eps": None, "hidden_act": None, "expand": 2},
    **{"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "time_step_min": 1e-9},
}
NEMOTRON_MOE = {
    **{**NEMOTRON, "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "n_routed_experts": N_EXPERTS},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": N_FF_EXPERT, "routed_scaling_factor": 2.5},
    **{"moe_shared_expert_intermediate_size": N_FF_SHARED, "n_shared_experts": 1, "norm_topk_prob": True},
    **{"n_group": 1, "topk_group": 1},
}
GRANITE_HYBRID = {
    **{**GRANITE, "shared_intermediate_size": 20, "position_embedding_type": "nope", "num_hidden_layers": 3},
    **{"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 16},
    **{"mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 16, "mamba_expand": 2},
}
QWEN_HYBRID = {
    **{"num_hidden_layers": 4, "head_dim": 16, "layer_types": ["linear_attention"] * 3 + [FULL]},
    # three value heads for each key head, so that their order shows
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        **{"mrope_section": [1, 1, 0], "mrope_interleaved": True},
    },
}
QWEN_HYBRID_MOE = {**QWEN_HYBRID, **QWEN_MOE, "shared_expert_intermediate_size": N_FF_SHARED}
LFM2 = {
    **{"num_hidden_layers": 4, "layer_types": ["conv", FULL, "conv", "conv"], "conv_L_cache": 3},
    **{"norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": PLAIN},
}
LATENTS = {
    **{"n_routed_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": N_FF_EXPERT},
    **{"n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 16, "qk_nope_head_dim": 12},
    **{"v_head_dim": 16, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "rope_interleave": True},
    # transformers takes 1e-6 for the norms of latents, whatever the others have
    **{"rms_norm_eps": 1e-6, "num_key_value_heads": HEADS, "rope_parameters": PLAIN},
}
CASES = {
    "llama": Case("LlamaForCausalLM", "llama", {"rope_parameters": LLAMA3, "head_dim": HEAD_DIM}, llama),
    "llama_with_biases": Case(
        *("LlamaForCausalLM", "llama"),
        # as transformers 4 wrote it
        {"attention_bias": True, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        llama,
    ),
    "mistral": Case("MistralForCausalLM", "mistral", {"sliding_window": None, "rope_parameters": PLAIN}, llama),
    "mixtral": Case("MixtralForCausalLM", "mixtral", {**MOE, "rope_parameters": PLAIN}, mixtral),
    "qwen2": Case("Qwen2ForCausalLM", "qwen2", {"rope_parameters": YARN, "use_sliding_window": False}, qwen2),
    "qwen3": Case("Qwen3ForCausalLM", "qwen3", {"head_dim": 16, "rope_parameters": PLAIN}, qwen3),
    "qwen2moe": Case(
        *("Qwen2MoeForCausalLM", "qwen2_moe"),
        {**QWEN_MOE, "shared_expert_intermediate_size": N_FF_SHARED, "rope_parameters": PLAIN},
        qwen2moe,
    ),
    "qwen3moe": Case(
        *("Qwen3MoeForCausalLM", "qwen3_moe"),
        {**QWEN_MOE, "norm_topk_prob": True, "head_dim": HEAD_DIM, "rope_parameters": PLAIN},
        qwen3moe,
    ),
    "olmoe": Case(
        "OlmoeForCausalLM",
        "olmoe",
        {"num_experts": N_EXPERTS, "num_experts_per_tok": 2, "rope_parameters": PLAIN},
        olmoe,
    ),
    "granite": Case("GraniteForCausalLM", "granite", {**GRANITE, "rope_parameters": PLAIN}, llama),
    "granitehybrid": Case(
        *("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
        {
            **GRANITE,
            **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": N_FF},
            **{"layer_types": ["attention"] * 2, "position_embedding_type": "rope", "rope_parameters": PLAIN},
            **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 8},
            "mamba_d_conv": 4,
        },
        granitemoe,
    ),
    "granitemoe": Case("GraniteMoeForCausalLM", "granitemoe", {**GRANITE, **MOE, "rope_parameters": PLAIN}, granitemoe),
    "granitemoeshared": Case(
        *("GraniteMoeSharedForCausalLM", "granitemoeshared"),
        {**GRANITE, **MOE, "shared_intermediate_size": N_FF_SHARED, "rope_parameters": PLAIN},
        granitemoe,
    ),
    "gemma2": Case(
        *("Gemma2ForCausalLM", "gemma2"),
        {
            **GEMMA,
            **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
            **{"layer_types": [WINDOW, FULL], "rope_parameters": PLAIN},
        },
        gemma(False),
        norm_shift=1.0,
    ),
    "gemma3": Case(
        *("Gemma3ForCausalLM", "gemma3_text"),
        {
            **GEMMA,
            **{"num_hidden_layers": 6, "layer_types": [WINDOW] * 5 + [FULL]},
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                WINDOW: {"rope_type": "default", "rope_theta": 1e3},
            },
        },
        gemma(True),
        norm_shift=1.0,
    ),
    "phi3": Case(
        *("Phi3ForCausalLM", "phi3"),
        {
            **{"original_max_position_embeddings": 32, "sliding_window": None},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 32},
                **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]},
            },
        },
        phi3,
    ),
    "smollm3": Case(
        *("SmolLM3ForCausalLM", "smollm3"),
        {
            **{"num_hidden_layers": 4, "tie_word_embeddings": True, "no_rope_layers": [1, 1, 1, 0]},
            "rope_parameters": PLAIN,
        },
        llama,
    ),
    "olmo2": Case("Olmo2ForCausalLM", "olmo2", {"rope_parameters": PLAIN}, olmo2),
    "olmo3": Case(
        *("Olmo3ForCausalLM", "olmo3"),
        {
            **{"num_hidden_layers": 4, "sliding_window": 6, "layer_types": [WINDOW] * 3 + [FULL]},
            "rope_parameters": {FULL: YARN, WINDOW: {"rope_type": "default", "rope_theta": 1000.0}},
        },
        olmo2,
    ),
    "ministral3": Case(
        *("Ministral3ForCausalLM", "ministral3"),
        {
            "head_dim": HEAD_DIM,
            "sliding_window": None,
            "rope_parameters": {
                **{**YARN, "original_max_position_embeddings": 8, "beta_fast": 32.0, "beta_slow": 1.0},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            },
        },
        llama,
    ),
    "exaone4": Case(
        *("Exaone4ForCausalLM", "exaone4"),
        {"sliding_window": None, "layer_types": [FULL] * 2, "rope_parameters": LLAMA3},
        exaone4,
    ),
    "glm4": Case(
        *("Glm4ForCausalLM", "glm4"),
        {
            **{"head_dim": HEAD_DIM, "attention_bias": True},
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        },
        glm4,
    ),
    "glm4moe": Case(
        *("Glm4MoeForCausalLM", "glm4_moe"),
        {
            **{"n_routed_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": N_FF_EXPERT},
            **{"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True},
            **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 0},
            **{"head_dim": HEAD_DIM, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        },
        glm4moe,
    ),
    "gpt_oss": Case(
        *("GptOssForCausalLM", "gpt_oss"),
        {
            **{**MOE, "head_dim": HEAD_DIM, "attention_bias": True, "sliding_window": 6},
            **{"layer_types": [WINDOW, FULL], "rope_parameters": {**YARN, "truncate": True}},
        },
        gpt_oss,
    ),
    "gpt_oss_mxfp4": Case(
        *("GptOssForCausalLM", "gpt_oss"),
        {
            **{**MOE, "head_dim": HEAD_DIM, "attention_bias": True, "sliding_window": 6, "intermediate_size": 64},
            **{"layer_types": [WINDOW, FULL], "rope_parameters": YARN},
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]},
        },
        gpt_oss,
    ),
    "ernie4_5_moe": Case(
        *("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
        {
            **{"tie_word_embeddings": True, "use_bias": False, "moe_num_experts": N_EXPERTS, "moe_k": 2},
            **{"moe_intermediate_size": 12, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
            **{"moe_layer_end_index": 1, "moe_layer_interval": 1, "rope_parameters": PLAIN},
        },
        ernie,
    ),
    "gemma4": Case("Gemma4ForCausalLM", "gemma4_text", GEMMA4, gemma4),
    "gemma4_small": Case(
        *("Gemma4ForCausalLM", "gemma4_text"),
        {
            **{**GEMMA4, "attention_k_eq_v": False, "num_global_key_value_heads": None, "num_kv_shared_layers": 3},
            **{"hidden_size_per_layer_input": 16, "use_double_wide_mlp": True},
        },
        gemma4,
    ),
    "gemma4_experts": Case(
        *("Gemma4ForCausalLM", "gemma4_text"),
        {
            **{**GEMMA4, "enable_moe_block": True, "num_experts": N_EXPERTS, "top_k_experts": 2},
            "moe_intermediate_size": N_FF_EXPERT,
        },
        gemma4,
    ),
    "granitehybrid_mamba": Case(
        *("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
        {**GRANITE_HYBRID, "intermediate_size": 20, "num_local_experts": 0, "num_experts_per_tok": 0},
        granite_hybrid,
    ),
    "granitehybrid_experts": Case(
        *("GraniteMoeHybridForCausalLM", "granitemoehybrid", {**GRANITE_HYBRID, **MOE}), granite_hybrid
    ),
    "nemotron_h": Case(
        *("NemotronHForCausalLM", "nemotron_h"),
        {**NEMOTRON, "hybrid_override_pattern": "M-*M-", "num_hidden_layers": 5},
        nemotron_h,
    ),
    "nemotron_h_moe": Case(*("NemotronHForCausalLM", "nemotron_h"), NEMOTRON_MOE, nemotron_h),
    "nemotron_h_moe_latent": Case(
        *("NemotronHForCausalLM", "nemotron_h"),
        {**NEMOTRON_MOE, "moe_latent_size": 48, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
        nemotron_h,
    ),
    "falcon_h1": Case(
        *("FalconH1ForCausalLM", "falcon_h1"),
        {
            **{"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16},
            **{"mamba_d_conv": 4, "mamba_chunk_size": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
            **{"embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "attention_in_multiplier": 0.9, "head_dim": 16},
            **{
                "attention_out_multiplier": 0.8,
                "key_multiplier": 0.7,
                "ssm_in_multiplier": 1.1,
                "rope_parameters": PLAIN,
            },
            **{"ssm_out_multiplier": 0.6, "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "mlp_multipliers": [0.9, 0.4]},
            **{"projectors_bias": False, "rope_parameters": PLAIN},
        },
        falcon_h1,
    ),
    "qwen35": Case(
        *("Qwen3_5ForCausalLM", "qwen3_5_text", {**QWEN_HYBRID, "output_gate_type": "swish"}),
        qwen_hybrid(delta_net),
        norm_shift=1.0,
    ),
    "qwen35moe": Case(
        *("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", QWEN_HYBRID_MOE), qwen_hybrid(delta_net), norm_shift=1.0
    ),
    "qwen3next": Case(
        *("Qwen3NextForCausalLM", "qwen3_next"),
        {**QWEN_HYBRID_MOE, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        qwen_hybrid(fused_delta_net),
        norm_shift=1.0,
    ),
    "laguna": Case(
        *("LagunaForCausalLM", "laguna"),
        {
            **{**QWEN_MOE, "num_hidden_layers": 4, "head_dim": HEAD_DIM, "layer_types": [FULL, *[WINDOW] * 3]},
            **{"shared_expert_intermediate_size": N_FF_SHARED, "moe_routed_scaling_factor": 2.5, "sliding_window": 6},
            **{"num_attention_heads_per_layer": [HEADS, 6, 6, 6], "mlp_layer_types": ["dense", *["sparse"] * 3]},
            "gating": True,
            "rope_parameters": {
                FULL: {**YARN, "partial_rotary_factor": 0.5},
                WINDOW: {**PLAIN, "partial_rotary_factor": 1.0},
            },
        },
        laguna,
    ),
    "muse_glimmer": Case(
        *("MuseGlimmerForConditionalGeneration", "muse_glimmer"),
        {
            "text_config": {
                **{**COMMON, "model_type": "muse_glimmer_text", "num_hidden_layers": 4, "head_dim": HEAD_DIM},
                **{"hidden_activation": "silu", "layer_types": [WINDOW, WINDOW, WINDOW, FULL], "sliding_window": 6},
                **{"layer_rope_theta": [1e4, 1e4, 1e4, 0], "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
                **{"qk_scale_factor": 3.87, "post_norm_eps": 1e-8, "rope_parameters": PLAIN},
            },
        },
        muse_glimmer,
        norm_shift=1.0,
    ),
    "deepseek2": Case(
        *("DeepseekV3ForCausalLM", "deepseek_v3"),
        {**LATENTS, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "scoring_func": "sigmoid"},
        deepseek,
    ),
    "deepseek2_lite": Case(
        *("DeepseekV2ForCausalLM", "deepseek_v2"),
        {
            **{**LATENTS, "first_k_dense_replace": 1, "q_lora_rank": None, "norm_topk_prob": False},
            **{"topk_method": "greedy", "scoring_func": "softmax"},
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        deepseek,
    ),
    "deepseek2_glm": Case(
        *("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
        {
            **{**LATENTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid"},
            **{"mlp_layer_types": ["dense", "sparse"], "num_nextn_predict_layers": 1},
        },
        deepseek,
    ),
    "lfm2": Case(
        *("Lfm2ForCausalLM", "lfm2"),
        # two thirds of 65 in multiples of 16
        {
            **{**LFM2, "block_ff_dim": 65, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0},
            "block_multiple_of": 16,
        },
        lfm2,
    ),
    "lfm2moe": Case(
        *("Lfm2MoeForCausalLM", "lfm2_moe"),
        {
            **{**LFM2, **QWEN_MOE, "num_dense_layers": 1, "norm_topk_prob": True, "use_expert_bias": True},
            "routed_scaling_factor": 1.0,
        },
        lfm2,
    ),
}


def _varied(name: str, *left_out: str, **config: Any) -> Case:
    kept = {key: value for key, value in CASES[name].config.items() if key not in left_out}
    return replace(CASES[name], config={**kept, **config})


def _with_images(name: str, architecture: str, model_type: str) -> Case:
    """The case as the language model of one that also sees, whose matrix of the output is that of the embeddings."""
    case = CASES[name]
    text = {**COMMON, **case.config, "model_type": case.model_type, "tie_word_embeddings": True}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": N_EMBD}
    config = {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, "image_token_id": 5}
    return replace(case, architecture=architecture, model_type=model_type, config=config)


# Other layers, windows and rotations, which make no other tensors.
VARIED = {
    "llama_dynamic": _varied("llama", rope_parameters={**PLAIN, "rope_type": "dynamic", "factor": 2.0}),
    "qwen2_attention_factor": _varied("qwen2", rope_parameters={**YARN, "attention_factor": 1.1386294}),
    "qwen2_tied": _varied("qwen2", tie_word_embeddings=True),
    "granitehybrid_nope": _varied("granitehybrid", position_embedding_type="nope"),
    "gemma2_27b": _varied("gemma2", num_hidden_layers=46, layer_types=[WINDOW, FULL] * 23, head_dim=16),
    "phi3_long": _varied(
        "phi3",
        original_max_position_embeddings=8,
        rope_parameters={**CASES["phi3"].config["rope_parameters"], "original_max_position_embeddings": 8},
    ),
    "exaone4_32b": _varied("exaone4", num_hidden_layers=64, sliding_window=6, layer_types=([WINDOW] * 3 + [FULL]) * 16),
    "glm4moe_groups": _varied("glm4moe", n_group=2, topk_group=1, norm_topk_prob=False, use_qk_norm=False),
    "gpt_oss_fractions": _varied("gpt_oss", rope_parameters=FRACTIONS),
    "gpt_oss_old_spelling": _varied("gpt_oss", rope_parameters=None, rope_theta=1e3, rope_scaling=OLD_FRACTIONS),
    "gpt_oss_usual_rotation": _varied("gpt_oss", rope_parameters=None),
    "qwen2_fractions": _varied("qwen2", rope_parameters=FRACTIONS),
    "ministral3_usual_rotation": _varied("ministral3", rope_parameters=None),
    # as transformers 4 spells it, and without the block that drafts
    "qwen35_old_spelling": _varied(
        *("qwen35", "rope_parameters", "layer_types", "mtp_num_hidden_layers"),
        **{"rope_theta": 1e3, "partial_rotary_factor": 0.5, "full_attention_interval": 4},
    ),
    "qwen35_as_many_heads": _varied("qwen35", linear_num_key_heads=3, linear_num_value_heads=3),
    "qwen35_kinds_lost": _varied("qwen35", "layer_types"),
    "qwen35_tied": _varied("qwen35", tie_word_embeddings=True),
    "qwen35_with_images": _with_images("qwen35", "Qwen3_5ForConditionalGeneration", "qwen3_5"),
    "qwen35moe_with_images": _with_images("qwen35moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    "laguna_per_element": _varied(
        "laguna",
        gating="per-element",
        num_attention_heads_per_layer=[HEADS] * 4,
        layer_types=[WINDOW, FULL, WINDOW, WINDOW],
    ),
    "laguna_sees_all": _varied("laguna", layer_types=[FULL] * 4),
    "deepseek2_by_best": _varied("deepseek2_lite", topk_method="group_limited_greedy", n_group=2, topk_group=1),
    "deepseek2_yarn": _varied("deepseek2", rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "gemma4_saved_again": _varied(
        *("gemma4", "global_head_dim", "num_global_key_value_heads"),
        per_layer_config={str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in (2, 5)},
    ),
    "lfm2_indices": _varied("lfm2", "layer_types", full_attn_idxs=[1]),
    "lfm2_as_it_is": _varied("lfm2", "block_ff_dim", block_auto_adjust_ff_dim=False, tie_word_embeddings=False),
    "ernie4_5_moe_steps": _varied("ernie4_5_moe", num_hidden_layers=4, moe_layer_interval=2, moe_layer_end_index=3),
}


def write(folder: Path, name: str, config: dict[str, Any] | None = None, change: Change = dict) -> None:
    """Write config.json and model.safetensors of a case. The same weights each time, on every machine.

    config: other values.  change: other tensors, of those by name, each (dtype, values).
    """
    case = (CASES | VARIED)[name]
    full = {**case.full_config(), **(config or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(full))
    write_safetensors(folder / "model.safetensors", change(dict(_weights(case, full))))


def _weights(case: Case, config: dict[str, Any]) -> Iterator[tuple[str, tuple[str, np.ndarray]]]:
    """Multiples of 1 / 1024, which F16 holds too; bytes of MXFP4."""
    rng = np.random.Generator(np.random.PCG64(7))
    for name, shape in case.shapes(config).items():
        if name.endswith("_blocks"):
            yield name, ("U8", rng.integers(0, 256, shape))
        elif name.endswith("_scales"):
            yield name, ("U8", rng.integers(122, 125, shape))
        else:
            codes = rng.integers(-255, 256, shape) / 1024
            one = 1.0 if "linear_attn.norm" in name else 1 - case.norm_shift
            yield name, ("F32", codes + one if "norm" in name else codes)


def to_gguf(source: Source, path: Path) -> None:
    """Write a source with all its tensors as F32, which the native engine multiplies without rounding activations."""
    tensors = [Tensor(each.name, GGMLType.F32, each.shape, partial(f32_pieces, each)) for each in source.tensors]
    write_gguf(path, source.metadata, tensors)


def f32_pieces(tensor: SourceTensor, step: int = 37) -> Iterator[np.ndarray]:
    """A tensor as F32, some rows at a time, as an export reads them."""
    for first in range(0, tensor.n_rows, step):
        yield quantize(GGMLType.F32, tensor.rows(first, min(first + step, tensor.n_rows)))


def stored_pieces(tensor: SourceTensor, step: int = 37) -> Iterator[np.ndarray]:
    """A tensor in its own type, as the checkpoint has it or made of its rows."""
    if tensor.stored is None:
        assert tensor.type == GGMLType.F32
        yield from f32_pieces(tensor, step)
        return
    for first in range(0, tensor.n_rows, step):
        yield tensor.stored(first, min(first + step, tensor.n_rows))
