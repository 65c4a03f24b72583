"""Bodies of llama.cpp's own requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from edgeinfer.common.arguments import check_integer, shown
from edgeinfer.engine import Engine
from edgeinfer.sampling import SamplingOptions
from edgeinfer.server.asked import Asked
from edgeinfer.server.limits import Limits
from edgeinfer.server.problem import Problem, about, unsupported
from edgeinfer.stream import RequestOptions

# That change no text here; chats of OpenAI's dialect take them too.
HARMLESS = frozenset(
    "cache_prompt id_slot n_keep n_cache_reuse n_indent penalize_nl min_keep n_discard mirostat_tau mirostat_eta "
    "dynatemp_exponent xtc_threshold t_max_prompt_ms backend_sampling".split()
)
_ONLY: Mapping[str, tuple[object, ...]] = {  # of these only values that change nothing
    "mirostat": (0,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1,),
    "dynatemp_range": (0,),
    "lora": ([],),
    "samplers": ([],),
    "n_cmpl": (1,),
    "image_data": ([],),
}
_SAME = {"repeat_last_n": "penalty_last_n", "n_predict": "max_tokens"}
_FLAGS = ("timings_per_token", "return_progress", "return_tokens", "verbose", "post_sampling_probs")
_READ = frozenset({"prompt", "stream", "model", "ignore_eos", "n_probs", "json_schema", "grammar", "stop", "n"})
_READ |= {*_FLAGS, "response_fields", "logit_bias"}
_READ_INFILL = frozenset({"input_prefix", "input_suffix", "input_extra"})


def read(body: Mapping[str, Any], limits: Limits, is_infill: bool = False) -> Asked:
    """What is asked, but for the prompt. Raises Problem."""
    asked = Asked(is_stream=body.get("stream") is True)
    model = body.get("model")
    asked.model = model if isinstance(model, str) and model else None
    options = cast("dict[str, Any]", asked.options)
    for name, value in body.items():
        if value is None or name in _READ or (is_infill and name in _READ_INFILL):
            continue
        with about(name):
            _read_option(name, value, options, asked)
    with about("n"):
        asked.n = check_integer("n", body.get("n") or 1, 1, limits.samples)
    for name, own in (("json_schema", "schema"), ("grammar", "grammar")):
        if body.get(name) not in (None, "", {}):
            options[own] = body[name]
    if body.get("stop"):
        options["stop"] = body["stop"]
    if body.get("n_probs"):
        with about("n_probs"):
            options["logprobs"] = check_integer("n_probs", body["n_probs"], 0, 1000)
    for name in _FLAGS:
        if not isinstance(body.get(name), bool | None):
            raise Problem(400, f"{name} must be true or false: found {shown(body[name])}", param=name)
    if body.get("post_sampling_probs") and "logprobs" in options:
        options["sampled_logprobs"] = True
    asked.ignores_ends = body.get("ignore_eos") is True
    asked.tells_times, asked.tells_progress = bool(body.get("timings_per_token")), bool(body.get("return_progress"))
    return asked


def fields_of(body: Mapping[str, Any]) -> list[str]:
    """Fields of an answer that a client wants, as paths with slashes; none for all of them. Raises Problem."""
    fields = body.get("response_fields")
    if not isinstance(fields, list | None) or not all(isinstance(each, str) for each in fields or ()):
        raise Problem(400, f"response_fields must be a list of names: found {shown(fields)}", param="response_fields")
    return fields or []


def chosen(answer: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    """These fields of an answer, by their paths; all of it where there are none."""
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, found) if isinstance(value, dict) else found  # which no field has
        if value is not found:
            found[path] = value
    return found if fields else answer


def biases_of(given: object, engine: Engine) -> list[tuple[Any, Any]]:
    """logit_bias as [[token or text, bias], ...] or by token or text; each token of a text has its bias.

    Raises Problem.
    """
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(isinstance(each, list | tuple) and len(each) == 2 for each in pairs):
        raise Problem(400, "logit_bias must be a list of [token id or text, bias]", param="logit_bias")
    found: list[tuple[Any, Any]] = []
    for key, bias in pairs:
        is_text = isinstance(key, str) and not (key.isascii() and key.isdecimal())
        ids = engine.tokenize(key, add_special=False, parse_special=False) if is_text else [key]
        found += [(id, bias) for id in ids]
    return found


def _read_option(name: str, value: Any, options: dict[str, Any], asked: Asked) -> None:
    own = _SAME.get(name, name)
    if name in HARMLESS:
        asked.ignored.append(name)
    elif name == "n_predict":
        n = check_integer(name, value, -2)
        options["max_tokens"] = None if n < 0 else n
    elif name == "max_tokens":
        options["max_tokens"] = check_integer(name, value, -1)
    elif name == "t_max_predict_ms":
        if check_integer(name, value, -1) > 0:
            options["timeout"] = value / 1000
    elif name == "seed":
        seed = check_integer(name, value, -1)
        options["seed"] = None if seed in (-1, 0xFFFFFFFF) else seed
    elif own in SamplingOptions.__annotations__ or name in ("regex", "choices"):
        options[own] = value
    elif name in _ONLY:
        if value not in _ONLY[name]:
            raise unsupported(name)
    else:
        raise Problem(400, f"there is no parameter {shown(name)}", code="unknown_parameter", param=name)


def prompts_of(given: object, limits: Limits) -> list[Any]:
    """One prompt or several: texts, token ids, or lists of both. Raises Problem."""

    def is_one(value: object) -> bool:
        if isinstance(value, str):
            return True
        parts: list[Any] = value if isinstance(value, list) else []
        return all(isinstance(part, (int, str)) for part in parts) and any(type(part) is int for part in parts)

    given = [_plain(each) for each in given] if isinstance(given, list) else _plain(given)
    several = [given] if is_one(given) else given
    if not isinstance(several, list) or not several or not all(is_one(each) for each in several):
        raise Problem(400, f"prompt must be texts, token ids, or lists of both: found {shown(given)}", param="prompt")
    if len(several) > limits.samples:
        raise Problem(400, f"there may be {limits.samples} prompts: found {len(several)}", param="prompt")
    return several


def _plain(prompt: object) -> object:
    """The text of a prompt that could also have images."""
    if not isinstance(prompt, dict) or "prompt_string" not in prompt:
        return prompt
    if prompt.get("multimodal_data"):
        raise Problem(400, "this model reads no images or sounds: leave out multimodal_data", param="prompt")
    return prompt["prompt_string"]


def joined(parts: list[Any], engine: Engine) -> list[int]:
    """Tokens of a list of texts and token ids. Raises Problem."""
    found: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            found += engine.tokenize(part, add_special=number == 0)
        elif type(part) is int:
            found.append(part)
        else:
            raise Problem(400, f"prompt must be of texts and token ids: found {shown(part)}", param="prompt")
    return found


def text_of(body: Mapping[str, Any], name: str) -> str:
    """A parameter that is a text, "" if it is not given. Raises Problem."""
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Problem(400, f"{name} must be a text: found {shown(value)}", param=name)
    return value


def options_shown(options: RequestOptions) -> dict[str, Any]:
    """Options as a reply repeats them."""
    return {name: value for name, value in options.items() if isinstance(value, (int, float, str, bool))}
