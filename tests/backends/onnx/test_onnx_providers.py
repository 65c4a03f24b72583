"""Execution providers of ONNX Runtime: what is listed, what is tried, and what is said where something is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.onnx import ProviderInfo, check_provider, choose_provider, library, list_providers, runtime
from edgeinfer.cli.devices import _provider_lines
from edgeinfer.common.errors import BackendUnavailable, InvalidArgument


def devices_process(*arguments: str, **environment: str) -> str:
    """What the command prints in such an environment."""
    command = [sys.executable, "-P", "-c", "from edgeinfer.cli import main; main()", "devices", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("name", ["cpu", "CPUExecutionProvider"])
def test_a_provider_is_chosen_by_name(name: str, onnx_provider: ProviderInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_provider(name).name == "CPU"
    monkeypatch.setenv("EDGEINFER_ONNX_PROVIDER", name)
    assert choose_provider().full_name == "CPUExecutionProvider"
    monkeypatch.setenv("EDGEINFER_ONNX_PROVIDER", "Abacus")
    with pytest.raises(InvalidArgument, match="no execution provider 'Abacus'; it has .*CPU"):
        choose_provider()


def test_what_sends_a_model_away_is_no_provider(onnx_provider: ProviderInfo) -> None:
    assert all(info.name != "Azure" for info in list_providers())


def test_providers_are_listed_and_pass_their_check(onnx_provider: ProviderInfo) -> None:
    found = json.loads(devices_process("--json"))["onnx"]
    cpu = next(each for each in found["devices"] if each["name"] == "CPU")
    assert found["reason"] is None and cpu["reason"] is None and cpu["available_memory_bytes"] > 0
    text = devices_process()
    assert text.startswith("CPU") and f"ONNX Runtime    CPU, version {cpu['version']}" in text


def test_a_provider_of_the_standard_alone_is_checked_too(onnx_provider: ProviderInfo) -> None:
    assert check_provider(ProviderInfo("CPU", (), "plain")) is None


def test_a_provider_that_is_not_there_or_computes_wrongly_is_not_usable(
    onnx_provider: ProviderInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = check_provider(ProviderInfo("Abacus", (), "plain"))
    assert reason is not None and "Abacus" in reason
    monkeypatch.setattr(runtime.Program, "run", lambda self, binding: None)
    reason = check_provider(choose_provider("CPU"))
    assert reason is not None and "wrong numbers" in reason


def test_memory_that_is_not_known_is_said_to_be_so() -> None:
    provider = {"name": "CUDA", "version": "1.31.1", "hardware": [("gpu", "Acme")], "operators": "contrib"}
    provider |= {"draft_device": "onnx:0", "reason": None, "available_memory_bytes": None}
    lines = "\n".join(_provider_lines(provider))
    assert "memory        not told by ONNX Runtime" in lines and "gpu of Acme" in lines


@pytest.mark.parametrize("module", ["onnx", "onnxruntime"])
def test_without_the_packages_the_extra_is_named(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module named {module}')")
    text = devices_process(PYTHONPATH=str(tmp_path))
    assert text.startswith("CPU") and "ONNX Runtime    none: ONNX needs" in text
    assert "pip install 'edgeinfer[onnx]'" in text
    for opened in (library.open_library, library.open_onnx):
        opened.cache_clear()
        monkeypatch.setitem(sys.modules, module, None)
    path = write_tiny_model(tmp_path / "m.gguf", "llama", "F32")
    with pytest.raises(BackendUnavailable, match="edgeinfer\\[onnx\\]"):
        edgeinfer.load(path, backend="onnx")
    assert np.isfinite(edgeinfer.load(path).session.forward([1, 2]).logits).all()  # others do not need it
    library.open_library.cache_clear()
    library.open_onnx.cache_clear()
