"""Folders for boards: what was written is read, and every fault has a message of its own."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.common.errors import BadBoardFolder, ShapeError
from edgeinfer.common.files import file_sha256
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.hls.files.golden import products
from edgeinfer.hls.files.integrity import check_folder, faults_of
from edgeinfer.hls.files.manifest import Part
from edgeinfer.hls.files.writer import BoardWriter, write_folder
from edgeinfer.hls.geometry import Geometry

SHAPES = {"layers.0.qkv": (37, 83), "layers.0.o": (64, 160)}


def trits_of(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).integers(-1, 2, SHAPES[name]).astype(np.int8)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    with BoardWriter(folder, Geometry("base3", 4, 16)) as writer:
        parts = [Part("blk.0.attn_q.weight", 0, 30), Part("blk.0.attn_v.weight", 30, 37)]
        writer.add_matrix("layers.0.qkv", trits_of("layers.0.qkv"), np.arange(37), "qkv", 0, parts, n_golden=5)
        writer.add_matrix("layers.0.o", trits_of("layers.0.o"), 0.25, "o", 0, n_golden=2)
        writer.add_array("norms.bin", "layers.0.attn_norm", np.arange(3, dtype=np.float32))
        writer.add_rows("embed.bin", "embed", "<i2", (4, 2), (np.full((2, 2), n) for n in (1, 2)))
        writer.finish({"model": {"n_layers": 1, "norm_epsilon": 1e-5, "name": 'a "b"', "rope": {"kind": "halves"}}})
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "board"))


def test_what_was_written_is_read(written: Path) -> None:
    folder = check_folder(written)
    for name in SHAPES:
        assert np.array_equal(folder.trits(name), trits_of(name))
    assert (
        folder.scales("layers.0.qkv").tolist() == list(range(37))
        and folder.scales("layers.0.o").tolist() == [0.25] * 64
    )
    assert folder.padded_scales("layers.0.qkv").tolist()[37:] == [0, 0, 0]
    assert folder.array("layers.0.attn_norm").tolist() == [0, 1, 2]
    assert folder.array("embed").tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]
    assert [part.last for part in folder.tensors["layers.0.qkv"].parts] == [30, 37]


def test_golden_vectors_are_exact_and_extreme(written: Path) -> None:
    for golden in BoardFolder.open(written).golden():
        trits = trits_of(golden.tensor.name).astype(np.int64)
        assert np.array_equal(golden.y, golden.x.astype(np.int64) @ trits.T)
        assert (golden.x[0] == -128).all()
        assert golden.y[1, 0] == (trits[0] == 1).sum() * 127 + (trits[0] == -1).sum() * 128


def test_products_of_many_inputs_are_exact() -> None:
    trits = np.ones((2, 140_001), dtype=np.int8)  # float32 does not hold such odd sums
    trits[1, 0] = -1
    x = np.full((1, 140_001), -127, dtype=np.int8)
    assert products(trits, x).tolist() == [[-17_780_127, -17_779_873]]


def test_the_same_matrices_give_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_folder(tmp_path / name, Geometry("g3x5", 16, 4, 2), {"o": (trits_of("layers.0.o"), 1)})
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 8 and {file_sha256(tmp_path / "a" / file) for file in files} == {
        file_sha256(tmp_path / "b" / file) for file in files
    }
    assert np.array_equal(check_folder(tmp_path / "b").trits("o"), trits_of("layers.0.o"))


def test_headers_are_c_and_cpp(written: Path, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source = tmp_path / "a.cpp"
    source.write_text(
        '#define EI_TABLES_HERE\n#include "config.hpp"\n'
        'static_assert(edgeinfer_model::qkv::kOutputs == 37 && edgeinfer_model::kTrits == 5, "");\n'
        "int main() { return ei_tensors[1].n_in - 160 + EI_N_LAYERS - 1 + (ei_arrays[1].bytes != 16); }\n"
    )
    strict = ("-Wall", "-Wextra", "-Werror", f"-I{written}")
    subprocess.run([compiler, "-std=c++14", *strict, source, "-o", tmp_path / "a"], check=True)
    subprocess.run([tmp_path / "a"], check=True)
    plain = tmp_path / "b.c"
    plain.write_text('#include "edgeinfer_model.h"\nint main(void) { return EI_ROWS - 4; }\n')
    subprocess.run([compiler, "-x", "c", "-std=c99", *strict, "-fsyntax-only", plain], check=True)


def flip(path: Path, offset: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    path.write_bytes(data)


def change(folder: Path, edit: Callable[[dict], object]) -> None:
    facts = json.loads((folder / "manifest.json").read_text())
    edit(facts)
    (folder / "manifest.json").write_text(json.dumps(facts))


def rehash(folder: Path, name: str) -> None:
    """What somebody does who changes a file and makes the manifest fit."""
    change(folder, lambda facts: facts["files"][name].update(sha256=file_sha256(folder / name)))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / "weights.1.bin").unlink(), r"weights\.1\.bin is missing"),
        (
            lambda f: (f / "weights.1.bin").write_bytes((f / "weights.1.bin").read_bytes()[:-1]),
            r"found \d+; it is cut short",
        ),
        (lambda f: (f / "norms.bin").write_bytes(bytes(13)), "found 13; it is of another export"),
        (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "must be JSON"),
        (lambda f: change(f, lambda facts: facts.update(version=2)), "version must be 1: found 2"),
        (lambda f: change(f, lambda facts: facts.update(format="x")), "is no manifest of"),
        (lambda f: change(f, lambda facts: facts.pop("arrays")), "entry 'arrays' is missing"),
        (lambda f: change(f, lambda facts: facts["geometry"].update(hash="0" * 16)), "geometry hash must be"),
        (lambda f: change(f, lambda facts: facts["geometry"].update(rows=8)), "geometry hash must be"),
        (
            lambda f: change(f, lambda facts: facts["tensors"][0].update(shape=[37, 84 + 80])),
            "must have .* bytes a port",
        ),
        (lambda f: change(f, lambda facts: facts["tensors"][0].update(offset=1 << 20)), "must lie within"),
        (lambda f: change(f, lambda facts: facts["tensors"][0]["parts"].pop()), "the parts of layers.0.qkv"),
        (lambda f: change(f, lambda facts: facts["arrays"][0].update(file="x")), "does not list"),
    ],
)
def test_a_damaged_folder_is_not_opened(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(BadBoardFolder, match=message):
        BoardFolder.open(folder)


@pytest.mark.parametrize(
    "name, offset, message",
    [
        ("weights.0.bin", 5, "the weights give|indices of 0 to 242"),
        ("golden/layers.0.o.y.bin", 8, r"golden vector 0 of layers\.0\.o, row 2: the weights give"),
        ("scales.bin", 4 * 38 + 2, "scales past the last row must be 0"),
        ("weights.3.bin", 319, "weights past the matrix must be 0"),
    ],
)
def test_a_flipped_bit_is_found_twice(folder: Path, name: str, offset: int, message: str) -> None:
    """By the hash of the file, and where that was made to fit by what the file says."""
    flip(folder / name, offset)
    faults = list(faults_of(BoardFolder.open(folder)))
    assert f"{name}: sha256 must be" in faults[0]
    rehash(folder, name)
    with pytest.raises(BadBoardFolder, match=message):
        check_folder(folder)


def test_a_header_that_disagrees_is_found(folder: Path) -> None:
    header = folder / "edgeinfer_model.h"
    header.write_text(header.read_text().replace("EI_ROWS 4", "EI_ROWS 8"))
    with pytest.raises(BadBoardFolder, match=r"edgeinfer_model.h: disagrees with manifest.json, line \d+: must be"):
        check_folder(folder)


HOSTILE = {
    "an unknown key twice": (
        lambda f: replace_text(f, '"version": 1', '"version": 1, "version": 1'),
        "must be JSON: a key",
    ),
    "no number": (lambda f: replace_text(f, '"layer": 0', '"layer": NaN'), "NaN is no number"),
    "an endless size": (
        lambda f: replace_text(f, '"layer": 0', '"layer": 1e999'),
        "whole numbers from 0 .*: found inf",
    ),
    "deep": (lambda f: (f / "manifest.json").write_text("[" * 100_000), "must be JSON"),
    "a version that is true": (lambda f: change(f, lambda m: m.update(version=True)), "version must be 1: found True"),
    "a text as a size": (lambda f: change(f, lambda m: m["tensors"][0].update(shape=["37", 83])), "found '37'"),
    "a fraction": (lambda f: change(f, lambda m: m["tensors"][0].update(offset=0.5)), "found 0.5"),
    "no rows": (
        lambda f: change(f, lambda m: m["tensors"][0].update(shape=[0, 83])),
        "whole numbers from 1 .*: found 0",
    ),
    "a negative place": (lambda f: change(f, lambda m: m["arrays"][0].update(offset=-64)), "found -64"),
    "a huge array": (
        lambda f: change(f, lambda m: m["arrays"][0].update(shape=[1 << 40] * 2, bytes=0)),
        "must have .* bytes",
    ),
    "past the end": (
        lambda f: change(f, lambda m: m["tensors"][1].update(offset=m["tensors"][1]["offset"] + 64)),
        "layers.0.o must lie within the .* bytes of weights.0.bin",
    ),
    "between": (lambda f: change(f, lambda m: m["tensors"][0].update(offset=1)), "multiples of 64: found 1"),
    "objects": (
        lambda f: change(f, lambda m: m["arrays"][0].update(dtype="|O")),
        "dtype must be one of .*: found '|O'",
    ),
    "another file": (
        lambda f: change(f, lambda m: m["files"].update({"../x": m["files"]["norms.bin"]})),
        "in the folder: found",
    ),
    "a root": (
        lambda f: change(f, lambda m: m["files"].update({"/etc/x": m["files"]["norms.bin"]})),
        "in the folder: found",
    ),
    "a list as a name": (lambda f: change(f, lambda m: m["tensors"][0].update(name=[])), r"must be texts: found \[\]"),
    "a tensor twice": (
        lambda f: change(f, lambda m: m["tensors"].append(m["tensors"][0])),
        "tensor must be there once",
    ),
    "an array twice": (lambda f: change(f, lambda m: m["arrays"].append(m["arrays"][0])), "array must be there once"),
    "golden twice": (lambda f: change(f, lambda m: m["golden"].append(m["golden"][0])), "vectors must be there once"),
    "a part twice": (
        lambda f: change(f, lambda m: m["tensors"][1]["parts"][0].update(name="blk.0.attn_q.weight")),
        "tensor of the source must be there once",
    ),
    "a model that is a list": (lambda f: change(f, lambda m: m.update(model=[])), "model must be an object"),
    "code as a phase": (
        lambda f: change(f, lambda m: m["tensors"][0].update(phase="x {}; int")),
        "letters, digits and _",
    ),
    "code as a key": (
        lambda f: change(f, lambda m: m["model"]["rope"].update({"x 1\nint y": 1})),
        "letters, digits and _",
    ),
    "ports that are too many": (lambda f: change(f, lambda m: m["geometry"].update(ports=99)), "ports must be 1 to 16"),
    "golden of nothing": (
        lambda f: change(f, lambda m: m["golden"][0].update(tensor="x")),
        "of a tensor that there is",
    ),
    "less golden": (lambda f: change(f, lambda m: m["golden"][0].update(n=4)), "must be 4: found other sizes"),
    "fewer rows": (lambda f: change(f, lambda m: m["tensors"][0].update(rows_padded=37)), "40 rows with the padding"),
}


def replace_text(folder: Path, old: str, new: str) -> None:
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(name: str, folder: Path) -> None:
    damage, message = HOSTILE[name]
    damage(folder)
    with pytest.raises(BadBoardFolder, match=message):
        BoardFolder.open(folder)


def test_scales_that_are_no_numbers_are_found(folder: Path) -> None:
    scales = np.fromfile(folder / "scales.bin", dtype="<f4")
    scales[3] = np.nan
    scales.tofile(folder / "scales.bin")
    rehash(folder, "scales.bin")
    with pytest.raises(BadBoardFolder, match=r"layers\.0\.qkv: scales must be finite numbers"):
        check_folder(folder)


def test_a_matrix_without_rows_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"m must have rows and inputs: found shape \(0, 5\)"):
        write_folder(tmp_path, Geometry("base3", 4, 16), {"m": (np.empty((0, 5), dtype=np.int8), 1)}, n_golden=0)
