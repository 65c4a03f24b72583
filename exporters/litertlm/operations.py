"""Steps of a decoder as TFLite operators: norms, products with matrices, activations."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.litertlm.matrices import RUN, Matrix, Rows, matrix_of, part_of, vector_constant
from edgeinfer.exporters.litertlm.tflite import Constant, Graph, Type, Value
from edgeinfer.models import TensorRef
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.spec import Activation


class Operations:
    """Adds operators to one graph.

    matrices: of the model, by name, which the graphs of its signatures share.  fine: whether what goes into a quantised
    matrix keeps 16 bits; 8 without.
    """

    def __init__(self, graph: Graph, model: ModelFile, epsilon: float, matrices: dict[str, Matrix], fine: bool) -> None:
        self.graph = graph
        self.model = model
        self._epsilon = epsilon
        self._matrices = matrices
        self._fine = fine
        # By the value that they are of.
        self._sums: dict[int, Value] = {}
        self._parts: dict[int, Value] = {}

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def binary(self, op: str, a: Value, b: Value) -> Value:
        """ADD, SUB, MUL or DIV, whose operands are repeated along axes of 1."""
        options: dict[str, Any] = {"fusedActivationFunction": 0}
        shape = tuple(np.broadcast_shapes(a.shape, b.shape))
        return self.graph.add(op, a, b, shape=shape, type=a.type, **options)

    def unary(self, op: str, x: Value, **options: Any) -> Value:
        """An operator that keeps the shape."""
        return self.graph.add(op, x, shape=x.shape, **options)

    def times(self, x: Value, factor: float) -> Value:
        """x * factor."""
        return x if factor == 1.0 else self.binary("MUL", x, self.graph.number(factor))

    def capped(self, x: Value, cap: float | None) -> Value:
        """cap * tanh(x / cap)."""
        return x if cap is None else self.times(self.unary("TANH", self.times(x, 1 / cap)), cap)

    def reshape(self, x: Value, *shape: int) -> Value:
        """The same numbers in another shape."""
        if x.shape == shape:
            return x
        options = {"newShape": np.array(shape, dtype=np.int32)}
        return self.graph.add("RESHAPE", x, self.graph.ints(*shape), shape=shape, type=x.type, **options)

    def transpose(self, x: Value, *order: int) -> Value:
        """x with its axes in this order."""
        shape = tuple(x.shape[axis] for axis in order)
        return self.graph.add("TRANSPOSE", x, self.graph.ints(*order), shape=shape)

    def slice(self, x: Value, first: int, last: int) -> Value:
        """Numbers first..last - 1 of the last axis."""
        begin = (*(0 for _ in x.shape[:-1]), first)
        shape = (*x.shape[:-1], last - first)
        return self.graph.add("SLICE", x, self.graph.ints(*begin), self.graph.ints(*shape), shape=shape, type=x.type)

    def concatenated(self, *parts: Value, axis: int) -> Value:
        """The parts one behind the other along an axis."""
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        return self.graph.add(
            "CONCATENATION", *parts, shape=tuple(shape), type=parts[0].type, axis=axis, fusedActivationFunction=0
        )

    def cast(self, x: Value, type: Type) -> Value:
        """x in another type."""
        return self.graph.add("CAST", x, shape=x.shape, type=type, inDataType=int(x.type), outDataType=int(type))

    # ---- layers ------------------------------------------------------------------------------------------------------

    def vector(self, ref: TensorRef, order: Rows | None = None) -> Value:
        """A norm or a bias, (n,) float32."""
        return self.graph.constant(vector_constant(part_of(self.model, ref, order)))

    def norm(self, ref: TensorRef | None, x: Value, order: Rows | None = None) -> Value:
        """RMS norm over the last axis; x where there is none."""
        if ref is None:
            return x
        axis = self.graph.ints(len(x.shape) - 1)
        squares = self.graph.add("MEAN", self.binary("MUL", x, x), axis, shape=(*x.shape[:-1], 1), keepDims=True)
        root = self.unary("RSQRT", self.binary("ADD", squares, self.graph.number(self._epsilon)))
        return self.binary("MUL", self.binary("MUL", x, root), self.vector(ref, order))

    def matrix(self, ref: TensorRef, order: Rows | None = None) -> Matrix:
        """A matrix of the model."""
        part = part_of(self.model, ref, order)
        if part.key not in self._matrices:
            self._matrices[part.key] = matrix_of(part)
        return self._matrices[part.key]

    def linear(self, ref: TensorRef, bias: TensorRef | None, x: Value, order: Rows | None = None) -> Value:
        """x (n, n_in) times a matrix, plus a bias: (n, n_out)."""
        matrix = self.matrix(ref, order)
        y = self._product(matrix.weights, x)
        if matrix.bases is not None:
            y = self.binary("ADD", y, self._product(matrix.bases, self._sums_of_runs(x)))
        return y if bias is None else self.binary("ADD", y, self.vector(bias, order))

    def activated(self, activation: Activation, x: Value) -> Value:
        """The activation of a gated network. Raises UnsupportedModel for one without operators."""
        if activation == "silu":
            return self.binary("MUL", x, self.unary("LOGISTIC", x))
        if activation == "gelu_tanh":
            return self.unary("GELU", x, approximate=True)
        if activation == "relu2":
            positive = self.unary("RELU", x)
            return self.binary("MUL", positive, positive)
        raise UnsupportedModel(f"{self.model.path}: the litertlm target has no activation {activation}")

    def _product(self, weights: Constant, x: Value) -> Value:
        """x (n, n_in) times a matrix (n_out, n_in)."""
        constant = self.graph.constant(weights)
        n, n_out = x.shape[0], weights.shape[0]
        if weights.type == Type.FLOAT16:
            constant = self.graph.add("DEQUANTIZE", constant, shape=weights.shape)
        if not self._fine or weights.type not in (Type.INT8, Type.INT4):
            return self._fully_connected(x, constant, n_out)
        products = self._fully_connected(self._two_parts(x), constant, n_out)
        by_part = self.reshape(products, 2, n, n_out)
        return self.graph.add("SUM", by_part, self.graph.ints(0), shape=(n, n_out), keepDims=False)

    def _fully_connected(self, x: Value, weights: Value, n_out: int) -> Value:
        return self.graph.add("FULLY_CONNECTED", x, weights, shape=(x.shape[0], n_out), fusedActivationFunction=0)

    def _two_parts(self, x: Value) -> Value:
        """Rows (2 n, n_in): first those of x on a grid of 8 bits, then what is missing of each.

        XNNPACK rounds each row to 8 bits between its least and largest number, and finds the same grid for the first
        rows. What it takes away of the second ones is 1/255 as much as it would take of x.
        """
        if x.index not in self._parts:
            n, last = x.shape[0], self.graph.ints(1)
            largest, least = (
                self.graph.add(op, x, last, shape=(n, 1), keepDims=True) for op in ("REDUCE_MAX", "REDUCE_MIN")
            )
            step = self.times(self.binary("SUB", largest, least), 1 / 255)
            step = self.binary("ADD", step, self.graph.number(1e-30))
            coarse = self.binary("MUL", self.unary("ROUND", self.binary("DIV", x, step)), step)
            self._parts[x.index] = self.concatenated(coarse, self.binary("SUB", x, coarse), axis=0)
        return self._parts[x.index]

    def _sums_of_runs(self, x: Value) -> Value:
        """(n, n_in / 32): the sums of the runs of x."""
        if x.index not in self._sums:
            n, n_in = x.shape
            runs = self.reshape(x, n, n_in // RUN, RUN)
            self._sums[x.index] = self.graph.add(
                "SUM", runs, self.graph.ints(2), shape=(n, n_in // RUN), keepDims=False
            )
        return self._sums[x.index]
