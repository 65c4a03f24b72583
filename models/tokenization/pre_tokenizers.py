"""Pre-tokenisers: the words into which a text is cut before merging.

Regular expressions in Oniguruma's syntax; each cuts what the one before it left into its matches and the text between
them. They say what llama.cpp does, which is not always what the expression in its source says: its tables know no
case beyond ASCII, and some of its splitters are written by hand. Code points are hexadecimal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import tokenizers
from tokenizers import pre_tokenizers

from edgeinfer.common.errors import TokenizerError
from edgeinfer.common.signal_handlers import is_from_handler

# Characters added by Unicode 16. Oniguruma knows them; in llama.cpp's tables (15.1) they are neither letter nor digit.
UNICODE_16 = (
    "897 1B4E-1B4F 1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D65 10D69-10D85 "
    "10D8E-10D8F 10EC2-10EC4 10EFC 11380-11389 1138B 1138E 11390-113B5 113B7-113C0 113C2 113C5 113C7-113CA "
    "113CC-113D5 113D7-113D8 113E1-113E2 116D0-116E3 11BC0-11BE1 11BF0-11BF9 11F5A 13460-143FA 16100-16139 "
    "16D40-16D79 18CFF 1CC00-1CCF9 1CD00-1CEB3 1E5D0-1E5FA 1E5FF 1F8B2-1F8BB 1F8C0-1F8C1 1FA89 1FA8F 1FABE 1FAC6 "
    "1FADC 1FADF 1FAE9 1FBCB-1FBEF"
)
_DEEPSEEK_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_ASIAN_SCRIPTS = (
    "4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F "
    "AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_HAN = "4E00-9FFF 3400-4DBF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B820-2CEAF 2CEB0-2EBEF F900-FAFF 2F800-2FA1F"


def _chars(code_points: str) -> str:
    """Inside of a character class: "41-5A B5" becomes \\x{41}-\\x{5A}\\x{B5}."""
    return re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", code_points).replace(" ", "")


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


def _cased(letters: str) -> tuple[str, str]:
    """Words whose upper case comes before their lower case; only ASCII letters have a case.

    upper* lower+ and upper+ lower*, the former without trying each end of its upper case.
    """
    upper, lower, both = rf"[{letters}&&[^a-z]]", rf"[{letters}&&[^A-Z]]", rf"[{letters}&&[^A-Za-z]]"
    to_both = rf"(?:[A-Z]*+{both}++)"
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}(?:{to_both}*+[A-Z]*+[a-z]{lower}*+|{to_both}++)", rf"{start}{upper}+{lower}*"


_NEWER = _chars(UNICODE_16)
_SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_OR_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACE = r"\s+(?!\S)|\s+"
LINE_ENDS = r"(?:[^\S\r\n]*+[\r\n]++)++"  # \s*[\r\n]+, and \s*[\r\n] too, without trying each end of \s*
_LINES_SPACE = LINE_ENDS + "|" + _SPACE
_GPT2 = _any(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+", _SPACE)
_QWEN2 = _any(_SHORT, _WORD, r"\p{N}", _SYMBOLS, _LINES_SPACE)
_O200K = _any(*(rf"{word}(?:{_SHORT})?" for word in _cased(r"\p{L}")))
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3 = _any(_ASCII_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+")
_DEEPSEEK_CJK = rf"[{_chars('4E00-9FA5 800-4E00 AC00-D7FF')}&&[^\s]]+"
_CJK = rf"[{_chars('4E00-9FA5 3040-309F 30A0-30FF')}]+"
LINES = r"[^\n]+|\n+"
# Digits in threes counted from the right; what stands before the first of them stays with it.
_THREES = r"(?<=\p{N})\p{N}{3}|(?<![^\p{N}])[^\p{N}]*+\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N}))"
_SENTENCE = rf" ?[^(\s|.,!?{_chars('2026 3002 FF0C 3001 964 6D4 60C')})]+"

_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "starcoder": (r"\p{N}", _GPT2),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "llama-bpe": (_any(_SHORT, _WORD, r"\p{N}{1,3}", _SYMBOLS, _LINES_SPACE),),
    "minicpm5": (r"\p{N}{1,3}", _any(_SHORT, _WORD, r"\p{N}+", _SYMBOLS, _LINES_SPACE)),
    "jais-2": (
        _any(
            *(_SHORT, _WORD, r"\p{N}{1,3}", _SYMBOLS, r"(?<![^\S\r\n])" + LINE_ENDS),  # behind a space there are none
            *(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")),
            r"\s",
        ),
    ),
    "qwen2": (_QWEN2,),
    "qwen35": (_any(_SHORT, _MARKED_WORD, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES_SPACE),),
    "laguna": (LINES, _QWEN2),
    "ufakzeka": (_any(_WORD, r"\p{N}", _SYMBOLS, _LINES_SPACE),),
    "seed-coder": (_any(_SHORT, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES_SPACE),),
    "bailingmoe": (_any(r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])", _WORD, r"\p{N}", _SYMBOLS, LINE_ENDS, _SPACE),),
    "exaone-moe": (
        _any(
            *(_SHORT, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}"),
            *(r" ?[^\s\p{L}\p{N}]+[\r\n/]?", LINE_ENDS, _SPACE),
        ),
    ),
    "gpt-4o": (_any(_O200K, r"\p{N}{1,3}", _SYMBOLS_OR_PATH, _LINES_SPACE),),
    "granite-embed-multi-97m": (
        _any(
            *(rf"{word}(?:{_SHORT})?" for word in _cased(r"[\p{L}\p{M}]")),
            *(r"\p{N}{1,3}", _SYMBOLS_OR_PATH, _LINES_SPACE),
        ),
    ),
    "tekken": (_any(*_cased(r"\p{L}"), r"\p{N}", _SYMBOLS_OR_PATH, _LINES_SPACE),),
    "tiny_aya": (_THREES, _any(rf"{_MARKED_WORD}(?:{_SHORT})?", r"\p{N}{1,3}", _SYMBOLS_OR_PATH, _LINES_SPACE)),
    "youtu": (
        _any(
            rf"[{_chars('AC00-D7A3 3131-318E')}]+",
            rf"[{_chars('FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F')}]+",
            rf"[{_chars('3105-312F')}]+",
            _CJK,
        ),
        _any(rf"{_MARKED_WORD}(?:{_SHORT})?", r"\p{N}", _SYMBOLS_OR_PATH, _LINES_SPACE),
    ),
    "kimi-k2": (
        _any(
            *(rf"[{_chars(_HAN)}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_chars(_HAN)}]]+(?:{_SHORT})?"),
            *(r"\p{N}{1,3}", _SYMBOLS, _LINES_SPACE),
        ),
    ),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_chars(_DEEPSEEK_LETTERS)}]+",
        rf"\s?[{_chars('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001-3002')}]+",
        r"(?<!\s)\s++\z",
        _DEEPSEEK_CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", _CJK, _any(_DEEPSEEK3, r" ?[\p{P}\p{S}]+[\r\n]*", _LINES_SPACE)),
    "spark2_5": (r"\p{N}{1,3}", _CJK, _any(_DEEPSEEK3, r" ?[\p{P}\p{S}]+|[\r\n]", _SPACE), r"\p{N}"),
    "afmoe": (_THREES, rf"[{_chars(_ASIAN_SCRIPTS)}]+", _any(_DEEPSEEK3, r" ?[\p{P}\p{S}]+[\r\n]*", _LINES_SPACE)),
    "poro-chat": (_SENTENCE,),
    "viking": (_SENTENCE, r"\p{N}"),
    "chameleon": (
        *("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  "),
        *(r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
    ),
    "gemma4": (LINES,),
}
_ALIASES = {
    "gpt-2": (
        "phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais trillion granite-docling exaone4"
    ),
    "starcoder": "refact command-r smollm codeshell exaone minerva-7b mellum2",
    "llama-bpe": (
        "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4 glm5"
    ),
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan grok-2 solar-open",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "tiny_aya": "cohere2moe",
    "bailingmoe": "bailingmoe2 llada-moe",
    "deepseek-v3": "hunyuan-dense hy_v4 joyai-llm",
    "poro-chat": "bloom gpt3-finnish",
    "gemma4": "granite-embed-multi-311m sarvam-moe",
}
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = _PATTERNS | {
    alias: _PATTERNS[name] for name, aliases in _ALIASES.items() for alias in aliases.split()
}
_LLAMA3 = frozenset("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano".split())
# A word that is a token is not merged from its bytes.
_KEEPS_TOKENS = _LLAMA3 | {"minicpm5", "glm4", "glm5", "tekken", "youtu", "granite-embed-multi-97m"}
ADD_BOS = _LLAMA3 | {"tekken", "chameleon"}  # where the file says nothing
GEMMA4 = frozenset(["gemma4", "granite-embed-multi-311m"])
SPACE_MARKED = GEMMA4 | {"sarvam-moe"}  # "▁" for a space and byte tokens, no byte alphabet


def splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    """One expression as a pre-tokeniser of the library."""
    return pre_tokenizers.Split(tokenizers.Regex(_pinned(pattern)), "isolated")


def expressions(pre: str) -> list[str]:
    """The expressions of a pre-tokeniser, with the categories of characters that llama.cpp's tables have."""
    return [_pinned(pattern) for pattern in PRE_TOKENIZERS[pre]]


def _pinned(pattern: str) -> str:
    return re.sub(r"\\p\{\w\}", lambda category: f"[{category[0]}&&[^{_NEWER}]]", pattern)


@cache  # made for the first text: compiling its expressions takes a millisecond
def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([splitter(pattern) for pattern in PRE_TOKENIZERS[pre]])


_AT_ONCE = 1 << 16  # characters, and those behind them up to the next place where a pre-tokeniser cuts anyway
_LINE_BREAK, _WORD_BREAK = re.compile("(?<=[A-Za-z])(?=\n)"), re.compile("(?<=[A-Za-z])(?= [A-Za-z]|\n)")


def cut(pre: str, text: str) -> Iterator[str]:
    """The words into which a pre-tokeniser cuts a text. Raises TokenizerError where the library gives up."""
    # Piece by piece, for the library takes some hundred bytes a word.
    joins_words = pre == "exaone-moe" or PRE_TOKENIZERS[pre] == (LINES,)
    place, start = _LINE_BREAK if joins_words else _WORD_BREAK, 0
    while start < len(text):
        found = place.search(text, start + _AT_ONCE)
        end = len(text) if found is None else found.start()
        try:
            words = _pre_tokenizer(pre).pre_tokenize_str(text[start:end])
        except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
            raise
        except BaseException as error:  # a panic of Rust's is no Exception
            if is_from_handler(error):
                raise
            raise TokenizerError(f"the text is too much for the pre-tokeniser {pre!r}: {error!s:.200}") from None
        yield from (word for word, _ in words)
        start = end


def keeps_tokens(pre: str) -> bool:
    """Whether a vocabulary with this pre-tokeniser takes a word that is a token as it is, whatever its merges."""
    return pre in _KEEPS_TOKENS
