"""Tiny random language models as GGUF files: for the engine and the command line, and loadable in llama.cpp too.

The floats that a tensor is made of depend on (seed, name, shape) only: models that differ in type approximate one
another, and one with fewer layers begins like one with more.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from late import Late
from numpy.typing import NDArray
from written_once import written_once

if TYPE_CHECKING:
    import gguf
else:
    gguf = Late("gguf")

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Value: TypeAlias = str | int | float | bool | Sequence[bool] | Sequence[int]
# Adds a vocabulary to a file: writer, n_vocab, types of further special tokens, template.
AddVocabulary: TypeAlias = "Callable[[gguf.GGUFWriter, int, Mapping[str, gguf.TokenType], str], None]"

FLOAT_TYPES = ("F32", "F16", "BF16")
BLOCK_32_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
BLOCK_256_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TERNARY_TYPES = ("TQ1_0", "TQ2_0", "I2_S", "Q2_0")
Architecture = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "exaone4",
    "glm4",
    "granite",
    "mistral3",
    "olmo2",
    "phi3",
    "smollm3",
    "bitnet",
    "bitnet-25",
    "bitnet-b1.58",
]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
TENSOR_TYPES = FLOAT_TYPES + BLOCK_32_TYPES + BLOCK_256_TYPES + TERNARY_TYPES
UNKNOWN_TO_LLAMA_CPP = {"I2_S", "Q2_0", "bitnet-25", "bitnet-b1.58"}
UNKNOWN_TO_GGUF = {"I2_S": 36, "Q2_0": 42}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LOGITS_DEVIATION = 3.0  # so that the best token mostly leads clearly, and sampling still has a choice


# Keys that the architecture needs, or that make its recipe show in a small model: low caps, short windows.
_KEYS: dict[str, dict[str, Value]] = {
    "gemma2": {"attention.sliding_window": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0},
    "gemma3": {"attention.sliding_window": 20, "rope.freq_base_swa": 300.0},
    "granite": {"embedding_scale": 1.5, "residual_scale": 0.7, "attention.scale": 0.3, "logit_scale": 0.8},
}
_N_LAYERS = {"gemma3": 6, "smollm3": 4}  # as many as it takes for every kind of layer


@written_once
def write_tiny_model(
    path: Path,
    architecture: Architecture = "llama",
    tensor_type: str = "Q4_K",
    *,
    n_embd: int | None = None,
    n_layers: int | None = None,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_ff: int | None = None,
    n_vocab: int = 291,
    n_ctx_train: int = 512,
    tied: bool = False,
    rope_base: float = 10000.0,
    rope_scaling: Mapping[str, Value] | None = None,
    rope_freqs: bool = False,
    types: Mapping[str, str] | None = None,
    qkv_biases: bool | None = None,
    output_biases: bool = False,
    vocabulary: Literal["bpe", "spm"] | AddVocabulary = "bpe",
    metadata: Mapping[str, Value | None] | None = None,
    special: Mapping[str, gguf.TokenType] | None = None,
    template: str | None = None,
    seed: int = 0,
    n_distinct: int | None = None,
) -> Path:
    """Write a model and give back its path.

    n_embd: 256 for the types with blocks of 256 and the ternary ones, else 96.  n_layers: 2, or what it takes to have
    every kind of layer.  head_dim: n_embd / n_heads.  n_ff: 3 n_embd.  n_vocab: at least 259 (BPE) or 263 (SPM); what
    the merges do not fill is padding.  tied: always so in gemma2 and bitnet.  tensor_type: of the matrices; norms and
    biases are F32, and with I2_S embeddings and output are F16.  types: other types by role ("attn_v", "output") or by
    whole name ("blk.0.ffn_down.weight").  rope_scaling: keys under `rope.scaling.`.  rope_freqs: with factors of 1 to 8
    on the frequencies, as Llama 3.1 has, or with phi3's long and short ones.  qkv_biases: None for what the
    architecture demands.  output_biases: the optional attn_output.bias.  metadata: further or other keys; None takes
    one away.  special: types of further special tokens, in place of padding.  template: None for ChatML.  vocabulary:
    or what adds another one, see large_vocabularies.  n_distinct: rows of a matrix that differ, the others repeat them.
    """
    n_embd = n_embd or (256 if tensor_type in BLOCK_256_TYPES + TERNARY_TYPES else 96)
    n_layers = n_layers or _N_LAYERS.get(architecture, 2)
    sizes = Sizes(n_embd, n_layers, n_heads, n_kv_heads, head_dim or n_embd // n_heads, n_ff or 3 * n_embd, n_vocab)
    writer = named_writer(path, architecture, tensor_type)
    keys = {"context_length": n_ctx_train, "rope.freq_base": rope_base, **size_keys(sizes)}
    add_keys(writer, _keys_of(architecture, keys, rope_scaling or {}) | dict(metadata or {}))
    add_vocabulary = {"bpe": add_bpe, "spm": _add_spm}.get(vocabulary, vocabulary)
    add_vocabulary(writer, n_vocab, special or {}, template or CHATML)
    _add_matrices(writer, architecture, sizes, tied, tensor_type, types or {}, seed, n_distinct)
    _add_vectors(writer, architecture, sizes, qkv_biases, output_biases, rope_freqs, seed)
    return written(writer, path)


def _keys_of(
    architecture: Architecture, keys: Mapping[str, Value], rope_scaling: Mapping[str, Value]
) -> dict[str, Value | None]:
    """These keys and those that the architecture needs, by their whole names."""
    scaling = {f"rope.scaling.{key}": value for key, value in rope_scaling.items()}
    found = {**keys, **_KEYS.get(architecture, {}), **scaling}
    return {f"{architecture}.{key}": value for key, value in found.items()}


def named_writer(path: Path, architecture: str, tensor_type: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    # llama.cpp looks for Phi-3's special tokens in every model whose name has "phi3" in it.
    writer.add_name(f"tiny {architecture.replace('phi3', 'phi')} {tensor_type}")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def _add_matrices(
    writer: gguf.GGUFWriter,
    architecture: Architecture,
    sizes: Sizes,
    tied: bool,
    tensor_type: str,
    types: Mapping[str, str],
    seed: int,
    n_distinct: int | None,
) -> None:
    """Add the matrices; see write_tiny_model."""
    tied = tied or architecture in ("gemma2", "bitnet")
    for name, (n_out, n_in) in _matrices(architecture, sizes, tied).items():
        n_made = n_out if n_distinct is None else min(n_out, n_distinct)
        weights = normal(seed, name, (n_made, n_in)) * np.float32(deviation_of(name, n_in, tied))
        add_matrix(writer, f"{name}.weight", type_of(name, tensor_type, types), weights, n_out)


def _add_vectors(
    writer: gguf.GGUFWriter,
    architecture: Architecture,
    sizes: Sizes,
    qkv_biases: bool | None,
    output_biases: bool,
    rope_freqs: bool,
    seed: int,
) -> None:
    """Add norms, biases and factors on frequencies; see write_tiny_model."""
    if qkv_biases is None:
        qkv_biases = architecture == "qwen2"
    for name, n in _vectors(architecture, sizes, qkv_biases, output_biases).items():
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        writer.add_tensor(name, np.float32(centre) + np.float32(0.2) * normal(seed, name, (n,)))
    for name, largest in _rope_factors(architecture).items() if rope_freqs else ():
        writer.add_tensor(name, np.geomspace(1.0, largest, sizes.head_dim // 2).astype(np.float32))


def written(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write the file out; gives its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass(frozen=True)
class Sizes:
    """See write_tiny_model."""

    n_embd: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int

    @property
    def n_q(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def n_kv(self) -> int:
        return self.n_kv_heads * self.head_dim


def size_keys(sizes: Sizes) -> dict[str, Value]:
    """The keys of these sizes, without the architecture in front."""
    return {
        "block_count": sizes.n_layers,
        "embedding_length": sizes.n_embd,
        "feed_forward_length": sizes.n_ff,
        "attention.head_count": sizes.n_heads,
        "attention.head_count_kv": sizes.n_kv_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": sizes.head_dim,
    }


def _matrices(architecture: str, sizes: Sizes, tied: bool) -> dict[str, tuple[int, int]]:
    """(n_out, n_in) of every matrix, by name without `.weight`."""
    shapes = {"token_embd": (sizes.n_vocab, sizes.n_embd)}
    if not tied:
        shapes["output"] = (sizes.n_vocab, sizes.n_embd)
    for layer in range(sizes.n_layers):
        of_layer = {
            "attn_q": (sizes.n_q, sizes.n_embd),
            "attn_k": (sizes.n_kv, sizes.n_embd),
            "attn_v": (sizes.n_kv, sizes.n_embd),
            "attn_output": (sizes.n_embd, sizes.n_q),
            "ffn_gate": (sizes.n_ff, sizes.n_embd),
            "ffn_up": (sizes.n_ff, sizes.n_embd),
            "ffn_down": (sizes.n_embd, sizes.n_ff),
        }
        if architecture == "phi3":
            for role in ("attn_q", "attn_k", "attn_v"):
                del of_layer[role]
            of_layer |= {"attn_qkv": (sizes.n_q + 2 * sizes.n_kv, sizes.n_embd)}
        if architecture in ("phi3", "glm4"):
            del of_layer["ffn_gate"]
            of_layer |= {"ffn_up": (2 * sizes.n_ff, sizes.n_embd)}
        shapes |= {f"blk.{layer}.{role}": shape for role, shape in of_layer.items()}
    return shapes


def _vectors(architecture: str, sizes: Sizes, qkv_biases: bool, output_biases: bool) -> dict[str, int]:
    """Length of every norm and bias, by whole name."""
    lengths = {"output_norm.weight": sizes.n_embd}
    of_layer = _norms(architecture, sizes)
    if qkv_biases and architecture == "phi3":
        of_layer |= {"attn_qkv.bias": sizes.n_q + 2 * sizes.n_kv}
    elif qkv_biases:
        of_layer |= {"attn_q.bias": sizes.n_q, "attn_k.bias": sizes.n_kv, "attn_v.bias": sizes.n_kv}
    if output_biases:
        of_layer |= {"attn_output.bias": sizes.n_embd}
    for layer in range(sizes.n_layers):
        lengths |= {f"blk.{layer}.{name}": n for name, n in of_layer.items()}
    return lengths


def _norms(architecture: str, sizes: Sizes) -> dict[str, int]:
    """Length of every norm of a layer, by name without the layer."""
    lengths: dict[str, int] = {}
    if architecture not in ("olmo2", "exaone4"):
        lengths |= {"attn_norm.weight": sizes.n_embd, "ffn_norm.weight": sizes.n_embd}
    if architecture.startswith("bitnet"):
        lengths |= {"attn_sub_norm.weight": sizes.n_q, "ffn_sub_norm.weight": sizes.n_ff}
    if architecture in ("gemma2", "gemma3", "olmo2", "exaone4", "glm4"):
        lengths |= {"post_attention_norm.weight": sizes.n_embd, "post_ffw_norm.weight": sizes.n_embd}
    if architecture in ("qwen3", "gemma3", "exaone4"):
        lengths |= {"attn_q_norm.weight": sizes.head_dim, "attn_k_norm.weight": sizes.head_dim}
    if architecture == "olmo2":
        lengths |= {"attn_q_norm.weight": sizes.n_q, "attn_k_norm.weight": sizes.n_kv}
    return lengths


def _rope_factors(architecture: str) -> dict[str, float]:
    """Tensors of factors on the frequencies, and the largest factor in each."""
    if architecture == "phi3":
        return {"rope_factors_long.weight": 8.0, "rope_factors_short.weight": 1.5}
    return {"rope_freqs.weight": 8.0}


def normal(seed: int, name: str, shape: tuple[int, ...]) -> Floats:
    """Normal deviates that depend on (seed, name, shape) only."""
    return np.random.default_rng((seed, zlib.crc32(name.encode()))).standard_normal(shape, dtype=np.float32)


def deviation_of(name: str, n_in: int, tied: bool) -> float:
    """Standard deviation of a matrix that keeps activations near 1 and gives logits of _LOGITS_DEVIATION."""
    if name == "token_embd" and not tied:
        return 1.0
    return (_LOGITS_DEVIATION if name in ("output", "token_embd") else 1.0) / math.sqrt(n_in)


def type_of(name: str, tensor_type: str, types: Mapping[str, str]) -> str:
    """Type of a matrix, whose name is without `.weight`; see write_tiny_model."""
    if tensor_type == "I2_S" and name in ("token_embd", "output"):
        tensor_type = "F16"
    return types.get(f"{name}.weight", types.get(name.rpartition(".")[2], tensor_type))


def add_keys(writer: gguf.GGUFWriter, values: Mapping[str, Value | None]) -> None:
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        str: gguf.GGUFValueType.STRING,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
    }
    for key, value in values.items():
        if isinstance(value, list | tuple):
            writer.add_key_value(key, list(value), gguf.GGUFValueType.ARRAY, kinds[type(value[0])])
        elif value is not None:
            writer.add_key_value(key, value, kinds[type(value)])


def add_matrix(writer: gguf.GGUFWriter, name: str, tensor_type: str, weights: Floats, n_out: int | None = None) -> None:
    """n_out: rows of the matrix, which repeat those of the weights where there are more."""
    if tensor_type in UNKNOWN_TO_GGUF:
        data = quantize(tensor_type, weights).reshape(-1)
        writer.add_tensor(name, data.view(np.int8))
        info = writer.tensors[-1][name]
        info.shape, info.dtype = weights.shape, UNKNOWN_TO_GGUF[tensor_type]
        return
    kind = gguf.GGMLQuantizationType[tensor_type]
    if tensor_type in ("F32", "F16"):
        writer.add_tensor(name, _rows(weights.astype({"F32": np.float32, "F16": np.float16}[tensor_type]), n_out))
    else:
        writer.add_tensor(name, _rows(quantize(tensor_type, weights), n_out), raw_dtype=kind)


def _rows(rows: NDArray[Any], n: int | None) -> NDArray[Any]:
    return rows if n is None or n == len(rows) else np.resize(rows, (n, rows.shape[1]))


# ---- quantisers ------------------------------------------------------------------------------------------------


def quantize(tensor_type: str, weights: Floats) -> Bytes:
    """Rows (n_out, bytes a row) of the format that approximate weights (n_out, n_in), each block rounded to nearest.

    I2_S, which has no rows, comes as (1, bytes). K-quants lie with llama.cpp's own to within some percent of the error;
    that searches for better scales.
    """
    if tensor_type == "I2_S":
        return _i2_s(weights)
    if tensor_type == "Q2_0":
        return _q2_0(weights.reshape(-1, 64)).reshape(weights.shape[0], -1)
    kind = gguf.GGMLQuantizationType[tensor_type]
    if tensor_type == "IQ4_NL":
        return _iq4_nl(weights.reshape(-1, 32)).reshape(weights.shape[0], -1)
    if tensor_type not in BLOCK_256_TYPES:
        packed: NDArray[np.generic] = gguf.quantize(weights, kind)
        return np.ascontiguousarray(packed).view(np.uint8)
    if weights.shape[1] % 256:
        raise ValueError(f"{tensor_type} has blocks of 256: found rows of {weights.shape[1]}")
    blocks = weights.reshape(-1, 256)
    packed_blocks = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}[tensor_type](blocks)
    return packed_blocks.reshape(weights.shape[0], -1)


def _i2_s(weights: Floats) -> Bytes:
    """As BitNet rounds: to the mean magnitude times -1, 0 or 1. All of the matrix, its scale after it."""
    scale = np.abs(weights).mean(dtype=np.float32)
    codes = (np.rint(weights / scale).clip(-1, 1) + 1).astype(np.uint8).reshape(-1, 4, 32)
    packed = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
    tail = np.zeros(8, dtype=np.float32)
    tail[0] = scale
    return np.concatenate([packed.reshape(-1), tail.view(np.uint8)])[None]


def _q2_0(blocks: Floats) -> Bytes:
    """Trits only, with the mean magnitude of 64."""
    d = np.abs(blocks).mean(axis=1, keepdims=True).astype(np.float16)
    codes = (np.rint(_divide(blocks, d.astype(np.float32))).clip(-1, 1) + 1).astype(np.uint8).reshape(-1, 16, 4)
    packed = codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6
    return np.hstack([d.view(np.uint8), packed])


def _q2_k(blocks: Floats) -> Bytes:
    x = blocks.reshape(-1, 16, 16)
    offset = np.maximum(-x.min(axis=2), 0)
    d, steps = _split((x.max(axis=2) + offset) / 3, 15)
    dmin, offsets = _split(offset, 15)
    shifted = x + (dmin.astype(np.float32) * offsets)[:, :, None]
    codes = np.rint(_divide(shifted, (d.astype(np.float32) * steps)[:, :, None])).clip(0, 3).astype(np.uint8)
    scales = steps.astype(np.uint8) | offsets.astype(np.uint8) << 4
    quarters = codes.reshape(-1, 2, 4, 32)  # halves of 128, in them four runs of 32
    packed = quarters[:, :, 0] | quarters[:, :, 1] << 2 | quarters[:, :, 2] << 4 | quarters[:, :, 3] << 6
    return np.hstack([scales, packed.reshape(-1, 64), d.view(np.uint8), dmin.view(np.uint8)])


def _q3_k(blocks: Floats) -> Bytes:
    x = blocks.reshape(-1, 16, 16)
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    d, steps = _split(largest / np.float32(-4), 31)
    codes = np.rint(_divide(x, (d.astype(np.float32) * steps)[:, :, None])).clip(-4, 3) + 4
    runs = codes.astype(np.uint8).reshape(-1, 8, 32)
    high = np.packbits(runs >> 2, axis=1, bitorder="little").reshape(-1, 32)  # bit j of byte i: run j
    low = (runs & 3).reshape(-1, 2, 4, 32)
    packed = low[:, :, 0] | low[:, :, 1] << 2 | low[:, :, 2] << 4 | low[:, :, 3] << 6
    sc = (steps + 32).astype(np.uint8)
    top = (sc >> 4).reshape(-1, 4, 4)
    tops = top[:, 0] | top[:, 1] << 2 | top[:, 2] << 4 | top[:, 3] << 6
    return np.hstack([high, packed.reshape(-1, 64), sc[:, :8] & 15 | (sc[:, 8:] & 15) << 4, tops, d.view(np.uint8)])


def _q4_k(blocks: Floats) -> Bytes:
    head, codes = _scales_and_codes(blocks, largest_code=15)
    pairs = codes.reshape(-1, 4, 2, 32)  # two sub-blocks share 32 bytes
    return np.hstack([head, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)])


def _q5_k(blocks: Floats) -> Bytes:
    head, codes = _scales_and_codes(blocks, largest_code=31)
    high = np.packbits(codes >> 4, axis=1, bitorder="little").reshape(-1, 32)  # bit j of byte i: sub-block j
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    return np.hstack([head, high, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)])


def _scales_and_codes(blocks: Floats, largest_code: int) -> tuple[Bytes, Bytes]:
    """The first 16 bytes of a Q4_K or Q5_K block, and codes (n_blocks, 8, 32)."""
    x = blocks.reshape(-1, 8, 32)
    offset = np.maximum(-x.min(axis=2), 0)
    step = (x.max(axis=2) + offset) / largest_code
    d, steps = _split(step, 63)
    dmin, offsets = _split(offset, 63)
    shifted = x + (dmin.astype(np.float32) * offsets)[:, :, None]
    codes = np.rint(_divide(shifted, (d.astype(np.float32) * steps)[:, :, None])).clip(0, largest_code)
    sc, m = steps.astype(np.uint8), offsets.astype(np.uint8)
    low, high = slice(0, 4), slice(4, 8)
    packed = [
        d.view(np.uint8),
        dmin.view(np.uint8),
        sc[:, low] | (sc[:, high] >> 4) << 6,
        m[:, low] | (m[:, high] >> 4) << 6,
        sc[:, high] & 15 | (m[:, high] & 15) << 4,
    ]
    return np.hstack(packed), codes.astype(np.uint8)


def _q6_k(blocks: Floats) -> Bytes:
    x = blocks.reshape(-1, 16, 16)
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    step = largest / np.float32(-32)  # negative scales too: the largest number gets code -32, as in llama.cpp
    d, sc = _split(step, 127)
    codes = np.rint(_divide(x, (d.astype(np.float32) * sc)[:, :, None])).clip(-32, 31) + 32
    quarters = codes.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of 128, in them four runs of 32
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    top = quarters >> 4
    high = top[:, :, 0] | top[:, :, 1] << 2 | top[:, :, 2] << 4 | top[:, :, 3] << 6
    packed = [low.reshape(-1, 128), high.reshape(-1, 64), sc.astype(np.int8).view(np.uint8), d.view(np.uint8)]
    return np.hstack(packed)


_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def _iq4_nl(blocks: Floats) -> Bytes:
    d = (np.abs(blocks).max(axis=1, keepdims=True) / 113).astype(np.float16)
    codes = np.abs(_divide(blocks, d.astype(np.float32))[:, :, None] - _IQ4_NL).argmin(axis=2).astype(np.uint8)
    return np.hstack([d.view(np.uint8), codes[:, :16] | codes[:, 16:] << 4])


def _split(values: Floats, largest_code: int) -> tuple[NDArray[np.float16], Floats]:
    """(n, 1) f16 scales and integer codes (n, sub-blocks) whose product approximates values (n, sub-blocks)."""
    scale = (np.abs(values).max(axis=1, keepdims=True) / largest_code).astype(np.float16)
    codes = np.rint(_divide(values, scale.astype(np.float32)))
    return scale, codes.clip(-largest_code, largest_code)


def _divide(a: Floats, b: Floats) -> Floats:
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


# ---- vocabularies ----------------------------------------------------------------------------------------------

_WORDS = " the he in er an re on at en nd or is it to ing ed ou ar as of hello world".split()


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _merges() -> tuple[list[str], list[str]]:
    """Merge rules, and the token that each makes: for every word its prefixes, without and with a space before."""
    rules: dict[str, str] = {}  # token: rule
    for word in [start + word for word in _WORDS for start in ("", "Ġ")]:
        for end in range(2, len(word) + 1):
            rules.setdefault(word[:end], f"{word[: end - 1]} {word[end - 1]}")
    return list(rules.values()), list(rules)


def add_bpe(
    writer: gguf.GGUFWriter, n_vocab: int, special: Mapping[str, gguf.TokenType] = {}, template: str = CHATML
) -> None:
    """256 byte tokens, as many merged tokens as fit, the special tokens, padding."""
    rules, merged = _merges()
    n_merges = min(len(rules), n_vocab - 256 - len(SPECIAL_TOKENS) - len(special))
    if n_merges < 0:
        raise ValueError(f"n_vocab must be at least {256 + len(SPECIAL_TOKENS) + len(special)}: found {n_vocab}")
    tokens = byte_characters() + merged[:n_merges]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    add_tokens(writer, tokens, [gguf.TokenType.NORMAL] * len(tokens), n_vocab, special, template)
    if n_merges:
        writer.add_token_merges(rules[:n_merges])


def _add_spm(
    writer: gguf.GGUFWriter, n_vocab: int, special: Mapping[str, gguf.TokenType] = {}, template: str = CHATML
) -> None:
    """<unk> <s> </s>, 256 byte tokens, pieces of the words as far as they fit, the special tokens, padding."""
    letters = ["▁", *map(chr, range(0x21, 0x7F))]
    pieces = letters + [token.replace("Ġ", "▁") for token in _merges()[1]]
    head = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    room = n_vocab - len(head) - len(SPECIAL_TOKENS) - len(special)
    if room < 1:  # without the first piece there is no space
        raise ValueError(f"n_vocab must be at least {n_vocab - room + 1}: found {n_vocab}")
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    pieces = pieces[:room]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([0.0] * len(head) + [-float(i) for i in range(n_vocab - len(head))])
    writer.add_unk_token_id(0)
    add_tokens(writer, head + pieces, kinds + [gguf.TokenType.NORMAL] * len(pieces), n_vocab, special, template)


def add_tokens(
    writer: gguf.GGUFWriter,
    tokens: list[str],
    kinds: Sequence[gguf.TokenType],
    n_vocab: int,
    special: Mapping[str, gguf.TokenType],
    template: str,
) -> None:
    """The tokens, then the special ones, then padding up to n_vocab; and what the keys say about them."""
    first_special = len(tokens)
    tokens = [*tokens, *SPECIAL_TOKENS, *special]
    padding = n_vocab - len(tokens)
    kinds = [*kinds, *[gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS), *special.values()]
    kinds += [gguf.TokenType.UNUSED] * padding
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(padding)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(first_special)
    writer.add_eos_token_id(first_special + 2)
    writer.add_pad_token_id(first_special)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(template)
