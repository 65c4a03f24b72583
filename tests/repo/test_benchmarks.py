"""Benchmarks are run by hand: what they import of the package must be there all the same."""

import argparse
import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from commands import commands

from edgeinfer.sampling import SamplingParams

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of what a file imports of the package, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "edgeinfer":
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_a_benchmark_imports_what_the_package_has(path: Path) -> None:
    for module, name in imported_names(path):
        if module.startswith("edgeinfer.training") and importlib.util.find_spec("torch") is None:
            continue
        is_there = hasattr(importlib.import_module(module), name)
        assert is_there or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"


def test_names_that_are_not_there_are_found(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("from edgeinfer.models import read_spec, nothing\nfrom numpy import x\n")
    assert list(imported_names(tmp_path / "bench.py")) == [
        ("edgeinfer.models", "read_spec"),
        ("edgeinfer.models", "nothing"),
    ]
    with pytest.raises((AssertionError, ModuleNotFoundError)):
        test_a_benchmark_imports_what_the_package_has(tmp_path / "bench.py")


# ---- Without the libraries that only some need -----------------------------------------------------------------------

OPTIONAL = (
    *(
        "llama_cpp",
        "libgguf",
        "gguf",
        "onnx",
        "onnxruntime",
        "onnxruntime_genai",
        "torch",
        "transformers",
        "matplotlib",
    ),
    *("pyopencl", "MNN", "executorch", "litert_lm", "litert_lm_builder", "ai_edge_litert", "flatbuffers", "hls4ml"),
    *("pyosys", "safetensors", "pytest", "hypothesis", "matplotlib", "llguidance", "jsonschema"),
)
SCRIPTS = [path for path in BENCHMARKS if '__name__ == "__main__"' in path.read_text()]
_WITHOUT = f"""
import importlib.abc, os, runpy, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def run():
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")

sys.meta_path.insert(0, Missing())
"""
_ONE = f"""{_WITHOUT}
sys.argv = sys.argv[1:]
run()
"""
# Each in a process of its own, with what is no part of the package imported once for all.
_HELP_OF_ALL = f"""{_WITHOUT}
import numpy, tokenizers

_, folder, *scripts = sys.argv
for script in scripts:
    process = os.fork()
    if process == 0:
        said = os.open(os.path.join(folder, os.path.basename(script)), os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 1), os.dup2(said, 2)
        sys.argv = [script, "--help"]
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), script, flush=True)
else:
    sys.exit()
run()
"""


def without_libraries(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as where nothing optional is installed."""
    command = [sys.executable, "-c", _ONE, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit status of each script that is asked for help where nothing optional is installed, and what it said."""
    folder = tmp_path_factory.mktemp("help")
    command = [sys.executable, "-c", _HELP_OF_ALL, str(folder), *map(str, SCRIPTS)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    each = (line.split(maxsplit=1) for line in ended)
    return {Path(script).name: (int(status), (folder / Path(script).name).read_text()) for status, script in each}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_help_needs_no_library(path: Path, helped: dict[str, tuple[int, str]]) -> None:
    status, said = helped[path.name]
    assert status == 0 and "usage:" in said.lower(), said


def test_a_library_that_is_needed_too_early_is_found(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("import gguf\n")
    done = without_libraries(tmp_path / "bench.py", "--help")
    assert done.returncode == 1 and "No module named 'gguf'" in done.stderr


def test_windows_are_planned() -> None:
    """As docs/memory.md has it; the figures are those of the measurement."""
    script = next(path for path in SCRIPTS if path.name == "plan_windows.py")
    done = without_libraries(script)
    found = json.loads(done.stdout)
    said = json.loads((script.parents[2] / "docs" / "measurements" / "kv-windows.json").read_text())
    assert found["plans"] == said["plans"], done.stderr


# ---- Sampling --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS[0].parent))
    return importlib.import_module("sampled")


def test_each_parameter_of_sampling_is_a_flag_of_the_same_name_as_in_the_command(sampled: ModuleType) -> None:
    elsewhere = {"seed", "loop_guard", "dry_sequence_breakers", "logit_bias"}
    assert {*sampled.FLAGS} == {field.name for field in fields(SamplingParams)} - elsewhere
    known = {name for each in commands()["chat"].params for name in each.opts}
    assert {flag for flag, _ in sampled.FLAGS.values()} <= known


def test_flags_of_sampling_change_what_a_model_or_a_benchmark_begins_with(sampled: ModuleType) -> None:
    def params(*words: str) -> SamplingParams:
        parser = argparse.ArgumentParser()
        sampled.add_sampling_flags(parser)
        found = sampled.sampling(parser.parse_args(words), SamplingParams(temperature=0.2, repeat_penalty=1.1))
        assert isinstance(found, SamplingParams)
        return found

    assert params() == SamplingParams(temperature=0.0, top_p=1.0)
    assert params("--temp", "0.7", "--repeat-last-n", "-1") == SamplingParams(0.7, top_p=1.0, penalty_last_n=-1)
    assert params("--default-chat") == SamplingParams(temperature=0.2, repeat_penalty=1.1)
    changed = params("--default-chat", "--temp", "1.5", "--dry-base", "2", "--logit-bias", "5-inf", "-l", "7+1.5")
    biased = SamplingParams(1.5, repeat_penalty=1.1, dry_base=2.0, logit_bias={5: False, 7: 1.5})
    assert changed == biased
    words = sampled.llama_cpp_flags(changed)
    assert params(*words) == changed and words[-4:] == ["--logit-bias", "5-inf", "--logit-bias", "7+1.5"]


# ---- Commands of the documentation -----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "hls" / "README.md"])


def documented(page: Path) -> Iterator[list[str]]:
    """Command lines of `python tests/benchmarks/...` that a page has, as lists of words, as far as they go."""
    text = re.sub(r"\\\n", " ", page.read_text())
    for line in re.findall(r"python (tests/benchmarks/\w+\.py[^`|#;\n]*(?:\n[^`|#;\n]*(?=`))?)", text):
        with suppress(ValueError):  # a quotation mark of the text around it
            yield shlex.split(line)


def flags_of(script: Path) -> set[str]:
    """Flags that a script takes, and those of the modules beside it that it imports."""
    text = script.read_text()
    beside = [script.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", text, re.MULTILINE)]
    texts = [text, *(path.read_text() for path in beside if path.exists())]
    return {flag for each in texts for flag in re.findall(r'"(--?[\w-]+)"', each)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_of_documented_commands_are_those_of_the_scripts(page: Path) -> None:
    for name, *words in documented(page):
        known = flags_of(ROOT / name)
        wrong = [word for word in words if re.fullmatch(r"--?[a-z][\w-]*", word) and word not in known]
        assert not wrong, (name, wrong)


def test_commands_are_found_in_the_documentation() -> None:
    found = [words[0] for page in PAGES for words in documented(page)]
    assert len(found) > 20 and "tests/benchmarks/plan_windows.py" in found
    assert all((ROOT / name).exists() for name in found)
