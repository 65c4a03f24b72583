"""Ternary checkpoints of Hugging Face: a folder with config.json and safetensors files.

The safetensors format: u64 length of a header in JSON, {name: {dtype, shape, data_offsets}}, the bytes of the tensors.

A ternary matrix is packed, four rows to a byte, or unpacked. Packed, row i * (n_out / 4) + r has bits 2i and 2i + 1 of
row r as trit + 1, and `weight_scale` stands beside. What that means depends on the class of the linear layers
(transformers, integrations/bitnet.py): weight = trit * weight_scale in AutoBitLinear, trit / weight_scale in BitLinear.
Unpacked and "online", the weights are rounded when they are used: to the mean magnitude times -1, 0 or 1. Without a
quantization_config (TriLM) the weights must be ternary as they stand, with their scales in them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.arguments import check_file_name
from edgeinfer.errors import ModelFileError, ModelNotFound, UnsupportedModel
from edgeinfer.models.formats import dequantize
from edgeinfer.models.formats.ternary_matrix import TernaryMatrix, Trits
from edgeinfer.models.gguf import GGMLType

Floats = NDArray[np.float32]

MAX_HEADER_BYTES = 64 << 20
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_FLOATS = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16}


@dataclass(frozen=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class Checkpoint:
    """A folder of Hugging Face with a ternary model.

    config: what config.json says.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, _Stored]) -> None:
        self.folder = folder
        self.config = config
        self._tensors = tensors
        self._quantization = self._check_quantization()

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Map all safetensors files. Raises ModelNotFound, ModelFileError, UnsupportedModel, InvalidArgument."""
        folder = check_file_name("folder", folder)
        files = sorted(folder.glob("*.safetensors"))
        if not files or not (folder / "config.json").is_file():
            raise ModelNotFound(f"{folder}: needs config.json and .safetensors files: found {_names_in(folder)}")
        tensors: dict[str, _Stored] = {}
        for file in files:
            tensors |= _read_safetensors(file)
        return cls(folder, read_json(folder / "config.json"), tensors)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelFileError if it is missing."""
        return self._stored(name).shape

    def float_type(self, name: str) -> GGMLType:
        """What the numbers of a tensor are. Raises ModelFileError if it is missing or not made of floats."""
        dtype = self._stored(name).dtype
        if dtype not in _FLOATS:
            self._refuse(name, f"must be F32, F16 or BF16: found {dtype}")
        return _FLOATS[dtype]

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, little-endian. Raises ModelFileError if it is missing."""
        return self._stored(name).data

    def floats(self, name: str) -> Floats:
        """A tensor as float32. Raises ModelFileError if it is missing or not made of floats."""
        shape = self.shape(name)
        return dequantize(self.float_type(name), self.data(name), shape or (1,)).reshape(shape)

    def ternary(self, module: str, shape: tuple[int, int]) -> TernaryMatrix:
        """The matrix of a linear layer, (n_out, n_in).

        Raises ModelFileError for what is not ternary, UnsupportedModel in a model that does not say that it is.
        """
        name = f"{module}.weight"
        if self._stored(name).dtype == "U8":
            return TernaryMatrix.of_one_scale(self._unpacked(name, shape), self._scale(module))
        weights = self.floats(name)
        if weights.shape != shape:
            self._refuse(name, f"must be {shape}: found {weights.shape}")
        if self._quantization.get("quantization_mode") == "online":
            return _round(weights, self._stored(name).dtype)
        if not self._quantization:
            return TernaryMatrix.of_weights(f"{name} of {self.folder}", weights)
        if not np.isin(weights, (-1, 0, 1)).all():
            self._refuse(name, "must be -1, 0 or 1: found other numbers; this matrix is not ternary")
        return TernaryMatrix.of_one_scale(weights.astype(np.int8), self._scale(module))

    def _unpacked(self, name: str, shape: tuple[int, int]) -> Trits:
        stored = self._stored(name)
        if stored.shape != (shape[0] // 4, shape[1]) or shape[0] % 4:
            self._refuse(name, f"must be {shape} with four rows packed into one: found {stored.shape}")
        packed = stored.data.reshape(stored.shape)
        codes = np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)])
        if (codes == 3).any():
            self._refuse(name, "must have codes 0, 1 and 2: found 3; it is damaged, or not ternary")
        return codes.astype(np.int8) - np.int8(1)

    def _scale(self, module: str) -> float:
        name = f"{module}.weight_scale"
        scales = self.floats(name).reshape(-1)
        if len(scales) != 1 or not math.isfinite(scales[0]) or scales[0] <= 0:
            self._refuse(name, f"must be one positive number: found {len(scales)}, {scales[:4].tolist()}")
        divides = self._quantization.get("linear_class", "bitlinear") == "bitlinear"
        return float(np.float32(1) / scales[0] if divides else scales[0])

    def _stored(self, name: str) -> _Stored:
        if name not in self._tensors:
            self._refuse(name, "is missing")
        return self._tensors[name]

    def _check_quantization(self) -> Mapping[str, Any]:
        found = self.config.get("quantization_config")
        if found is None:
            return {}
        if not isinstance(found, dict) or found.get("quant_method") != "bitnet":
            raise UnsupportedModel(f"{self.folder}: quantization_config must be that of bitnet: found {found!r:.200}")
        known = {
            "linear_class": ("bitlinear", "autobitlinear"),
            "quantization_mode": ("offline", "online"),
            "use_rms_norm": (False,),
        }
        for key, values in known.items():
            if found.get(key, values[0]) not in values:
                raise UnsupportedModel(
                    f"{self.folder}: quantization_config.{key} must be {' or '.join(map(repr, values))}: found "
                    f"{found[key]!r:.80}"
                )
        return found

    def _refuse(self, name: str, reason: str) -> Any:
        raise ModelFileError(f"{self.folder}: tensor {name} {reason}")


def _round(weights: Floats, dtype: str) -> TernaryMatrix:
    """As AutoBitLinear rounds online: the mean magnitude, at least 1e-5; what is multiplied is rounded to dtype."""
    scale = np.float32(1) / max(np.abs(weights).mean(dtype=np.float32), np.float32(1e-5))
    trits = np.rint(weights * scale).clip(-1, 1).astype(np.int8)
    magnitude = np.array([np.float32(1) / scale], dtype=np.float32)
    if dtype == "F16":
        magnitude = magnitude.astype(np.float16).astype(np.float32)
    elif dtype == "BF16":
        bits = magnitude.view(np.uint32)
        magnitude = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return TernaryMatrix.of_one_scale(trits, float(magnitude[0]))


def _read_safetensors(path: Path) -> dict[str, _Stored]:
    """The tensors of a file, mapped. Raises ModelFileError."""
    data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)
    length = struct.unpack("<Q", data[:8].tobytes())[0] if len(data) >= 8 else len(data)
    if length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ModelFileError(f"{path}: no safetensors file, or cut short: its header is to have {length} bytes")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _stored(path, name, entry, data[8 + length :]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"{path}: broken header: {error!r:.200}") from error


def _stored(path: Path, name: str, entry: Mapping[str, Any], data: NDArray[np.uint8]) -> _Stored:
    dtype, shape, (first, last) = str(entry["dtype"]), tuple(map(int, entry["shape"])), entry["data_offsets"]
    if dtype in _ITEM_BYTES and last - first != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ModelFileError(f"{path}: tensor {name} {dtype} {shape} cannot have {last - first} bytes")
    if not 0 <= first <= last <= len(data):
        raise ModelFileError(f"{path}: tensor {name} ends at byte {last} of {len(data)}: the file is cut short")
    return _Stored(dtype, shape, data[first:last])


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in a file; the default, if given, where there is no file. Raises ModelFileError."""
    if default is not None and not path.is_file():
        return default
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelFileError(f"{path}: must be a JSON object")
    return found


def _names_in(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())[:8] if folder.is_dir() else []
    return ", ".join(names) or "nothing"
