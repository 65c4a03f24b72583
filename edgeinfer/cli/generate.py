"""`edgeinfer generate`: complete a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from edgeinfer.cli.answering import as_record, finish_one_shot, note_full_context, write_answer
from edgeinfer.cli.constraints import constraint_given, constraint_options
from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    FileName,
    backend_option,
    escaped_text,
    json_option,
    max_tokens,
    model_options,
    open_engine,
    quiet_option,
    read_input,
    sampling_given,
    sampling_options,
    stop_option,
    text_argument,
    text_or_prompt,
    warnings_as_notes,
)
from edgeinfer.cli.terminal import ProgressBar, Writer, note, show
from edgeinfer.common.user_text import decoded

if TYPE_CHECKING:
    from edgeinfer.completion import Completion
    from edgeinfer.engine import Engine
    from edgeinfer.stream import ChoiceOptions, RequestOptions

MOST_SAMPLES = 1024  # as edgeinfer.many has it, which would make `--help` slow


@click.command(cls=ModelCommand, model="model", draft="model_draft", finds=False)
@text_argument
@model_options
@backend_option
@click.option("-p", "--prompt", callback=escaped_text, help="The text to complete, same as TEXT.")
@click.option(
    *("-f", "--file"),
    type=FileName(exists=True, dir_okay=False),
    help="Complete the text in this file.",
)
@stop_option
@sampling_options
@constraint_options
@quiet_option
@json_option
@click.option(
    "--samples",
    type=click.IntRange(1, MOST_SAMPLES),
    help="Complete it N times, with seeds that count up, and print each text when it ends.",
)
@click.option("--first", type=click.IntRange(1), help="--samples: stop when so many have ended.")
@click.option(
    "--logprobs",
    type=click.IntRange(0, 1000),
    help="--json: the log probability of each token, and of the N most likely ones in its place.",
)
def generate(
    texts: tuple[str, ...],
    prompt: str | None,
    file: Path | None,
    stop: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    logprobs: int | None,
    samples: int | None = None,
    first: int | None = None,
    **flags: Any,
) -> None:
    """Complete a text.

    The text is TEXT, or that of -p, of a file, or of standard input. No chat template is used; names of special tokens
    ("<|im_start|>") become those tokens. The completion goes to standard output, everything else to standard error.
    """
    text = _text(text_or_prompt(texts, prompt), file)
    sampling, constraint = sampling_given(flags), constraint_given(flags)
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json, which shows them")
    if first is not None and (samples is None or first > samples):
        raise click.UsageError("--first M needs --samples N, and M is at most N")
    with open_engine(flags) as engine:
        if samples is not None:
            options = {"max_tokens": max_tokens(flags), "stop": stop, "logprobs": logprobs, **sampling, **constraint}
            _show_samples(engine, text, (samples, first), cast("RequestOptions", options), as_json, quiet)
            return
        bar = ProgressBar("reading the prompt")
        with warnings_as_notes():  # of a begin token that is there twice
            request: ChoiceOptions = {**sampling, **constraint}
            stream = engine.stream(
                text, max_tokens=max_tokens(flags), stop=stop, progress=bar, logprobs=logprobs, **request
            )
        completion = write_answer(engine, stream, Writer.to_stdout(silent=as_json), bar)
        finish_one_shot(engine, completion, as_json, quiet)


def _show_samples(
    engine: Engine, text: str, numbers: tuple[int, int | None], options: RequestOptions, as_json: bool, quiet: bool
) -> None:
    """Print samples of a prompt as they end.  numbers: of samples, and of those that are enough."""
    (n, first), n_ended = numbers, 0
    with ProgressBar("reading the prompt") as bar, warnings_as_notes():
        options["progress"] = lambda share: None if n_ended else bar(share)
        for completion in engine.samples(text, n, first=first, **options):
            bar.close()
            n_ended += 1
            if not quiet and not as_json:
                tokens = f"{completion.usage.completion_tokens} tokens, {completion.finish_reason}"
                note(f"[{n_ended} of {first or n} | seed {completion.params.seed} | {tokens}]")
            _show_sample(engine, completion, as_json, is_first=n_ended == 1)


def _show_sample(engine: Engine, completion: Completion, as_json: bool, is_first: bool) -> None:
    """Print a sample: a line of JSON, or the text, after an empty line if it is not the first."""
    note_full_context(engine, completion)
    if as_json:
        show(json.dumps(as_record(engine, completion)))
    else:
        writer = Writer.to_stdout()
        writer.write(completion.text if is_first else f"\n{completion.text}")
        writer.end_line()
    if completion.finish_reason == "interrupted":
        raise KeyboardInterrupt


def _text(prompt: str | None, file: Path | None) -> str:
    """The text to complete, exactly as given, without a byte order mark."""
    if prompt is not None and file is not None:
        raise click.UsageError("-f gives a prompt, and so does TEXT or -p: give one of them")
    if prompt is not None:
        return prompt
    if file is not None:
        return decoded(file.read_bytes(), file)
    piped = read_input(beside_prompt=False)
    if not piped:
        raise click.UsageError("no prompt: give one as TEXT, with -p, with -f or on standard input")
    return piped
