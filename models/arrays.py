"""Arrays of a model file's metadata: read-only lists whose elements are created on access.

A vocabulary has 152,000 texts and as many merges, few of which are ever accessed. Creating Python objects for all takes
50 ms.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from edgeinfer.models._strings import StringTable

_T = TypeVar("_T", str, float)
_SHOWN = 100  # elements in a repr: more characters than any message has


class Array(Sequence[_T]):
    """As a list, and equal to one of the same elements."""

    @abstractmethod
    def tolist(self) -> list[_T]:
        """All elements; faster than asking for one after the other."""

    @abstractmethod
    def _chosen(self, indices: slice) -> Array[_T]: ...

    @abstractmethod
    def _at(self, index: int) -> _T: ...

    @overload
    def __getitem__(self, index: int) -> _T: ...

    @overload
    def __getitem__(self, index: slice) -> Array[_T]: ...

    def __getitem__(self, index: int | slice) -> _T | Array[_T]:
        return self._chosen(index) if isinstance(index, slice) else self._at(index)

    def __iter__(self) -> Iterator[_T]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Array, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and self.tolist() == list(other)

    def __repr__(self) -> str:
        if len(self) <= _SHOWN:
            return repr(self.tolist())
        return f"{repr(self[:_SHOWN].tolist())[:-1]}, ...]"


class Strings(Array[str]):
    """Texts. table: the same in C++, for what must be fast."""

    def __init__(self, texts: list[str] | StringTable) -> None:
        self.table = StringTable.of(texts) if isinstance(texts, list) else texts

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        return self.table.equals(other.table) if isinstance(other, Strings) else super().__eq__(other)

    def tolist(self) -> list[str]:
        """All texts as a list."""
        return self.table.tolist()

    def joined_by(self, separator: str) -> bytes:
        """All texts in UTF-8 with a separator between them, without making Python's of them."""
        return self.table.joined_by(separator)

    def _chosen(self, indices: slice) -> Strings:
        first, last, step = indices.indices(len(self))
        if step == 1:
            return Strings(self.table.part(first, max(first, last)))
        return Strings(self.tolist()[indices])

    def _at(self, index: int) -> str:
        return self.table[index]


class Numbers(Array[float]):
    """Integers, floats or truth values: Python's as elements, numpy's for np.asarray, without a copy and read-only."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values.view()
        self._values.flags.writeable = False

    def __len__(self) -> int:
        return len(self._values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._values, dtype, copy=copy)

    def tolist(self) -> list[float]:
        """All numbers as a list."""
        numbers: list[float] = self._values.tolist()
        return numbers

    def _chosen(self, indices: slice) -> Numbers:
        return Numbers(self._values[indices])

    def _at(self, index: int) -> float:
        number: float = self._values[index].item()
        return number
