"""What a chat template is given beside messages and tools: whether the model is to reason, and other variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument

Reasoning: TypeAlias = Literal["auto", "on", "off"]
"""Whether a model reasons before it answers; auto: as its template has it."""
TemplateValues: TypeAlias = Mapping[str, Any]

REASONING: tuple[Reasoning, ...] = get_args(Reasoning)
NO_VALUES: TemplateValues = {}
_NAMES = ("enable_thinking", "thinking")  # by which templates ask: the first is Qwen's, the second DeepSeek's


class TemplateOptions(TypedDict, total=False):
    """What a chat template is given, as keyword arguments.

    chat_template_kwargs: variables by name, with values that JSON has, such as {"enable_thinking": False}, which lets
    a model that can do without answer without reasoning. They go before the reasoning that the engine was loaded with.
    """

    chat_template_kwargs: Mapping[str, Any] | None


def values_of(reasoning: Reasoning, given: object) -> TemplateValues:
    """The variables. given: those of a request, which may be None.  Raises InvalidArgument, TemplateError."""
    if given is None and reasoning == "auto":
        return NO_VALUES
    if not isinstance(given, Mapping | None):
        raise InvalidArgument(f"chat_template_kwargs must be variables by name: found {shown(given)}")
    from edgeinfer.models.chat_template import check_values

    own: dict[str, Any] = dict(given or {})
    check_values(own)
    if reasoning != "auto" and not own.keys() & set(_NAMES):
        own |= reasoning_values(reasoning == "on")
    return own


def reasoning_values(is_on: bool) -> dict[str, bool]:
    """The variables by which templates are told whether the model is to reason."""
    return dict.fromkeys(_NAMES, is_on)


def is_reasoning_off(values: TemplateValues) -> bool:
    """Whether a template is told that the model does not reason."""
    return any(values.get(name) is False for name in _NAMES)
