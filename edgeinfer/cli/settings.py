"""The settings of /set in a chat: sampling parameters, number of tokens and stop texts, named as the flags."""

from __future__ import annotations

import difflib
import shlex
from typing import Any

import click

from edgeinfer.cli.options import SETTINGS, max_tokens, sampling_given
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.sampling import SamplingOptions, SamplingParams

_DEFAULT = "default"
_OTHER_NAMES = {"max-tokens": "predict"}  # beside the flags and the names of SamplingParams


class Settings:
    """The flags of a chat that /set can change. They hold for every model that is loaded in it."""

    def __init__(self, context: click.Context, flags: dict[str, Any]) -> None:
        self._context = context
        self._options = [option for option in context.command.params if option.name in SETTINGS]
        self._values = {name: flags[name] for name in SETTINGS}

    @property
    def sampling(self) -> SamplingOptions:
        """The sampling parameters that are set."""
        return sampling_given(self._values)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of an answer, None without a limit."""
        return max_tokens(self._values)

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts before which an answer ends."""
        return tuple(self._values["stop"] or ())

    def params(self, default: SamplingParams) -> SamplingParams:
        """The parameters for a model with such defaults."""
        return default.changed(self.sampling)

    def set(self, argument: str) -> str:
        """Set one by "NAME VALUE" or "NAME default"; returns the name of the flag.

        Raises InvalidArgument, click.UsageError, which say what is needed.
        """
        name, *values = _words(argument)
        option = self._option(name)
        if not values:
            raise InvalidArgument(f"/set {_flag(option)} needs a value; {_DEFAULT} is one")
        if len(values) > 1 and not option.multiple:
            raise InvalidArgument(f"/set {_flag(option)} takes one value: found {' '.join(values):.80}")
        if values == [_DEFAULT]:
            value: Any = () if option.multiple else -1 if option.name == "predict" else None
        else:
            value = option.process_value(self._context, tuple(values) if option.multiple else values[0])
        values_then = self._values | {str(option.name): value}
        sampling_given(values_then)
        self._values = values_then
        return _flag(option)

    def lines(self, default: SamplingParams, only: str | None = None) -> list[str]:
        """A line about each setting, or about one: its name, its value, and whether it was set here."""
        params = self.params(default)
        chosen = self._options if only is None else [self._option(only)]
        width = max(len(_flag(option)) for option in self._options)
        return [f"{_flag(option):<{width}}  {self._shown(option, params)}" for option in chosen]

    def _shown(self, option: click.Parameter, params: SamplingParams) -> str:
        """The value of a setting, as it is typed."""
        value = self._values[str(option.name)]
        is_set = value not in (None, (), -1)
        if option.name == "predict":
            return f"{value}" if is_set else "-1 (no limit)"
        if option.name == "stop":
            return " ".join(map(repr, value)) if is_set else "none"
        if option.name == "logit_bias":
            return " ".join(value) if is_set else "none"
        if option.name == "dry_sequence_breakers":
            return " ".join(map(repr, params.dry_sequence_breakers)) or "none"
        if option.name == "seed" and not is_set:
            return "-1 (a new one each time)"
        return str(getattr(params, str(option.name)))

    def _option(self, name: str) -> click.Option:
        asked = name.lstrip("-").replace("_", "-")
        asked = _OTHER_NAMES.get(asked, asked)
        for option in self._options:
            names = {flag.lstrip("-") for flag in option.opts} | {str(option.name).replace("_", "-")}
            if asked in names and isinstance(option, click.Option):
                return option
        flags = [_flag(option) for option in self._options]
        near = difflib.get_close_matches(asked, flags, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(flags)}"
        raise InvalidArgument(f"there is no setting {name:.40}: {hint}")


def _flag(option: click.Parameter) -> str:
    """The long name of a flag, without dashes before it."""
    return next(flag for flag in option.opts if flag.startswith("--")).lstrip("-")


def _words(text: str) -> list[str]:
    """The words of a line. Quotes hold a word with spaces together; a backslash has no special meaning."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    try:
        return list(lexer)
    except ValueError:
        raise InvalidArgument(
            "a quote is not closed: put a text that has one between quotes of the other kind"
        ) from None
