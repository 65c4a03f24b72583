"""tokenizer.model: a model of SentencePiece (Kudo and Richardson, arXiv:1808.06226), read without the library.

The message ModelProto (github.com/google/sentencepiece, sentencepiece_model.proto): pieces (1) of text (1), score (2)
and type (3), whose numbers are those of tokenizer.ggml.token_type; the settings of training (2) and normalising (3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint import Folder
from edgeinfer.exporters.vocabulary.entries import BYTE, NORMAL, USER_DEFINED, AddedToken, Draft, Entries
from edgeinfer.exporters.vocabulary.protobuf import BadMessage, Value, fields, signed
from edgeinfer.models.gguf import MetadataValue

MAX_BYTES = 64 << 20
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SUFFIX_SPACES, _BYTE_FALLBACK = 3, 24, 35
_IDS = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_BPE = 2


@dataclass
class SentencePieceModel:
    """What a file says, with the defaults of SentencePiece.

    pieces: (text, score, type) by id.  ids: of tokens with a role, those below 0 left out.
    """

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    model_type: int = 1
    byte_fallback: bool = False
    suffix_spaces: bool = False
    ids: dict[str, int] = field(default_factory=lambda: {"unknown": 0, "bos": 1, "eos": 2})
    has_charsmap: bool = False
    adds_space: bool = True
    removes_spaces: bool = True
    escapes_spaces: bool = True


def read_model(folder: Folder, name: str) -> SentencePieceModel:
    """The model in a file. Raises ModelFileError, UnsupportedModel for one that GGUF has no words for."""
    path, data = folder.path / name, folder.text(name, MAX_BYTES)
    try:
        model = _model(memoryview(data))
    except (BadMessage, UnicodeDecodeError, TypeError) as error:
        raise ModelFileError(f"{path}: is no model of SentencePiece: {error!s:.200}") from error
    for is_so, wanted, found in [
        (not model.pieces, "have pieces", "none"),
        (model.model_type != _BPE, "be of type bpe", _MODEL_TYPES.get(model.model_type, str(model.model_type))),
        (not model.byte_fallback, "fall back to bytes for characters without a token", "the unknown token instead"),
        (model.has_charsmap, "take texts as they are (identity)", "a table that replaces characters"),
        (model.removes_spaces, "keep all spaces", "remove_extra_whitespaces"),
        (not model.escapes_spaces, "write spaces as U+2581", "escape_whitespaces is false"),
        (model.suffix_spaces, "have spaces before words", "treat_whitespace_as_suffix"),
    ]:
        if is_so:
            raise UnsupportedModel(f"{path}: the model of SentencePiece must {wanted}: found {found}")
    return model


def _model(message: memoryview) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, value in fields(message):
        if number == _PIECES:
            model.pieces.append(_piece(_bytes(value)))
        elif number == _TRAINER:
            _read_trainer(model, _bytes(value))
        elif number == _NORMALIZER:
            _read_normalizer(model, _bytes(value))
    model.ids = {role: id for role, id in model.ids.items() if 0 <= id < len(model.pieces)}
    return model


def _piece(message: memoryview) -> tuple[str, float, int]:
    text, score, type = "", 0.0, NORMAL
    for number, value in fields(message):
        if number == 1:
            text = bytes(_bytes(value)).decode()
        elif number == 2:
            score = _float(value)
        elif number == 3:
            type = _int(value)
    if not NORMAL <= type <= BYTE or score != score:
        raise BadMessage(f"piece {text!r:.40} of type {type} with score {score}")
    return text, score, type


def _read_trainer(model: SentencePieceModel, message: memoryview) -> None:
    for number, value in fields(message):
        if number == _MODEL_TYPE:
            model.model_type = _int(value)
        elif number == _SUFFIX_SPACES:
            model.suffix_spaces = bool(_int(value))
        elif number == _BYTE_FALLBACK:
            model.byte_fallback = bool(_int(value))
        elif number in _IDS:
            model.ids[_IDS[number]] = signed(_int(value))


def _read_normalizer(model: SentencePieceModel, message: memoryview) -> None:
    for number, value in fields(message):
        if number == _CHARSMAP:
            model.has_charsmap = len(_bytes(value)) > 0
        elif number == _DUMMY_PREFIX:
            model.adds_space = bool(_int(value))
        elif number == _REMOVE_SPACES:
            model.removes_spaces = bool(_int(value))
        elif number == _ESCAPE_SPACES:
            model.escapes_spaces = bool(_int(value))


def _bytes(value: Value) -> memoryview:
    if not isinstance(value, memoryview):
        raise BadMessage("a number where bytes must be")
    return value


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise BadMessage("bytes where a number must be")
    return value


def _float(value: Value) -> float:
    if not isinstance(value, float):
        raise BadMessage("no float where a score must be")
    return value


def draft_of(
    model: SentencePieceModel, added: Iterable[AddedToken], n_rows: int, adds_space: bool, where: str
) -> Draft:
    """The vocabulary of a model and of the tokens that were added to it.

    adds_space: whether a text gets a space before it. Raises UnsupportedModel for more pieces than n_rows.
    """
    if len(model.pieces) > n_rows:
        raise UnsupportedModel(f"{where}: has {len(model.pieces)} tokens, and the model {n_rows} embeddings")
    entries = Entries()
    for id, (text, score, type) in enumerate(model.pieces):
        if type == USER_DEFINED:
            # Behind such a token a text begins anew, maybe with a space; merges make runs of one character as well.
            type = NORMAL if adds_space and len(set(text)) == 1 else USER_DEFINED
            text = text if type == NORMAL else text.replace("▁", " ")
        entries.set(id, text, type, score)
    entries.add((token.with_spaces() for token in added), n_rows, where)
    keys: dict[str, MetadataValue] = {"model": "llama", "pre": "default", "add_space_prefix": adds_space}
    return Draft(entries, keys, scored=True, roles=model.ids)
