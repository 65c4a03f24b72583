"""The engine: a prompt in, a stream of text out.

A session's KV cache outlives a request. The next request keeps the longest beginning of its prompt that the cache has
from this text or an earlier one, and forwards the rest only; as a forward pass gives the same bits however a text is
cut, the text is the same as from an empty cache.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sized
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from string import ascii_uppercase
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, cast, overload

from edgeinfer.asynchronous import pieces_of
from edgeinfer.backends.base import HasProcesses, Progress, Session
from edgeinfer.backends.checks import check_tokens
from edgeinfer.common.arguments import MAX_INT32, check_callback, check_flag, check_integer, check_text, shown
from edgeinfer.common.errors import (
    ContextOverflow,
    Interrupted,
    InvalidArgument,
    warn,
)
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.settings import DEFAULT_TBT_MS
from edgeinfer.common.types import Device, Logits, MemoryPlan
from edgeinfer.completion import Completion, FinishReason, Piece
from edgeinfer.constraints.options import Wanted, split_options, wanted_of
from edgeinfer.context_cache.cache import ContextCache
from edgeinfer.experimental.device_experts import DeviceExperts
from edgeinfer.logprobs import Score, TokenLogprob, check_alternatives, sampled_logprob, score_continuations
from edgeinfer.many import (
    Choice,
    Vote,
    as_they_end,
    check_samples,
    count_votes,
    in_order,
    is_decided,
    seed_of_sample,
)
from edgeinfer.memory.budget import Item, Ledger
from edgeinfer.memory.process import peak_bytes, resident_bytes
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.reasoning import OutputParser
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.offload.control import ExpertControl
from edgeinfer.ranking import ranking_prompt
from edgeinfer.repetition import breakers_of
from edgeinfer.sampling import SamplingOptions, SamplingParams, sample
from edgeinfer.sampling_defaults import default_params
from edgeinfer.scheduling.pace import Pace
from edgeinfer.scheduling.request import Request
from edgeinfer.scheduling.scheduler import Scheduler
from edgeinfer.scheduling.sequence import Sequence
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.stream import ChoiceOptions, NoteSampled, Output, Record, RequestOptions, StopStrings, Stream, Submit
from edgeinfer.template_values import Reasoning

if TYPE_CHECKING:
    from edgeinfer.chat import Conversation
    from edgeinfer.constraints.constraint import Constraints, ConstraintState
    from edgeinfer.models.chat_template import ChatTemplate
    from edgeinfer.models.reasoning import OutputFormat

Prompt: TypeAlias = str | SequenceOf[int]
_SAMPLING = SamplingOptions.__annotations__.keys()
_SCORED_ROWS = 4  # rows of logits of a pass of `score`, where no drafts need more


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and how."""

    file: ModelFile
    plan: MemoryPlan
    device: Device
    backend: str  # its name
    ledger: Ledger = Ledger(())  # what was planned for the whole process
    n_parallel: int = 1  # most texts that run at once
    tbt: float = DEFAULT_TBT_MS  # milliseconds of a pass that reads a prompt beside texts that run
    room: int | None = None  # bytes that a budget leaves beside the ledger, None without a budget
    chat_template: str | None = None  # Jinja, or the name of a known one, in place of the file's
    reasoning: Reasoning = "auto"


@dataclass(frozen=True)
class Helpers:
    """What works beside the model; see Engine."""

    speculator: Speculator | None = None
    experts: ExpertControl | None = None
    device_experts: DeviceExperts | None = None
    contexts: ContextCache | None = None


class Engine(OfOneProcess):
    """A loaded model that completes texts. Made by `load`; a context manager.

    Any thread may ask at any time. With the native backend up to `parallel` texts run at once, others wait; with
    another one texts take turns. What runs beside a text changes nothing of it.

    session: the model and its KV cache.  tokenizer, path (of the file), name (the model's own, or the file's), n_ctx,
    memory_plan, device, backend (its name): as loaded.  default_params: of requests that give none, from the file
    (general.sampling.*), or what suits the model if it is a known one.  speculator: makes and checks drafts; None,
    which may be set between requests, decodes without speculation.  reasoning: whether a model reasons before it
    answers, as loaded.  experts: decides about the model's expert cache; None where all experts are in memory.
    device_experts: the device that computes some experts beside the CPU, None without one.  contexts: what is kept on
    disk, None where nothing is.  ledger: what was planned for the whole process; `memory` compares it with what is
    taken.
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
        self.scheduler = Scheduler(session, loaded.n_parallel, loaded.plan.n_batch, Pace(loaded.tbt))
        self.scheduler.speculator = helpers.speculator
        self.experts = helpers.experts
        self.device_experts = helpers.device_experts
        self.contexts = self.scheduler.contexts = helpers.contexts
        self._ledger, self._room = loaded.ledger, loaded.room
        self._given_template, self.reasoning = loaded.chat_template, loaded.reasoning
        self.has_told_of_system = False  # that its template has no place for a system message
        self._closed = False

    @overload
    def generate(self, prompt: Prompt, *, n: None = None, **options: Unpack[RequestOptions]) -> Completion: ...

    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Unpack[RequestOptions]) -> list[Completion]: ...

    def generate(
        self, prompt: Prompt, *, n: int | None = None, **options: Unpack[RequestOptions]
    ) -> Completion | list[Completion]:
        """The completion of a prompt. Arguments and errors as for `stream`; `interrupt` ends it early.

        n: that many samples, as a list; sample i is what the seed + i gives alone. The prompt is read once.
        """
        if n is None:
            stream = self.stream(prompt, **options)
            for _ in stream:
                pass
            return stream.completion
        return list(in_order(self._ended(self._samples(prompt, check_samples("n", n), **options))))

    def samples(
        self, prompt: Prompt, n: int, *, first: int | None = None, **options: Unpack[RequestOptions]
    ) -> Iterator[Completion]:
        """Samples of a prompt as they end; sample i is what the seed + i gives alone (Completion.params.seed tells).

        first: ends when so many have ended, the shortest ones mostly (First Finish Search, Agarwal et al.,
        arXiv:2505.18149); the others are stopped.  Otherwise as `generate`.
        """
        n = check_samples("n", n)
        most = n if first is None else check_integer("first", first, 1, n)
        streams = self._samples(prompt, n, **options)
        return (completion for _, completion in islice(self._ended(streams), most))

    def vote(
        self, prompt: Prompt, n: int, key: Callable[[str], Choice | None], **options: Unpack[RequestOptions]
    ) -> Vote[Choice]:
        """What most of n samples say (self-consistency, Wang et al., arXiv:2203.11171).

        key: what a text says, hashable; None for one that says nothing.  Samples that cannot change the result any more
        are stopped.  Otherwise as `generate`.
        """
        n = check_samples("n", n)
        check_callback("key", key)
        said: dict[int, Choice | None] = {}
        completions = []
        with closing(self._ended(self._samples(prompt, n, **options))) as ended:
            for number, completion in ended:
                said[number] = key(completion.text)
                completions.append(completion)
                if is_decided(list(said.values()), n - len(said)):
                    break
        counts = count_votes([said[number] for number in sorted(said)])
        return Vote(counts[0][0] if counts else None, tuple(counts), tuple(completions))

    @overload
    def generate_many(
        self, prompts: Iterable[Prompt], *, as_completed: Literal[False] = False, **options: Unpack[RequestOptions]
    ) -> Iterator[Completion]: ...

    @overload
    def generate_many(
        self, prompts: Iterable[Prompt], *, as_completed: Literal[True], **options: Unpack[RequestOptions]
    ) -> Iterator[tuple[int, Completion]]: ...

    def generate_many(
        self, prompts: Iterable[Prompt], *, as_completed: bool = False, **options: Unpack[RequestOptions]
    ) -> Iterator[Completion] | Iterator[tuple[int, Completion]]:
        """The completions of several prompts, which run at once as far as there is room, in their order.

        prompts: taken as there is room for them.  as_completed: (number of the prompt, completion) of each when it
        ends. options: of all, as for `stream`. What that raises for a prompt is raised when its turn comes.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise InvalidArgument(f"prompts must be several texts or token lists: found {shown(prompts)}")
        check_flag("as_completed", as_completed)
        ended = self._ended(self.stream(prompt, **options) for prompt in prompts)
        return ended if as_completed else in_order(ended)

    async def agenerate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """As `generate`, for asyncio: other tasks go on meanwhile, and cancelling this one ends the text."""
        stream = self.stream(prompt, **options)
        async for _ in pieces_of(stream):
            pass
        return stream.completion

    def astream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncIterator[Piece]:
        """As `stream`, for asyncio."""
        return pieces_of(self.stream(prompt, **options))

    def _samples(self, prompt: Prompt, n: int, **options: Unpack[RequestOptions]) -> Iterator[Stream]:
        """Streams of samples of a prompt."""
        tokens = self._prompt_tokens(prompt)
        first = self.stream(tokens, **options)
        params = first.params
        yield first
        for number in range(1, n):
            options["params"] = replace(params, seed=seed_of_sample(cast(int, params.seed), number))
            yield self.stream(tokens, **_but_sampling(options))

    def _ended(self, streams: Iterable[Stream]) -> Generator[tuple[int, Completion], None, None]:
        """The numbers and completions of streams as they end. Raises the error of one that failed."""
        numbers: dict[int, int] = {}

        def numbered() -> Iterator[Stream]:
            for number, stream in enumerate(streams):
                numbers[id(stream)] = number
                yield stream

        for stream in as_they_end(self.scheduler, numbered(), 2 * self.scheduler.n_parallel):
            if stream.error is not None:
                raise stream.error
            yield numbers.pop(id(stream)), stream.completion

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | SequenceOf[str] | None = (),
        params: SamplingParams | None = None,
        progress: Progress | None = None,
        logprobs: int | None = None,
        sampled_logprobs: bool = False,
        output: Output | None = None,
        priority: int = 0,
        timeout: float | None = None,
        begun: SequenceOf[int] = (),
        **options: Unpack[ChoiceOptions],
    ) -> Stream:
        """The completion of a prompt, piece by piece.

        prompt: token ids, or a text, read as by `tokenize`.  max_tokens: None or -1 is as many as fit into the context.
        stop: texts that end the completion and are left out of it, None for none; a special token is written by its
        name ("<|im_end|>"), alone or with text around it.  params: how tokens are chosen, None for `default_params`;
        changed by `options`, its fields as arguments (temperature, top_k, seed, ...).  progress: called with the share
        of the prompt that is read, 0..1.  logprobs: with the log probability of each token, before sampling parameters,
        and so many of the most likely ones at its place; None for neither.  sampled_logprobs: those of the draw
        instead, without a constraint.  output: what splits the completion, as Conversation does it: None is all text.
        priority: texts with a higher one come first where not all can run.  timeout: seconds from the first piece on,
        after which the text ends as it is ("timeout").  begun: its first tokens, drawn elsewhere with the same options
        and seed; the stream has them and goes on as that would.  schema, regex, grammar, choices, json: what it may be,
        one of them; see edgeinfer.constraints.options.ConstraintOptions. Raises ContextOverflow if the prompt alone is
        longer than n_ctx, InvalidArgument, InvalidConstraint, ShapeError for ids that the model lacks,
        BackendUnavailable for a constraint without llguidance, BudgetExceeded without room for it; while it runs
        NumericalError, ConstraintError, BackendLost, and EngineBusy if too many texts wait.
        """
        self._check_open()
        check_callback("progress", progress)
        tokens = self._prompt_tokens(prompt)
        limit = min(_most_tokens(max_tokens), self.n_ctx - len(tokens))
        constraint_options, sampling = split_options(options)
        chosen, wanted = self._chosen_params(params, sampling), wanted_of(constraint_options)
        n_alternatives = check_alternatives(logprobs)
        drawn = self._begun_tokens(begun, len(tokens), n_alternatives)
        record = self._record(tokens, chosen, wanted, StopStrings(stop), output, n_alternatives, sampled_logprobs)
        if limit == 0:
            return Stream(_nothing(record), record)
        order = _checked_order(priority, timeout)

        def submit() -> Sequence:
            return self.scheduler.submit(self._request(tokens, limit, record, progress, *order, drawn))

        return Stream(self._pieces(submit, record, progress), record, (self.scheduler, submit))

    def score(
        self, prompt: Prompt, continuations: SequenceOf[Prompt], *, progress: Progress | None = None
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
        if isinstance(continuations, (str, bytes)) or not isinstance(continuations, SequenceOf):
            raise InvalidArgument(f"continuations must be several texts or token lists: found {shown(continuations)}")
        following = [self._continuation_tokens(prompt, tokens, each) for each in continuations]
        record = Record(self.tokenizer, len(tokens), StopStrings(None), self.default_params)
        n_rows = _SCORED_ROWS if self.speculator is None else self.speculator.most_rows
        sequence = self.scheduler.submit(self._request(tokens, 0, record, progress))
        try:
            self._next(sequence, progress)
            with self.scheduler.alone():
                check = partial(self._check_running, sequence)
                check()
                session, logits = cast(Session, sequence.session), cast(Logits, sequence.logits)
                n_vocab, n_rows = self.tokenizer.n_vocab, min(n_rows, session.n_batch)
                self.scheduler.make_room(sequence, max([n_rows, *map(len, following)]))
                return score_continuations(session, tokens, logits, following, n_vocab, n_rows, check)
        finally:
            self.scheduler.cancel(sequence)

    def rank(self, query: str, documents: SequenceOf[str], template: str | None = None) -> list[tuple[int, float]]:
        """Rank documents by how well they answer a query: (index, log probability), the best first.

        The model is asked to name the best of the documents, A to Z, and the log probabilities of the letters as the
        first token of its answer are compared, so nothing is generated (FIRST, Reddy et al., arXiv:2406.15657).
        documents: 1 to 26 texts.  template: of the prompt, with {query} and {documents}, which are named [A], [B], ...;
        its end must be what the letter follows. None asks through the chat template, if there is one.
        Raises as `score`.
        """
        text, end = ranking_prompt(query, documents, template)
        prompt: Prompt = text + end
        has_chats = self.has_given_template or "tokenizer.chat_template" in self._file.metadata
        if template is None and has_chats:
            messages = [{"role": "user", "content": text}]
            asked = self.template.encode(self.tokenizer, messages, add_generation_prompt=True)
            prompt = [*asked, *self.tokenize(end.lstrip(), add_special=False)]
        letters = ascii_uppercase[: len(documents)]
        scores = self.score(prompt, list(letters))
        first = [score.tokens[0] for score in scores]
        if len({each.token for each in first}) < len(first):
            raise InvalidArgument(f"{self.name} does not tell {', '.join(letters)} apart by their first token here")
        return sorted(enumerate(each.logprob for each in first), key=lambda pair: -pair[1])

    @property
    def has_given_template(self) -> bool:
        """Whether the chat template was given by who loaded the model, in place of the file's."""
        return self._given_template is not None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, of the file or as it was given, which only a chat needs.

        Raises TemplateError if there is none that works.
        """
        from edgeinfer.models.chat_template import ChatTemplate

        return ChatTemplate.from_file(self._file, self.tokenizer, self._given_template)

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

    def detokenize(self, tokens: SequenceOf[int], *, skip_special: bool = False) -> str:
        """Text of token ids; skip_special leaves out special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special=skip_special)

    def count(self, text: str) -> int:
        """Number of tokens of a text as a prompt."""
        return len(self.tokenize(text))

    @property
    def speculator(self) -> Speculator | None:
        """What drafts for texts that begin from now on."""
        return self.scheduler.speculator

    @speculator.setter
    def speculator(self, speculator: Speculator | None) -> None:
        self.scheduler.speculator = speculator

    def forget(self) -> None:
        """Drop what the cache still holds of texts that have ended: the next request reads all of its prompt.

        What is on disk (cache_disk) stays.
        """
        self._check_open()
        self.scheduler.forget()

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
        # llguidance does not tell what it holds: that is among what the process takes.
        constraints = self.__dict__.get("_constraints")
        planned = 0 if constraints is None else constraints.planned_bytes
        return self._ledger.with_item(Item("constraints", planned)).with_taken(held, resident, peak or None)

    def interrupt(self) -> bool:
        """End the request that runs as "interrupted"; callable from any thread and signal handler.

        Gives whether there was one.
        """
        return self.scheduler.interrupt()

    def close(self) -> None:
        """Give the memory back. A stream that is open ends as "interrupted"; further requests raise InvalidArgument."""
        if self._closed:
            return
        self._closed = True
        self.scheduler.close(self._opened.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- A request ---------------------------------------------------------------------------------------------------

    def _chosen_params(self, params: object, sampling: Mapping[str, Any]) -> SamplingParams:
        """What a request asks for, with a seed. Raises InvalidArgument."""
        if params is None:
            params = self.default_params
        elif not isinstance(params, SamplingParams):
            raise InvalidArgument(f"params must be SamplingParams: found {shown(params)}")
        chosen = params.changed(sampling).with_seed()
        if chosen.biases and chosen.biases[-1][0] >= self.tokenizer.n_vocab:
            n_vocab = self.tokenizer.n_vocab
            raise InvalidArgument(f"logit_bias must be of tokens 0..{n_vocab - 1}: found {chosen.biases[-1][0]}")
        return chosen

    def _record(
        self,
        tokens: list[int],
        params: SamplingParams,
        wanted: Wanted | None,
        stops: StopStrings,
        output: Output | None,
        n_alternatives: int | None,
        is_sampled: bool,
    ) -> Record:
        """The state of a text. Raises as `stream`."""
        sampled = self._sampled(is_sampled, tokens, params, wanted)
        constraint = None if wanted is None else self._constraint(wanted, len(tokens), output)
        record = Record(self.tokenizer, len(tokens), stops, params, output, n_alternatives, constraint, sampled)
        record.expert_reads = None if self.experts is None else self.experts.reads
        return record

    def _sampled(
        self, is_asked: object, prompt: list[int], params: SamplingParams, wanted: Wanted | None
    ) -> NoteSampled | None:
        """What says how likely tokens of a text were to be drawn, None where nobody asks. Raises InvalidArgument."""
        check_flag("sampled_logprobs", is_asked)
        if not is_asked:
            return None
        if wanted is not None:
            raise InvalidArgument("sampled_logprobs are those of free texts: leave out the constraint")
        breakers = self._breakers(tuple(params.dry_sequence_breakers)) if params.has_dry else None
        n_vocab = self.tokenizer.n_vocab

        def noted(logits: Logits, token: int, n_top: int, drawn: list[int]) -> TokenLogprob:
            return sampled_logprob(logits[:n_vocab], token, n_top, params, prompt + drawn, breakers)

        return noted

    def _request(
        self,
        prompt: list[int],
        limit: int,
        record: Record,
        progress: Progress | None,
        priority: int = 0,
        timeout: float | None = None,
        begun: SequenceOf[int] = (),
    ) -> Request:
        """What the scheduler needs to know of a text."""
        params, n_vocab = record.params, self.tokenizer.n_vocab
        breakers = self._breakers(tuple(params.dry_sequence_breakers)) if params.has_dry else None

        constraint = record.constraint

        def free_draw(logits: Logits, text: list[int]) -> int:
            # Rows of the embedding that no token has, for alignment, are no candidates.
            return sample(logits[:n_vocab], params, len(text), text, breakers)

        def draw(logits: Logits, text: list[int]) -> int:
            if constraint is None:
                return free_draw(logits, text)
            return constraint.draw(logits[:n_vocab], text, lambda masked: free_draw(masked, text))

        return Request(
            prompt,
            limit,
            free_draw if constraint is None else draw,
            params,
            self.tokenizer.stop_ids,
            record.note,
            record.forget,
            constraint,
            None if constraint is None else free_draw,
            wants_progress=progress is not None,
            priority=priority,
            begun=begun,
            deadline=None if timeout is None else time.monotonic() + timeout,
        )

    @cached_property
    def _constraints(self) -> Constraints:
        from edgeinfer.constraints.constraint import Constraints

        return Constraints(self.tokenizer, self._room)

    def check_constraint(self, wanted: Wanted) -> None:
        """Read a constraint, which a request needs soon. Raises InvalidConstraint, BackendUnavailable."""
        self._constraints.read(wanted)

    def _constraint(self, wanted: Wanted, n_prompt: int, output: Output | None) -> ConstraintState:
        """A constraint along a text with a prompt of n_prompt tokens. Raises as `stream`."""
        parser = output if isinstance(output, OutputParser) and not wanted.includes_reasoning else None
        return self._constraints.read(wanted).state(wanted, n_prompt, parser)

    def _pieces(self, submit: Submit, record: Record, progress: Progress | None) -> Generator[Piece, None, None]:
        """The pieces of a text, which is asked for with the first of them, unless it was before."""
        if record.sequence is None:
            record.sequence = submit()
        sequence = record.sequence
        try:
            last = yield from self._pieces_but_the_last(sequence, record, progress)
        finally:
            self.scheduler.cancel(sequence)
        yield last  # the place is free again, even for a caller that stops reading at finish_reason

    def _pieces_but_the_last(
        self, sequence: Sequence, record: Record, progress: Progress | None
    ) -> Generator[Piece, None, Piece]:
        stop_token = None
        following = partial(self._next, sequence, progress)
        try:
            while True:
                token = record.timed(following)
                record.n_cached = sequence.n_cached or 0
                record.stats = sequence.stats if sequence.has_stats else None
                if token is None:
                    reason: FinishReason = sequence.end or "interrupted"
                    break
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
                if sequence.end is not None and sequence.n_read == sequence.n_ready:
                    reason = sequence.end
                    break
        except (GeneratorExit, KeyboardInterrupt):
            record.end("interrupted")
            raise
        except BaseException:
            record.failed = True
            raise
        return record.end(reason, stop_token)

    def _next(self, sequence: Sequence, progress: Progress | None) -> int | None:
        """The next token of a text, None where it has ended."""
        while True:
            if sequence.is_interrupted or sequence.is_cancelled or self._closed:
                return None
            if sequence.has_progress:
                sequence.share_told = sequence.share_read
                if progress is not None:
                    progress(sequence.share_told)
                continue
            if sequence.n_read < sequence.n_ready:
                return sequence.take()
            if sequence.error is not None:
                raise sequence.error
            if sequence.end is not None or sequence.logits is not None:
                return None
            self.scheduler.wait_for(sequence)

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

    def _begun_tokens(self, begun: SequenceOf[int], n_prompt: int, n_alternatives: int | None) -> list[int]:
        """The argument `begun`, checked. Raises as `stream`."""
        if not begun:
            return []
        if n_alternatives is not None:
            raise InvalidArgument("a completion that goes on has no log probabilities: leave out logprobs")
        tokens: list[int] = check_tokens(begun, self.session.spec.n_vocab, n_prompt, self.n_ctx).tolist()
        if any(token in self.tokenizer.stop_ids for token in tokens):
            raise InvalidArgument("what was begun has a token in it that ends a text: there is nothing to go on with")
        return tokens

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

    def _check_running(self, sequence: Sequence) -> None:
        """Raises Interrupted if somebody stopped the request or closed the engine."""
        if sequence.is_interrupted or sequence.is_cancelled or sequence.end is not None or self._closed:
            raise Interrupted("the request was interrupted")

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("this engine is closed")


def _but_sampling(options: RequestOptions) -> RequestOptions:
    """Options without fields of SamplingParams, which `params` holds."""
    return cast(RequestOptions, {key: value for key, value in options.items() if key not in _SAMPLING})


def _nothing(record: Record) -> Generator[Piece, None, None]:
    """The pieces of a text of no tokens."""
    yield record.end("length")


def _checked_order(priority: object, timeout: object) -> tuple[int, float | None]:
    """(priority, timeout) of a request. Raises InvalidArgument."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
        raise InvalidArgument(f"timeout must be seconds above 0 or None: found {shown(timeout)}")
    return check_integer("priority", priority, -MAX_INT32), None if timeout is None else float(timeout)


def _most_tokens(value: object) -> int:
    """Most tokens to generate. Raises InvalidArgument."""
    if value is None:
        return MAX_INT32
    checked = check_integer("max_tokens", value, -1)
    return MAX_INT32 if checked == -1 else checked
