"""`edgeinfer export --to litertlm`: plan, write and check a file for LiteRT-LM."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import InvalidArgument, ModelFileError, TemplateError, UnsupportedModel
from edgeinfer.common.files import behind_links, folder_beside, put_in_place, utf8_name
from edgeinfer.exporters.checks.runtime import answer_tokens, ask_runtime, compare_tokens, run_greedily
from edgeinfer.exporters.finite import FiniteFile
from edgeinfer.exporters.identity import stable_uuid
from edgeinfer.exporters.litertlm.container import Section, compressed_tokenizer, write_container
from edgeinfer.exporters.litertlm.graph import build_model, cache_positions, prefill_lengths
from edgeinfer.exporters.litertlm.library import open_runtime, versions
from edgeinfer.exporters.litertlm.matrices import PIECE_WEIGHTS, is_rounded_again, type_in_file
from edgeinfer.exporters.litertlm.sections import MIN_RUNTIME, executor_section, language_section
from edgeinfer.exporters.litertlm.template import rewritten_template
from edgeinfer.exporters.litertlm.tflite import Constant, Model, Type
from edgeinfer.exporters.request import Plan, PlannedTensor, Progress, Request, Result
from edgeinfer.exporters.tokenizer_json import PROBES, tokenizer_json
from edgeinfer.models import ModelSpec, attention_of, read_spec
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.models.draft_head import is_draft_head
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.tokenizer import Tokenizer

_ENDING = ".litertlm"
_SPARE = 1  # position of a context that an answer does not reach
_USUAL_N_CTX = 1280  # every pass attends to the whole cache, so a large one slows all of them
_MAX_CONSTANT_BYTES = (1 << 31) - 1
_RUNTIME = "edgeinfer.exporters.litertlm.runtime"
# Measured with LiteRT-LM 0.18.1: the process with its libraries, what XNNPACK makes of a byte of weights, and the share
# of the mapped file that is in memory beside them.
_RUNTIME_BYTES, _PACKED, _MAPPED = 120 << 20, 1.06, 0.5
_HEADER_BYTES = 24 << 20  # graphs and their flatbuffer in memory while they are made
_TYPES = {Type.FLOAT32: GGMLType.F32, Type.FLOAT16: GGMLType.F16, Type.INT8: GGMLType.I8}
_CONVERSATION = [
    {"role": "user", "content": "Hello! What is 2 < 3 & 4?"},
    {"role": "assistant", "content": "It is true."},
    {"role": "user", "content": "Thank you.\nGood bye"},
]


class LitertlmTarget:
    """`--to litertlm`, see ExportTarget. Request.more: activations, 16 or 8, see exporters/litertlm/operations.py."""

    def plan(self, request: Request) -> Plan:
        """See ExportTarget.plan. Raises TemplateError too, for a chat template that LiteRT-LM has no words for."""
        with FiniteFile.open(request.source) as file:
            package = _package(request, file)
            if request.out.suffix != _ENDING:
                raise InvalidArgument(f"{request.out}: must end in {_ENDING}, by which LiteRT-LM knows its files")
            if request.check:
                answer_tokens(file, package.n_ctx, _SPARE)
            out = behind_links(request.out)
            n_bytes = package.n_bytes
            disk = n_bytes + (int(_PACKED * package.unpacked_bytes) if request.check else 0)
            return Plan(package.planned(), {out: n_bytes}, package.writing_bytes, disk, list(package.notes()))

    def write(self, request: Request, progress: Progress) -> Result:
        """See ExportTarget.write. Raises BackendUnavailable too, without the packages of LiteRT."""
        if request.check:
            open_runtime()
        path = behind_links(request.out)
        with FiniteFile.open(request.source) as source, folder_beside(path) as folder:
            package = _package(request, source)
            written = folder / path.name
            with written.open("wb") as file:
                package.write(file, progress)
                file.flush()
                os.fsync(file.fileno())
            check, facts, check_bytes = _checked(package, written) if request.check else (None, {}, None)
            put_in_place(written, path)
            return Result([path], check, {**package.facts(), **facts}, check_bytes)


@dataclass(frozen=True)
class Package:
    """What goes into a file. template: rewritten, None where the model has none.  adds_bos: whether the runtime begins
    each text with the begin token."""

    file: ModelFile
    spec: ModelSpec
    tokenizer: Tokenizer
    model: Model
    template: str | None
    adds_bos: bool
    n_ctx: int

    @property
    def n_bytes(self) -> int:
        """About the bytes of the file; what is not weights is estimated."""
        return self.model.constant_bytes + _HEADER_BYTES // 8 + 40 * Tokenizer.size_in(self.file)

    @property
    def writing_bytes(self) -> int:
        """Most memory that writing takes: graphs, a piece of a matrix as floats, one whose rows are put in order."""
        ordered = max((attention_of(layer).n_q * attention_of(layer).n_in for layer in self.spec.layers), default=0)
        return _HEADER_BYTES * len(self.model.graphs) + 24 * PIECE_WEIGHTS + 12 * ordered

    @property
    def running_bytes(self) -> int:
        """About the most memory that the runtime takes: half the file, weights as XNNPACK packs them, two caches."""
        n_cache = cache_positions(self.n_ctx)
        cache = 4 * sum(2 * attention_of(layer).n_kv * n_cache for layer in self.spec.layers)
        n = max(prefill_lengths(self.n_ctx))
        widest = max(attention_of(layer).n_heads * n_cache + 8 * self.spec.n_embd for layer in self.spec.layers)
        return int(_MAPPED * self.n_bytes + _PACKED * self.unpacked_bytes + 2 * cache + 8 * n * widest + _RUNTIME_BYTES)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of the constants as they are computed with: float16 becomes float32."""
        constants = self.model.constants.values()
        return sum(each.n_bytes * (2 if each.type == Type.FLOAT16 else 1) for each in constants)

    def planned(self) -> list[PlannedTensor]:
        """The tensors with the bytes that the file has for them."""
        n_bytes: dict[str, int] = {}
        for constant in self.model.constants.values():
            if constant.tensor is not None:
                n_bytes[constant.tensor] = n_bytes.get(constant.tensor, 0) + constant.n_bytes
        types = {name: info.type for name, info in self.file.tensors.items() if name in n_bytes}
        return [PlannedTensor(name, type, self._written(name, type), n_bytes[name]) for name, type in types.items()]

    def _written(self, name: str, type: GGMLType) -> GGMLType:
        shape = self.file.tensors[name].shape
        return GGMLType.F32 if len(shape) == 1 else _TYPES.get(type_in_file(type, shape[-1]), type)

    def notes(self) -> Iterator[str]:
        """What the user should know."""
        rounded = [each for each in self.planned() if each.written == GGMLType.I8 and is_rounded_again(each.found)]
        if rounded:
            stored = sum(self.file.tensors[each.name].n_bytes for each in rounded)
            yield (
                f"{len(rounded)} tensors are {', '.join(sorted({each.found.name for each in rounded}))}, for which "
                "LiteRT has no kernel: they are rounded again, to 8 bits with one scale a row, which changes them by "
                f"about 1 %; {human_bytes(stored)} there become {human_bytes(sum(each.n_bytes for each in rounded))}"
            )
        if any(constant.type == Type.INT4 for constant in self.model.constants.values()):
            yield "Codes of 4 bits are kept; XNNPACK rounds their scales to bfloat16, by at most 0.4 %, when it runs."
        if self.template is None:
            yield "The model has no chat template, and the file has none: give its prompts as plain text."
        if self.tokenizer.add_bos and not self.adds_bos:
            yield "The begin token stands in the chat template: plain prompts have to begin with it too."
        yield (
            f"It needs LiteRT-LM {MIN_RUNTIME} or newer and, with {self.n_ctx} tokens, some "
            f"{human_bytes(self.running_bytes)} of memory (estimated)."
        )

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "n_ctx": self.n_ctx,
            "cache_positions": cache_positions(self.n_ctx),
            "prefill_lengths": prefill_lengths(self.n_ctx),
            "runtime": {"name": "LiteRT-LM", "at_least": MIN_RUNTIME},
            "packages": versions(),
            "estimated_peak_bytes": self.running_bytes,
        }

    def write(self, file: BinaryIO, progress: Progress) -> None:
        """Write the whole file. Raises OSError."""
        total, done = max(1, sum(each.n_bytes for each in self.model.constants.values())), 0

        def count(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            progress(done / total)

        tokenizer = json.dumps(tokenizer_json(self.file), ensure_ascii=False, separators=(",", ":")).encode()
        begins_with = self.tokenizer.bos_id if self.adds_bos else None
        language = language_section(self.spec, self.tokenizer, self.template, self.n_ctx, begins_with)
        sections = [
            Section.of("LlmMetadataProto", language),
            Section.of("ExecutorMetadataProto", executor_section(self.spec.n_layers, cache_positions(self.n_ctx))),
            compressed_tokenizer(tokenizer),
            Section("TFLiteModel", lambda out: self.model.write(out, count), {"model_type": "tf_lite_prefill_decode"}),
        ]
        texts = {"Authors": "edgeinfer", "uuid": stable_uuid(language, tokenizer)}
        write_container(file, texts, sections)


def _package(request: Request, file: ModelFile) -> Package:
    """What a request makes of a model. Raises UnsupportedModel, ModelFileError, TemplateError."""
    if is_draft_head(file) or request.draft is not None:
        raise UnsupportedModel(f"{file.path}: LiteRT-LM runs one model alone: --to genai has drafts")
    spec, tokenizer = read_spec(file), Tokenizer.from_file(file)
    n_ctx = request.n_ctx or min(spec.n_ctx_train, _USUAL_N_CTX)
    model = build_model(file, spec, n_ctx, request.more.get("activations", 16) == 16)
    _check_sizes(file, model.constants.values())
    template, adds_bos = _template(file, tokenizer)
    return Package(file, spec, tokenizer, model, template, adds_bos, n_ctx)


def _check_sizes(file: ModelFile, constants: Iterable[Constant]) -> None:
    """Raises UnsupportedModel for a tensor that the runtime cannot address."""
    for constant in constants:
        if constant.n_bytes > _MAX_CONSTANT_BYTES:
            raise UnsupportedModel(
                f"{file.path}: {constant.name} takes {human_bytes(constant.n_bytes)}, a tensor of TFLite has at most "
                f"{human_bytes(_MAX_CONSTANT_BYTES)}: take a type of fewer bits (--type Q4_0)"
            )


def _template(file: ModelFile, tokenizer: Tokenizer) -> tuple[str | None, bool]:
    """The rewritten template, and whether the runtime begins texts. Raises TemplateError."""
    ids = (tokenizer.bos_id, tokenizer.eos_id)
    bos, eos = ("" if id is None else tokenizer.token_bytes(id).decode(errors="replace") for id in ids)
    if tokenizer.chat_template is None:
        return None, tokenizer.add_bos
    source = ChatTemplate.from_file(file, tokenizer).source
    if not tokenizer.add_bos:
        return rewritten_template(source, bos, eos), False
    try:
        is_literal = ChatTemplate(source, "", eos).render(_CONVERSATION[:1]).startswith(bos)
    except TemplateError:
        is_literal = False
    return rewritten_template(source, bos if is_literal else "", eos), not is_literal


# --- checking ---------------------------------------------------------------------------------------------------------


def _checked(package: Package, path: Path) -> tuple[str, dict[str, Any], int | None]:
    """Run a file in the real runtime; gives what to say, facts for the manifest, and the runtime's peak memory.

    Raises ModelFileError where tokens, the template or the tokenizer are not those of the source.
    """
    n_tokens = answer_tokens(package.file, package.n_ctx, _SPARE)
    run = run_greedily(package.file, n_tokens)
    wanted = _renderings(package)
    bos = b"" if package.tokenizer.bos_id is None else package.tokenizer.token_bytes(package.tokenizer.bos_id)
    prompt = run.text.removeprefix(bos.decode(errors="replace")) if package.adds_bos else run.text
    question: dict[str, Any] = {
        "prompt": prompt,
        "n_tokens": min(n_tokens, len(run.tokens) + 1),
        "messages": _CONVERSATION if wanted else None,
        "texts": PROBES,
    }
    with utf8_name(path) as name:
        question |= {"path": str(name), "folder": str(name.parent)}
        found = ask_runtime(_RUNTIME, question, "LiteRT-LM")
    runtime = f"LiteRT-LM {found['version']}"
    is_same = _stable(found["text"]) == _stable(package.tokenizer.decode(run.tokens))
    said = compare_tokens(run, run.tokens if is_same else found["tokens"], runtime)
    _check_renderings(package, wanted, found["rendered"], runtime)
    _check_ids(package, found["ids"], runtime)
    return said, {"checked_in": runtime}, found["peak_bytes"]


def _stable(text: str) -> str:
    """A text without a character at its end that is not whole."""
    return text.rstrip("\ufffd")


def _renderings(package: Package) -> list[str | None]:
    """What the source's template makes of the beginnings of a conversation that end with the user; None where it
    refuses, or the runtime renders no such text."""
    if package.template is None:
        return []
    chat = ChatTemplate.from_file(package.file, package.tokenizer)
    found: list[str | None] = []
    for n in range(1, len(_CONVERSATION) + 1):
        try:
            found.append(chat.render(_CONVERSATION[:n]) if _CONVERSATION[n - 1]["role"] == "user" else None)
        except TemplateError:
            found.append(None)
    return found


def _check_renderings(package: Package, wanted: list[str | None], found: list[str] | None, runtime: str) -> None:
    """Raises ModelFileError where the runtime renders a conversation otherwise."""
    id = package.tokenizer.bos_id if package.adds_bos else None
    bos = "" if id is None else package.tokenizer.token_bytes(id).decode(errors="replace")
    for text, rendered in zip(wanted, found or [], strict=False):
        if text is not None and rendered != text.removeprefix(bos):
            raise ModelFileError(
                f"{package.file.path}: {runtime} renders the chat template otherwise: wanted {text!r:.300}, found "
                f"{rendered!r:.300}; nothing was written"
            )


def _check_ids(package: Package, found: list[list[int]], runtime: str) -> None:
    """Raises ModelFileError where the runtime cuts a text into other tokens."""
    for text, ids in zip(PROBES, found, strict=True):
        wanted = package.tokenizer.encode(text, parse_special=True, add_special=False)
        if ids != wanted:
            names = [[package.tokenizer.name(id) for id in each] for each in (wanted, ids)]
            raise ModelFileError(
                f"{package.file.path}: {runtime} cuts {text!r:.60} into other tokens: wanted {names[0]!r:.200}, found "
                f"{names[1]!r:.200}; nothing was written"
            )
