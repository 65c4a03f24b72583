"""A model in several files, as llama.cpp's gguf-split writes it."""

from __future__ import annotations

import struct
from pathlib import Path

from gguf_mutations import read_layout, with_values

from edgeinfer.models.gguf import ModelFile, TensorInfo

_ALIGNMENT = 32


def split_model(path: Path, folder: Path, n_files: int = 2) -> list[Path]:
    """Write the tensors of a model to several files in a folder, the metadata to the first; gives the files."""
    with ModelFile.open(path) as model:
        names = list(model.tensors)
        parts = [names[index * len(names) // n_files : (index + 1) * len(names) // n_files] for index in range(n_files)]
        written = []
        for index, part in enumerate(parts):
            metadata = path.read_bytes() if index == 0 else b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
            keys = {"split.no": (index, "H"), "split.count": (n_files, "H"), "split.tensors.count": (len(names), "i")}
            header = _without_tensors(metadata, {key: _number(*value) for key, value in keys.items()})
            tensors = [(model.tensors[name], model.data(name).tobytes()) for name in part]
            target = folder / f"{path.stem}-{index + 1:05d}-of-{n_files:05d}.gguf"
            target.write_bytes(_with_tensors(header, tensors))
            written.append(target)
    return written


def _number(value: int, code: str) -> bytes:
    return struct.pack(f"<I{code}", {"H": 2, "i": 5}[code], value)


def _without_tensors(data: bytes, values: dict[str, bytes]) -> bytes:
    """The header of a file with these keys too, and without tensors."""
    changed = with_values(data, dict(values))
    layout = read_layout(changed)
    return changed[:8] + struct.pack("<Q", 0) + changed[16 : layout.infos_start]


def _with_tensors(header: bytes, tensors: list[tuple[TensorInfo, bytes]]) -> bytes:
    infos, data = b"", b""
    for info, content in tensors:
        name, dims = info.name.encode(), tuple(reversed(info.shape))
        infos += struct.pack("<Q", len(name)) + name
        infos += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, int(info.type), len(data))
        data += content + bytes(-len(content) % _ALIGNMENT)
    whole = header[:8] + struct.pack("<Q", len(tensors)) + header[16:] + infos
    return whole + bytes(-len(whole) % _ALIGNMENT) + data
