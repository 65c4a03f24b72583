"""The library llguidance, which reads grammars and computes masks; no other file imports it."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from edgeinfer.common.errors import BackendUnavailable, InvalidConstraint

Form: TypeAlias = Literal["schema", "regex", "lark", "gbnf"]
"""How a grammar is written; a schema is JSON text."""

# Between the tokens of JSON: small models that may write any number of spaces write them until max_tokens.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,8}"
# As JSON Schema says: what it does not know is refused, and oneOf stays oneOf.
JSON_OPTIONS = {
    "whitespace_pattern": _WHITE_SPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
STACK_BYTES = 8 << 20  # of a thread that reads grammars: thousands of properties take megabytes
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)  # in GBNF
_LONGEST = 300  # characters of a message
_LEXER_STATES = 50_000  # of a grammar, 1 to 2 kB each; the other limits of the library bound a mask to some 20 ms


@functools.cache
def open_library() -> Any:
    """The module llguidance. Raises BackendUnavailable if it is missing or cannot be loaded."""
    try:
        return importlib.import_module("llguidance")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(
            f"schemas, regular expressions and grammars need the package llguidance ({error}): "
            "pip install 'edgeinfer[grammar]'"
        ) from error


def grammar_of(form: Form, source: str) -> str:
    """A grammar as llguidance reads it. Raises InvalidConstraint."""
    matcher = open_library().LLMatcher
    try:
        if form == "schema":
            return str(matcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS))
        if form == "regex":
            return str(matcher.grammar_from_regex(source))
        return str(matcher.grammar_from_lark(_lark_of(source) if form == "gbnf" else source))
    except (ValueError, RecursionError) as error:
        raise InvalidConstraint(one_line(error)) from None


def _lark_of(source: str) -> str:
    """Lark of GBNF; in it words are as long as they can be, which is not so in GBNF. Raises InvalidConstraint."""
    converter = importlib.import_module("llguidance.gbnf_to_lark")
    try:
        return str(converter.gbnf_to_lark(_ESCAPE.sub(_plain_escape, source)))
    except Exception as error:  # it raises Exception itself
        raise InvalidConstraint(one_line(error)) from None


def _plain_escape(escape: re.Match[str]) -> str:
    r"""\u0041 and \U0001F600 as the converter reads them right: \xHH, or the character itself."""
    if escape[1][0] not in "uU" or len(escape[1]) == 1:
        return escape[0]
    code = int(escape[1][1:], 16)
    return f"\\x{code:02x}" if code < 128 else chr(code)


def problem_of(grammar: str) -> str:
    """What is wrong with a grammar, for any vocabulary; "" for nothing."""
    is_wrong, found = open_library().LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    return one_line(found[0]) if is_wrong else ""


def open_vocabulary(
    tokens: Sequence[bytes], special_ids: Sequence[int], end_ids: Sequence[int], encode: Callable[[str], list[int]]
) -> Any:
    """The LLTokenizer of a vocabulary.

    tokens: bytes of each token; of special tokens, which no text makes, the name.  end_ids: tokens that end a text.
    encode: ids of a text in the middle of another one.
    """
    library = open_library()
    special = set(special_ids)
    marked = [b"\xff" + token if id in special else token for id, token in enumerate(tokens)]
    source = _Wrapped(marked, sorted(special), end_ids[0], encode)
    wrapped = library.TokenizerWrapper(source)
    vocabulary = library.LLTokenizer(wrapped, eos_token=list(end_ids))
    source.tokens = wrapped.tokens = []  # it has copied them, and asks for nothing but ids from now on
    return vocabulary


class _Wrapped:
    """A vocabulary in the form that TokenizerWrapper takes."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_ids: list[int], end_id: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id, self._encode = tokens, special_ids, end_id, encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


def open_matcher(vocabulary: Any, grammar: str) -> Any:
    """An LLMatcher. It raises nothing: it is to be asked for its error after each call."""
    return open_library().LLMatcher(vocabulary, grammar, log_level=0, limits=_limits())


def _limits() -> Any:
    return open_library().LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)


def one_line(message: object) -> str:
    """A message of the library in one line, its cause alone where it repeats a whole expression."""
    text = " ".join(str(message).replace("<non-verbose/>", "").split())
    cause = re.search(r".*\berror: (.*?)(?: \d+ \| |$)", text)
    text = cause[1] if cause else text
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
