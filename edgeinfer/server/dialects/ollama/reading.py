"""Bodies of Ollama's requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from edgeinfer.common.arguments import check_integer, shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.message import Message
from edgeinfer.server.asked import Asked
from edgeinfer.server.dialects.openai.messages import arguments_of, check_number_of, check_tools
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem, about, unsupported
from edgeinfer.stream import RequestOptions

_SAME = {  # options with their names here
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_last_n": "penalty_last_n",
}
_HARMLESS = frozenset(  # that change no text, or how it is computed
    "num_ctx num_keep num_batch num_gpu main_gpu num_thread numa low_vram f16_kv vocab_only use_mmap use_mlock "
    "logits_all embedding_only mirostat_tau mirostat_eta draft_num_predict".split()
)
_ONLY: Mapping[str, object] = {"mirostat": 0, "tfs_z": 1, "typical_p": 1, "penalize_newline": False}
_MOST_TOP = 20
_ROLES = ("system", "user", "assistant", "tool")


def read_common(body: Mapping[str, Any], limits: Limits, own: frozenset[str]) -> Asked:
    """What chat and generate share.  own: parameters that the caller reads. Raises Problem."""
    model = body.get("model", body.get("name"))
    if not isinstance(model, str) or not model:
        raise Problem(400, f"model must be a name: found {shown(model)}", param="model")
    known = {"model", "name", "stream", "format", "options", "keep_alive", "logprobs", "top_logprobs", "think", *own}
    for name, value in body.items():
        if name not in known and value is not None:
            raise Problem(400, f"there is no parameter {shown(name)}", code="unknown_parameter", param=name)
    stream = body.get("stream", True)
    if stream is not None and not isinstance(stream, bool):
        raise Problem(400, f"stream must be true or false: found {shown(stream)}", param="stream")
    asked = Asked(model=model, is_stream=stream is not False)
    _read_options(body.get("options"), asked)
    asked.options.update(cast(RequestOptions, _format(body.get("format"))))
    if body.get("logprobs"):
        with about("top_logprobs"):
            asked.options["logprobs"] = check_integer("top_logprobs", body.get("top_logprobs") or 0, 0, _MOST_TOP)
    return asked


def _read_options(given: object, asked: Asked) -> None:
    if given is None:
        return
    if not isinstance(given, dict):
        raise Problem(400, f"options must be an object: found {shown(given)}", param="options")
    options = cast("dict[str, Any]", asked.options)
    for name, value in given.items():
        if value is None:
            continue
        if name in _SAME:
            options[_SAME[name]] = value
        elif name == "num_predict":
            with about(name):
                n = check_integer(name, value, -2)
                options["max_tokens"] = None if n < 0 else n
        elif name in _HARMLESS:
            asked.ignored.append(name)
        elif name not in _ONLY or value != _ONLY[name]:
            raise unsupported(name)


def _format(given: object) -> dict[str, Any]:
    if given in (None, ""):
        return {}
    if given == "json":
        return {"json": True}
    if isinstance(given, dict):
        return {"schema": given}
    raise Problem(400, f'format must be "json" or a JSON Schema: found {shown(given)}', param="format")


def read_messages(given: object, limits: Limits) -> list[Message]:
    """Messages of a chat. Raises Problem."""
    if given is not None and not isinstance(given, list):
        raise Problem(400, f"messages must be a list: found {shown(given)}", param="messages")
    check_number_of("messages", given, limits.messages)
    with about("messages"):
        return [_message(each, f"message {number}") for number, each in enumerate(given or (), start=1)]


def read_tools(given: object, limits: Limits) -> dict[str, Any]:
    """Tools, as for Conversation.stream. Raises Problem."""
    if not given:
        return {}
    check_tools(given, limits)
    return {"tools": given, "tool_selection": False}


def _message(given: object, place: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in _ROLES:
        raise InvalidArgument(f"{place} must have a role of {', '.join(_ROLES)}: found {shown(given)}")
    if given.get("images"):
        raise InvalidArgument(f"{place}: images are not supported")
    content = given.get("content") or ""
    if not isinstance(content, str):
        raise InvalidArgument(f"{place}: the content must be a text: found {shown(content)}")
    message: Message = {"role": given["role"], "content": content}
    if given["role"] == "assistant":
        if isinstance(given.get("thinking"), str) and given["thinking"]:
            message["reasoning"] = given["thinking"]
        if calls := given.get("tool_calls"):
            message["tool_calls"] = [_call(call, place) for call in calls]
    if given["role"] == "tool":
        name = given.get("tool_name", given.get("name"))
        if isinstance(name, str):
            message["name"] = name
        if isinstance(given.get("tool_call_id"), str):
            message["tool_call_id"] = given["tool_call_id"]
    return message


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgument(f"{place}: a call must have a function with a name: found {shown(call)}")
    found = {"name": function["name"], **arguments_of(function.get("arguments"))}
    return found | ({"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {})
