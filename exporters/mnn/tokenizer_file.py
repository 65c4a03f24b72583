"""tokenizer.mtok: the content of a tokenizer.json in the binary form that MNN reads."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.common.errors import UnsupportedModel

_MAGIC, _PIPELINE = 430, 4
_SPLITS = {"Isolated": 0, "Removed": 1, "MergedWithPrevious": 2}


def tokenizer_file(made: Mapping[str, Any], config: Mapping[str, Any], stops: Sequence[int]) -> bytes:
    """The file. made, config: tokenizer.json and tokenizer_config.json.  stops: ids that end an answer.

    Raises UnsupportedModel for a part without a form here.
    """
    specials = [token["id"] for token in made["added_tokens"] if token["special"]]
    program = _program(made["post_processor"])
    begins = [id for id in program[: program.index(None)] if id is not None]
    head = f"{_MAGIC} {_PIPELINE}\n{len(specials)} {len(stops)} {len(begins)}\n"
    head += " ".join(map(str, [*specials, *stops, *begins])) + "\n"
    parts = [
        head.encode(),
        _normalizer(made["normalizer"]),
        _pre_tokenizer(made["pre_tokenizer"]),
        _model(made["model"]),
        _decoder(made["decoder"]),
        struct.pack("<I", len(made["added_tokens"])),
        *map(_added, made["added_tokens"]),
        _long_text(config.get("chat_template", "")),
        _text(config.get("eos_token", "")),
        bytes([0]),
        _text(config.get("bos_token", "")),
        struct.pack("<H", len(program)),
        *(bytes([0]) if id is None else struct.pack("<BI", 1, id) for id in program),
    ]
    return b"".join(parts)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<H", len(data)) + data


def _long_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _program(post_processor: Mapping[str, Any] | None) -> list[int | None]:
    """Ids that are put around a text, which None stands for."""
    if post_processor is None:
        return [None]
    ids = {name: token["ids"][0] for name, token in post_processor["special_tokens"].items()}
    return [None if "Sequence" in piece else ids[piece["SpecialToken"]["id"]] for piece in post_processor["single"]]


def _normalizer(part: Mapping[str, Any] | None) -> bytes:
    if part is None:
        return bytes([0])
    match part["type"]:
        case "Prepend":
            return bytes([2]) + _text(part["prepend"])
        case "Replace":
            return bytes([3]) + _text(part["pattern"]["String"]) + _text(part["content"])
        case "Sequence":
            return bytes([4]) + _several(_normalizer(each) for each in part["normalizers"])
    raise _unknown("normalizer", part)


def _pre_tokenizer(part: Mapping[str, Any] | None) -> bytes:
    if part is None:
        return bytes([0])
    match part["type"]:
        case "ByteLevel":
            return bytes([1, part["use_regex"]])
        case "Digits":
            return bytes([2, part["individual_digits"]])
        case "Split":
            pattern = part["pattern"].get("Regex") or part["pattern"]["String"]
            return bytes([4]) + _text(pattern) + bytes([part["invert"], _SPLITS[part["behavior"]]])
        case "Sequence":
            return bytes([6]) + _several(_pre_tokenizer(each) for each in part["pretokenizers"])
    raise _unknown("pre_tokenizer", part)


def _decoder(part: Mapping[str, Any]) -> bytes:
    match part["type"]:
        case "ByteLevel":
            return bytes([0])
        case "ByteFallback":
            return bytes([1])
        case "Fuse":
            return bytes([4])
        case "Replace":
            return bytes([5]) + _text(part["pattern"]["String"]) + _text(part["content"])
        case "Strip":
            return bytes([6]) + _text(part["content"]) + struct.pack("<II", part["start"], part["stop"])
        case "Sequence":
            return bytes([7]) + _several(_decoder(each) for each in part["decoders"])
    raise _unknown("decoder", part)


def _several(parts: Any) -> bytes:
    made = list(parts)
    return struct.pack("<I", len(made)) + b"".join(made)


def _model(model: Mapping[str, Any]) -> bytes:
    """Byte pair encoding: tokens by text and merges by ids, both sorted for a binary search."""
    ids, merges = model["vocab"], model["merges"]
    head = bytes([0]) + struct.pack("<IBBI", len(ids), model["byte_fallback"], 0, len(merges))
    tokens = [_text(text) + struct.pack("<I", ids[text]) for text in sorted(ids)]
    pairs = [(*(ids[part] for part in merge.split(" ")), rank) for rank, merge in enumerate(merges)]
    return b"".join([head, *tokens, *(struct.pack("<III", *pair) for pair in sorted(pairs))])


def _added(token: Mapping[str, Any]) -> bytes:
    flags = bytes([token["special"], token["lstrip"], token["rstrip"]])
    return struct.pack("<I", token["id"]) + flags + _text(token["content"])


def _unknown(kind: str, part: Mapping[str, Any]) -> UnsupportedModel:
    return UnsupportedModel(f"MNN has no form of the {kind} {part['type']!r} of this vocabulary: use --to gguf")
