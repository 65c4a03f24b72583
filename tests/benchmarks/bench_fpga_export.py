"""Export of a model of the shape of BitNet b1.58 2B-4T for a board, twice: seconds, peak memory, equal hashes.

Run: python tests/benchmarks/bench_fpga_export.py [--layers N] [--folder SCRATCH] [EXPORT OPTIONS]

The model is made in the scratch folder, with random trits in I2_S: 1.2 GB, and the two exports 0.8 GB each. Prints a
JSON line last.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from tiny_models import write_tiny_model  # noqa: E402

from edgeinfer.exporters.gguf.writer import Tensor, write_gguf  # noqa: E402
from edgeinfer.models.gguf import GGMLType, ModelFile  # noqa: E402

N_EMBD, N_KV, N_FF, HEAD_DIM, N_VOCAB = 2560, 640, 6912, 128, 128_256
SEED = 38
_SIZES = {"embedding_length": N_EMBD, "feed_forward_length": N_FF, "context_length": 4096}
_SIZES |= {"attention.head_count": N_EMBD // HEAD_DIM, "attention.head_count_kv": N_KV // HEAD_DIM}
_SIZES |= {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "rope.dimension_count": HEAD_DIM}
_MATRICES = {
    "attn_q": (N_EMBD, N_EMBD),
    "attn_k": (N_KV, N_EMBD),
    "attn_v": (N_KV, N_EMBD),
    "attn_output": (N_EMBD, N_EMBD),
    "ffn_gate": (N_FF, N_EMBD),
    "ffn_up": (N_FF, N_EMBD),
    "ffn_down": (N_EMBD, N_FF),
}
_NORMS = {"attn_norm": N_EMBD, "attn_sub_norm": N_EMBD, "ffn_norm": N_EMBD, "ffn_sub_norm": N_FF}


def write_model(path: Path, n_layers: int) -> None:
    """A GGUF file of that shape, with random weights and a vocabulary of byte pairs."""
    with tempfile.TemporaryDirectory() as folder:
        small = write_tiny_model(Path(folder) / "small.gguf", "bitnet-b1.58", "I2_S", n_vocab=N_VOCAB, n_layers=1)
        with ModelFile.open(small) as file:
            metadata = dict(file.metadata)
    metadata |= {f"bitnet-b1.58.{key}": value for key, value in {**_SIZES, "block_count": n_layers}.items()}
    metadata["general.name"] = f"random weights of the shape of BitNet b1.58 2B-4T, {n_layers} layers"
    write_gguf(path, metadata, list(_tensors(n_layers)))


def _tensors(n_layers: int) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", GGMLType.F16, (N_VOCAB, N_EMBD), _floats)
    yield Tensor("output_norm.weight", GGMLType.F32, (N_EMBD,), lambda: [np.ones(N_EMBD, "<f4").view(np.uint8)])
    for layer in range(n_layers):
        for name, n in _NORMS.items():
            yield Tensor(
                f"blk.{layer}.{name}.weight", GGMLType.F32, (n,), lambda n=n: [np.ones(n, "<f4").view(np.uint8)]
            )
        for name, shape in _MATRICES.items():
            seed = SEED + 100 * layer + len(name)
            yield Tensor(
                f"blk.{layer}.{name}.weight", GGMLType.I2_S, shape, lambda s=shape, seed=seed: [_matrix(s, seed)]
            )


def _floats() -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(SEED)
    for first in range(0, N_VOCAB, 8016):
        n_rows = min(8016, N_VOCAB - first)
        yield rng.standard_normal((n_rows, N_EMBD), dtype=np.float32).astype("<f2").reshape(-1).view(np.uint8)


def _matrix(shape: tuple[int, int], seed: int) -> NDArray[np.uint8]:
    """Bytes of four random trits each, and a scale after them."""
    codes = np.indices((3, 3, 3, 3)).reshape(4, -1)
    of_four = (codes << np.array([[0], [2], [4], [6]])).sum(axis=0).astype(np.uint8)
    data = of_four[np.random.default_rng(seed).integers(0, 81, shape[0] * shape[1] // 4, dtype=np.uint8)]
    tail = np.zeros(8, dtype="<f4")
    tail[0] = 0.03
    return np.concatenate([data, tail.view(np.uint8)])


def export(source: Path, out: Path, options: list[str]) -> float:
    """Seconds of one export by the command, in a process of its own."""
    command = [sys.executable, "-m", "edgeinfer", "fpga", "export", str(source), "--out", str(out), *options]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def hashes(folder: Path) -> dict[str, Any]:
    """The files of a folder with their hashes, as its manifest has them, and the manifest itself."""
    text = (folder / "manifest.json").read_text()
    return {**{name: facts["sha256"] for name, facts in json.loads(text)["files"].items()}, "manifest.json": text}


def measure(folder: Path, n_layers: int, options: list[str]) -> dict[str, Any]:
    """Both exports of a model that is made in the folder."""
    source, outs = folder / "model.gguf", [folder / "first", folder / "second"]
    write_model(source, n_layers)
    seconds = [export(source, out, options) for out in outs]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    report = json.loads((outs[0] / "report.json").read_text())
    n_bytes = sum(path.stat().st_size for path in outs[0].rglob("*") if path.is_file())
    return {
        "seconds": [round(each, 1) for each in seconds],
        "peak_bytes": peak,
        "equal_hashes": hashes(outs[0]) == hashes(outs[1]),
        "source_bytes": source.stat().st_size,
        "written_bytes": n_bytes,
        "ddr_bits_a_trit": report["ddr_bits_a_trit"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="for the files; left as it was found")
    arguments, options = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="fpga-export-", dir=arguments.folder))
    try:
        found = measure(folder, arguments.layers, options)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({"layers": arguments.layers, "options": options, **found, **machine()}))


if __name__ == "__main__":
    main()
