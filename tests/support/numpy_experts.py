"""Experts in numpy in place of a device: what it gives, and how it may fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.reference_math import gated
from edgeinfer.models import ExpertRows, Experts, ModelSpec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile

Floats = NDArray[np.float32]


class NumpyExperts:
    """See backends.base.ExpertDevice.

    takes: which experts of a layer it computes.  fails: at which of its calls of finish, from 0, it gives None.
    raises: what start raises, if anything.  calls: (layer, experts, rows) of each start.
    """

    def __init__(
        self,
        file: ModelFile,
        spec: ModelSpec,
        takes: Callable[[int, int], bool] = lambda layer, expert: expert % 2 == 0,
        fails: Callable[[int], bool] = lambda call: False,
        raises: BaseException | None = None,
    ) -> None:
        self._file, self._spec = file, spec
        self._takes, self._fails, self._raises = takes, fails, raises
        self.calls: list[tuple[int, list[int], list[int]]] = []
        self._outputs = np.empty((0, 0), np.float32)

    def choose(self, layer: int, experts: Sequence[int], rows: Sequence[int]) -> list[int]:
        assert len(experts) == len(rows) == len(set(experts)) and min(rows) > 0
        return [expert for expert in experts if self._takes(layer, expert)]

    def start(self, layer: int, experts: Sequence[int], rows: Sequence[int], inputs: Floats) -> None:
        self.calls.append((layer, list(experts), list(rows)))
        if self._raises is not None:
            raise self._raises
        block = self._spec.layers[layer].ffn
        assert isinstance(block, Experts) and len(inputs) == sum(rows)
        parts = np.split(inputs, np.cumsum(rows)[:-1])
        self._outputs = np.concatenate(
            [expert_outputs(self._file, block, expert, x) for expert, x in zip(experts, parts, strict=True)]
        )

    def finish(self) -> Floats | None:
        return None if self._fails(len(self.calls) - 1) else self._outputs


def expert_outputs(file: ModelFile, block: Experts, expert: int, x: Floats) -> Floats:
    """f_e of rows x (n, n_embd), in float32."""

    def tensor(role: str) -> Floats | None:
        ref = getattr(block, role)
        if ref is None:
            return None
        name = ref.name if isinstance(ref, ExpertRows) else ref
        of_expert = dequantize(file.tensors[name].type, file.data(name), file.tensors[name].shape)[expert]
        found: Floats = of_expert[ref.first : ref.last] if isinstance(ref, ExpertRows) else of_expert
        return found

    def product(role: str, x: Floats) -> Floats:
        matrix, scale, bias = tensor(role), tensor(f"{role}_scale"), tensor(f"{role}_bias")
        assert matrix is not None
        y = x @ matrix.T
        y = y if scale is None else y * scale
        return y if bias is None else y + bias

    found: Floats = product("down", gated(block.activation, product("gate", x), product("up", x))).astype(np.float32)
    return found
