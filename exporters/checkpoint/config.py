"""config.json, each key checked when it is read, in the spellings of transformers 4 and 5.

What changed from 4 to 5: torch_dtype is dtype; rope_theta, rope_scaling and partial_rotary_factor are in
rope_parameters, which may have an entry for each type of layer, "full_attention" and "sliding_attention". Models that
also see or hear have the language model's keys in text_config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from edgeinfer.common.arguments import MAX_INT32, shown
from edgeinfer.common.errors import ModelFileError, UnsupportedModel

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
_NESTED = ("text_config", "llm_config", "language_config", "text_model_config")
_ROPE_NAMES = {"su": "longrope"}  # what the first Phi-3 called it


@dataclass(frozen=True)
class Rope:
    """How the heads of a type of layer are rotated."""

    kind: str  # "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"
    theta: float  # the base
    share: float  # of the numbers of a head that are rotated, 1 for all
    values: Config  # what the kind has besides, such as factor


class Config:
    """The keys of config.json or of a part of it. A key that is null counts as missing.

    path: of the file.  prefix: of the part, such as "text_config.", for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.path = path
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> Any:
        """A value as it stands there, None where it is missing."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_INT32) -> int:
        """An integer in least..most. Raises ModelFileError, also where it is missing and has no default."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.fail(key, f"an integer in {least}..{most}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, most: float = 1e30) -> float:
        """A number greater than above, at most most. Raises ModelFileError, see integer."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
            self.fail(key, f"a number above {above:g}, at most {most:g}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false. Raises ModelFileError, see integer."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text. Raises ModelFileError, see integer."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self.fail(key, "a text")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of these texts. Raises UnsupportedModel for another one, ModelFileError for what is no text."""
        value = self.text(key, default)
        if value not in choices:
            self.refuse(key, f"must be {' or '.join(choices)}")
        return value

    def integers(self, key: str, n: int | None = None, *, least: int = 0, most: int = MAX_INT32) -> list[int]:
        """A list of n integers in least..most, of any number without n. Raises ModelFileError."""
        value = self._list(key, n, f"integers in {least}..{most}")
        if any(isinstance(each, bool) or not isinstance(each, int) or not least <= each <= most for each in value):
            self.fail(key, f"a list of integers in {least}..{most}")
        return value

    def numbers(self, key: str, n: int | None = None) -> list[float]:
        """A list of n finite numbers, of any number without n. Raises ModelFileError."""
        value = self._list(key, n, "numbers")
        if any(isinstance(each, bool) or not isinstance(each, int | float) for each in value):
            self.fail(key, "a list of numbers")
        if not all(abs(each) <= 1e30 for each in value):
            self.fail(key, "a list of numbers up to 1e30")
        return [float(each) for each in value]

    def texts(self, key: str, n: int | None = None) -> list[str]:
        """A list of n texts, of any number without n. Raises ModelFileError."""
        value = self._list(key, n, "texts")
        if not all(isinstance(each, str) for each in value):
            self.fail(key, "a list of texts")
        return value

    def part(self, key: str) -> Config | None:
        """The object under a key, None where it is missing. Raises ModelFileError for another value."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, "an object")
        return Config(value, self.path, f"{self.prefix}{key}.")

    @property
    def architecture(self) -> str:
        """The class of the model, "" where the file does not say it."""
        names = self.texts("architectures") if "architectures" in self else []
        return names[0] if names else ""

    @property
    def dtype(self) -> str | None:
        """The type that the weights were made in, such as "bfloat16"."""
        key = "dtype" if "dtype" in self else "torch_dtype"
        return self.text(key).removeprefix("torch.") if key in self else None

    def language(self) -> Config:
        """The keys of the language model: of text_config or the like in front of those of the whole."""
        for key in _NESTED:
            part = self.part(key)
            if part is not None:
                whole = {name: value for name, value in self.values.items() if name not in _NESTED}
                merged = Config(whole | part.values, self.path, self.prefix)
                if self.get("tie_word_embeddings") is True:  # the whole decides, and parts repeat a default
                    merged.values["tie_word_embeddings"] = True
                merged.values["architectures"] = part.get("architectures") or self.values.get("architectures", [])
                return merged
        return self

    def rope(self, layer_type: str = "full_attention") -> Rope:
        """How heads of layers of this type are rotated. Raises ModelFileError, UnsupportedModel."""
        found = self.part("rope_parameters")
        if found is not None and any(isinstance(found.get(key), dict) for key in _LAYER_TYPES):
            found = found.part(layer_type)
            if found is None:
                self.fail("rope_parameters", f"an object with {layer_type}")
        local = self.get("rope_local_base_freq") if layer_type == "sliding_attention" else None
        if found is None and local is not None:  # Gemma 3, whose other layers alone are scaled
            found = Config({"rope_theta": local}, self.path, f"{self.prefix}rope_local_base_freq as ")
        if found is None:
            found = self.part("rope_scaling") or Config({}, self.path, f"{self.prefix}rope_scaling.")
        return self._rope(found)

    def _rope(self, found: Config) -> Rope:
        kind = found.text("rope_type", found.text("type", "default"))
        owner = found if "rope_theta" in found else self
        share = found if "partial_rotary_factor" in found else self
        return Rope(
            _ROPE_NAMES.get(kind, kind),
            owner.number("rope_theta", 10000.0, most=1e12),
            share.number("partial_rotary_factor", 1.0, most=1.0),
            found,
        )

    def _list(self, key: str, n: int | None, of: str) -> list[Any]:
        value = self.values.get(key)
        if not isinstance(value, list) or (n is not None and len(value) != n):
            self.fail(key, f"a list of {'' if n is None else f'{n} '}{of}")
        return value

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raises ModelFileError: what the key must be, and what it is."""
        raise ModelFileError(f"{self.path}: {self.prefix}{key} must be {expected}: {self._found(key)}")

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raises UnsupportedModel for a value that is sound, but that nothing here can do."""
        raise UnsupportedModel(f"{self.path}: {self.prefix}{key} {reason}: {self._found(key)}")

    def _found(self, key: str) -> str:
        return f"found {shown(self.values[key])}" if key in self.values else "it is missing"
