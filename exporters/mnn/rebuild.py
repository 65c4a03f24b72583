"""The converted graph with MNN's own operators in the place of those that the converter left: products, attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from edgeinfer.backends.onnx.graph import Graph
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.mnn.graph import ATTENTION, LINEAR, Linear
from edgeinfer.exporters.mnn.weights import Placed

Op: TypeAlias = dict[str, Any]
Place: TypeAlias = Callable[[Linear], Placed]


def rebuilt(
    content: Op, graph: Graph, linears: Mapping[str, Linear], constants: Path, out: BinaryIO, place: Place
) -> dict[str, Placed]:
    """Put the weights into a converted graph; gives where each product has them.

    content: the graph in MNN's JSON, which is changed.  graph: the one it was made of, whose small constants it gets.
    constants: the converter's file of larger ones.  out: llm.mnn.weight.  place: writes the weights of a product.
    """
    stored = constants.read_bytes() if constants.exists() else b""
    placed: dict[str, Placed] = {}
    ops: list[Op] = []
    for op in content["oplists"]:
        kind = op["main"].get("type") if op["type"] == "Extra" else op["type"]
        if kind == LINEAR:
            label = _attribute(op, "label")
            placed[label] = place(linears[label])
            ops += _product(op, label, placed[label], content["tensorName"])
        elif kind == ATTENTION:
            ops.append(_attention(op))
        elif op["type"] == "Extra":
            raise UnsupportedModel(f"MNN's converter has no operator for {kind!r} of {op['name']!r}")
        else:
            _keep_exactly(op, graph, stored, out)
            ops.append(op)
    content["oplists"] = ops
    return placed


def _keep_exactly(op: Op, graph: Graph, stored: bytes, out: BinaryIO) -> None:
    """Give an operator its floats again, which JSON has with six digits."""
    main = op.get("main", {})
    if op["type"] == "LayerNorm" and "external" in main:
        first, *sizes = main["external"][:3]
        main["external"] = [out.tell(), *sizes]
        out.write(stored[first : first + sum(sizes)])
    elif op["type"] == "LayerNorm" and "gamma" in main:
        raise UnsupportedModel(f"MNN's converter wrote the norm {op['name']!r} with six digits only")
    elif op["type"] == "Const" and main.get("dataType") == "DT_FLOAT":
        if "external" in main:
            first, size = main.pop("external")[:2]
            main["float32s"] = np.frombuffer(stored, np.float32, size // 4, first).tolist()
        elif op["name"] in graph.constants:
            main["float32s"] = np.ravel(graph.constants[op["name"]].make()).astype(np.float32).tolist()


def _attribute(op: Op, key: str) -> str:
    return str(next(each["s"] for each in op["main"]["attr"] if each["key"] == key))


def _attention(op: Op) -> Op:
    return {
        "name": _attribute(op, "label"),
        "type": "Attention",
        "inputIndexes": op["inputIndexes"],
        "outputIndexes": op["outputIndexes"],
        "main_type": "AttentionParam",
        "main": {"kv_cache": True},
        "defaultDimentionFormat": "NHWC",
    }


def _product(op: Op, name: str, placed: Placed, tensors: list[str]) -> list[Op]:
    """(1, n, n_in) as n images of one point with n_in channels, a convolution, and back."""
    n_out, n_in = placed.shape
    between = []
    for stage in ("rows", "packed", "product", "unpacked"):
        between.append(len(tensors))
        tensors.append(f"{name}.{stage}")

    def step(kind: str, given: int, made: int, main_type: str, main: Op) -> Op:
        return {
            "name": f"{name}.{len(tensors)}.{made}" if kind != "Convolution" else name,
            "type": kind,
            "inputIndexes": [given],
            "outputIndexes": [made],
            "main_type": main_type,
            "main": main,
            "defaultDimentionFormat": "NHWC",
        }

    ends = [op["inputIndexes"][0], *between, op["outputIndexes"][0]]
    convolution = {"common": _common(n_in, n_out), "quanParameter": placed.quantisation, "external": placed.external}
    return [
        step("Reshape", ends[0], ends[1], "Reshape", {"dims": [-1, n_in, 1, 1], "dimType": "NCHW"}),
        step("ConvertTensor", ends[1], ends[2], "TensorConvertInfo", {"source": "NCHW", "dest": "NC4HW4"}),
        step("Convolution", ends[2], ends[3], "Convolution2D", convolution),
        step("ConvertTensor", ends[3], ends[4], "TensorConvertInfo", {"source": "NC4HW4", "dest": "NCHW"}),
        step("Reshape", ends[4], ends[5], "Reshape", {"dims": [1, -1, n_out], "dimType": "NCHW"}),
    ]


def _common(n_in: int, n_out: int) -> Op:
    ones = dict.fromkeys(("dilateX", "dilateY", "strideX", "strideY", "kernelX", "kernelY", "group"), 1)
    flags = dict.fromkeys(("relu", "relu6", "hasOutputShape"), False)
    return {**ones, **flags, "padX": 0, "padY": 0, "padMode": "CAFFE", "inputCount": n_in, "outputCount": n_out}
