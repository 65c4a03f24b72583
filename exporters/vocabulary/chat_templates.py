"""The chat template of a checkpoint, which has been kept in five places.

First chat_template.jinja, with others by name in additional_chat_templates/ (since transformers 4.49);
then tokenizer_config.json, one or several by name; then chat_template.json, of models that also see or hear.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgeinfer.common.errors import ModelFileError, TemplateError
from edgeinfer.exporters.checkpoint import Folder
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.models.gguf import MetadataValue
from edgeinfer.models.known_templates import source_of

_KEY = "tokenizer.chat_template"
_FILE, _MORE, _JSON = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
_DEFAULT = "default"
_QUESTION = "probe"  # which no template has a reason to change
_PROBE = {"role": "user", "content": _QUESTION}


def chat_templates(folder: Folder, settings: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """The keys of all templates. settings: of tokenizer_config.json. Raises ModelFileError."""
    named = _in_files(folder)
    if not named:
        named = _by_name(settings.get("chat_template"), folder, "tokenizer_config.json")
    if not named and _JSON in folder:
        named = _by_name(folder.json(_JSON).get("chat_template"), folder, _JSON)
    keys: dict[str, MetadataValue] = {}
    others = {re.sub(r"[^A-Za-z0-9]", "_", name): text for name, text in named.items() if name != _DEFAULT}
    if others:
        keys["tokenizer.chat_templates"] = sorted(others)
        keys |= {f"{_KEY}.{name}": text for name, text in sorted(others.items())}
    if _DEFAULT in named:
        keys[_KEY] = named[_DEFAULT]
    return keys


def template_notes(metadata: Mapping[str, Any]) -> list[str]:
    """A sentence for each chat template of a file that is no Jinja, or fails on a conversation of one message."""
    notes = []
    for key, text in metadata.items():
        if key != _KEY and not key.startswith(f"{_KEY}."):
            continue
        try:
            source = source_of(text if isinstance(text, str) else None)
            template = None if source is None else ChatTemplate(source, *_marks(metadata))
            if template is not None and key == _KEY and _QUESTION not in template.render([_PROBE]):
                raise TemplateError("the chat template leaves out what the user says: it is damaged")
        except TemplateError as error:
            notes.append(f"{key}: {error}; it is written as it is, and chats with it fail")
    return notes


def _marks(metadata: Mapping[str, Any]) -> list[str]:
    """The texts of the begin and the end token, "" where there is none."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos"))
    return [str(tokens[id]) if isinstance(id, int) and 0 <= id < len(tokens) else "" for id in ids]


def _in_files(folder: Folder) -> dict[str, str]:
    if _FILE not in folder:
        return {}
    named = {_DEFAULT: _text(folder, _FILE)}
    inner = folder.inner(_MORE)
    for name in inner.names(r"[^.].*\.jinja") if inner is not None else []:
        assert inner is not None
        named[name.removesuffix(".jinja")] = _text(inner, name)
    return named


def _text(folder: Folder, name: str) -> str:
    try:
        return folder.text(name).decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{folder.path / name}: must be UTF-8: {error!s:.120}") from error


def _by_name(found: object, folder: Folder, file: str) -> dict[str, str]:
    """Templates by name: of a text, of a list of {name, template}, or of an object."""
    if found is None:
        return {}
    if isinstance(found, str):
        return {_DEFAULT: found}
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        found = {entry.get("name"): entry.get("template") for entry in found}
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in found.items()
    ):
        raise ModelFileError(
            f"{folder.path / file}: chat_template must be a text, or texts by name: found {found!r:.80}"
        )
    return found
