"""Files of models that are not there, or are no models: exit code 3 and the file's name, from every command."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.common.errors import InvalidArgument

COMMANDS = {  # with BAD in the place of the file, and MODEL and HEAD of those beside it
    "chat": ["chat", "hi", "-m", "BAD"],
    "generate": ["generate", "hi", "-m", "BAD"],
    "inspect": ["inspect", "BAD"],
    "profile": ["profile", "BAD"],
    "profile --board": ["profile", "BAD", "--board", "kv260"],
    "profile -md": ["profile", "MODEL", "-md", "BAD"],
    "profile --draft": ["profile", "MODEL", "--draft", "BAD"],
    "profile --json": ["profile", "MODEL", "--json", "-md", "BAD"],
    "bench": ["bench", "BAD"],
    "bench --expert-cache": ["bench", "BAD", "--expert-cache", "50%"],
    "pack": ["pack", "BAD"],
    "pack --verify": ["pack", "BAD", "--verify"],
    "imatrix": ["imatrix", "BAD", "-o", "OUT"],
    "export --imatrix": ["export", "MODEL", "--to", "gguf", "--type", "Q4_0", "--imatrix", "BAD", "-o", "OUT"],
    "export --target": ["export", "HEAD", "--to", "gguf", "--target", "BAD", "-o", "OUT"],
    "export --draft": ["export", "MODEL", "--to", "genai", "--draft", "BAD", "-o", "OUT"],
    **{f"export --to {to}": ["export", "BAD", "--to", to, "-o", "OUT"] for to in ("gguf", "genai", "litertlm", "mnn")},
    **{f"export --to {to}": ["export", "BAD", "--to", to, "-o", "OUT"] for to in ("pte", "onnx", "ternary", "fpga")},
    "evaluate": ["evaluate", "BAD", "HEAD", "--prompts", "TEXT"],
    "evaluate HEAD": ["evaluate", "MODEL", "BAD", "--prompts", "TEXT"],
    "distill": ["distill", "BAD", "--prompts", "TEXT", "--out", "OUT", "--max-tokens", "8"],
    "distill --init": ["distill", "MODEL", "--prompts", "TEXT", "--init", "BAD", "--out", "OUT", "--max-tokens", "8"],
}
KINDS = {
    "missing": "nope.gguf",
    "in a file": "m.gguf/x.gguf",
    "empty": "empty.gguf",
    "text": "text.gguf",
    "cut": "cut.gguf",
}
FOLDERS_ARE_READ = {
    "imatrix",
    *(f"export --to {to}" for to in ("gguf", "genai", "litertlm", "mnn", "pte", "onnx", "ternary", "fpga")),
}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("files")
    model = write_tiny_model(place / "m.gguf", "llama", "Q8_0")
    write_tiny_head(place / "h.gguf", model)
    (place / "empty.gguf").touch()
    (place / "text.gguf").write_text("no model at all")
    (place / "cut.gguf").write_bytes(model.read_bytes()[:5000])
    (place / "folder").mkdir()
    (place / "t.jsonl").write_text('{"prompt": "hello"}\n')
    return place


@pytest.mark.parametrize("kind", [*KINDS, "a folder"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_file_is_named(command: str, kind: str, folder: Path) -> None:
    if command.startswith(("distill", "evaluate")):
        pytest.importorskip("torch")
    if command == "export --imatrix" and kind == "cut":
        pytest.skip("is no importance matrix by its metadata, as all models")
    bad = folder / KINDS.get(kind, "folder")
    names = {"BAD": bad, "MODEL": folder / "m.gguf", "HEAD": folder / "h.gguf", "TEXT": folder / "t.jsonl"}
    before = sorted(folder.iterdir())
    result = run(*(names.get(each, folder / "out" if each == "OUT" else each) for each in COMMANDS[command]))
    said = " ".join(result.stderr.split())
    if command == "export --draft" and kind == "a folder":
        assert result.exit_code == 2 and str(bad) in said  # it says how to make a file of it
    else:
        assert result.exit_code == 3 and str(bad) in said, (result.exit_code, said)
    assert "(a bug" not in said and not result.stdout
    assert [path for path in sorted(folder.iterdir()) if not path.name.endswith(".work")] == before


def test_a_profile_with_a_drafter_that_cannot_draft_is_none(folder: Path, tmp_path: Path) -> None:
    other = write_tiny_head(tmp_path / "h.gguf", write_tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", seed=1))
    result = run("profile", folder / "m.gguf", "-md", other)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 3 and f"{other} cannot draft for this model: " in said and not result.stdout
    assert run("profile", folder / "m.gguf", "-md", folder / "h.gguf").exit_code == 0
    assert run("profile", folder / "m.gguf", "--draft", "suffix").exit_code == 0


def test_a_head_is_no_model_and_a_model_no_head(folder: Path) -> None:
    for command in (["chat", "hi", "-m"], ["bench"], ["profile"], ["pack"]):
        result = run(*command, folder / "h.gguf")
        assert result.exit_code == 3 and str(folder / "h.gguf") in " ".join(result.stderr.split()), command
    result = run("export", folder / "m.gguf", "--to", "onnx", "--target", folder / "m.gguf", "-o", folder / "out")
    assert result.exit_code == 2 and "is no draft head" in result.stderr


def test_no_name_has_a_null_character() -> None:
    with pytest.raises(InvalidArgument, match="which has no null character: found 'a.x00b'"):
        edgeinfer.load("a\0b")
