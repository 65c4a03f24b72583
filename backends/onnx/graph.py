"""A graph of ONNX while it is built: operators by name, and constants whose arrays are made when they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from edgeinfer.backends.onnx.library import open_onnx
from edgeinfer.backends.onnx.matrices import Constant

CONTRIB = "com.microsoft"
OPSET, CONTRIB_OPSET, IR_VERSION = 21, 1, 10

Attribute: TypeAlias = int | float | str | Sequence[int]
Dims: TypeAlias = tuple[int | str, ...]  # a name for a size that passes choose


@dataclass(frozen=True)
class Value:
    """An input or output of a graph."""

    name: str
    dtype: np.dtype[np.generic]
    dims: Dims


@dataclass(frozen=True)
class Node:
    """An operator; an input "" is one that is left out."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    domain: str
    attributes: Mapping[str, Attribute]


@dataclass
class Graph:
    """Nodes in the order in which they run."""

    name: str
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)  # texts that go with the model
    _scope: str = ""

    def within(self, scope: str) -> None:
        """Names of values from now on begin with this."""
        self._scope = scope

    def input(self, name: str, dtype: type[np.generic], *dims: int | str) -> str:
        """Add an input; gives its name."""
        self.inputs.append(Value(name, np.dtype(dtype), dims))
        return name

    def output(self, name: str, value: str, *dims: int | str) -> None:
        """Make a float32 value an output of that name."""
        if value != name:
            self.add("Identity", value, outputs=[name])
        self.outputs.append(Value(name, np.dtype(np.float32), dims))

    def constant(self, name: str, value: Constant | np.ndarray[Any, Any]) -> str:
        """Add a constant, once by name; gives the name."""
        self.constants.setdefault(name, value if isinstance(value, Constant) else Constant.of(value))
        return name

    def ints(self, *values: int) -> str:
        """A constant (n,) int64."""
        return self.constant("ints " + " ".join(map(str, values)), np.array(values, dtype=np.int64))

    def number(self, value: float) -> str:
        """A constant () float32."""
        return self.constant(f"number {value!r}", np.array(value, dtype=np.float32))

    def add(self, op: str, *inputs: str, domain: str = "", outputs: Sequence[str] = (), **attributes: Attribute) -> str:
        """Add an operator; gives the name of its first output. outputs: their names; one is made up without."""
        names = tuple(outputs) or (f"{self._scope}{op}.{len(self.nodes)}",)
        self.nodes.append(Node(op, inputs, names, domain, attributes))
        return names[0]

    @property
    def constant_bytes(self) -> int:
        """Bytes of all constants."""
        return sum(constant.n_bytes for constant in self.constants.values())

    def model(self, constants: Sequence[Any]) -> Any:
        """The onnx.ModelProto. constants: TensorProtos of all constants, with their data or where it is."""
        onnx = open_onnx()
        helper = onnx.helper
        domains = {"": OPSET} | {node.domain: CONTRIB_OPSET for node in self.nodes if node.domain}
        nodes = [
            helper.make_node(
                node.op, node.inputs, node.outputs, name=node.outputs[0], domain=node.domain, **node.attributes
            )
            for node in self.nodes
        ]
        values = [
            [
                helper.make_tensor_value_info(value.name, helper.np_dtype_to_tensor_dtype(value.dtype), value.dims)
                for value in values
            ]
            for values in (self.inputs, self.outputs)
        ]
        graph = helper.make_graph(nodes, self.name, *values, constants)
        opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgeinfer")
        helper.set_model_props(model, self.metadata)
        return model


def within(name: str, constant: Constant) -> Any:
    """The TensorProto of a constant, with its data."""
    tensor = _described(name, constant)
    tensor.raw_data = np.ascontiguousarray(constant.make()).tobytes()
    return tensor


def beside(name: str, constant: Constant, location: str, offset: int) -> Any:
    """The TensorProto of a constant whose data is elsewhere: in the file `location`, from a byte on."""
    tensor = _described(name, constant)
    tensor.data_location = tensor.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", constant.n_bytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _described(name: str, constant: Constant) -> Any:
    onnx = open_onnx()
    kind = onnx.helper.np_dtype_to_tensor_dtype(constant.dtype)
    dims = (*constant.shape[:-1], 2 * constant.shape[-1]) if constant.is_int4 else constant.shape
    return onnx.TensorProto(name=name, data_type=onnx.TensorProto.INT4 if constant.is_int4 else kind, dims=dims)
