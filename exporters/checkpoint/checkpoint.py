"""A model of Hugging Face: config.json and the tensors of its safetensors files, quantised ones as floats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import ModelFileError, ModelNotFound
from edgeinfer.exporters.checkpoint.adapters import refuse_adapter
from edgeinfer.exporters.checkpoint.config import Config
from edgeinfer.exporters.checkpoint.folder import Folder
from edgeinfer.exporters.checkpoint.names import language_names
from edgeinfer.exporters.checkpoint.quantized import read_tensors
from edgeinfer.exporters.checkpoint.safetensors import StoredTensor
from edgeinfer.exporters.checkpoint.tensor import READ, PlainTensor, Tensor
from edgeinfer.exporters.checkpoint.weight_files import read_stored
from edgeinfer.exporters.finite import check_floats, refuse
from edgeinfer.models.formats.finite import first_not_finite
from edgeinfer.models.gguf import FilePlace, GGMLType

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_FLOATS = {"F64": GGMLType.F64, "F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "U16": "<u2", "U32": "<u4", "BOOL": "u1"}


class Checkpoint:
    """The model in a folder. Weights are read when they are asked for, some rows at a time.

    folder: its files.  config: what config.json says.  quantization: the method of its quantised weights, "" if there
    are none. These weights have their plain names, "model.layers.0.mlp.up_proj.weight", and are floats.
    """

    def __init__(self, folder: Folder, config: Config, tensors: Mapping[str, Tensor], quantization: str) -> None:
        self.folder = folder
        self.config = config
        self.quantization = quantization
        self._tensors = tensors

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read config.json and the headers. Raises ModelNotFound, ModelFileError, UnsupportedModel, InvalidArgument."""
        found = Folder(folder)
        refuse_adapter(found)
        if "config.json" not in found:
            raise ModelNotFound(f"{found.path}: needs config.json and .safetensors files: found {found.shown()}")
        config = Config(found.json("config.json"), found.path / "config.json")
        method, tensors = read_tensors(config, read_stored(found))
        return cls(found, config, tensors, method)

    def language(self) -> Checkpoint:
        """The language model of it, with keys and names as a model of text alone has them.

        Keys of text_config come before those of the whole. Names are "model.layers.0.…", "model.embed_tokens.weight",
        "model.norm.weight" and "lm_head.weight", whatever stands in front of them; other parts are left out.
        """
        return self.renamed(language_names(self._tensors), self.config.language())

    def renamed(self, names: Mapping[str, str], config: Config) -> Checkpoint:
        """The tensors that are named alone. names: those that are stored by those that they get."""
        tensors = {name: self._tensors[stored] for name, stored in names.items()}
        return Checkpoint(self.folder, config, tensors, self.quantization)

    @property
    def path(self) -> Path:
        """The folder as the user named it."""
        return self.folder.path

    @property
    def files(self) -> Sequence[Path]:
        """The files that were read until now."""
        return self.folder.read

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelFileError if it is missing."""
        return self._tensor(name).shape

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelFileError if a tensor is missing or of another shape."""
        found = self.shape(name)
        if found != shape:
            self.refuse(name, f"must be {shape}: found {found}")

    def dtype(self, name: str) -> str:
        """What a tensor is stored as, in the words of safetensors. Raises ModelFileError if it is missing."""
        return self._tensor(name).dtype

    def type(self, name: str) -> GGMLType:
        """What holds the weights of a tensor without loss. Raises ModelFileError if they are no floats, see shape."""
        found = self._tensor(name).type
        if found is None:
            self.refuse(name, f"must be {READ}: found {self.dtype(name)}")
        return found

    def rows(self, name: str, first: int, last: int) -> Floats:
        """Rows first..last-1 of a tensor, (last - first, n_in).

        The rows of a tensor of three axes are those of its matrices one after the other; a vector is one row.
        Raises ModelFileError if they are no floats or no numbers, see shape.
        """
        self.type(name)
        found = self._tensor(name).rows(first, last)
        check_floats(self.path, name, self.dtype(name), found, first)
        return found

    def floats(self, name: str) -> Floats:
        """A whole tensor, in its shape. Raises ModelFileError, see rows."""
        shape = self.shape(name)
        return self.rows(name, 0, math.prod(shape[:-1])).reshape(shape)

    def data(self, name: str, first: int = 0, last: int | None = None) -> Bytes:
        """The bytes of some rows as they are stored, little-endian: (n_bytes,).

        Raises ModelFileError, see shape, also for what was quantised, and for floats that are no numbers.
        """
        stored = self._stored(name)
        found, kind = stored.read(first, last), _FLOATS.get(stored.dtype)
        weight = None if kind is None else first_not_finite(kind, found)
        if weight is not None:
            n_in = stored.shape[-1] if stored.shape else 1
            refuse(self.path, name, stored.dtype, first * n_in + weight, n_in)
        return found

    def place(self, name: str) -> FilePlace:
        """Where the bytes of a tensor lie. Raises ModelFileError, see shape, also for what was quantised."""
        stored = self._stored(name)
        return FilePlace(stored.file.path, stored.file.descriptor, stored.offset)

    def integers(self, name: str) -> NDArray[np.int64]:
        """A whole tensor of integers, in its shape. Raises ModelFileError if it has others, see shape."""
        stored = self._stored(name)
        if stored.dtype not in _INTEGERS:
            self.refuse(name, f"must be integers: found {stored.dtype}")
        return stored.read().view(_INTEGERS[stored.dtype]).astype(np.int64).reshape(stored.shape)

    def release(self, name: str) -> None:
        """Give back what reading a tensor keeps in memory; it can be read again."""
        self._tensor(name).release()

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raises ModelFileError about a tensor."""
        raise ModelFileError(f"{self.path}: tensor {name} {reason}")

    def _stored(self, name: str) -> StoredTensor:
        tensor = self._tensor(name)
        if not isinstance(tensor, PlainTensor):
            self.refuse(name, f"is quantised by {self.quantization}: there are no bytes of its weights")
        return tensor.stored

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            self.refuse(name, "is missing")
        return self._tensors[name]
