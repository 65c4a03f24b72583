"""What the documentation says is so: links lead somewhere, examples run, lists are complete."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from commands import commands
from parts import missing

import edgeinfer
from edgeinfer.cli.chat import chat
from edgeinfer.cli.generate import generate
from edgeinfer.cli.help import main_names
from edgeinfer.common.settings import options_of, variable_of
from edgeinfer.loading.options import LoadOptions
from edgeinfer.models.architectures import supported_architectures
from edgeinfer.training.recipe import Recipe

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SHIPPED = ("backends", "edgeinfer", "exporters", "hls", "models")


def anchors(page: Path) -> set[str]:
    """Names of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 900


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_pages_that_sources_name_exist() -> None:
    paths = [
        path for folder in SHIPPED for ending in ("py", "h", "cpp") for path in (ROOT / folder).rglob(f"*.{ending}")
    ]
    named = {name for path in paths for name in re.findall(r"(?<![\w/])docs/[\w-]+\.md\b", path.read_text())}
    assert named and [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/engine.md", "docs/exactness.md", "docs/draft-heads.md"])
def test_files_that_pages_name_exist(page: str) -> None:
    files = {f"/{path.relative_to(ROOT)}" for folder in (*SHIPPED, "tests") for path in (ROOT / folder).rglob("*")}
    files |= {f"/{path.name}" for path in ROOT.iterdir()}
    named = re.findall(r"`([\w/]+(?:\.(?:py|h|cpp|toml|txt)|/))`", (ROOT / page).read_text())
    ends = {"/" + name.rstrip("/") for name in named}
    assert ends and sorted(end for end in ends if not any(file.endswith(end) for file in files)) == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\((docs/[\w-]+\.md)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize(
    "page", ["README.md", "docs/python.md", "docs/many.md", "docs/structured-output.md", "docs/tools.md"]
)
def test_the_examples_of_a_page_run(
    page: str, default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in ("docs/structured-output.md", "docs/tools.md") and importlib.util.find_spec("llguidance") is None:
        missing("grammar", "llguidance is not installed: pip install 'edgeinfer[grammar]'")
    load, files = edgeinfer.load, {"model.gguf": default_model, "small.gguf": default_model}

    def load_default(path: str | None = None, **options: Any) -> edgeinfer.Engine:
        if "draft" in options:
            options["draft"] = files.get(options["draft"], options["draft"])
        return load(None if path is None else files[path], **options)

    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(edgeinfer, "load", load_default)
    monkeypatch.chdir(tmp_path)
    exec(compile("".join(examples), page, "exec"), {})


def test_all_variables_are_listed() -> None:
    listed = set(re.findall(r"EDGEINFER_\w+", (ROOT / "docs" / "environment.md").read_text()))
    paths = [path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in paths for name in re.findall(r"\bEDGEINFER_[A-Z_]*[A-Z]\b", path.read_text())}
    of_flags = {
        str(parameter.envvar) for command in (chat, generate) for parameter in command.params if parameter.envvar
    }
    assert len(of_flags) > 20 and used | of_flags <= listed


def test_each_folder_of_the_cache_is_listed() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `$XDG_CACHE_HOME/edgeinfer`"))
    kinds = set()
    for path in (path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        named = re.findall(r"(?:record|build)_folder\((\"[^\"]+\"|_KIND)\)", text)
        kinds |= {name.strip('"') for name in named} - {"_KIND"}
        if "_KIND" in named:
            kinds |= set(re.findall(r"^_KIND(?:, _\w+)* = \"([^\"]+)\"", text, re.MULTILINE)[:1] or [f"that of {path}"])
    assert len(kinds) > 9 and {kind for kind in kinds if f"`{kind}/`" not in row} == set()


def test_each_command_and_each_option_of_it_is_listed() -> None:
    page = (ROOT / "docs" / "chat.md").read_text()
    assert set(re.findall(r"^\| `edgeinfer ([a-z]+(?: [a-z]+)?)", page, re.MULTILINE)) == set(commands())
    rows = re.findall(r"^\| ((?:`[a-z ]+`(?:, )?)+) \| ([^|]+) \|", page, re.MULTILINE)
    listed: dict[str, set[str]] = {name: set() for name in commands()}
    for names, options in rows:
        for name in re.findall(r"`([^`]+)`", names):
            if name in listed:  # else a word of another table
                listed[name] |= set(re.findall(r"`(-[^`]+)`", options))
    everywhere = set(re.findall(r"`(-[\w-]+)`", page))
    for name, command in commands().items():
        options = [each for each in command.params if isinstance(each, click.Option)]
        names = [each.opts for each in options] + [each.secondary_opts for each in options if each.secondary_opts]
        assert listed[name] == {next(iter(main_names(each))) for each in names}, name
        assert {flag for each in names for flag in each} <= everywhere, name


def test_each_key_of_a_recipe_is_listed_with_its_default() -> None:
    page = (ROOT / "docs" / "draft-heads.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page[: page.index("## Results")], re.MULTILINE))
    keys = {name: default for name, (default, _) in options_of(Recipe).items()}
    assert set(rows) == set(keys) == {field.name for field in dataclasses.fields(Recipe)}
    for name, default in keys.items():
        assert default is None or rows[name] == f"`{json.dumps(default)}`", name


def test_the_variable_of_each_load_option_is_listed_beside_its_flag() -> None:
    lines = (ROOT / "docs" / "environment.md").read_text().splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("|")]
    for name, (_, about) in options_of(LoadOptions).items():
        if about.flags:
            row = [flags for variables, flags in rows if f"`{variable_of(*about.flags)}`" in variables]
            assert len(row) == 1 and set(about.flags) & set(row[0].strip(" `").split()), f"{name} is not in its row"


@pytest.mark.parametrize("page", ["README.md", "docs/models.md"])
def test_all_architectures_are_listed(page: str) -> None:
    text = (ROOT / page).read_text().lower()
    assert [name for name in supported_architectures() if name not in text and not name.startswith("bitnet")] == []
