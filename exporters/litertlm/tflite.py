"""A TFLite file while it is built: graphs of operators that share constants, and its writing.

The file is a flatbuffer with the graphs, and after it the constants, each from a byte that the flatbuffer names:

    flatbuffer | padding | constant 0 | padding | constant 1 | ...

So a constant is made when it is written, some rows at a time, and the file may be larger than the 2 GB of a flatbuffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.litertlm.library import open_flatbuffers, open_schema

Array: TypeAlias = NDArray[Any]
Progress: TypeAlias = Callable[[int], None]  # called with the bytes of a piece that was written

ALIGNMENT = 64  # of constants, in bytes; the runtime needs 16
_VERSION = 3  # of the schema
_MIN_RUNTIME = b"2.17.0"  # TensorFlow Lite that knows all operators of ours
_IDENTIFIER = b"TFL3"
_PLACEHOLDER = 2  # an offset that is stored, unlike 0, which is left out
_OFFSET_FIELD = 6  # of a buffer, in the table of its fields

# The table of options of each operator, None for one without; versions other than 1 below.
_OPTIONS: dict[str, str | None] = {
    "ADD": "AddOptions",
    "BATCH_MATMUL": "BatchMatMulOptions",
    "CAST": "CastOptions",
    "CONCATENATION": "ConcatenationOptions",
    "DEQUANTIZE": "DequantizeOptions",
    "DIV": "DivOptions",
    "DYNAMIC_UPDATE_SLICE": "DynamicUpdateSliceOptions",
    "EMBEDDING_LOOKUP": None,
    "FULLY_CONNECTED": "FullyConnectedOptions",
    "GATHER": "GatherOptions",
    "GELU": "GeluOptions",
    "GREATER_EQUAL": "GreaterEqualOptions",
    "LOGISTIC": None,
    "MEAN": "ReducerOptions",
    "MUL": "MulOptions",
    "REDUCE_MAX": "ReducerOptions",
    "REDUCE_MIN": "ReducerOptions",
    "RELU": None,
    "RESHAPE": "ReshapeOptions",
    "ROUND": None,
    "RSQRT": None,
    "SLICE": "SliceOptions",
    "SOFTMAX": "SoftmaxOptions",
    "SUB": "SubOptions",
    "SUM": "ReducerOptions",
    "TANH": None,
    "TRANSPOSE": "TransposeOptions",
}
_VERSIONS = {"FULLY_CONNECTED": 5, "DEQUANTIZE": 3, "EMBEDDING_LOOKUP": 1}


class Type(IntEnum):
    """Types of tensors, with the numbers of the schema."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT32 = 2
    BOOL = 6
    INT8 = 9
    INT4 = 17  # two in a byte, the even one in the low half

    def n_bytes(self, n: int) -> int:
        """Bytes of n numbers."""
        return n * _BITS[self] // 8


_BITS = {Type.FLOAT32: 32, Type.FLOAT16: 16, Type.INT32: 32, Type.BOOL: 8, Type.INT8: 8, Type.INT4: 4}


@dataclass(frozen=True)
class Constant:
    """A tensor of the file, whose bytes are made when they are written."""

    name: str
    type: Type
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Array]]  # arrays that stand one after the other
    # gives the (n_out,) float32 of a quantised matrix with one scale a row
    row_scales: Callable[[], NDArray[np.float32]] | None = None
    block_scales: Constant | None = None  # float16 (n_out, n_in / block_size) of one with a scale for each run of a row
    block_size: int = 0
    tensor: str | None = None  # of the model, that it is made of

    @classmethod
    def of(cls, name: str, array: Array) -> Constant:
        """One that is there already, of float32, float16 or int32."""
        types = {"float32": Type.FLOAT32, "float16": Type.FLOAT16, "int32": Type.INT32}
        return cls(name, types[array.dtype.name], array.shape, lambda: [array])

    @property
    def n_bytes(self) -> int:
        """Bytes in the file, without the scales."""
        return self.type.n_bytes(math.prod(self.shape))


@dataclass(frozen=True)
class Value:
    """A tensor of a graph, by its index there."""

    index: int
    type: Type
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Node:
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any]


@dataclass
class Graph:
    """Operators in the order in which they run; a signature of the file, by its name."""

    name: str
    constants: dict[str, Constant]  # of the model
    tensors: list[tuple[str, Type, tuple[int, ...], Constant | None]] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    nodes: list[_Node] = field(default_factory=list)
    _known: dict[str, Value] = field(default_factory=dict)

    def input(self, name: str, type: Type, *shape: int) -> Value:
        """Add an input of the signature."""
        value = self._tensor(name, type, shape)
        self.inputs[name] = value.index
        return value

    def output(self, name: str, value: Value) -> None:
        """Make a value an output of the signature."""
        self.outputs[name] = value.index

    def constant(self, constant: Constant) -> Value:
        """The tensor of a constant, which is one of the model, once by name."""
        if constant.name not in self._known:
            known = self.constants.setdefault(constant.name, constant)
            if known.block_scales is not None:
                self.constant(known.block_scales)
            self._known[constant.name] = self._tensor(known.name, known.type, known.shape, known)
        return self._known[constant.name]

    def array(self, name: str, array: Array) -> Value:
        """The tensor of an array."""
        return self.constant(Constant.of(name, array))

    def ints(self, *values: int) -> Value:
        """A constant (n,) int32."""
        return self.array("ints " + " ".join(map(str, values)), np.array(values, dtype=np.int32))

    def number(self, value: float) -> Value:
        """A constant (1,) float32."""
        return self.array(f"number {value!r}", np.array([value], dtype=np.float32))

    def add(self, op: str, *inputs: Value, shape: tuple[int, ...], type: Type = Type.FLOAT32, **options: Any) -> Value:
        """Add an operator; gives its output, whose shape and type the caller knows."""
        value = self._tensor("", type, shape)  # names of thousands of values take seconds to write
        self.nodes.append(_Node(op, tuple(each.index for each in inputs), (value.index,), options))
        return value

    def index_of(self, constant: Constant) -> int:
        """Index of the tensor of a constant that is in the graph."""
        return self._known[constant.name].index

    def _tensor(self, name: str, type: Type, shape: tuple[int, ...], constant: Constant | None = None) -> Value:
        self.tensors.append((name, type, shape, constant))
        return Value(len(self.tensors) - 1, type, shape)


@dataclass
class Model:
    """Graphs that share constants."""

    description: str
    constants: dict[str, Constant] = field(default_factory=dict)
    graphs: list[Graph] = field(default_factory=list)

    def graph(self, name: str) -> Graph:
        """Add a graph, which is the signature of that name."""
        self.graphs.append(Graph(name, self.constants))
        return self.graphs[-1]

    @property
    def constant_bytes(self) -> int:
        """Bytes of all constants in the file."""
        return sum(-(-constant.n_bytes // ALIGNMENT) * ALIGNMENT for constant in self.constants.values())

    def write(self, file: BinaryIO, progress: Progress = lambda n_bytes: None) -> int:
        """Write the TFLite file from the file's position on, and give its bytes. Raises OSError."""
        header = self._packed()
        offsets, end = [], len(header)
        for constant in self.constants.values():
            offsets.append(_aligned(end))
            end = offsets[-1] + constant.n_bytes
        _set_offsets(header, offsets)
        file.write(header)
        at = len(header)
        for offset, constant in zip(offsets, self.constants.values(), strict=True):
            file.write(bytes(offset - at))
            at = offset + self._write_constant(file, constant, progress)
        file.write(bytes(_aligned(at) - at))
        return _aligned(at)

    @staticmethod
    def _write_constant(file: BinaryIO, constant: Constant, progress: Progress) -> int:
        written = 0
        for piece in constant.pieces():
            n_bytes = file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            written += n_bytes
            progress(n_bytes)
        if written != constant.n_bytes:
            raise ValueError(f"constant {constant.name}: expected {constant.n_bytes} bytes, made {written}")
        return written

    def _packed(self) -> bytearray:
        """The flatbuffer, without the places of the constants."""
        schema = open_schema()
        builder = open_flatbuffers().Builder(1 << 20)
        codes = list(dict.fromkeys(node.op for graph in self.graphs for node in graph.nodes))
        places = {name: index + 1 for index, name in enumerate(self.constants)}
        buffers = [schema.BufferT()]
        buffers += [schema.BufferT(offset=_PLACEHOLDER, size=each.n_bytes) for each in self.constants.values()]
        buffers.append(schema.BufferT(data=np.frombuffer(_MIN_RUNTIME.ljust(16, b"\0"), dtype=np.uint8)))
        model = schema.ModelT(
            version=_VERSION,
            operatorCodes=[_code(op) for op in codes],
            subgraphs=[_subgraph(graph, codes, places) for graph in self.graphs],
            description=self.description,
            buffers=buffers,
            metadata=[schema.MetadataT(name="min_runtime_version", buffer=len(buffers) - 1)],
            signatureDefs=[_signature(index, graph) for index, graph in enumerate(self.graphs)],
        )
        builder.Finish(model.Pack(builder), file_identifier=_IDENTIFIER)
        return bytearray(builder.Output())


def _set_offsets(header: bytearray, offsets: list[int]) -> None:
    """Write where the constants lie into a packed flatbuffer, which is not packed again: that takes seconds."""
    root = open_schema().Model.GetRootAs(header, 0)
    for index, offset in enumerate(offsets):
        table = root.Buffers(1 + index)._tab
        place = table.Pos + table.Offset(_OFFSET_FIELD)
        header[place : place + 8] = offset.to_bytes(8, "little")


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _code(op: str) -> Any:
    schema = open_schema()
    number = getattr(schema.BuiltinOperator, op)
    return schema.OperatorCodeT(
        deprecatedBuiltinCode=min(number, 127), builtinCode=number, version=_VERSIONS.get(op, 1)
    )


def _signature(index: int, graph: Graph) -> Any:
    schema = open_schema()
    inputs, outputs = (
        [schema.TensorMapT(name=name, tensorIndex=place) for name, place in sorted(names.items())]
        for names in (graph.inputs, graph.outputs)
    )
    return schema.SignatureDefT(inputs=inputs, outputs=outputs, signatureKey=graph.name, subgraphIndex=index)


def _subgraph(graph: Graph, codes: list[str], places: Mapping[str, int]) -> Any:
    schema = open_schema()
    return schema.SubGraphT(
        tensors=[
            schema.TensorT(
                shape=np.array(shape, dtype=np.int32),
                type=int(type),
                buffer=0 if constant is None else places[constant.name],
                name=name or None,
                quantization=None if constant is None else _quantization(graph, constant),
                hasRank=True,
            )
            for name, type, shape, constant in graph.tensors
        ],
        inputs=list(graph.inputs.values()),
        outputs=list(graph.outputs.values()),
        operators=[_operator(node, codes) for node in graph.nodes],
        name=graph.name,
    )


def _quantization(graph: Graph, constant: Constant) -> Any:
    schema = open_schema()
    if constant.block_scales is not None:
        place = graph.index_of(constant.block_scales)
        details = schema.BlockwiseQuantizationT(scales=place, zeroPoints=-1, blockSize=constant.block_size)
        return schema.QuantizationParametersT(
            detailsType=schema.QuantizationDetails.BlockwiseQuantization, details=details
        )
    if constant.row_scales is None:
        return None
    scales = constant.row_scales()
    zeros = np.zeros(len(scales), dtype=np.int64)
    return schema.QuantizationParametersT(scale=scales, zeroPoint=zeros, quantizedDimension=0)


def _operator(node: _Node, codes: list[str]) -> Any:
    schema = open_schema()
    name = _OPTIONS[node.op]
    options = None
    if name is not None:
        options = getattr(schema, f"{name}T")()
        for key, value in node.options.items():
            setattr(options, key, value)
    return schema.OperatorT(
        opcodeIndex=codes.index(node.op),
        inputs=list(node.inputs),
        outputs=list(node.outputs),
        builtinOptionsType=0 if name is None else getattr(schema.BuiltinOptions, name),
        builtinOptions=options,
    )
