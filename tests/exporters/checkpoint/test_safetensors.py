"""The reader of safetensors files: every type, and what breaks the format."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_safetensors
from numpy.testing import assert_array_equal

from edgeinfer.common.errors import ModelFileError
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.models.gguf import GGMLType

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def opened(folder: Path, header: bytes | dict[str, Any], data: bytes = bytes(24)) -> Checkpoint:
    """A checkpoint with this header, as it stands or as JSON, and these bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text("{}")
    return Checkpoint.open(folder)


def test_floats_of_every_width_are_read_row_by_row(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = rng.standard_normal((2, 5, 4)).astype(np.float32)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {
        "a": ("F32", weights),
        "b": ("F16", weights),
        "c": ("F64", weights.astype(np.float64)),
        "d": ("BF16", bits),
    }
    tensors |= {"i": ("I64", np.arange(6) - 3), "s": ("F32", np.array(2.5)), "e": ("F32", np.empty((0, 4)))}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names == list(tensors) and checkpoint.shape("a") == (2, 5, 4)
    assert_array_equal(checkpoint.floats("a"), weights)
    assert_array_equal(checkpoint.floats("c"), weights)
    assert_array_equal(checkpoint.floats("b"), weights.astype(np.float16).astype(np.float32))
    assert_array_equal(checkpoint.floats("d"), (bits.astype(np.uint32) << 16).view(np.float32))
    assert_array_equal(checkpoint.rows("b", 4, 7), checkpoint.floats("b").reshape(10, 4)[4:7])
    assert_array_equal(checkpoint.data("a", 9), weights[1, 4].view(np.uint8))
    assert checkpoint.integers("i").tolist() == [-3, -2, -1, 0, 1, 2]
    assert checkpoint.floats("s").shape == () and checkpoint.floats("s") == 2.5
    assert checkpoint.floats("e").shape == (0, 4)
    assert [checkpoint.type(name) for name in "abcd"] == [GGMLType.F32, GGMLType.F16, GGMLType.F32, GGMLType.BF16]
    with pytest.raises(ModelFileError, match="tensor i must be F32, F16, BF16, F64 or float8 .*: found I64"):
        checkpoint.rows("i", 0, 1)
    with pytest.raises(ModelFileError, match="tensor a must be integers: found F32"):
        checkpoint.integers("a")
    with pytest.raises(ModelFileError, match="tensor x is missing"):
        checkpoint.rows("x", 0, 1)


@pytest.mark.parametrize(
    "header, words",
    [
        ({"a": ENTRY, "b": ENTRY}, "tensor [ab] begins at byte .* overlaps another tensor"),
        ({"a": ENTRY | {"shape": [5], "data_offsets": [4, 24]}}, "tensor a begins at byte .* leaves a gap before it"),
        ({"a": ENTRY | {"shape": [5], "data_offsets": [0, 20]}}, "has 4 bytes behind the last tensor"),
        (
            {"a": ENTRY | {"data_offsets": [0, 28], "shape": [7]}},
            "tensor a ends at byte 28 of 24: the file is cut short",
        ),
        ({"a": ENTRY | {"shape": [2, 4]}}, r"tensor a F32 \(2, 4\) cannot have 24 bytes"),
        ({"a": ENTRY | {"shape": [-2, -3]}}, "tensor 'a': shape must be a list of up to 8 integers from 0 on"),
        ({"a": ENTRY | {"shape": [2.0, 3]}}, "shape must be a list"),
        ({"a": ENTRY | {"shape": [1] * 7 + [2, 3]}}, "shape must be a list of up to 8"),
        ({"a": ENTRY | {"shape": [2**62, 2**62, 0]}}, "cannot have 24 bytes"),
        ({"a": ENTRY | {"data_offsets": [24, 0]}}, "data_offsets must be two that rise"),
        ({"a": ENTRY | {"data_offsets": [0]}}, "data_offsets must be two that rise"),
        ({"a": ENTRY | {"data_offsets": [False, 24]}}, "data_offsets must be a list"),
        ({"a": ENTRY | {"dtype": "F31"}}, "tensor 'a': dtype must be one of .*: found 'F31'"),
        ({"a": [1]}, "tensor 'a' must be an object"),
        ({"__metadata__": 1, "a": ENTRY}, "__metadata__ must be an object"),
        (b"[]", "its header must begin with {"),
        (b'{"a": ', "no JSON"),
        (b'{"a": {"dtype": "F32"}, "a": {"dtype": "F16"}}', "the key 'a' stands there twice"),
        (b'{"a":' * 100_000, "no JSON"),
        (b'{"a": "\xff"}', "no JSON"),
        (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}", "no JSON"),
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused(header: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=words):
        opened(tmp_path, header)


def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path) -> None:
    assert opened(tmp_path, {"a": ENTRY}).shape("a") == (2, 3)
    for length in (2**63, 2**20, 200_000_000):
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(ModelFileError, match="cut short: its header is to have"):
            Checkpoint.open(tmp_path)


def test_a_pointer_of_git_lfs_is_told_as_such(tmp_path: Path) -> None:
    opened(tmp_path, {"a": ENTRY})
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelFileError, match="is a pointer of Git LFS, not the file itself"):
        Checkpoint.open(tmp_path)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, {"a": ENTRY})
    size = (tmp_path / "model.safetensors").stat().st_size
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(size - 4)
    with pytest.raises(ModelFileError, match=f"was {size} bytes when it was opened, and ends at {size - 4} now"):
        checkpoint.rows("a", 0, 2)
