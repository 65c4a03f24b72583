"""The keys of one architecture in a model file, checked one by one."""

from __future__ import annotations

from typing import NoReturn

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models.arrays import Array
from edgeinfer.models.gguf import ModelFile


class KeyReader:
    """Reads keys of a file; they are named without the architecture in front."""

    def __init__(self, architecture_name: str, file: ModelFile) -> None:
        self.architecture_name = architecture_name
        self.file = file

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """An integer key, which must be in least..most; it may be there for each layer, if it is the same for all."""
        value = self.file.metadata.get(self._key(key), default)
        if isinstance(value, (Array, list)) and len(value) == self.file.metadata.get(self._key("block_count")):
            value = value[0] if len(set(value)) == 1 else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(key, f"must be an integer in {least}..{most}: found {value!r:.80}")
        return value

    def of_layers(self, key: str, least: int, most: int, default: int | None = None) -> list[int]:
        """An integer key for each of block_count layers, in least..most; it may be one number for all of them."""
        n_layers = self.file.metadata.get(self._key("block_count"))
        values = self.file.metadata.get(self._key(key), default)
        if not isinstance(values, (Array, list)):
            return [self.integer(key, least, most, default)] * self.integer("block_count", 1, 4096)
        if len(values) != n_layers:
            self.refuse(key, f"must have a number for each of {n_layers} layers: found {len(values)}")
        found = [value for value in values if not isinstance(value, bool) and isinstance(value, int)]
        if len(found) < len(values) or not all(least <= value <= most for value in found):
            self.refuse(key, f"must be integers in {least}..{most}: found {values!r:.80}")
        return found

    def number(self, key: str, above: float, most: float, default: float | None = None) -> float:
        """A numeric key, which must be greater than above and at most most."""
        value = self.file.metadata.get(self._key(key), default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most:
            self.refuse(key, f"must be a number above {above:g}, at most {most:g}: found {value!r:.80}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A key that is true or false."""
        value = self.file.metadata.get(self._key(key), default)
        if not isinstance(value, bool):
            self.refuse(key, f"must be true or false: found {value!r:.80}")
        return value

    def scale(self, key: str, default: float) -> float:
        """A positive factor. Where it is absent, or 0 as llama.cpp writes what it does not know, the default."""
        if self.file.metadata.get(self._key(key)) in (None, 0):
            return default
        return self.number(key, 0.0, 1e6)

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raises UnsupportedModel with the whole key."""
        raise UnsupportedModel(f"{self.file.path}: {self._key(key)} {reason}")

    def refuse_tensor(self, name: str, reason: str) -> NoReturn:
        """The same about a tensor."""
        raise UnsupportedModel(f"{self.file.path}: tensor {name} {reason}")

    def _key(self, name: str) -> str:
        return f"{self.architecture_name}.{name}"
