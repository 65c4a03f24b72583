"""The loop that runs texts: choose rows, draft, one forward pass, accept, deliver.

It has no thread of its own. Of the threads that wait for a text one leads: it makes passes, for all texts that run,
until its own text has something for it, and then another one leads. So a text goes on while anybody waits for any text,
up to RUN_AHEAD tokens before its own reader.

Every decision here is about time: which rows go into a pass changes no bit of any of them. A text is its prompt, the
tokens drawn so far and the parameters; it can be put aside at any time, and be read again later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

from edgeinfer.backends.base import Rows, Session
from edgeinfer.backends.checks import common_length
from edgeinfer.common.errors import CacheFull, EdgeInferError, EngineBusy, Interrupted, InvalidArgument
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.common.types import Output
from edgeinfer.context_cache.cache import ContextCache
from edgeinfer.scheduling.pace import Pace
from edgeinfer.scheduling.places import Places
from edgeinfer.scheduling.request import Request
from edgeinfer.scheduling.sequence import End, Sequence
from edgeinfer.speculation.drafted_text import DraftedText
from edgeinfer.speculation.pipeline import Speculator, VerifyPass

MOST_WAITING = 1024  # texts that wait for a place
_WORTH_WAITING = 32  # tokens that another text is reading, which this one has too
_HEADROOM = 64  # tokens that a text may draw before the cache must have room for more
_AGEING = 0.5  # of a token of a prompt, for each millisecond that its text waits: none is passed over for ever
_LOADING = 0.02  # seconds of reading from disk before each pass of other texts
_LOADING_ALONE = 0.1  # and where there is none, before others are looked after
_GLANCE = 0.2  # seconds after which one who waits looks again, whatever happens


@dataclass
class _Pass:
    """The rows of one pass."""

    decoding: list[Sequence] = field(default_factory=list)
    reading: list[tuple[Sequence, Rows]] = field(default_factory=list)
    verify: VerifyPass | None = None  # of those that decode with drafts
    plain: list[Sequence] = field(default_factory=list)  # that decode without

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decoding, *(sequence for sequence, _ in self.reading)]


class Scheduler:
    """Runs the texts of one model.

    session: the model's first; with a pooled model (PooledModel) up to its n_sequences texts run at once, else one
    after the other.  n_batch: most rows of a pass.  speculator: drafts for texts that begin from now on; None for none.
    contexts: on disk, for texts that begin from now on; None for none.  pace: how much of a prompt goes into a pass.
    most_waiting: texts that may wait for a place before a request raises EngineBusy.
    """

    def __init__(self, session: Session, n_parallel: int, n_batch: int, pace: Pace | None = None) -> None:
        self.speculator: Speculator | None = None
        self.contexts: ContextCache | None = None
        self.most_waiting = MOST_WAITING
        self.pace = Pace() if pace is None else pace
        self._places = Places(session, n_parallel)
        self._model, self._n_batch = session.model, n_batch
        self._condition = threading.Condition(threading.RLock())
        self._leader: int | None = None  # the thread that makes passes
        self._n_asked = 0
        self.n_passes = self.n_in_passes = 0  # passes of the model so far, and the texts in them, each counted anew
        self.n_put_aside = 0  # of those that run no longer because others needed the memory, so far
        self._waiting: list[Sequence] = []  # for a place
        self._running: list[Sequence] = []  # with a place, the oldest first
        self._wanted_alone = 0  # threads that wait for a turn of their own
        self._is_closed = False

    # ---- for callers -------------------------------------------------------------------------------------------------

    @property
    def n_parallel(self) -> int:
        """Most texts that run at once."""
        return self._places.n

    @property
    def longest(self) -> int:
        """Tokens of the longest text that a session holds."""
        return self._places.longest

    @property
    def texts(self) -> list[Sequence]:
        """All that run or wait."""
        return [*self._running, *self._waiting]

    def submit(self, request: Request) -> Sequence:
        """Ask for a text. Raises EngineBusy where too many wait, InvalidArgument if the engine is closed."""
        with self._condition:
            self._check_open()
            if len(self._waiting) >= self.most_waiting:
                raise EngineBusy(len(self._waiting))
            self._n_asked += 1
            sequence = Sequence(request, self._n_asked)
            if not sequence.has_ended:
                self._waiting.append(sequence)
        return sequence

    def wait_for(self, *sequences: Sequence) -> None:
        """Wait until any of these is ready (Sequence.is_ready), making passes where no other thread does.

        Raises InvalidArgument where that would last for ever, and what a signal handler raises.
        """
        me = threading.get_ident()
        for sequence in sequences:
            sequence.reader = me
        while not any(sequence.is_ready for sequence in sequences):
            if self._lead(sequences, me):
                could_run = True
                try:
                    while could_run and not any(sequence.is_ready for sequence in sequences):
                        could_run = self._make_pass()
                        if self._wanted_alone:
                            break
                finally:
                    self._follow()
                if not could_run:
                    self._check_others(sequences, me)

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants more of a text: give back what it has. A pass that is running for others too goes on."""
        with self._condition:
            if sequence.has_ended and sequence not in self._running:
                return
            sequence.is_cancelled = True
            if self._leader is None:
                self._sweep()
                self._condition.notify_all()
            elif self._leader != threading.get_ident() and self._running == [sequence]:
                self._interrupt_pass()

    def interrupt(self, sequences: Iterable[Sequence] | None = None) -> bool:
        """End texts as "interrupted", None for all; whether there were any. Callable from any thread and handler."""
        found = [each for each in self.texts if not each.has_ended]  # no lock, which a handler may wait for in vain
        chosen = found if sequences is None else [each for each in sequences if each in found]
        for sequence in chosen:
            sequence.is_interrupted = True
        if chosen and all(each.is_interrupted or each.is_cancelled for each in list(self._running)):
            self._interrupt_pass()
        return bool(chosen)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No pass but the caller's own runs meanwhile."""
        me = threading.get_ident()
        with self._condition:
            self._wanted_alone += 1
            try:
                while self._leader is not None and self._leader != me:
                    self._condition.wait(_GLANCE)
            finally:
                self._wanted_alone -= 1
            nested, self._leader = self._leader == me, me
        try:
            yield
        finally:
            if not nested:
                self._follow()

    def make_room(self, sequence: Sequence, n_rows: int) -> None:
        """Put other texts aside until the cache has room for so many more rows of a text. Within `alone`."""
        while not self._places.has_room([(_open(sequence), n_rows)]):
            others = [each for each in self._running if each is not sequence and not each.is_held]
            if not others:
                return
            self._put_aside(max(others, key=lambda each: each.number))

    def forget(self) -> None:
        """Let the cache hold nothing of texts that have ended."""
        with self.alone():
            self._places.forget()

    def close(self, close: Callable[[], None]) -> None:
        """End all texts as "interrupted" and then call `close`, when no pass runs any more."""
        self._is_closed = True
        self.interrupt()
        self._interrupt_pass()
        with self.alone():
            with self._condition:
                for sequence in self.texts:
                    sequence.is_interrupted = True
                self._sweep()
            if self.contexts is not None:
                self.contexts.close()
            self._places.close()
            close()

    # ---- leading -----------------------------------------------------------------------------------------------------

    def _lead(self, sequences: SequenceOf[Sequence], me: int) -> bool:
        """Wait until one of these is ready or this thread may make passes; whether it may."""
        with self._condition:
            while not any(sequence.is_ready for sequence in sequences):
                if self._leader is None and not self._wanted_alone:
                    self._leader = me
                    return True
                if self._leader == me:
                    raise InvalidArgument("a text cannot be read from within the pass that makes it")
                self._condition.wait(_GLANCE)
        return False

    def _follow(self) -> None:
        """Let another thread make the next pass."""
        with self._condition:
            self._leader = None
            if any(sequence.is_cancelled for sequence in self._running):  # there need not be a next pass
                self._sweep()
            self._condition.notify_all()

    def _check_others(self, sequences: SequenceOf[Sequence], me: int) -> None:
        """Nothing could run. Wait for the texts that are in the way, unless this thread would have to read them."""
        with self._condition:
            if any(sequence.is_ready for sequence in sequences):
                return
            holders = [each for each in self._running if each not in sequences]
            if holders and all(each.reader == me for each in holders):
                raise InvalidArgument(
                    "this thread has a stream of this engine open: read it to its end or close it first"
                )
            if self._leader is None:
                self._condition.wait(_GLANCE)

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidArgument("this engine is closed")

    def _interrupt_pass(self) -> None:
        self._model.interrupt()
        if self.speculator is not None:
            self.speculator.interrupt()

    # ---- a pass ------------------------------------------------------------------------------------------------------

    def _make_pass(self) -> bool:
        """Choose rows, draft, forward, accept, deliver; False where no text can run."""
        with self._condition:
            self._sweep()
            self._admit()
            running = [sequence for sequence in self._running if not sequence.is_paused]
        if not running:
            return False
        loading = [sequence for sequence in running if sequence.is_loading]
        if loading:
            running = [sequence for sequence in running if sequence not in loading]
            self._load(loading, _LOADING if running else _LOADING_ALONE)
            if not running:
                return True
        chosen: _Pass | None = None
        try:
            chosen = self._choose(running)
            started = time.perf_counter()
            outputs = self._forward(chosen)
            seconds = time.perf_counter() - started
            self._accept(chosen, outputs)
            for sequence in running:
                if sequence.kept is not None:
                    sequence.kept.note()
        except Interrupted:
            self._was_interrupted(running)
        except CacheFull as error:
            self._put_aside_newest(running, error)
        except BaseException as error:
            self._failed(running, error)
        else:
            self.pace.count(len(chosen.decoding), sum(_n_of(rows) for _, rows in chosen.reading), 1e3 * seconds)
        return True

    def _load(self, loading: SequenceOf[Sequence], seconds: float) -> None:
        """Read what texts have on disk, for some time; one whose session is lost meanwhile finds that in its pass."""
        for sequence in loading:
            assert sequence.kept is not None
            try:
                sequence.kept.read(seconds / len(loading))
                if not sequence.is_loading and sequence.n_cached is None:
                    sequence.n_cached = _open(sequence).n_past
            except EdgeInferError:
                sequence.kept = None

    def _choose(self, running: list[Sequence]) -> _Pass:
        """The rows of the next pass: one of each text that decodes, drafts, pieces of prompts."""
        chosen = _Pass()
        reading: list[Sequence] = []
        for sequence in running:
            (chosen.decoding if sequence.is_decoding else reading).append(sequence)
        room = self._n_batch - len(chosen.decoding)
        if reading and room > 0:
            now = time.monotonic()
            reading.sort(key=lambda each: each.n_to_read - 1e3 * _AGEING * (now - each.since))
            budget = self.pace.piece(len(chosen.decoding), room)
            for sequence in reading:
                n = min(sequence.n_to_read - (not sequence.needs_logits), budget)
                if n <= 0:
                    break
                budget -= n
                taps = self._taps_of(sequence)
                chosen.reading.append((sequence, sequence.reading_rows(n, taps)))
        if self._places.has_several:
            self._make_room(chosen)
        for sequence in chosen.decoding:
            if sequence.drafted is None:  # it was put aside, and goes on
                self._begin_drafts(sequence, None)
        drafting = [each.drafted for each in chosen.decoding if each.drafted is not None]
        chosen.plain = [each for each in chosen.decoding if each.drafted is None]
        if drafting:
            speculator = self._speculator_of(chosen.decoding)
            alone = not chosen.reading and not chosen.plain
            chosen.verify = speculator.draft(drafting) if alone else speculator.plain(drafting)
            if alone and self._places.has_several and not self._places.has_room(_wants(chosen.verify)):
                chosen.verify = speculator.plain(drafting)
        return chosen

    def _make_room(self, chosen: _Pass) -> None:
        """Put the newest texts aside until the cache has room for this pass, or until it is of one text alone."""
        while True:
            sequences = chosen.sequences
            wants = [(_open(each), 1) for each in chosen.decoding]
            wants += [(_open(each), _n_of(rows)) for each, rows in chosen.reading]
            if self._places.has_room(wants):
                return
            # Those that wait for their readers first: they lose least.
            last = max(sequences, key=lambda each: (-each.request.priority, each.number))
            paused = [each for each in self._running if each not in sequences and not each.is_held]
            if not paused and len(sequences) == 1:
                return
            aside = max(paused, key=lambda each: each.number) if paused else last
            self._put_aside(aside)
            chosen.decoding = [each for each in chosen.decoding if each is not aside]
            chosen.reading = [each for each in chosen.reading if each[0] is not aside]

    def _forward(self, chosen: _Pass) -> list[Output]:
        """One output for each text of the pass: those with drafts, those without, those that read."""
        self.n_passes += 1
        self.n_in_passes += len(chosen.sequences)
        rows = []
        if chosen.verify is not None:
            rows = [
                Rows(step.text.session, step.tokens, step.parents, "all", step.hidden) for step in chosen.verify.steps
            ]
        rows += [Rows(_open(each), each.tokens[-1:]) for each in chosen.plain]
        rows += [each for _, each in chosen.reading]
        if len(rows) > 1:
            return self._model.forward(rows)
        (only,) = rows
        if chosen.verify is not None:
            return [only.session.forward(only.tokens, only.parents, logits="all", hidden=only.hidden)]
        if chosen.plain:
            return [only.session.forward(only.tokens)]
        return [only.session.forward(only.tokens, logits=only.logits, hidden=only.hidden)]

    def _accept(self, chosen: _Pass, outputs: list[Output]) -> None:
        """Draw, commit, and settle what was drawn."""
        n_steps = 0 if chosen.verify is None else len(chosen.verify.steps)
        if chosen.verify is not None:
            alone = not chosen.reading and not chosen.plain
            self._speculator_of(chosen.decoding).settle(chosen.verify, outputs[:n_steps], alone)
            drafted = [each for each in chosen.decoding if each.drafted is not None]
            for sequence, step in zip(drafted, chosen.verify.steps, strict=True):
                self._settle(sequence, len(step.new), step.error)
        for sequence, out in zip(chosen.plain, outputs[n_steps:], strict=False):
            _open(sequence).commit([0])
            self._draw(sequence, out)
        for (sequence, rows), out in zip(chosen.reading, outputs[n_steps + len(chosen.plain) :], strict=True):
            self._was_read(sequence, rows, out)

    def _was_read(self, sequence: Sequence, rows: Rows, out: Output) -> None:
        """A part of a prompt was read; after the last of it the first token is drawn."""
        session = _open(sequence)
        first, n = session.n_past, _n_of(rows)
        session.commit(range(n))
        speculator = sequence.speculator
        if sequence.place is not None and speculator is not None and out.features is not None:
            speculator.observe_features(sequence.place, sequence.tokens, first, out.features, sequence.stats)
        sequence.tell_progress()
        if session.n_past < len(sequence.tokens) - (not sequence.needs_logits):
            return
        if not sequence.needs_logits:
            return
        if sequence.request.limit == 0:
            sequence.logits = out.logits.reshape(-1)
        else:
            self._draw(sequence, out)
            sequence.has_stats = speculator is not None
            if not sequence.has_ended:
                self._begin_drafts(sequence, out)

    def _draw(self, sequence: Sequence, out: Output) -> None:
        """Draw the next token, without drafts."""
        logits, request, error = out.logits.reshape(-1), sequence.request, None
        try:
            sequence.tokens.append(request.draw(logits, sequence.tokens))
            if request.note is not None:
                request.note(logits, sequence.tokens[-1])
        except EdgeInferError as failed:
            if is_from_handler(failed):
                raise
            error = failed
        self._settle(sequence, 0 if error else 1, error)

    def _settle(self, sequence: Sequence, n_new: int, error: Exception | None) -> None:
        sequence.error = error
        if error is None:
            sequence.settle(n_new)
        if sequence.has_ended:
            with self._condition:
                self._release(sequence)

    # ---- drafts ------------------------------------------------------------------------------------------------------

    def _begin_drafts(self, sequence: Sequence, out: Output | None) -> None:
        """The prompt is read: drafters begin with the text, whose last token was drawn from the output, if there is
        one."""
        speculator, request = sequence.speculator, sequence.request
        if speculator is None or sequence.place is None:
            return
        text = DraftedText(
            session=_open(sequence),
            tokens=sequence.tokens,
            n_prompt=sequence.n_prompt,
            limit=request.limit,
            draw=request.draw,
            is_greedy=request.params.is_greedy,
            stop_ids=request.stop_ids,
            is_plain=request.is_plain,
            params=request.params,
            note=request.note,
            constraint=request.constraint,
            free_draw=request.free_draw,
            stats=sequence.stats,
            place=sequence.place,
        )
        speculator.begin(text, None if out is None else out.logits.reshape(-1))
        sequence.drafted = text

    def _taps_of(self, sequence: Sequence) -> bool | tuple[int, ...]:
        """The hidden states that drafters need of its prompt."""
        speculator, place = sequence.speculator, sequence.place
        return False if speculator is None or place is None else speculator.taps_of(place)

    def _speculator_of(self, sequences: SequenceOf[Sequence]) -> Speculator:
        found = next(each.speculator for each in sequences if each.drafted is not None)
        assert found is not None
        return found

    # ---- who runs ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give places to texts that wait, by priority and then the first first."""
        if not self._waiting:
            return
        for sequence in sorted(self._waiting, key=lambda each: (-each.request.priority, each.number)):
            if sequence.is_paused or self._is_being_read(sequence):
                continue
            while not self._places.has_free or (self._running and not self._can_hold(sequence)):
                if not self._put_paused_aside():
                    return
            self._waiting.remove(sequence)
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        """Give a text a place."""
        is_first = sequence.n_cached is None
        try:
            self._places.take(sequence)
        except EdgeInferError as error:
            self._places.give_back(sequence)
            sequence.error = error
            return
        if self.contexts is not None:
            sequence.kept = self.contexts.text(_open(sequence), sequence.tokens)
            if is_first and sequence.is_loading:
                sequence.n_cached = None  # as is known when it is read
        sequence.speculator = self.speculator
        sequence.place = None if self.speculator is None else self.speculator.take_place()
        self._running.append(sequence)

    def _is_being_read(self, sequence: Sequence) -> bool:
        """Whether a text that runs is reading what this one has too, so that to wait for it is faster."""
        if self._places.pool is None:
            return False
        for other in self._running:
            n_past = _open(other).n_past
            n_most = min(other.n_prompt, len(sequence.tokens)) - 1
            if other.n_ready == 0 and not other.is_paused and n_most - n_past >= _WORTH_WAITING:
                if common_length(other.tokens[:n_most], sequence.tokens[:n_most]) - n_past >= _WORTH_WAITING:
                    return True
        return False

    def _can_hold(self, sequence: Sequence) -> bool:
        """Whether the cache has room for a text beside those that run, and for what these draw next."""
        if self._places.pool is None:
            return True
        n_ctx = _open(self._running[0]).n_ctx
        wants = [(_open(each), _room_of(each, n_ctx)) for each in self._running]
        shared = max(common_length(each.tokens[: _open(each).n_past], sequence.tokens) for each in self._running)
        return self._places.has_room_for(wants, _room_of(sequence, n_ctx) - shared)

    def _put_paused_aside(self) -> bool:
        """Put a text aside whose reader does not read, where texts can be; whether there was one."""
        paused = [each for each in self._running if each.is_paused and not each.is_held]
        if not paused or self._places.pool is None:
            return False
        self._put_aside(max(paused, key=lambda each: each.number))
        return True

    def _put_aside_newest(self, running: SequenceOf[Sequence], error: CacheFull) -> None:
        """The cache was full in the midst of a pass."""
        for sequence in running:
            sequence.keep_settled()
        newest = max(running, key=lambda each: each.number)
        if len(self._running) == 1:
            newest.error = error
            self._release(newest)
        else:
            self._put_aside(newest)

    def _put_aside(self, sequence: Sequence) -> None:
        """Take the place of a text, which goes on later from its tokens."""
        with self._condition:
            self._leave(sequence, put_aside=True)
            self._places.park(sequence)
            sequence.since = time.monotonic()
            self._waiting.insert(0, sequence)
            self.n_put_aside += 1

    def _release(self, sequence: Sequence) -> None:
        """A text has ended: give back its place."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._leave(sequence)
            self._places.give_back(sequence)

    def _leave(self, sequence: Sequence, put_aside: bool = False) -> None:
        """A text runs no more."""
        self._running.remove(sequence)
        sequence.keep_settled()
        if sequence.kept is not None:
            with suppress(EdgeInferError):  # of a backend that is lost
                sequence.kept.leave()
                sequence.kept.note(is_last=True)
            sequence.kept = None
        speculator, text = sequence.speculator, sequence.drafted
        sequence.drafted = sequence.speculator = None
        if speculator is not None and text is not None:
            (speculator.put_aside if put_aside else speculator.end)(text)
        if speculator is not None and sequence.place is not None:
            speculator.leave(sequence.place)
        sequence.place = None

    def _sweep(self) -> None:
        """End the texts that nobody wants any more, that were interrupted, or whose time is over."""
        now = None
        for sequence in self.texts:
            end: End | None = None
            if sequence.is_interrupted or sequence.is_cancelled:
                end = "interrupted"
            elif sequence.request.deadline is not None:
                now = time.monotonic() if now is None else now
                end = "timeout" if now >= sequence.request.deadline else None
            if end is not None:
                sequence.end = sequence.end or end
                self._release(sequence)

    # ---- what goes wrong ---------------------------------------------------------------------------------------------

    def _was_interrupted(self, running: SequenceOf[Sequence]) -> None:
        """A pass was stopped: for those who asked for it, else, where it is of one text, for that one."""
        others = [each for each in running if not (each.is_interrupted or each.is_cancelled)]
        if len(others) == len(self._running) == 1 and not self._is_closed:
            others[0].is_interrupted = True
        for sequence in running:
            sequence.keep_settled()
            if sequence in others and not sequence.is_interrupted:
                self._put_aside(sequence)  # it may have come further than is settled

    def _failed(self, running: SequenceOf[Sequence], error: BaseException) -> None:
        """A pass failed. An error of the model is that of its texts; anything else is the caller's own, who gets it."""
        is_of_model = isinstance(error, (EdgeInferError, OSError, MemoryError)) and not is_from_handler(error)
        me = threading.get_ident()
        with self._condition:
            for sequence in [each for each in running if each in self._running]:
                sequence.keep_settled()
                if is_of_model:
                    sequence.error = error
                    self._release(sequence)
                elif sequence.reader != me and self._places.pool is not None:
                    self._put_aside(sequence)
        if not is_of_model:
            raise error


def _open(sequence: Sequence) -> Session:
    assert sequence.session is not None
    return sequence.session


def _n_of(rows: Rows) -> int:
    return len(cast(SequenceOf[int], rows.tokens))


def _wants(verify: VerifyPass) -> list[tuple[Session, int]]:
    return [(step.text.session, len(step.tokens)) for step in verify.steps]


def _room_of(sequence: Sequence, n_ctx: int) -> int:
    """Rows that the cache should have room for after what is committed, for some time to come."""
    return min(
        sequence.n_to_read + min(sequence.n_left, _HEADROOM), n_ctx - (len(sequence.tokens) - sequence.n_to_read)
    )
