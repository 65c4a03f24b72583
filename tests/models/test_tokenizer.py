"""The tokeniser on small handmade vocabularies, against a plain rule, and against llama.cpp on the default model."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_strings import sample_texts
from tokenizers import pre_tokenizers

from edgeinfer.common.errors import EdgeInferError, TokenizerError, UnsupportedModel
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenization import pre_tokenizers as pre_tokenizers_module
from edgeinfer.models.tokenization.pre_tokenizers import PRE_TOKENIZERS, cut, splitter
from edgeinfer.models.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
ALPHABET = [chr(byte) for byte in PRINTABLE] + [chr(256 + i) for i in range(256 - len(PRINTABLE))]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "a a", "aa a", "1 2", "12 3"]
SPECIALS = {
    "<|endoftext|>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<|im_end|><|im_start|>": CONTROL,
    "<tool>": USER_DEFINED,
    "[PAD7]": UNUSED,
}
PIECES = {"▁": -1.0, "a": -2.0, "b": -2.0, "c": -2.0, "▁a": -3.0, "ab": -4.0, "bc": -4.0, "▁▁": -5.0, "abc": -6.0}
PIECES |= {"▁▁▁▁": -7.0, "aa": -8.0, "aaa": -8.0, "é": -9.0, "▁ab": -10.0}


def file_with(metadata: Mapping[str, Any]) -> ModelFile:
    values = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return cast(ModelFile, SimpleNamespace(path=Path("tiny.gguf"), metadata=values))


def open_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_file(file_with(metadata))


def byte_level(**changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary; a change to None takes a key away."""
    tokens = changes.get("tokens") or [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *SPECIALS]
    metadata = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": [SPECIALS.get(token, NORMAL) for token in tokens],
        "merges": MERGES,
        "bos_token_id": len(ALPHABET) + len(MERGES),
        "eos_token_id": len(ALPHABET) + len(MERGES) + 2,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def by_score(pieces: Mapping[str, float] = PIECES, **changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary; a change to None takes a key away."""
    n_bytes = 256
    metadata = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(n_bytes)), *pieces, "<user>"],
        "scores": [0.0] * (3 + n_bytes) + [*pieces.values(), 0.0],
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * n_bytes, *[NORMAL] * len(pieces), USER_DEFINED],
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def parts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes(id).decode(errors="backslashreplace") for id in ids]


BPE = open_metadata(byte_level())
SPM = open_metadata(by_score())
END = BPE.token_id("<|im_end|>")
LONGER = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *SPECIALS, "AA", "ĠĠ"]


# --- byte pairs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("hello world", ["hello", " wor", "l", "d"]),
        ("hellohell", ["hello", "hell"]),
        ("aaaaa", ["aa", "aaa"]),  # twos from the left, then the three
        ("é", ["\\xc3", "\\xa9"]),
        ("123", ["1", "2", "3"]),  # qwen2 takes digits one by one, whatever merges there are
        ("", []),
    ],
)
def test_words_are_merged_by_rank_leftmost_first(text: str, expected: list[str]) -> None:
    assert parts_of(BPE, BPE.encode(text)) == expected


@given(st.text(alphabet="helowra12 ", max_size=24))
def test_merges_in_the_order_of_the_tokens_or_not_give_the_same_ids(text: str) -> None:
    other = open_metadata(byte_level(tokens=byte_level()["tokens"][::-1], bos_token_id=0, eos_token_id=0))
    assert parts_of(other, other.encode(text)) == parts_of(BPE, BPE.encode(text))


def test_two_parts_that_spell_a_token_but_are_no_merge_stay_apart() -> None:
    tokens = [*ALPHABET, "bc", "ab", "abc"]
    tokenizer = open_metadata(byte_level(tokens=tokens, merges=["b c", "a b", "ab c"], bos_token_id=0, eos_token_id=0))
    assert parts_of(tokenizer, tokenizer.encode("abc")) == ["a", "bc"]


def test_a_merge_that_makes_the_first_token_counts() -> None:
    tokens = [*(merge.replace(" ", "") for merge in MERGES), *ALPHABET]
    tokenizer = open_metadata(byte_level(tokens=tokens, bos_token_id=None, eos_token_id=None))
    assert parts_of(tokenizer, tokenizer.encode("hello he")) == ["hello", " ", "he"]


def test_first_of_two_equal_merges_counts() -> None:
    tokens = [*ALPHABET, "he", "el"]
    tokenizer = open_metadata(byte_level(tokens=tokens, merges=["h e", "e l", "h e"], bos_token_id=0, eos_token_id=0))
    assert parts_of(tokenizer, tokenizer.encode("hel")) == ["he", "l"]


def test_word_that_is_a_token_stays_whole_where_the_pre_tokeniser_says_so() -> None:
    tokens = [*byte_level()["tokens"], "zebra"]
    whole = open_metadata(byte_level(tokens=tokens, pre="llama-bpe", add_bos_token=False))
    assert whole.encode("zebra") == [len(tokens) - 1]
    merged = open_metadata(byte_level(tokens=tokens, pre="qwen2"))
    assert parts_of(merged, merged.encode("zebra")) == list("zebra")


def test_byte_without_a_token_is_dropped_but_keeps_its_neighbours_apart() -> None:
    tokens = ["a¿" if token == "Ã" else token for token in ALPHABET]
    tokenizer = open_metadata(byte_level(tokens=tokens, merges=["a ¿"], bos_token_id=0, eos_token_id=0))
    assert parts_of(tokenizer, tokenizer.encode("aÿ")) == ["a", "\\xbf"]  # ÿ is c3 bf, and Ã stands for c3


@given(st.text())
def test_decoding_gives_the_encoded_text_back(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text
    assert BPE.decode(BPE.encode(text, parse_special=True)) == text


def test_lone_surrogate_counts_as_the_replacement_character() -> None:
    assert BPE.encode("a\ud800b") == BPE.encode("a\ufffdb")
    assert SPM.encode("a\udfffb") == SPM.encode("a\ufffdb")


def test_normal_token_outside_of_the_byte_alphabet_is_plain_text() -> None:
    tokens = [*byte_level()["tokens"], "two words"]
    assert open_metadata(byte_level(tokens=tokens)).decode([len(tokens) - 1]) == "two words"


def test_line_wise_vocabulary_keeps_runs_of_line_ends_and_spells_what_it_lacks_in_bytes() -> None:
    tokens = ["<pad>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab\n", "▁a", "\n\n\n"]
    tokenizer = open_metadata({"model": "gemma4", "tokens": tokens, "merges": ["▁ a"], "bos_token_id": 1})
    expected = ["<bos>", "b", " a", "\n\n\n", "<0xC3>", "<0xA9>", "\n", "\n", "a"]
    assert [tokenizer.token_bytes(id).decode() for id in tokenizer.encode("b a\n\n\né\n\na")] == expected


# --- pre-tokenisers ---------------------------------------------------------------------------------------------------


def words(pre: str, text: str) -> list[str]:
    pieces = [text]
    for pattern in PRE_TOKENIZERS[pre]:
        pieces = [word for piece in pieces for word, _ in splitter(pattern).pre_tokenize_str(piece)]
    return pieces


@pytest.mark.parametrize(
    "pre, text, expected",
    [
        ("gpt-2", "I'll 'LL  go12²\n\n x", ["I", "'ll", " '", "LL", " ", " go", "12²", "\n\n", " x"]),
        ("smollm", "a12 3", ["a", "1", "2", " ", "3"]),
        ("qwen2", "I'LL x12\r\n\n  y", ["I", "'LL", " x", "1", "2", "\r\n\n", " ", " y"]),
        ("llama-bpe", "12345 6", ["123", "45", " ", "6"]),
        ("qwen2", "a'ſ", ["a", "'ſ"]),  # the long s is no s here, though Unicode folds it to one
        ("qwen2", "क्", ["क", "्"]),
        ("qwen35", "क्", ["क्"]),
        ("qwen2", "a\U00016d40", ["a", "\U00016d40"]),  # a letter since Unicode 16, which llama.cpp does not know
        ("falcon", "a1234`b", ["a", "123", "4", "`", "b"]),
        ("default", "a1234`b", ["a", "123", "4", "`", "b"]),
        ("deepseek-llm", "ab 12　、x", ["ab", " ", "12", "　", "、", "x"]),
        ("tekken", "HelloWorld", ["Hello", "World"]),
        ("gpt-4o", "HELLOs'LL", ["HELLOs'LL"]),
        ("deepseek-v3", "a.b 12 你好x", ["a", ".b", " ", "12", " ", "你好", "x"]),
        ("tiny_aya", "x1234567 89", ["x", "1", "234", "567", " ", "89"]),
        ("kimi-k2", "你好ab's", ["你好", "ab's"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_pre_tokeniser_cuts_as_expected(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


@settings(max_examples=30)
@given(st.text() | st.text(alphabet=" \t\n\r'sSlLaA1२²!/\u0301你　", max_size=40))
def test_pre_tokenisers_neither_lose_nor_add_text(text: str) -> None:
    for pre in PRE_TOKENIZERS:
        assert "".join(words(pre, text)) == text


# --- by score ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("abc", ["<s>", " a", "bc"]),
        ("babc", ["<s>", " ", "b", "abc"]),  # ab and bc score the same: the left one, and then all three
        ("    a", ["<s>", "    ", " a"]),
        ("é日", ["<s>", " ", "é", "\\xe6", "\\x97", "\\xa5"]),
    ],
)
def test_pieces_are_merged_by_score_leftmost_of_equals(text: str, expected: list[str]) -> None:
    assert parts_of(SPM, SPM.encode(text)) == expected


def plain_merge(text: str, pieces: Mapping[str, float]) -> list[str]:
    """The rule as it is said: the best pair, leftmost of equals, until there is none."""
    parts = list(text)
    while True:
        pairs = [(pieces[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in pieces]
        if not pairs:
            return parts
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize("pieces", [PIECES, PIECES | {"b▁": -3.5, "b▁a": -4.5}], ids=["words apart", "across words"])
@given(text=st.text(alphabet="aabbc é", max_size=30))
def test_merging_by_score_follows_the_plain_rule(pieces: dict[str, float], text: str) -> None:
    tokenizer = open_metadata(by_score(pieces, add_bos_token=False))
    expected = [part.replace("▁", " ") for part in plain_merge("▁" + text.replace(" ", "▁"), pieces)] if text else []
    assert parts_of(tokenizer, tokenizer.encode(text)) == expected


@given(st.text(alphabet="ab ▁é日\n"))
def test_decoding_takes_the_prefixed_space_away_after_a_begin_token_only(text: str) -> None:
    visible = text.replace("▁", " ")
    assert SPM.decode(SPM.encode(text), skip_special=True) == visible
    assert SPM.decode(SPM.encode(text, add_special=False)) == (" " + visible if text else "")


def test_space_is_prefixed_after_every_special_token_unless_the_file_says_no() -> None:
    text = "a<user>a"
    assert parts_of(SPM, SPM.encode(text)) == ["<s>", " a", "<user>", " a"]
    without = open_metadata(by_score(add_space_prefix=False))
    assert parts_of(without, without.encode(text)) == ["<s>", "a", "<user>", "a"]


def test_byte_without_a_token_becomes_the_unknown_token() -> None:
    tokens = [token if token != "<0xE6>" else "<none>" for token in by_score()["tokens"]]
    tokenizer = open_metadata(by_score(tokens=tokens, token_type=None, unknown_token_id=0, add_bos_token=False))
    assert parts_of(tokenizer, tokenizer.encode("日"))[:2] == [" ", "<unk>"]


# --- special tokens ---------------------------------------------------------------------------------------------------


def test_control_tokens_are_parsed_only_where_asked_and_user_defined_ones_always() -> None:
    text = "<tool>a<|im_end|>"
    assert parts_of(BPE, BPE.encode(text)) == ["<tool>", "a", *"<|im_end|>"]
    assert parts_of(BPE, BPE.encode(text, parse_special=True)) == ["<tool>", "a", "<|im_end|>"]


def test_longer_special_token_goes_before_the_shorter_ones_in_it() -> None:
    assert len(BPE.encode("a<|im_end|><|im_start|>b", parse_special=True)) == 3


def test_merges_that_spell_a_control_token_do_not_make_one_out_of_text() -> None:
    types = [CONTROL if token == "hell" else NORMAL for token in byte_level()["tokens"]]
    merged = open_metadata(byte_level(token_type=types))
    assert parts_of(merged, merged.encode("hell hello")) == ["h", "e", "l", "l", " ", "hello"]
    assert parts_of(merged, merged.encode("hell", parse_special=True)) == ["hell"]
    scored = open_metadata(by_score({"<": -1.0, "s": -1.0, ">": -1.0, "<s": -2.0}))
    assert not any(map(scored.is_control, scored.encode("<s>", add_special=False)))


@pytest.mark.parametrize("add_bos, add_eos", [(False, False), (True, False), (False, True), (True, True)])
def test_begin_and_end_are_added_as_the_file_says(add_bos: bool, add_eos: bool) -> None:
    tokenizer = open_metadata(byte_level(add_bos_token=add_bos, add_eos_token=add_eos))
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert (tokenizer.add_bos, tokenizer.add_eos) == (add_bos, add_eos)
    assert tokenizer.encode("a") == [bos] * add_bos + tokenizer.encode("a", add_special=False) + [eos] * add_eos
    assert tokenizer.encode("") == [bos] * add_bos + [eos] * add_eos


def test_begin_is_added_by_default_where_the_kind_of_vocabulary_needs_it() -> None:
    assert SPM.add_bos and (SPM.bos_id, SPM.eos_id) == (1, 2)
    assert open_metadata(byte_level(pre="llama-bpe")).add_bos and not BPE.add_bos
    assert not open_metadata(byte_level(pre="llama-bpe", bos_token_id=None)).add_bos


def test_tokens_of_phi_3_swallow_the_white_space_after_them() -> None:
    tokenizer = open_metadata(by_score(add_bos_token=False) | {"general.name": "Phi-3 mini"})
    assert parts_of(tokenizer, tokenizer.encode("a<user> \n a")) == [" a", "<user>", " a"]
    assert parts_of(tokenizer, tokenizer.encode("<s> a", parse_special=True)) == ["<s>", " ", " a"]


def test_stop_tokens_are_found_by_key_and_by_text() -> None:
    assert {BPE.token_bytes(id) for id in BPE.stop_ids} == {b"<|endoftext|>", b"<|im_end|>"}
    named = open_metadata(byte_level(eot_token_id=3, eom_token_id=4, eos_token_id=5))
    assert named.stop_ids == BPE.stop_ids | {3, 4, 5}


def test_fill_in_the_middle_tokens_stop_as_the_file_names_them_or_else_by_their_text() -> None:
    tokens = [*byte_level()["tokens"], "<|fim_pad|>", "<|fim_suffix|>"]
    by_text = open_metadata(byte_level(tokens=tokens))
    assert by_text.stop_ids == BPE.stop_ids | {len(tokens) - 2}
    assert by_text.is_control(len(tokens) - 1)
    by_key = open_metadata(byte_level(tokens=tokens, fim_pad_token_id=7, suffix_token_id=8))
    assert by_key.stop_ids == BPE.stop_ids | {7}
    assert not by_key.is_control(len(tokens) - 1)


def test_channel_tokens_are_shown_and_parsed_always() -> None:
    tokens = [*byte_level()["tokens"], "<|channel|>"]
    types = [*byte_level()["token_type"], CONTROL]
    tokenizer = open_metadata(byte_level(tokens=tokens, token_type=types))
    assert tokenizer.encode("<|channel|>") == [len(tokens) - 1]
    assert tokenizer.decode([len(tokens) - 1], skip_special=True) == "<|channel|>"


def test_text_that_ends_a_turn_is_a_control_token_whatever_its_type() -> None:
    tokenizer = open_metadata(byte_level(token_type=None))
    assert tokenizer.is_control(tokenizer.encode("<|im_end|>", parse_special=True)[0])
    assert tokenizer.encode("<tool>", parse_special=True) != [tokenizer.n_vocab - 2]


def test_end_of_a_part_is_no_stop_where_there_are_tokens_for_return_and_call() -> None:
    tokens = [*byte_level()["tokens"], "<|end|>", "<|return|>", "<|call|>"]
    tokenizer = open_metadata(byte_level(tokens=tokens))
    assert {b"<|return|>", b"<|call|>"} < {tokenizer.token_bytes(id) for id in tokenizer.stop_ids}
    assert tokenizer.token_id("<|end|>") not in tokenizer.stop_ids
    assert tokenizer.token_id("<|end|>") in tokenizer.encode("<|end|>")  # user-defined now


# --- tokens to text ---------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.lists(st.integers(0, 255) | st.integers(0, BPE.n_vocab - 1)), st.booleans())
def test_stream_gives_whole_characters_whose_sum_is_the_decoded_text(ids: list[int], skip_special: bool) -> None:
    stream = BPE.stream(skip_special=skip_special)
    pieces = [stream.push(id) for id in ids]
    rest = stream.flush()
    assert "".join(pieces) + rest == BPE.decode(ids, skip_special=skip_special)
    expected = b"".join(BPE.token_bytes(id) for id in ids if not (skip_special and BPE.is_control(id)))
    assert "".join(pieces) + rest == expected.decode(errors="replace")


def test_stream_waits_for_the_last_byte_of_a_character() -> None:
    stream = BPE.stream()
    ids = BPE.encode("😀")
    assert [stream.push(id) for id in ids] == ["", "", "", "😀"] and stream.flush() == ""
    assert stream.push(ids[0]) == "" and stream.flush() == "\ufffd"
    assert stream.push(BPE.encode("a")[0]) == "a"


def test_flushed_stream_begins_anew() -> None:
    stream = SPM.stream()
    begin, spaced_a = SPM.encode("a")
    assert stream.push(begin) + stream.flush() + stream.push(spaced_a) == "<s> a"


def test_control_tokens_are_skipped_where_asked_and_unused_ones_give_nothing() -> None:
    ids = BPE.encode("a<tool><|im_end|>b", parse_special=True)
    assert BPE.decode(ids) == "a<tool><|im_end|>b" and BPE.decode(ids, skip_special=True) == "a<tool>b"
    assert BPE.token_bytes(BPE.n_vocab - 1) == b""


@pytest.mark.parametrize("types", [[7, 0, -1], [255, 100, 0]])
def test_tokens_of_types_that_do_not_exist_give_nothing(types: list[int]) -> None:
    tokens = [*byte_level()["tokens"], "x1", "x2", "x3"]
    tokenizer = open_metadata(byte_level(tokens=tokens, token_type=[NORMAL] * (len(tokens) - 3) + types))
    assert tokenizer.decode(range(len(tokens) - 4, len(tokens))) == tokens[-4]


def test_tokens_without_a_text_are_named_by_their_ids() -> None:
    tokens = [*byte_level()["tokens"], "", "a b", ""]
    tokenizer = open_metadata(byte_level(tokens=tokens))
    n = len(tokens)
    assert tokenizer.decode([n - 3, n - 2, n - 1]) == f"[EMPTY_{n - 3}]a b[EMPTY_{n - 1}]"
    with pytest.raises(TokenizerError, match=f"EMPTY_{n}. twice"):
        open_metadata(byte_level(tokens=[*tokens, "", f"[EMPTY_{n}]"]))


def test_the_size_of_a_vocabulary_is_known_without_reading_it() -> None:
    assert Tokenizer.size_in(file_with(byte_level())) == BPE.n_vocab
    with pytest.raises(UnsupportedModel, match="found 'new'"):
        Tokenizer.size_in(file_with(byte_level(pre="new")))
    with pytest.raises(TokenizerError, match="tokens must be an array of strings"):
        Tokenizer.size_in(file_with(by_score(tokens=3)))


@pytest.mark.parametrize("id", [-1, BPE.n_vocab, 1 << 40])
def test_id_outside_of_the_vocabulary_is_refused(id: int) -> None:
    with pytest.raises(TokenizerError, match=str(id)):
        BPE.decode([id])


# --- long texts -------------------------------------------------------------------------------------------------------

FAMILIES = sorted(set(PRE_TOKENIZERS.values()), key=str)
NAME_OF = {patterns: name for name, patterns in PRE_TOKENIZERS.items()}
# Expressions that try each end of a run, as llama.cpp and the models' authors write them.
LINE_ENDS = pre_tokenizers_module.LINE_ENDS


def written_plainly(pattern: str) -> str:
    """An expression as it was before it was made to look at each character of a long run once."""
    pattern = pattern.replace(r"(?<![^\S\r\n])" + LINE_ENDS, LINE_ENDS).replace(LINE_ENDS, r"\s*[\r\n]+")
    pattern = pattern.replace(r"(?<!\s)\s++\z", r"\s+\z").replace(r"(?:\p{N}{3})*+", r"(?:\p{N}{3})*")
    for letters in (r"\p{L}", r"[\p{L}\p{M}]"):
        upper, lower = rf"[{letters}&&[^a-z]]", rf"[{letters}&&[^A-Z]]"
        start = r"[^\r\n\p{L}\p{N}]?"
        plain = rf"{start}{upper}*{lower}+", rf"{start}{upper}+{lower}*"
        for quick, slow in zip(pre_tokenizers_module._cased(letters), plain, strict=True):
            pattern = pattern.replace(quick, slow)
    return pattern


@cache
def plain(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([splitter(written_plainly(pattern)) for pattern in patterns])


LONG_RUNS = [patterns for patterns in FAMILIES if tuple(map(written_plainly, patterns)) != patterns]
_runs = st.lists(
    st.builds(
        lambda text, n: text * n,
        st.sampled_from(
            [
                *(" \n" * 6),
                *" \t\n\r\u00a0\u3000aAbZé日ｱ가7٣!'/.¡ǅ",
                "\r\n",
                "a\u0301",
                "\u0301",
                "'s",
                "'LL",
                "aB",
                "<sentinel:",
                "😀",
                "\0",
            ]
        ),
        st.integers(1, 6),
    ),
    max_size=12,
).map("".join)


def test_most_pre_tokenisers_have_an_expression_for_long_runs() -> None:
    assert len(LONG_RUNS) > 15


@pytest.mark.parametrize("patterns", LONG_RUNS, ids=[NAME_OF[patterns] for patterns in LONG_RUNS])
@settings(max_examples=60)
@given(text=_runs)
def test_what_is_quick_on_long_runs_cuts_as_the_plain_expressions_do(patterns: tuple[str, ...], text: str) -> None:
    assert list(cut(NAME_OF[patterns], text)) == [word for word, _ in plain(patterns).pre_tokenize_str(text)]


@pytest.mark.parametrize("patterns", FAMILIES, ids=[NAME_OF[patterns] for patterns in FAMILIES])
@settings(max_examples=40)
@given(text=_runs | st.text(max_size=40), at_once=st.integers(1, 9))
def test_a_text_is_cut_the_same_piece_by_piece(patterns: tuple[str, ...], text: str, at_once: int) -> None:
    whole = list(cut(NAME_OF[patterns], text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pre_tokenizers_module, "_AT_ONCE", at_once)
        assert list(cut(NAME_OF[patterns], text)) == whole


def test_a_long_text_is_cut_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def noted(pre: str) -> Any:
        return SimpleNamespace(pre_tokenize_str=lambda text: sizes.append(len(text)) or [(text, (0, len(text)))])

    monkeypatch.setattr(pre_tokenizers_module, "_pre_tokenizer", noted)
    for pre, text in (("qwen2", "some words "), ("exaone-moe", "some words\n"), ("qwen2", "line\n")):
        sizes.clear()
        assert "".join(cut(pre, text * 50000)) == text * 50000
        assert max(sizes) < 1.1 * pre_tokenizers_module._AT_ONCE and len(sizes) > 2


# What took quadratic time, or so many steps that the library gave up: now each character costs a little.
LONG = {
    **{
        name: unit * 60_000 for name, unit in {"spaces": " ", "newlines": "\n", "letters": "a", "capitals": "A"}.items()
    },
    **{name: unit * 30_000 for name, unit in {"tabs": " \t", "crlf": "\r\n", "mixed": "aB", "words": "a "}.items()},
    **{name: unit * 20_000 for name, unit in {"digits": "777", "marks": "a\u0301\u0301", "cjk": "日本語"}.items()},
    **{name: unit * 12_000 for name, unit in {"emoji": "👩\u200d👧!", "nul": "\0\0", "quotes": "'s'"}.items()},
    "spaces before a letter": " " * 60_000 + "x",
    "spaces before a digit": " " * 60_000 + "7",
    "spaces among lines": (" " * 20_000 + "\n") * 3,
    "lone surrogates": "\ud800\udc00" * 50_000,
}


@pytest.mark.parametrize("case", LONG)
def test_a_long_text_of_anything_is_tokenised_and_is_the_text_again(case: str) -> None:
    text = LONG[case].replace("\ud800", "\ufffd").replace("\udc00", "\ufffd")
    for tokenizer in (BPE, SPM, open_metadata(byte_level(pre="gpt-4o", merges=[*MERGES, "A A", "Ġ Ġ"], tokens=LONGER))):
        ids = tokenizer.encode(LONG[case], add_special=False, continues=True)
        assert tokenizer.decode(ids) == text
        assert tokenizer.least_tokens(LONG[case]) <= len(ids)


def test_merging_takes_few_steps_a_character() -> None:
    tokens = [*ALPHABET, *("a" * 2**n for n in range(1, 12))]
    merges = [f"{'a' * 2**n} {'a' * 2**n}" for n in range(11)]
    tokenizer = open_metadata(byte_level(tokens=tokens, merges=merges, bos_token_id=0, eos_token_id=0))

    def seconds(n: int) -> float:
        start = time.process_time()
        assert len(tokenizer.encode("a" * n)) == n // 2048
        return time.process_time() - start

    seconds(2048)
    few, many = seconds(1 << 17), seconds(1 << 20)
    assert many < 40 * few + 0.5  # eight times as many; squared it would be 64 times


def test_the_least_number_of_tokens_is_one_that_no_text_has_fewer_than() -> None:
    assert BPE.least_tokens("") == 0 and BPE.least_tokens("a") == 1
    longest = max(len(text.encode()) for text in SPECIALS)
    assert BPE.least_tokens("é" * longest) == 2 and BPE.least_tokens("é" * (longest // 2)) == 1
    assert SPM.least_tokens(" " * 1000) == 1000 // 6 + 1  # <0x00>, <user>: the longest tokens
    assert len(SPM.encode(" " * 1000)) >= 1000 // 6 + 1


@given(st.text(max_size=60))
def test_no_text_has_fewer_tokens_than_the_least_number(text: str) -> None:
    for tokenizer in (BPE, SPM):
        for parse_special in (False, True):
            ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
            assert tokenizer.least_tokens(text) <= len(ids)


def test_bytes_without_a_token_do_not_count() -> None:
    tokens = [*(char for char in ALPHABET if char != "z"), "qq"]
    tokenizer = open_metadata(byte_level(tokens=tokens, merges=["q q"], bos_token_id=0, eos_token_id=0))
    assert tokenizer.encode("z" * 100) == [] and tokenizer.least_tokens("z" * 100) == 0
    assert tokenizer.least_tokens("za" * 100) == 50 and len(tokenizer.encode("za" * 100)) == 100


def test_where_parts_of_a_text_may_be_lost_nothing_is_known_of_its_tokens() -> None:
    lossy = [
        byte_level(merges=["h e", "x y"]),  # what they make is no token, and so its bytes alone remain
        byte_level(pre="gemma4"),  # no byte tokens
    ]
    for metadata in lossy:
        assert open_metadata(metadata).least_tokens("a" * 10**6) == 0


def test_white_space_that_special_tokens_swallow_does_not_count() -> None:
    phi3 = byte_level() | {"general.name": "Phi-3 mini"}
    tokenizer = open_metadata(phi3)
    text = "<|im_end|>" + " " * 10_000 + "a"
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    assert len(ids) == 2 and tokenizer.least_tokens(text) <= 2
    assert tokenizer.least_tokens(" " * 10_000) > 100  # nothing swallows it


class Panic(BaseException):
    """As pyo3's: no Exception."""


@pytest.mark.parametrize("error", [Panic("the library panicked"), ValueError("odd"), RuntimeError("retry limit")])
def test_a_panic_of_the_library_is_an_error_of_this_package(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(text: str) -> Any:
        raise error

    monkeypatch.setattr(pre_tokenizers_module, "_pre_tokenizer", lambda pre: SimpleNamespace(pre_tokenize_str=raises))
    with pytest.raises(TokenizerError, match=f"too much for the pre-tokeniser 'qwen2': {error}"):
        BPE.encode("never seen before")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_ends_a_program_ends_it_within_the_library_too(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(text: str) -> Any:
        raise error

    monkeypatch.setattr(pre_tokenizers_module, "_pre_tokenizer", lambda pre: SimpleNamespace(pre_tokenize_str=raises))
    with pytest.raises(error):
        BPE.encode("never seen before")


# --- files that are wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata, names",
    [
        (byte_level(tokens=None, token_type=None), "tokens"),
        (byte_level(tokens=[]), "tokens"),
        (byte_level(tokens=[1, 2]), "tokens"),
        (byte_level(tokens="abc"), "tokens"),
        (byte_level(tokens=["a", "a"]), "a twice"),
        (byte_level(token_type=[1, 2]), "token_type"),
        (byte_level(token_type=["a"]), "token_type"),
        (byte_level(token_type=[1.0] * 273), "token_type"),
        (byte_level(token_type=[True] * 273), "token_type"),
        (byte_level(token_type=[2**70] * 273), "token_type"),
        (byte_level(token_type=[BYTE] * 273), "byte token"),
        (byte_level(merges=None), "merges"),
        (byte_level(merges=[1]), "merges"),
        (byte_level(eos_token_id="a"), "eos_token_id"),
        (byte_level(eot_token_id=True), "eot_token_id"),
        (byte_level(add_bos_token=1), "add_bos_token"),
        (byte_level(pre=3), "pre"),
        (byte_level(model=3), "model"),
        (by_score(scores=[0.0]), "scores"),
        (by_score(scores=["a"]), "scores"),
        (by_score(scores=[float("nan")] * 274), "scores"),
        (by_score(add_space_prefix="yes"), "add_space_prefix"),
        (by_score(tokens=[f"t{i}" for i in range(274)], token_type=None), "<0x00>"),
    ],
)
def test_broken_vocabulary_is_refused_with_the_name_of_the_key(metadata: dict[str, Any], names: str) -> None:
    with pytest.raises(TokenizerError, match=names):
        open_metadata(metadata)


def test_unknown_pre_tokeniser_is_refused_with_a_list_of_those_known() -> None:
    with pytest.raises(UnsupportedModel, match=r"llama-bpe.*qwen2.*smollm.*found 'new'"):
        open_metadata(byte_level(pre="new"))


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "none", None])
def test_unknown_kind_of_vocabulary_is_refused_with_those_known(model: str | None) -> None:
    with pytest.raises(UnsupportedModel, match="gpt2.*llama.*gemma4"):
        open_metadata(byte_level(model=model))


@pytest.mark.parametrize("key", ["bos", "eos", "eot", "eom", "fim_pad", "fim_pre"])
@pytest.mark.parametrize("id", [BPE.n_vocab, 1 << 40, -2])
def test_the_id_of_a_role_outside_of_the_vocabulary_is_ignored_with_a_warning(key: str, id: int) -> None:
    with pytest.warns(
        RuntimeWarning, match=f"{key}_token_id is {id}, and there are {BPE.n_vocab} tokens: it is ignored"
    ):
        tokenizer = open_metadata(byte_level(**{f"{key}_token_id": id}))
    without = open_metadata(byte_level(**{f"{key}_token_id": None}))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (without.bos_id, without.eos_id)
    assert tokenizer.stop_ids == without.stop_ids
    assert tokenizer.encode("hello<|im_end|>", parse_special=True) == without.encode(
        "hello<|im_end|>", parse_special=True
    )


def test_by_score_an_id_outside_of_the_vocabulary_is_the_usual_one() -> None:
    with pytest.warns(RuntimeWarning):
        tokenizer = open_metadata(by_score(bos_token_id=5000, eos_token_id=5000))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


@pytest.mark.parametrize("id", [None, 2**32 - 1, 5000])
def test_a_begin_token_that_is_not_there_is_not_added(id: int | None) -> None:
    with pytest.warns(RuntimeWarning, match="add_bos_token is true, but there is no bos_token_id: none is added"):
        tokenizer = open_metadata(byte_level(bos_token_id=id, add_bos_token=True))
    assert tokenizer.encode("a") == open_metadata(byte_level(add_bos_token=False)).encode("a")


@pytest.mark.parametrize("template", [3, True, ["a", "b"]])
def test_a_template_that_is_no_text_is_ignored_with_a_warning(template: Any) -> None:
    with pytest.warns(RuntimeWarning, match="tokenizer.chat_template must be a string: found .*: it is ignored"):
        tokenizer = open_metadata(byte_level() | {"tokenizer.chat_template": template})
    assert tokenizer.chat_template is None


def test_of_templates_with_names_the_default_one_is_taken() -> None:
    named = {"tokenizer.chat_templates": ["default", "tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    assert open_metadata(byte_level() | named).chat_template is None
    default = {"tokenizer.chat_template.default": "{{ messages }}"}
    assert open_metadata(byte_level() | named | default).chat_template == "{{ messages }}"


def test_without_scores_all_tokens_count_alike() -> None:
    with pytest.warns(RuntimeWarning, match="tokenizer.ggml.scores is missing"):
        tokenizer = open_metadata(by_score(scores=None))
    zeros = open_metadata(by_score(scores=[0.0] * 274))
    for text in ("abc", "  a  ab caé", "aaaaab"):
        assert tokenizer.encode(text) == zeros.encode(text)


def test_more_scores_and_types_than_tokens_are_not_read() -> None:
    scores, types = by_score()["scores"], by_score()["token_type"]
    longer = open_metadata(by_score(scores=[*scores, float("nan")], token_type=[*types, BYTE]))
    assert longer.encode("a  abc é") == SPM.encode("a  abc é")


# As llama.cpp does: what is no pair never matches, and of a pair that makes no token the printable bytes are left.
def test_merges_that_make_no_token_are_read_as_llama_cpp_reads_them() -> None:
    odd = open_metadata(byte_level(merges=["he", "a b c", "h e", " l l", "x y"]))
    assert parts_of(odd, odd.encode("hello")) == ["he", "l", "l", "o"]
    assert parts_of(odd, odd.encode("xyz")) == ["x", "y", "z"]
    assert parts_of(odd, odd.encode("a b c")) == ["a", " ", "b", " ", "c"]


def test_a_token_that_is_no_utf_8_stays_as_its_bytes() -> None:
    tokens = [*byte_level()["tokens"], "\udce9\udcff"]
    tokenizer = open_metadata(byte_level(tokens=tokens))
    assert tokenizer.token_bytes(len(tokens) - 1) == b"\xe9\xff"
    assert tokenizer.decode([len(tokens) - 1]) == "\ufffd\ufffd"
    for text in ("é", "\udce9\udcff", "\ufffd"):
        assert len(tokens) - 1 not in tokenizer.encode(text)
    by_piece = open_metadata(by_score({**PIECES, "\udce9\udcff": -11.0}))
    assert by_piece.token_bytes(by_piece.n_vocab - 2) == b"\xe9\xff"
    special = open_metadata(byte_level(tokens=tokens, token_type=[*byte_level()["token_type"], CONTROL]))
    assert special.token_bytes(len(tokens) - 1) == b"\xe9\xff" and special.encode("a\udce9\udcff", parse_special=True)


def test_missing_pre_tokeniser_is_the_default_one() -> None:
    with pytest.warns(RuntimeWarning, match="tokenizer.ggml.pre is missing: the default pre-tokeniser is used"):
        missing = open_metadata(byte_level(pre=None))
    assert parts_of(missing, missing.encode("9123")) == ["9", "12", "3"]
    other = open_metadata(byte_level(pre="gpt-2"))
    assert parts_of(other, other.encode("9123")) == ["9", "123"]


_scalars = [st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8)]
_values = (
    st.none() | st.one_of(_scalars) | st.one_of([st.lists(scalar, max_size=4) for scalar in _scalars])
)  # as in GGUF


@settings(max_examples=300)
@given(
    base=st.sampled_from([byte_level(), by_score(), byte_level(pre="gemma4"), byte_level(pre="deepseek-llm")]),
    data=st.data(),
)
def test_damaged_metadata_either_works_or_raises_an_error_of_this_package(base: dict[str, Any], data: Any) -> None:
    metadata = dict(base)
    for key in sorted(data.draw(st.sets(st.sampled_from(sorted(metadata)), min_size=1, max_size=3))):
        value = metadata[key]
        if isinstance(value, list) and data.draw(st.booleans()):
            index = data.draw(st.integers(0, len(value) - 1))
            same = {str: st.text(max_size=4), float: st.floats(), int: st.integers(-9, 9)}[type(value[0])]
            metadata[key] = [*value[:index], data.draw(same), *value[index + 1 :]]
        else:
            metadata[key] = data.draw(_values)
    try:
        tokenizer = open_metadata(metadata)
    except EdgeInferError:
        return
    for text in ("hello <|im_end|> é日 12\n\n", "<s>abc   b"):
        ids = tokenizer.encode(text, parse_special=True)
        assert all(0 <= id < tokenizer.n_vocab for id in ids)
        tokenizer.decode(ids)


# --- llama.cpp --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compare(llama_cpp: ModuleType) -> ModuleType:
    """The benchmark of the same name, whose strings and oracle are used here in small."""
    path = Path(__file__).parents[1] / "benchmarks" / "compare_tokenizers.py"
    spec = importlib.util.spec_from_file_location("compare_tokenizers", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ids_pieces_and_stop_tokens_equal_those_of_llama_cpp(compare: ModuleType, default_model: Path) -> None:
    result = compare.compare(str(default_model), 1000, 1, sample_texts())
    assert (result["differences"], result["facts_that_differ"]) == (0, [])


# One of each family: what differs between them is the expressions, not the vocabulary.
@pytest.mark.parametrize(
    "pre",
    [
        *("default", "gpt-2", "qwen2", "qwen35", "llama-bpe", "deepseek-llm", "deepseek-v3", "gpt-4o", "glm4"),
        *("laguna", "granite-docling"),
    ],
)
def test_pre_tokenisers_cut_as_those_of_llama_cpp(
    compare: ModuleType, default_model: Path, tmp_path: Path, pre: str
) -> None:
    copy = compare.with_pre(str(default_model), pre, str(tmp_path))
    assert compare.compare(copy, 300, 2, sample_texts())["differences"] == 0


def test_the_vocabulary_of_gemma_4_gives_the_ids_of_llama_cpp(compare: ModuleType, tmp_path: Path) -> None:
    """Pieces of lines, spaces as U+2581, bytes as tokens."""
    pieces = [*"▁abcehlorstu\n'\"{}éа你", "th", "he", "the", "▁the", "▁▁", "\n\n", "\n\n\n", "▁a", "lo", "ro"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|turn>"]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED]
    merges = ["h e", "t he", "t h", "▁ the", "▁ ▁", "\n \n", "\n\n \n", "▁ a", "l o", "r o"]
    writer = gguf.GGUFWriter(tmp_path / "gemma.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        step()
    found = compare.compare(str(tmp_path / "gemma.gguf"), 1000, 3, sample_texts())
    assert (found["differences"], found["facts_that_differ"]) == (0, [])
