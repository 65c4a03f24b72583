"""Random models with experts, for benchmarks: of any size, with a router that is skewed and drifts.

    python tests/benchmarks/make_experts.py OUT.gguf --like olmoe
    python tests/benchmarks/make_experts.py OUT.gguf --like tiny --layers 6 --experts-format q8_0 --shards 3

--like names the sizes that the flags change: `olmoe` is OLMoE's shape (Muennighoff et al., arXiv:2409.02060), 4.0 GB;
`small-slices` has many small experts as Qwen3's models do, 4.9 GB; `tiny` takes 42 MB. Weights are random blocks of
their format with mean zero and a given standard deviation; the same flags give the same bytes. The vocabulary is that
of --vocabulary, by default of the default model, so that real text can be passed.

alpha: how much of one vector all embeddings share. The more, the more some experts are used than others.
beta: how much each block adds to the residual stream. The more, the less a layer's input tells about that of the next.
It writes tensor by tensor and needs 1 GB of memory for the largest shape. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.loading.open import default_model

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from late import Late  # noqa: E402

if TYPE_CHECKING:
    import gguf
    from gguf import GGMLQuantizationType as Type
else:
    gguf = Late("gguf")
    Type = Late("gguf", "GGMLQuantizationType")

HEAD_DIM = 128
SEED = 20


@dataclass(frozen=True)
class Shape:
    """Sizes and reducible of a model."""

    arch: str = "olmoe"
    layers: int = 16
    experts: int = 64
    top_k: int = 8
    n_embd: int = 2048
    n_ff: int = 1024
    alpha: float = 2.0
    beta: float = 0.25
    format: str = "q4_k"  # of the experts' matrices; the attention's are Q4_K

    @property
    def n_heads(self) -> int:
        return self.n_embd // HEAD_DIM

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads if self.arch == "olmoe" else max(1, self.n_heads // 4)


SHAPES = {
    "olmoe": Shape(),
    "small-slices": Shape("qwen3moe", 10, 256, 8, 2048, 512),
    "tiny": Shape("olmoe", 4, 16, 4, 256, 256, 0.5, 0.3),
}


# ---- random blocks of each format: (n_blocks, bytes of a block) ------------------------------------------------------


def _halves(value: float, n: int) -> np.ndarray:
    """(n, 2) uint8: a half float n times."""
    return np.tile(np.frombuffer(np.float16(value).tobytes(), np.uint8), (n, 1))


def _q4_k(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    blocks = rng.integers(0, 256, (n, 144), dtype=np.uint8)
    blocks[:, 0:2] = _halves(std / 145, n)
    blocks[:, 2:4] = _halves(7.5 * float(np.float16(std / 145)), n)  # codes have the mean 7.5
    return blocks


def _q6_k(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    blocks = rng.integers(0, 256, (n, 210), dtype=np.uint8)
    blocks[:, 208:] = _halves(std / 1365, n)
    return blocks


def _q8_0(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    blocks = rng.integers(0, 256, (n, 34), dtype=np.uint8)
    blocks[:, :2] = _halves(std / 73.9, n)
    return blocks


def _q5_0(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    blocks = rng.integers(0, 256, (n, 22), dtype=np.uint8)
    blocks[:, :2] = _halves(std / 9.23, n)
    return blocks


def _mxfp4(rng: np.random.Generator, n: int, std: float) -> np.ndarray:
    blocks = rng.integers(0, 256, (n, 17), dtype=np.uint8)
    blocks[:, 0] = 128 + round(math.log2(std / 5.85))
    return blocks


BLOCKS: dict[str, Callable[[np.random.Generator, int, float], np.ndarray]] = {
    "q4_k": _q4_k,
    "q6_k": _q6_k,
    "q8_0": _q8_0,
    "q5_0": _q5_0,
    "mxfp4": _mxfp4,
}


# ---- tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A tensor of random weights."""

    name: str
    shape: tuple[int, ...]  # (n_in,), (n_out, n_in) or (n_experts, n_out, n_in)
    format: str  # of BLOCKS, "f16", "f32", or "ones" in f32
    std: float = 1.0
    alpha: float = 0.0

    @property
    def type(self) -> Type:
        name: str = "F32" if self.format == "ones" else self.format.upper()
        return getattr(Type, name)

    @property
    def n_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size

    def make(self) -> np.ndarray:
        """Its bytes, which depend on nothing but what it says of itself."""
        rng = np.random.default_rng([SEED, zlib.crc32(self.name.encode())])
        if self.format == "ones":
            return np.ones(self.shape, np.float32)
        if self.format in BLOCKS:
            block, _ = gguf.GGML_QUANT_SIZES[self.type]
            return BLOCKS[self.format](rng, math.prod(self.shape) // block, self.std)
        values = rng.standard_normal(self.shape, dtype=np.float32) * np.float32(self.std)
        if self.alpha:
            values += np.float32(self.alpha) * rng.standard_normal(self.shape[-1], dtype=np.float32)
        return values.astype(np.float16) if self.format == "f16" else values


def layer_tensors(shape: Shape, layer: int) -> list[Tensor]:
    """Of one layer."""
    d, ff, n, block = shape.n_embd, shape.n_ff, shape.experts, f"blk.{layer}."
    n_q, n_kv = shape.n_heads * HEAD_DIM, shape.n_kv_heads * HEAD_DIM
    q_norm, k_norm = (n_q, n_kv) if shape.arch == "olmoe" else (HEAD_DIM, HEAD_DIM)
    down_std = (8 if shape.arch == "olmoe" else 5) * shape.beta * ff**-0.5  # olmoe's weights do not add up to 1
    tensors = [
        Tensor("attn_norm", (d,), "ones"),
        Tensor("attn_q", (n_q, d), "q4_k", d**-0.5),
        Tensor("attn_k", (n_kv, d), "q4_k", d**-0.5),
        Tensor("attn_v", (n_kv, d), "q4_k", d**-0.5),
        Tensor("attn_q_norm", (q_norm,), "ones"),
        Tensor("attn_k_norm", (k_norm,), "ones"),
        Tensor("attn_output", (d, n_q), "q4_k", shape.beta * d**-0.5),
        Tensor("ffn_norm", (d,), "ones"),
        Tensor("ffn_gate_inp", (n, d), "f32", 1.5 * d**-0.5),
        Tensor("ffn_gate_exps", (n, ff, d), shape.format, d**-0.5),
        Tensor("ffn_up_exps", (n, ff, d), shape.format, d**-0.5),
        Tensor("ffn_down_exps", (n, d, ff), shape.format, down_std),
    ]
    return [replace(tensor, name=f"{block}{tensor.name}.weight") for tensor in tensors]


def model_tensors(shape: Shape, n_vocab: int) -> list[Tensor]:
    """All of a model, in the order of the file."""
    return [
        Tensor("token_embd.weight", (n_vocab, shape.n_embd), "f16", 1.0, shape.alpha),
        *(tensor for layer in range(shape.layers) for tensor in layer_tensors(shape, layer)),
        Tensor("output_norm.weight", (shape.n_embd,), "ones"),
        Tensor("output.weight", (n_vocab, shape.n_embd), "q4_k", 0.02),
    ]


# ---- the file --------------------------------------------------------------------------------------------------------


def add_vocabulary(writer: gguf.GGUFWriter, source: gguf.GGUFReader) -> None:
    """Everything about the tokenizer of another file, its chat template too."""
    for field in source.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(field.name, field.contents())
        else:
            writer.add_key_value(field.name, field.contents(), field.types[0])


def add_sizes(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"random {shape.arch}, {shape.layers} x {shape.experts} experts")
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)


def write_model(path: Path, shape: Shape, vocabulary: Path, shards: int = 1) -> list[Path]:
    """The files that were written: path, or several of the names that split models have."""
    source = gguf.GGUFReader(vocabulary)
    tensors = model_tensors(shape, len(source.fields["tokenizer.ggml.tokens"].data))
    per_shard = math.ceil(len(tensors) / shards) if shards > 1 else 0
    writer = gguf.GGUFWriter(path, shape.arch, split_max_tensors=per_shard)
    add_sizes(writer, shape)
    add_vocabulary(writer, source)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.make())
    files = [Path(file.name) for file in writer.fout or ()]
    writer.close()
    return files


def shape_of(arguments: argparse.Namespace) -> Shape:
    """The named one, with what the flags change."""
    changes = {name: getattr(arguments, name) for name in asdict(Shape()) if getattr(arguments, name) is not None}
    return replace(SHAPES[arguments.like], **changes)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--like", choices=SHAPES, default="olmoe")
    parser.add_argument("--arch", choices=["olmoe", "qwen3moe"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--embd", type=int, dest="n_embd", help=f"a multiple of 256; heads have {HEAD_DIM}")
    parser.add_argument("--ff", type=int, dest="n_ff", help="of one expert, a multiple of 256")
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--beta", type=float)
    parser.add_argument("--experts-format", choices=BLOCKS, dest="format")
    parser.add_argument("--shards", type=int, default=1, help="files that the model is split into")
    parser.add_argument("--vocabulary", type=Path, help="a model whose tokenizer is taken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    arguments = parser.parse_args()
    shape = shape_of(arguments)
    files = write_model(arguments.out, shape, arguments.vocabulary or default_model(), arguments.shards)
    sizes: dict[str, Any] = {file.name: file.stat().st_size for file in files}
    print(json.dumps({"shape": asdict(shape), "files": sizes}))


if __name__ == "__main__":
    main()
