"""The stored tensors of a quantised checkpoint, which are taken away as weights are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from edgeinfer.common.errors import ModelFileError
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.exporters.checkpoint.tensor import PlainTensor, Tensor

# What runs with activations in 8 bits needs, and weights do not.
_OF_ACTIVATIONS = (
    *("input_scale", "activation_scale", "input_global_scale", "input_zero_point", "input_scale_ub", "qscale_act"),
    *("k_scale", "v_scale", "q_scale", "output_scale"),
)


class Parts:
    """What is left of the tensors as they are stored."""

    def __init__(self, folder: Path, stored: Mapping[str, StoredTensor]) -> None:
        self._folder = folder
        self._left = dict(stored)

    def ending(self, suffix: str) -> list[str]:
        """What stands before this end of a name, for all names that have it."""
        return [name.removesuffix(suffix) for name in self._left if name.endswith(suffix)]

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def dtype(self, name: str) -> str:
        """Of a tensor that is left, "" where there is none."""
        return self._left[name].dtype if name in self._left else ""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is left, () where there is none."""
        return self._left[name].shape if name in self._left else ()

    def take(self, name: str, dtypes: Sequence[str], n_axes: int | None = None) -> StoredTensor:
        """A tensor of one of these types and with so many axes. Raises ModelFileError."""
        if name not in self._left:
            self.refuse(name, "is missing, which belongs to a quantised weight")
        found = self._left.pop(name)
        if found.dtype not in dtypes:
            self.refuse(name, f"must be {' or '.join(dtypes)}: found {found.dtype}")
        if n_axes is not None and len(found.shape) != n_axes:
            self.refuse(name, f"must have {n_axes} axes: found {found.shape}")
        return found

    def take_if_there(self, name: str, dtypes: Sequence[str], n_axes: int | None = None) -> StoredTensor | None:
        """As take; None where there is none."""
        return self.take(name, dtypes, n_axes) if name in self._left else None

    def drop(self, names: Iterable[str]) -> None:
        """Leave tensors out that nothing needs."""
        for name in names:
            self._left.pop(name, None)

    def rest(self) -> dict[str, Tensor]:
        """What is left, as it stands."""
        return {name: PlainTensor(stored) for name, stored in self._left.items()}

    def drop_activations(self) -> None:
        """Leave out what only serves to quantise activations."""
        self.drop([name for name in self._left if name.rpartition(".")[2].endswith(_OF_ACTIVATIONS)])

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raises ModelFileError about a tensor."""
        raise ModelFileError(f"{self._folder}: tensor {name:.120} {reason}")
