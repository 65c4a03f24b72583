"""From the files of a checkpoint to the keys tokenizer.*."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint import Config, Folder
from edgeinfer.exporters.checkpoint.generation import read_generation
from edgeinfer.exporters.vocabulary import tokenizer_file
from edgeinfer.exporters.vocabulary.byte_pairs import byte_level, space_marked, with_byte_fallback
from edgeinfer.exporters.vocabulary.chat_templates import chat_templates
from edgeinfer.exporters.vocabulary.comparison import first_difference, tokenizer_of, warn_of_special_tokens
from edgeinfer.exporters.vocabulary.entries import AddedToken, Draft, by_text
from edgeinfer.exporters.vocabulary.sentence_piece import draft_of, read_model
from edgeinfer.exporters.vocabulary.special_ids import ends, more_ends, role_ids
from edgeinfer.exporters.vocabulary.tokenizer_file import TokenizerFile
from edgeinfer.models.gguf import MetadataValue

Keys = dict[str, MetadataValue]

_MODEL = "tokenizer.model"
_OTHERS = {  # files that are not read, and why
    "tekken.json": "tekken.json is not read",
    "vocab.json": "vocab.json and merges.txt do not say how texts are cut into words",
    "tiktoken.model": "tiktoken.model does not say how texts are cut into words",
}


def read_vocabulary(folder: Folder, config: Config, n_rows: int, pre: str | None = None) -> Keys:
    """The keys tokenizer.* of a checkpoint's folder, with a token for each of the n_rows embeddings.

    config: of the language model, for the ids of begin and ends.  pre: see byte_level; "gemma4" is Gemma 4's kind.
    Raises UnsupportedModel, ModelFileError.
    """
    settings = folder.optional_json("tokenizer_config.json")
    if tokenizer_file.NAME not in folder:
        return _finished(_of_model(folder, settings, None, n_rows), folder, settings, config, n_rows, None)
    file = TokenizerFile(folder)
    if file.model_type != "BPE":
        file.refuse(f"must have a model of type BPE: found {file.model_type!r:.80}")
    if file.falls_back and pre == "gemma4":
        return _finished(space_marked(file, n_rows), folder, settings, config, n_rows, file)
    if file.falls_back:
        if _MODEL in folder:  # has the scores themselves, if it is of the same version of the vocabulary
            try:
                return _finished(_of_model(folder, settings, file, n_rows), folder, settings, config, n_rows, file)
            except ModelFileError:
                pass  # or it is damaged, and what tokenizer.json says is enough
        return _finished(with_byte_fallback(file, n_rows), folder, settings, config, n_rows, file)
    if not any(part.get("type") == "ByteLevel" for part in file.parts("pre_tokenizer")):
        file.refuse("must be byte-level BPE, or BPE with byte_fallback as SentencePiece's models become: neither")
    return _finished(byte_level(file, n_rows, pre), folder, settings, config, n_rows, file)


def _of_model(folder: Folder, settings: Mapping[str, Any], file: TokenizerFile | None, n_rows: int) -> Draft:
    """The vocabulary of tokenizer.model. Raises UnsupportedModel, also where there is none, ModelFileError."""
    if _MODEL not in folder:
        why = next((words for name, words in _OTHERS.items() if name in folder), "there is no other vocabulary")
        raise UnsupportedModel(
            f"{folder.path / tokenizer_file.NAME}: is missing, and so is {_MODEL}; {why}: save the tokenizer with "
            f"transformers first, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    model = read_model(folder, _MODEL)
    adds_space = settings.get("add_prefix_space") if file is None else None
    if not isinstance(adds_space, bool):
        adds_space = model.adds_space
    added = file.added if file is not None else _added(folder, settings)
    return draft_of(model, added, n_rows, adds_space, str(folder.path / _MODEL))


def _added(folder: Folder, settings: Mapping[str, Any]) -> list[AddedToken]:
    """The tokens that added_tokens.json and tokenizer_config.json add. Raises ModelFileError."""
    found = {text: {"content": text, "id": id} for text, id in folder.optional_json("added_tokens.json").items()}
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        raise ModelFileError(f"{folder.path}: added_tokens_decoder must be an object of objects: found {listed!r:.80}")
    for id, entry in listed.items():
        found[str(entry.get("content"))] = entry | {"id": int(id) if id.isascii() and id.isdigit() else id}
    tokens = []
    for text, entry in found.items():
        id = entry["id"]
        if isinstance(id, bool) or not isinstance(id, int) or id < 0 or not isinstance(entry.get("content"), str):
            raise ModelFileError(f"{folder.path}: an added token must have a text and an id: found {entry!r:.80}")
        tokens.append(AddedToken(id, text, entry.get("special") is True))
    by_id = {token.id: token.text for token in tokens}
    twice = next((token for token in tokens if by_id[token.id] != token.text), None)
    if twice is not None:
        raise ModelFileError(
            f"{folder.path}: added tokens must have ids of their own: {twice.text!r:.40} and {by_id[twice.id]!r:.40} "
            f"are both {twice.id}"
        )
    return tokens


def _finished(
    draft: Draft, folder: Folder, settings: Mapping[str, Any], config: Config, n_rows: int, file: TokenizerFile | None
) -> Keys:
    """All keys, compared with tokenizer.json where there is one."""
    roles = {**draft.roles, **role_ids(settings, config, by_text(draft.entries.texts), n_rows)}
    keys = draft.keys | draft.entries.keys(n_rows, draft.scored)
    keys |= {f"{role}_token_id": id for role, id in roles.items()} | _added_ends(settings, roles, file)
    found = {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | chat_templates(folder, settings)
    where = folder.path / (tokenizer_file.NAME if file is not None else _MODEL)
    ours = tokenizer_of(found, where)
    all_ends = ends(config, read_generation(folder), n_rows)
    more = more_ends((id for id in all_ends if id not in ours.stop_ids), folder.path)
    if file is not None:
        text = first_difference(ours, file)
        if text is not None:
            file.refuse(f"cannot be converted: {text!r:.60} would become other tokens")
        warn_of_special_tokens(ours, file)
    return found | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def _added_ends(settings: Mapping[str, Any], roles: Mapping[str, int], file: TokenizerFile | None) -> Keys:
    """Whether texts get a begin and an end token: as tokenizer.json does it, else as tokenizer_config.json says."""
    if file is None:
        begins, ends = settings.get("add_bos_token", True), settings.get("add_eos_token", False)
        return {"add_bos_token": begins is True and "bos" in roles, "add_eos_token": ends is True and "eos" in roles}
    with file.theirs_may_fail("cannot encode a text with it"):
        plain, marked = (file.theirs.encode("a", add_special_tokens=special).ids for special in (False, True))
    return {
        "add_bos_token": marked != plain and marked[:1] == [roles.get("bos")],
        "add_eos_token": marked != plain and marked[-1:] == [roles.get("eos")],
    }
