"""Bodies of OpenAI's requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from edgeinfer.batch.lines import IGNORED, LIMITS, constraint_of, no_such
from edgeinfer.common.arguments import check_integer, shown
from edgeinfer.constraints.options import ConstraintOptions
from edgeinfer.engine import Prompt
from edgeinfer.message import Message
from edgeinfer.sampling import SamplingOptions
from edgeinfer.server.asked import Asked, check_seconds
from edgeinfer.server.dialects.llama_cpp.reading import HARMLESS
from edgeinfer.server.dialects.openai.messages import check_number_of, read_chat_parts, read_template_options
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem, about, unsupported
from edgeinfer.stream import RequestOptions

_MOST_TOP = 20  # alternatives of a token, as at OpenAI
# That change no text, beside those of batch files. "stream" and its options do something here.
_HARMLESS = (IGNORED | HARMLESS | {"prompt_cache_options"}) - {
    *("model", "stream", "stream_options", "parallel_tool_calls")
}
_FLAGS = ("verbose", "timings_per_token", "return_progress", "ignore_eos")  # of llama.cpp, for which see Asked
_ONLY: Mapping[str, tuple[object, ...]] = {  # of these only values that change nothing
    "best_of": (1,),
    "modalities": (["text"],),
    "function_call": ("none",),
    "functions": ([],),
    # Of vLLM and SGLang, whose routers send all of them.
    **dict.fromkeys(("no_stop_trim", "return_hidden_states"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "separate_reasoning", "stream_reasoning", "include_reasoning"), (True,)),
}
_LIMITS = (*LIMITS, "n_predict")  # the last one as llama.cpp names it
_SAME = {"repeat_last_n": "penalty_last_n", "json_schema": "schema"}
_OF_CHATS = frozenset(
    "messages logprobs top_logprobs tools tool_choice parallel_tool_calls tool_selection continue_final_message "
    "add_generation_prompt chat_template_kwargs".split()
)
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
        limit = next((name for name in _LIMITS if name in self.body), None)
        if limit is not None:
            with about(limit):
                n = check_integer(limit, self.body[limit], -2 if limit == "n_predict" else -1)
                self.options["max_tokens"] = None if n == -2 else n

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
        elif name not in ("model", "stream", "stream_options", "n", *_FLAGS, *_LIMITS):
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
            shows_prompt=self.flag("verbose") if "verbose" in self.body else None,
            tells_times=self.flag("timings_per_token"),
            tells_progress=self.flag("return_progress"),
            ignores_ends=self.flag("ignore_eos"),
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
    reader = Reader(body, limits, _OF_CHATS)
    asked = reader.asked()
    top = reader.number("top_logprobs", 0, 0, _MOST_TOP)
    if reader.flag("logprobs"):
        asked.options["logprobs"] = top
    elif top:
        raise Problem(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    asked.messages, asked.tools = read_chat_parts(reader.body, limits)
    _check_begun(reader, asked.messages)
    asked.template = read_template_options(reader.body)
    return asked, reader.wants_usage()


def _check_begun(reader: Reader, messages: list[Message]) -> None:
    """An answer at the end of the messages is the beginning of the next one. Raises Problem where it is said not to be.

    The names are those of transformers and vLLM.
    """
    goes_on = reader.flag("continue_final_message") if "continue_final_message" in reader.body else None
    is_begun = messages[-1]["role"] == "assistant"
    begins = reader.flag("add_generation_prompt") if "add_generation_prompt" in reader.body else not is_begun
    if (begins and goes_on) or (goes_on and not is_begun):
        raise Problem(
            400,
            "continue_final_message needs an answer as the last message, and add_generation_prompt false",
            param="continue_final_message",
        )
    if not begins and not is_begun:
        raise unsupported("add_generation_prompt", "without it there is no answer")
    if goes_on is False and is_begun:
        raise Problem(400, "the last message is an answer: there is nothing to answer", param="continue_final_message")


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
