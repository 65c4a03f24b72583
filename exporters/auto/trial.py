"""A source on the native engine, tensor by tensor in formats that are tried."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import NamedTuple

import numpy as np

from edgeinfer.backends.native.repacking import RepackableModel, Trace
from edgeinfer.exporters.auto.rounding import Importance, amplified_rows, rounded_bytes
from edgeinfer.exporters.auto.windows import Window
from edgeinfer.exporters.source import Bytes, Source, SourceTensor
from edgeinfer.exporters.virtual_file import VirtualModelFile, VirtualTensor
from edgeinfer.models import ModelSpec, formats, read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.types import Device, Logits

ReadSpec = Callable[[ModelFile], ModelSpec]
_TIMED, _TIMED_SECONDS = 12, 0.5  # passes at least, and their time: longer than what disturbs some of them


def least_seconds(run: Callable[[], object]) -> float:
    """What something takes that is run again and again, undisturbed."""
    best, n, began = math.inf, 0, time.perf_counter()
    while n < _TIMED or time.perf_counter() - began < _TIMED_SECONDS:
        started = time.perf_counter()
        run()
        best, n = min(best, time.perf_counter() - started), n + 1
    return best


class Rounding(NamedTuple):
    """A format, and what its errors are multiplied by."""

    type: GGMLType
    gain: float


class TrialModel:
    """The model of a source. A context manager.

    held: the type in which each tensor is in memory; those that are not in it are as the source has them.
    n_tokens: of a window at most.  read: the spec of its file.
    Raises UnsupportedModel, ModelFileError.
    """

    def __init__(
        self,
        source: Source,
        held: Mapping[str, GGMLType],
        importance: Importance,
        n_tokens: int,
        device: Device,
        read: ReadSpec = read_spec,
    ) -> None:
        self._held = held
        self._rounded: dict[str, Rounding] = {}
        self._resources = ExitStack()
        try:
            rounded = rounded_file(source, self._held, self._rounded, importance)
            file = self._resources.enter_context(rounded)
            spec = read(file)
            self.n_layers = spec.n_layers
            self._model = RepackableModel(file, spec, n_tokens, device)
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

    def pass_seconds(self, n_tokens: int) -> float:
        """Of a pass of that many tokens, the least of some. Raises Interrupted."""
        tokens = list(range(1, n_tokens + 1))
        return least_seconds(lambda: self._model.read(tokens, [n_tokens - 1]))

    def logits(self, traces: Sequence[Trace], changed: str) -> list[Logits]:
        """What the windows have for logits where a tensor alone has changed since. Raises Interrupted."""
        first = self._model.first_layer_of(changed)
        return [self._model.logits(trace, first) for trace in traces]

    def close(self) -> None:
        """Give everything back."""
        self._resources.close()

    def __enter__(self) -> TrialModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def rounded_file(
    source: Source, held: Mapping[str, GGMLType], roundings: Mapping[str, Rounding], importance: Importance
) -> AbstractContextManager[ModelFile]:
    """A model file with the metadata of a source, which gives the tensors as they are to be in memory.

    held: see TrialModel.  roundings: of tensors, as they are when one is read.
    """

    def virtual(tensor: SourceTensor) -> VirtualTensor:
        type = held.get(tensor.name, tensor.type)
        return VirtualTensor(tensor.name, type, tensor.shape, partial(_bytes, tensor, type, roundings, importance))

    return VirtualModelFile.of(source.path, source.metadata, map(virtual, source.tensors))


def _bytes(
    tensor: SourceTensor,
    held: GGMLType,
    roundings: Mapping[str, Rounding],
    importance: Importance,
    first: int,
    last: int,
) -> Bytes:
    """Bytes first..last-1 of a tensor, whole rows, in the type that it is held in."""
    rounded = roundings.get(tensor.name)
    row_bytes = held.n_bytes(tensor.n_in)
    first, last = first // row_bytes, last // row_bytes
    if rounded is None or rounded == (held, 1.0):
        return rounded_bytes(tensor, held, importance, first, last)
    rows = amplified_rows(tensor, *rounded, importance, first, last)
    return np.ascontiguousarray(formats.quantize(held, rows))
