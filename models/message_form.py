"""The form in which a template takes messages: found by trying it, for templates do not say.

Three things are tried, each with a text that must then be in the prompt:

- A content is a text. Where the template loses or refuses it, the content is a list of one part instead,
  {"type": "text", "text": ...}, for the roles that need it.
- A system message is a message of its own. Where the template loses or refuses it, its text goes in front of the first
  user message behind it, with an empty line between them.
- Messages are given as they are. Where the template refuses several of one role in a row, they become one, with empty
  lines between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.provenance import joined

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Render: TypeAlias = Callable[[Messages], str]

BETWEEN = "\n\n"  # texts that become one message
_PROBES = {"system": "quartz", "user": "probe", "assistant": "walnut"}  # that no template has a reason to change
_QUESTION, _DIALOGUE = ("user",), ("user", "assistant", "user")


@dataclass(frozen=True)
class MessageForm:
    """What a template wants of messages.

    parts: roles whose content is a list of parts.  merges_system: it has no place for a system message.
    """

    parts: frozenset[str] = frozenset()
    merges_system: bool = False

    def applied(self, messages: Messages) -> Messages:
        """The messages in this form."""
        if self.merges_system:
            messages = _with_system_merged(messages)
        if self.parts:
            messages = [self._in_parts(message) for message in messages]
        return messages

    def _in_parts(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(message, Mapping) and message.get("role") in self.parts and isinstance(message["content"], str):
            return {**message, "content": [_part(message["content"])]}
        return message


PLAIN = MessageForm()


def form_of(render: Render) -> MessageForm | None:
    """The form in which a template takes messages; None where what the user says is in no prompt.

    render: the template. One that refuses every form here wants other messages, and gets them as they are.
    """
    if (form := _form_of_user(render)) is None:
        return None
    if not _is_shown(render, form, _QUESTION):
        return form  # it was refused
    in_parts = replace(form, parts=form.parts | {"assistant"})
    if not (has_dialogue := _is_shown(render, form, _DIALOGUE)) and _is_shown(render, in_parts, _DIALOGUE):
        form, has_dialogue = in_parts, True
    in_parts, merged = replace(form, parts=form.parts | {"system"}), replace(form, merges_system=True)
    for tried in (form, in_parts, merged):
        questions = [_QUESTION, _DIALOGUE] if has_dialogue else [_QUESTION]
        if all(_is_shown(render, tried, ("system", *roles)) for roles in questions):
            return tried
    return form


def _form_of_user(render: Render) -> MessageForm | None:
    """How the user's message is taken: alone, or where that is refused, after a system message."""
    is_lost = False
    for parts in ((), ("user",)):
        form = MessageForm(frozenset(parts))
        if shown := _is_shown(render, form, _QUESTION):
            return form
        is_lost = is_lost or shown is False
    if is_lost:
        return None
    after_system = [MessageForm(frozenset(parts)) for parts in ((), ("user",), ("system",), ("user", "system"))]
    return next((form for form in after_system if _is_shown(render, form, ("system", *_QUESTION))), PLAIN)


def _is_shown(render: Render, form: MessageForm, roles: Sequence[str]) -> bool | None:
    """Whether all that is said is in the prompt, and not as Python or JSON would write it; None where it is refused."""
    try:
        prompt = render(form.applied([{"role": role, "content": _PROBES[role]} for role in roles])).lower()
    except TemplateError:
        return None
    raw = [write(_part(_PROBES[role])) for role in form.parts for write in (repr, json.dumps)]
    return all(_PROBES[role] in prompt for role in roles) and not any(text in prompt for text in raw)


def with_turns_joined(messages: Messages) -> Messages:
    """The messages, those of one role in a row as one; those with more than a text in them stay as they are."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if found and _is_text(found[-1]) and _is_text(message) and found[-1]["role"] == message["role"]:
            text = joined((found[-1]["content"], message["content"]), BETWEEN)
            found[-1] = {"role": message["role"], "content": text}
        else:
            found.append(message)
    return found


def _with_system_merged(messages: Messages) -> Messages:
    """Each system message in front of the first user message behind it; without one it is a user message itself."""
    found: list[Mapping[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if _is_text(message) and message["role"] == "system":
            waiting += [message["content"]] if message["content"] else []
        elif waiting and isinstance(message, Mapping) and message.get("role") == "user":
            found.append({**message, "content": _with_before(joined(waiting, BETWEEN), message["content"])})
            waiting = []
        else:
            found.append(message)
    return [*found, {"role": "user", "content": joined(waiting, BETWEEN)}] if waiting else found


def _with_before(text: str, content: Any) -> Any:
    if isinstance(content, str):
        return joined((text, content), BETWEEN)
    return [_part(joined((text, BETWEEN))), *content] if isinstance(content, (list, tuple)) else content


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _is_text(message: Mapping[str, Any]) -> bool:
    """Whether a message is a role and a text, and nothing else."""
    return isinstance(message, Mapping) and set(message) == {"role", "content"} and isinstance(message["content"], str)
