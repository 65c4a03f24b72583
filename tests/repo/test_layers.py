"""Imports go down only, and every module is imported under one name."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS: list[tuple[str, list[set[str]]]] = [
    # Lowest first. A part (a set of modules) may import itself and the layers before its own, but no other part of its
    # layer. The longest name that fits a module says which part it is in.
    ("what every module may use", [{"common"}]),
    ("models by name", [{"library"}]),
    ("model file", [{"models._strings", "models.arrays", "models.gguf", "models.gguf_reader"}]),
    (
        "what a model file says",
        [
            {"models.provenance", "models.tokenizer", "models.tokenization", "models.known_templates"}
            | {"models.chat_template", "models.message_form", "models.template_sandbox", "models.reasoning"}
            | {"models.output_machines", "models.tool_calls", "models.call_syntax", "models.call_formats"},
            {"models.formats"},
            {"models.spec", "models.rope", "models.key_reader", "models.expert_reader", "models.reader"}
            | {"models.draft_vocab", "models.draft_head", "models.nextn", "models.gemma4_layers"},
            {"record_cache"},
        ],
    ),
    ("architectures", [{"models", "models.architectures"}]),
    ("what a template is told", [{"template_values"}]),
    ("hardware for ternary products", [{"hls"}]),
    ("interface of backends", [{"backends"}]),
    (
        "backends",
        [
            {"backends.reference", "backends.reference_math", "backends.reference_attention"}
            | {"backends.reference_experts", "backends.reference_k6v4", "backends.reference_weights"}
            | {"backends.reference_recurrences", "backends.reference_latent"},
            {"backends.native"},
            {"backends.llama_cpp"},
            {"backends.opencl"},
            {"backends.onnx"},
        ],
    ),
    ("weights that a draft head shares; simulated hardware", [{"backends.head_weights"}, {"backends.fpga_sim"}]),
    (
        "memory plan, offload, sampling, constraints",
        [{"memory"}, {"offload"}, {"_sampler", "sampling", "repetition", "logprobs"}, {"constraints"}],
    ),
    ("experts on a device", [{"experimental"}]),
    ("sampling that a file asks for", [{"sampling_defaults"}]),
    ("tools", [{"tools"}]),
    ("draft trees and costs", [{f"speculation.{name}" for name in ("tree", "verify", "timeline", "stats", "cost")}]),
    ("drafters", [{"speculation.drafters"}]),
    ("speculation", [{"speculation"}]),
    ("contexts on disk", [{"context_cache"}]),
    ("texts that run", [{"scheduling"}]),
    ("completions", [{"completion", "stream", "many", "asynchronous"}]),
    ("engine and conversation, exporters", [{"engine", "chat", "message", "ranking"}, {"exporters"}]),
    ("loading", [{"loading", "experimental.expert_device"}]),
    ("training, measuring, batch jobs", [{"training"}, {"bench", "expert_bench"}, {"profiler"}, {"batch"}]),
    ("server", [{"server"}]),
    ("command line", [{"cli", "__main__"}]),
]
PLACES = {
    name: (layer, part) for layer, (_, parts) in enumerate(LAYERS) for part, names in enumerate(parts) for name in names
}
HEAVY = {  # and their owners, modules or packages
    "MNN": "edgeinfer.exporters.mnn",
    "ai_edge_litert": "edgeinfer.exporters.litertlm.library",
    "executorch": "edgeinfer.exporters.pte.library",
    "flatbuffers": "edgeinfer.exporters.litertlm.library",
    "huggingface_hub": "edgeinfer.library.hub",
    "litert_lm": "edgeinfer.exporters.litertlm.library",
    "litert_lm_builder": "edgeinfer.exporters.litertlm.library",
    "llguidance": "edgeinfer.constraints.library",
    "llama_cpp": "edgeinfer.backends.llama_cpp.library",
    "matplotlib": "edgeinfer.cli.plotting",
    "onnx": "edgeinfer.backends.onnx.library",
    "onnxruntime": "edgeinfer.backends.onnx.library",
    "onnxruntime_genai": "edgeinfer.exporters.genai.runtime",
    "pyopencl": "edgeinfer.backends.opencl.library",
    "pyosys": "edgeinfer.hls.synth.yosys",
    "pytorch_tokenizers": "edgeinfer.exporters.pte.library",
    "starlette": "edgeinfer.server.library",
    "torch": "edgeinfer.training edgeinfer.exporters.pte.library",
    "uvicorn": "edgeinfer.server.library",
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


def forbidden(module: str, source: str) -> list[str]:
    """Imports of a shipped module that do not go down, or to a module that no layer names."""
    if module == "edgeinfer":  # the public names
        return []
    names = (name for name in imported(source) if name.split(".")[0] == "edgeinfer")
    return sorted(name for name in names if not may_import(place_of(module), place_of(name)))


def may_import(user: tuple[int, int] | None, used: tuple[int, int] | None) -> bool:
    """Whether a module in one place, (layer, part), may import one in another; None is no place."""
    return user is not None and used is not None and (used == user or used[0] < user[0])


def place_of(name: str) -> tuple[int, int] | None:
    """(layer, part) of a module, or of a name in one; None for what no layer names."""
    parts = name.split(".")[1:]
    found = (PLACES.get(".".join(parts[:n])) for n in range(len(parts), 0, -1))
    return next((place for place in found if place is not None), None)


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    source = modules()[module].read_text()
    assert forbidden(module, source) == [], "see LAYERS; a new module needs a place there"
    assert misnamed(source) == []


@pytest.mark.parametrize("library, owner", HEAVY.items())
def test_a_heavy_library_is_imported_by_its_owner_alone(library: str, owner: str) -> None:
    sources = {module: path.read_text() for module, path in modules().items()}
    names = {module: (*imported(source), *imports_by_name(source)) for module, source in sources.items()}
    users = [module for module in names if any(name.split(".")[0] == library for name in names[module])]
    owners = tuple(f"{name}." for name in owner.split())
    assert users and [module for module in users if not f"{module}.".startswith(owners)] == []


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
        ("edgeinfer.memory.fit", "from edgeinfer.cli.terminal import note"),
        ("edgeinfer.backends.onnx.session", "from edgeinfer.backends.opencl.session import x"),
        ("edgeinfer.backends.native.session", "from edgeinfer.backends.reference import x"),
        ("edgeinfer.models.formats.q8_0", "from edgeinfer.models.spec import x"),
        ("edgeinfer.memory.fit", "from edgeinfer.sampling import x"),
        ("edgeinfer.speculation.tree", "from edgeinfer.speculation.drafters.base import Drafter"),
        ("edgeinfer.speculation.drafters.head", "from edgeinfer.speculation.pipeline import Speculator"),
        ("edgeinfer.speculation.pipeline", "from edgeinfer.stream import Stream"),
        ("edgeinfer.chat", "from edgeinfer.loading.open import load"),
        ("edgeinfer.exporters.gguf.writer", "from edgeinfer.engine import Engine"),
        ("edgeinfer.training.distill", "from edgeinfer.cli import main"),
        ("edgeinfer.engine", "from edgeinfer.newpart import x"),
        ("edgeinfer.newpart", "from edgeinfer.common.errors import EdgeInferError"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert forbidden(module, source)


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
    source = "import numpy\nfrom edgeinfer.models.gguf import ModelFile\nfrom edgeinfer.common import devices"
    assert forbidden("edgeinfer.memory.fit", source) == [] and misnamed(source) == []
    assert len(modules()) > 20 and "edgeinfer.models" in modules() and "edgeinfer.backends.native.session" in modules()


def test_every_module_has_one_place_and_every_place_a_module() -> None:
    names = [name for _, parts in LAYERS for part in parts for name in part]
    assert len(names) == len(set(names))
    compiled = {"_sampler", "models._strings"}
    unused = {name for name in names if not any(module == f"edgeinfer.{name}" for module in modules())}
    assert unused <= compiled
    assert [module for module in modules() if module != "edgeinfer" and place_of(module) is None] == []
