"""The prompt that ranks documents: the model is asked to name the best one by its letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from edgeinfer.common.arguments import check_text, shown
from edgeinfer.common.errors import InvalidArgument

_ASKED = (
    "Query: {query}\n\nPassages:\n{documents}\n\nWhich passage answers the query best? Answer with its letter in "
    "brackets, such as [A]."
)
_END = "\nThe best passage is ["


def ranking_prompt(query: str, documents: Sequence[str], template: str | None) -> tuple[str, str]:
    """What the model is asked, and how its answer begins, up to the letter.

    template: of both together, with {query} and {documents} in it; None is ours. Raises InvalidArgument.
    """
    if isinstance(documents, (str, bytes)) or not 1 <= len(documents) <= len(ascii_uppercase):
        raise InvalidArgument(f"documents must be 1 to {len(ascii_uppercase)} texts: found {shown(documents)}")
    asked, end = (_ASKED, _END) if template is None else (check_text("template", template), "")
    if "{query}" not in asked or "{documents}" not in asked:
        raise InvalidArgument(f"template must have {{query}} and {{documents}} in it: found {shown(asked)}")
    named = zip(ascii_uppercase, documents, strict=False)
    listed = "\n".join(f"[{name}] {check_text('a document', document)}" for name, document in named)
    parts = {"{query}": check_text("query", query), "{documents}": listed}
    return re.sub(r"\{query\}|\{documents\}", lambda found: parts[found[0]], asked), end
