"""What a command reads stays as it is: no output takes the place of an input, whatever the names say."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import byte_level
from click.testing import CliRunner, Result
from commands import commands
from split_models import split_model
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.cli.options import FileName, MayNameFile, OutputName, long_name
from edgeinfer.common.errors import InvalidArgument

WRITING = {  # each option that writes, with the rest of its command line; MODEL is a GGUF file, TEXT a text
    ("batch", "--out"): ["TEXT", "--model", "MODEL"],
    ("profile", "--plot"): ["MODEL"],
    ("bench", "--plot"): ["MODEL"],
    ("bench", "--timeline"): ["MODEL"],
    ("imatrix", "--out"): ["MODEL"],
    ("export", "--out"): ["MODEL", "--to", "gguf"],
    ("fpga export", "--out"): ["MODEL"],
    ("fpga unpack", "--out"): ["MODEL"],
    ("distill", "--out"): ["MODEL", "--prompts", "TEXT"],
    ("distill", "--work"): ["MODEL", "--prompts", "TEXT", "--out", "NEW"],
    ("distill", "--plot"): ["MODEL", "--prompts", "TEXT", "--out", "NEW"],
}
NO_FILE = {"chat_template", "external_data", "hf_file", "hf_repo", "hf_repo_draft"}  # whose help speaks of files


def options() -> list[tuple[str, click.Parameter]]:
    return [(name, parameter) for name, command in commands().items() for parameter in command.params]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "v.gguf", "llama", "F16")


# ---- All options -----------------------------------------------------------------------------------------------------


def test_every_option_that_names_a_file_says_whether_it_is_written() -> None:
    for command, option in options():
        said = f"{option.metavar} {getattr(option, 'help', '')}"
        if re.search(r"\bFILE\b|\bfile\b|\b[Ff]older\b", said) and option.name not in NO_FILE:
            if not getattr(option, "is_flag", False):
                assert isinstance(option.type, FileName | MayNameFile), (command, option.name)
        if isinstance(option.type, click.Path):
            assert isinstance(option.type, FileName), (command, option.name)
        written = re.match(
            r"(The file|The folder to write|Plot|GGUF file of the head|Folder for intermediate)",
            getattr(option, "help", "") or "",
        )
        assert isinstance(option.type, OutputName) == bool(written), (command, option.name)


def test_every_option_that_writes_is_tried_here() -> None:
    found = {(name, long_name(each)) for name, each in options() if isinstance(each.type, OutputName)}
    assert found == set(WRITING)


def reading(command: str, flag: str) -> list[str]:
    """What else a command may be told to read."""
    params = commands()[command].params
    return [
        long_name(each)
        for each in params
        if isinstance(each, click.Option) and isinstance(each.type, FileName | MayNameFile)
        if not isinstance(each.type, OutputName) and long_name(each) not in WRITING[command, flag]
    ]


CASES = [(*key, other) for key in WRITING for other in ("", *reading(*key))]


@pytest.mark.parametrize("command, flag, other", CASES, ids=[" ".join(case) for case in CASES])
def test_an_output_is_no_input(command: str, flag: str, other: str, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "a"}\n')
    (tmp_path / "folder").mkdir()
    read = {"--texts-of": tmp_path / "folder", "--chats": tmp_path / "folder", "--prompts": text}.get(
        other, tmp_path / "other.png"
    )
    if not read.exists():
        read.write_bytes(model.read_bytes())
    rest = [
        {"MODEL": model, "TEXT": text, "NEW": tmp_path / "new.gguf"}.get(each, each) for each in WRITING[command, flag]
    ]
    if other:
        rest += [other, f"64:{read}" if other == "--draft-vocab" else str(read)]
    before = digests(tmp_path)
    result = run(*command.split(), *rest, flag, read if other else model)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2 and "must be another file than those that are read" in said, said
    assert digests(tmp_path) == before


# ---- Names of one file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["./v.gguf", "~/v.gguf", "sub/../v.gguf", "soft.png", "hard.png", "linked/v.gguf"])
@pytest.mark.parametrize(
    "command, flag", [("profile", "--plot"), ("imatrix", "-o"), ("export", "-o"), ("bench", "--timeline")]
)
def test_a_file_is_known_under_every_name(
    command: str, flag: str, spelling: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("sub").mkdir()
    Path("linked").symlink_to(tmp_path, target_is_directory=True)
    Path("soft.png").symlink_to(model)
    os.link(model, "hard.png")
    before = digests(tmp_path)
    result = run(command, model, flag, spelling, *(["--to", "gguf"] if command == "export" else []))
    assert result.exit_code == 2 and "would overwrite" in result.stderr, result.stderr
    assert digests(tmp_path) == before


def test_parts_of_a_split_model_and_its_packed_weights_are_read_too(model: Path, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    parts = split_model(model, tmp_path / "parts", 3)
    assert run("pack", parts[0]).exit_code == 0
    for path in (*parts, parts[0].with_name(f"{parts[0].name}.packed")):
        for command, flag, *rest in (("profile", "--plot"), ("imatrix", "-o"), ("export", "-o", "--to", "gguf")):
            before = digests(tmp_path)
            result = run(command, parts[1], flag, path, *rest)
            assert result.exit_code == 2 and "would overwrite" in result.stderr, (command, path, result.stderr)
            assert digests(tmp_path) == before


def test_the_default_model_is_read_where_none_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.loading.open.default_model", lambda: model)
    for command in ("profile", "bench"):
        result = run(command, "--plot", model)
        assert result.exit_code == 2 and "would overwrite" in result.stderr


def test_variables_of_the_environment_name_what_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / "d.gguf"
    draft.write_bytes(model.read_bytes())
    monkeypatch.setenv("EDGEINFER_MODEL_DRAFT", str(draft))
    result = run("profile", model, "--plot", draft)
    assert result.exit_code == 2 and "would overwrite" in result.stderr


def test_files_of_a_folder_are_read_but_not_what_was_exported_into_it(tmp_path: Path) -> None:
    import tiny_checkpoints

    folder = tmp_path / "hf"
    folder.mkdir()
    byte_level(folder)
    tiny_checkpoints.write(folder, "llama", {"vocab_size": 640, "bos_token_id": 0, "eos_token_id": 1})
    (folder / "deep").mkdir()
    (folder / "deep" / "notes.md").write_text("a")
    (tmp_path / "weights").symlink_to(folder / "model.safetensors")
    for out in ("hf", "hf/config.json", "hf/model.safetensors", "hf/deep/notes.md", "weights"):
        before = digests(tmp_path)
        for command in (["export", "--to", "gguf"], ["imatrix"]):
            result = run(*command, folder, "-o", tmp_path / out)
            assert result.exit_code == 2 and "would overwrite" in result.stderr, (out, result.stderr)
        assert digests(tmp_path) == before
    for more in ([], ["--overwrite"]):
        assert run("export", folder, "--to", "gguf", "-o", folder / "a.gguf", "--no-check", *more).exit_code == 0


def test_a_folder_that_is_replaced_does_not_hold_the_source(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    source = out / "model.onnx"
    source.write_bytes(model.read_bytes())
    for command in (*(["export", "--to", to] for to in ("genai", "onnx", "mnn")), ["fpga", "export"]):
        before = digests(tmp_path)
        result = run(*command, source, "-o", out, "--overwrite")
        assert result.exit_code == 2 and "would overwrite" in result.stderr, (command, result.stderr)
        assert digests(tmp_path) == before


def test_an_output_that_is_there_is_replaced_only_if_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    text, folder = tmp_path / "t.txt", tmp_path / "package"
    text.write_text("hello world " * 40)
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"mine")
    for command, out in (
        (["export", model, "--to", "gguf"], tmp_path / "out.gguf"),
        (["imatrix", model, "--calibration", text], tmp_path / "i.gguf"),
        (["export", model, "--to", "onnx"], folder),
    ):
        if out != folder:
            out.write_bytes(b"mine")
        before = digests(tmp_path)
        result = run(*command, "-o", out)
        said = " ".join(result.stderr.split())
        assert result.exit_code == 2 and f"{out} is there already" in said and "--overwrite" in said, said
        assert digests(tmp_path) == before
    for command, out in ((["export", model, "--to", "gguf"], "out.gguf"), (["imatrix", model], "i.gguf")):
        assert run(*command, "-o", tmp_path / out, "--overwrite").exit_code == 0
        assert (tmp_path / out).read_bytes() != b"mine"


def test_two_outputs_are_two_files(model: Path, tmp_path: Path) -> None:
    result = run("bench", model, "--plot", tmp_path / "a.png", "--timeline", tmp_path / "." / "a.png")
    assert result.exit_code == 2 and "--plot and --timeline both name" in result.stderr


def test_devices_may_be_read_and_written(model: Path) -> None:
    result = run("imatrix", model, "--calibration", os.devnull, "-o", os.devnull)
    assert result.exit_code == 2 and "must have at least 16 tokens" in result.stderr


# ---- Outputs without an option ---------------------------------------------------------------------------------------


def test_packing_does_not_write_through_a_link_to_the_model(model: Path) -> None:
    packed = model.with_name("v.gguf.packed")
    whole = model.read_bytes()
    packed.symlink_to(model)
    result = run("pack", model)
    assert result.exit_code == 2 and "MODEL.packed must be another file" in result.stderr
    assert model.read_bytes() == whole and packed.is_symlink()


def test_a_conversation_does_not_take_the_place_of_a_model(model: Path, tmp_path: Path) -> None:
    assert run("pack", model).exit_code == 0
    (tmp_path / "soft").symlink_to(model)
    with edgeinfer.load(model, backend="reference") as engine:
        chat = engine.chat()
        for name in ("v.gguf", "v.gguf.packed", "soft"):
            before = digests(tmp_path)
            with pytest.raises(InvalidArgument, match="is a model, which a conversation must not overwrite"):
                chat.save(tmp_path / name)
            assert digests(tmp_path) == before
        for _ in range(2):
            chat.save(tmp_path / "talk.jsonl")


# ---- Plots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["new.gguf", "notes.txt", "model.bin", "a.png.zip"])
def test_a_plot_has_the_name_of_an_image(name: str, model: Path, tmp_path: Path) -> None:
    result = run("profile", model, "--plot", tmp_path / name)
    assert result.exit_code == 2 and "its name must end in .png, .pdf, .svg" in " ".join(result.stderr.split())
    assert not (tmp_path / name).exists()


def test_a_plot_takes_the_place_of_images_only(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    contents: dict[str, Any] = {"other.png": model.read_bytes(), "README": b"text", "notes.svg": b"# notes"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        result = run("profile", model, "--plot", tmp_path / name)
        assert result.exit_code == 2 and "this file is none" in " ".join(result.stderr.split())
        assert (tmp_path / name).read_bytes() == content
    for name in ("a.png", "a.svg", "a.pdf", "a.JPG", "plot"):
        for _ in range(2):
            result = run("profile", model, "--plot", tmp_path / name)
            assert result.exit_code == 0, result.stderr
    (tmp_path / "empty.png").touch()
    assert run("profile", model, "--plot", tmp_path / "empty.png").exit_code == 0
    assert (tmp_path / "empty.png").read_bytes()[:4] == b"\x89PNG" == (tmp_path / "plot").read_bytes()[:4]
