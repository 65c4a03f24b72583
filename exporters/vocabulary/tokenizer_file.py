"""tokenizer.json, of the library `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NoReturn

import tokenizers

from edgeinfer.common.errors import EdgeInferError, ModelFileError, UnsupportedModel, warn
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.exporters.checkpoint import Folder
from edgeinfer.exporters.vocabulary.entries import AddedToken

NAME = "tokenizer.json"
MAX_BYTES = 128 << 20
_MOST_ID = 1 << 24
_SEQUENCES = ("pretokenizers", "normalizers", "processors", "decoders")


class TokenizerFile:
    """What the file says, each part checked when it is read, and the library's own tokenizer."""

    def __init__(self, folder: Folder) -> None:
        """Raises ModelNotFound, ModelFileError."""
        self.path = folder.path / NAME
        self._source = folder.json(NAME, MAX_BYTES)
        self.model = self._object(self._source.get("model") or {}, "model")

    @cached_property
    def theirs(self) -> Any:
        """The library's tokenizer. Raises ModelFileError where it cannot read the file."""
        with self.theirs_may_fail("cannot read it"):
            return tokenizers.Tokenizer.from_buffer(self.path.read_bytes())  # its names are UTF-8 alone

    @contextmanager
    def theirs_may_fail(self, what: str) -> Iterator[None]:
        """Within, what the library raises becomes a ModelFileError; a panic of its Rust is no Exception."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, EdgeInferError):
            raise
        except BaseException as error:
            if is_from_handler(error):
                raise
            raise ModelFileError(f"{self.path}: the tokenizers library {what}: {error!s:.200}") from error

    @property
    def model_type(self) -> str:
        """Such as "BPE"; files of older versions do not name it."""
        found = self.model.get("type", "BPE" if "merges" in self.model else "")
        return found if isinstance(found, str) else repr(found)

    @property
    def falls_back(self) -> bool:
        """Whether characters without a token become bytes."""
        return self.model.get("byte_fallback") is True

    @property
    def keeps_tokens(self) -> bool:
        """Whether a word that is a token is taken as it is."""
        return self.model.get("ignore_merges") is True

    @cached_property
    def vocab(self) -> dict[int, str]:
        """Texts by id, without the added tokens. Raises ModelFileError."""
        found = self._object(self.model.get("vocab"), "model.vocab")
        by_id = {self._id(id, text): text for text, id in found.items()}
        if len(by_id) != len(found):
            self.fail("model.vocab must give each token an id of its own: found one twice")
        return by_id

    @cached_property
    def added(self) -> list[AddedToken]:
        """Tokens that are cut out of a text first, by the ids that the library gives them. Raises ModelFileError.

        It does not look at the ids in the file: a text that the vocabulary has keeps that id, each other one gets the
        next number, in the order of the list. Raises UnsupportedModel where that is the number of another token.
        """
        listed = self._listed()
        with self.theirs_may_fail("cannot read it"):
            found = self.theirs.get_added_tokens_decoder()
            ids = {text: self.theirs.token_to_id(text) for text in listed}
        tokens = [AddedToken(id, token.content, token.special) for id, token in sorted(found.items())]
        for token in tokens:
            if (other := self.vocab.get(token.id, token.text)) != token.text:
                self.refuse(
                    f"must give each token an id of its own: the tokenizers library gives {token.id} to {other!r:.40} "
                    f"and to the added {token.text!r:.40}"
                )
        moved = [text for text, own in listed.items() if own != [ids[text]]]
        if moved:
            text = moved[0]
            more = f", and {len(moved) - 1} more" if len(moved) > 1 else ""
            warn(
                f"{self.path}: the added token {text!r:.40} is {ids[text]} and not {listed[text][-1]}{more}: the "
                "tokenizers library, and transformers with it, numbers added tokens by their order, and so it is here"
            )
        return tokens

    def _listed(self) -> dict[str, list[int]]:
        """The ids that the file gives each text of its added tokens. Raises ModelFileError."""
        found = self._source.get("added_tokens") or []
        if not isinstance(found, list):
            self.fail(f"added_tokens must be a list: found {found!r:.80}")
        ids: dict[str, list[int]] = {}
        for entry in found:
            token = self._object(entry, "added_tokens")
            text = token.get("content")
            if not isinstance(text, str):
                self.fail(f"added_tokens must have content that is a text: found {text!r:.80}")
            ids.setdefault(text, []).append(self._id(token.get("id"), text))
        return ids

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens in the order in which they are merged. Raises ModelFileError, UnsupportedModel."""
        found = self.model.get("merges")
        if not isinstance(found, list) or not found:
            self.refuse("must have merges, pairs of tokens")
        pairs = []
        for merge in found:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
                self.refuse(f"must have merges, pairs of tokens: found {merge!r:.80}")
            pairs.append((pair[0], pair[1]))
        return pairs

    def parts(self, step: str) -> list[Mapping[str, Any]]:
        """The parts of "normalizer", "pre_tokenizer", "post_processor" or "decoder", those of sequences one by one.

        Raises ModelFileError.
        """
        found = self._source.get(step)
        return [] if found is None else list(self._flat(self._object(found, step), step, 0))

    def source(self, step: str) -> Any:
        """A step as it stands there, for messages."""
        return self._source.get(step)

    def _flat(self, part: Mapping[str, Any], step: str, depth: int) -> Iterator[Mapping[str, Any]]:
        inner = next(
            (part[key] for key in ("pretokenizers", "normalizers", "processors", "decoders") if key in part), None
        )
        if inner is None:
            yield part
            return
        if not isinstance(inner, list) or depth > 8:
            self.fail(f"{step} must be made of lists of steps: found {inner!r:.80}")
        for each in inner:
            yield from self._flat(self._object(each, step), step, depth + 1)

    def _id(self, id: object, text: str) -> int:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < _MOST_ID:
            self.fail(f"the id of {text!r:.40} must be an integer in 0..{_MOST_ID - 1}: found {id!r:.40}")
        return id

    def _object(self, found: object, what: str) -> dict[str, Any]:
        if not isinstance(found, dict):
            self.fail(f"{what} must be an object: found {found!r:.80}")
        return found

    def fail(self, reason: str) -> NoReturn:
        """Raises ModelFileError: the file is damaged."""
        raise ModelFileError(f"{self.path}: {reason}")

    def refuse(self, reason: str) -> NoReturn:
        """Raises UnsupportedModel: GGUF, or what runs it, has no words for it."""
        raise UnsupportedModel(f"{self.path}: {reason}")
