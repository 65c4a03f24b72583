"""Tiny random models that edgeinfer.models does not know and llama.cpp does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_models import add_bpe

N_VOCAB = 291


def write_model(path: Path, architecture: str, keys: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Path:
    """A model of random F32 tensors. keys: after "architecture."."""
    writer = gguf.GGUFWriter(path, architecture)
    add_bpe(writer, N_VOCAB)
    sizes = {"context_length": 256, "embedding_length": 64, "feed_forward_length": 96, "block_count": 2}
    for key, value in {**sizes, **keys}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    rng = np.random.default_rng(7)
    for name, shape in shapes.items():
        x = rng.standard_normal(shape, dtype=np.float32)
        deviation = 0.2 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
        values = np.float32("norm.weight" in name) + np.float32(deviation) * x
        writer.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_layers(shapes: Mapping[str, Sequence[int]], layers: Sequence[int]) -> dict[str, Sequence[int]]:
    return {f"blk.{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}


def write_gpt2(path: Path) -> Path:
    """Learned positions, LayerNorm with biases, queries, keys and values in one matrix, no gate."""
    layer = {
        **{name: (64,) for name in ("attn_norm.weight", "attn_norm.bias", "ffn_norm.weight", "ffn_norm.bias")},
        **{"attn_qkv.weight": (192, 64), "attn_qkv.bias": (192,), "attn_output.weight": (64, 64)},
        **{"attn_output.bias": (64,), "ffn_up.weight": (96, 64), "ffn_up.bias": (96,), "ffn_down.weight": (64, 96)},
        **{"ffn_down.bias": (64,)},
    }
    shapes = {"token_embd.weight": (N_VOCAB, 64), "position_embd.weight": (256, 64), "output.weight": (N_VOCAB, 64)}
    norm = {"output_norm.weight": (64,), "output_norm.bias": (64,)}
    keys = {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5}
    return write_model(path, "gpt2", keys, shapes | norm | of_layers(layer, (0, 1)))


def write_experts(path: Path) -> Path:
    """A granite, not granitemoe, whose feed-forward networks are four experts, two of them for a token."""
    layer = {
        **{"attn_norm.weight": (64,), "attn_q.weight": (64, 64), "attn_k.weight": (32, 64), "attn_v.weight": (32, 64)},
        **{"attn_output.weight": (64, 64), "ffn_norm.weight": (64,), "ffn_gate_inp.weight": (4, 64)},
        **{"ffn_gate_exps.weight": (4, 96, 64), "ffn_up_exps.weight": (4, 96, 64), "ffn_down_exps.weight": (4, 64, 96)},
    }
    shapes = {"token_embd.weight": (N_VOCAB, 64), "output_norm.weight": (64,), "output.weight": (N_VOCAB, 64)}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    keys = {"expert_count": 4, "expert_used_count": 2, "rope.dimension_count": 16, "logit_scale": 1.0}
    return write_model(path, "granite", heads | keys, shapes | of_layers(layer, (0, 1)))


def write_mamba(path: Path) -> Path:
    """No attention: one state for a whole text."""
    layer = {
        **{"attn_norm.weight": (64,), "ssm_in.weight": (256, 64), "ssm_conv1d.weight": (128, 4)},
        **{"ssm_conv1d.bias": (128,), "ssm_x.weight": (4 + 2 * 8, 128), "ssm_dt.weight": (128, 4)},
        **{"ssm_dt.bias": (128,), "ssm_a": (128, 8), "ssm_d": (128,), "ssm_out.weight": (64, 128)},
    }
    shapes = {"token_embd.weight": (N_VOCAB, 64), "output_norm.weight": (64,), "output.weight": (N_VOCAB, 64)}
    keys = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 8, "ssm.time_step_rank": 4}
    epsilon = {"attention.layer_norm_rms_epsilon": 1e-5}
    return write_model(path, "mamba", keys | epsilon, shapes | of_layers(layer, (0, 1)))


def write_lfm2(path: Path) -> Path:
    """A hybrid: the first layer has a state, the second attention."""
    both = {
        **{"attn_norm.weight": (64,), "ffn_norm.weight": (64,), "ffn_gate.weight": (96, 64)},
        **{"ffn_up.weight": (96, 64), "ffn_down.weight": (64, 96)},
    }
    state = {
        "shortconv.conv.weight": (64, 3),
        "shortconv.in_proj.weight": (192, 64),
        "shortconv.out_proj.weight": (64, 64),
    }
    attention = {
        **{"attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,), "attn_q.weight": (64, 64)},
        **{"attn_k.weight": (32, 64), "attn_v.weight": (32, 64), "attn_output.weight": (64, 64)},
    }
    shapes = {"token_embd.weight": (N_VOCAB, 64), "token_embd_norm.weight": (64,), "output.weight": (N_VOCAB, 64)}
    keys = {"attention.head_count": 4, "attention.head_count_kv": [0, 2], "attention.layer_norm_rms_epsilon": 1e-5}
    layers = of_layers(both, (0, 1)) | of_layers(state, (0,)) | of_layers(attention, (1,))
    return write_model(path, "lfm2", keys | {"shortconv.l_cache": 3}, shapes | layers)
