"""Where torch or matplotlib is not installed, the command says so before any work."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from parts import missing

from edgeinfer.cli import main


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "hello"}))
    return ["distill", "m.gguf", "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "h.gguf")]


def test_distill_names_the_extra_that_is_missing(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("edgeinfer.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1 and "distill needs torch: pip install 'edgeinfer[train]'" in result.stderr


def test_the_plot_is_refused_before_anything_is_trained(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if importlib.util.find_spec("torch") is None:
        missing("train", "torch is not installed: pip install 'edgeinfer[train]'")
    monkeypatch.setattr("edgeinfer.cli.plotting.importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(main, [*arguments, "--plot", str(tmp_path / "h.png")])
    assert result.exit_code == 1 and "--plot needs matplotlib: pip install 'edgeinfer[plot]'" in result.stderr
    assert not list(tmp_path.glob("h.gguf*"))
