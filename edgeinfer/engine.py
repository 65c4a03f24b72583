"""The engine: a prompt in, a stream of text out.

A session's KV cache outlives a request. The next request keeps the longest beginning of its prompt that the cache has
from this text or an earlier one, and forwards the rest only; as a forward pass gives the same bits however a text is
cut, the text is the same as from an empty cache.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from string import ascii_uppercase
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeAlias, Unpack

from edgeinfer.backends.base import HasProcesses, Progress, Session
from edgeinfer.backends.checks import check_tokens
from edgeinfer.common.arguments import MAX_INT32, check_callback, check_integer, check_text, shown
from edgeinfer.common.errors import (
    ContextOverflow,
    Interrupted,
    InvalidArgument,
    warn,
)
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.types import Device, Logits, MemoryPlan
from edgeinfer.completion import Completion, FinishReason, Piece
from edgeinfer.experimental.device_experts import DeviceExperts
from edgeinfer.logprobs import Score, check_alternatives, score_continuations
from edgeinfer.memory.budget import Ledger
from edgeinfer.memory.process import peak_bytes, resident_bytes
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.offload.control import ExpertControl
from edgeinfer.ranking import ranking_prompt
from edgeinfer.repetition import breakers_of
from edgeinfer.sampling import SamplingOptions, SamplingParams, sample
from edgeinfer.sampling_defaults import default_params
from edgeinfer.speculation.pipeline import Job, Speculator
from edgeinfer.speculation.stats import StatsCounter
from edgeinfer.stream import Output, Record, StopStrings, Stream

if TYPE_CHECKING:
    from edgeinfer.chat import Conversation
    from edgeinfer.models.chat_template import ChatTemplate
    from edgeinfer.models.reasoning import OutputFormat

Prompt: TypeAlias = str | Sequence[int]
_SCORED_ROWS = 4  # rows of logits of a pass of `score`, where no drafts need more


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and how."""

    file: ModelFile
    plan: MemoryPlan
    device: Device
    backend: str  # its name
    ledger: Ledger = Ledger(())  # what was planned for the whole process


@dataclass(frozen=True)
class Helpers:
    """What works beside the model; see Engine."""

    speculator: Speculator | None = None
    experts: ExpertControl | None = None
    device_experts: DeviceExperts | None = None


class Engine(OfOneProcess):
    """A loaded model that completes texts. Made by `load`; a context manager.

    Requests of several threads queue; a stream has the engine from its first piece until it ends or is closed.

    session: the model and its KV cache.  tokenizer, path (of the file), name (the model's own, or the file's), n_ctx,
    memory_plan, device, backend (its name): as loaded.  default_params: of requests that give none, from the file
    (general.sampling.*), or what suits the model if it is a known one.  speculator: makes and checks drafts; None,
    which may be set between requests, decodes without speculation.  experts: decides about the model's expert cache;
    None where all experts are in memory.  device_experts: the device that computes some experts beside the CPU, None
    without one.  ledger: what was planned for the whole process; `memory` compares it with what is taken.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        loaded: Loaded,
        opened: ExitStack,
        helpers: Helpers = Helpers(),
    ) -> None:
        """opened: what is closed with the engine."""
        self.session = session
        self.tokenizer = tokenizer
        self._file = file = loaded.file
        self.path = file.path
        self.name = str(file.metadata.get("general.name") or self.path.stem)
        self.n_ctx = loaded.plan.n_ctx
        self.memory_plan = loaded.plan
        self.device = loaded.device
        self.backend = loaded.backend
        self.default_params, _ = default_params(file)
        self._opened = opened
        self._breakers = lru_cache(maxsize=4)(partial(breakers_of, tokenizer=tokenizer))
        self.speculator = helpers.speculator
        self.experts = helpers.experts
        self.device_experts = helpers.device_experts
        self._ledger = loaded.ledger
        self.has_told_of_system = False  # that its template has no place for a system message
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
        stop: str | Sequence[str] | None = (),
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        logprobs: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """The completion of a prompt. Arguments and errors as for `stream`; `interrupt` ends it early."""
        stream = self.stream(
            prompt,
            max_tokens=max_tokens,
            stop=stop,
            params=params,
            progress=progress,
            logprobs=logprobs,
            **sampling,
        )
        for _ in stream:
            pass
        return stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = (),
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        logprobs: int | None = None,
        output: Output | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """The completion of a prompt, piece by piece.

        prompt: token ids, or a text, read as by `tokenize`.  max_tokens: None or -1 is as many as fit into the context.
        stop: texts that end the completion and are left out of it, None for none; a special token is written by its
        name ("<|im_end|>"), alone or with text around it.  params: how tokens are chosen, None for `default_params`;
        changed by `sampling`, its fields as arguments (temperature, top_k, seed, ...).  progress: called with the share
        of the prompt that is read, 0..1.  logprobs: with the log probability of each token, before sampling parameters,
        and so many of the most likely ones at its place; None for neither.  output: what splits the completion, as
        Conversation does it: None is all text.
        Raises ContextOverflow if the prompt alone is longer than n_ctx, InvalidArgument, ShapeError for ids that the
        model lacks; while it runs NumericalError, BackendLost, and InvalidArgument if this thread has another stream
        of this engine open.
        """
        self._check_open()
        check_callback("progress", progress)
        tokens = self._prompt_tokens(prompt)
        room = self.n_ctx - len(tokens)
        limit = min(_most_tokens(max_tokens), room)
        if params is None:
            params = self.default_params
        elif not isinstance(params, SamplingParams):
            raise InvalidArgument(f"params must be SamplingParams: found {shown(params)}")
        chosen = params.changed(sampling).with_seed()
        if chosen.biases and chosen.biases[-1][0] >= self.tokenizer.n_vocab:
            n_vocab = self.tokenizer.n_vocab
            raise InvalidArgument(f"logit_bias must be of tokens 0..{n_vocab - 1}: found {chosen.biases[-1][0]}")
        record = Record(self.tokenizer, len(tokens), StopStrings(stop), chosen, output, check_alternatives(logprobs))
        record.expert_reads = None if self.experts is None else self.experts.reads
        return Stream(self._pieces(tokens, limit, record, progress), record)

    def score(
        self, prompt: Prompt, continuations: Sequence[Prompt], *, progress: Progress | None = None
    ) -> list[Score]:
        """How likely the model finds each of several continuations of a prompt, in their order.

        The prompt is read once, and short continuations go through a pass together; the logits are those of a plain
        forward pass, bit for bit.  prompt, progress: as for `stream`.  continuations: texts or token ids; a text is cut
        into tokens together with the prompt, where that leaves the tokens of the prompt as they are.
        Raises ContextOverflow, InvalidArgument, ShapeError, Interrupted if `interrupt` was called, NumericalError.
        """
        self._check_open()
        check_callback("progress", progress)
        tokens = self._prompt_tokens(prompt)
        if isinstance(continuations, (str, bytes)) or not isinstance(continuations, Sequence):
            raise InvalidArgument(f"continuations must be several texts or token lists: found {shown(continuations)}")
        following = [self._continuation_tokens(prompt, tokens, each) for each in continuations]
        record = Record(self.tokenizer, len(tokens), StopStrings(None), self.default_params)
        n_rows = _SCORED_ROWS if self.speculator is None else self.speculator.most_rows
        n_rows = min(n_rows, self.session.n_batch)
        with self._taken_by(record), self._step:
            logits = self._evaluate(tokens, record, progress, StatsCounter())
            check = partial(self._check_running, record)
            n_vocab = self.tokenizer.n_vocab
            return score_continuations(self.session, tokens, logits, following, n_vocab, n_rows, check)

    def rank(self, query: str, documents: Sequence[str], template: str | None = None) -> list[tuple[int, float]]:
        """Rank documents by how well they answer a query: (index, log probability), the best first.

        The model is asked to name the best of the documents, A to Z, and the log probabilities of the letters as the
        first token of its answer are compared, so nothing is generated (FIRST, Reddy et al., arXiv:2406.15657).
        documents: 1 to 26 texts.  template: of the prompt, with {query} and {documents}, which are named [A], [B], ...;
        its end must be what the letter follows. None asks through the chat template, if there is one.
        Raises as `score`.
        """
        text, end = ranking_prompt(query, documents, template)
        prompt: Prompt = text + end
        if template is None and self._file.metadata.get("tokenizer.chat_template") is not None:
            messages = [{"role": "user", "content": text}]
            asked = self.template.encode(self.tokenizer, messages, add_generation_prompt=True)
            prompt = [*asked, *self.tokenize(end.lstrip(), add_special=False)]
        letters = ascii_uppercase[: len(documents)]
        scores = self.score(prompt, list(letters))
        first = [score.tokens[0] for score in scores]
        if len({each.token for each in first}) < len(first):
            raise InvalidArgument(f"{self.name} does not tell {', '.join(letters)} apart by their first token here")
        return sorted(enumerate(each.logprob for each in first), key=lambda pair: -pair[1])

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

        add_special: with the tokens that the model needs at the start and the end of a text.  parse_special: the
        texts of special tokens ("<|im_end|>") become those tokens. A text that has the begin or end token already gets
        a second one, with a RuntimeWarning.
        """
        ids = self.tokenizer.encode(check_text("text", text), add_special=add_special, parse_special=parse_special)
        if add_special:
            self._warn_of_two(ids)
        return ids

    def _warn_of_two(self, ids: list[int]) -> None:
        of = self.tokenizer
        for what, adds, id, found in (
            ("begin", of.add_bos, of.bos_id, ids[:2]),
            ("end", of.add_eos, of.eos_id, ids[-2:]),
        ):
            if adds and id is not None and found == [id, id]:
                warn(
                    f"the text {what}s with {of.name(id)}, and the tokenizer of this model adds one: there are two, "
                    "which the model was not trained with; leave it out of the text"
                )

    def detokenize(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids; skip_special leaves out special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special=skip_special)

    def count(self, text: str) -> int:
        """Number of tokens of a text as a prompt."""
        return len(self.tokenize(text))

    @property
    def memory(self) -> Ledger:
        """What was planned and what is taken now, by purpose, for this process as a whole."""
        use = self.session.memory()
        held = {"weights": use.weights - use.mapped, "mapped weights": use.mapped, "activations": use.activations}
        held |= {"KV cache": use.kv_cache - use.windows - use.states, "window": use.windows}
        held |= {"recurrent state": use.states, "expert device": use.expert_device}
        held |= {"experts": use.experts - use.mapped_experts, "experts (mapped)": use.mapped_experts}
        if self.speculator is not None:
            held |= {f"drafters ({part})": n_bytes for part, n_bytes in self.speculator.held().items()}
        others = self.session.model.process_ids if isinstance(self.session.model, HasProcesses) else ()
        resident = resident_bytes() + sum(map(resident_bytes, others))
        peak = peak_bytes() + sum(map(peak_bytes, others))
        return self._ledger.with_taken(held, resident, peak or None)

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
        yield last  # the engine is free again, even for a caller that stops reading at finish_reason

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
            self._check_running(record)
            return record.timed_next(tokens)

    def _check_running(self, record: Record) -> None:
        """Raises Interrupted if somebody stopped the request or closed the engine."""
        if record.interrupted or self._closed:
            raise Interrupted("the request was interrupted")

    def _draw(self, prompt: list[int], limit: int, record: Record, progress: Progress | None) -> Iterator[int]:
        """The tokens that follow the prompt, one after the other, at most `limit`."""
        stats = StatsCounter()
        logits = self._evaluate(prompt, record, progress, stats)
        text, params = list(prompt), record.params
        breakers = self._breakers(tuple(params.dry_sequence_breakers)) if params.has_dry else None

        def draw(logits: Logits, text: list[int]) -> int:
            # Rows of the embedding that no token has, for alignment, are no candidates.
            return sample(logits[: self.tokenizer.n_vocab], params, len(text), text, breakers)

        text.append(draw(logits, text))
        record.note(logits, text[-1])
        if self.speculator is not None:
            is_plain = params.is_greedy and not params.changes_logits
            job = Job(text, limit - 1, draw, params.is_greedy, self.tokenizer.stop_ids, is_plain, params, record.note)
            record.stats = stats
            yield from self.speculator.tokens(job, logits, stats)
            return
        while True:
            yield text[-1]
            del logits  # its memory is for the next ones
            logits = self._forward(text[-1:])
            text.append(draw(logits, text))
            record.note(logits, text[-1])

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

    def _continuation_tokens(self, prompt: Prompt, tokens: list[int], continuation: Prompt) -> list[int]:
        """What follows the tokens of a prompt. Raises as `score`."""
        ids: Prompt = continuation
        if isinstance(continuation, str):
            whole = self.tokenizer.encode(prompt + continuation) if isinstance(prompt, str) else []
            joined = len(whole) > len(tokens) and whole[: len(tokens)] == tokens
            ids = whole[len(tokens) :] if joined else self.tokenize(continuation, add_special=False)
        if isinstance(ids, (bytes, Mapping)) or not isinstance(ids, Sized):
            raise InvalidArgument(f"a continuation must be a text (str) or token ids: found {shown(continuation)}")
        if not ids:
            raise InvalidArgument("a continuation is empty: give at least one token")
        found: list[int] = check_tokens(ids, self.session.spec.n_vocab, len(tokens), self.n_ctx).tolist()
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("this engine is closed")


def _most_tokens(value: object) -> int:
    """Most tokens to generate. Raises InvalidArgument."""
    if value is None:
        return MAX_INT32
    checked = check_integer("max_tokens", value, -1)
    return MAX_INT32 if checked == -1 else checked
