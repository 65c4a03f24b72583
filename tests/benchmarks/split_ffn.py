"""A dense model of the llama architecture with its feed-forward networks split into experts, and routers made for them.

    python tests/benchmarks/split_ffn.py OUT.gguf [--model MODEL.gguf] [--experts 16] [--top-k 12]

With all experts in use the sum over them is the dense network, so the text is the same but for the rounding of the down
matrices to Q8_0 (see check_split.py); with fewer it is routing of real text by real activations. The default model is
split without --model. As in MoEfication (Zhang et al., arXiv:2110.01786) neurons that are active together go into one
expert, by balanced clustering of how much each of them adds for the tokens of a text; a router is the ridge regression
from the network's input to the logarithm of what each expert adds. Its scores are made tiny, which keeps their order
and makes all weights nearly 1 / top-k; the down matrices are multiplied by top-k. It takes about a minute. One JSON
line on stdout at the end: `covered` is the share of what all experts add that the chosen ones add, mean and least of a
layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_nodes import N_BATCH, Llama, Node, watching
from text import LICENSE_TEXT, SAMPLE_TEXT

from edgeinfer.loading.open import default_model

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from late import Late  # noqa: E402

if TYPE_CHECKING:
    import gguf
    from gguf import GGMLQuantizationType as Type
else:
    gguf = Late("gguf")
    Type = Late("gguf", "GGMLQuantizationType")

FITTED_TEXT = SAMPLE_TEXT + (Path(__file__).parent / "everyday.txt").read_text() + LICENSE_TEXT[:8000]
ROUNDS, SAMPLES, RIDGE = 6, 1500, 0.005  # of clustering, tokens in it, and the ridge by the variance of the inputs


@dataclass(frozen=True)
class Network:
    """The feed-forward matrices of a layer as numbers: (n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff)."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray

    def added(self, x: np.ndarray) -> np.ndarray:
        """(n, n_ff): how much each neuron adds to the residual stream for inputs (n, n_embd)."""
        gate = x @ self.gate.T
        active = gate / (1 + np.exp(-gate)) * (x @ self.up.T)
        return np.abs(active) * np.linalg.norm(self.down, axis=0)


def network_inputs(path: Path, n_tokens: int, n_threads: int) -> list[np.ndarray]:
    """(n, n_embd) of each layer: what its network gets for the tokens of the text, in stretches of 512."""
    inputs: dict[int, list[np.ndarray]] = {}

    def seen(node: Node) -> None:
        inputs.setdefault(node.layer, []).append(node.values(np.float32))

    llama = Llama(path, N_BATCH, n_threads, watching("ffn_norm-", seen))
    tokens = llama.tokens(FITTED_TEXT)[:n_tokens]
    for first in range(0, len(tokens), N_BATCH):
        llama.keep(0)
        llama.decode(tokens[first : first + N_BATCH], all_rows=True)
    llama.close()
    return [np.concatenate(inputs[layer]) for layer in sorted(inputs)]


def clusters(added: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """(n, n_ff / n) neurons of each expert, by how alike they are over tokens. added: (n_tokens, n_ff)."""
    n_tokens, n_ff = added.shape
    profiles = added[rng.choice(n_tokens, min(SAMPLES, n_tokens), replace=False)].T
    profiles = profiles / (np.linalg.norm(profiles, axis=1, keepdims=True) + 1e-9)
    centres = profiles[rng.choice(n_ff, n, replace=False)]
    for _ in range(ROUNDS):
        likeness = profiles @ centres.T
        expert_of, room = np.empty(n_ff, dtype=np.int64), [n_ff // n] * n
        for neuron in np.argsort(-likeness.max(axis=1), kind="stable"):
            nearest = next(e for e in np.argsort(-likeness[neuron], kind="stable") if room[e])
            expert_of[neuron], room[nearest] = nearest, room[nearest] - 1
        centres = np.stack([profiles[expert_of == e].mean(axis=0) for e in range(n)])
        centres /= np.linalg.norm(centres, axis=1, keepdims=True) + 1e-9
    return np.stack([np.flatnonzero(expert_of == e) for e in range(n)])


def fit_router(x: np.ndarray, by_expert: np.ndarray, top_k: int) -> tuple[np.ndarray, float]:
    """(n_experts, n_embd) router, and the share of all that the chosen experts add. by_expert: (n, n_experts)."""
    target = np.log(by_expert + 1e-3)
    target -= target.mean(axis=1, keepdims=True)
    ridge = RIDGE * len(x) * x.var() * np.eye(x.shape[1])
    router = np.linalg.solve(x.T @ x + ridge, x.T @ target).T
    scores = x @ router.T
    chosen = np.argsort(-scores, axis=1)[:, :top_k]
    covered = np.take_along_axis(by_expert, chosen, axis=1).sum() / by_expert.sum()
    return (router * 1e-3 / np.abs(scores).max()).astype(np.float32), float(covered)


class Source:
    """The dense model's file."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.n_ff = int(self.reader.fields["llama.feed_forward_length"].contents())

    def network(self, layer: int) -> Network:
        def numbers(role: str) -> np.ndarray:
            tensor = self.tensors[f"blk.{layer}.ffn_{role}.weight"]
            made: np.ndarray = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            return made.reshape(tuple(reversed(tensor.shape.tolist())))

        return Network(numbers("gate"), numbers("up"), numbers("down"))

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """All but the size of the networks."""
        for field in self.reader.fields.values():
            if field.name.startswith("GGUF.") or field.name in ("general.architecture", "llama.feed_forward_length"):
                continue
            if field.types[0] == gguf.GGUFValueType.ARRAY:
                writer.add_array(field.name, field.contents())
            else:
                writer.add_key_value(field.name, field.contents(), field.types[0])


def add_layer(writer: gguf.GGUFWriter, source: Source, layer: int, x: np.ndarray, n: int, top_k: int) -> float:
    """The experts of a layer and their router; gives the share that the chosen experts add."""
    network = source.network(layer)
    added = network.added(x)
    neurons = clusters(added, n, np.random.default_rng([20, layer]))
    router, covered = fit_router(x, added[:, neurons].sum(axis=-1), top_k)
    block = f"blk.{layer}."
    writer.add_tensor(f"{block}ffn_gate_inp.weight", router)
    for role in ("gate", "up"):  # whole rows, as they are
        tensor = source.tensors[f"{block}ffn_{role}.weight"]
        rows = tensor.data.reshape(source.n_ff, -1)[neurons]
        writer.add_tensor(f"{block}ffn_{role}_exps.weight", rows, raw_dtype=tensor.tensor_type)
    down = np.stack([top_k * network.down[:, of_expert] for of_expert in neurons])
    writer.add_tensor(f"{block}ffn_down_exps.weight", gguf.quants.quantize(down, Type.Q8_0), raw_dtype=Type.Q8_0)
    return covered


def split(model: Path, out: Path, n: int, top_k: int, n_tokens: int, n_threads: int) -> dict[str, Any]:
    source = Source(model)
    if source.n_ff % (32 * n):
        raise SystemExit(f"experts must have multiples of 32 neurons: {source.n_ff} / {n} = {source.n_ff / n:g}")
    inputs = network_inputs(model, n_tokens, n_threads)
    writer = gguf.GGUFWriter(out, "llama")
    source.add_metadata(writer)
    writer.add_feed_forward_length(source.n_ff // n)
    writer.add_expert_count(n)
    writer.add_expert_used_count(top_k)
    for name, tensor in source.tensors.items():
        if ".ffn_" not in name or "norm" in name:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    covered = [add_layer(writer, source, layer, x, n, top_k) for layer, x in enumerate(inputs)]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shares = {"mean": round(float(np.mean(covered)), 3), "least": round(min(covered), 3)}
    return {"model": model.name, "experts": n, "top_k": top_k, "tokens": len(inputs[0]), "covered": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--model", type=Path, help="dense, of the llama architecture")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens of text that the routers are made from")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    model = arguments.model or default_model()
    sizes = arguments.experts, arguments.top_k, arguments.tokens, arguments.threads
    print(json.dumps({"out": arguments.out.name, **split(model, arguments.out, *sizes)}))


if __name__ == "__main__":
    main()
