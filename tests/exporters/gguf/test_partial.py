"""Files that are written in parts: what is taken over of one that was stopped."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.exporters.gguf.partial import journal_path, partial_file, partial_path
from edgeinfer.exporters.gguf.writer import Tensor, layout, write_gguf
from edgeinfer.models.gguf import GGMLType

METADATA = {"general.architecture": "llama"}


def tensor(name: str, n: int, fails: bool = False) -> Tensor:
    """n numbers, whose bytes are no multiple of the alignment where n is odd."""

    def pieces() -> Iterator[np.ndarray]:
        if fails:
            raise OSError(5, "Input/output error")
        yield np.arange(n, dtype="<f4").view(np.uint8)

    return Tensor(name, GGMLType.F32, (n,), pieces)


def write(out: Path, tensors: list[Tensor], resume: bool = False, **identity: str) -> None:
    with partial_file(out, identity, layout(METADATA, tensors), resume) as partial:
        partial.write(tensors, lambda share: None)
        partial.finish()


def test_the_bytes_are_those_of_a_file_that_is_written_at_once(tmp_path: Path) -> None:
    tensors = [tensor("a", 5), tensor("b", 8), tensor("c", 3)]
    write_gguf(tmp_path / "whole.gguf", METADATA, tensors)
    write(tmp_path / "out.gguf", tensors)
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole.gguf", "out.gguf"}


def test_a_torn_line_of_the_journal_does_not_spoil_the_next(tmp_path: Path) -> None:
    out, names = tmp_path / "out.gguf", "abc"
    for n_done in (1, 2):  # stopped twice, the first time within a line
        with pytest.raises(OSError, match="--resume goes on there"):
            write(out, [tensor(name, 5, fails=n == n_done) for n, name in enumerate(names)], resume=True)
        lines = journal_path(out).read_text().splitlines()
        assert [json.loads(line).get("name") for line in lines] == [None, *names[:n_done]]
        journal_path(out).write_text("\n".join([*lines, '{"name": "c", "ty']))
    write(out, [tensor("a", 5, fails=True), tensor("b", 5, fails=True), tensor("c", 5)], resume=True)  # the last alone


@pytest.mark.parametrize("changed", [{"source": "another"}, {"imatrix": "another"}])
def test_what_was_made_of_something_else_is_refused_and_stays(changed: dict[str, str], tmp_path: Path) -> None:
    out, identity = tmp_path / "out.gguf", {"source": "one", "imatrix": "one"}
    with pytest.raises(OSError, match="--resume goes on there"):
        write(out, [tensor("a", 5), tensor("b", 5, fails=True)], **identity)
    before = partial_path(out).read_bytes()
    with pytest.raises(InvalidArgument, match=f"is of another export \\({next(iter(changed))} differs\\): remove it"):
        write(out, [tensor("a", 5), tensor("b", 5)], resume=True, **identity | changed)
    assert partial_path(out).read_bytes() == before


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("journal", [None, "", "my notes\n", "{}\n", "of another file"])
def test_a_file_that_no_export_wrote_stays(journal: str | None, resume: bool, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    if journal == "of another file":  # ours, but the bytes are not
        with pytest.raises(OSError, match="--resume goes on there"):
            write(out, [tensor("a", 500), tensor("b", 5, fails=True)])
        journal = journal_path(out).read_text()
    partial_path(out).write_bytes(b"mine" * 300)
    if journal is not None:
        journal_path(out).write_text(journal)
    with pytest.raises(InvalidArgument, match="no journal of an export .* belongs to it.*: move it or remove it"):
        write(out, [tensor("a", 500)], resume)
    assert partial_path(out).read_bytes() == b"mine" * 300 and not out.exists()
    assert not journal or journal_path(out).read_text() == journal


def test_what_an_export_left_is_begun_again_however_early_it_ended(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(OSError, match="--resume goes on there"):
        write(out, [tensor("a", 5), tensor("b", 5, fails=True)], source="another")
    left = partial_path(out).read_bytes()
    header = len(layout(METADATA, [tensor("a", 5), tensor("b", 5)]).header)
    for data in (left, left[: header // 2], b"", bytes(len(left))):
        partial_path(out).write_bytes(data)
        with pytest.raises(OSError, match="--resume goes on there"):
            write(out, [tensor("a", 7), tensor("b", 5, fails=True)])
    write(out, [tensor("a", 7)])
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
