"""Bodies of OpenAI's requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from edgeinfer.batch.lines import IGNORED, LIMITS, constraint_of, no_such
from edgeinfer.common.arguments import check_integer, shown
from edgeinfer.constraints.options import ConstraintOptions
from edgeinfer.engine import Prompt
from edgeinfer.sampling import SamplingOptions
from edgeinfer.server.asked import Asked, check_seconds
from edgeinfer.server.dialects.openai.messages import check_number_of, read_chat_parts
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem, about, unsupported
from edgeinfer.stream import RequestOptions

_MOST_TOP = 20  # alternatives of a token, as at OpenAI
# That change no text, beside those of batch files. "stream" and its options do something here.
_HARMLESS = (IGNORED | {"prompt_cache_options", "verbose", "timings_per_token"}) - {
    *("model", "stream", "stream_options", "parallel_tool_calls")
}
_ONLY: Mapping[str, tuple[object, ...]] = {  # of these only values that change nothing
    "best_of": (1,),
    "modalities": (["text"],),
    "function_call": ("none",),
    "functions": ([],),
    # Of vLLM and SGLang, whose routers send all of them.
    **dict.fromkeys(("no_stop_trim", "ignore_eos", "continue_final_message", "return_hidden_states"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "separate_reasoning", "stream_reasoning", "include_reasoning"), (True,)),
}
_SAME = {"repeat_last_n": "penalty_last_n", "json_schema": "schema"}
_OPTIONS = frozenset((*SamplingOptions.__annotations__, *ConstraintOptions.__annotations__))

Read = Callable[[str, Any], None]


class Reader:
    """Reads the parameters that chats and completions share.  own: those that the caller reads."""

    def __init__(self, body: Mapping[str, Any], limits: Limits, own: Collection[str]) -> None:
        self.body = {name: value for name, value in body.items() if value is not None}
        self.options: dict[str, Any] = {}
        self.ignored: list[str] = []
        self._limits = limits
        for name, value in self.body.items():
            if name not in own:
                with about(name):
                    self._read(name, value)
        limit = next((name for name in LIMITS if name in self.body), None)
        if limit is not None:
            with about(limit):
                self.options["max_tokens"] = check_integer(limit, self.body[limit], -1)

    def _read(self, name: str, value: Any) -> None:
        if name in _ONLY:
            if not any(value == known and type(value) is type(known) for known in _ONLY[name]):
                raise unsupported(name)
        elif _SAME.get(name, name) in _OPTIONS or name == "stop":
            self.options[_SAME.get(name, name)] = value
        elif name == "response_format":
            self.options |= constraint_of(value)
        elif name == "timeout":
            self.options["timeout"] = check_seconds(value)
        elif name in _HARMLESS:
            self.ignored.append(name)
        elif name not in ("model", "stream", "stream_options", "n", *LIMITS):
            raise Problem(400, no_such(name), code="unknown_parameter", param=name)

    def flag(self, name: str) -> bool:
        """A parameter that is true or false, false if it is not given. Raises Problem."""
        value = self.body.get(name, False)
        if not isinstance(value, bool):
            raise Problem(400, f"{name} must be true or false: found {shown(value)}", param=name)
        return value

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """An integer parameter. Raises Problem."""
        with about(name):
            return check_integer(name, self.body.get(name, default), least, most)

    def asked(self) -> Asked:
        """What all requests have. Raises Problem."""
        model = self.body.get("model")
        if model is not None and not isinstance(model, str):
            raise Problem(400, f"model must be a name: found {shown(model)}", param="model")
        return Asked(
            model=model,
            options=cast(RequestOptions, self.options),
            n=self.number("n", 1, 1, self._limits.samples),
            is_stream=self.flag("stream"),
            ignored=self.ignored,
        )

    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens. Raises Problem."""
        options = self.body.get("stream_options", {})
        if not isinstance(options, dict):
            raise Problem(400, f"stream_options must be an object: found {shown(options)}", param="stream_options")
        if options and not self.flag("stream"):
            raise Problem(400, "stream_options need stream: true", param="stream_options")
        if unknown := options.keys() - {"include_usage", "include_obfuscation"}:
            raise Problem(400, f"stream_options may have include_usage: found {shown(sorted(unknown))}")
        return options.get("include_usage") is True


def read_chat(body: Mapping[str, Any], limits: Limits) -> tuple[Asked, bool]:
    """(what is asked, whether a stream ends with the usage). Raises Problem."""
    own = {"messages", "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "tool_selection"}
    reader = Reader(body, limits, own)
    asked = reader.asked()
    top = reader.number("top_logprobs", 0, 0, _MOST_TOP)
    if reader.flag("logprobs"):
        asked.options["logprobs"] = top
    elif top:
        raise Problem(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    asked.messages, asked.tools = read_chat_parts(reader.body, limits)
    return asked, reader.wants_usage()


def read_completion(body: Mapping[str, Any], limits: Limits) -> tuple[Asked, bool, bool]:
    """(what is asked, whether a stream ends with the usage, whether the prompt is repeated). Raises Problem."""
    reader = Reader(body, limits, {"prompt", "logprobs", "echo", "suffix"})
    asked, echo = reader.asked(), reader.flag("echo")
    suffix = reader.body.get("suffix", "")
    if not isinstance(suffix, str) or (suffix and echo):
        raise Problem(400, f"suffix must be a text, without echo: found {shown(suffix)}", param="suffix")
    asked.suffix = suffix
    if "logprobs" in reader.body:
        with about("logprobs"):
            top = check_integer("logprobs", reader.body["logprobs"], 0, _MOST_TOP)
        asked.options["logprobs"], asked.has_scores = top, echo
        if echo and top > 1:
            raise unsupported("logprobs", "with echo there is one alternative of each token at most")
    if "prompt" not in reader.body:
        raise Problem(400, "the request has no prompt", param="prompt")
    asked.prompts = _prompts(reader.body["prompt"], limits)
    return asked, reader.wants_usage(), echo


def _prompts(given: object, limits: Limits) -> list[Prompt]:
    """One prompt or several, each a text or token ids."""

    def is_tokens(value: object) -> bool:
        return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)

    several = given if isinstance(given, list) and not is_tokens(given) else [given]
    if not several or not all(isinstance(each, str) or is_tokens(each) for each in several):
        raise Problem(
            400, f"the prompt must be texts, or the ids of their tokens: found {shown(given)}", param="prompt"
        )
    check_number_of("prompts", several, limits.samples)
    return cast("list[Prompt]", several)
