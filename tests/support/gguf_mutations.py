"""Damaged copies of a GGUF file, seeded: the classes of a published-format fuzz that broke other readers.

The header is walked once, recording where each field lies; then a copy is changed in one field, cut short, or has one
bit flipped. The walk trusts the file: give it a sound one.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal, TypeAlias

from late import Late

if TYPE_CHECKING:
    import gguf
else:
    gguf = Late("gguf")


Kind: TypeAlias = Literal["version", "count", "length", "type", "scalar", "dim", "tensor type", "tensor offset"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _INT32, _UINT32, _UINT8 = 8, 9, 5, 4, 0
_ALIGNMENT = 32


@dataclass(frozen=True)
class Field:
    """One number of the header; owner is the key or the tensor that it belongs to."""

    kind: Kind
    owner: str
    offset: int
    size: int

    def at(self, data: bytes) -> int:
        """Its bits as an unsigned integer."""
        return int.from_bytes(data[self.offset : self.offset + self.size], "little")


@dataclass(frozen=True)
class Layout:
    """Where things lie."""

    fields: tuple[Field, ...]
    entries: dict[str, tuple[int, int, int]]  # (start of the key, start of the value, end) of each metadata entry
    infos_start: int
    header_end: int
    data_start: int
    data_end: int

    def of_kind(self, *kinds: Kind) -> list[Field]:
        """The fields of these kinds."""
        return [field for field in self.fields if field.kind in kinds]

    def of(self, owner: str, kind: Kind) -> Field:
        """The first field of this kind of a key or tensor."""
        return next(field for field in self.of_kind(kind) if field.owner == owner)


@dataclass(frozen=True)
class Mutation:
    """A damaged file."""

    family: str
    what: str
    data: bytes
    must_be_refused: bool = False  # it cannot be read soundly, however lenient the reader


class _Walk:
    """Steps through a sound header and notes every number."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 4
        self.fields: list[Field] = []

    def number(self, kind: Kind, owner: str, code: str) -> int:
        size = struct.calcsize(code)
        self.fields.append(Field(kind, owner, self.at, size))
        self.at += size
        value: int = struct.unpack_from(f"<{code}", self.data, self.at - size)[0]
        return value

    def string(self, owner: str) -> str:
        n_bytes = self.number("length", owner, "Q")
        self.at += n_bytes
        return self.data[self.at - n_bytes : self.at].decode()

    def value(self, owner: str) -> None:
        kind = self.number("type", owner, "I")
        if kind == _STRING:
            self.string(owner)
        elif kind == _ARRAY:
            element = self.number("type", owner, "I")
            n = self.number("length", owner, "Q")
            for _ in range(n if element == _STRING else 0):
                self.string(owner)
            self.at += 0 if element == _STRING else n * struct.calcsize(_SCALARS[element])
        else:
            self.number("scalar", owner, _SCALARS[kind])

    def tensor(self) -> int:
        """Byte after the tensor's data, counted from the start of the data."""
        start = self.at
        name = self.string("")
        self.fields[-1] = Field("length", name, start, 8)
        n_dims = self.number("type", name, "I")
        dims = [self.number("dim", name, "Q") for _ in range(n_dims)]
        elements, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.number("tensor type", name, "I"))]
        return self.number("tensor offset", name, "Q") + math.prod(dims) // elements * n_bytes


def read_layout(data: bytes) -> Layout:
    """Where the fields of a sound file lie."""
    walk = _Walk(data)
    walk.number("version", "", "I")
    n_tensors, n_kv = walk.number("count", "n_tensors", "Q"), walk.number("count", "n_kv", "Q")
    entries = {}
    for _ in range(n_kv):
        start = walk.at
        key = walk.string("")
        walk.fields[-1] = Field("length", key, start, 8)
        value_start = walk.at
        walk.value(key)
        entries[key] = (start, value_start, walk.at)
    infos_start = walk.at
    ends = [walk.tensor() for _ in range(n_tensors)]
    data_start = -(-walk.at // _ALIGNMENT) * _ALIGNMENT
    return Layout(tuple(walk.fields), entries, infos_start, walk.at, data_start, data_start + max(ends, default=0))


# ---- one mutation ----------------------------------------------------------------------------------------------------


def patched(data: bytes, offset: int, patch: bytes) -> bytes:
    """The data with other bytes at one place."""
    return data[:offset] + patch + data[offset + len(patch) :]


def with_number(data: bytes, field: Field, value: int) -> bytes:
    """The data with another number in this field, cut to its size."""
    return patched(data, field.offset, (value % (1 << 8 * field.size)).to_bytes(field.size, "little"))


def with_header(data: bytes, layout: Layout, header: bytes) -> bytes:
    """The tensors' bytes of a file after another header."""
    return header + bytes(-len(header) % _ALIGNMENT) + data[layout.data_start :]


def with_entry(data: bytes, layout: Layout, entry: bytes) -> bytes:
    """The file with one more metadata entry, the first."""
    n_kv = layout.of("n_kv", "count")
    header = with_number(data[: layout.header_end], n_kv, n_kv.at(data) + 1)
    return with_header(data, layout, header[:24] + entry + header[24:])


def with_values(data: bytes, values: Mapping[str, bytes | None]) -> bytes:
    """The file with other metadata: for each key its type and value as they stand in a file (`number`, `text`,
    `texts`), None to take it away."""
    layout = read_layout(data)
    kept = {key: data[value:end] for key, (_, value, end) in layout.entries.items()}
    kept |= {key: value for key, value in values.items() if value is not None}
    for key in [key for key, value in values.items() if value is None]:
        kept.pop(key, None)
    entries = [struct.pack("<Q", len(key.encode())) + key.encode() + value for key, value in kept.items()]
    n_kv = layout.of("n_kv", "count")
    start = with_number(data[:24], n_kv, len(entries))
    return with_header(data, layout, start + b"".join(entries) + data[layout.infos_start : layout.header_end])


def number(code: str, *values: float, array: bool = False) -> bytes:
    """Type and value of numbers, by the code of `struct`; more than one, or with array=True, are an array."""
    kind = next(kind for kind, each in _SCALARS.items() if each == code)
    packed = struct.pack(f"<{len(values)}{code}", *values)
    if len(values) == 1 and not array:
        return struct.pack("<I", kind) + packed
    return struct.pack("<IIQ", _ARRAY, kind, len(values)) + packed


def text(value: bytes) -> bytes:
    """Type and value of a text, which may be no UTF-8."""
    return struct.pack("<IQ", _STRING, len(value)) + value


def texts(*values: bytes) -> bytes:
    """Type and value of an array of texts."""
    each = b"".join(struct.pack("<Q", len(value)) + value for value in values)
    return struct.pack("<IIQ", _ARRAY, _STRING, len(values)) + each


def entry(key: str, kind: int, value: bytes) -> bytes:
    """A metadata entry as it stands in a file."""
    return struct.pack("<Q", len(key.encode())) + key.encode() + struct.pack("<I", kind) + value


def _number_mutation(family: str, *kinds: Kind) -> Callable[[bytes, Layout, random.Random], Mutation]:
    def mutate(data: bytes, layout: Layout, chance: random.Random) -> Mutation:
        field = chance.choice(layout.of_kind(*kinds))
        old = field.at(data)
        if field.kind == "scalar":
            values = [0, 2**32 - 1, 2**31 - 1, 2**31, 7, 100000]
        elif field.size == 8:
            values = [2**64 - 1, 2**63 - 1, 2**40, 2**32, 2**31 - 1, 0, old + 1, old - 1, 2 * old]
        else:
            values = [0, 1, 4, 5, 8, 9, 13, 31, 39, 255, 2**31 - 1, 2**32 - 1]
        value = chance.choice(values)
        what = f"{field.kind} of {field.owner!r} at byte {field.offset}: {old} -> {value}"
        return Mutation(family, what, with_number(data, field, value))

    return mutate


def _truncation(data: bytes, layout: Layout, chance: random.Random) -> Mutation:
    return _truncated(data, layout, chance.randrange(layout.data_end))


def _truncated(data: bytes, layout: Layout, size: int) -> Mutation:
    return Mutation("truncation", f"cut at byte {size} of {len(data)}", data[:size], size < layout.data_end)


def _bit_flip(family: str, bounds: Callable[[Layout], tuple[int, int]]) -> Callable[..., Mutation]:
    def mutate(data: bytes, layout: Layout, chance: random.Random) -> Mutation:
        offset, bit = chance.randrange(*bounds(layout)), chance.randrange(8)
        flipped = patched(data, offset, bytes([data[offset] ^ 1 << bit]))
        return Mutation(family, f"bit {bit} of byte {offset} flipped", flipped)

    return mutate


def _vocabulary(layout: Layout) -> tuple[int, int]:
    return layout.entries["tokenizer.ggml.tokens"][1:]


_FAMILIES: list[tuple[int, Callable[[bytes, Layout, random.Random], Mutation]]] = [  # weight, mutation
    (27, _truncation),
    (14, _number_mutation("counts", "count")),
    (30, _number_mutation("lengths", "length")),
    (18, _number_mutation("types", "type")),
    (12, _number_mutation("dimensions and offsets", "dim", "tensor offset")),
    (6, _number_mutation("tensor types", "tensor type")),
    (6, _number_mutation("version", "version")),
    (16, _number_mutation("scalars", "scalar")),
    (30, _bit_flip("bits of tensor infos", lambda layout: (layout.infos_start, layout.header_end))),
    (30, _bit_flip("bits of the header", lambda layout: (0, layout.entries["tokenizer.ggml.tokens"][0]))),
    (20, _bit_flip("bits of the vocabulary", _vocabulary)),
    (20, _bit_flip("bits of weights", lambda layout: (layout.data_start, layout.data_end))),
]


# ---- all of them -----------------------------------------------------------------------------------------------------


def mutations(data: bytes, n: int, seed: int) -> Iterator[Mutation]:
    """n damaged copies: the special shapes, the truncations at telling places, and as many random ones as requested."""
    layout = read_layout(data)
    by_chance = _by_chance(data, layout, random.Random(seed))
    yield from islice(chain(special_shapes(data, layout), truncations(data, layout), by_chance), n)


def _by_chance(data: bytes, layout: Layout, chance: random.Random) -> Iterator[Mutation]:
    weights = [weight for weight, _ in _FAMILIES]
    while True:
        mutate = chance.choices(_FAMILIES, weights)[0][1]
        yield mutate(data, layout, chance)


def truncations(data: bytes, layout: Layout) -> Iterator[Mutation]:
    """Cuts at the first bytes, and at the edges and quarters of metadata, tensor infos and tensor data."""
    sizes = {0, 1, 3, 4, 7, 8, 15, 23, 24, 100, 1000, layout.data_end - 1}
    edges = [24, layout.infos_start, layout.header_end, layout.data_start, layout.data_end]
    for start, end in zip(edges, edges[1:], strict=False):
        sizes |= {start + (end - start) * quarter // 4 for quarter in range(4)}
    return (_truncated(data, layout, size) for size in sorted(sizes))


def special_shapes(data: bytes, layout: Layout) -> Iterator[Mutation]:
    """Eight shapes that made a reader hang, allocate without bound, or read past an end."""
    first_key = next(iter(layout.entries))
    types = "tokenizer.ggml.token_type"
    array_length = layout.of_kind("length")[[f.owner for f in layout.of_kind("length")].index(types) + 1]
    _, value_start, end = layout.entries[types]
    n = array_length.at(data)
    uint8_types = struct.pack("<IIQ", _ARRAY, _UINT8, n) + data[value_start + 16 : end : 4]
    block_count = next(f for f in layout.of_kind("scalar") if f.owner.endswith(".block_count"))
    copied = data[layout.entries[first_key][0] : layout.entries[first_key][2]]
    key_length = layout.of(first_key, "length")

    def shape(what: str, damaged: bytes, must_be_refused: bool = True) -> Mutation:
        return Mutation("special shapes", what, damaged, must_be_refused)

    yield shape("array of 2^63 elements", with_number(data, array_length, 2**63))
    yield shape("dimension of 2^42 + 1", with_number(data, layout.of_kind("dim")[0], 2**42 + 1))
    for what, kind, value in (("alignment of 2^30", _UINT32, 2**30), ("alignment as INT32", _INT32, 32)):
        yield shape(what, with_entry(data, layout, entry("general.alignment", kind, struct.pack("<I", value))))
    types_as_bytes = data[:value_start] + uint8_types + data[end : layout.header_end]
    yield shape("token_type as UINT8", with_header(data, layout, types_as_bytes), must_be_refused=False)
    yield shape("block_count of 0", with_number(data, block_count, 0))
    yield shape("key longer than the file", with_number(data, key_length, len(data)))
    yield shape("key twice", with_entry(data, layout, copied))
