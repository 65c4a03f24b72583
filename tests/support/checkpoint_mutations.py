"""Damaged copies of small checkpoints, seeded: headers, shapes, offsets, indexes, configurations, vocabularies."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import byte_level, write_safetensors
from quantized_checkpoints import CASES as QUANTIZED
from tiny_checkpoints import CASES as TINY
from tiny_checkpoints import _weights

_MODEL = Path(__file__).parents[1] / "exporters" / "vocabulary" / "sentence_piece.json"
_HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30),
    *(
        0.0,
        -1.5,
        1e-9,
        1e30,
        1e308,
        1e999,
        "",
        "x",
        "4",
        "gptq",
        "../../secret",
        "/etc/passwd",
        "\0",
        "\ud800",
        "é" * 300,
    ),
    *([], {}, [[]], [1, 2], [-1], [2**40] * 4, ["a"] * 100, {"a": 1}, {"rope_type": "yarn"}, [None] * 5, "a\nb"),
]
_FILES = [
    "../secret.safetensors",
    "/etc/passwd",
    "..",
    ".",
    "",
    "sub/model.safetensors",
    "nothing.safetensors",
    "C:\\a",
]


@dataclass(frozen=True)
class Mutation:
    """What is done to a copy of a base."""

    family: str
    base: str
    damage: Callable[[Path, random.Random], None]  # does it, to the folder


# ---- Sound checkpoints -----------------------------------------------------------------------------------------------


def write_bases(folder: Path) -> dict[str, Path]:
    """Sound checkpoints by name: one with tokenizer.json, one in two files with tokenizer.model, quantised ones."""
    found = {name: folder / name for name in ("single", "sharded")}
    _write_llama(found["single"], 600, shards=1)
    byte_level(found["single"])
    _write_llama(found["sharded"], 460, shards=2)
    content = json.loads(_MODEL.read_text())["model"]
    (found["sharded"] / "tokenizer.model").write_bytes(zlib.decompress(base64.b64decode(content)))
    for case in (make() for make in QUANTIZED):
        home = found[case.name] = folder / case.name.replace(" ", "-")
        home.mkdir()
        (home / "config.json").write_text(json.dumps({"quantization_config": case.settings}))
        write_safetensors(home / "model.safetensors", case.tensors)
    return found


def _write_llama(folder: Path, n_vocab: int, shards: int) -> None:
    folder.mkdir()
    case = TINY["llama"]
    config = case.full_config() | {
        "vocab_size": n_vocab,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    }
    tensors = dict(_weights(case, config))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = ("F16", np.ones((n_vocab, config["hidden_size"])))
    (folder / "config.json").write_text(json.dumps(config))
    settings = {
        "bos_token": "<|begin|>",
        "chat_template": "{{ messages }}",
        "added_tokens_decoder": {"5": {"content": "▁▁"}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    where = {name: f"model-{1 + n % shards:05}-of-{shards:05}.safetensors" for n, name in enumerate(tensors)}
    for file in set(where.values()):
        write_safetensors(folder / file, {name: tensors[name] for name in tensors if where[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


# ---- Damages ---------------------------------------------------------------------------------------------------------


def mutations() -> Iterator[Mutation]:
    """All kinds without end, each base with each damage by turns."""
    quantized = [make().name for make in QUANTIZED]
    turn = 0
    while True:
        for family, bases, damage in _DAMAGES:
            names = bases or quantized
            yield Mutation(family, names[turn % len(names)], damage)
        turn += 1


def damaged(mutation: Mutation, bases: dict[str, Path], to: Path, rng: random.Random) -> Path:
    """A damaged copy of the base in the folder `to`."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(bases[mutation.base], to)
    mutation.damage(to, rng)
    return to


def _some_weights(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _split(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _join(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _byte(rng: random.Random) -> int:
    """Any, and more often one of text."""
    return rng.randrange(256) if rng.random() < 0.3 else rng.choice(b'0123456789abcXYZ"{}[],:. -')


def _header_entry(folder: Path, rng: random.Random) -> None:
    """Another dtype, shape or place of a tensor, or another name."""
    path = _some_weights(folder, rng)
    header, data = _split(path)
    name = rng.choice([name for name in header if name != "__metadata__"])
    key = rng.choice(["dtype", "shape", "data_offsets", "name", "twin"])
    if key == "name":
        header[rng.choice(["", "x", "a" * 5000, "m.weight_scale", "m.qweight"])] = header.pop(name)
    elif key == "twin":
        header["twin"] = header[name]
    elif key == "dtype":
        header[name]["dtype"] = rng.choice(["F8_E4M3", "I64", "F64", "I32", "BF16", "U8", "F4", "BOOL", *_HOSTILE])
    elif rng.random() < 0.5 and header[name][key]:
        numbers = header[name][key]
        numbers[rng.randrange(len(numbers))] = rng.choice(
            [*_HOSTILE, *(n + rng.choice([-4, -1, 1, 4]) for n in numbers)]
        )
    else:
        header[name][key] = rng.choice(_HOSTILE)
    _join(path, header, data)


def _header_bytes(folder: Path, rng: random.Random) -> None:
    """Some bytes of the header changed."""
    path = _some_weights(folder, rng)
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(8 + length)] = _byte(rng)
    path.write_bytes(data)


def _header_length(folder: Path, rng: random.Random) -> None:
    """Another length of the header."""
    path = _some_weights(folder, rng)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    other = rng.choice([0, 1, length - 1, length + 1, length + 8, len(data), 2**20, 2**31, 2**63, 2**64 - 1])
    path.write_bytes(struct.pack("<Q", other) + data[8:])


def _size(folder: Path, rng: random.Random) -> None:
    """A file cut short or grown."""
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    data = path.read_bytes()
    cut = rng.choice([0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, rng.randrange(len(data) + 1)])
    path.write_bytes(data[:cut] if rng.random() < 0.7 else data + bytes(rng.choice([1, 4, 100])))


def _content(folder: Path, rng: random.Random) -> None:
    """Any bytes of a tensor: groups, shapes, scales that are no numbers."""
    path = _some_weights(folder, rng)
    header, data = _split(path)
    name = rng.choice([name for name in header if name != "__metadata__"])
    first, last = header[name]["data_offsets"]
    fill = rng.choice([b"\xff", b"\x7f", b"\0", rng.randbytes(1), rng.randbytes(7)])
    _join(path, header, data[:first] + (fill * (last - first))[: last - first] + data[last:])


def _index(folder: Path, rng: random.Random) -> None:
    """Other files in the index, or entries less or more."""
    path = folder / "model.safetensors.index.json"
    found = json.loads(path.read_text())
    where = found["weight_map"]
    name = rng.choice(list(where))
    kind = rng.randrange(5)
    if kind == 0:
        where[name] = rng.choice([*_FILES, *_HOSTILE])
    elif kind == 1:
        found["weight_map"] = dict.fromkeys(where, rng.choice(_FILES))
    elif kind == 2:
        del where[name]
    elif kind == 3:
        where["other"] = where[name]
    else:
        found["weight_map"] = rng.choice(_HOSTILE)
    path.write_text(json.dumps(found))


def _value_of(file: str) -> Callable[[Path, random.Random], None]:
    """A value somewhere in a JSON file replaced, taken away or doubled."""

    def damage(folder: Path, rng: random.Random) -> None:
        path = folder / file
        found = json.loads(path.read_text())
        for _ in range(rng.choice([1, 1, 1, 3])):
            at: Any = found
            while True:
                keys = list(at) if isinstance(at, dict) else list(range(len(at)))
                if not keys:
                    break
                key = rng.choice(keys)
                if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
                    at = at[key]
                    continue
                at[key] = rng.choice(_HOSTILE)
                break
        path.write_text(json.dumps(found))

    return damage


def _bytes_of(file: str) -> Callable[[Path, random.Random], None]:
    """Some bytes of a file changed."""

    def damage(folder: Path, rng: random.Random) -> None:
        data = bytearray((folder / file).read_bytes())
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] = _byte(rng)
        (folder / file).write_bytes(data)

    return damage


def _file_kind(folder: Path, rng: random.Random) -> None:
    """In the place of a file a folder, a pipe, a link out of the folder, to itself or to nothing."""
    path = rng.choice(sorted(folder.iterdir()))
    path.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind < 5:
        os.symlink(["../secret.safetensors", path.name, "nothing"][kind - 2], path)


_DAMAGES: list[tuple[str, list[str], Callable[[Path, random.Random], None]]] = [
    ("header entry", ["single", "sharded"], _header_entry),
    ("header entry, quantised", [], _header_entry),
    ("header bytes", ["single", "sharded"], _header_bytes),
    ("header length", ["single", "sharded"], _header_length),
    ("size", ["single", "sharded"], _size),
    ("content, quantised", [], _content),
    ("index", ["sharded"], _index),
    ("config", ["single", "sharded"], _value_of("config.json")),
    ("config, quantised", [], _value_of("config.json")),
    ("tokenizer.json", ["single"], _value_of("tokenizer.json")),
    ("bytes of tokenizer.json", ["single"], _bytes_of("tokenizer.json")),
    ("bytes of tokenizer.model", ["sharded"], _bytes_of("tokenizer.model")),
    ("tokenizer_config", ["single", "sharded"], _value_of("tokenizer_config.json")),
    ("generation_config", ["single", "sharded"], _value_of("generation_config.json")),
    ("kind of file", ["single", "sharded"], _file_kind),
]
