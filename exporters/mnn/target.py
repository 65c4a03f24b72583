"""`edgeinfer export --to mnn`: plan, write and check a folder for MNN's LLM engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np

from edgeinfer.backends.onnx import write_graph
from edgeinfer.backends.onnx.matrices import Blocks, part_of, weights_of
from edgeinfer.common import devices
from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import InvalidArgument, ModelFileError, UnsupportedModel
from edgeinfer.common.files import check_folder, temporary_folder, utf8_name, whole_folder
from edgeinfer.common.overriding import override
from edgeinfer.exporters.checks.runtime import (
    MESSAGES,
    GreedyRun,
    answer_tokens,
    compare_logits,
    compare_tokens,
    minimum_runtime,
    run_greedily,
)
from edgeinfer.exporters.checks.runtime_process import ask_runtime
from edgeinfer.exporters.finite import FiniteFile
from edgeinfer.exporters.manifest import sha256_of
from edgeinfer.exporters.mnn.config import engine_config, model_config
from edgeinfer.exporters.mnn.converter import check_installed, from_onnx, identified, to_mnn
from edgeinfer.exporters.mnn.graph import Linear, MnnGraph, mnn_graph
from edgeinfer.exporters.mnn.rebuild import rebuilt
from edgeinfer.exporters.mnn.runtime import WANTED
from edgeinfer.exporters.mnn.tokenizer_file import tokenizer_file
from edgeinfer.exporters.mnn.weights import Placed, place
from edgeinfer.exporters.request import ExportTarget, Plan, PlannedTensor, Progress, Request, Result
from edgeinfer.exporters.tokenizer_json import probes_of, tokenizer_config, tokenizer_json
from edgeinfer.models import ModelSpec, attention_of, read_spec
from edgeinfer.models.draft_head import is_draft_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

FILES = ("llm.mnn", "llm.mnn.weight", "tokenizer.mtok", "config.json", "llm_config.json")
_NAMES = (*FILES, "manifest.json")
_USUAL_N_CTX = 2048
_RUNTIME = "edgeinfer.exporters.mnn.runtime"
# Measured: the process with its libraries, and what MNN makes of a byte of weights when it packs them anew.
_RUNTIME_BYTES, _PACKED = 112 << 20, 1.45
_GRAPH_BYTES = 64 << 10  # about what a layer takes in llm.mnn


class MnnTarget(ExportTarget):
    """`--to mnn`, see ExportTarget. MNN runs one model: Request.draft is refused."""

    @override
    def plan(self, request: Request) -> Plan:
        check_folder(request.out, _NAMES)
        with FiniteFile.open(request.source) as file:
            package = _package(request, file)
            if request.check:
                answer_tokens(file, package.n_ctx)
            tensors = [
                PlannedTensor(name, info.type, info.type, _matrix_bytes(package.file, name))
                for name, info in package.file.tensors.items()
                if len(info.shape) > 1
            ]
            weights = sum(tensor.n_bytes for tensor in tensors)
            files = {request.out / "llm.mnn.weight": weights}
            largest = max(tensor.n_bytes for tensor in tensors)
            disk = weights + package.spec.n_layers * _GRAPH_BYTES * 8 + 80 * Tokenizer.size_in(package.file)
            return Plan(tensors, files, 6 * largest + (256 << 20), disk, list(_notes(package, weights)))

    @override
    def write(self, request: Request, progress: Progress) -> Result:
        """See ExportTarget.write. Raises BackendUnavailable without MNN, whose converter makes the graph."""
        check_installed()
        with FiniteFile.open(request.source) as file, whole_folder(request.out, _NAMES) as folder:
            package = _package(request, file)
            _write(package, folder, progress)
            check, facts, check_bytes = _checked(package, folder) if request.check else (None, {}, None)
            n_bytes = (folder / "llm.mnn.weight").stat().st_size
            facts |= {
                "n_ctx": package.n_ctx,
                "runtime": minimum_runtime(WANTED),
                "estimated_peak_bytes": _peak(package, n_bytes),
            }
        return Result([request.out / name for name in FILES], check, facts, check_bytes)


@dataclass(frozen=True)
class _Package:
    file: ModelFile
    spec: ModelSpec
    made: MnnGraph
    n_ctx: int


def _package(request: Request, file: ModelFile) -> _Package:
    """What a request makes of a model. Raises InvalidArgument, UnsupportedModel."""
    if request.draft is not None:
        raise InvalidArgument("packages for MNN have no drafts here: leave --draft out, or take --to genai")
    if is_draft_head(file):
        raise UnsupportedModel(f"{file.path} is a draft head: MNN runs whole models only")
    spec = read_spec(file)
    n_ctx = request.n_ctx or min(spec.n_ctx_train, _USUAL_N_CTX)
    return _Package(file, spec, mnn_graph(file, spec, n_ctx), n_ctx)


def _matrix_bytes(file: ModelFile, name: str) -> int:
    """Bytes of a matrix with its scales."""
    weights = weights_of(part_of(file, name))
    if not isinstance(weights, Blocks):
        return 2 * int(np.prod(file.tensors[name].shape))
    n_scales = weights.scales.n_bytes * (1 if weights.bases is None else 2)
    return weights.codes().n_bytes + n_scales


def _notes(package: _Package, weights: int) -> Iterator[str]:
    yield "The codes of the file's formats are kept exactly, in 4 bits or 8; matrices of floats become half floats."
    yield (
        f"It needs {WANTED} or newer and, with {package.n_ctx} tokens, some {human_bytes(_peak(package, weights))} of "
        f"memory (estimated); all {human_bytes(weights)} of weights are in one file."
    )


def _peak(package: _Package, weights: int) -> int:
    """Most memory that MNN takes with a whole context: libraries, weights as it packs them, the cache in float32."""
    cache = sum(2 * attention_of(layer).n_kv_heads * attention_of(layer).head_dim for layer in package.spec.layers)
    return _RUNTIME_BYTES + int(_PACKED * weights) + 4 * cache * package.n_ctx + 8 * package.spec.n_logits


# --- writing and checking ---------------------------------------------------------------------------------------------


def _write(package: _Package, folder: Path, progress: Progress) -> None:
    """Write all files into a folder."""
    file, spec, made = package.file, package.spec, package.made
    with utf8_name(folder) as place, TemporaryDirectory(dir=place, prefix="graph-") as scratch:
        onnx = Path(scratch) / "graph.onnx"
        write_graph(made.graph, onnx, None)
        content = from_onnx(onnx, Path(scratch))
        with (folder / "llm.mnn.weight").open("xb") as out:
            embeddings = _weights(package, content, Path(scratch) / "converted.mnn.weight", out, progress)
        to_mnn(identified(content, [sha256_of(path) for path in file.paths]), place / "llm.mnn")
    config = tokenizer_config(file)
    stops = sorted(Tokenizer.from_file(file).stop_ids)
    (folder / "tokenizer.mtok").write_bytes(tokenizer_file(tokenizer_json(file), config, stops))
    texts = {"config.json": engine_config(file, package.n_ctx), "llm_config.json": model_config(file, spec, embeddings)}
    for name, values in texts.items():
        text = json.dumps(values, indent=1, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8", newline="\n")
    progress(1.0)


def _weights(package: _Package, content: dict[str, Any], constants: Path, out: BinaryIO, progress: Progress) -> Placed:
    """Put the weights into the converted graph and the file; gives where the embeddings are."""
    file, spec, linears = package.file, package.spec, package.made.linears
    done = 0

    def placed(linear: Linear) -> Placed:
        nonlocal done
        done += 1
        progress(0.95 * done / (len(linears) + 1))
        return place(file, linear.matrix, linear.bias, out)

    places = rebuilt(content, package.made.graph, linears, constants, out, placed)
    assert spec.token_embd is not None  # whole models have them
    shared = next((name for name, linear in linears.items() if linear.matrix == spec.token_embd), None)
    return places[shared] if shared is not None else place(file, spec.token_embd, None, out, with_bias=False)


def _checked(package: _Package, folder: Path) -> tuple[str, dict[str, Any], int | None]:
    """Run a package in MNN; gives what genai's does. Raises ModelFileError."""
    file = package.file
    tokenizer = Tokenizer.from_file(file)
    run = run_greedily(file, answer_tokens(file, package.n_ctx))
    with temporary_folder() as scratch, utf8_name(folder) as place:
        logits = scratch / "logits.npy"
        question = {
            "folder": str(place),
            "prompt": run.prompt,
            "tokens": run.forced,
            "message": None if tokenizer.chat_template is None else MESSAGES[0]["content"],
            "texts": probes_of(file),
            "n_threads": devices.default_n_threads(),
            "logits": str(logits),
        }
        found = ask_runtime(_RUNTIME, question, "MNN")
        rows = np.load(logits)
    runtime = f"MNN {found['version']}"
    said, figures = compare_logits(run, rows, runtime)
    if run.tokens:  # else the answer ends at once, and the logits are all there is
        compare_tokens(run, _until_end(run, found["answer"]), runtime)
    _check_texts(file, tokenizer, run, found, runtime)
    return said, {"checked_in": runtime, **figures}, found["peak_bytes"]


def _until_end(run: GreedyRun, found: list[int]) -> list[int]:
    """An answer without the token that ended it."""
    return found[: len(run.tokens)]


def _check_texts(file: ModelFile, tokenizer: Tokenizer, run: GreedyRun, found: Any, runtime: str) -> None:
    """Raises ModelFileError where a template is rendered, or a text cut into tokens, otherwise than the file says."""
    if found["rendered"] is not None and found["rendered"] != run.text:
        raise ModelFileError(
            f"{file.path}: {runtime} renders the chat template otherwise: wanted {run.text!r:.300}, found "
            f"{found['rendered']!r:.300}; nothing was written"
        )
    for text, ids in zip(probes_of(file), found["ids"], strict=True):
        wanted = tokenizer.encode(text, parse_special=True)
        if ids != wanted:
            raise ModelFileError(
                f"{file.path}: {runtime} cuts {text!r:.60} into other tokens: wanted {wanted[:40]}, found {ids[:40]}; "
                "nothing was written"
            )
