"""ToolRAG: of many tools those that fit a message, so that the prompt has only these (TinyAgent, Erdogan et al.,
arXiv:2409.00608). Tools are ranked by BM25 (Robertson et al., 1994) over names, descriptions and parameters, or by the
cosine of embeddings that a caller computes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from edgeinfer.common.arguments import check_callback, check_integer, shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.tools.options import Given, Tool, tool_of

Embed: TypeAlias = Callable[[Sequence[str]], Sequence[Sequence[float]]]
"""Texts to vectors, one each, of one length."""

FEW = 12  # tools that are all given to the model
_K1, _B = 1.2, 0.75  # of BM25, the usual ones
_NAME_WEIGHT = 3  # a word of a name counts as so many of a description
_WORD = re.compile(r"[a-z]+|[0-9]+|[^\W\d_a-z]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NO_SENSE = frozenset(
    "a an and are as at be by can do for from get has have how i if in into is it its me my need of on or please that "
    "the this to want was what when where which will with would you your".split()
)
_ENDINGS = ("ations", "ation", "ings", "ing", "edly", "ies", "ed", "es", "s", "e")


@dataclass(frozen=True)
class ToolSelection:
    """How tools are chosen for a message.

    most: how many are given to the model; where there are no more, all are.  embed: makes vectors of texts, None ranks
    by words.
    """

    most: int = FEW
    embed: Embed | None = None

    def __post_init__(self) -> None:
        check_integer("most", self.most, 1)
        check_callback("embed", self.embed)


def select_tools(
    message: str, tools: Sequence[Given], most: int = FEW, *, embed: Embed | None = None
) -> list[tuple[int, float]]:
    """The tools that fit a message best: (index, score), the best first, at most `most`.

    embed: see ToolSelection. Raises InvalidArgument for what is no tool, and for vectors that do not fit.
    """
    check_integer("most", most, 1)
    check_callback("embed", embed)
    declared = [tool_of(tool) for tool in tools]
    scores = _bm25(message, declared) if embed is None else _similarities(message, declared, embed)
    return sorted(enumerate(scores), key=lambda pair: (-pair[1], pair[0]))[:most]


def selected(
    message: str, tools: Sequence[Tool], selection: ToolSelection, always: Collection[str | None] = ()
) -> tuple[Tool, ...]:
    """The tools for a message, in the order in which they were given.  always: names of those that stay."""
    if len(tools) <= selection.most:
        return tuple(tools)
    ranked = [index for index, _ in select_tools(message, tools, len(tools), embed=selection.embed)]
    ranked.sort(key=lambda index: tools[index].name not in always)  # stable: the others stay in their order
    chosen = set(ranked[: selection.most])
    return tuple(tool for index, tool in enumerate(tools) if index in chosen)


def selection_of(given: object) -> ToolSelection | None:
    """How to choose by what a caller says: True or None, a number, a function that embeds, or a ToolSelection; None for
    no choice. Raises InvalidArgument.
    """
    if isinstance(given, ToolSelection):
        return given
    if given is None or given is True:
        return ToolSelection()
    if given is False:
        return None
    if callable(given):
        return ToolSelection(embed=given)
    if isinstance(given, int):
        return ToolSelection(most=check_integer("tool_selection", given, 1))
    raise InvalidArgument(
        f"tool_selection must be True, False, a number of tools, a function that embeds texts, or a ToolSelection: "
        f"found {shown(given)}"
    )


# ---- BM25 ------------------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """The words of a text without their endings: of names in any spelling, getWeather as get_weather."""
    parts = _WORD.findall(_CAMEL.sub(" ", text).lower())
    return [_stem(part) for part in parts if part not in _NO_SENSE]


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: len(word) - len(ending)]
    return word


def _bm25(message: str, tools: Sequence[Tool]) -> list[float]:
    documents = [Counter(_words_of_tool(tool)) for tool in tools]
    n_holding = Counter(word for document in documents for word in document)
    lengths = [sum(document.values()) for document in documents]
    mean = sum(lengths) / len(lengths) if lengths and sum(lengths) else 1.0
    asked = Counter(words_of(message))
    return [
        sum(
            n * _weight(n_holding[word], len(tools)) * _saturated(document[word], length / mean)
            for word, n in asked.items()
            if word in document
        )
        for document, length in zip(documents, lengths, strict=True)
    ]


def _weight(n_holding: int, n_tools: int) -> float:
    return math.log(1 + (n_tools - n_holding + 0.5) / (n_holding + 0.5))


def _saturated(count: int, relative_length: float) -> float:
    return count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * relative_length))


def _words_of_tool(tool: Tool) -> Iterator[str]:
    yield from words_of(tool.name) * _NAME_WEIGHT
    yield from words_of(tool.description)
    yield from _words_of_schema(tool.parameters, 0)


def _words_of_schema(schema: Any, depth: int) -> Iterator[str]:
    """The names and descriptions of parameters, and the values of which one may be."""
    if not isinstance(schema, Mapping) or depth > 8:
        return
    if isinstance(schema.get("description"), str):
        yield from words_of(schema["description"])
    for value in schema.get("enum", ()) if isinstance(schema.get("enum"), list) else ():
        yield from words_of(value) if isinstance(value, str) else ()
    properties = schema.get("properties")
    for name, part in properties.items() if isinstance(properties, Mapping) else ():
        yield from words_of(name)
        yield from _words_of_schema(part, depth + 1)
    yield from _words_of_schema(schema.get("items"), depth + 1)


# ---- Embeddings ------------------------------------------------------------------------------------------------------


def _similarities(message: str, tools: Sequence[Tool], embed: Embed) -> list[float]:
    texts = [message, *(_text_of_tool(tool) for tool in tools)]
    try:
        vectors = np.asarray(embed(texts), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"embed must give a vector for each text, all of one length: {error}") from None
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise InvalidArgument(
            f"embed must give {len(texts)} finite vectors of one length: found the shape {vectors.shape}"
        )
    lengths = np.linalg.norm(vectors, axis=1)
    products = vectors[1:] @ vectors[0]
    return list(map(float, products / np.maximum(lengths[1:] * lengths[0], 1e-30)))


def _text_of_tool(tool: Tool) -> str:
    properties = tool.parameters.get("properties")
    names = ", ".join(properties) if isinstance(properties, Mapping) else ""
    return f"{tool.name}: {tool.description} ({names})"
