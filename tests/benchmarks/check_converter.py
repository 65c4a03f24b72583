"""A real checkpoint against llama.cpp's converter: the names, shapes and numbers of all tensors, and the keys.

    python tests/benchmarks/check_converter.py FOLDER LLAMA_CPP [--config KEY=JSON ...]

LLAMA_CPP: as in tests/support/converter_hashes.py.  --config: keys of config.json that are changed for edgeinfer, such
as use_bidirectional_attention=false for an encoder, which it does not run but whose tensors can be compared.
One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from converter_hashes import APART, converted

from edgeinfer.exporters.huggingface import open_folder
from edgeinfer.exporters.source import Source, SourceTensor
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile

PIECE_WEIGHTS = 4 << 20


def linked(folder: Path, changes: dict[str, Any], to: Path) -> Path:
    """The same folder with another config.json."""
    for path in folder.iterdir():
        if path.is_file() and path.name != "config.json":
            os.link(path, to / path.name)
    config = json.loads((folder / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


def different(tensor: SourceTensor, file: ModelFile) -> Iterator[int]:
    """First rows of the pieces whose numbers are not those of the file."""
    info, step = file.tensors[tensor.name], max(1, PIECE_WEIGHTS // tensor.n_in)
    row_bytes = info.type.n_bytes(tensor.n_in)
    if info.type == GGMLType.I64 and tensor.stored is not None:
        if tensor.stored(0, tensor.n_rows).tobytes() != file.data(tensor.name).tobytes():
            yield 0
        return
    for first in range(0, tensor.n_rows, step):
        last = min(first + step, tensor.n_rows)
        theirs = dequantize(
            info.type, file.data(tensor.name, first * row_bytes, last * row_bytes), (last - first, tensor.n_in)
        )
        if not np.array_equal(tensor.rows(first, last), theirs):
            yield first


def compare(source: Source, file: ModelFile) -> dict[str, Any]:
    """What is not the same."""
    ours = {tensor.name: tensor for tensor in source.tensors}
    shared = ours.keys() & file.tensors.keys()
    shapes = {name for name in shared if ours[name].shape != file.tensors[name].shape}
    numbers = {name for name in shared - shapes if any(True for _ in different(ours[name], file))}
    keys = [
        {key.partition(".")[2]: value for key, value in metadata.items() if not key.startswith(APART)}
        for metadata in (source.metadata, file.metadata)
    ]
    in_both = keys[0].keys() & keys[1].keys()
    both = {key for key in in_both if np.any(np.float32(keys[0][key]) != np.float32(keys[1][key]))}
    return {
        "tensors": len(ours),
        "other_names": sorted(ours.keys() ^ file.tensors.keys()),
        "other_shapes": sorted(shapes),
        "other_numbers": sorted(numbers),
        "other_keys": sorted(both),
        "keys_of_ours_alone": sorted(keys[0].keys() - keys[1].keys()),
        "keys_of_theirs_alone": sorted(keys[1].keys() - keys[0].keys()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--config", nargs="*", default=[], metavar="KEY=JSON")
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.llama_cpp), str(arguments.llama_cpp / "gguf-py")]
    logging.disable(logging.WARNING)
    changes = {key: json.loads(value) for key, _, value in (each.partition("=") for each in arguments.config)}
    with tempfile.TemporaryDirectory(dir=arguments.folder.parent) as name:
        inner = Path(name) / "model"
        inner.mkdir()
        folder = linked(arguments.folder, changes, inner) if changes else arguments.folder
        source = open_folder(folder, vocabulary=False)
        converted(arguments.folder, Path(name) / "theirs.gguf")
        with ModelFile.open(Path(name) / "theirs.gguf") as file:
            result = compare(source, file)
    print(json.dumps({"benchmark": "check_converter", "model": arguments.folder.name, **result}))


if __name__ == "__main__":
    main()
