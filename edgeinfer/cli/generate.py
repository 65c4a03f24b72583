"""`edgeinfer generate`: complete a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.answering import finish_one_shot, write_answer
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
from edgeinfer.cli.terminal import ProgressBar, Writer
from edgeinfer.common.user_text import decoded

if TYPE_CHECKING:
    from edgeinfer.engine import RequestOptions


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
    with open_engine(flags) as engine:
        bar = ProgressBar("reading the prompt")
        with warnings_as_notes():  # of a begin token that is there twice
            request: RequestOptions = {**sampling, **constraint}
            stream = engine.stream(
                text, max_tokens=max_tokens(flags), stop=stop, progress=bar, logprobs=logprobs, **request
            )
        completion = write_answer(engine, stream, Writer.to_stdout(silent=as_json), bar)
        finish_one_shot(engine, completion, as_json, quiet)


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
