"""Writing an answer as it is made, for a person or as JSON, with Ctrl-C as the way to stop it."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import click

from edgeinfer.cli.terminal import ProgressBar, Writer, note, show
from edgeinfer.cli.thinking import Thinking
from edgeinfer.common.errors import Interrupted

if TYPE_CHECKING:
    from edgeinfer.completion import Completion, Piece, Timings
    from edgeinfer.engine import Engine
    from edgeinfer.memory.budget import Ledger
    from edgeinfer.offload.reads import ExpertReads
    from edgeinfer.sampling import SamplingParams
    from edgeinfer.speculation.stats import Speculation


class Answering(Protocol):
    """What an edgeinfer.stream.Stream and an edgeinfer.chat.Answer have in common."""

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, as they are made."""

    def close(self) -> None:
        """Stop, and keep the answer so far."""

    @property
    def completion(self) -> Completion:
        """The whole answer, at its end."""


def write_answer(
    engine: Engine, pieces: Answering, writer: Writer, reading: ProgressBar, thinking: Thinking | None = None
) -> Completion:
    """Write the pieces as they come; returns the whole answer, "interrupted" after Ctrl-C.

    reading: bar for the reading of the prompt, which is closed before the first piece.  thinking: shows the reasoning,
    None for nothing.
    """
    with reading, stopped_by_ctrl_c(engine):
        try:
            for piece in pieces:
                reading.close()
                if thinking is not None:
                    _tell(thinking, piece)
                writer.write(piece.text)
        except KeyboardInterrupt:
            pieces.close()
        finally:
            if thinking is not None:
                thinking.end()
            writer.end_line()
    speculation = pieces.completion.timings.speculation
    for name, reason in ({} if speculation is None else speculation.dropped).items():
        note(f"drafting went on without {name}: {reason}")
    return pieces.completion


def _tell(thinking: Thinking, piece: Piece) -> None:
    if piece.reasoning or (thinking.is_open and not piece.text):
        thinking.write(piece.reasoning, len(piece.tokens))
    if piece.text:
        thinking.end()


def note_calls(completion: Completion) -> None:
    """Say which tools the model called, as there are none here."""
    for call in completion.tool_calls:
        asked = call.text if call.name is None else f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}"
        note(f"the model asks for a tool, and there is none: {asked}")


@contextmanager
def stopped_by_ctrl_c(engine: Engine) -> Iterator[None]:
    """Within, Ctrl-C ends the running request between two steps.

    Without a request, or when it is pressed a second time, it raises KeyboardInterrupt.
    """
    presses = 0

    def press(signal_number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1 or not engine.interrupt():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def finish_one_shot(engine: Engine, completion: Completion, as_json: bool, is_quiet: bool) -> None:
    """After the only answer of a run: print JSON or a line of figures, and set the exit code.

    is_quiet: without that line.
    """
    note_full_context(engine, completion)
    if as_json:
        show(json.dumps(as_record(engine, completion)))
    else:
        note_calls(completion)
        if completion.parse_error is not None:
            note(completion.parse_error)
        if completion.finish_reason == "repetition":
            note("stopped: the text only repeated itself; --loop-guard 0 lets it go on")
        if not is_quiet:
            note(short_figures(completion))
    if completion.finish_reason == "interrupted":
        click.get_current_context().exit(Interrupted.exit_code)


def note_full_context(engine: Engine, completion: Completion) -> None:
    """Say that the context ended an answer, or that the prompt left no room for one."""
    n_prompt, n_answer = completion.usage.prompt_tokens, completion.usage.completion_tokens
    if completion.finish_reason != "length" or n_prompt + n_answer < engine.n_ctx:
        return
    if n_answer:
        note(f"cut: the context is full ({n_prompt} of {engine.n_ctx} tokens are the prompt's); raise -c")
    else:
        note(f"no answer: the prompt fills the context ({n_prompt} of {engine.n_ctx} tokens); raise -c")


def as_record(engine: Engine, completion: Completion) -> dict[str, object]:
    """The JSON object that --json prints."""
    record: dict[str, object] = {
        "text": completion.text,
        "reasoning": completion.reasoning,
        "tool_calls": [dataclasses.asdict(call) for call in completion.tool_calls],
        "finish_reason": completion.finish_reason,
        "usage": dataclasses.asdict(completion.usage),
        "timings": _as_dict(completion.timings),
        "model": str(engine.path),
        "seed": completion.params.seed,
        "params": completion.params.to_json(),
        "memory": engine.memory.as_json(),
    }
    if completion.parsed is not None or completion.parse_error is not None:
        record |= {"parsed": completion.parsed, "parse_error": completion.parse_error}
    if completion.logprobs:
        record["logprobs"] = [
            _likely(engine, each.token, each.logprob) | {"top": [_likely(engine, *other) for other in each.top]}
            for each in completion.logprobs
        ]
    return record


def _likely(engine: Engine, token: int, logprob: float) -> dict[str, object]:
    """A token, its text and its log probability; None for -inf, which JSON lacks."""
    finite = logprob if math.isfinite(logprob) else None
    return {"token": token, "text": engine.detokenize([token]), "logprob": finite}


def _as_dict(timings: Timings) -> dict[str, object]:
    """The timings as JSON."""
    record = dataclasses.asdict(timings)
    for name in ("prompt_experts", "decode_experts"):
        if (reads := getattr(timings, name)) is not None:
            record[name]["hit_rate"] = reads.hit_rate
    if timings.speculation is not None:
        of = timings.speculation
        record["speculation"] |= {"tokens_per_step": of.tokens_per_step, "rejected": of.rejected, "speedup": of.speedup}
    return record


def short_figures(completion: Completion) -> str:
    """The number of tokens of an answer, and the speed after the first one."""
    n, speed = completion.usage.completion_tokens, completion.timings.decode_tokens_per_second
    tokens = f"{n} token{'' if n == 1 else 's'}"
    return f"{tokens}, {speed:.1f} tok/s" if speed else tokens


def figures(engine: Engine, completion: Completion) -> str:
    """One line: speed of prompt and answer, drafts, experts, and the context in use."""
    usage, timings = completion.usage, completion.timings
    return (
        f"[prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} cached, "
        f"{timings.prompt_tokens_per_second:.1f} tok/s | "
        f"answer {usage.completion_tokens} tokens, {timings.decode_tokens_per_second:.1f} tok/s | "
        f"{_drafts(timings.speculation)}"
        f"{_experts(timings.decode_experts, usage.completion_tokens)}"
        f"context {usage.prompt_tokens + usage.completion_tokens}/{engine.n_ctx}]"
    )


def stats_lines(engine: Engine, n_past: int, last: Completion | None) -> list[str]:
    """Lines about the model, the context (n_past tokens are in use), the memory, and the last answer."""
    from edgeinfer.common.arguments import human_bytes

    lines = [f"model    {engine.name} ({engine.path})", f"engine   {engine.backend}, {engine.device.n_threads} threads"]
    if (tuning := getattr(engine.session, "tuning", None)) is not None:
        lines.append(f"weights  {tuning}")
    lines += [f"context  {n_past} of {engine.n_ctx} tokens", *memory_lines(engine.memory)]
    if (n_bytes := engine.memory_plan.expert_cache) is not None:
        share = f", {engine.experts.share:.0%} of all experts" if engine.experts is not None else ""
        lines.append(f"experts  cache of {human_bytes(n_bytes)}{share}")
    if (contexts := engine.contexts) is not None:
        problem = "" if contexts.problem is None else f"; nothing more is written: {contexts.problem}"
        lines.append(f"disk     at most {human_bytes(contexts.folder.most_bytes)} of contexts{problem}")
    if (device_experts := engine.device_experts) is not None:
        lines.append(f"experts  {device_experts.describe()}")
    speculation = None if last is None else last.timings.speculation
    for name, placed in ({} if engine.speculator is None else engine.speculator.placements).items():
        is_idle = speculation is not None and name not in {**speculation.by_drafter, **speculation.dropped}
        why = "; not used in the last answer, as it would have taken more time than it saves" if is_idle else ""
        lines.append(f"drafts   {name} on {placed.device}{why}")
    if last is not None:
        lines.append(f"last     {figures(engine, last)} seed {last.params.seed}")
        lines += expert_lines(last.timings, last.usage.completion_tokens)
        lines.append(f"sampling {sampling_line(last.params)}")
        lines += [] if speculation is None else speculation_table(speculation)
    return lines


def sampling_line(params: SamplingParams) -> str:
    """How tokens were chosen: the usual fields, and others that differ from the general defaults."""
    from edgeinfer.sampling import SamplingParams

    default, always = SamplingParams().to_json(), ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    fields = params.to_json().items()
    said = {name: value for name, value in fields if name in always or value != default[name]}
    return ", ".join(f"{name} {value}" for name, value in said.items() if name != "seed")


def _drafts(speculation: Speculation | None) -> str:
    """The part of `figures` about drafts, empty where none was verified."""
    if speculation is None or not speculation.by_drafter:
        return ""
    accepted = ", ".join(f"{name} {of.accepted}/{of.drafted}" for name, of in speculation.by_drafter.items())
    return f"{speculation.tokens_per_step:.2f} tokens a step, {accepted}, about {speculation.speedup:.2f}x plain | "


def _experts(reads: ExpertReads | None, n_tokens: int) -> str:
    """The part of `figures` about experts read from disk for an answer, empty where all are in memory."""
    if reads is None:
        return ""
    from edgeinfer.common.arguments import human_bytes

    a_token = human_bytes(round(reads.bytes_read / max(n_tokens - 1, 1)))  # the first token is the prompt's
    return f"experts {reads.hit_rate:.0%} hits, {a_token} read a token | "


def expert_lines(timings: Timings, n_tokens: int) -> list[str]:
    """Lines about the expert cache, for an answer of n_tokens tokens."""
    from edgeinfer.common.arguments import human_bytes

    lines = []
    for name, reads, n in (("prompt", timings.prompt_experts, 0), ("answer", timings.decode_experts, n_tokens - 1)):
        if reads is not None:
            a_token = f", {human_bytes(round(reads.bytes_read / n))} a token" if n > 0 else ""
            ahead = f", {reads.useful} of {reads.prefetches} experts read ahead were of use" if reads.prefetches else ""
            lines.append(
                f"experts  {name}: {reads.hit_rate:.1%} hits, {human_bytes(reads.bytes_read)} read{a_token}, "
                f"{reads.waited_seconds:.2f} s waited for the disk{ahead}"
            )
    return lines


def memory_lines(ledger: Ledger) -> list[str]:
    """Lines with the planned memory and the part of it in use, by purpose."""
    from edgeinfer.common.arguments import human_bytes

    def taken_of(planned: int, taken: int | None) -> str:
        return f"{'' if taken is None else human_bytes(taken):>10} of {human_bytes(planned):>10} planned"

    peak = "" if ledger.peak_taken is None else f", {human_bytes(ledger.peak_taken)} at most so far"
    lines = [f"memory   {taken_of(ledger.peak, ledger.taken).strip()}{peak}"]
    for item in ledger.items:
        mapped = ", of a file" if item.is_mapped else ""
        lines.append(f"         {item.name:<20}{taken_of(item.planned, item.taken)}{mapped}")
    return lines


def speculation_table(speculation: Speculation) -> list[str]:
    """Lines with all figures about the drafts of an answer."""
    lines = [
        f"drafts   {speculation.tokens} tokens in {speculation.steps} steps, {speculation.rejected} rejected, "
        f"about {speculation.speedup:.2f}x plain",
        f"time     {speculation.verify_seconds:.2f} s checking, {speculation.draft_seconds:.2f} s drafting, "
        f"{speculation.waited_seconds:.2f} s of it with drafters that take time",
    ]
    for name, of in speculation.by_drafter.items():
        lines.append(f"  {name:10} {of.accepted} of {of.drafted} right, {of.acceptance_rate:.0%}")
    for depth, of in enumerate(speculation.by_depth, start=1):
        lines.append(f"  token {depth:<4} {of.accepted} of {of.drafted} right, {of.acceptance_rate:.0%}")
    return lines + [f"  {name:10} not used: {reason}" for name, reason in speculation.dropped.items()]
