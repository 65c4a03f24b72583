"""A .litertlm file: a header that names sections, and the sections, each from a multiple of 16 KiB on.

    "LITERTLM" | version, 3 x uint32 | 0 | end of the header, uint64 at 24 | header, a flatbuffer, at 32 | section ...

litert-lm-builder writes the same, with the time and a random number in it; here the same input gives the same bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from edgeinfer.exporters.litertlm.library import open_flatbuffers, open_header_schema

BLOCK = 16 << 10  # bytes that sections begin at multiples of
_MAGIC = b"LITERTLM"
_VERSION = (1, 7, 0)
_END_AT, _HEADER_AT = 24, 32


@dataclass(frozen=True)
class Section:
    """A part of the file."""

    kind: str  # its name in the schema of the header
    write: Callable[[BinaryIO], int]  # gives the bytes that it wrote
    items: Mapping[str, str] | None = None  # texts that go with it

    @classmethod
    def of(cls, kind: str, data: bytes) -> Section:
        """One whose bytes are there."""
        return cls(kind, lambda file: file.write(data))


def compressed_tokenizer(tokenizer: bytes) -> Section:
    """The section of a tokenizer.json: its length in 8 bytes, and it by zlib."""
    return Section.of("HF_Tokenizer_Zlib", len(tokenizer).to_bytes(8, "little") + zlib.compress(tokenizer, 9))


def write_container(file: BinaryIO, texts: Mapping[str, str], sections: Sequence[Section]) -> int:
    """Write the file, which begins at 0 and can be sought in; gives its bytes. texts: of the whole. Raises OSError."""
    spans = [(1, 1)] * len(sections)  # unlike 0, which is left out: the header has its length already
    n_header = len(_header(texts, sections, spans))
    end = _HEADER_AT + n_header
    for index, section in enumerate(sections):
        begin = -(-end // BLOCK) * BLOCK
        file.seek(begin)
        end = begin + section.write(file)
        spans[index] = begin, end
    file.seek(0)
    file.write((_MAGIC + b"".join(part.to_bytes(4, "little") for part in _VERSION)).ljust(_END_AT, b"\0"))
    file.write((_HEADER_AT + n_header).to_bytes(8, "little"))
    file.write(_header(texts, sections, spans))
    file.seek(end)
    return end


def _header(texts: Mapping[str, str], sections: Sequence[Section], spans: Sequence[tuple[int, int]]) -> bytes:
    schema = open_header_schema()
    builder = open_flatbuffers().Builder(BLOCK)
    header = schema.LiteRTLMMetaDataT(
        systemMetadata=schema.SystemMetadataT(entries=_pairs(texts)),
        sectionMetadata=schema.SectionMetadataT(
            objects=[
                schema.SectionObjectT(
                    items=_pairs(section.items or {}),
                    beginOffset=begin,
                    endOffset=end,
                    dataType=getattr(schema.AnySectionDataType, section.kind),
                )
                for section, (begin, end) in zip(sections, spans, strict=True)
            ]
        ),
    )
    builder.Finish(header.Pack(builder))
    return bytes(builder.Output())


def _pairs(texts: Mapping[str, str]) -> list[Any]:
    schema = open_header_schema()
    return [
        schema.KeyValuePairT(key=key, value=schema.StringValueT(value), valueType=schema.VData.StringValue)
        for key, value in texts.items()
    ]
