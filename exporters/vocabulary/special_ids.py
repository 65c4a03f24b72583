"""Tokens with a role: begin, ends, padding and so on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import warn
from edgeinfer.exporters.checkpoint import Config
from edgeinfer.exporters.checkpoint.generation import Generation
from edgeinfer.models.gguf import MetadataValue

# Roles in tokenizer_config.json and config.json, and as GGUF spells them.
_ROLES = {
    **{"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"},
    **{"cls": "cls", "mask": "mask"},
}


def role_ids(settings: Mapping[str, Any], config: Config, ids: Mapping[str, int], n_tokens: int) -> dict[str, int]:
    """Ids of the roles, as tokenizer_config.json names them, else config.json.

    ids: of the tokens that have roles, by text. What lies outside of the vocabulary is left out with a warning.
    """
    found: dict[str, int] = {}
    for role, ours in _ROLES.items():
        token = settings.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        named = ids.get(text) if isinstance(text, str) else None
        id = _first_id(config, f"{role}_token_id") if named is None else named
        if id is None:
            continue
        if 0 <= id < n_tokens:
            found[ours] = id
        elif id >= 0:
            warn(f"{config.path}: {role}_token_id is {id}, and there are {n_tokens} tokens: it is left out")
    return found


def _first_id(config: Config, key: str) -> int | None:
    """The first id of a key; None where there is none, with a warning where something else stands there."""
    found = config.get(key)
    if found is not None and found != [] and not _integers(found):
        warn(f"{config.path}: {key} must be a token id, or a list of some: found {shown(found)}: it is left out")
    return next(iter(_integers(found)), None)


def ends(config: Config, generation: Generation, n_tokens: int) -> list[int]:
    """Ids of the tokens that end an answer, as config.json and generation_config.json list them."""
    beyond = [id for id in generation.ends if id >= n_tokens]
    if beyond:
        more = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        warn(f"generation_config.json: eos_token_id {beyond[0]}{more} of {n_tokens} tokens: left out")
    listed = [*_integers(config.get("eos_token_id")), *generation.ends]
    return [id for id in dict.fromkeys(listed) if 0 <= id < n_tokens]


def more_ends(missing: Iterable[int], where: object) -> dict[str, MetadataValue]:
    """Keys for ends that no text tells: GGUF has two besides eos."""
    left = list(missing)
    keys: dict[str, MetadataValue] = {f"{role}_token_id": id for role, id in zip(("eot", "eom"), left, strict=False)}
    if len(left) > len(keys):
        warn(
            f"{where}: answers may end with {len(left)} more tokens, of which GGUF can name {len(keys)}: {shown(left)}"
        )
    return keys


def _integers(found: object) -> list[int]:
    many = found if isinstance(found, list) else [found]
    return [each for each in many if isinstance(each, int) and not isinstance(each, bool)]
