"""The model file changes while llama.cpp has it mapped: the typed error of each pass, and of a start anew."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from changes import Change, copy_over, copy_over_with_its_time, cut_to_nothing, rename_over
from parts import missing
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import ModelFileChanged

try:
    import llama_cpp  # noqa: F401
except ImportError:
    missing("llama", "llama-cpp-python is not installed")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    (tmp_path / "other").mkdir()
    yield tuple(write_tiny_model(tmp_path / name / "m.gguf", seed=seed) for seed, name in enumerate((".", "other")))  # type: ignore[misc]


@pytest.mark.parametrize("change", [copy_over, copy_over_with_its_time, cut_to_nothing])
def test_each_pass_on_a_changed_file_is_the_same_error(files: tuple[Path, Path], change: Change) -> None:
    with edgeinfer.load(files[0], n_ctx=64, backend="llama.cpp") as engine:
        engine.generate("hello", max_tokens=4)
        change(*files)
        for _ in range(2):
            with pytest.raises(ModelFileChanged, match="m.gguf: the file has changed"):
                engine.generate("hello", max_tokens=4)


def test_a_process_that_has_crashed_does_not_load_another_model(files: tuple[Path, Path]) -> None:
    with edgeinfer.load(files[0], n_ctx=64, backend="llama.cpp") as engine:
        text = engine.generate("hello", max_tokens=4, temperature=0.0).text
        rename_over(*files)
        assert engine.generate("hello", max_tokens=4, temperature=0.0).text == text
        os.kill(engine.session.model.process_ids[0], signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(edgeinfer.BackendLost):
            engine.generate("hello", max_tokens=4)
        with pytest.raises(edgeinfer.BackendLost, match="and failed: .* is another file than the one that was opened"):
            engine.generate("hello", max_tokens=4)
