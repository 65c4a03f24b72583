"""What chats and completions of OpenAI's dialect have in common: events with choices, and the usage at their end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.common.overriding import override
from edgeinfer.completion import Completion
from edgeinfer.logprobs import TokenLogprob
from edgeinfer.server.answering import Form
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.openai import common
from edgeinfer.server.pace import timings_of
from edgeinfer.server.served import Served


class ChoicesForm(Form):
    """A stream of events, each with a choice.  kind_of_event, prefix: of the objects and of their ids."""

    kind = common.EVENTS
    ping = common.PING

    def __init__(self, served: Served, asked: Asked, wants_usage: bool, kind_of_event: str, prefix: str) -> None:
        self._engine, self._asked, self._wants_usage = served.engine, asked, wants_usage
        self._has_logprobs = asked.options.get("logprobs") is not None
        self._head = common.head(kind_of_event, prefix, served, asked)
        self._completions: dict[int, Completion] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}  # of tokens without a chunk so far

    @override
    def end(self) -> Iterator[bytes]:
        if self._wants_usage:
            yield common.event({**self._head, "choices": [], "usage": self._usage(), **self._times()})
        yield common.DONE

    @override
    def failed(self, error: Any) -> bytes:
        return common.event(error)

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        usage = {"usage": None} if self._wants_usage else {}
        times = self._asked.times(choice["index"])
        return common.event({**self._head, "choices": [choice], **usage, **times, **more})

    def _times(self) -> dict[str, Any]:
        """Times of the first text, where they were asked for."""
        first = self._completions.get(0)
        if first is None or not self._asked.tells_times:
            return {}
        return {"timings": timings_of(first.usage, first.timings)}

    def _more(self) -> dict[str, Any]:
        """What an answer says beside, where it was asked for: times, the first prompt."""
        return {**self._times(), **common.shown_prompt(self._asked, self._engine, self._completions[0], 0)}

    def _usage(self) -> dict[str, Any]:
        completions = [self._completions[number] for number in sorted(self._completions)]
        return common.usage_of(completions, self._asked.n)
