"""`edgeinfer export --to genai`: plan, write and check a folder for ONNX Runtime GenAI."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.backends.onnx import data_names, write_graph
from edgeinfer.backends.onnx.graph import Graph
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
from edgeinfer.exporters.genai.config import CHUNK, MAX_DRAFT_TOKENS, decoder_config, genai_config, search_notes
from edgeinfer.exporters.genai.graph import genai_graph
from edgeinfer.exporters.genai.runtime import WANTED, check_installed
from edgeinfer.exporters.onnx import planned_tensors
from edgeinfer.exporters.request import ExportTarget, Plan, Progress, Request, Result
from edgeinfer.exporters.tokenizer_json import probes_of, write_tokenizer
from edgeinfer.models import ModelSpec, attention_of, read_spec
from edgeinfer.models.draft_head import is_draft_head
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.tokenization.metadata import TokenizerMetadata
from edgeinfer.models.tokenizer import Tokenizer

NAMES = ("model.onnx*", "draft.onnx*", "genai_config.json", "tokenizer.json", "tokenizer_config.json", "manifest.json")
MAX_FILE_BYTES = 2_000_000_000  # file systems and packages of phones end at 2^31 bytes
_USUAL_N_CTX = 2048
_RUNTIME = "edgeinfer.exporters.genai.runtime"
_CODES_8 = (GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q5_K, GGMLType.Q6_K)
# Measured: the process with its libraries, and what ONNX Runtime makes of a byte of weights when it packs them anew.
_RUNTIME_BYTES, _PACKED = 160 << 20, 1.05


class GenaiTarget(ExportTarget):
    """`--to genai`, see ExportTarget. Request.draft is a model with the same vocabulary, or "ngram"."""

    @override
    def plan(self, request: Request) -> Plan:
        check_folder(request.out, NAMES)
        with FiniteFile.open(request.source) as file, _opened(request, file) as package:
            if request.check:
                answer_tokens(file, package.n_ctx, package.spare)
            files: dict[Path, int] = {}
            for decoder in package.decoders:
                constants = list(decoder.graph.constants.values())
                files |= {request.out / decoder.name: 0}
                for name, n_bytes in data_names(f"{decoder.name}.data", constants, MAX_FILE_BYTES).items():
                    files[request.out / name] = n_bytes
            tensors = [tensor for each in package.decoders for tensor in planned_tensors(each.graph, each.file)]
            largest = max(each.n_bytes for decoder in package.decoders for each in decoder.graph.constants.values())
            disk = sum(files.values()) + _text_bytes(file)
            return Plan(tensors, files, 6 * largest + _table_bytes(package), disk, list(_notes(request, package)))

    @override
    def write(self, request: Request, progress: Progress) -> Result:
        """See ExportTarget.write. Raises BackendUnavailable too, where the check has no runtime."""
        if request.check:
            check_installed()
        with FiniteFile.open(request.source) as file, _opened(request, file) as package:
            with whole_folder(request.out, NAMES) as folder:
                names = _write(package, folder, progress)
                check, facts, check_bytes = _checked(package, folder) if request.check else (None, {}, None)
            facts |= {
                "n_ctx": package.n_ctx,
                "runtime": minimum_runtime(WANTED),
                "estimated_peak_bytes": estimated_peak(package),
            }
            return Result([request.out / name for name in names], check, facts, check_bytes)


@dataclass(frozen=True)
class Decoder:
    """A model of a package. name: of its file."""

    file: ModelFile
    spec: ModelSpec
    graph: Graph
    name: str


@dataclass(frozen=True)
class Package:
    """What is in a folder: the model, and the draft model if there is one."""

    decoders: list[Decoder]
    n_ctx: int
    ngrams: bool

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted."""
        return self.ngrams or len(self.decoders) > 1

    @property
    def spare(self) -> int:
        """Positions of a context that drafts take behind an answer."""
        return MAX_DRAFT_TOKENS + 1 if self.drafts else 0


def estimated_peak(package: Package) -> int:
    """Most memory that GenAI takes with a whole context: libraries, packed weights, caches and a piece of a prompt."""
    peak = _RUNTIME_BYTES
    for decoder in package.decoders:
        spec, attention = decoder.spec, attention_of(decoder.spec.layers[0])
        cache = 2 * spec.n_layers * attention.n_kv_heads * attention.head_dim * package.n_ctx * 4
        rows = CHUNK if package.drafts else 1
        widest = max(_widths(spec)) * CHUNK * 4 * 4 + 2 * rows * spec.n_logits * 4
        peak += int(_PACKED * decoder.graph.constant_bytes) + cache + widest + _scores(spec, package.n_ctx)
    return peak


def _widths(spec: ModelSpec) -> Iterator[int]:
    yield spec.n_embd
    for layer in spec.layers:
        yield attention_of(layer).n_heads * attention_of(layer).head_dim
        yield int(getattr(layer.ffn, "n_ff", 0))


def _scores(spec: ModelSpec, n_ctx: int) -> int:
    """Bytes of the attention's scores, and of its mask, for a piece of a prompt."""
    return CHUNK * n_ctx * 4 * (attention_of(spec.layers[0]).n_heads + 2)


# --- what is asked for ------------------------------------------------------------------------------------------------


@contextmanager
def _opened(request: Request, file: ModelFile) -> Iterator[Package]:
    """What a request makes of a model. Raises InvalidArgument, UnsupportedModel, ModelFileError, OSError."""
    with ExitStack() as opened:
        if is_draft_head(file):
            raise UnsupportedModel(f"{file.path} is a draft head: ONNX Runtime GenAI runs whole models only")
        ngrams = request.draft == "ngram"
        drafts = request.draft is not None
        spec = read_spec(file)
        n_ctx = request.n_ctx or min(spec.n_ctx_train, _USUAL_N_CTX)
        decoders = [Decoder(file, spec, genai_graph(file, spec, n_ctx, drafts), "model.onnx")]
        if drafts and not ngrams:
            draft = opened.enter_context(FiniteFile.open(Path(str(request.draft))))
            decoders.append(_draft_model(draft, decoders[0], n_ctx))
        yield Package(decoders, n_ctx, ngrams)


def _draft_model(file: ModelFile, target: Decoder, n_ctx: int) -> Decoder:
    """Raises UnsupportedModel, InvalidArgument for a model that cannot draft for this target."""
    if is_draft_head(file):
        raise UnsupportedModel(
            f"{file.path} is a draft head: ONNX Runtime GenAI drafts with a whole model of the same vocabulary, or "
            "with --draft ngram"
        )
    spec = read_spec(file)
    tokens = [TokenizerMetadata(each).strings("tokens").tolist() for each in (file, target.file)]
    if spec.n_logits != target.spec.n_logits or tokens[0] != tokens[1]:
        raise InvalidArgument(
            f"{file.path}: a draft model must have the vocabulary of the model, {target.spec.n_logits} logits: found "
            f"{spec.n_logits}" + (", of other tokens" if spec.n_logits == target.spec.n_logits else "")
        )
    return Decoder(file, spec, genai_graph(file, spec, n_ctx, True), "draft.onnx")


def _notes(request: Request, package: Package) -> Iterator[str]:
    yield "The codes of the file's formats are kept exactly; activations are rounded to 8 bits by block when it runs."
    for decoder in package.decoders:
        wider = [info for info in decoder.file.tensors.values() if info.type in _CODES_8]
        if wider:
            stored, formats = sum(info.n_bytes for info in wider), sorted({info.type.name for info in wider})
            yield (
                f"{decoder.file.path.name}: {len(wider)} tensors are {', '.join(formats)} and get codes of 8 bits, for "
                f"ONNX Runtime has none of 5 or 6: {human_bytes(stored)} there become "
                f"{human_bytes(_bytes_of(decoder, wider))} here; Q4_0, Q4_1, Q4_K and Q8_0 keep their sizes"
            )
        large = [name for name, constant in decoder.graph.constants.items() if constant.n_bytes > MAX_FILE_BYTES]
        for name in large:
            yield f"{name} alone takes more than {human_bytes(MAX_FILE_BYTES)}, and a file of its own"
    yield from search_notes(package.decoders[0].file)
    yield (
        f"It needs {WANTED} or newer and, with {package.n_ctx} tokens, some {human_bytes(estimated_peak(package))} of "
        "memory (estimated)."
    )


def _bytes_of(decoder: Decoder, wanted: list[Any]) -> int:
    names = {name for name, info in decoder.file.tensors.items() if any(info is each for each in wanted)}
    return sum(tensor.n_bytes for tensor in planned_tensors(decoder.graph, decoder.file) if tensor.name in names)


def _table_bytes(package: Package) -> int:
    """Memory for tables of rotations, which are made in double precision."""
    tables = sum(
        constant.n_bytes
        for decoder in package.decoders
        for name, constant in decoder.graph.constants.items()
        if name.startswith(("rope.", "query_factors."))
    )
    return 5 * tables


def _text_bytes(file: ModelFile) -> int:
    """About what graphs and tokenizer take beside the weights."""
    return (4 << 20) + 80 * Tokenizer.size_in(file)


# --- writing and checking ---------------------------------------------------------------------------------------------


def _write(package: Package, folder: Path, progress: Progress) -> list[str]:
    """Write all files into a folder; gives their names."""
    model, *drafts = package.decoders
    names = []
    sizes = [decoder.graph.constant_bytes for decoder in package.decoders]
    for index, decoder in enumerate(package.decoders):
        share = _share(progress, sum(sizes[:index]), sizes[index], sum(sizes))
        names += write_graph(decoder.graph, folder / decoder.name, f"{decoder.name}.data", share, MAX_FILE_BYTES)
    draft = decoder_config(drafts[0].spec, drafts[0].name) if drafts else None
    config = genai_config(model.file, model.spec, package.n_ctx, ngrams=package.ngrams, draft=draft)
    path = folder / "genai_config.json"
    path.write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
    return [each.name for each in (*names, path, *write_tokenizer(model.file, folder))]


def _share(progress: Progress, before: int, own: int, total: int) -> Callable[[float], None]:
    return lambda done: progress((before + done * own) / max(1, total))


def _checked(package: Package, folder: Path) -> tuple[str, dict[str, Any], int | None]:
    """Run a package in the real runtime; gives what to say, facts for the manifest, and the runtime's peak memory.

    Raises ModelFileError where tokens, the template or the tokenizer are not those of the source.
    """
    file = package.decoders[0].file
    run = run_greedily(file, answer_tokens(file, package.n_ctx, package.spare))
    with temporary_folder() as scratch, utf8_name(folder) as place:
        logits = scratch / "logits.npy"
        found = ask_runtime(_RUNTIME, _question(package, place, run, logits), "onnxruntime-genai")
        rows = np.load(logits)
    runtime = f"onnxruntime-genai {found['version']}"
    said, figures = compare_logits(run, rows, runtime)
    if run.tokens or found["answer"]:  # else both end at once, and the logits are all there is
        compare_tokens(run, found["answer"], runtime)
    if found["rendered"] is not None and found["rendered"] != run.text:
        raise ModelFileError(
            f"{file.path}: {runtime} renders the chat template otherwise: wanted {run.text!r:.300}, found "
            f"{found['rendered']!r:.300}; nothing was written"
        )
    _check_ids(file, found["ids"], runtime)
    facts: dict[str, Any] = {"checked_in": runtime, **figures}
    if package.drafts:
        n_made = len(found["answer"])
        said += f"; with drafts {found['n_passes']} passes of the model for {n_made} tokens"
        facts |= {name: found[name] for name in ("n_passes", "n_accepted")} | {"n_tokens": n_made}
    return said, facts, found["peak_bytes"]


def _question(package: Package, folder: Path, run: GreedyRun, logits: Path) -> dict[str, Any]:
    """See edgeinfer.exporters.genai.runtime.answer."""
    return {
        "folder": str(folder),
        "prompt": run.prompt,
        "tokens": run.forced,
        "n_ctx": package.n_ctx,
        "messages": None if Tokenizer.from_file(package.decoders[0].file).chat_template is None else MESSAGES,
        "texts": probes_of(package.decoders[0].file),
        "logits": str(logits),
    }


def _check_ids(file: ModelFile, found: list[list[int]], runtime: str) -> None:
    """Raises ModelFileError where a runtime cuts a text into other tokens."""
    tokenizer = Tokenizer.from_file(file)
    for text, ids in zip(probes_of(file), found, strict=True):
        wanted = tokenizer.encode(text, parse_special=True)
        if ids != wanted:
            names = [[tokenizer.name(id) for id in each] for each in (wanted, ids)]
            raise ModelFileError(
                f"{file.path}: {runtime} cuts {text!r:.60} into other tokens: wanted {names[0]!r:.200}, found "
                f"{names[1]!r:.200}; nothing was written"
            )
