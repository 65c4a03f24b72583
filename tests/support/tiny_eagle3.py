"""Tiny EAGLE-3 checkpoints of Hugging Face with random weights, in the spellings in which they are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write_safetensors

from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile

N_VOCAB, N_LAYERS, N_EMBD, N_FF, N_HEADS, N_KV_HEADS, N_DRAFTED = 291, 6, 64, 96, 4, 2, 80
TARGET = {  # config.json of the model that they draft for
    **{"architectures": ["LlamaForCausalLM"], "vocab_size": N_VOCAB, "num_hidden_layers": N_LAYERS},
    **{"hidden_size": N_EMBD},
}
LAYER = {
    **{"hidden_size": N_EMBD, "intermediate_size": N_FF, "num_attention_heads": N_HEADS, "num_hidden_layers": 1},
    **{"num_key_value_heads": N_KV_HEADS, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    **{"vocab_size": N_VOCAB, "rope_theta": 10000.0, "tie_word_embeddings": False, "model_type": "llama"},
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@dataclass(frozen=True)
class Head:
    """A kind of checkpoint."""

    config: dict[str, Any] = field(default_factory=dict)  # beyond LAYER
    layer: str = "midlayer."  # what its tensors have in front, "midlayer." or "layers.0."
    has_ids: bool = True  # whether it drafts some of the tokens only
    has_embeddings: bool = False
    has_input_norm: bool = False


CASES = {
    "official": Head({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": N_DRAFTED}),
    "specforge": Head(
        {
            **{"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": N_DRAFTED, "max_window_layers": 4},
            **{"rope_scaling": LLAMA3, "use_sliding_window": False, "target_hidden_size": N_EMBD},
        },
        has_embeddings=True,
    ),
    "speculators": Head(
        {
            **{"architectures": ["Eagle3Speculator"], "draft_vocab_size": N_DRAFTED, "norm_before_residual": True},
            **{"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "speculators_model_type": "eagle3"},
            "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"]}},
        },
        layer="layers.0.",
    ),
    "whole_vocabulary": Head(
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": N_VOCAB, "norm_before_fc": True},
        has_ids=False,
        has_input_norm=True,
    ),
}


def write_head(
    folder: Path,
    name: str,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[str, np.ndarray] | None] | None = None,
    front: str = "",
) -> Path:
    """Write a case and give back its folder.

    config, tensors: others in place of those of the case, None takes one away.  front: of all names.
    """
    case = CASES[name]
    layer = {"transformer_layer_config": LAYER} if case.layer == "layers.0." else LAYER
    full = {**layer, **case.config, **(config or {})}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in full.items() if value is not None}))
    all_tensors = {key: ("F32", values) for key, values in weights(case).items()}
    all_tensors |= ids() if case.has_ids else {}
    kept = {front + key: each for key, each in {**all_tensors, **(tensors or {})}.items() if each is not None}
    write_safetensors(folder / "model.safetensors", kept)
    return folder


def ids() -> dict[str, tuple[str, np.ndarray]]:
    """d2t, what is to be added to the number of a row, and t2d, whether a token is drafted."""
    drafted = drafted_ids()
    return {
        "d2t": ("I64", drafted - np.arange(N_DRAFTED)),
        "t2d": ("BOOL", np.isin(np.arange(N_VOCAB), drafted)),
    }


def drafted_ids() -> np.ndarray:
    """Ids of the target, ascending."""
    return np.sort(np.random.Generator(np.random.PCG64(3)).permutation(N_VOCAB)[:N_DRAFTED])


def write_head_of_gguf(folder: Path, path: Path) -> Path:
    """A head of llama.cpp's form as the checkpoint that it could come from, and its folder."""
    with ModelFile.open(path) as file:
        found = {
            name: dequantize(i.type, file.data(name), i.shape) for name, i in file.tensors.items() if name != "d2t"
        }
        keys = {key.removeprefix("eagle3."): value for key, value in file.metadata.items()}
        drafted, n_vocab = file.data("d2t").view("<i8"), len(file.metadata["tokenizer.ggml.tokens"])
    n_embd, n_heads = keys["embedding_length"], keys["attention.head_count"]
    config = {
        **{**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(drafted)},
        **{"hidden_size": n_embd, "num_attention_heads": n_heads, "vocab_size": n_vocab},
        **{"intermediate_size": keys["feed_forward_length"], "num_key_value_heads": keys["attention.head_count_kv"]},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in keys["target_layers"]]},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {_NAMES[name]: ("F32", _halves(values, n_embd // n_heads, name)) for name, values in found.items()}
    tensors["d2t"] = "I64", drafted - np.arange(len(drafted))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _halves(values: np.ndarray, head_dim: int, name: str) -> np.ndarray:
    """Rows of queries and keys as Hugging Face has them: what is rotated together is half a head apart."""
    if "attn_q." not in name and "attn_k." not in name:
        return values
    return values.reshape(-1, head_dim // 2, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


_NAMES = {
    **{"fc.weight": "fc.weight", "output.weight": "lm_head.weight", "output_norm.weight": "norm.weight"},
    **{
        f"blk.0.{ours}.weight": f"midlayer.{theirs}.weight"
        for ours, theirs in {
            **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
            **{"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"},
            **{"ffn_down": "mlp.down_proj", "ffn_norm": "post_attention_layernorm"},
            **{"attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm"},
        }.items()
    },
}


def weights(case: Head) -> dict[str, np.ndarray]:
    """All floats by name: multiples of 1 / 1024, which F16 holds too."""
    n_kv, n_rows = N_EMBD // N_HEADS * N_KV_HEADS, N_DRAFTED if case.has_ids else N_VOCAB
    shapes: dict[str, tuple[int, ...]] = {
        f"{case.layer}self_attn.q_proj.weight": (N_EMBD, 2 * N_EMBD),
        f"{case.layer}self_attn.k_proj.weight": (n_kv, 2 * N_EMBD),
        f"{case.layer}self_attn.v_proj.weight": (n_kv, 2 * N_EMBD),
        f"{case.layer}self_attn.o_proj.weight": (N_EMBD, N_EMBD),
        f"{case.layer}mlp.gate_proj.weight": (N_FF, N_EMBD),
        f"{case.layer}mlp.up_proj.weight": (N_FF, N_EMBD),
        f"{case.layer}mlp.down_proj.weight": (N_EMBD, N_FF),
        f"{case.layer}hidden_norm.weight": (N_EMBD,),
        f"{case.layer}input_layernorm.weight": (N_EMBD,),
        f"{case.layer}post_attention_layernorm.weight": (N_EMBD,),
        "norm.weight": (N_EMBD,),
        "fc.weight": (N_EMBD, 3 * N_EMBD),
        "lm_head.weight": (n_rows, N_EMBD),
    }
    shapes |= {"embed_tokens.weight": (N_VOCAB, N_EMBD)} if case.has_embeddings else {}
    shapes |= {"input_norm.weight": (3 * N_EMBD,)} if case.has_input_norm else {}
    rng = np.random.Generator(np.random.PCG64(11))
    return {
        name: (rng.integers(-255, 256, shape) / 1024 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
