"""The chat template that a caller gives in place of the file's."""

from __future__ import annotations

import os
from pathlib import Path

from edgeinfer.common.errors import InvalidArgument, TemplateError
from edgeinfer.common.user_text import decoded


def read_template(given: str | os.PathLike[str]) -> str:
    """Jinja source, or the name of a known template: a text as it is, of a file what stands in it.

    Raises TemplateError for a template that is broken, InvalidArgument for a file that cannot be read.
    """
    from edgeinfer.models.chat_template import ChatTemplate
    from edgeinfer.models.known_templates import source_of

    text = given if isinstance(given, str) else _of_file(Path(given))
    source = source_of(text)
    if source is None:
        raise TemplateError("the chat template that was given is empty: give Jinja, or the name of a known one")
    ChatTemplate(source)  # refuses what is no Jinja, or too long
    return source


def _of_file(path: Path) -> str:
    from edgeinfer.models.chat_template import MAX_SOURCE_BYTES

    try:
        with path.open("rb") as file:
            data = file.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"the chat template {path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_SOURCE_BYTES:
        raise TemplateError(f"{path}: a chat template may have {MAX_SOURCE_BYTES >> 10} KiB")
    return decoded(data, path)
