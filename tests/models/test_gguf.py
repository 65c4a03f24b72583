"""The GGUF reader: what it reads, what it refuses and how it says so, split models, damaged files, `inspect`."""

import ctypes
import json
import math
import mmap
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf_mutations import mutations, read_layout
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny_model

from edgeinfer.cli.inspect import inspect
from edgeinfer.common.errors import EdgeInferError, InvalidArgument, InvalidGGUF, ModelFileError, ModelNotFound
from edgeinfer.models._strings import StringTable
from edgeinfer.models.arrays import Numbers, Strings
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.gguf_reader.header import Cursor, read_sound_tensor_info, read_tensor_info

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FUZZ = Path(__file__).parents[1] / "benchmarks" / "fuzz_gguf.py"


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, n: int, elements: bytes) -> bytes:
    return struct.pack("<IQ", kind, n) + elements


def tensor(name: str | bytes, *dims: int, kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    n = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n, *dims, kind, offset)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def document(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_kv: int | None = None,
) -> bytes:
    """A GGUF file: header, padding to 32 bytes, data."""
    keys, tensors = keys or [], tensors or []
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_kv is None else n_kv)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + (bytes(-len(header) % 32) + data if tensors else b"")


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    def write_and_open(content: bytes, name: str = "m.gguf") -> ModelFile:
        path = tmp_path / name
        path.write_bytes(content)
        return ModelFile.open(path)

    return write_and_open


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_metadata_of_every_type_becomes_plain_python_values(opened: Any) -> None:
    values = {
        "u8": (U8, "B", 255),
        "i8": (I8, "b", -1),
        "u16": (U16, "H", 65535),
        "i16": (I16, "h", -2),
        "u32": (U32, "I", 2**32 - 1),
        "i32": (I32, "i", -3),
        "u64": (U64, "Q", 2**64 - 1),
        "i64": (I64, "q", -(2**63)),
        "f32": (F32, "f", 0.5),
        "f64": (F64, "d", 1e300),
        "bool": (BOOL, "?", True),
    }
    keys = [key(name, kind, struct.pack(f"<{code}", value)) for name, (kind, code, value) in values.items()]
    keys += [
        key(f"{name}s", ARRAY, array(kind, 2, struct.pack(f"<2{code}", value, value)))
        for name, (kind, code, value) in values.items()
    ]
    keys += [key("text", STRING, text("Grüße \x00 你好")), key("texts", ARRAY, array(STRING, 2, text("") + text("é")))]
    keys += [key("none", ARRAY, array(I32, 0, b"")), key("no texts", ARRAY, array(STRING, 0, b""))]
    metadata = dict(opened(document(keys)).metadata)
    expected: dict[str, Any] = {name: value for name, (_, _, value) in values.items()}
    expected |= {f"{name}s": [value, value] for name, (_, _, value) in values.items()}
    expected |= {"text": "Grüße \x00 你好", "texts": ["", "é"], "none": [], "no texts": []}
    assert metadata == expected
    assert {name: type(metadata[name]) for name in values} == {name: type(expected[name]) for name in values}
    assert [type(metadata[f"{name}s"][0]) for name in values] == [type(metadata[name]) for name in values]
    assert [type(next(iter(metadata[f"{name}s"]))) for name in values] == [type(metadata[name]) for name in values]
    assert {type(metadata[f"{name}s"]) for name in values} == {Numbers} and type(metadata["no texts"]) is Strings


def test_tensors_have_numpy_shapes_absolute_offsets_and_their_bytes(opened: Any) -> None:
    data = np.arange(6, dtype="<f4").tobytes().ljust(32, b"\0") + bytes(range(68))
    model = opened(document([], [tensor("m", 3, 2), tensor("q", 32, 2, kind=GGMLType.Q8_0, offset=32)], data))
    m, q = model.tensors["m"], model.tensors["q"]
    assert (m.shape, m.type, m.offset, m.n_bytes, m.part, m.n_elements) == ((2, 3), GGMLType.F32, 128, 24, 0, 6)
    assert (q.shape, q.type, q.offset, q.n_bytes) == ((2, 32), GGMLType.Q8_0, 160, 68)
    assert model.data("m").view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert model.data("q").tolist() == list(range(68))


def test_the_alignment_of_the_file_moves_the_data(opened: Any) -> None:
    header = document([key("general.alignment", U32, u32(8))], [tensor("a tensor", 1)])[:97]
    model = opened(header + bytes(7) + struct.pack("<f", 7.0))
    assert model.data("a tensor").view("<f4").tolist() == [7.0] and model.tensors["a tensor"].offset == 104


def test_version_2_is_read_and_an_empty_model_too(opened: Any) -> None:
    model = opened(document([key("a", U8, b"\1")], version=2))
    assert model.metadata == {"a": 1} and model.tensors == {}


def test_long_and_many_strings_come_back_whole(opened: Any) -> None:
    texts = ["x" * (3 << 20), *(f"token {index} é" for index in range(70000)), "", "y" * (2 << 20), "z"]
    content = document([key("t", ARRAY, array(STRING, len(texts), b"".join(map(text, texts)))), key("u", U8, b"\1")])
    assert opened(content).metadata == {"t": texts, "u": 1}


def outcome(read: Callable[[Cursor], object], content: bytes) -> tuple[object, int | None]:
    """What is read, or the refusal, and where the cursor then stands."""
    cursor = Cursor(Path("m.gguf"), np.array(list(content), np.uint8))
    try:
        return read(cursor), cursor.at
    except InvalidGGUF as error:
        return str(error), None


_ODD = [b"\xc3(", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xa9", b"\xc0\x80", b"\xff" * 9]
_texts = st.one_of(st.text(max_size=20).map(str.encode), st.sampled_from([b"", b"x" * 300, "日本語".encode(), *_ODD]))


@settings(max_examples=500)
@given(st.lists(_texts, max_size=12), st.integers(0, 40), st.integers(0, 14), st.data())
def test_strings_are_read_the_same_in_bulk_and_one_by_one(texts: list[bytes], cut: int, n: int, data: Any) -> None:
    content = bytearray(b"".join(map(text, texts)))[: -cut or None]
    for at in data.draw(st.lists(st.integers(0, max(len(content) - 1, 0)), max_size=2)):
        content[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
    one_by_one = outcome(
        lambda cursor: [cursor.string(f"t[{index}]", errors="surrogateescape") for index in range(n)], bytes(content)
    )
    assert outcome(lambda cursor: cursor.strings(n, "t"), bytes(content)) == one_by_one


@settings(max_examples=500)
@given(st.integers(0, 5), st.lists(st.integers(0, 3), min_size=5, max_size=5), st.integers(0, 45), st.data())
def test_a_tensor_is_read_the_same_fast_and_field_by_field(n_dims: int, dims: Any, code: int, data: Any) -> None:
    dims = [data.draw(st.sampled_from([0, 1, 32, 256, 2**24, 2**47, 2**64 - 1])) if dim == 3 else 256 for dim in dims]
    entry = tensor("", *dims[:n_dims], kind=code, offset=96)[8:]
    entry = entry[: len(entry) - data.draw(st.sampled_from([0, 0, 1, 12, 13, 40]))]
    strictly = outcome(lambda cursor: read_tensor_info(cursor, "t"), entry)
    fast = outcome(read_sound_tensor_info, entry)
    assert fast == (strictly if strictly[1] is not None else (None, 0))


def test_what_is_not_utf_8_among_many_strings_is_told_by_its_place(opened: Any) -> None:
    texts = [b"token"] * 5000
    texts[4321] = b"to\xffen"
    with pytest.warns(RuntimeWarning, match=r"t'? value\[4321\] is no UTF-8$"):
        model = opened(document([key("t", ARRAY, array(STRING, len(texts), b"".join(map(text, texts))))]))
    assert (
        model.metadata["t"][4321] == "to\udcffen" and model.metadata["t"].joined_by("")[5 * 4321 :][:5] == b"to\xffen"
    )


def test_strings_that_change_while_they_are_read_are_refused(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(read=lambda *arguments: StringTable.of([]))
    monkeypatch.setattr("edgeinfer.models.gguf_reader.header.StringTable", seen)
    with pytest.raises(InvalidGGUF, match=r"value\[0\] at byte 49: changed while"):
        opened(of_array_a(STRING, 1, text("a")))


def test_block_sizes_are_those_of_llama_cpp(llama_cpp: ModuleType) -> None:
    folder = Path(str(llama_cpp.__file__)).parent / "lib"
    ggml = ctypes.CDLL(str(next(folder.glob("libggml-base.*"))))
    for function in (ggml.ggml_blck_size, ggml.ggml_type_size):
        function.restype = ctypes.c_size_t
    types = set(GGMLType) - {GGMLType.I2_S}  # bitnet.cpp's own
    theirs = {kind: (ggml.ggml_blck_size(int(kind)), ggml.ggml_type_size(int(kind))) for kind in types}
    assert {kind: (kind.block_elements, kind.block_bytes) for kind in types} == theirs


def test_the_scale_of_an_i2_s_tensor_stands_after_its_blocks() -> None:
    assert GGMLType.I2_S.n_bytes(3 * 128) == 3 * 32 + 32
    assert GGMLType.TQ2_0.n_bytes(3 * 256) == 3 * 66


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    theirs = {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items() if kind.name != "Q8_1"}  # an old one
    assert {name: (GGMLType[name].block_elements, GGMLType[name].block_bytes) for name in theirs} == theirs


# ---- what is refused -------------------------------------------------------------------------------------------------


# The first key starts at byte 24; named "a", its type is at 33 and its value at 37; an array's length is at 41 and its
# elements at 49. Without keys, tensor "t" has n_dims at 33 and dimensions from 37; with one, its type is at 45, its
# offset at 49 and the data at 64.
def of_a(kind: int, value: bytes) -> bytes:
    return document([key("a", kind, value)])


def of_array_a(kind: int, n: int, elements: bytes) -> bytes:
    return of_a(ARRAY, array(kind, n, elements))


def aligned(kind: int, alignment: int) -> bytes:
    return document([key("general.alignment", kind, u32(alignment))])


def of_tensors(*tensors: bytes, n_bytes: int = 64) -> bytes:
    return document([], list(tensors), bytes(n_bytes))


OVERLAP = of_tensors(tensor("u", 8, offset=32), tensor("t", 16))
REFUSED: dict[str, tuple[bytes, str, int, str]] = {
    "empty": (b"", "magic", 0, "empty"),
    "another format": (document(magic=b"PK\3\4"), "magic", 0, "not a GGUF file"),
    "shorter than the magic": (b"GG", "magic", 0, "ends at 2"),
    "version 1": (document(version=1), "version", 4, "no longer read"),
    "big-endian": (document(version=0x03000000), "version", 4, "big-endian"),
    "version 4": (document(version=4), "version", 4, "2 or 3: found 4"),
    "cut in the version": (document()[:6], "version", 4, "ends at 6"),
    "too many tensors": (document(n_tensors=65537), "n_tensors", 8, "at most 65536"),
    "too many keys": (document(n_kv=2**64 - 1), "n_kv", 16, "at most 65536"),
    "fewer keys than declared": (document(n_kv=1), "key 0 length", 24, "ends at 24"),
    "key of 64 KiB": (document([u64(65536)]), "key 0 length", 24, "at most 65535"),
    "key past the end": (document([u64(100)]), "key 0", 32, "needs 100 bytes"),
    "empty key": (document([key("", U8, b"\1")]), "key 0", 24, "must not be empty"),
    "key twice": (document([key("a", U8, b"\1"), key("a", U8, b"\1")]), "key 1", 38, "'a' occurs twice"),
    "unknown value type": (of_a(13, b"\1"), "key 'a' type", 33, "0..12: found 13"),
    "cut in a value": (of_a(U32, b"\1"), "key 'a' value", 37, "needs 4 bytes"),
    "string over 16 MiB": (of_a(STRING, u64(1 + (16 << 20))), "key 'a' value length", 37, "at most 16777216"),
    "string past the end": (of_a(STRING, u64(5) + b"1234"), "key 'a' value", 45, "ends"),
    "array in an array": (of_array_a(ARRAY, 1, bytes(16)), "key 'a' value element type", 37, "nested"),
    "array of an unknown type": (of_array_a(99, 1, b"\1"), "key 'a' value element type", 37, "found 99"),
    "array of 2^63": (of_array_a(U32, 2**63, b""), "key 'a' value length", 41, "at most 4194304"),
    "array past the end": (of_array_a(U32, 3, bytes(8)), "key 'a' value", 49, "needs 12 bytes"),
    "more strings than bytes": (of_array_a(STRING, 4, bytes(31)), "key 'a' value length", 41, "do not fit"),
    "element past the end": (of_array_a(STRING, 2, text("b") + u64(9)), "key 'a' value[1]", 66, "ends"),
    "alignment as INT32": (aligned(I32, 32), "key 'general.alignment' type", 49, "found INT32"),
    "alignment of 48": (aligned(U32, 48), "key 'general.alignment' value", 53, "power of two"),
    "alignment of 4": (aligned(U32, 4), "key 'general.alignment' value", 53, "8..1048576: found 4"),
    "alignment of 0": (aligned(U32, 0), "key 'general.alignment' value", 53, "8..1048576: found 0"),
    "alignment of 2 MiB": (aligned(U32, 2 << 20), "key 'general.alignment' value", 53, "8..1048576: found 2097152"),
    "fewer tensors than declared": (document(n_tensors=1), "tensor 0 name length", 24, "ends at 24"),
    "tensor without a name": (of_tensors(tensor("", 1)), "tensor 0 name", 24, "empty"),
    "tensor twice": (of_tensors(tensor("t", 1), tensor("t", 1)), "tensor 1 name", 57, "'t' occurs twice"),
    "no dimension": (of_tensors(tensor("t")), "tensor 't' n_dims", 33, "1..4: found 0"),
    "five dimensions": (of_tensors(tensor("t", 1, 1, 1, 1, 1)), "tensor 't' n_dims", 33, "1..4: found 5"),
    "dimension of 0": (of_tensors(tensor("t", 1, 0)), "tensor 't' dim 1", 45, "at least 1"),
    "2^48 elements": (of_tensors(tensor("t", 2**24, 2**24)), "tensor 't' dim 1", 45, "2^48"),
    "product that wraps": (of_tensors(tensor("t", 2**32, 2**32)), "tensor 't' dim 1", 45, "2^48"),
    "unknown tensor type": (of_tensors(tensor("t", 1, kind=4)), "tensor 't' type", 45, "4 is unknown"),
    "tensor type of a fork": (of_tensors(tensor("t", 1, kind=135)), "tensor 't' type", 45, "135 is IQ2_BN of ik_llama"),
    "half a block": (of_tensors(tensor("t", 48, kind=GGMLType.Q4_0)), "tensor 't' dim 0", 37, "of the 32"),
    "offset off the alignment": (of_tensors(tensor("t", 1, offset=4)), "tensor 't' offset", 49, "of 32"),
    "tensor past the end": (of_tensors(tensor("t", 17)), "tensor 't' offset", 49, "64..132 lie outside"),
    "offset that wraps": (of_tensors(tensor("t", 1, offset=2**64 - 32)), "tensor 't' offset", 49, "lie outside"),
    "overlap": (of_tensors(tensor("t", 16), tensor("u", 8, offset=32)), "tensor 'u' offset", 82, "those of tensor 't'"),
    "overlap in another order": (OVERLAP, "tensor 'u' offset", 49, "those of tensor 't'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_broken_rule_is_told_by_field_and_byte(case: str, opened: Any) -> None:
    content, field, offset, reason = REFUSED[case]
    with pytest.raises(InvalidGGUF) as refused:
        opened(content)
    assert (refused.value.field, refused.value.offset) == (field, offset)
    assert reason in refused.value.reason and str(refused.value).endswith(refused.value.reason)
    assert refused.value.exit_code == 3


def test_tensors_may_touch_and_may_leave_gaps(opened: Any) -> None:
    model = opened(document([], [tensor("u", 8, offset=96), tensor("t", 8), tensor("v", 8, offset=32)], bytes(128)))
    assert list(model.tensors) == ["u", "t", "v"]


# What llama.cpp loads without a word.
@pytest.mark.parametrize(
    "content, value",
    [
        (of_a(STRING, text("Modèle".encode("latin-1"))), "Mod\ufffdle"),
        (of_a(STRING, text(b"1\xc3(")), "1\ufffd("),
        (of_array_a(STRING, 2, text("b") + text(b"c\xff")), ["b", "c\udcff"]),
    ],
)
def test_a_text_that_is_no_utf_8_is_read_with_a_warning(content: bytes, value: Any, opened: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"m.gguf: key 'a' value.* is no UTF-8$"):
        assert opened(content).metadata["a"] == value


def test_a_key_that_is_no_utf_8_is_read_with_a_warning(opened: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"key 0 is no UTF-8, and so are 1 more$"):
        model = opened(document([key(b"ab\xff", STRING, text(b"\xe9")), key("b", U8, b"\1")]))
    assert dict(model.metadata) == {"ab\\xff": "\ufffd", "b": 1}


def test_a_tensor_whose_name_is_no_utf_8_is_refused(opened: Any) -> None:
    with pytest.raises(InvalidGGUF, match="tensor 0 name at byte 33: must be UTF-8"):
        opened(of_tensors(tensor(b"t\xff", 1)))


def test_numbers_that_are_none_are_read(opened: Any) -> None:
    nan = opened(of_a(F32, struct.pack("<f", math.nan))).metadata["a"]
    assert isinstance(nan, float) and math.isnan(nan)
    assert opened(of_a(F64, struct.pack("<d", -math.inf))).metadata["a"] == -math.inf
    assert math.isnan(opened(of_array_a(F32, 2, struct.pack("<2f", -math.inf, math.nan))).metadata["a"][1])


def test_a_truth_value_is_true_unless_it_is_0(opened: Any) -> None:
    assert opened(of_a(BOOL, b"\2")).metadata["a"] is True
    assert opened(of_array_a(BOOL, 3, b"\1\2\0")).metadata["a"] == [True, True, False]


def test_infinite_scores_are_read(opened: Any) -> None:
    assert opened(document([key("a", ARRAY, array(F32, 1, struct.pack("<f", -math.inf)))])).metadata["a"] == [-math.inf]


def test_metadata_without_end_is_refused(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.models.gguf_reader.header.MAX_HEADER_BYTES", 1 << 10)
    with pytest.raises(InvalidGGUF, match="a header may end at 1024"):
        opened(of_array_a(U8, 2000, bytes(2000)))


def test_a_declared_length_costs_no_memory(opened: Any) -> None:
    content = document([key("a.b", ARRAY, array(U32, 2**63, b""))])  # gguf-py takes gigabytes and minutes for this one
    tracemalloc.start()
    with pytest.raises(InvalidGGUF):
        opened(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_control_characters_in_names_do_not_reach_the_message(opened: Any) -> None:
    with pytest.raises(InvalidGGUF) as refused:
        opened(document([key("\x1b[2J\x07" + "k" * 200, 13, b"")]))
    assert "\x1b" not in str(refused.value) and "\x07" not in str(refused.value) and len(refused.value.field) < 120


# ---- files that are not there ----------------------------------------------------------------------------------------


def test_a_missing_file_is_told_with_what_its_folder_has(tmp_path: Path) -> None:
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"no such file; its folder has other\.gguf"):
        ModelFile.open(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFound, match="there is no folder"):
        ModelFile.open(tmp_path / "nowhere" / "m.gguf")
    with pytest.raises(InvalidArgument, match="null"):
        ModelFile.open("m\0.gguf")


def test_a_folder_a_pipe_and_a_dead_link_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"is a folder with a\.gguf"):
        ModelFile.open(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelNotFound, match="not a regular file"):
        ModelFile.open(tmp_path / "pipe.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "gone.gguf")
    with pytest.raises(ModelNotFound, match=r"is a link to .*gone\.gguf, which does not exist"):
        ModelFile.open(tmp_path / "link.gguf")
    with pytest.raises(ModelFileError, match="Not a directory"):
        ModelFile.open(tmp_path / "a.gguf" / "b.gguf")


# ---- the mapping -----------------------------------------------------------------------------------------------------


def test_data_is_a_read_only_view_of_the_file(opened: Any) -> None:
    model = opened(document([], [tensor("t", 1)], struct.pack("<f", 1.0)))
    data = model.data("t")
    assert not data.flags.writeable and not data.flags.owndata
    with model.path.open("r+b") as file:
        file.seek(model.tensors["t"].offset)
        file.write(struct.pack("<f", 2.0))
    assert data.view("<f4")[0] == 2.0


def test_arrays_outlive_the_closed_file_and_the_file_says_that_it_is_closed(opened: Any) -> None:
    model = opened(document([], [tensor("t", 1)], struct.pack("<f", 1.0)))
    with model:
        data = model.data("t")
    model.close()
    assert data.view("<f4")[0] == 1.0 and model.tensors["t"].shape == (1,)
    for closed in (model.data, model.release):
        with pytest.raises(EdgeInferError, match="closed"):
            closed("t")


def mapped_and_resident_bytes(path: Path) -> tuple[int, int]:
    """(mapped, resident) bytes of this process's mappings of the file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    size = resident = 0
    for line in lines:
        if line.endswith(str(path)):
            size += int(next(lines).split()[1]) << 10
            resident += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))
    return size, resident


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_released_tensors_do_not_stay_resident_and_can_be_read_again(opened: Any) -> None:
    n = 16 << 20
    tensors = [tensor("t", n, kind=GGMLType.I8), tensor("u", 1, offset=n)]
    with opened(document([], tensors, bytes(n) + b"\1" * 4)) as model:
        n_read = int(model.data("t").sum(dtype=np.int64)) + n
        assert mapped_and_resident_bytes(model.path)[1] >= n_read
        model.release("t")
        # The pages at the edges may stay, as they hold more than this tensor.
        assert mapped_and_resident_bytes(model.path)[1] <= 2 * mmap.PAGESIZE
        model.release("u")  # less than a page: its page may be another tensor's
        assert model.data("t")[-1] == 0 and model.data("u").tolist() == [1, 1, 1, 1]
    assert mapped_and_resident_bytes(model.path) == (0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_what_the_system_maps_around_a_tensor_goes_with_it(opened: Any) -> None:
    each, n = 1 << 20, 24
    tensors = [tensor(f"t{i}", 64, offset=i * each) for i in range(n)]
    with opened(document([], tensors, bytes((n - 1) * each + 4 * 64))) as model:
        for i in range(0, n, 2):
            assert not model.data(f"t{i}").any()
            model.release(f"t{i}")
        assert mapped_and_resident_bytes(model.path)[1] <= 2 * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_the_header_does_not_stay_resident(opened: Any) -> None:
    with opened(of_a(STRING, text("x" * (4 << 20)))) as model:
        mapped, resident = mapped_and_resident_bytes(model.path)
        assert mapped > 4 << 20 and resident <= mmap.PAGESIZE


# ---- split models ----------------------------------------------------------------------------------------------------


def split_part(
    index: int, count: int = 3, total: int = 3, name: str | None = None, more: list[bytes] | None = None
) -> bytes:
    keys = [key("split.count", U16, struct.pack("<H", count)), key("split.no", U16, struct.pack("<H", index))]
    keys += [key("split.tensors.count", I32, struct.pack("<i", total)), *(more or [])]
    return document(keys, [tensor(name or f"t{index}", 2)], struct.pack("<2f", index, -index))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three files of a model that is sound."""
    paths = [tmp_path / f"m-{index + 1:05d}-of-00003.gguf" for index in range(3)]
    for index, path in enumerate(paths):
        more = [key("general.name", STRING, text("whole"))] if index == 0 else []
        path.write_bytes(split_part(index, more=more))
    return paths


@pytest.mark.parametrize("asked_for", range(3))
def test_any_file_of_a_split_model_opens_all_of_them(parts: list[Path], asked_for: int) -> None:
    with ModelFile.open(parts[asked_for]) as model:
        assert (model.path, model.paths) == (parts[asked_for], tuple(parts))
        assert model.metadata["general.name"] == "whole" and model.metadata["split.no"] == 0
        assert model.n_bytes == sum(path.stat().st_size for path in parts)
        assert {name: info.part for name, info in model.tensors.items()} == {"t0": 0, "t1": 1, "t2": 2}
        for index in range(3):
            assert model.data(f"t{index}").view("<f4").tolist() == [index, -index]
            model.release(f"t{index}")


def test_a_missing_file_of_a_split_model_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelNotFound, match=r"m-00002-of-00003\.gguf: file 2 of 3 of the split model is missing"):
        ModelFile.open(parts[0])


OTHER_MODEL = [key("general.architecture", STRING, text("x"))]
COUNT_AS_TEXT = [key("split.count", STRING, text("3"))]
UNSPLIT = document([], [tensor("t1", 1)], bytes(4))
BROKEN_SPLITS: dict[str, tuple[int, bytes, str, str]] = {  # index of the file, its content, field, reason
    "same file twice": (2, split_part(1), "key 'split.no' value", "must be 2: found 1"),
    "of another split": (1, split_part(1, count=4), "key 'split.count' value", "must be 3: found 4"),
    "not split at all": (1, UNSPLIT, "key 'split.count' value", "must be 3: found None"),
    "of another model": (1, split_part(1, more=OTHER_MODEL), "key 'general.architecture' value", "the same"),
    "another total": (1, split_part(1, total=4), "key 'split.tensors.count' value", "the same"),
    "tensor in two files": (1, split_part(1, name="t0"), "tensor 't0'", "m-00001-of-00003.gguf too"),
    "damaged": (2, b"GGUF", "version", "ends at 4"),
    "beyond the last": (0, split_part(3), "key 'split.no' value", "less than split.count, 3: found 3"),
    "in the place of another": (0, split_part(1), "key 'split.no' value", "its name must be NAME-00002-of-00003.gguf"),
    "count that is no number": (0, document(COUNT_AS_TEXT), "key 'split.count' value", "integer"),
}


@pytest.mark.parametrize("case", BROKEN_SPLITS)
def test_files_that_do_not_belong_together_are_refused(parts: list[Path], case: str) -> None:
    index, content, field, reason = BROKEN_SPLITS[case]
    parts[index].write_bytes(content)
    with pytest.raises(InvalidGGUF) as refused:
        ModelFile.open(parts[0])
    assert refused.value.field == field and reason in refused.value.reason
    assert str(refused.value).startswith(str(parts[index]))


def test_a_total_that_no_file_holds_is_refused(parts: list[Path]) -> None:
    for index, path in enumerate(parts):
        path.write_bytes(split_part(index, total=4))
    with pytest.raises(InvalidGGUF, match="is 4, but the 3 files hold 3 tensors"):
        ModelFile.open(parts[0])


def test_a_renamed_file_of_a_split_model_is_told_its_name(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(InvalidGGUF, match=r"its name must be NAME-00001-of-00003\.gguf"):
        ModelFile.open(renamed)


# ---- real models -----------------------------------------------------------------------------------------------------


def test_the_default_model_reads_as_it_is_known_to_be(default_model: Path) -> None:
    with ModelFile.open(default_model) as model:
        tokens, embedding = model.metadata["tokenizer.ggml.tokens"], model.tensors["token_embd.weight"]
        assert isinstance(tokens, Strings) and len(tokens) == 49152 and tokens[1] == "<|im_start|>"
        assert model.metadata["general.architecture"] == "llama" and model.metadata["llama.block_count"] == 30
        assert len(model.tensors) == 272 and embedding.shape == (49152, 576)
        assert model.paths == (default_model,) and model.n_bytes == default_model.stat().st_size
        last = max(model.tensors.values(), key=lambda info: info.offset)
        assert last.offset + last.n_bytes == model.n_bytes


@pytest.mark.parametrize("architecture, vocabulary", [("llama", "spm"), ("qwen2", "bpe"), (None, None)])
def test_everything_equals_what_the_gguf_package_reads(
    architecture: Any, vocabulary: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if architecture is None:
        path: Path = request.getfixturevalue("default_model")
    else:
        path = write_tiny_model(tmp_path / "m.gguf", architecture, "Q5_K", vocabulary=vocabulary)
    reader = gguf.GGUFReader(path)
    with ModelFile.open(path) as model:
        theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert dict(model.metadata) == theirs
        assert list(model.tensors) == [info.name for info in reader.tensors]
        for info in reader.tensors:
            ours = model.tensors[info.name]
            assert (ours.offset, ours.n_bytes, ours.n_elements) == (info.data_offset, info.n_bytes, info.n_elements)
            assert ours.shape == tuple(info.shape.tolist()[::-1]) and ours.type.name == info.tensor_type.name
            assert np.array_equal(model.data(info.name), info.data.view(np.uint8).reshape(-1))


# ---- damaged files ---------------------------------------------------------------------------------------------------


def test_the_mutations_know_where_the_fields_lie(default_model: Path) -> None:
    data = default_model.read_bytes()
    layout = read_layout(data)
    with ModelFile.open(default_model) as model:
        assert list(layout.entries) == list(model.metadata)
        assert layout.data_start == min(info.offset for info in model.tensors.values())
        assert layout.data_end == len(data)
        offset = layout.of("output_norm.weight", "tensor offset").at(data)
        assert layout.data_start + offset == model.tensors["output_norm.weight"].offset


def test_mutations_are_the_same_for_a_seed_and_differ_from_the_file(tmp_path: Path) -> None:
    data = write_tiny_model(tmp_path / "m.gguf", "llama", "Q4_0", n_embd=64, n_layers=1).read_bytes()
    first, again, other = (list(mutations(data, 120, seed)) for seed in (1, 1, 2))
    assert first == again and first != other and len(first) == 120
    assert sum(mutation.data == data for mutation in first) < 5


def test_200_damaged_files_load_soundly_or_are_refused() -> None:
    run = subprocess.run([sys.executable, FUZZ, "--cases", "200"], capture_output=True, text=True, timeout=300)
    result = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0 and result["faults"] == [], run.stderr
    assert result["cases"] == 200 and result["max_peak_mib"] <= 256


# ---- edgeinfer inspect -----------------------------------------------------------------------------------------------


def inspected(path: Path, *flags: str) -> str:
    run = CliRunner().invoke(inspect, [str(path), *flags], catch_exceptions=False, color=True)  # as on a terminal
    assert run.exit_code == 0
    return run.stdout


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    hostile = {"general.license": "\x1b]0;owned\x07 \x9b2J\x7f\u202e\nfree", "x\x1b[2J": "y" * 500}
    return write_tiny_model(folder / "m.gguf", "llama", "Q4_0", types={"attn_v": "F16"}, metadata=hostile)


def test_inspect_prints_the_figures_of_the_file(tiny: Path) -> None:
    fields = dict(line.split(None, 1) for line in inspected(tiny).splitlines())
    assert fields["architecture"] == "llama" and fields["name"] == "tiny llama Q4_0"
    assert "context length  512" in inspected(tiny) and "chat template   yes" in inspected(tiny)
    assert fields["tokenizer"] == "gpt2, pre-tokeniser gpt-2, 291 tokens"
    assert fields["Q4_0"].startswith("14 tensors") and fields["F16"].startswith("2 tensors")


def test_inspect_json_is_one_document_with_the_same_figures(tiny: Path) -> None:
    document = json.loads(inspected(tiny, "--json", "--tensors", "--metadata"))
    with ModelFile.open(tiny) as model:
        assert document["n_parameters"] == sum(info.n_elements for info in model.tensors.values())
        assert document["file_bytes"] == tiny.stat().st_size
        for figure in ("n_bytes", "n_tensors"):
            expected = document["tensor_bytes"] if figure == "n_bytes" else len(model.tensors)
            assert sum(of_type[figure] for of_type in document["tensor_types"].values()) == expected
        assert document["license"] == model.metadata["general.license"]
        assert [info["name"] for info in document["tensors"]] == list(model.tensors)
        assert document["tensors"][0]["shape"] == list(next(iter(model.tensors.values())).shape)
        assert document["metadata"].keys() == model.metadata.keys()
        assert document["metadata"]["tokenizer.ggml.tokens"]["n_elements"] == 291
        assert document["tokenizer"]["n_tokens"] == 291 and document["has_chat_template"] is True


@pytest.mark.parametrize("flags", [(), ("--tensors", "--metadata"), ("--json", "--metadata")])
def test_inspect_lets_no_control_character_through(tiny: Path, flags: tuple[str, ...]) -> None:
    shown = inspected(tiny, *flags)
    assert "free" in shown
    assert not {code for code in map(ord, shown) if code < 32 and code != 10 or 127 <= code < 160 or code == 0x202E}


def test_inspect_lists_tensors_and_cuts_long_values(tiny: Path) -> None:
    lines = inspected(tiny, "--tensors", "--metadata").splitlines()
    assert sum(line.startswith("blk.1.attn_v.weight ") and " F16 " in line for line in lines) == 1
    assert [line for line in lines if line.startswith("tokenizer.ggml.tokens = [291] ")]
    assert max(map(len, lines[1:])) < 140 and not any("y" * 100 in line for line in lines)


def test_inspect_shows_what_is_no_number_and_no_utf_8_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    number, texts = struct.pack("<f", math.nan), array(STRING, 2, text(b"a") + text(b"b\xff"))
    path.write_bytes(document([key("some.number", F32, number), key("some.texts", ARRAY, texts)]))
    run = CliRunner().invoke(inspect, [str(path), "--metadata"])
    assert "some.number = nan" in run.stdout and "some.texts = [2] a, b?" in run.stdout
    assert "'some.texts' value[1] is no UTF-8" in run.stderr and "RuntimeWarning" not in run.stderr
    run = CliRunner().invoke(inspect, [str(path), "--metadata", "--json"])
    assert json.loads(run.stdout)["metadata"] == {"some.number": "nan", "some.texts": ["a", "b\udcff"]}


def test_inspect_shows_odd_files_too(opened: Any) -> None:
    keys = [
        key("general.architecture", ARRAY, array(U8, 20, bytes(20))),
        key("scores", ARRAY, array(F32, 2, struct.pack("<2f", -math.inf, 0.5))),
    ]
    model = opened(document(keys, [tensor("t\x1b[2J\n", 1)], bytes(4)))
    shown = inspected(model.path, "--tensors")
    assert "license         -" in shown and "\x1b" not in shown and "[2J\\n " in shown
    read = json.loads(inspected(model.path, "--json", "--metadata"))
    assert read["architecture"] == {"n_elements": 20, "first": [0] * 16}
    assert read["metadata"]["scores"] == ["-inf", 0.5] and read["n_ctx_train"] is None
