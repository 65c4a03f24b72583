"""`edgeinfer export --to pte`: plan, write and check a folder for ExecuTorch's runner of language models."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgeinfer.common.errors import BackendUnavailable, InvalidArgument, ModelFileError, UnsupportedModel
from edgeinfer.common.files import check_folder, utf8_name, whole_folder
from edgeinfer.common.overriding import override
from edgeinfer.exporters.checks.runtime import answer_tokens, minimum_runtime
from edgeinfer.exporters.checks.runtime_process import ask_runtime
from edgeinfer.exporters.finite import FiniteFile
from edgeinfer.exporters.pte.check import RUNTIME, check_package
from edgeinfer.exporters.pte.checkpoint import params_of, weights_of
from edgeinfer.exporters.pte.library import WANTED
from edgeinfer.exporters.request import ExportTarget, Plan, PlannedTensor, Progress, Request, Result
from edgeinfer.exporters.tokenizer_json import write_tokenizer
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.draft_head import is_draft_head
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.tokenizer import Tokenizer

FILES = ("model.pte", "tokenizer.json", "tokenizer_config.json")
_NAMES = (*FILES, "manifest.json")
_USUAL_N_CTX = 2048
_FLOATS = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})
_GROUP = 32  # weights that share a scale
# Of ExecuTorch's exporter, with torch: its time, its memory beside the weights, and both for a layer, which 4 bits
# double: quantisation is operators of the graph.
_TOOL_SECONDS, _TOOL_BYTES = 40, 600 << 20
_LAYER_IN_FLOATS, _LAYER_IN_4_BITS = (14, 30 << 20), (30, 72 << 20)
_PATIENCE_SECONDS = 6 * 3600  # on slow machines, with large models


class PteTarget(ExportTarget):
    """`--to pte`, see ExportTarget. ExecuTorch's own exporter makes the program; Request.draft is refused."""

    @override
    def plan(self, request: Request) -> Plan:
        check_folder(request.out, _NAMES)
        with FiniteFile.open(request.source) as file:
            package = _package(request, file)
            if request.check:
                answer_tokens(file, package.n_ctx)
            tensors = _planned(package)
            n_bytes = sum(tensor.n_bytes for tensor in tensors)
            once = 4 * sum(int(np.prod(file.tensors[name].shape)) for name in _names(package.spec))
            files, disk = {request.out / "model.pte": n_bytes}, n_bytes + 2 * once
            return Plan(tensors, files, _peak_bytes(package), disk, _notes(package))

    @override
    def write(self, request: Request, progress: Progress) -> Result:
        """See ExportTarget.write. Raises BackendUnavailable without ExecuTorch."""
        if importlib.util.find_spec("executorch") is None:
            raise BackendUnavailable("packages for ExecuTorch need its exporter: pip install 'edgeinfer[executorch]'")
        with FiniteFile.open(request.source) as file, whole_folder(request.out, _NAMES) as folder:
            package = _package(request, file)
            for name in _names(package.spec):  # the exporter, in a process of its own, would name no tensor
                file.check_tensor(name)
            found = _export(package, folder)
            progress(0.9)
            write_tokenizer(file, folder)
            what = file, folder, package.n_ctx, package.four_bits
            check, facts, check_bytes = check_package(*what) if request.check else (None, {}, None)
            progress(1.0)
        facts |= {
            "n_ctx": package.n_ctx,
            "runtime": minimum_runtime(WANTED),
            "made_with": f"{WANTED.split()[0]} {found['version']}",
            "weights": "8da4w" if package.four_bits else "float32",
        }
        return Result([request.out / name for name in FILES], check, facts, check_bytes)


@dataclass(frozen=True)
class _Package:
    """four_bits: whether matrices are rounded to 4 bits in groups of 32; else all is float32."""

    file: ModelFile
    spec: ModelSpec
    n_ctx: int
    four_bits: bool

    @property
    def layer_cost(self) -> tuple[int, int]:
        """Seconds and bytes of the exporter for a layer."""
        return _LAYER_IN_4_BITS if self.four_bits else _LAYER_IN_FLOATS


def _package(request: Request, file: ModelFile) -> _Package:
    """What a request makes of a model. Raises InvalidArgument, UnsupportedModel."""
    if request.draft is not None:
        raise InvalidArgument("packages for ExecuTorch have no drafts here: leave --draft out, or take --to genai")
    if is_draft_head(file):
        raise UnsupportedModel(f"{file.path} is a draft head: ExecuTorch runs whole models only")
    spec = read_spec(file)
    params_of(file, spec)
    shapes = [file.tensors[name] for name in _names(spec) if len(file.tensors[name].shape) > 1]
    four_bits = any(info.type not in _FLOATS for info in shapes)
    if four_bits and (odd := next((info for info in shapes if info.shape[1] % _GROUP), None)):
        raise UnsupportedModel(
            f"{file.path}: 4 bits of ExecuTorch want rows of a multiple of {_GROUP} weights: {odd.name} has "
            f"{odd.shape[1]}; take --type F16, which becomes float32"
        )
    return _Package(file, spec, request.n_ctx or min(spec.n_ctx_train, _USUAL_N_CTX), four_bits)


def _names(spec: ModelSpec) -> list[str]:
    """Tensors of the file that the program has, each once."""
    return list(dict.fromkeys(ref if isinstance(ref, str) else ref.name for _, ref in weights_of(spec)))


def _planned(package: _Package) -> list[PlannedTensor]:
    """The matrices as they will be written; a tied embedding matrix is there twice, for lookups and for logits."""
    file, found = package.file, []
    for name, ref in weights_of(package.spec):
        info = file.tensors[ref if isinstance(ref, str) else ref.name]
        if len(info.shape) == 1:
            continue
        n, n_rows = int(np.prod(info.shape)), info.shape[0]
        if not package.four_bits:
            written, n_bytes = GGMLType.F32, 4 * n
        elif name == "tok_embeddings.weight":
            written, n_bytes = GGMLType.Q8_0, n + 4 * n_rows
        else:
            written, n_bytes = GGMLType.Q4_0, n // 2 + n // _GROUP * 2
        found.append(PlannedTensor(name, info.type, written, n_bytes))
    return found


def _peak_bytes(package: _Package) -> int:
    """Most memory of the exporter. It has the weights as floats thrice: loaded, packed for XNNPACK, and in the file."""
    refs = [ref if isinstance(ref, str) else ref.name for _, ref in weights_of(package.spec)]
    in_floats = 4 * sum(int(np.prod(package.file.tensors[name].shape)) for name in refs)
    return 3 * in_floats + _TOOL_BYTES + package.layer_cost[1] * package.spec.n_layers


def _notes(package: _Package) -> list[str]:
    rounded = (
        "The weights are rounded again, to 4 bits in groups of 32 (8da4w), and the embeddings to 8 bits by row: "
        "ExecuTorch cannot keep the codes of a GGUF file. A file of floats (--type F16) becomes float32."
    )
    exact = "The weights become float32; a file with quantised matrices (--type Q4_0) becomes 4 bits."
    n_layers = package.spec.n_layers
    minutes = math.ceil((_TOOL_SECONDS + package.layer_cost[0] * n_layers) / 60)
    takes = (
        f"ExecuTorch's exporter takes about {minutes} minutes of one core of 3 GHz for {n_layers} layers, whatever "
        "their size, and shows no progress. Ctrl-C ends it, and leaves nothing."
    )
    return [rounded if package.four_bits else exact, takes, f"It needs {WANTED} or newer, with XNNPACK."]


def _export(package: _Package, folder: Path) -> dict[str, Any]:
    """Write model.pte with ExecuTorch's exporter, in a process of its own. Raises UnsupportedModel with its words."""
    tokenizer = Tokenizer.from_file(package.file)
    with utf8_name(folder) as place, TemporaryDirectory(dir=place, prefix="export-") as scratch:
        question = {
            "do": "export",
            "source": str(Path(package.file.path).resolve()),
            "folder": scratch,
            "out": str(place / "model.pte"),
            "n_ctx": package.n_ctx,
            "four_bits": package.four_bits,
            "bos": tokenizer.bos_id,
            "eos": sorted(tokenizer.stop_ids),
        }
        try:
            return ask_runtime(RUNTIME, question, "ExecuTorch's exporter", _PATIENCE_SECONDS)
        except ModelFileError as error:
            raise UnsupportedModel(f"{package.file.path}: {error}") from error
