"""Model files that are not on disk give what whole files give, and are gone with the block that made them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_model

from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.errors import ModelFileError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.exporters.gguf.writer import Tensor
from edgeinfer.exporters.source import GgufSource
from edgeinfer.exporters.virtual_file import VirtualModelFile, virtual_tensor
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "a.gguf", "llama", "Q8_0")


def test_it_has_the_keys_and_bytes_of_the_source_and_leaves_nothing(tiny: Path) -> None:
    with ModelFile.open(tiny) as whole:
        source = GgufSource(whole)
        with VirtualModelFile.of(tiny, source.metadata, map(virtual_tensor, source.tensors)) as file:
            assert read_spec(file) == read_spec(whole)
            for name, info in whole.tensors.items():
                assert file.makes(name) and file.tensors[name].shape == info.shape
                assert np.array_equal(file.data(name), whole.data(name))
                row_bytes = info.n_bytes // (info.n_elements // info.shape[-1])
                assert np.array_equal(file.data(name, 0, row_bytes), whole.data(name, 0, row_bytes))
            assert file.path.exists()
        assert not file.path.exists()


def test_errors_name_what_the_user_named(tiny: Path) -> None:
    named = Path("/models/of the user")
    with (
        pytest.raises(ModelFileError, match="^/models/of the user: is damaged$"),
        VirtualModelFile.of(named, {}, []) as file,
    ):
        raise ModelFileError(f"{file.path}: is damaged")


def test_without_matrices_it_is_planned_as_the_whole_file(tiny: Path) -> None:
    with ModelFile.open(tiny) as whole:
        source = GgufSource(whole)
        tensors = [
            Tensor(each.name, each.type, each.shape, lambda name=each.name: [whole.data(name)])  # type: ignore[misc]
            for each in source.tensors
        ]
        with VirtualModelFile.without_matrices(tiny, source.metadata, tensors) as file:
            assert read_spec(file) == read_spec(whole)
            assert file.n_bytes == whole.n_bytes and not any(map(file.makes, file.tensors))
            assert not file.data("token_embd.weight").any()
            plans = [
                NativeBackend().plan(each, read_spec(each), LoadSettings(64, n_batch=16, n_threads=1))
                for each in (file, whole)
            ]
            assert plans[0] == plans[1]
