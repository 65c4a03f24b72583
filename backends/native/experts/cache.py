"""A cache of experts that are read from disk when a pass wants them: opening one, and its memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import _core
from edgeinfer.backends.native.experts.model_experts import EXPERT_ROLES, ModelExperts
from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import InvalidArgument, ModelFileError
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.gguf_reader.mapping import MappedFile

N_READERS = 3  # threads: more do not read faster, and the first of several experts comes later


class ExpertCache:
    """The experts of a loaded model, of which a cache holds some; layers are those of the model. Thread-safe.

    n_bytes: of the cache's slots, as planned.  record_bytes: by layer, of an expert in memory, 0 for a layer without
    experts.
    """

    def __init__(self, store: _core.DiskExperts, decoder: _core.Decoder, n_bytes: int) -> None:
        self._store = store
        assert decoder.predictor is not None  # the model has experts
        self._decoder = decoder
        self._predictor = decoder.predictor
        self.record_bytes: Sequence[int] = store.record_bytes
        self.n_bytes = n_bytes

    def stats(self) -> _core.ExpertStats:
        """What the cache did since it was made."""
        return self._store.stats()

    def pass_stats(self) -> _core.ExpertLayerStats:
        """What it did since the last pass began, for all layers together."""
        return self._store.pass_stats()

    def presence(self) -> NDArray[np.uint8]:
        """(n_layers, most experts of a layer): 1 for experts that are in memory."""
        return self._store.presence()

    def routing(self) -> NDArray[np.int32]:
        """The experts of the last pass, (n_layers, n_rows, n_used); -1 for none."""
        return self._decoder.routing()

    def set_prefetch(self, layer: int, n: int) -> None:
        """In passes of few rows, read so many experts of a layer ahead for each row, 0 for none.

        They are those that its router finds most probable, given what the layer before it is given.
        """
        self._predictor.set(layer, n)

    def observe(self, every: int) -> None:
        """In every so many passes of few rows, predict layers too that are not read ahead, to count; 0 for never."""
        self._predictor.observe(every)

    def predictions(self) -> list[tuple[int, int]]:
        """By layer, how many experts were predicted, and how many of these were wanted."""
        return [self._predictor.counts(layer) if n_bytes else (0, 0) for layer, n_bytes in enumerate(self.record_bytes)]

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """A layer will probably want these, the most probable first: they are read while nothing else is."""
        self._store.hint(layer, list(experts))

    def resize(self, n_bytes: int) -> int:
        """Between passes: use slots of so many bytes from now on, at most n_bytes of the cache and at least what a pass
        needs; gives how many those are. Memory beyond that goes back to the system.
        """
        self._store.resize(n_bytes)
        return self._store.slot_bytes

    def warm(self, experts: Sequence[tuple[int, int]]) -> None:
        """Read these (layer, expert) in the background into room that is free, in the order of the file."""
        self._store.warm(list(experts))

    def forget_use(self, layer: int, experts: Sequence[int]) -> None:
        """Only a rejected draft wanted these in the last pass: their recency is again what it was before."""
        self._store.forget_use(layer, list(experts))


def cache_bytes(experts: ModelExperts, n_bytes: int, is_packed: bool) -> int:
    """Memory of a cache with slots of n_bytes: slots, buffers and tables. is_packed: read from a packed file.

    Raises InvalidArgument, with the number that works, for fewer bytes than a pass needs.
    """
    check_cache_size(experts, n_bytes)
    largest = max((part.n_bytes for layer in experts.layers for part in layer.parts), default=0)
    buffer = 0 if is_packed else _core.ExpertSource.buffer_bytes_of(largest)
    return _core.DiskExperts.planned_bytes(experts.layout, buffer, n_bytes, experts.n_used, N_READERS)


def check_cache_size(experts: ModelExperts, n_bytes: int) -> None:
    """Raises InvalidArgument, with the number that works, for fewer bytes than a pass needs."""
    least = experts.least_cache
    if n_bytes < least:
        raise InvalidArgument(
            f"an expert cache of {human_bytes(n_bytes)} is too small: a pass needs {human_bytes(least)} "
            f"({experts.n_used} experts of a layer); use --expert-cache {least} or more"
        )


def open_cache(
    experts: ModelExperts, model: ModelFile, n_bytes: int, packed: tuple[MappedFile, int] | None
) -> _core.DiskExperts:
    """An empty cache with slots of n_bytes.

    packed: file of the records and their first byte in it; None where they are packed as they are read from the model's
    files. Raises ModelFileError, InvalidArgument.
    """
    check_cache_size(experts, n_bytes)
    try:
        source = _of_model(experts, model) if packed is None else _of_packed(experts, *packed)
    except RuntimeError as error:
        raise ModelFileError(str(error)) from error
    for watch in model.watches() if packed is None else [packed[0].watch]:
        watch.check_name()  # files were opened by their names
    return _core.DiskExperts(source, n_bytes, experts.n_used, N_READERS)


def _of_packed(experts: ModelExperts, file: MappedFile, offset: int) -> _core.ExpertSource:
    names = [f"experts of layer {layer}" for layer in range(experts.layout.n_layers)]
    return _core.ExpertSource.packed(experts.layout, str(file.path), offset, names)


def _of_model(experts: ModelExperts, model: ModelFile) -> _core.ExpertSource:
    tensors = []
    for layer in experts.layers:
        for part in layer.parts:
            first = part.slice_of(model, 0)
            tensors.append((f"tensor {first.name}", first.part, first.offset, part.expert_bytes, int(part.type), 1.0))
    assert len(tensors) == len(EXPERT_ROLES) * len(experts.layers)
    return _core.ExpertSource.unpacked(experts.layout, [str(path) for path in model.paths], tensors)
