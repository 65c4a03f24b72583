"""A program that ends while daemon threads are in native code ends with its own status."""

import subprocess
import sys
from pathlib import Path

import pytest
from end_in_use import ENDINGS
from tiny_models import write_tiny_model

SCRIPT = Path(__file__).parents[1] / "support" / "end_in_use.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_status_is_that_of_the_program(model: Path, ending: str) -> None:
    command = [sys.executable, str(SCRIPT), str(model), ending]
    for _ in range(4):  # 20 of all endings
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (run.returncode, "terminate called" in run.stderr) == (ENDINGS[ending], False), run.stderr
