"""A byte-level vocabulary without merges: each byte is a token, and so are the special texts that a test names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from edgeinfer.models.chat_template import CHATML
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
ALPHABET = [chr(byte) for byte in _PRINTABLE] + [chr(256 + i) for i in range(256 - len(_PRINTABLE))]


def byte_file(controls: Sequence[str], user_defined: Sequence[str] = (), **changes: Any) -> ModelFile:
    """A file that has nothing but the vocabulary: bytes, control tokens from 256 on, of which the first two are begin
    and end, and user-defined ones. changes: of keys, `__` for a point; None takes one away."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "kimi-k2",  # which may have no merges
        "tokenizer.ggml.tokens": [*ALPHABET, *controls, *user_defined],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(controls) + [4] * len(user_defined),
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": CHATML,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    present = {key: value for key, value in metadata.items() if value is not None}
    return cast(ModelFile, SimpleNamespace(path=Path("tiny.gguf"), metadata=present))


def byte_tokenizer(controls: Sequence[str], user_defined: Sequence[str] = (), **changes: Any) -> Tokenizer:
    """The tokeniser of such a file."""
    return Tokenizer.from_file(byte_file(controls, user_defined, **changes))
