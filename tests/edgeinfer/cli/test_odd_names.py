r"""Files and folders whose names are no UTF-8 (b"odd\xff"): every command reads and writes them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import tiny_checkpoints
from checkpoints import byte_level
from click.testing import CliRunner, Result
from parts import is_there, missing
from tiny_experts import write_tiny_experts
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.cli.plotting import drawable
from edgeinfer.common.errors import EdgeInferError, InvalidArgument
from edgeinfer.common.files import utf8_name
from edgeinfer.exporters.gguf.writer import write_gguf
from edgeinfer.models.gguf import ModelFile

ODD = os.fsdecode(b"odd\xff")

if sys.platform in ("darwin", "win32"):
    pytest.skip("names are UTF-8 there", allow_module_level=True)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def ran(*arguments: str | Path) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / ODD
    place.mkdir()
    return place


@pytest.fixture
def model(folder: Path) -> Path:
    plain = write_tiny_model(folder.parent / "m.gguf", "qwen3", "F32", types={"attn_q": "Q8_0", "ffn_down": "Q4_0"})
    return Path(shutil.copy(plain, folder / f"{ODD}.gguf"))


def test_text_from_a_file_packed_and_not_with_drafts(model: Path, folder: Path) -> None:
    plain = folder.parent / "m.gguf"
    text = folder / f"{ODD}.txt"
    text.write_text("hello")
    flags = ("-n", "4", "--temp", "0")
    wanted = ran("generate", "hello", "-m", plain, *flags).stdout
    head = Path(shutil.copy(write_tiny_head(folder.parent / "h.gguf", plain), folder / f"{ODD} head.gguf"))
    for more in ([], ["-md", head], ["--draft", str(head)]):
        assert ran("generate", "-f", text, "-m", model, *flags, *more).stdout == wanted
    ran("pack", model)
    ran("pack", model, "--verify")
    assert ran("generate", "hello", "-m", model, *flags).stdout == wanted
    assert json.loads(ran("inspect", model, "--json").stdout)["path"] == str(model)
    ran("profile", model, "-md", head)
    assert json.loads(ran("profile", model, "--json").stdout)["model"] == str(model)


def test_experts_on_disk_and_the_error_about_them(folder: Path) -> None:
    plain = write_tiny_experts(folder.parent / "e.gguf")
    model = Path(shutil.copy(plain, folder / f"{ODD}.gguf"))
    for packed in (False, True):
        if packed:
            ran("pack", model)
        with edgeinfer.load(plain, expert_cache="50%") as expected, edgeinfer.load(model, expert_cache="50%") as engine:
            wanted = expected.generate("hello", max_tokens=4, temperature=0.0).text
            assert engine.generate("hello", max_tokens=4, temperature=0.0).text == wanted
            of_experts = model.with_name(f"{model.name}.packed") if packed else model
            with of_experts.open("r+b") as file:
                file.truncate(5000)
            with pytest.raises(EdgeInferError) as caught:
                engine.generate("another text, which wants other experts " * 3, max_tokens=8)
            assert ODD in str(caught.value)
        shutil.copy(plain, model)


@pytest.mark.parametrize("to", ["gguf", "genai", "litertlm", "onnx"])
def test_exports(to: str, model: Path, folder: Path) -> None:
    part = {"genai": "genai", "litertlm": "litert", "onnx": "onnx"}.get(to)
    if part is not None and not is_there(part):
        missing(part, f"--to {to} cannot be written")
    out = folder / f"{ODD} out.{to}"
    result = run("export", model, "--to", to, "-o", out)
    if to == "litertlm":  # whose runtime gives a text, in which tokens of this model are not what they were
        assert "greedy tokens equal the source in LiteRT-LM" in " ".join(result.stderr.split())
        result = run("export", model, "--to", to, "-o", out, "--no-check")
    assert result.exit_code == 0 and "check: " in result.stderr and out.exists(), result.stderr
    for manifest in folder.rglob("*manifest.json"):
        assert json.loads(manifest.read_text())["source"][0]["name"] == model.name


def test_weights_of_onnx_need_a_name_that_the_model_can_have(model: Path, folder: Path) -> None:
    if not is_there("onnx"):
        missing("onnx", "--to onnx cannot be written")
    result = run("export", model, "--to", "onnx", "--external-data", "-o", folder / f"{ODD}.onnx")
    assert result.exit_code == 2 and "its own name must be UTF-8" in result.stderr
    ran("export", model, "--to", "onnx", "--external-data", "-o", folder / "plain.onnx")


def test_folders_of_hugging_face_and_importance(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "hf"
    plain.mkdir()
    byte_level(plain)
    tiny_checkpoints.write(plain, "llama", {"vocab_size": 640, "bos_token_id": 0, "eos_token_id": 1})
    source = Path(shutil.copytree(plain, folder / f"{ODD} hf"))
    text = folder / f"{ODD}.txt"
    text.write_text("some text to calibrate on, again and again " * 20)
    matrix, out = folder / f"{ODD}.imatrix", folder / f"{ODD}.gguf"
    ran("imatrix", source, "--calibration", text, "-o", matrix)
    ran("export", source, "--to", "gguf", "--type", "Q4_0", "--imatrix", matrix, "-o", out)
    with ModelFile.open(out) as file:
        assert "odd" in str(file.metadata["quantize.imatrix.file"])


def test_what_has_no_name_there_is_named(folder: Path) -> None:
    missing_file = folder / f"{ODD} nope.gguf"
    for command in (["inspect"], ["profile"], ["pack"], ["export", "--to", "gguf", "-o", folder / "x"]):
        result = run(*command, missing_file)
        assert result.exit_code == 3 and "nope.gguf" in result.stderr and "(a bug" not in result.stderr


def test_plots(model: Path, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in (f"{ODD}.gguf", "a$b_{c$.gguf"):
        shutil.copy(folder.parent / "m.gguf", folder / name)
        ran("profile", folder / name, "--plot", folder / f"{ODD}.png")
        assert (folder / f"{ODD}.png").read_bytes()[:4] == b"\x89PNG"
    assert drawable(f"{ODD} $x$") == r"odd? \$x\$"


def test_a_link_stands_for_a_name_that_is_no_utf8(folder: Path, tmp_path: Path) -> None:
    (folder / "a.txt").write_text("a")
    (folder / "beside.txt").write_text("b")
    (folder / ODD).write_text("c")
    with utf8_name(folder / "a.txt") as name:
        assert str(name).encode() and name.name == "a.txt" and name.read_text() == "a"
        assert name.with_name("beside.txt").read_text() == "b"
    with utf8_name(folder / ODD) as name:
        assert str(name).encode() and name.read_text() == "c"
    assert not name.exists()
    with utf8_name(tmp_path / "plain") as name:
        assert name == tmp_path / "plain"


def test_texts_of_a_file_that_are_no_utf8_are_written_as_they_were(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {"general.name": ODD, "tokens": ["a", "b?"]}, [])
    data = (tmp_path / "a.gguf").read_bytes()
    assert b"odd?" in data  # a reader would complain of other bytes
    (tmp_path / "b.gguf").write_bytes(data.replace(b"b?", b"b\xff"))
    with pytest.warns(RuntimeWarning, match="UTF-8"), ModelFile.open(tmp_path / "b.gguf") as file:
        write_gguf(tmp_path / "c.gguf", file.metadata, [])
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_names_in_python(model: Path) -> None:
    with edgeinfer.load(os.fspath(model), backend="reference") as engine:
        assert engine.path == model
    with pytest.raises(InvalidArgument):
        edgeinfer.load("\0")
