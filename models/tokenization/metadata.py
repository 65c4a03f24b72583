"""The tokenizer's keys of a file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import TokenizerError, UnsupportedModel, warn
from edgeinfer.models.arrays import Strings
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenization.pre_tokenizers import PRE_TOKENIZERS


class TokenizerMetadata:
    """The tokenizer's keys of a file, each checked for its type."""

    def __init__(self, file: ModelFile) -> None:
        self.values = file.metadata
        self.path = file.path

    def error(self, key: str, wanted: str, found: object) -> TokenizerError:
        """The error for a key with a wrong value."""
        return TokenizerError(f"{self.path}: tokenizer.ggml.{key} must be {wanted}: found {found!r:.80}")

    def warn(self, message: str) -> None:
        """A RuntimeWarning about the file."""
        warn(f"{self.path}: {message}")

    def get(self, key: str) -> Any:
        """The value of a key, None without it."""
        return self.values.get(f"tokenizer.ggml.{key}")

    def text(self, key: str, default: str) -> str:
        """A string. Raises TokenizerError."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A bool. Raises TokenizerError."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "a bool", value)
        return value

    def token_id(self, key: str, n_vocab: int, default: int | None = None) -> int | None:
        """The id under this key; the default where it is absent, outside of the vocabulary (with a warning), or, as
        some converters write where there is none, -1."""
        value = self.get(f"{key}_token_id")
        if value is None:
            return default if default is None or default < n_vocab else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key}_token_id", "an integer", value)
        if value in (-1, 2**32 - 1):
            return default
        if not 0 <= value < n_vocab:
            self.warn(f"tokenizer.ggml.{key}_token_id is {value}, and there are {n_vocab} tokens: it is ignored")
            return default if default is None or default < n_vocab else None
        return value

    def chat_template(self) -> str | None:
        """The template of the file, the one called "default" where each has a name."""
        for key in ("tokenizer.chat_template", "tokenizer.chat_template.default"):
            value = self.values.get(key)
            if isinstance(value, str):
                return value
            if value is not None:
                self.warn(f"{key} must be a string: found {value!r:.80}: it is ignored")
        return None

    def strings(self, key: str) -> Strings:
        """An array of strings that is not empty. Raises TokenizerError."""
        value = self.get(key)
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            value = Strings(value)
        if not isinstance(value, Strings) or not value:
            raise self.error(key, "an array of strings", value)
        return value

    def numbers(self, key: str, kinds: str, n_vocab: int) -> NDArray[Any] | None:
        """The first n_vocab of an array of numbers whose dtype is of one of these kinds; None without the key."""
        value = self.get(key)
        if value is None:
            return None
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError):  # ragged, or an integer of more than 64 bits
            array = np.empty(0, object)
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise self.error(key, "an array of numbers", value)
        if len(array) < n_vocab:
            raise self.error(key, f"as long as the vocabulary, {n_vocab}", len(array))
        return array[:n_vocab]


def kind_of(metadata: TokenizerMetadata) -> tuple[str, str]:
    """The names of the model and of the pre-tokeniser ("" where the model needs none)."""
    model = metadata.text("model", "none")
    if model == "llama":
        return model, ""
    if model not in ("gpt2", "gemma4"):
        raise UnsupportedModel(
            f"{metadata.path}: tokenizer.ggml.model must be gpt2 (byte-level BPE), llama (SentencePiece) or gemma4: "
            f"found {model!r:.80}"
        )
    pre = "gemma4" if model == "gemma4" else metadata.text("pre", "") or "default"
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{metadata.path}: tokenizer.ggml.pre must be one of {', '.join(sorted(PRE_TOKENIZERS))}: found {pre!r:.80}"
        )
    return model, pre
