"""Ternary products against ggml's, through libggml of llama-cpp-python, in one process, round by round.

    python tests/benchmarks/bench_ternary.py [--threads 1,2] [--rounds 5] [--layers 10] [--peer-dir FOLDER]
        [--model FOLDER [--sizes 1,512]]

The matrices are the linears of BitNet b1.58 2B4T (30 layers: 2560x2560 twice, 640x2560 twice, 6912x2560 twice,
2560x6912) with random trits; some of the layers, more than any cache holds, stand for all. For each number of threads
and columns: milliseconds for the 30 layers, of ours in I2_S, held in 2 bits a weight and in 1.6, and of ggml in TQ2_0
and TQ1_0, the order swapped each round, medians. Of ours also the shares of the machine's bandwidth and int8 peak, both
measured in each round, and the cost: the time over that of one column. ggml rounds the activations within that time,
ours are rounded before: some microseconds a matrix. The process is pinned to as many cores as there are threads. One
JSON line on stdout at the end.

--peer-dir adds those whose libggml.so, built as a shared library, lies there in the folder bitnet.cpp (I2_S) or
ik_llama.cpp (IQ2_BN, IQ2_BN_R4).

--model times whole passes instead. A model of that shape, with random trits and an output matrix of 128256 tokens in
Q6_K, is written to a folder (0.8 GB for each format; what is there is taken again) and run by both, ours in I2_S and
llama.cpp in TQ2_0. It is of the architecture bitnet, which both know: with SiLU in place of ReLU squared. Milliseconds
for 1 and for 512 tokens behind a context of 64.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from bench_engine import FEW, LlamaCpp, numbers
from bench_engine import Contender as OfModel
from bench_engine import Ours as OurModel
from bench_engine import measure as whole_passes
from machine import machine

from edgeinfer.backends.native import MachineLimits, _core, best_isa
from edgeinfer.backends.native.weights import BASE_THREE
from edgeinfer.common.settings import TernaryBits
from edgeinfer.exporters.gguf.writer import Tensor, write_gguf
from edgeinfer.models.gguf import I2_S_TAIL_BYTES, GGMLType, MetadataValue

SHAPES = [(2560, 2560), (640, 2560), (640, 2560), (2560, 2560), (6912, 2560), (6912, 2560), (2560, 6912)]
N_LAYERS = 30
MULTIPLY_ADDS = N_LAYERS * sum(n_out * n_in for n_out, n_in in SHAPES)
SIZES = (1, 2, 4, 8, 16, 128)
FORMATS: tuple[TernaryBits, ...] = ("2", "1.6")
FEW_LAYERS = 3  # for many columns, where the arithmetic takes the time
N_VOCAB = 128256
N_CONTEXT = 64
PIECE_BLOCKS = 1 << 16  # of random weights are made at once


def random_bytes(kind: GGMLType, n_elements: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of random trits, or of other codes, with small scales."""
    n_bytes = n_elements // kind.block_elements * kind.block_bytes
    data = random_trits(n_bytes, rng) if kind in (GGMLType.I2_S, GGMLType.TQ2_0) else _any_bytes(n_bytes, rng)
    if kind != GGMLType.I2_S:
        data.reshape(-1, kind.block_bytes)[:, -2:] = np.array([0.01], dtype="<f2").view(np.uint8)
    return data


def random_trits(n_bytes: int, rng: np.random.Generator) -> np.ndarray:
    """Codes of two bits, none of which is 3."""
    data = _any_bytes(n_bytes, rng)
    data &= ~((data & 0x55) << 1)
    return data


def _any_bytes(n_bytes: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, n_bytes, dtype=np.uint8)


class Contender(Protocol):
    def seconds(self, n: int, n_layers: int) -> float:
        """Of n_layers, with n columns."""


class Ours:
    """bits: that a weight takes."""

    def __init__(self, bits: TernaryBits, n_layers: int, n_threads: int, rng: np.random.Generator) -> None:
        self.n_threads = n_threads
        kind = GGMLType.I2_S
        packed_as = BASE_THREE[kind] if bits == "1.6" else None
        self.layers = [
            [
                _core.PackedMatrix(int(kind), *shape, random_bytes(kind, shape[0] * shape[1], rng), 1.0, packed_as)
                for shape in SHAPES
            ]
            for _ in range(n_layers)
        ]
        self.n_bytes = sum(matrix.data.nbytes for layer in self.layers for matrix in layer) / n_layers * N_LAYERS

    def seconds(self, n: int, n_layers: int) -> float:
        """Of n_layers, with n columns."""
        matrices = [matrix for layer in self.layers[:n_layers] for matrix in layer]
        return _core.time_products(matrices, best_isa(), self.n_threads, n)


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@dataclass(frozen=True)
class Library:
    """A ggml. base, cpu: its libraries, which may be one."""

    base: ctypes.CDLL
    cpu: ctypes.CDLL

    @classmethod
    def of_llama_cpp(cls) -> Library:
        """The one of llama-cpp-python."""
        import llama_cpp

        folder = Path(llama_cpp.__file__).parent / "lib"
        return cls(ctypes.CDLL(str(folder / "libggml-base.so")), ctypes.CDLL(str(folder / "libggml-cpu.so")))

    @classmethod
    def in_folder(cls, folder: Path) -> Library:
        """That of a peer, whose functions have the same names as those of the others."""
        one = ctypes.CDLL(str(folder / "libggml.so"), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        return cls(one, one)


@dataclass(frozen=True)
class Kind:
    """A ternary type of a ggml. random: makes the bytes of an (n_out, n_in) matrix."""

    name: str
    number: int
    random: Callable[[int, int, np.random.Generator], np.ndarray]

    @classmethod
    def of(cls, kind: GGMLType) -> Kind:
        """One of ggml's own."""
        return cls(f"ggml {kind.name}", int(kind), lambda n_out, n_in, rng: random_bytes(kind, n_out * n_in, rng))


def i2_s(n_out: int, n_in: int, rng: np.random.Generator) -> np.ndarray:
    """As bitnet.cpp has it: all codes, then one scale in 32 bytes."""
    scale = np.zeros(I2_S_TAIL_BYTES, dtype=np.uint8)
    scale[:4] = np.array([0.01], dtype="<f4").view(np.uint8)
    return np.concatenate([random_trits(n_out * n_in // 4, rng), scale])


def iq2_bn(rows_at_once: int) -> Callable[[int, int, np.random.Generator], np.ndarray]:
    """As ik_llama.cpp has it: before the codes of so many rows their scales."""

    def random(n_out: int, n_in: int, rng: np.random.Generator) -> np.ndarray:
        data = random_trits(n_out * (4 + n_in // 4), rng).reshape(n_out // rows_at_once, -1)
        data[:, : 4 * rows_at_once] = np.full(rows_at_once, 0.01, dtype="<f4").view(np.uint8)
        return data.ravel()

    return random


PEERS = {
    "bitnet.cpp": [Kind("bitnet.cpp I2_S", 36, i2_s)],
    "ik_llama.cpp": [
        Kind("ik_llama.cpp IQ2_BN", 135, iq2_bn(1)),
        Kind("ik_llama.cpp IQ2_BN_R4", 335, iq2_bn(4)),
    ],
}


class Ggml:
    """The same products as a graph of a ggml's, in one of its types."""

    def __init__(self, library: Library, kind: Kind, n_layers: int, n_threads: int, rng: np.random.Generator) -> None:
        self.base, self.cpu = library.base, library.cpu
        for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph_custom", "ggml_get_data"):
            getattr(self.base, name).restype = ctypes.c_void_p
        self.base.ggml_init.argtypes = [_InitParams]
        self.base.ggml_new_tensor_2d.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        self.base.ggml_mul_mat.argtypes = [ctypes.c_void_p] * 3
        self.base.ggml_new_graph_custom.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool]
        self.base.ggml_build_forward_expand.argtypes = [ctypes.c_void_p] * 2
        self.base.ggml_get_data.argtypes = [ctypes.c_void_p]
        self.base.ggml_nbytes.argtypes = [ctypes.c_void_p]
        self.base.ggml_nbytes.restype = ctypes.c_size_t
        self.base.ggml_free.argtypes = [ctypes.c_void_p]
        self.cpu.ggml_backend_cpu_init.restype = ctypes.c_void_p
        self.cpu.ggml_backend_cpu_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.base.ggml_backend_graph_compute.argtypes = [ctypes.c_void_p] * 2
        self.backend = self.cpu.ggml_backend_cpu_init()
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, n_threads)
        n_elements = sum(n_out * n_in for n_out, n_in in SHAPES)
        weights = self._context(
            n_layers * (n_elements + (1 << 17))
        )  # bitnet.cpp wants that much, and leaves most of it
        self.layers = [[self._matrix(weights, kind, *shape, rng) for shape in SHAPES] for _ in range(n_layers)]

    def _context(self, n_bytes: int) -> int:
        context: int = self.base.ggml_init(_InitParams(n_bytes + (1 << 20), None, False))
        return context

    def _matrix(self, context: int, kind: Kind, n_out: int, n_in: int, rng: np.random.Generator) -> tuple[int, int]:
        """(tensor, inputs)."""
        tensor: int = self.base.ggml_new_tensor_2d(context, kind.number, n_in, n_out)
        data = kind.random(n_out, n_in, rng)
        if data.nbytes != self.base.ggml_nbytes(tensor):
            raise RuntimeError(f"{kind.name} has {self.base.ggml_nbytes(tensor)} bytes, not {data.nbytes}")
        ctypes.memmove(self.base.ggml_get_data(tensor), data.ctypes.data, data.nbytes)
        return tensor, n_in

    def seconds(self, n: int, n_layers: int) -> float:
        """Of n_layers, with n columns."""
        matrices = [matrix for layer in self.layers[:n_layers] for matrix in layer]
        n_outputs = n_layers * sum(n_out for n_out, _ in SHAPES)
        context = self._context(4 * n * (n_outputs + sum({n_in for _, n_in in SHAPES})) + 8192 * len(matrices))
        inputs = {n_in: self._inputs(context, n_in, n) for n_in in {n_in for _, n_in in matrices}}
        graph = self.base.ggml_new_graph_custom(context, 4 * len(matrices), False)
        for tensor, n_in in matrices:
            product = self.base.ggml_mul_mat(context, tensor, inputs[n_in])
            self.base.ggml_build_forward_expand(graph, product)
        started = time.perf_counter()
        status = self.base.ggml_backend_graph_compute(self.backend, graph)
        elapsed = time.perf_counter() - started
        self.base.ggml_free(context)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute gave {status}")
        return elapsed

    def _inputs(self, context: int, n_in: int, n: int) -> int:
        tensor: int = self.base.ggml_new_tensor_2d(context, int(GGMLType.F32), n_in, n)
        x = np.random.default_rng(1).standard_normal(n * n_in, dtype=np.float32)
        ctypes.memmove(self.base.ggml_get_data(tensor), x.ctypes.data, x.nbytes)
        return tensor


class Rounds:
    """What contenders and the machine do with n columns, round by round, the order swapped each time."""

    def __init__(self, contenders: dict[str, Contender], n: int, n_threads: int, n_layers: int) -> None:
        self.contenders, self.n, self.n_threads, self.n_layers = contenders, n, n_threads, n_layers
        self.seconds: dict[str, list[float]] = {name: [] for name in contenders}  # for all layers
        self.limits: list[MachineLimits] = []
        for contender in contenders.values():
            contender.seconds(n, n_layers)  # warm-up

    def add(self) -> None:
        self.limits.append(MachineLimits.measure(best_isa(), self.n_threads, n_rounds=1))
        names = list(self.contenders)
        for name in names if len(self.limits) % 2 else reversed(names):
            time.sleep(0.02)  # ggml's threads spin for some milliseconds after its turn
            contender = self.contenders[name]
            if self.n <= FEW:
                contender.seconds(self.n, self.n_layers)  # the pause is over for all threads
            self.seconds[name].append(contender.seconds(self.n, self.n_layers) * N_LAYERS / self.n_layers)

    def ms(self, name: str) -> float:
        return 1e3 * statistics.median(self.seconds[name])

    def over(self, name: str, bounds: list[float]) -> float:
        """Seconds of each round over what is given for it."""
        return statistics.median(of / bound for of, bound in zip(self.seconds[name], bounds, strict=True))

    def row(self, formats: dict[str, Ours], single: Rounds) -> dict[str, Any]:
        """As it is printed. single: with one column."""
        row: dict[str, Any] = {"n": self.n, "ms": {name: round(self.ms(name), 2) for name in self.contenders}}
        arithmetic = [MULTIPLY_ADDS * self.n / limits.int8_multiply_adds_per_second for limits in self.limits]
        for name, ours in formats.items():
            reading = [ours.n_bytes / limits.read_bytes_per_second for limits in self.limits]
            peers = [peer for peer in self.contenders if peer not in formats]
            row[name] = {
                "speedup": {peer: round(self.ms(peer) / self.ms(name), 2) for peer in peers},
                "cost": round(self.over(name, single.seconds[name]), 2),
                "bandwidth_share": round(1 / self.over(name, reading), 3),
                "int8_share": round(1 / self.over(name, arithmetic), 3),
            }
        gb_s = [limits.read_bytes_per_second / 1e9 for limits in self.limits]
        gmac_s = [limits.int8_multiply_adds_per_second / 1e9 for limits in self.limits]
        return row | {"gb_s": round(statistics.median(gb_s), 1), "peak_gmac_s": round(statistics.median(gmac_s))}


def bench(n_threads: int, rounds: int, n_layers: int, peer_dir: Path | None) -> dict[str, Any]:
    os.sched_setaffinity(0, set(sorted(ALL_CORES)[:n_threads]))
    rng = np.random.default_rng(1)
    formats = {f"edgeinfer {bits} bits": Ours(bits, n_layers, n_threads, rng) for bits in FORMATS}
    contenders: dict[str, Contender] = dict(formats)
    libraries = [(Library.of_llama_cpp(), [Kind.of(GGMLType.TQ2_0), Kind.of(GGMLType.TQ1_0)])]
    for name, kinds in PEERS.items():
        if peer_dir is not None and (peer_dir / name / "libggml.so").exists():
            libraries.append((Library.in_folder(peer_dir / name), kinds))
    for library, kinds in libraries:
        for kind in kinds:
            contenders[kind.name] = Ggml(library, kind, n_layers, n_threads, rng)
    few = min(n_layers, FEW_LAYERS)
    measured = [Rounds(contenders, n, n_threads, few if n > 8 else n_layers) for n in SIZES]
    for i in range(rounds):
        for each in measured:
            each.add()
        print(f"{n_threads} thread(s)  round {i + 1} of {rounds}", file=sys.stderr)
    rows = [each.row(formats, measured[0]) for each in measured]
    for row in rows:
        print(f"{n_threads} thread(s)  {row}", file=sys.stderr)
    return {"n_threads": n_threads, "rows": rows}


def write_model(path: Path, kind: GGMLType) -> None:
    """BitNet b1.58 2B4T with random trits, piece by piece."""
    n_embd, n_ff = 2560, 6912
    values: dict[str, MetadataValue] = {"context_length": 4096, "embedding_length": n_embd, "block_count": N_LAYERS}
    values |= {"feed_forward_length": n_ff, "vocab_size": N_VOCAB, "rope.freq_base": 500000.0}
    values |= {"attention.head_count": 20, "attention.head_count_kv": 5, "rope.dimension_count": 128}
    values |= {"attention.layer_norm_rms_epsilon": 1e-5}
    metadata: dict[str, MetadataValue] = {"general.architecture": "bitnet", "tokenizer.ggml.model": "none"}
    rng = np.random.default_rng(1)
    tensors = [_random("token_embd", GGMLType.Q6_K, N_VOCAB, n_embd, rng), _ones("output_norm", n_embd)]
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for layer in range(N_LAYERS):
        norms = {"attn_norm": n_embd, "attn_sub_norm": n_embd, "ffn_norm": n_embd, "ffn_sub_norm": n_ff}
        tensors += [_ones(f"blk.{layer}.{name}", n) for name, n in norms.items()]
        tensors += [
            _random(f"blk.{layer}.{name}", kind, *shape, rng) for name, shape in zip(names, SHAPES, strict=True)
        ]
    write_gguf(path, metadata | {f"bitnet.{key}": value for key, value in values.items()}, tensors)


def _ones(name: str, n: int) -> Tensor:
    return Tensor(f"{name}.weight", GGMLType.F32, (n,), lambda: [np.ones(n, dtype="<f4").view(np.uint8)])


def _random(name: str, kind: GGMLType, n_out: int, n_in: int, rng: np.random.Generator) -> Tensor:
    n_blocks = n_out * n_in // kind.block_elements
    tail = np.zeros(I2_S_TAIL_BYTES, dtype=np.uint8)
    tail[:4] = np.array([0.02], dtype="<f4").view(np.uint8)

    def pieces() -> Iterator[np.ndarray]:
        for first in range(0, n_blocks, PIECE_BLOCKS):
            yield random_bytes(kind, min(PIECE_BLOCKS, n_blocks - first) * kind.block_elements, rng)
        if kind == GGMLType.I2_S:
            yield tail

    return Tensor(f"{name}.weight", kind, (n_out, n_in), pieces)


def bench_model(folder: Path, n_threads: int, sizes: list[int], rounds: int) -> dict[str, Any]:
    os.sched_setaffinity(0, set(sorted(ALL_CORES)[:n_threads]))
    paths = {kind: folder / f"bitnet-2b-{kind.name.lower()}.gguf" for kind in (GGMLType.I2_S, GGMLType.TQ2_0)}
    folder.mkdir(parents=True, exist_ok=True)
    for kind, path in paths.items():
        if not path.exists():
            write_model(path, kind)
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, N_CONTEXT + max(sizes)).astype(np.int32)
    contenders: dict[str, OfModel] = {
        "edgeinfer I2_S": OurModel(paths[GGMLType.I2_S], n_threads, tokens, N_CONTEXT),
        "llama.cpp TQ2_0": LlamaCpp(paths[GGMLType.TQ2_0], n_threads, tokens, N_CONTEXT),
    }
    rows = []
    for n, times in whole_passes(contenders, sizes, rounds).items():
        ms = {name: statistics.median(of) for name, of in times.items()}
        speedup = round(ms["llama.cpp TQ2_0"] / ms["edgeinfer I2_S"], 2)
        rows.append({"n": n, "ms": {name: round(value, 2) for name, value in ms.items()}, "speedup": speedup})
        print(f"{n_threads} thread(s)  {rows[-1]}", file=sys.stderr)
    return {"n_threads": n_threads, "rows": rows}


ALL_CORES = os.sched_getaffinity(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=10, help="layers that are made, at most 30")
    parser.add_argument("--peer-dir", type=Path, metavar="FOLDER", help="with bitnet.cpp and ik_llama.cpp in it")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="whole passes of a model written there")
    parser.add_argument(
        "--sizes", type=numbers, default=[1, 512], help="tokens of a pass with --model, comma-separated"
    )
    arguments = parser.parse_args()
    threads = [int(n) for n in arguments.threads.split(",")]
    if arguments.model is not None:
        results = [bench_model(arguments.model, n, arguments.sizes, arguments.rounds) for n in threads]
    else:
        results = [bench(n, arguments.rounds, arguments.layers, arguments.peer_dir) for n in threads]
    print(json.dumps({"benchmark": "ternary", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
