"""The keys of a vocabulary against the library `tokenizers`."""

from __future__ import annotations

import tempfile
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from edgeinfer.common.errors import TokenizerError, UnsupportedModel, warn
from edgeinfer.exporters.gguf.writer import write_gguf
from edgeinfer.exporters.vocabulary.probes import probes
from edgeinfer.exporters.vocabulary.tokenizer_file import TokenizerFile
from edgeinfer.models.gguf import MetadataValue, ModelFile
from edgeinfer.models.tokenizer import Tokenizer

_MOST_SPECIALS = 64


def tokenizer_of(keys: Mapping[str, MetadataValue], where: Path) -> Tokenizer:
    """The tokenizer that a file with these keys has. Raises UnsupportedModel where it has none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_gguf(path, keys, [])
        with ModelFile.open(path) as file:
            file.path = where  # for messages
            try:
                return Tokenizer.from_file(file)
            except TokenizerError as error:
                reason = str(error).removeprefix(f"{where}: ")
                raise UnsupportedModel(f"{where}: does not make a vocabulary: {reason}") from error


def first_difference(ours: Tokenizer, file: TokenizerFile) -> str | None:
    """A probe of which the library makes other tokens, None if there is none. Raises ModelFileError."""
    composed = any(part.get("type") == "NFC" for part in file.parts("normalizer"))
    for text in probes():
        text = unicodedata.normalize("NFC", text) if composed else text  # GGUF has no word for it
        with file.theirs_may_fail("cannot encode a text with it"):
            wanted = file.theirs.encode(text, add_special_tokens=False).ids
        if ours.encode(text, add_special=False, parse_special=True) != wanted:
            return text
    return None


def warn_of_special_tokens(ours: Tokenizer, file: TokenizerFile) -> None:
    """A warning for tokens that take white space around them, or are found within words only: GGUF cannot say it."""
    differ = []
    for token in file.added[:_MOST_SPECIALS]:
        text = f"a {token.text} b{token.text}c"
        with file.theirs_may_fail("cannot encode a text with it"):
            wanted = file.theirs.encode(text, add_special_tokens=False).ids
        if token.id in wanted and ours.encode(text, add_special=False, parse_special=True) != wanted:
            differ.append(token.text)
    if differ:
        more = f" and {len(differ) - 1} more tokens" if len(differ) > 1 else ""
        warn(f"{file.path}: {differ[0]!r:.40}{more} are cut out of texts otherwise than the tokenizers library does it")
