"""`edgeinfer export --check` and `--unpack`: faults of a folder that only a model shows, and the command line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.common.files import file_sha256
from edgeinfer.hls.files.headers import HEADERS
from edgeinfer.hls.files.manifest import read_manifest
from edgeinfer.hls.files.writer import write_folder
from edgeinfer.hls.geometry import Geometry


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    source = write_tiny_model(folder / "a.gguf", "bitnet-b1.58", "I2_S", n_layers=1)
    result = run("export", source, "--to", "fpga", "--out", folder / "out", "--golden", "1", "--no-check")
    assert result.exit_code == 0, result.output
    return folder / "out"


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "out"))


def change(folder: Path, edit: Callable[[dict], object]) -> None:
    facts = json.loads((folder / "manifest.json").read_text())
    edit(facts)
    (folder / "manifest.json").write_text(json.dumps(facts))


def flip(folder: Path, name: str, offset: int, is_hash_made_to_fit: bool = True) -> None:
    data = bytearray((folder / name).read_bytes())
    data[offset] ^= 1
    (folder / name).write_bytes(data)
    if is_hash_made_to_fit:
        change(folder, lambda facts: facts["files"][name].update(sha256=file_sha256(folder / name)))


def place(folder: Path, name: str) -> int:
    facts = json.loads((folder / "manifest.json").read_text())
    return int(next(array["offset"] for array in facts["arrays"] if array["name"] == name))


def rename(folder: Path, name: str) -> None:
    """An array, and the header with it."""

    def edit(facts: dict) -> None:
        next(array for array in facts["arrays"] if array["name"] == name)["name"] = "x"

    change(folder, edit)
    text = HEADERS["edgeinfer_model.h"](read_manifest(folder))
    (folder / "edgeinfer_model.h").write_text(text)
    change(folder, lambda facts: facts["files"]["edgeinfer_model.h"].update(bytes=len(text)))


def test_a_whole_folder_passes(folder: Path) -> None:
    result = run("export", "--check", folder)
    assert result.exit_code == 0, result.output
    assert "4 matrices readable, 4 golden vectors of 4 matrices equal to the products of the weights" in result.stdout


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda f: (f / "norms.bin").unlink(), "norms.bin is missing"),
        (lambda f: flip(f, "weights.0.bin", 1, False), "weights.0.bin: sha256 must be"),
        (
            lambda f: flip(f, "golden/layers.0.down.y.bin", 0),
            "golden vector 0 of layers.0.down, row 0: the weights give",
        ),
        (
            lambda f: flip(f, "golden/layers.0.stages.bin", place(f, "golden.layers.0.o.y")),
            "stage o.y of layer 0 at (0, 0)",
        ),
        (lambda f: flip(f, "norms.bin", 3), "stage attn_norm of layer 0 at"),
        (lambda f: change(f, lambda facts: facts["model"].update(n_heads=2)), "layers.0.qkv must have shape"),
        (lambda f: change(f, lambda facts: facts["model"].update(n_layers=2)), "layers.1.qkv must have shape"),
        (lambda f: change(f, lambda facts: facts["model"].update(n_ctx=5)), "edgeinfer_model.h: disagrees"),
        (
            lambda f: change(f, lambda facts: facts["model"].update(n_layers=0)),
            "layers.0.qkv is of no layer of the model",
        ),
        (lambda f: change(f, lambda facts: facts["model"].update(n_layers=1 << 60)), "layers.1.qkv must have shape"),
        (
            lambda f: change(f, lambda facts: facts["model"].update(n_layers="1")),
            "must be those of a model: found TypeError",
        ),
        (
            lambda f: change(f, lambda facts: facts["model"].pop("rope")),
            "must be those of a model: found KeyError('rope')",
        ),
        (lambda f: change(f, lambda facts: facts["arrays"].pop(0)), "array layers.0.attn_norm must have shape (256,)"),
        (lambda f: rename(f, "embed_scales"), "array embed_scales must have shape (291,), by the facts"),
        (lambda f: rename(f, "golden.layers.0.o.y"), "found KeyError('golden.layers.0.o.y')"),
        (lambda f: change(f, lambda facts: facts["geometry"].update(hash="x")), "geometry hash must be"),
        (lambda f: change(f, lambda facts: facts.update(version=9)), "version must be 1: found 9"),
    ],
)
def test_each_fault_has_its_message(folder: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(folder)
    result = run("export", "--check", folder)
    assert result.exit_code == 3 and words in result.output, result.output
    assert "Traceback" not in result.output


def test_what_is_no_such_folder_is_told(tmp_path: Path) -> None:
    result = run("export", "--check", tmp_path)
    assert result.exit_code == 3 and "has no manifest.json: this is no folder of `edgeinfer export" in result.stderr
    result = run("export", "--check", tmp_path / "nothing")
    assert result.exit_code == 3 and "nothing: has no manifest.json" in result.stderr
    (tmp_path / "a.gguf").write_bytes(b"")
    result = run("export", "--unpack", tmp_path / "a.gguf", "-o", tmp_path / "b.gguf")
    assert result.exit_code == 3 and "has no manifest.json" in result.stderr


def test_all_faults_are_told(folder: Path) -> None:
    flip(folder, "golden/layers.0.down.y.bin", 0)
    flip(folder, "weights.2.bin", 9, False)
    result = run("export", "--check", folder)
    assert "weights.2.bin: sha256" in result.stdout and "golden vector 0 of layers.0.down" in result.output


def test_a_changed_folder_is_not_unpacked_and_a_file_is_not_half_written(folder: Path) -> None:
    out = folder.parent / "a.gguf"
    out.write_bytes(b"mine")
    flip(folder, "weights.0.bin", 1, False)
    result = run("export", "--unpack", folder, "-o", out)
    assert result.exit_code == 3 and "weights.0.bin: sha256 must be" in result.stderr and out.read_bytes() == b"mine"


def test_what_gguf_cannot_hold_is_given_back_as_arrays(tmp_path: Path, rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (5, 100), dtype=np.int8)
    scales = rng.random(5, dtype=np.float32)
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", Geometry("2bit", 2, 2, 1), {"m": (trits, scales)}, n_golden=0)
    result = run("export", "--unpack", tmp_path / "out", "--out", tmp_path / "m.gguf")
    assert (
        result.exit_code == 3 and "tensor m: TQ2_0 needs rows of a multiple of 256 inputs: found 100" in result.stderr
    )
    (tmp_path / "wide").mkdir()
    write_folder(tmp_path / "wide", Geometry("2bit", 2, 2, 1), {"m": (np.tile(trits, 3)[:, :256], scales)}, n_golden=0)
    result = run("export", "--unpack", tmp_path / "wide", "--out", tmp_path / "m.gguf")
    assert result.exit_code == 3 and "tensor m: TQ2_0 has scales in float16, which these are not" in result.stderr
    assert run("export", "--unpack", tmp_path / "out", "--out", tmp_path / "m.npz").exit_code == 0
    with np.load(tmp_path / "m.npz") as arrays:
        assert np.array_equal(arrays["m"], trits) and np.array_equal(arrays["m.scales"], scales)
    result = run("export", "--unpack", tmp_path / "out", "--out", tmp_path / "m.bin")
    assert result.exit_code == 2 and "--out must end in .gguf or .npz" in result.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "Missing option '--to'"),
        (("--check",), "Missing option '--to'"),
        (("--no-check",), "Missing option '--to'"),
        (("--unpack",), "Missing option '-o' / '--out'"),
        (("--to", "fpga"), "Missing option '-o' / '--out'"),
        (("--unpack", "--to", "fpga", "-o", "x"), "--unpack reads a folder that --to fpga wrote: leave --to out"),
        (("--to", "ternary", "-o", "x", "--rows", "4"), "--rows goes with --to fpga, not with --to ternary"),
        (("--to", "fpga", "-o", "x", "--tables", "3"), "tables must be a power of two"),
        (("--to", "fpga", "-o", "x", "--board", "none"), "there is no board 'none'"),
    ],
)
def test_options_that_do_not_go_together_are_told(arguments: tuple[str, ...], words: str, written: Path) -> None:
    source = written.parent / "a.gguf"
    result = run("export", source, *(str(written.parent / "x") if each == "x" else each for each in arguments))
    assert result.exit_code == 2 and words in result.stderr, result.output
