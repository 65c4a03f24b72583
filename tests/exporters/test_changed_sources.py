"""A source that changes while something is made of it: the typed error, and nothing is left."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoints
from changes import Change, copy_over, copy_over_with_its_time, cut, cut_to_nothing, remove, rename_over
from checkpoints import byte_level
from click.testing import CliRunner
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.common.errors import BackendUnavailable, EdgeInferError, ModelFileChanged, ModelFileError
from edgeinfer.exporters.calibration import collect
from edgeinfer.exporters.checks import comparison
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.source import open_source
from edgeinfer.exporters.targets import open_target
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.models.gguf import ModelFile

CHANGES = [copy_over, copy_over_with_its_time, cut, cut_to_nothing, rename_over, remove]
# Target, type of the source, type that is wanted, other options.
CASES = {
    "quantised": ("gguf", "F16", "Q4_0", {}),
    "copied": ("gguf", "Q8_0", None, {}),
    "ternary": ("ternary", "I2_S", None, {"format": "tq2_0"}),
    "fpga": ("fpga", "I2_S", None, {}),
    "onnx": ("onnx", "Q8_0", None, {}),
    "genai": ("genai", "Q8_0", None, {}),
    "litertlm": ("litertlm", "Q8_0", None, {}),
    "mnn": ("mnn", "Q8_0", None, {}),
    "mnn quantised": ("mnn", "F16", "Q8_0", {}),
}


def model(path: Path, kind: str, seed: int = 0) -> Path:
    path.parent.mkdir(exist_ok=True)
    return write_tiny_model(path, "bitnet-b1.58" if kind == "I2_S" else "llama", kind, seed=seed)  # type: ignore[arg-type]


class Once:
    """A progress that changes a file when it is called with at least a share, the first time."""

    def __init__(self, change: Callable[[], None], share: float) -> None:
        self.change, self.share, self.is_done = change, share, False

    def __call__(self, share: float) -> None:
        if share >= self.share and not self.is_done:
            self.is_done = True
            self.change()


SOME = [(copy_over, 0.01), (cut, 0.01), (rename_over, 1.0)]


@pytest.mark.parametrize(
    "case, change, share",
    [(case, *when) for case in CASES for when in SOME] + [("copied", change, 1.0) for change in CHANGES],
)
def test_each_target_refuses_a_source_that_changed(tmp_path: Path, case: str, change: Change, share: float) -> None:
    to, kind, wanted, more = CASES[case]
    source, other = model(tmp_path / "in" / "m.gguf", kind), model(tmp_path / "other" / "m.gguf", kind, seed=1)
    out = tmp_path / "out" / ("made.litertlm" if to == "litertlm" else "made")
    out.parent.mkdir()
    target, request = open_target(to), Request(source, out, wanted, n_ctx=64, check=False, more=more)
    progress = Once(lambda: change(source, other), share)
    try:
        target.plan(request)
        with pytest.raises(ModelFileChanged, match=rf"{source}: the file has changed while it was in use: it was"):
            target.write(request, progress)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert progress.is_done
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_so_is_a_folder_of_hugging_face(tmp_path: Path, name: str, change: Change) -> None:
    source, out = tmp_path / "in", tmp_path / "out" / "made.gguf"
    out.parent.mkdir()
    for seed, folder in enumerate((source, tmp_path / "other")):
        folder.mkdir()
        n_vocab = byte_level(folder).get_vocab_size()
        tiny_checkpoints.write(folder, "llama", {"rms_norm_eps": 1e-5 + seed * 1e-6, "vocab_size": n_vocab})
    progress = Once(lambda: change(source / name, tmp_path / "other" / name), 0.01)
    with pytest.raises(ModelFileChanged, match=name):
        open_target("gguf").write(Request(source, out, "Q8_0", check=False), progress)
    assert list(out.parent.iterdir()) == []


def test_a_change_between_plan_and_export_is_found(tmp_path: Path) -> None:
    source, other = model(tmp_path / "m.gguf", "F16"), model(tmp_path / "other" / "m.gguf", "F16", seed=1)
    target, request = open_target("gguf"), Request(source, tmp_path / "out.gguf", "Q8_0", check=False)
    target.plan(request)
    rename_over(source, other)
    with pytest.raises(ModelFileChanged, match="was replaced"):
        target.write(request, lambda share: None)
    target.plan(request)
    target.write(request, lambda share: None)


def test_a_change_during_the_check_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, other = model(tmp_path / "m.gguf", "F16"), model(tmp_path / "other" / "m.gguf", "F16", seed=1)
    real, n_calls = comparison._logits, []

    def logits(file: ModelFile, tokens: list[int]) -> comparison.Logits:
        if not n_calls:
            copy_over(source, other)
        n_calls.append(file.path)
        return real(file, tokens)

    monkeypatch.setattr(comparison, "_logits", logits)
    out = tmp_path / "out.gguf"
    run = CliRunner().invoke(cli.main, ["export", str(source), "--to", "gguf", "--type", "Q8_0", "-o", str(out)])
    assert run.exit_code == 3 and f"{source}: the file has changed" in run.stderr and n_calls
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_another_model_is_no_copy(tmp_path: Path) -> None:
    source, other = model(tmp_path / "m.gguf", "F16"), model(tmp_path / "other.gguf", "F16", seed=1)
    with open_source(source) as opened:
        assert comparison.compare(opened, source, is_lossless=False).facts["kl"] == 0
        with pytest.raises(ModelFileError, match=r"is another model than its source: KL \d+.*has 5.7 at most"):
            comparison.compare(opened, other, is_lossless=False)


@pytest.mark.parametrize("change", [copy_over, cut])
def test_an_importance_matrix(tmp_path: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    source, other = model(tmp_path / "m.gguf", "Q8_0"), model(tmp_path / "other" / "m.gguf", "Q8_0", seed=1)
    real = collect.imatrix_of

    def changed(*arguments: object) -> object:
        found = real(*arguments)  # type: ignore[arg-type]
        change(source, other)
        return found

    monkeypatch.setattr(collect, "imatrix_of", changed)
    text = tmp_path / "text"
    text.write_text("hello world, there is the one " * 40)
    out = tmp_path / "imatrix.gguf"
    run = CliRunner().invoke(cli.main, ["imatrix", str(source), "--calibration", str(text), "-o", str(out)])
    assert run.exit_code == 3 and f"{source}: the file has changed" in run.stderr
    assert not out.exists()


# ---- a file that is cut while it is read through its mapping ---------------------------------------------------------

_CUT = """
import os, sys
from edgeinfer.cli import main
from edgeinfer.models.gguf import ModelFile
real, left = ModelFile.data, [int(sys.argv[1])]
def data(self, name, *place):
    found = real(self, name, *place)
    left[0] -= 1
    if left[0] == 0:
        os.truncate(self.path, 512)
    return found
ModelFile.data = data
main(sys.argv[2:])
"""
COMMANDS = {
    "pack": ["pack", "SOURCE"],
    "gguf": ["export", "SOURCE", "--to", "gguf", "--type", "Q4_0", "-o", "OUT"],
    "copy": ["export", "SOURCE", "--to", "gguf", "-o", "OUT"],
    "imatrix": ["imatrix", "SOURCE", "--calibration", "TEXT", "-o", "OUT"],
    "litertlm": ["export", "SOURCE", "--to", "litertlm", "--no-check", "-o", "OUT.litertlm"],
    "genai": ["export", "SOURCE", "--to", "genai", "--no-check", "-o", "OUT"],
    "mnn": ["export", "SOURCE", "--to", "mnn", "--no-check", "-o", "OUT"],
    "generate": ["generate", "-m", "SOURCE", "-p", "hello", "-n", "2"],
}


@pytest.mark.parametrize("n_reads", [1, 9])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_ends_with_a_signal(tmp_path: Path, command: str, n_reads: int) -> None:
    needed = {"litertlm": "ai_edge_litert", "genai": "onnxruntime_genai", "mnn": "_mnncengine"}.get(command)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    source = model(tmp_path / "m.gguf", "F16")
    text = tmp_path / "text"
    text.write_text("hello world " * 100)
    places = {
        "SOURCE": str(source),
        "OUT": str(tmp_path / "out"),
        "OUT.litertlm": str(tmp_path / "out.litertlm"),
        "TEXT": str(text),
    }
    arguments = [places.get(word, word) for word in COMMANDS[command]]
    command_line = [sys.executable, "-c", _CUT, str(n_reads), *arguments]
    run = subprocess.run(command_line, capture_output=True, text=True, timeout=120)
    assert run.returncode == 3, run.stderr
    assert f"{source}: the file has changed while it was in use: it was" in run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "text"]


def test_a_folder_for_a_board_that_is_cut(tmp_path: Path) -> None:
    source = model(tmp_path / "m.gguf", "I2_S")
    open_target("fpga").write(Request(source, tmp_path / "board", n_ctx=64, check=False), lambda share: None)
    folder = BoardFolder.open(tmp_path / "board")
    name = next(iter(folder.tensors))
    assert folder.trits(name).any()
    for path in (tmp_path / "board").glob("*.bin"):
        os.truncate(path, 0)
    with pytest.raises(EdgeInferError, match="the file has changed while it was in use: it was .* ends at"):
        folder.trits(name)


def test_an_export_beside_a_change_of_other_files_goes_on(tmp_path: Path) -> None:
    source = model(tmp_path / "m.gguf", "F16")
    beside = shutil.copy(source, tmp_path / "beside.gguf")
    progress = Once(lambda: os.truncate(beside, 0), 0.01)
    open_target("gguf").write(Request(source, tmp_path / "out.gguf", "Q8_0", check=False), progress)
    assert progress.is_done and (tmp_path / "out.gguf").exists()
