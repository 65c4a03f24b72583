"""A running request: an iterator of pieces that can be closed at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from edgeinfer.backends.base import Progress
from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.one_process import OfOneProcess
from edgeinfer.common.overriding import override
from edgeinfer.common.types import Logits
from edgeinfer.completion import Completion, FinishReason, Piece, Timings, Usage
from edgeinfer.constraints.options import ConstraintOptions
from edgeinfer.logprobs import TokenLogprob, token_logprob
from edgeinfer.models.reasoning import ToolCall, call_id
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.offload.reads import ExpertReads
from edgeinfer.repetition import LoopGuard
from edgeinfer.sampling import SamplingOptions, SamplingParams
from edgeinfer.scheduling.scheduler import Scheduler
from edgeinfer.scheduling.sequence import Sequence
from edgeinfer.speculation.stats import StatsCounter

if TYPE_CHECKING:
    from edgeinfer.constraints.constraint import ConstraintState


class ChoiceOptions(SamplingOptions, ConstraintOptions, total=False):
    """How tokens are chosen, and among which, as keyword arguments."""


class RequestOptions(ChoiceOptions, total=False):
    """Keyword arguments of Engine.stream, see there."""

    max_tokens: int | None
    stop: str | SequenceOf[str] | None
    params: SamplingParams | None
    progress: Progress | None
    logprobs: int | None
    sampled_logprobs: bool
    priority: int
    timeout: float | None
    begun: SequenceOf[int]


Submit: TypeAlias = Callable[[], Sequence]
NoteSampled: TypeAlias = Callable[[Logits, int, int, list[int]], TokenLogprob]
"""How likely a token was to be drawn, of logits, with so many alternatives, after the tokens drawn before."""


class Stream(OfOneProcess, Iterator[Piece]):
    """Pieces of a text as they are generated. The first piece starts the work.

    Closed early, by `close`, a `with` block or garbage collection, it ends its text; its completion is what was
    generated so far, "interrupted". The same holds if KeyboardInterrupt comes out of it.
    """

    def __init__(
        self, pieces: Generator[Piece, None, None], record: Record, source: tuple[Scheduler, Submit] | None = None
    ) -> None:
        """source: what runs the text, and what asks it to; None for a text of no tokens."""
        self._pieces = pieces
        self._record = record
        self._source = source

    def __next__(self) -> Piece:
        return next(self._pieces)

    def start(self) -> None:
        """Ask for the text now, rather than with the first piece. Raises as that does."""
        if self._source is not None and self._record.sequence is None and self._record.completion is None:
            self._record.sequence = self._source[1]()

    @property
    def params(self) -> SamplingParams:
        """As used, with the seed that was drawn if none was given."""
        return self._record.params

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return self._record.n_prompt

    @property
    def sequence(self) -> Sequence | None:
        """The text that runs, None before it was asked for."""
        return self._record.sequence

    @property
    def is_ready(self) -> bool:
        """Whether the next piece is there, or the end."""
        sequence = self._record.sequence
        return (
            sequence.is_ready if sequence is not None else self._source is None or self._record.completion is not None
        )

    def cancel(self) -> None:
        """End the text, from any thread: who reads it gets what was generated, "interrupted"."""
        if self._source is not None and self._record.sequence is not None:
            self._source[0].cancel(self._record.sequence)

    def close(self) -> None:
        """Stop here. Does nothing if the stream has ended."""
        self._pieces.close()
        self.cancel()  # of one that was started and never read
        if not self.failed:
            self._record.end("interrupted")  # for a stream that never started

    @property
    def failed(self) -> bool:
        """Whether an error ended the stream."""
        return self._record.failed

    @property
    def completion(self) -> Completion:
        """The whole of it, once the stream has ended. Raises InvalidArgument before, and if it ended in an error."""
        if self.failed:
            raise InvalidArgument("the stream has no completion: an error ended it, which was raised when it was read")
        if self._record.completion is None:
            raise InvalidArgument("the stream has no completion yet: read it to its end or close it")
        return self._record.completion

    @property
    def error(self) -> BaseException | None:
        """The error that ended the text, None without one."""
        sequence = self._record.sequence
        return None if sequence is None else sequence.error

    def __del__(self) -> None:
        self.cancel()  # of one that was started and never read

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Output(Protocol):
    """Converts the tokens of a request to text: edgeinfer.models.reasoning.OutputParser or RawOutput."""

    def push(self, token: int) -> tuple[str, str, str]:
        """What a token adds to the reasoning and to the text, and its name if it is special and not shown."""

    def flush(self) -> tuple[str, str]:
        """What was held back, when no more will come."""

    @property
    def reasoning(self) -> str | None:
        """All of it, None where there was none."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Those that have ended."""

    @property
    def call_error(self) -> str | None:
        """Why a call of a tool is part of the text instead, None where none is."""


class RawOutput(Output):
    """Everything emitted is text, except control tokens."""

    reasoning = None
    tool_calls: tuple[ToolCall, ...] = ()
    call_error = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream(skip_special=True)

    @override
    def push(self, token: int) -> tuple[str, str, str]:
        name = self._tokenizer.name(token) if self._tokenizer.is_control(token) else ""
        return "", self._decoder.push(token), name

    @override
    def flush(self) -> tuple[str, str]:
        return "", self._decoder.flush()


class Record:
    """The state of a request: tokens to text, text to pieces, and the clock.

    Stop strings are looked for in the text and the special tokens around it, not in the reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        n_prompt: int,
        stops: StopStrings,
        params: SamplingParams,
        output: Output | None = None,
        n_alternatives: int | None = None,
        constraint: ConstraintState | None = None,
        sampled: NoteSampled | None = None,
    ) -> None:
        """n_alternatives: of each place, beside the log probability of its token; None notes neither.

        sampled: what notes them of the distribution that tokens are drawn from, None for the model's own.
        """
        self._sampled = sampled
        self.params = params
        self.constraint = constraint
        self.n_cached = 0
        self.sequence: Sequence | None = None  # once it was asked for
        self.failed = False
        self.repeats = False  # whether the tokens so far end in a loop
        self.completion: Completion | None = None
        self.stats: StatsCounter | None = None  # of speculation, once the prompt is read
        self.expert_reads: Callable[[], ExpertReads] | None = None  # of the model's cache, until now
        self._reads: list[ExpertReads] = []  # at the beginning, and after the first token
        self.n_prompt = n_prompt
        self._n_alternatives = n_alternatives
        self._tokenizer = tokenizer
        self._output = output or RawOutput(tokenizer)
        self._stops = stops
        self._guard = LoopGuard(params.loop_guard, tokenizer) if params.loop_guard else None
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._calls: list[ToolCall] = []  # of tools that have ended
        self._n_calls = 0  # of the output, that were looked at
        self.logprobs: list[TokenLogprob] = []  # of the tokens drawn, where asked for; some are not pushed yet
        self._seconds: list[float] = []  # of each token drawn, a stop token included; the first holds the prompt's

    def timed(self, next_token: Callable[[], int | None]) -> int | None:
        """The next token, its time noted; None where there is none."""
        if self.expert_reads is not None and len(self._seconds) < 2:
            self._reads.append(self.expert_reads())
        start = time.perf_counter()
        token = next_token()
        if token is not None:
            self._seconds.append(time.perf_counter() - start)
        return token

    def note(self, logits: Logits, token: int) -> None:
        """Note how likely a token was that is pushed later, in the same order. logits: that it was drawn from."""
        if self._n_alternatives is None:
            return
        if self._sampled is not None:
            drawn = [each.token for each in self.logprobs]
            self.logprobs.append(self._sampled(logits, token, self._n_alternatives, drawn))
        else:
            self.logprobs.append(token_logprob(logits[: self._tokenizer.n_vocab], token, self._n_alternatives))

    def forget(self, n: int) -> None:
        """Drop what was noted after the first n tokens: these are drawn again."""
        del self.logprobs[n:]

    def push(self, token: int) -> Piece:
        """The piece that a token adds; its finish_reason is "stop" if a stop string is met."""
        self._tokens.append(token)
        self.repeats = self._guard is not None and self._guard.push(token)
        reasoning, text, hidden = self._output.push(token)
        text = self._stops.push(text) + self._stops.push("", hidden)
        self._text.append(text)
        found = tuple(self.logprobs[len(self._tokens) - 1 : len(self._tokens)])
        return Piece(text, (token,), "stop" if self._stops.met else None, reasoning, found, self._new_calls())

    def end(self, reason: FinishReason, stop_token: int | None = None) -> Piece:
        """Make the completion, unless there is one; gives the piece with what was held back until now.

        stop_token: the one that ended it, whose text may end a stop string.
        """
        if self.completion is not None:
            return Piece("", (), reason)
        reasoning = rest = ""
        if not self._stops.met:
            reasoning, rest = self._output.flush()
            hidden = "" if stop_token is None else self._tokenizer.name(stop_token)
            rest = self._stops.push(rest) + self._stops.push("", hidden) + self._stops.flush()
        self._text.append(rest)
        new_calls = self._new_calls()
        parsed, error = None, None
        if self.constraint is not None and not self._calls:
            parsed, error = self.constraint.result(self._tokens, reason)
        n = len(self._tokens)
        self.completion = Completion(
            "".join(self._text),
            tuple(self._tokens),
            reason,
            Usage(self.n_prompt, self.n_cached, n),
            self._timings(),
            self.params,
            self._output.reasoning,
            tuple(self._calls),
            tuple(self.logprobs[:n]),
            parsed,
            error,
            self._output.call_error,
            None if stop_token is None else next(iter(self.logprobs[n : n + 1]), None),
        )
        return Piece(rest, (), reason, reasoning, (), new_calls)

    def _new_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that have ended since the last piece, with their ids."""
        found = self._output.tool_calls
        new: list[ToolCall] = []
        for number in range(self._n_calls, len(found)):
            if self._guard is not None and _is_in_circle(found[:number], found[number]):
                self.repeats = True  # the answer ends here, and the call is not made again
            elif not self.repeats:
                new.append(replace(found[number], id=call_id(self.n_prompt, number, found[number].text)))
        self._n_calls = len(found)
        self._calls += new
        return tuple(new)

    def _timings(self) -> Timings:
        prompt_seconds, decode_seconds = sum(self._seconds[:1]), sum(self._seconds[1:])
        reads = self._reads if self.expert_reads is None else [*self._reads, self.expert_reads()]
        return Timings(
            prompt_seconds,
            decode_seconds,
            (self.n_prompt - self.n_cached) / prompt_seconds if prompt_seconds else 0.0,
            (len(self._seconds) - 1) / decode_seconds if decode_seconds else 0.0,
            None if self.stats is None else self.stats.figures(),
            reads[1].since(reads[0]) if len(reads) > 1 else None,
            reads[-1].since(reads[1]) if len(reads) > 1 else None,
        )


def _is_in_circle(before: SequenceOf[ToolCall], call: ToolCall) -> bool:
    """Whether calls go round in a circle: one comes again after another one, or for the third time in a row."""
    places = [place for place, each in enumerate(before) if (each.name, each.arguments) == (call.name, call.arguments)]
    return call.name is not None and (len(places) > 1 or (bool(places) and places[0] < len(before) - 1))


class StopStrings:
    """Cuts a text that comes in parts before the first stop string, and holds back what might become one.

    Special tokens are not shown, but a stop string may name them: it is looked for in the text as shown and in the text
    with their names.
    """

    def __init__(self, stops: str | SequenceOf[str] | None) -> None:
        stops = () if stops is None else stops
        several = isinstance(stops, SequenceOf) and not isinstance(stops, (str, bytes))
        self.stops = tuple(cast(SequenceOf[str], stops if several else (stops,)))
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise InvalidArgument(f"a stop string must be a text of at least one character: found {shown(stop)}")
        self.met = False
        self._held: list[tuple[str, bool]] = []  # characters, and whether they are shown

    def push(self, text: str, hidden: str = "") -> str:
        """The text that can be shown now; what follows a stop string is dropped.

        hidden: the name of a special token that comes before the text.
        """
        if self.met:
            return ""
        whole = [*self._held, *((char, False) for char in hidden), *((char, True) for char in text)]
        shown = [place for place, (_, is_shown) in enumerate(whole) if is_shown]
        starts, ends = [], [len(whole)]
        for places in (shown, range(len(whole))) if len(shown) < len(whole) else (shown,):
            text = "".join([whole[place][0] for place in places])
            starts += [places[start] for start in map(text.find, self.stops) if start >= 0]
            ends += places[len(text) - self._n_doubtful(text) :][:1]
        self.met = bool(starts)
        end = min(starts or ends)
        self._held = whole[end:]
        return _shown(whole[:end])

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, []
        return "" if self.met else _shown(held)

    def _n_doubtful(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0


def _shown(characters: list[tuple[str, bool]]) -> str:
    return "".join([char for char, is_shown in characters if is_shown])
