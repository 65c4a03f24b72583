"""Text to token ids and back, with the vocabulary of a GGUF file.

The ids equal llama.cpp's for every text (tests/benchmarks/compare_tokenizers.py counts differences). Special tokens are
cut out of the text; the `tokenizers` library cuts the rest into words by the file's pre-tokeniser; each word is merged
into tokens here. That library's BPE is not used for this: it takes 126 ms and 40 MB to construct for a vocabulary of
152,000 tokens (llama.cpp loads the whole file in 177 ms), and is no faster than merging each word once. For
SentencePiece, merges would have to be derived from the scores first (140 ms for 32,000 tokens), and could not express
the rule for equal scores: the leftmost pair.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from operator import add
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from edgeinfer.errors import TokenizerError, UnsupportedModel, warn
from edgeinfer.models._strings import Merger, StringIndex, StringTable, make_tokens_in_order
from edgeinfer.models.arrays import Strings
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.provenance import is_trusted, plain, recased

# ---- Pre-tokenisers -------------------------------------------------------------------------------------------------
# Regular expressions in Oniguruma's syntax; each cuts what the one before it left into its matches and the text between
# them. They say what llama.cpp does, which is not always what the expression in its source says: its tables know no
# case beyond ASCII, and some of its splitters are written by hand. Code points are hexadecimal.

# Characters added by Unicode 16. Oniguruma knows them; in llama.cpp's tables (15.1) they are neither letter nor digit.
_UNICODE_16 = (
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


_NEWER = _chars(_UNICODE_16)
_SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_OR_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACE = r"\s+(?!\S)|\s+"
_LINE_ENDS = r"(?:[^\S\r\n]*+[\r\n]++)++"  # \s*[\r\n]+, and \s*[\r\n] too, without trying each end of \s*
_LINES_SPACE = _LINE_ENDS + "|" + _SPACE
_GPT2 = _any(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+", _SPACE)
_QWEN2 = _any(_SHORT, _WORD, r"\p{N}", _SYMBOLS, _LINES_SPACE)
_O200K = _any(*(rf"{word}(?:{_SHORT})?" for word in _cased(r"\p{L}")))
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3 = _any(_ASCII_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+")
_DEEPSEEK_CJK = rf"[{_chars('4E00-9FA5 800-4E00 AC00-D7FF')}&&[^\s]]+"
_CJK = rf"[{_chars('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_LINES = r"[^\n]+|\n+"
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
            *(_SHORT, _WORD, r"\p{N}{1,3}", _SYMBOLS, r"(?<![^\S\r\n])" + _LINE_ENDS),  # behind a space there are none
            *(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")),
            r"\s",
        ),
    ),
    "qwen2": (_QWEN2,),
    "qwen35": (_any(_SHORT, _MARKED_WORD, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES_SPACE),),
    "laguna": (_LINES, _QWEN2),
    "ufakzeka": (_any(_WORD, r"\p{N}", _SYMBOLS, _LINES_SPACE),),
    "seed-coder": (_any(_SHORT, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES_SPACE),),
    "bailingmoe": (_any(r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])", _WORD, r"\p{N}", _SYMBOLS, _LINE_ENDS, _SPACE),),
    "exaone-moe": (
        _any(
            *(_SHORT, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}"),
            *(r" ?[^\s\p{L}\p{N}]+[\r\n/]?", _LINE_ENDS, _SPACE),
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
    "gemma4": (_LINES,),
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
_ADD_BOS = _LLAMA3 | {"tekken", "chameleon"}  # where the file says nothing
_GEMMA4 = frozenset(["gemma4", "granite-embed-multi-311m"])
_SPACE_MARKED = _GEMMA4 | {"sarvam-moe"}  # "▁" for a space and byte tokens, no byte alphabet


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    pinned = re.sub(r"\\p\{\w\}", lambda category: f"[{category[0]}&&[^{_NEWER}]]", pattern)
    return pre_tokenizers.Split(tokenizers.Regex(pinned), "isolated")


@cache  # made for the first text: compiling its expressions takes a millisecond
def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([_split(pattern) for pattern in PRE_TOKENIZERS[pre]])


_AT_ONCE = 1 << 16  # characters, and those behind them up to the next place where a pre-tokeniser cuts anyway
_LINE_BREAK, _WORD_BREAK = re.compile("(?<=[A-Za-z])(?=\n)"), re.compile("(?<=[A-Za-z])(?= [A-Za-z]|\n)")


def cut(pre: str, text: str) -> Iterator[str]:
    """The words into which a pre-tokeniser cuts a text. Raises TokenizerError where the library gives up."""
    # Piece by piece, for the library takes some hundred bytes a word.
    joins_words = pre == "exaone-moe" or PRE_TOKENIZERS[pre] == (_LINES,)
    place, start = _LINE_BREAK if joins_words else _WORD_BREAK, 0
    while start < len(text):
        found = place.search(text, start + _AT_ONCE)
        end = len(text) if found is None else found.start()
        try:
            words = _pre_tokenizer(pre).pre_tokenize_str(text[start:end])
        except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
            raise
        except BaseException as error:  # a panic of Rust's is no Exception
            raise TokenizerError(f"the text is too much for the pre-tokeniser {pre!r}: {error!s:.200}") from None
        yield from (word for word, _ in words)
        start = end


def keeps_tokens(pre: str) -> bool:
    """Whether a vocabulary with this pre-tokeniser takes a word that is a token as it is, whatever its merges."""
    return pre in _KEEPS_TOKENS


# ---- The vocabulary -------------------------------------------------------------------------------------------------

_UNKNOWN, _UNUSED, _NORMAL, _CONTROL, _USER_DEFINED, _BYTE = (1 << bit for bit in range(6))
# By token_type; there is none below 1 or above 6.
_OF_TYPE = np.array([0, _NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE, 0], np.uint8)

# Texts that mean the end of a turn, and those of fill-in-the-middle tokens by their metadata keys.
_END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~["
).split()
# Keys of tokens that have a role; no user writes one.
_NAMED_KEYS = (
    "bos unknown seperator separator padding mask cls fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep prefix suffix "
    "middle"
).split()
_FILL_TEXTS = {
    ("fim_pre", "prefix"): (
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>"
    ),
    ("fim_suf", "suffix"): (
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>"
    ),
    ("fim_mid", "middle"): (
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>"
    ),
    ("fim_pad",): "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    ("fim_rep",): "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    ("fim_sep",): "<|file_sep|>",
}
_ENDING_FILLS = frozenset(["fim_pad", "fim_rep", "fim_sep"])
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss: parsed and shown always
# What parts of a conversation begin and end with, whatever type a file gives it: <|im_start|>, <turn|>, [/INST],
# <start_of_turn>, <SPECIAL_10>.
_TURN_MARK = re.compile(
    r"<\|.+>|<.+\|>|\[\|.+\|\]|<\uff5c.+\uff5c>|\[/?[A-Z][A-Z0-9_]*\]|</?[a-z]+_of_[a-z]+>|<[A-Z]+_[A-Z0-9_]+>"
    r"|[<\[]/?(?:assistant|system|user|model|human|gpt|bot)[>\]]",
    re.DOTALL,
)
_WORD_AND_SIGN = re.compile(r"(?=.*[^\W\d_])(?=.*[^\w\s])", re.DOTALL)  # no white space, digits, emoji or lone word
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Metadata:
    """The tokenizer's keys of a file, each checked for its type."""

    def __init__(self, file: ModelFile) -> None:
        self.values = file.metadata
        self.path = file.path

    def error(self, key: str, wanted: str, found: object) -> TokenizerError:
        return TokenizerError(f"{self.path}: tokenizer.ggml.{key} must be {wanted}: found {found!r:.80}")

    def warn(self, message: str) -> None:
        warn(f"{self.path}: {message}")

    def get(self, key: str) -> Any:
        return self.values.get(f"tokenizer.ggml.{key}")

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "a bool", value)
        return value

    def token_id(self, key: str, n_vocab: int, default: int | None = None) -> int | None:
        """The id under this key; the default where it is absent, outside of the vocabulary (with a warning), or, as
        some converters write where there is none, -1."""
        value = self.get(f"{key}_token_id")
        if value is None:
            return default if default is None or default < n_vocab else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key}_token_id", "an integer", value)
        if value in (-1, 2**32 - 1):
            return default
        if not 0 <= value < n_vocab:
            self.warn(f"tokenizer.ggml.{key}_token_id is {value}, and there are {n_vocab} tokens: it is ignored")
            return default if default is None or default < n_vocab else None
        return value

    def chat_template(self) -> str | None:
        """The template of the file, the one called "default" where each has a name."""
        for key in ("tokenizer.chat_template", "tokenizer.chat_template.default"):
            value = self.values.get(key)
            if isinstance(value, str):
                return value
            if value is not None:
                self.warn(f"{key} must be a string: found {value!r:.80}: it is ignored")
        return None

    def strings(self, key: str) -> Strings:
        value = self.get(key)
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            value = Strings(value)
        if not isinstance(value, Strings) or not value:
            raise self.error(key, "an array of strings", value)
        return value

    def numbers(self, key: str, kinds: str, n_vocab: int) -> NDArray[Any] | None:
        """The first n_vocab of an array of numbers whose dtype is of one of these kinds; None without the key."""
        value = self.get(key)
        if value is None:
            return None
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError):  # ragged, or an integer of more than 64 bits
            array = np.empty(0, object)
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise self.error(key, "an array of numbers", value)
        if len(array) < n_vocab:
            raise self.error(key, f"as long as the vocabulary, {n_vocab}", len(array))
        return array[:n_vocab]


@dataclass(frozen=True)
class _Special:
    """A token that is looked for in the text itself; strips_*: it swallows the white space on that side."""

    text: str
    id: int
    only_if_parsed: bool
    strips_left: bool
    strips_right: bool


class _Vocabulary:
    """Texts and attributes of the tokens, and the roles that some of them have."""

    def __init__(self, metadata: _Metadata) -> None:
        self.metadata = metadata
        self.tokens = metadata.strings("tokens")
        n_vocab = len(self.tokens)
        self.ids = StringIndex(self.tokens.table)
        if "" in self.ids:
            self.tokens = Strings([text or f"[EMPTY_{id}]" for id, text in enumerate(self.tokens)])
            self.ids = StringIndex(self.tokens.table)
        if self.ids.repeated is not None:
            raise metadata.error("tokens", "different texts", f"{self.tokens[self.ids.repeated]} twice")
        types = metadata.numbers("token_type", "iu", n_vocab)
        if types is None:
            self.attributes = np.full(n_vocab, _NORMAL, np.uint8)
        else:
            self.attributes = _OF_TYPE[np.clip(types, 0, len(_OF_TYPE) - 1)]
        for id in np.flatnonzero(self.attributes & _BYTE).tolist():
            if not _BYTE_TOKEN.fullmatch(self.tokens[id]):
                raise metadata.error("tokens", f"<0x00> to <0xFF> for the byte token {id}", self.tokens[id])

    def find_stop_ids(self, eos_id: int | None) -> frozenset[int]:
        """The tokens that end a generation; marks them and some others as control tokens by their text.

        After llama.cpp: files often give these tokens another type and do not name them in the metadata.
        """
        n_vocab = len(self.tokens)
        stops = {eos_id, *(self.metadata.token_id(key, n_vocab) for key in ("eot", "eom"))}
        for keys, texts in _FILL_TEXTS.items():
            named = [id for id in (self.metadata.token_id(key, n_vocab) for key in keys) if id is not None]
            found = [self.ids[text] for text in texts.split() if text in self.ids]
            if not named:
                self._mark(found[:1])
            if keys[0] in _ENDING_FILLS:
                stops.update(named[-1:] or found[:1])
        ends = [self.ids[text] for text in _END_TEXTS if text in self.ids]
        self._mark(ends)
        stops.update(ends)
        for text in _SHOWN_TEXTS:
            if text in self.ids:
                self.attributes[self.ids[text]] = _USER_DEFINED
        present = {self.tokens[id] for id in stops if id is not None}
        calls = "<|call|>" in present or "<|calls|>" in present
        if "<|end|>" in present and calls and ("<|return|>" in present or "<|flush|>" in present):
            self._unstop("<|end|>", _USER_DEFINED, stops)  # o200k_harmony, solar-open: a part of the answer ends
        if "</s>" in present and ("<|tool_response>" in present or "<|plamo:eos|>" in present):
            self._unstop("</s>", _NORMAL, stops)  # gemma4: a tag of HTML
        return frozenset(id for id in stops if id is not None)

    def _mark(self, ids: list[int]) -> None:
        for id in ids:
            self.attributes[id] |= _CONTROL

    def _unstop(self, text: str, attribute: int, stops: set[int | None]) -> None:
        stops.discard(self.ids[text])
        self.attributes[self.ids[text]] = attribute

    def specials(self) -> list[_Special]:
        """Tokens to look for in a text, longest first."""
        ids = np.flatnonzero(self.attributes & (_CONTROL | _USER_DEFINED | _UNKNOWN)).tolist()
        left, right = self._stripping(set(ids))
        found = [
            _Special(self.tokens[id], id, bool(self.attributes[id] & (_CONTROL | _UNKNOWN)), id in left, id in right)
            for id in ids
        ]
        return sorted(found, key=lambda special: -len(_bytes_of(special.text)))

    def controls(self) -> list[int]:
        """Tokens that stand for no text of their own."""
        ids: list[int] = np.flatnonzero(self.attributes & (_CONTROL | _UNKNOWN)).tolist()
        return ids

    def hide_controls(self) -> None:
        """Take the control tokens out of `ids`: whatever merges a file has, text alone must not make one."""
        for text in (self.tokens[id] for id in self.controls()):
            if len(text) > 1:  # a single character may be all there is for a byte
                self.ids.hide(text)

    def _stripping(self, specials: set[int]) -> tuple[set[int], set[int]]:
        """Tokens that swallow white space to the left and to the right; GGUF does not say it, so it goes by name."""
        name = str(self.metadata.values.get("general.name", "")).lower()
        pre = self.metadata.text("pre", "")
        if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
            return self._ids_of("<mask>"), set()
        if "phi-3" in name or "phi3" in name:
            return set(), (specials | self._ids_of("</s>")) - self._ids_of("<unk>", "<s>", "<|endoftext|>")
        if "modern-bert" in name:
            return self._ids_of("[MASK]"), set()
        return set(), set()

    def _ids_of(self, *texts: str) -> set[int]:
        return {self.ids[text] for text in texts if text in self.ids}


def _bytes_of(text: str) -> bytes:
    """The bytes of a text of the file, also of one that is no UTF-8."""
    return text.encode(errors="surrogateescape")


# ---- Merging --------------------------------------------------------------------------------------------------------


class _Merger(ABC):
    """Words to ids: the two neighbours with the least cost are merged, the leftmost of equals first, until none can be.

    ids: by text. Each word is merged only once, so this is as fast as a compiled library, without construction.
    """

    _CACHED_WORDS = 1 << 16
    _CACHED_LENGTH = 64

    def __init__(self, ids: StringIndex, merger: Merger) -> None:
        self._ids = ids
        self._merged = merger.merged
        self._cache: dict[str, list[int]] = {}

    def hide(self, text: str) -> None:
        """From now on no text is merged into the token of this text."""
        self._ids.hide(text)
        self._cache.clear()

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        ids: list[int] = []
        for word in self._words(text):
            of_word = self._cache.get(word)
            ids += self._encode_word(word) if of_word is None else of_word
        return ids

    def _encode_word(self, word: str) -> list[int]:
        ids: list[int] = []
        for part in self._parts(word):
            id = self._ids.get(part)
            ids += self._spelled(part) if id is None else [id]
        if len(word) <= self._CACHED_LENGTH:
            if len(self._cache) >= self._CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _parts(self, word: str) -> list[str]:
        return self._merged(word)

    @abstractmethod
    def length(self, text: str) -> int:
        """Of a text, in what the characters of tokens stand for, without what no token has."""

    @abstractmethod
    def is_lossless(self, vocabulary: _Vocabulary) -> bool:
        """Whether surely each part of a text that `length` counts is in one of its tokens."""

    @abstractmethod
    def _words(self, text: str) -> Iterable[str]:
        """What is merged on its own."""

    @abstractmethod
    def _spelled(self, part: str) -> list[int]:
        """Ids of a part that is no token."""

    @abstractmethod
    def piece(self, text: str) -> bytes:
        """What a normal token of this text stands for."""


def _by_rank(vocabulary: _Vocabulary, required: bool) -> Merger:
    """Merging by a file's merges, "left right"; the first of equals counts. Raises TokenizerError.

    As in llama.cpp one that is no such pair has no effect, and one whose text is no token has: see `_spelled`.
    """
    metadata = vocabulary.metadata
    if not required and metadata.get("merges") is None:
        return Merger.by_merges(StringIndex(StringTable.of([])))
    merges = metadata.strings("merges")
    # Most vocabularies list the tokens in the order of the merges that make them: one comparison instead of 150,000,
    # and the id of a token tells the rank of its merge.
    first = vocabulary.ids.get(merges[0].replace(" ", "")) or 0
    if make_tokens_in_order(merges.table, vocabulary.tokens.table, first):
        return Merger.in_order(vocabulary.ids, merges.table, first)
    return Merger.by_merges(StringIndex(merges.table))


def _all_made(vocabulary: _Vocabulary) -> bool:
    """Whether each of a file's merges makes a token that a text may have."""
    merges = vocabulary.metadata.get("merges")
    return merges is None or vocabulary.ids.first_unmade(vocabulary.metadata.strings("merges").table) is None


def _byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_CHAR_OF_BYTE = _byte_alphabet()
_BYTE_OF_CHAR = {char: byte for byte, char in _CHAR_OF_BYTE.items()}


class _ByteLevel(_Merger):
    """Byte pair encoding over bytes that are written as printable characters."""

    def __init__(self, vocabulary: _Vocabulary, pre: str) -> None:
        super().__init__(vocabulary.ids, _by_rank(vocabulary, required=pre != "kimi-k2"))
        self._keeps_tokens = pre in _KEEPS_TOKENS
        self._pre = pre

    def _words(self, text: str) -> Iterable[str]:
        return cut(self._pre, text)

    def _parts(self, word: str) -> list[str]:
        written = word.encode().decode("latin-1").translate(_CHAR_OF_BYTE)
        return [written] if self._keeps_tokens and written in self._ids else self._merged(written)

    def length(self, text: str) -> int:
        lost = bytes(byte for byte, char in _CHAR_OF_BYTE.items() if char not in self._ids)  # those no text has, mostly
        return len(text.encode(errors="replace").translate(None, lost))

    def is_lossless(self, vocabulary: _Vocabulary) -> bool:
        return _all_made(vocabulary)

    def _spelled(self, part: str) -> list[int]:
        # As llama.cpp has it: bytes of the written form, so that all but printable ASCII is lost.
        return [self._ids[char] for char in part if char.isascii() and char in self._ids]

    def piece(self, text: str) -> bytes:
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in text])
        except KeyError:  # plain text, though its type says otherwise
            return _bytes_of(text)


class _SpaceMarked(_Merger):
    """Byte pair encoding over the characters of a line, with "▁" for a space and byte tokens for what is no token."""

    def __init__(self, vocabulary: _Vocabulary, pre: str) -> None:
        super().__init__(vocabulary.ids, _by_rank(vocabulary, required=True))
        self._keeps_line_ends = pre in _GEMMA4  # a run of them is a token that no merges make

    def _words(self, text: str) -> Iterable[str]:
        return re.findall(_LINES, text.replace(" ", "▁"))

    def _parts(self, word: str) -> list[str]:
        keeps = self._keeps_line_ends and word[0] == "\n" and word in self._ids
        return [word] if keeps else self._merged(word)

    def length(self, text: str) -> int:
        return len(text)

    def is_lossless(self, vocabulary: _Vocabulary) -> bool:
        return all(f"<0x{byte:02X}>" in self._ids for byte in range(256))

    def _spelled(self, part: str) -> list[int]:
        names = (f"<0x{byte:02X}>" for byte in part.encode())
        return [self._ids[name] for name in names if name in self._ids]

    def piece(self, text: str) -> bytes:
        return _bytes_of(text.replace("▁", " "))


class _ByScore(_Merger):
    """SentencePiece's merging (Kudo and Richardson, arXiv:1808.06226): neighbours that make the best-scored token."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        metadata, n_vocab = vocabulary.metadata, len(vocabulary.tokens)
        scores = metadata.numbers("scores", "fiu", n_vocab)
        if scores is None:
            metadata.warn("tokenizer.ggml.scores is missing: all tokens count alike, and texts may be cut into others")
            scores = np.zeros(n_vocab)
        if np.isnan(scores).any():
            raise metadata.error("scores", "an array of numbers", f"NaN for token {int(np.isnan(scores).argmax())}")
        with np.errstate(over="ignore"):
            super().__init__(vocabulary.ids, Merger.by_costs(vocabulary.ids, -scores.astype(np.float32)))
        self._bytes = _byte_ids(vocabulary)
        # Where no token has a "▁" after another character, a word can be merged without the word before it.
        text = "\0".join(vocabulary.tokens)
        apart = text.count("\0") == n_vocab - 1 and not re.search("[^▁\0]▁", text)
        self._pattern = re.compile("▁*[^▁]+|▁+" if apart else "(?s:.+)")

    def _words(self, text: str) -> Iterable[str]:
        return self._pattern.findall(text.replace(" ", "▁"))

    def length(self, text: str) -> int:
        return len(text)

    def is_lossless(self, vocabulary: _Vocabulary) -> bool:
        return True

    def _spelled(self, part: str) -> list[int]:
        return [self._bytes[byte] for byte in part.encode()]

    def piece(self, text: str) -> bytes:
        return _bytes_of(text.replace("▁", " "))


def _byte_ids(vocabulary: _Vocabulary) -> list[int]:
    """The token of each byte (256,): <0x41>, else A, else the unknown token. Raises TokenizerError."""
    unknown = vocabulary.metadata.token_id("unknown", len(vocabulary.tokens))
    ids = []
    for byte in range(256):
        names = [f"<0x{byte:02X}>", *([chr(byte)] if byte < 128 else [])]
        id = next((vocabulary.ids[name] for name in names if name in vocabulary.ids), unknown)
        if id is None:
            raise vocabulary.metadata.error("tokens", f"with {names[0]} where there is no unknown_token_id", "none")
        ids.append(id)
    return ids


def _kind(metadata: _Metadata) -> tuple[str, str]:
    """The names of the model and of the pre-tokeniser ("" where the model needs none)."""
    model = metadata.text("model", "none")
    if model == "llama":
        return model, ""
    if model not in ("gpt2", "gemma4"):
        raise UnsupportedModel(
            f"{metadata.path}: tokenizer.ggml.model must be gpt2 (byte-level BPE), llama (SentencePiece) or gemma4: "
            f"found {model!r:.80}"
        )
    pre = "gemma4" if model == "gemma4" else metadata.text("pre", "") or "default"
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{metadata.path}: tokenizer.ggml.pre must be one of {', '.join(sorted(PRE_TOKENIZERS))}: found {pre!r:.80}"
        )
    return model, pre


def _merger(vocabulary: _Vocabulary, model: str, pre: str) -> _Merger:
    if model == "llama":
        return _ByScore(vocabulary)
    return _SpaceMarked(vocabulary, pre) if pre in _SPACE_MARKED else _ByteLevel(vocabulary, pre)


# ---- The tokeniser --------------------------------------------------------------------------------------------------

_SURROGATE = re.compile("[\ud800-\udfff]")
_WHITE = " \t\n\v\f\r"  # what C's isspace knows


class Tokenizer:
    """Text to ids and back, by the vocabulary and rules of one file.

    n_vocab: number of ids.  bos_id, eos_id: begin and end of a text, None if the file has none.  add_bos, add_eos:
    whether `encode` adds them.  stop_ids: all tokens that end generation.  chat_template: Jinja source or None.
    """

    def __init__(self, file: ModelFile) -> None:
        metadata = _Metadata(file)
        model, pre = _kind(metadata)
        if pre == "default" and not metadata.text("pre", ""):
            metadata.warn(
                "tokenizer.ggml.pre is missing: the default pre-tokeniser is used, and texts may be cut into other "
                "tokens than the model was trained with; convert the model again"
            )
        self._vocabulary = vocabulary = _Vocabulary(metadata)
        self.n_vocab = len(vocabulary.tokens)
        # Without the key llama.cpp takes id 11 for both in a BPE vocabulary, Falcon's: any token elsewhere.
        self.bos_id = metadata.token_id("bos", self.n_vocab, 1 if model == "llama" else None)
        self.eos_id = metadata.token_id("eos", self.n_vocab, 2 if model == "llama" else None)
        self.add_bos = self._adds("bos", self.bos_id, metadata, model == "llama" or pre in _ADD_BOS)
        self.add_eos = self._adds("eos", self.eos_id, metadata, False)
        if pre in _GEMMA4 and self.bos_id is not None:
            self.add_bos = True  # whatever the file says: the first ones were converted wrongly
        self.stop_ids = vocabulary.find_stop_ids(self.eos_id)
        self.chat_template = metadata.chat_template()
        self._tokens, self._attributes = vocabulary.tokens, vocabulary.attributes
        self._specials = vocabulary.specials()
        named = [metadata.get(f"{key}_token_id") for key in _NAMED_KEYS]
        self._named_ids = {id for id in named if isinstance(id, int) and not isinstance(id, bool)}
        self._protected: dict[str, frozenset[int]] = {}
        self._merger = _merger(vocabulary, model, pre)
        vocabulary.hide_controls()
        self._adds_space = model == "llama" and metadata.flag("add_space_prefix", True)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, file: ModelFile) -> Tokenizer:
        """The tokeniser of a model file. Raises TokenizerError, UnsupportedModel."""
        return cls(file)

    @staticmethod
    def size_in(file: ModelFile) -> int:
        """Number of ids in a model file whose tokeniser is of a known kind. Raises TokenizerError, UnsupportedModel."""
        metadata = _Metadata(file)
        _kind(metadata)
        return len(metadata.strings("tokens"))

    @staticmethod
    def _adds(name: str, id: int | None, metadata: _Metadata, default: bool) -> bool:
        adds = metadata.flag(f"add_{name}_token", default and id is not None)
        if adds and id is None:
            metadata.warn(f"tokenizer.ggml.add_{name}_token is true, but there is no {name}_token_id: none is added")
        return adds and id is not None

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of all tokens that are looked for in a text, longest first."""
        return tuple(special.text for special in self._specials)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of the tokens of special_texts, in the same order."""
        return tuple(special.id for special in self._specials)

    def token_id(self, text: str) -> int | None:
        """The special token of exactly this text."""
        return next((special.id for special in self._specials if special.text == text), None)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, continues: bool = False
    ) -> list[int]:
        """Ids of a text.

        add_special: adds begin and end tokens as the file says.  parse_special: names of special tokens such as
        <|im_end|> become those tokens; user-defined tokens are found in either case.  continues: the text continues
        another one, and gets no leading space if the vocabulary adds one. A lone surrogate counts as U+FFFD.
        """
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        parts: list[int | str] = [_SURROGATE.sub("\ufffd", text)] if text else []
        for special in _found(self._specials, text):  # a longer one goes first, wherever in the text it stands
            if parse_special or not special.only_if_parsed:
                parts = _replaced(parts, special)
        ids += self._encode_parts(parts, continues)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_rendered(self, text: str, template: str) -> list[int]:
        """Ids of a rendered chat template, without begin and end tokens; template: its source.

        A protected token comes from trusted characters only (edgeinfer.models.provenance); elsewhere its text stays
        text. If no such text is untrusted, these are the ids of encode(text, add_special=False, parse_special=True).
        """
        protected = self.protected(template)
        parts: list[int | str] = [recased(text, partial(_SURROGATE.sub, "\ufffd"))] if text else []
        for special in _found(self._specials, text):
            parts = _replaced(parts, special, trusted_only=special.id in protected)
        return self._encode_parts(parts, continues=False)

    def protected(self, template: str) -> frozenset[int]:
        """The tokens that no user may write in a conversation with this template.

        All control tokens, and of the user-defined ones those that stop a generation, look like the mark of a turn
        ("<|start|>", "[INST]"), or stand in the source of the template ("<think>", and with it "</think>"). Others are
        ordinary text, such as runs of spaces or tags of HTML.
        """
        if template not in self._protected:
            named = _tags_alike(template)
            pairs = _pairs(named)
            marks = [
                special
                for special in self._specials
                if special.only_if_parsed
                or special.id in self.stop_ids
                or special.id in self._named_ids
                and _WORD_AND_SIGN.match(special.text)
                or _TURN_MARK.fullmatch(special.text)
                or (special.text[-2:] in pairs and _WORD_AND_SIGN.match(special.text))
                and _tags_alike(special.text) in named
            ]
            for special in marks:  # nor may merges make them
                if len(special.text) > 1:  # a single character may be all there is for a byte
                    self._merger.hide(special.text)
            self._protected[template] = frozenset(special.id for special in marks)
        return self._protected[template]

    def _encode_parts(self, parts: list[int | str], continues: bool) -> list[int]:
        ids: list[int] = []
        space = " " if self._adds_space and not continues else ""
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._merger.encode(space + plain(part))
            space = " " if self._adds_space else ""
        return ids

    def least_tokens(self, text: str) -> int:
        """A lower bound for the number of tokens of a text, without tokenising it: 0 if nothing is known."""
        if any((special.strips_left or special.strips_right) and special.text in text for special in self._specials):
            text = "".join(text.split())
        return -(-self._merger.length(text) // self._longest) if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """How much of a text, as the merger measures it, a token may stand for; 0 where it may be any amount."""
        if not self._merger.is_lossless(self._vocabulary):
            return 0
        return max([self._tokens.table.longest, *(len(_bytes_of(special.text)) for special in self._specials)])

    def token_bytes(self, id: int) -> bytes:
        """What the token adds to a text; a special token its name, an unused one nothing. Raises TokenizerError."""
        piece = self._pieces.get(id)
        if piece is None:
            if not 0 <= id < self.n_vocab:
                raise TokenizerError(f"token id must be 0 to {self.n_vocab - 1}: found {id}")
            piece = self._pieces[int(id)] = self._piece(id)
        return piece

    def name(self, id: int) -> str:
        """The text of a token by itself, such as "<|im_end|>"."""
        return self.token_bytes(id).decode(errors="replace")

    def _piece(self, id: int) -> bytes:
        text, attribute = self._tokens[id], int(self._attributes[id])
        if attribute & (_CONTROL | _USER_DEFINED | _UNKNOWN):
            return _bytes_of(text)
        if attribute & _BYTE:
            return bytes([int(text[3:5], 16)])
        return self._merger.piece(text) if attribute & _NORMAL else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. See `stream` for the spaces."""
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(id) for id in ids]) + stream.flush()

    def stream(self, *, skip_special: bool = False) -> TokenStream:
        """A decoder that takes one id at a time.

        skip_special: control tokens give nothing. The space that `encode` puts before a text in some vocabularies is
        taken off behind a begin token only: ids without one continue a text, and the space may be part of it.
        """
        return TokenStream(self, skip_special)

    def is_control(self, id: int) -> bool:
        """Whether the token stands for no text of its own."""
        return bool(self._attributes[id] & (_CONTROL | _UNKNOWN))

    def hides_space(self, id: int) -> bool:
        """Whether `encode` put a space between this token and the text behind it that is no part of the text."""
        return self._adds_space and id == self.bos_id


def _tags_alike(text: str) -> str:
    """The text with its closing tags written as the opening ones."""
    return text.replace("</", "<")


def _pairs(text: str) -> set[str]:
    """All pairs of characters that stand side by side in the text."""
    return set(map(add, text, text[1:]))


def _found(specials: list[_Special], text: str) -> list[_Special]:
    """Those whose texts are in the text."""
    if len(specials) < 500:
        return [special for special in specials if special.text in text]
    text = plain(text)
    pairs = _pairs(text)  # Gemma has 6,000 special tokens: to search a long text for each takes a second
    return [
        special for special in specials if special.text[:2] in pairs or len(special.text) == 1 if special.text in text
    ]


def _replaced(parts: list[int | str], special: _Special, trusted_only: bool = False) -> list[int | str]:
    """The parts of a text with the id of a special token for its text; what is left between two ids is one string."""
    return [
        piece for part in parts for piece in ([part] if isinstance(part, int) else _cut(part, special, trusted_only))
    ]


def _cut(text: str, special: _Special, trusted_only: bool) -> list[int | str]:
    parts: list[int | str] = []
    start = end = 0
    while (found := text.find(special.text, end)) >= 0:
        end = found + len(special.text)
        if trusted_only and not is_trusted(text, found, end):
            end = found + 1
            continue
        left = text[start:found]
        if special.strips_left:
            left = left.rstrip(_WHITE)
        parts += [left, special.id] if left else [special.id]
        if special.strips_right:
            end = len(text) - len(text[end:].lstrip(_WHITE))
        start = end
    if start < len(text):
        parts.append(text[start:])
    return parts


class TokenStream:
    """Text of a growing sequence of tokens, never an incomplete character; all parts together are `Tokenizer.decode` of
    it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = False

    def push(self, id: int) -> str:
        """The characters that this token completes. Raises TokenizerError for an id that does not exist."""
        piece = self._tokenizer.token_bytes(id)
        if self._drops_space:
            piece = piece.removeprefix(b" ")
        self._drops_space = self._tokenizer.hides_space(id)
        if self._skip_special and self._tokenizer.is_control(id):
            return ""
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """U+FFFD for a character that was never completed, else nothing; the stream then begins anew."""
        rest = self._utf8.decode(b"", final=True)
        self._drops_space = False
        return rest
