"""Latent attention with experts: DeepSeek-V2 and V3 (arXiv:2405.04434, arXiv:2412.19437), GLM-4.7-Flash (Z.ai 2026).

Files of before April 2025 have the matrices of keys and values of all heads as one (`attn_kv_b`): those of each are
made of it, which for keys means that rows become columns.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.formats import check_type, dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.reader import Architecture, Reader
from edgeinfer.models.rope import yarn_magnitude
from edgeinfer.models.spec import Experts, LatentAttention, Mixer, ModelSpec

_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# GLM-4.7-Flash, whose first files do not say what their routers make of the products: layers and tokens.
_LAYERS_OF_GLM, _VOCABULARY_OF_GLM = (47, 48), 154_880


def _latent_attention(reader: Reader, layer: int) -> Mixer:
    n_embd = reader.integer("embedding_length", 1, 1 << 20)
    n_heads = reader.integer("attention.head_count", 1, 1 << 14)
    n_latent = reader.integer("attention.kv_lora_rank", 1, 1 << 14)
    n_turned = reader.integer("rope.dimension_count", 2, 1 << 14)
    prefix = f"blk.{layer}.attn_"
    is_old = _is_old(reader.file, prefix)
    ending = "" if is_old else "_mla"
    n_plain = reader.integer(f"attention.key_length{ending}", n_turned + 1, 1 << 14) - n_turned
    n_value = reader.integer(f"attention.value_length{ending}", 1, 1 << 14)
    if is_old:
        _check_count(reader, "head_count_kv", n_heads, "one for each head")
        _split_heads(reader, prefix, (n_heads, n_plain, n_value, n_latent))
    else:
        for key, n in (("key_length", n_latent + n_turned), ("value_length", n_latent), ("head_count_kv", 1)):
            _check_count(reader, key, n, "one row for all heads: convert the model again")
    _check_heads(reader, f"{prefix}k_b.weight", (n_heads, n_latent, n_plain))
    _check_heads(reader, f"{prefix}v_b.weight", (n_heads, n_value, n_latent))
    block = LatentAttention(
        n_embd=n_embd,
        n_heads=n_heads,
        n_plain=n_plain,
        n_turned=n_turned,
        n_latent=n_latent,
        n_value=n_value,
        scale=_growth(reader) ** 2 / math.sqrt(n_plain + n_turned),
        rope=replace(reader.rope(n_turned, reader.rope_base()), magnitude=1.0),
        kv=f"{prefix}kv_a_mqa.weight",
        kv_norm=f"{prefix}kv_a_norm.weight",
        k_b=f"{prefix}k_b.weight",
        v_b=f"{prefix}v_b.weight",
        output=f"{prefix}output.weight",
        norm=f"{prefix}norm.weight",
    )
    if f"{prefix}q_a.weight" not in reader.file.tensors:
        return replace(block, q=f"{prefix}q.weight")
    return replace(
        block,
        n_q_latent=reader.integer("attention.q_lora_rank", 1, 1 << 14),
        q_a=f"{prefix}q_a.weight",
        q_norm=f"{prefix}q_a_norm.weight",
        q_b=f"{prefix}q_b.weight",
    )


def _is_old(file: ModelFile, prefix: str) -> bool:
    """Whether the matrices of heads are to be made of one, or were when the file was read before."""
    ours = f"{prefix}k_b.weight"
    return f"{prefix}kv_b.weight" in file.tensors and (ours not in file.tensors or file.makes(ours))


def _check_count(reader: Reader, key: str, n: int, reason: str) -> None:
    if reader.integer(f"attention.{key}", 1, 1 << 14, default=n) != n:
        reader.refuse(f"attention.{key}", f"must be {n}, {reason}")


# ---- files with attn_kv_b --------------------------------------------------------------------------------------------

_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


def _split_heads(reader: Reader, prefix: str, sizes: tuple[int, int, int, int]) -> None:
    """Define attn_k_b and attn_v_b of a layer, where they are not yet: the former in F16, unless the file has floats.

    sizes: heads, rows of keys of a head, rows of values, and numbers of a row.
    """
    file, name, (n_heads, n_plain, n_value, n_latent) = reader.file, f"{prefix}kv_b.weight", sizes
    info = file.tensors[name]
    if info.shape != (shape := (n_heads * (n_plain + n_value), n_latent)):
        reader.refuse_tensor(name, f"must have shape {shape}: found {info.shape}")
    check_type(info.type)
    if info.type == GGMLType.I2_S:
        reader.refuse_tensor(name, "is I2_S, which cannot be cut into matrices of heads: convert the model again")
    as_keys = info.type if info.type in _FLOATS else GGMLType.F16
    keys, values = (partial(make, file, name, sizes) for make in (_keys_of_heads, _values_of_heads))
    file.define(f"{prefix}k_b.weight", as_keys, (n_heads, n_latent, n_plain), keys)
    file.define(f"{prefix}v_b.weight", info.type, (n_heads, n_value, n_latent), values)


def _keys_of_heads(
    file: ModelFile, name: str, sizes: tuple[int, int, int, int], first: int, last: int
) -> NDArray[np.uint8]:
    """Bytes first..last-1 of the matrices of keys, (n_latent, n_plain) for each head."""
    n_heads, n_plain, _, n_latent = sizes
    type = file.tensors[name].type
    n_each = n_latent * n_plain * (4 if type == GGMLType.F32 else 2)
    made = []
    for head in range(first // n_each, -(-last // n_each)):
        rows = dequantize(type, _rows_of_head(file, name, sizes, head)[:n_plain].reshape(-1), (n_plain, n_latent))
        turned = np.ascontiguousarray(rows.T)
        if type == GGMLType.BF16:
            made.append((turned.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8))
        else:
            made.append(turned.astype(np.float32 if type == GGMLType.F32 else np.float16).reshape(-1).view(np.uint8))
    start = first // n_each * n_each
    return np.concatenate(made)[first - start : last - start]


def _values_of_heads(
    file: ModelFile, name: str, sizes: tuple[int, int, int, int], first: int, last: int
) -> NDArray[np.uint8]:
    """Bytes first..last-1 of the matrices of values, (n_value, n_latent) for each head, as the file has their rows."""
    n_heads, n_plain, n_value, _ = sizes
    info = file.tensors[name]
    n_each = n_value * (info.n_bytes // info.shape[0])
    heads = range(first // n_each, -(-last // n_each))
    made = [_rows_of_head(file, name, sizes, head)[n_plain:].reshape(-1) for head in heads]
    start = first // n_each * n_each
    return np.concatenate(made)[first - start : last - start]


def _rows_of_head(file: ModelFile, name: str, sizes: tuple[int, int, int, int], head: int) -> NDArray[np.uint8]:
    """A copy of the rows of a head, (n_plain + n_value, bytes of a row)."""
    info, n_rows = file.tensors[name], sizes[1] + sizes[2]
    n_bytes = info.n_bytes // info.shape[0] * n_rows
    rows = file.data(name, head * n_bytes, (head + 1) * n_bytes).reshape(n_rows, -1).copy()
    file.release(name, head * n_bytes, (head + 1) * n_bytes)
    return rows


def _joint_matrices(reader: Reader) -> Set[str]:
    """Those that attn_k_b and attn_v_b were made of."""
    file, ending = reader.file, "kv_b.weight"
    return {
        name for name in file.tensors if name.endswith(f".attn_{ending}") and _is_old(file, name.removesuffix(ending))
    }


def _check_heads(reader: Reader, name: str, shape: tuple[int, int, int]) -> None:
    """The rows of a head's matrix are counted by three axes, where the file has them."""
    info = reader.file.tensors.get(name)
    if info is not None and len(info.shape) == 3 and info.shape != shape:
        reader.refuse_tensor(name, f"must have shape {shape}: found {info.shape}")


def _growth(reader: Reader) -> float:
    """What YaRN multiplies queries and keys by; nothing is left to the rotation (DeepSeek's mscale_all_dim).

    The file's number is a tenth of that.
    """
    if reader.file.metadata.get("deepseek2.rope.scaling.type") != "yarn":
        return 1.0
    factor = reader.number("rope.scaling.factor", 0.0, 1e6, default=1.0)
    share = reader.number(_LOG_MULTIPLIER, 0.0, 10.0) / 0.1
    return 1 + share * (yarn_magnitude(factor) - 1)


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    """With the routers of files that do not say what they are."""
    says_it = bool(reader.file.metadata.get("deepseek2.expert_gating_func"))
    n_layers = reader.integer("block_count", 1, 4096) - reader.integer("nextn_predict_layers", 0, 4095, default=0)
    if says_it or n_layers not in _LAYERS_OF_GLM or spec.n_vocab != _VOCABULARY_OF_GLM:
        return spec
    layers = (
        replace(layer, ffn=replace(layer.ffn, router_function="sigmoid")) if isinstance(layer.ffn, Experts) else layer
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


ARCHITECTURE = Architecture(
    name="deepseek2",
    rope_kind="interleaved",
    optional=frozenset(),
    without=frozenset({"mixer.norm", "mixer.q", "mixer.k", "mixer.v", "mixer.output"}),
    mixer=_latent_attention,
    experts=ExpertRecipe(
        n_ff="own",
        n_ff_shared="count",
        optional=frozenset({"selection_bias"}),
        reads=frozenset(
            {"leading_dense_block_count", "expert_gating_func", "expert_weights_norm", "expert_weights_scale"}
        ),
    ),
    skips_nextn=True,
    has_nextn=True,
    fixed={"rope.scaling.attn_factor": (1.0,)},
    reads=frozenset({_LOG_MULTIPLIER}),
    unsupported_keys={"attention.temperature_scale": "queries that are scaled by position are not supported here"},
    unused=_joint_matrices,
    refine=_refine,
)
