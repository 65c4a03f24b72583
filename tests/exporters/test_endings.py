"""Exports that Ctrl-C or another signal ends: what stays, what is said, the exit code, and that no process stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_models import write_tiny_model

from edgeinfer import cli

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

# Runs the command, which stops at a place, says so, and waits.
PROGRAM = """
import sys, time
def stop(*_):
    print("here", flush=True)
    time.sleep(60)
{change}
from edgeinfer import cli
sys.argv[0] = "edgeinfer"
cli.main()
"""
AFTER_TWO_TENSORS = """
from edgeinfer.exporters.gguf.partial import PartialFile
write = PartialFile._write
def slow(self, tensor):
    stop() if len(self.done) == 2 else write(self, tensor)
PartialFile._write = slow
"""
WHILE_IT_IS_CHECKED = """
from edgeinfer.exporters.gguf import target
target._checked = stop
"""
IN_A_PACKAGE = """
from edgeinfer.exporters import tokenizer_json
tokenizer_json.write_tokenizer = stop
"""
WITH_A_CHILD = """
from edgeinfer.exporters.genai import target
target._RUNTIME = "sleeper"
"""
SLEEPER = """
import os, sys, time
def answer(question):
    with open({path!r}, "w") as file:
        file.write(str(os.getpid()))
    os.rename({path!r}, {path!r} + ".done")
    time.sleep(60)
"""


def begun(change: str, *arguments: str | Path, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(change=change), "export", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **more}
    )


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Exit code and stderr."""
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    _, words = process.communicate(timeout=60)
    return process.returncode, words


@pytest.mark.parametrize(
    "change, number, code, how",
    [
        (AFTER_TWO_TENSORS, 2, 130, "interrupted"),
        (AFTER_TWO_TENSORS, 1, 129, "ended by SIGHUP"),
        (WHILE_IT_IS_CHECKED, 15, 143, "ended by SIGTERM"),
    ],
)
def test_a_gguf_export_that_a_signal_ends_is_resumed(
    change: str, number: int, code: int, how: str, tmp_path: Path
) -> None:
    source, out = write_tiny_model(tmp_path / "a.gguf", "llama", "F16"), tmp_path / "b.gguf"
    arguments = (source, "--to", "gguf", "--type", "Q8_0", "-o", out)
    found, words = ended(begun(change, *arguments), number)
    assert found == code and how in words
    assert f"what is written stays in {out}.partial: the same command with --resume goes on there" in words
    assert not out.exists() and "Traceback" not in words
    assert CliRunner().invoke(cli.main, ["export", *map(str, arguments), "--resume"]).exit_code == 0
    whole = tmp_path / "c.gguf"
    CliRunner().invoke(cli.main, ["export", *map(str, arguments[:-1]), str(whole)])
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.partial*"))


@pytest.mark.parametrize("number, code, type", [(2, 130, []), (15, 143, ["--type", "Q8_0"])])
def test_a_package_that_a_signal_ends_leaves_nothing(number: int, code: int, type: list[str], tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    source, out = write_tiny_model(tmp_path / "a.gguf", "llama", "Q8_0"), tmp_path / "b"
    process = begun(IN_A_PACKAGE, source, "--to", "genai", "-c", "64", "--no-check", *type, "-o", out)
    found, words = ended(process, number)
    assert found == code and "nothing is left of it" in words
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_the_runtime_of_a_check_ends_with_the_command(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    pid_file = tmp_path / "pid"
    (tmp_path / "sleeper.py").write_text(SLEEPER.format(path=str(pid_file)))
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "Q8_0")
    process = begun(WITH_A_CHILD, source, "--to", "genai", "-c", "128", "-o", tmp_path / "b", PYTHONPATH=str(tmp_path))
    while not (written := pid_file.with_name("pid.done")).exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 143 and "ended by SIGTERM" in words
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)
    assert not (tmp_path / "b").exists() and not list(tmp_path.glob("*partial*"))
