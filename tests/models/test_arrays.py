"""Arrays of metadata against lists, and the tables of texts in C++ against what Python has for each: the oracles."""

from __future__ import annotations

import itertools
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.models._strings import StringIndex, StringTable, make_tokens_in_order
from edgeinfer.models.arrays import Array, Numbers, Strings

MOST_BYTES = 400


def as_in_a_file(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def read(data: bytes | bytearray, at: int, limit: int, n: int) -> StringTable:
    """From memory of just that size, so that a sanitizer sees what is read beyond it."""
    return StringTable.read(np.frombuffer(data, np.uint8).copy(), at, limit, n, MOST_BYTES)


def read_plainly(data: bytes, at: int, limit: int, n: int) -> list[str]:
    """The first of n texts that are sound, one by one."""
    texts: list[str] = []
    while len(texts) < n and at + 8 <= limit:
        (n_bytes,) = struct.unpack_from("<Q", data, at)
        if n_bytes > MOST_BYTES or at + 8 + n_bytes > limit:
            break
        texts.append(data[at + 8 : at + 8 + n_bytes].decode(errors="surrogateescape"))
        at += 8 + n_bytes
    return texts


def is_text(raw: bytes, before: bytes = b"", after: bytes = b"") -> bool:
    """Whether the table takes these bytes for UTF-8, between two other texts."""
    data = as_in_a_file([before, raw, after])
    return read(data, 0, len(data), 3).n_utf8 == 3


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


# ---- reading ---------------------------------------------------------------------------------------------------------

_pieces = st.one_of(
    st.text(max_size=24).map(str.encode),
    st.binary(max_size=4),
    st.integers(0, MOST_BYTES + 2).map(lambda n: b"x" * n),
    st.sampled_from(
        [b"", "▁".encode() * 9, "é".encode(), b"\xc3", b"\xa9", b"\xe2\x96", b"\x81", b"\xed\xa0\x80", b"\xf0"]
    ),
)


@settings(max_examples=500)
@given(st.lists(_pieces, max_size=20), st.integers(0, 22), st.binary(max_size=9), st.integers(0, 30), st.data())
def test_damaged_arrays_are_read_as_far_as_one_by_one(
    texts: list[bytes], n: int, before: bytes, cut: int, data: Any
) -> None:
    content = bytearray(before + as_in_a_file(texts))
    for at in data.draw(st.lists(st.integers(0, max(len(content) - 1, 0)), max_size=3)):
        content[at : at + 1] = bytes([data.draw(st.sampled_from([0, 1, 7, 8, 9, 65, 128, 169, 195, 226, 240, 255]))])
    limit = max(len(before), len(content) - cut)
    at = min(len(before), limit)
    expected = read_plainly(bytes(content), at, limit, n)
    table = read(content, at, limit, n)
    assert table.tolist() == expected
    raw = [text.encode(errors="surrogateescape") for text in expected]
    assert table.n_bytes == sum(8 + len(text) for text in raw)
    assert table.n_utf8 == next((i for i, text in enumerate(raw) if not is_utf8(text)), len(raw))
    assert table.longest == max((sum(byte & 0xC0 != 0x80 for byte in text) for text in raw), default=0)
    assert StringTable.of(expected).equals(table)


@pytest.mark.parametrize("at, limit", [(5, 4), (0, 11), (11, 11), (2**63, 2**63)])
def test_limits_outside_of_the_data_are_refused(at: int, limit: int) -> None:
    with pytest.raises(ValueError, match="limits"):
        read(bytes(10), at, limit, 1)


def test_lengths_that_wrap_are_refused() -> None:
    for n_bytes in (2**64 - 1, 2**64 - 8, 2**63, 2**32):
        data = struct.pack("<Q", n_bytes) + bytes(8)
        assert len(StringTable.read(data, 0, 16, 1, 2**64 - 1)) == 0


def test_a_text_of_the_most_bytes_is_read_and_no_longer_one() -> None:
    data = as_in_a_file([b"", b"x" * MOST_BYTES, b"y" * (MOST_BYTES + 1)])
    assert read(data, 0, len(data), 3).tolist() == ["", "x" * MOST_BYTES]


def test_texts_of_all_lengths_are_whole_up_to_the_last_byte_of_the_data() -> None:
    for last in range(40):
        texts = [bytes([65 + n]) * n for n in [*range(40), last]]
        data = as_in_a_file(texts)
        assert read(data, 0, len(data), 41).tolist() == [text.decode() for text in texts]


# A character of each length, and what is next to the rules: overlong, surrogates, above U+10FFFF.
LEADS = bytes([0x00, 0x41, 0x7F, 0x80, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF])
LEADS += bytes([0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF8, 0xFE, 0xFF])
FOLLOWING = bytes([0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xE0, 0xFF])


@pytest.mark.parametrize("length", range(1, 5))
def test_utf_8_is_what_python_takes_for_it(length: int) -> None:
    sequences = [bytes(raw) for raw in itertools.product(LEADS, *[FOLLOWING] * (length - 1))]
    wrong = [raw for raw in sequences if is_text(raw) != is_utf8(raw)]
    assert wrong == [] and any(map(is_utf8, sequences)) and not all(map(is_utf8, sequences))


@pytest.mark.parametrize("lead", [0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF4, 0xF5])
def test_every_second_byte_is_judged_as_python_does(lead: int) -> None:
    for second in range(256):
        for rest in (b"", b"\x80", b"\x80\x80"):
            raw = bytes([lead, second]) + rest
            assert is_text(raw) == is_utf8(raw), raw


@settings(max_examples=500)
@given(st.lists(st.one_of(st.text(max_size=20).map(str.encode), st.binary(max_size=3))).map(b"".join))
def test_long_texts_are_judged_as_python_does(raw: bytes) -> None:
    assert is_text(raw[:MOST_BYTES]) == is_utf8(raw[:MOST_BYTES])


@pytest.mark.parametrize("character", ["é", "日", "😀"])
def test_half_a_character_is_not_made_whole_by_the_next_text(character: str) -> None:
    raw = character.encode()
    for cut in range(1, len(raw)):
        assert not is_text(raw[cut:], before=raw[:cut]) and not is_text(raw[:cut], after=raw[cut:])
        data = as_in_a_file([b"sound", raw[:cut], raw[cut:]])
        assert read(data, 0, len(data), 3).n_utf8 == 1


def test_texts_are_the_tables_own() -> None:
    data = np.frombuffer(as_in_a_file([b"one", b"two"]), np.uint8).copy()
    table = StringTable.read(data, 0, len(data), 2, MOST_BYTES)
    data[:] = 255
    assert table.tolist() == ["one", "two"]


# ---- strings and numbers as lists ------------------------------------------------------------------------------------

_words = st.one_of(st.text(max_size=5), st.sampled_from(["", "a", "ab", "b", "é", "日", "😀", "a\0", "x" * 40]))
_lists = st.lists(_words, max_size=12)
_bounds = st.none() | st.integers(-15, 15)
_slices = st.builds(slice, _bounds, _bounds, st.sampled_from([None, 1, 1, 2, 3, -1, -2]))
_numbers = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12).map(lambda found: (found, np.array(found, "<i8"))),
    st.lists(st.floats(allow_nan=False), max_size=12).map(lambda found: (found, np.array(found, "<f8"))),
    st.lists(st.booleans(), max_size=12).map(lambda found: (found, np.array(found, np.bool_))),
)
_both = st.one_of(
    _lists.map(lambda found: (found, Strings(found))), _numbers.map(lambda found: (found[0], Numbers(found[1])))
)


def told(function: Any) -> object:
    """What comes of it, or the name of the error."""
    try:
        return function()
    except (IndexError, ValueError) as error:
        return type(error).__name__


@settings(max_examples=300)
@given(_both, st.integers(-14, 14), _slices, _slices)
def test_an_array_is_used_as_a_list_is(
    both: tuple[list[Any], Array[Any]], index: int, first: slice, then: slice
) -> None:
    expected, array = both
    assert array == expected and expected == array and not array != expected
    assert len(array) == len(expected) and bool(array) == bool(expected) and repr(array) == repr(expected)
    assert [*array] == expected and list(map(type, array)) == list(map(type, expected))
    assert [*reversed(array)] == expected[::-1]
    assert told(lambda: array[index]) == told(lambda: expected[index])
    assert told(lambda: type(array[index])) == told(lambda: type(expected[index]))
    assert array[first] == expected[first] and array[first][then] == expected[first][then]
    for one in [*expected, "ab", 7]:
        assert (one in array) == (one in expected) and array.count(one) == expected.count(one)
        assert told(lambda one=one: array.index(one, 1)) == told(lambda one=one: expected.index(one, 1))
        assert (array == [*expected, one], array == [one]) == (False, expected == [one])


@given(_lists, _lists, _slices, _slices)
def test_strings_are_equal_where_lists_are(a: list[str], b: list[str], of_a: slice, of_b: slice) -> None:
    one, other = Strings(a), Strings(b)
    assert (one == other) == (a == b) and (one != other) == (a != b)
    assert (one[of_a] == other[of_b]) == (a[of_a] == b[of_b])
    assert (one[of_a] == one[of_b]) == (a[of_a] == a[of_b])
    assert (one[of_a] == b[of_b]) == (a[of_a] == b[of_b])


def test_a_part_of_a_part_begins_where_it_should() -> None:
    texts = ["a", "", "bc", "é", "def", "g"]
    for first, then in itertools.product(range(7), repeat=2):
        part = Strings(texts)[first:][then:5]
        assert part == texts[first:][then:5] and part == Strings(texts[first:][then:5])


def test_strings_that_are_the_same_when_joined_differ() -> None:
    assert Strings(["ab", "c"]) != Strings(["a", "bc"]) and Strings(["", "a"]) != Strings(["a", ""])
    assert Strings(["x", "ab", "c"])[1:] == Strings(["ab", "c"]) != Strings(["y", "a", "bc"])[1:]


@given(st.lists(st.text(max_size=12), max_size=9), st.slices(9), st.sampled_from(["", "\0", " é "]))
def test_texts_are_joined_as_python_does_it(texts: list[str], part: slice, separator: str) -> None:
    part = slice(part.start, part.stop)
    texts = [text.encode(errors="ignore").decode() for text in texts]
    assert Strings(texts)[part].joined_by(separator) == separator.join(texts[part]).encode()


@pytest.mark.parametrize("part", [slice(None), slice(1, 4)])
def test_texts_without_bytes_get_names(part: slice) -> None:
    table = StringTable.of(["", "a", "", "", "▁b"]).part(*part.indices(5)[:2])
    texts = table.tolist()
    assert table.has_empty and not StringTable.of(["a", "\0"]).has_empty
    assert table.named("[", "]").tolist() == [text or f"[{i}]" for i, text in enumerate(texts)]
    assert table.tolist() == texts


@pytest.mark.parametrize(
    "text", ["", "▁", "▁▁", "▁a", "▁▁ab", "a▁", "▁a▁", "ab▁c", "\0▁", "日▁", "\udce2▁", "\udc96\udc81", "▁\udce2\udc96"]
)
def test_a_part_inside_of_a_text_is_found_as_an_expression_does(text: str) -> None:
    assert StringTable.of(["▁x", text]).has_inside("▁") == bool(re.search("(?s)[^▁]▁", text))


def test_an_array_equals_nothing_that_is_no_list() -> None:
    assert Strings(["a", "b"]) != "ab" and Strings(["a"]) == ("a",) and Numbers(np.arange(2)) != b"\0\1"
    assert Strings([]) == Numbers(np.arange(0)) == [] and Strings(["1"]) != Numbers(np.array([1]))


def test_an_array_cannot_be_changed() -> None:
    for array in (Strings(["a"]), Numbers(np.arange(3))):
        with pytest.raises(TypeError):
            array[0] = "b"  # type: ignore[index]
        with pytest.raises(TypeError, match="unhashable"):
            hash(array)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(Numbers(np.arange(3)))[0] = 1


def test_a_long_array_is_shown_by_its_beginning() -> None:
    for array in (Strings(["a"] * 200_000), Numbers(np.zeros(200_000, np.int8))):
        assert len(repr(array)) < 1000 and f"{array!r:.80}" == f"{[*array]!r:.80}" and repr(array).endswith(", ...]")


@given(_numbers)
def test_numpy_sees_numbers_as_they_are_stored(both: tuple[list[float], Any]) -> None:
    expected, stored = both
    array = np.asarray(Numbers(stored))
    assert array.dtype == stored.dtype and np.shares_memory(array, stored) == bool(expected)
    assert np.array(Numbers(stored), np.float64).tolist() == [float(number) for number in expected]


def test_numpy_s_integers_are_indices() -> None:
    assert Strings(["a", "b"])[np.int32(1)] == "b" and Numbers(np.arange(3))[np.int64(-1)] == 2  # type: ignore[index]


def test_what_is_no_text_makes_no_strings() -> None:
    with pytest.raises(TypeError):
        Strings([1])  # type: ignore[list-item]
    with pytest.raises(UnicodeEncodeError):
        Strings(["\ud800"])


# ---- the index -------------------------------------------------------------------------------------------------------

ALIKE = [f"{number:05}" for number in range(30_000)]  # all of one length


@settings(max_examples=300)
@given(_lists, _lists)
def test_an_index_finds_the_first_of_each_text(texts: list[str], others: list[str]) -> None:
    index = StringIndex(StringTable.of(texts))
    for text in [*texts, *others, "\ud800", "a\ud800"]:
        expected = texts.index(text) if text in texts else None
        assert index.get(text) == expected and (text in index) == (text in texts)
        if expected is None:
            with pytest.raises(KeyError):
                index[text]
        else:
            assert index[text] == expected
    repeated = [place for place, text in enumerate(texts) if texts.count(text) > 1]
    assert index.repeated == (repeated[0] if repeated else None)


@given(_lists, _lists)
def test_a_hidden_text_is_not_found(texts: list[str], hidden: list[str]) -> None:
    index = StringIndex(StringTable.of(texts))
    for text in [*hidden, "\ud800"]:
        index.hide(text)
    assert [index.get(text) for text in texts] == [None if text in hidden else texts.index(text) for text in texts]


def test_texts_of_one_length_are_told_apart() -> None:
    index = StringIndex(StringTable.of(ALIKE[::2]))
    assert [index.get(text) for text in ALIKE[::2]] == [*range(len(ALIKE) // 2)] and index.repeated is None
    assert [text for text in ALIKE[1::2] if text in index] == []


def test_an_index_outlives_what_it_was_made_of() -> None:
    strings = Strings(ALIKE)
    index, part = StringIndex(strings.table), strings[100:200]
    del strings
    assert index["00777"] == 777 and part[77] == "00177" and StringIndex(part.table).get("00177") == 77


def test_the_first_text_that_comes_again_is_told() -> None:
    assert StringIndex(StringTable.of(["a", "b", "c", "b", "a", "c"])).repeated == 0
    assert StringIndex(StringTable.of(["z", "c", "b", "b", "c"])).repeated == 1
    assert StringIndex(StringTable.of([*ALIKE, ALIKE[9], ALIKE[7]])).repeated == 7


# ---- merges ----------------------------------------------------------------------------------------------------------

_merges = st.lists(st.text("ab é", max_size=5), max_size=5)


@settings(max_examples=500)
@given(_merges, st.lists(st.text("ab é", max_size=4), max_size=3), st.integers(0, 4), st.integers(-1, 4))
def test_merges_make_tokens_in_order_where_python_says_so(
    merges: list[str], others: list[str], first: int, wrong: int
) -> None:
    made = [merge.replace(" ", "") for merge in merges]
    if 0 <= wrong < len(made):
        made[wrong] = merges[wrong].replace(" ", "", 1)
    tokens = [*others, *made, "end"]
    for place in (first, len(others)):
        expected = all(merge.count(" ") == 1 for merge in merges) and (
            tokens[place : place + len(merges)] == [merge.replace(" ", "") for merge in merges]
        )
        of_merges, of_tokens = StringTable.of(merges), StringTable.of(tokens)
        assert make_tokens_in_order(of_merges, of_tokens, place) == (expected and place <= len(tokens))
    assert StringTable.of(merges).n_spaces == "".join(merges).count(" ")


@pytest.mark.parametrize(
    "merges, tokens",
    [
        (["a b c"], ["ab c"]),  # a second space
        (["a b c", "ab"], ["ab c", "ab"]),
        (["ab"], ["ab"]),
        (["a b"], ["ac"]),
        (["a b"], ["cb"]),
        (["a b"], ["abc"]),
        (["a b", "c d"], ["ab"]),
        (["a b", "c d"], ["ab\ncd"]),
    ],
)
def test_merges_that_do_not_make_the_tokens_in_order_are_found(merges: list[str], tokens: list[str]) -> None:
    assert not make_tokens_in_order(StringTable.of(merges), StringTable.of(tokens), 0)


@given(st.lists(st.text("ab", max_size=4), min_size=1, max_size=8, unique=True), _merges, _merges)
def test_the_rank_of_a_pair_is_its_place_among_the_merges(tokens: list[str], merges: list[str], hidden: Any) -> None:
    index = StringIndex(StringTable.of(tokens))
    for text in hidden:
        index.hide(text)
    pairs = [*itertools.product(["", "a", "b", "ab", "a ", "é", "\ud800"], repeat=2)]
    for first in range(3):
        for left, right in pairs:
            place = tokens.index(left + right) - first if left + right in tokens else -1
            expected = place if 0 <= place < len(merges) and merges[place] == f"{left} {right}" else None
            assert index.rank(StringTable.of(merges), first, left, right) == expected


@given(st.lists(st.text("ab ", max_size=4), max_size=8), _merges, _merges)
def test_the_first_merge_that_makes_no_token_is_found(tokens: list[str], merges: list[str], hidden: list[str]) -> None:
    index = StringIndex(StringTable.of(tokens))
    for text in hidden:
        index.hide(text)
    known = set(tokens) - set(hidden)
    unmade = [place for place, merge in enumerate(merges) if merge.replace(" ", "") not in known]
    assert index.first_unmade(StringTable.of(merges)) == (unmade[0] if unmade else None)
