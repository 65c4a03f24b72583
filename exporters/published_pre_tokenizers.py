"""Pre-tokenisers as the makers of models publish them in tokenizer.json.

Phone runtimes know these expressions, some of them by heart, and not what those of models.tokenization are written
with: possessive quantifiers, intersections, code points. Both cut the same words but for characters that llama.cpp's
tables have otherwise: letters of Unicode 16 and, in LOOSE ones, the case of letters beyond ASCII and marks.
"""

from __future__ import annotations

import re
from typing import Any

from edgeinfer.models.tokenization.pre_tokenizers import LINE_ENDS, PRE_TOKENIZERS, expressions

_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_CASED = f"{_START}{_UPPER}*{_LOWER}+", f"{_START}{_UPPER}+{_LOWER}*"
_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""

_PUBLISHED: dict[str, tuple[str, ...]] = {
    "llama-bpe": ("|".join((_SHORT, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACE)),),
    "qwen2": ("|".join((_SHORT, _WORD, r"\p{N}", _SYMBOLS, _SPACE)),),
    "qwen35": (
        "|".join(
            (_SHORT, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACE),
        ),
    ),
    "gpt-4o": ("|".join((*(f"{word}{_SHORT}?" for word in _CASED), r"\p{N}{1,3}", _PATH, _SPACE)),),
    "tekken": ("|".join((*_CASED, r"\p{N}", _PATH, _SPACE)),),
    "deepseek-v3": (
        *(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"),
        "|".join((_ASCII_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", _SPACE)),
    ),
}
LOOSE = {PRE_TOKENIZERS["gpt-4o"], PRE_TOKENIZERS["tekken"]}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_AT_END, _NOT_SPACE = (
    r"(?<!\s)\s++\z",
    r"&&[^\s]",
)  # deepseek's, as llama.cpp reads "\s+$" and a range with spaces in it


def pre_tokenizer_of(pre: str) -> dict[str, Any]:
    """The `pre_tokenizer` of tokenizer.json for a byte-level vocabulary; pre: its name in GGUF."""
    patterns = PRE_TOKENIZERS[pre]
    if patterns == PRE_TOKENIZERS["gpt-2"]:
        return _BYTES | {"use_regex": True}
    if patterns == PRE_TOKENIZERS["starcoder"]:
        return {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES | {"use_regex": True}]}
    published = next((cut for name, cut in _PUBLISHED.items() if PRE_TOKENIZERS[name] == patterns), None)
    cuts = published or _in_plain_terms(patterns) or expressions(pre)
    return {"type": "Sequence", "pretokenizers": [*map(split, cuts), _BYTES | {"use_regex": False}]}


def _in_plain_terms(patterns: tuple[str, ...]) -> list[str] | None:
    """The expressions with what all engines know; None for those that need more."""
    written = [pattern.replace(LINE_ENDS, r"\s*[\r\n]+").replace(_AT_END, r"\s+$") for pattern in patterns]
    written = [pattern.replace(_NOT_SPACE, "") for pattern in written]
    if any(sign in pattern for pattern in written for sign in ("&&", "++", "*+")):
        return None
    return [re.sub(r"\\x\{([0-9A-F]+)\}", _character, pattern) for pattern in written]


def _character(code_point: re.Match[str]) -> str:
    """The character itself, as it stands in a class of characters."""
    char = chr(int(code_point[1], 16))
    return f"\\{char}" if char in "[]\\^-" else char


def split(pattern: str) -> dict[str, Any]:
    """A pre-tokeniser that makes words of an expression's matches and of the text between them."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
