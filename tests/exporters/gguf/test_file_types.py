"""Types of tensors in a file of a kind: those that llama.cpp chooses, on models of every architecture."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from llama_quantize import chosen_types
from parts import is_there, missing
from stretched import CASES, stretched_model

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.exporters.gguf.file_types import FILE_TYPES, file_type, file_type_number, source_types, tensor_types
from edgeinfer.exporters.source import open_source
from edgeinfer.models.gguf import GGMLType

TABLE = Path(__file__).parent / "llama_cpp_types.json"
MOST_TELLING = (("Q2_K", ""), ("Q3_K_M", ""), ("Q4_K_S", ""), ("Q4_K_M", ""), ("Q4_0", " imatrix"))
WITH_IMATRIX = ("Q4_0", "Q5_0", "Q4_K_M")  # the file types that it changes, and one that it does not


def ours(path: Path, name: str, has_imatrix: bool) -> dict[str, str]:
    with open_source(path) as source:
        types = tensor_types(FILE_TYPES[name], source.metadata, source.tensors, has_imatrix)
    return {tensor: type.name for tensor, type in types.items()}


def digest(types: dict[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{name} {types[name]}" for name in sorted(types)).encode()).hexdigest()[:12]


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_gets_the_type_that_llama_cpp_gave_it(case: str, tmp_path: Path) -> None:
    """The committed table was written by llama.cpp: python tests/exporters/gguf/test_file_types.py"""
    path = stretched_model(tmp_path / "m.gguf", case)
    expected = json.loads(TABLE.read_text())[case]
    found = {f"{name}{mark}": digest(ours(path, name, bool(mark))) for name, mark in kinds_of(case)}
    assert found == expected


@pytest.mark.parametrize("case", ["qwen2-96", "qwen3moe-8", "llama-4"])
def test_every_tensor_gets_the_type_that_llama_cpp_gives_it(case: str, tmp_path: Path) -> None:
    if not is_there("llama"):
        missing("llama", "llama-cpp-python is not installed")
    path = stretched_model(tmp_path / "m.gguf", case)
    for name, mark in kinds_of(case):
        assert theirs(path, name, bool(mark)) == ours(path, name, bool(mark))


def kinds_of(case: str) -> list[tuple[str, str]]:
    """File types, and a mark for those with an importance matrix: all of them for a case of each kind."""
    if case not in ("llama-256", "phi3-96", "qwen3moe-8"):
        return list(MOST_TELLING)
    return [(name, "") for name in FILE_TYPES] + [(name, " imatrix") for name in WITH_IMATRIX]


def theirs(path: Path, name: str, has_imatrix: bool) -> dict[str, str]:
    imatrix = {"blk.0.unused.weight": np.ones(1, np.float32)} if has_imatrix else None
    return chosen_types(path, FILE_TYPES[name].number, imatrix)


def test_without_a_type_tensors_keep_theirs(tmp_path: Path) -> None:
    path = stretched_model(tmp_path / "m.gguf", "gpt-oss-8")
    with open_source(path) as source:
        types = source_types(source.tensors)
        assert types == {tensor.name: tensor.type for tensor in source.tensors}
        assert file_type_number(types, source.tensors) == 1
        assert {types[t.name] for t in source.tensors if "ffn_gate_inp" in t.name or len(t.shape) == 1} == {
            GGMLType.F32
        }


def test_a_name_of_no_type_is_refused_with_those_that_there_are() -> None:
    assert file_type("q4_k") is FILE_TYPES["Q4_K_M"]
    with pytest.raises(InvalidArgument, match="there is no type 'Q4_X'; there are F32, F16, .* and auto"):
        file_type("Q4_X")


def write_table(folder: Path) -> None:
    """Let llama.cpp choose for all cases."""
    table = {}
    for case in CASES:
        path = stretched_model(folder / "m.gguf", case)
        table[case] = {f"{name}{mark}": digest(theirs(path, name, bool(mark))) for name, mark in kinds_of(case)}
    TABLE.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        write_table(Path(name))
