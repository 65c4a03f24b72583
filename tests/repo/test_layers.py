"""Imports go down only, and every module is imported under one name."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [  # a part may import from its own row and from those above it here; the longest name that fits counts
    {"errors", "types", "arguments", "files", "devices"},
    {"models._strings", "models.arrays", "models.gguf", "record_cache"},
    {"models.provenance", "models.tokenizer", "models.known_templates", "models.chat_template", "models.reasoning"},
    {"models.spec", "models.formats", "models.rope", "models.reader", "models.draft_head"},
    {"models.architectures", "models"},
    {"backends"},
    {"_sampler", "sampling", "sampling_defaults", "repetition", "memory", "offload"},
    {"speculation"},
    {"completion", "stream", "engine", "chat", "bench", "profile", "exporters", "training"},
    {"cli", "__main__"},
]
ROW_OF = {part: row for row, parts in enumerate(ROWS) for part in parts}
HEAVY = {  # and their owners, a module or a package
    "llama_cpp": "edgeinfer.backends.llama_cpp.library",
    "matplotlib": "edgeinfer.cli.plotting",
    "onnx": "edgeinfer.backends.onnx.library",
    "onnxruntime": "edgeinfer.backends.onnx.library",
    "pyopencl": "edgeinfer.backends.opencl.library",
    "torch": "edgeinfer.training",
}
ROOT_FOLDERS = {"backends", "exporters", "hls", "models", "tests"}  # none of them is a package of its own


def packages() -> dict[str, Path]:
    """Folder of each package that is shipped, by dotted name."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    return {package.replace("/", "."): ROOT / folder for package, folder in table.items()}


def modules() -> dict[str, Path]:
    """File of each module that is shipped, by dotted name."""
    found = {}
    for package, folder in packages().items():
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *inside)).removesuffix(".__init__")] = path
    return found


def imported(source: str) -> Iterator[str]:
    """Dotted names that a source imports, wherever in it; a relative one begins with a point."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names)


def imports_by_name(source: str) -> Iterator[str]:
    """Names that a source hands to importlib.import_module as they are."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from (part.value for part in node.args if isinstance(part, ast.Constant))


def misnamed(source: str) -> list[str]:
    """Imports that load a module a second time under another name, or work in an editable install only."""

    def is_misnamed(name: str) -> bool:
        head, *rest = name.split(".")
        inner = rest[0] if head == "edgeinfer" and rest else head
        return name.startswith(".") or head in ROOT_FOLDERS or (inner in ("edgeinfer", "tests") and bool(rest))

    return [name for name in imported(source) if is_misnamed(name)]


def upward(module: str, source: str) -> list[str]:
    """Imports of a shipped module that do not go down, or to a part that no row names."""
    if module == "edgeinfer":  # the public names
        return []
    row = row_of(module, -1)
    names = (name for name in imported(source) if name.split(".")[0] == "edgeinfer")
    return sorted(name for name in names if row_of(name, len(ROWS)) > row)


def row_of(name: str, unknown: int) -> int:
    """The row of a module, or of a name in one; `unknown` for what no row names."""
    parts = name.split(".")[1:]
    found = (ROW_OF.get(".".join(parts[:n])) for n in range(len(parts), 0, -1))
    return next((row for row in found if row is not None), unknown)


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    source = modules()[module].read_text()
    assert upward(module, source) == [], "see ROWS; a new part needs a place there"
    assert misnamed(source) == []


@pytest.mark.parametrize("library, owner", HEAVY.items())
def test_a_heavy_library_is_imported_by_its_owner_alone(library: str, owner: str) -> None:
    sources = {module: path.read_text() for module, path in modules().items()}
    names = {module: (*imported(source), *imports_by_name(source)) for module, source in sources.items()}
    users = [module for module in names if any(name.split(".")[0] == library for name in names[module])]
    assert users and [module for module in users if module != owner and not module.startswith(f"{owner}.")] == []


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_a_test_imports_the_package_under_its_one_name(path: Path) -> None:
    assert misnamed(path.read_text()) == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("edgeinfer.models.gguf", "from edgeinfer.models import read_spec"),
        ("edgeinfer.models.spec", "from edgeinfer.models.architectures import read_spec"),
        ("edgeinfer.models.architectures.llama", "def f():\n    import edgeinfer.backends.base"),
        ("edgeinfer.backends.base", "from edgeinfer import engine"),
        ("edgeinfer.backends.base", "import edgeinfer"),
        ("edgeinfer.memory.plan", "from edgeinfer.cli.terminal import note"),
        ("edgeinfer.engine", "from edgeinfer.newpart import x"),
        ("edgeinfer.newpart", "from edgeinfer.errors import EdgeInferError"),
    ],
)
def test_an_import_upwards_is_found(module: str, source: str) -> None:
    assert upward(module, source)


@pytest.mark.parametrize(
    "source",
    [
        "import backends.base",
        "from models import x",
        "from . import x",
        "from .x import y",
        "from tests.support import x",
    ]
    + ["import edgeinfer.tests.support", "from edgeinfer.edgeinfer import gguf"],
)
def test_a_second_name_for_a_module_is_found(source: str) -> None:
    assert misnamed(source) == list(imported(source))


def test_imports_downwards_are_let_through() -> None:
    source = "import numpy\nfrom edgeinfer.models.gguf import ModelFile\nfrom edgeinfer import devices"
    assert upward("edgeinfer.memory.plan", source) == [] and misnamed(source) == []
    assert len(modules()) > 20 and "edgeinfer.models" in modules() and "edgeinfer.backends.native.session" in modules()
