"""Tiny checkpoints of assistants of Gemma 4, as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write_safetensors

N_VOCAB, N_EMBD, N_TARGET, N_FF, HEADS, HEAD_DIM, GLOBAL_HEAD_DIM = 96, 64, 96, 48, 4, 32, 64
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
TEXT: dict[str, Any] = {
    **{"model_type": "gemma4_text", "vocab_size": N_VOCAB, "hidden_size": N_EMBD, "intermediate_size": N_FF},
    **{"num_hidden_layers": len(KINDS), "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_DIM},
    **{"global_head_dim": GLOBAL_HEAD_DIM, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"layer_types": KINDS, "sliding_window": 9, "max_position_embeddings": 512, "rms_norm_eps": 1e-6},
    **{"num_kv_shared_layers": len(KINDS), "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    **{"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "final_logit_softcapping": None},
    **{"enable_moe_block": False, "use_double_wide_mlp": False},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e5},
    },
}
CASES: dict[str, dict[str, Any]] = {
    "whole": {"use_ordered_embeddings": False},
    "clusters": {"use_ordered_embeddings": True, "num_centroids": 24, "centroid_intermediate_top_k": 5},
}


def config_of(case: str, text: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """What config.json says. text, more: other values in text_config, and beside it."""
    return {
        **{"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"},
        **{"backbone_hidden_size": N_TARGET, "tie_word_embeddings": True},
        "text_config": {**TEXT, **(text or {})},
        **CASES[case],
        **more,
    }


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of all tensors that are floats."""
    n_vocab = config["text_config"]["vocab_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (n_vocab, N_EMBD),
        "model.norm.weight": (N_EMBD,),
        "pre_projection.weight": (N_EMBD, 2 * N_TARGET),
        "post_projection.weight": (N_TARGET, N_EMBD),
    }
    for layer, kind in enumerate(KINDS):
        head_dim = HEAD_DIM if kind == "sliding_attention" else GLOBAL_HEAD_DIM
        front = f"model.layers.{layer}."
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        found |= {f"{front}{name}_layernorm.weight": (N_EMBD,) for name in names}
        found |= {f"{front}mlp.{name}_proj.weight": (N_FF, N_EMBD) for name in ("gate", "up")}
        found |= {
            f"{front}mlp.down_proj.weight": (N_EMBD, N_FF),
            f"{front}layer_scalar": (1,),
            f"{front}self_attn.q_proj.weight": (HEADS * head_dim, N_EMBD),
            f"{front}self_attn.q_norm.weight": (head_dim,),
            f"{front}self_attn.o_proj.weight": (N_EMBD, HEADS * head_dim),
        }
    if config.get("use_ordered_embeddings"):
        found["masked_embedding.centroids.weight"] = (config["num_centroids"], N_EMBD)
    return found


def write_assistant(
    folder: Path,
    case: str,
    text: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[str, np.ndarray]] | None = None,
    **more: Any,
) -> Path:
    """Write config.json and model.safetensors, the same each time; gives the folder. tensors: others by name."""
    config = config_of(case, text, **more)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.Generator(np.random.PCG64(7))
    stored: dict[str, tuple[str, np.ndarray]] = {}
    for name, shape in shapes_of(config).items():  # multiples of 1 / 1024, which F16 holds too
        codes = rng.integers(-255, 256, shape) / 1024
        stored[name] = ("F32", codes + 1 if "norm" in name or "scalar" in name else codes)
    if config.get("use_ordered_embeddings"):
        stored["masked_embedding.token_ordering"] = ("I64", rng.permutation(config["text_config"]["vocab_size"]))
    write_safetensors(folder / "model.safetensors", {**stored, **(tensors or {})})
    return folder
