"""A source on the native engine, tensor by tensor in formats that are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from edgeinfer.backends.native.repacking import RepackableModel, Trace
from edgeinfer.exporters.auto.rounding import Importance, amplified_rows, rounded_bytes
from edgeinfer.exporters.auto.windows import Window
from edgeinfer.exporters.gguf.writer import write_gguf
from edgeinfer.exporters.source import Bytes, Source, SourceTensor
from edgeinfer.files import temporary_folder
from edgeinfer.models import formats, read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.types import Device, Logits


class Rounding(NamedTuple):
    """A format, and what its errors are multiplied by."""

    type: GGMLType
    gain: float


class TrialModel:
    """The model of a source. A context manager.

    held: the type in which each tensor is in memory; those that are not in it are as the source has them.
    n_tokens: of a window at most.
    Raises UnsupportedModel, ModelFileError.
    """

    def __init__(
        self,
        source: Source,
        held: Mapping[str, GGMLType],
        importance: Importance,
        n_tokens: int,
        device: Device,
    ) -> None:
        self._source, self._importance = source, importance
        self._tensors = {tensor.name: tensor for tensor in source.tensors}
        self._held = {name: held.get(name, tensor.type) for name, tensor in self._tensors.items()}
        self._rounded: dict[str, Rounding] = {}
        self._resources = ExitStack()
        try:
            self._file = self._opened(self._resources.enter_context(temporary_folder()))
            spec = read_spec(self._file)
            self.n_layers = spec.n_layers
            self._model = RepackableModel(self._file, spec, n_tokens, device)
        except BaseException:
            self.close()
            raise

    def round(self, name: str, type: GGMLType | None, gain: float = 1.0) -> None:
        """Round a tensor to a format from now on, None to have it as it was.  gain: of its errors."""
        wanted = None if type is None else Rounding(type, gain)
        if self._rounded.get(name) == wanted:
            return
        if wanted is None:
            del self._rounded[name]
        else:
            self._rounded[name] = wanted
        self._model.repack(name)

    def traces(self, windows: Sequence[Window]) -> list[Trace]:
        """Passes of whole windows. Raises Interrupted."""
        return [self._model.trace(window.tokens, window.rows) for window in windows]

    def read(self, windows: Sequence[Window]) -> list[Logits]:
        """The logits of windows. Raises Interrupted."""
        return [self._model.read(window.tokens, window.rows) for window in windows]

    def logits(self, traces: Sequence[Trace], changed: str) -> list[Logits]:
        """What the windows have for logits where a tensor alone has changed since. Raises Interrupted."""
        first = self._model.first_layer_of(changed)
        return [self._model.logits(trace, first) for trace in traces]

    def close(self) -> None:
        """Give everything back."""
        self._resources.close()

    def _opened(self, folder: Path) -> ModelFile:
        """A model file with the metadata of the source, which gives the tensors as they are to be in memory."""
        write_gguf(folder / "trial.gguf", self._source.metadata, [])
        file = self._resources.enter_context(ModelFile.open(folder / "trial.gguf"))
        for name, tensor in self._tensors.items():
            file.define(name, self._held[name], tensor.shape, partial(self._bytes, tensor))
        return file

    def _bytes(self, tensor: SourceTensor, first: int, last: int) -> Bytes:
        """Bytes first..last-1 of a tensor, whole rows, in the type that it is held in."""
        held, rounded = self._held[tensor.name], self._rounded.get(tensor.name)
        row_bytes = held.n_bytes(tensor.n_in)
        first, last = first // row_bytes, last // row_bytes
        if rounded is None or rounded == (held, 1.0):
            return rounded_bytes(tensor, held, self._importance, first, last)
        rows = amplified_rows(tensor, *rounded, self._importance, first, last)
        return np.ascontiguousarray(formats.quantize(held, rows))

    def __enter__(self) -> TrialModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
