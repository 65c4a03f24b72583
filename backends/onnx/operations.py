"""What decoders and draft heads are made of, as operators of a graph: products, norms, activations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgeinfer.backends.onnx.graph import CONTRIB, Graph
from edgeinfer.backends.onnx.library import Style
from edgeinfer.backends.onnx.matrices import Blocks, Constant, Floats, part_of, vector_of, weights_of
from edgeinfer.models import Activation, TensorRef, TensorRows
from edgeinfer.models.gguf import ModelFile

FLOAT, INT32 = 1, 6  # onnx.TensorProto.DataType
_FLOAT32 = np.dtype(np.float32)
_INT8_ACTIVATIONS = 4  # of MatMulNBits: inputs may be rounded to 8 bits by block


class Operations:
    """Adds to a graph, with the weights of a file. Raises UnsupportedModel for a tensor type without a rule."""

    def __init__(self, graph: Graph, model: ModelFile, style: Style, norm_epsilon: float) -> None:
        self.graph = graph
        self.model = model
        self.style = style
        self._norm_epsilon = norm_epsilon
        self._shared: dict[str, str] = {}  # values that are made once, by what they are

    def linear(self, matrix: TensorRef, bias: TensorRef | None, x: str) -> str:
        """Matrix times each row of x, plus bias: (.., n_in) to (.., n_out)."""
        graph, part = self.graph, part_of(self.model, matrix)
        weights, name = weights_of(part), _name(matrix)
        if isinstance(weights, Floats):
            y = graph.add("MatMul", x, self._transposed(name, weights.values))
        elif self.style == "contrib":
            y = self._times_blocks(name, weights, x)
        else:
            y = graph.add("MatMul", x, self._unpacked(name, weights))
        if isinstance(weights, Blocks) and weights.bases is not None:
            sums = self._sums_of_blocks(x, weights.size, weights.shape[1])
            y = graph.add("Add", y, graph.add("MatMul", sums, self._transposed(f"{name}.bases", weights.bases)))
        return y if bias is None else graph.add("Add", y, self.vector(bias))

    def norm(self, weight: TensorRef | None, x: str) -> str:
        """RMS norm over the last axis, x where there is no weight. ONNX Runtime makes one operator of it."""
        return x if weight is None else self.graph.add("Mul", self.divided_by_root(x), self.vector(weight))

    def divided_by_root(self, x: str) -> str:
        """x over the root of the mean of its squares, along the last axis."""
        graph = self.graph
        mean = graph.add("ReduceMean", graph.add("Pow", x, graph.number(2.0)), graph.ints(-1), keepdims=1)
        root = graph.add("Sqrt", graph.add("Add", mean, graph.number(self._norm_epsilon)))
        return graph.add("Div", x, root)

    def activated(self, activation: Activation, x: str) -> str:
        """What an activation makes of each number."""
        graph = self.graph
        if activation == "silu":
            return self.silu(x)
        if activation == "gelu_tanh":
            return graph.add("Gelu", x, approximate="tanh")
        positive = graph.add("Relu", x)
        return graph.add("Mul", positive, positive)

    def silu(self, x: str) -> str:
        """x * sigmoid(x)."""
        return self.graph.add("Mul", x, self.graph.add("Sigmoid", x))

    def times(self, x: str, factor: float) -> str:
        """x * factor."""
        return x if factor == 1.0 else self.graph.add("Mul", x, self.graph.number(factor))

    def capped(self, x: str, cap: float | None) -> str:
        """cap * tanh(x / cap)."""
        return x if cap is None else self.times(self.graph.add("Tanh", self.times(x, 1 / cap)), cap)

    def vector(self, ref: TensorRef) -> str:
        """A norm or a bias."""
        part = part_of(self.model, ref)
        return self.graph.constant(_name(ref), Constant(_FLOAT32, part.shape, lambda: vector_of(part)))

    def slice(self, x: str, first: int, last: int) -> str:
        """Elements first..last - 1 along the last axis."""
        graph = self.graph
        return graph.add("Slice", x, graph.ints(first), graph.ints(last), graph.ints(-1))

    def once(self, what: str, make: Callable[[], str]) -> str:
        """A value that is made when it is first needed."""
        if what not in self._shared:
            self._shared[what] = make()
        return self._shared[what]

    def _times_blocks(self, name: str, weights: Blocks, x: str) -> str:
        """The product by ONNX Runtime's own operator."""
        n_out, n_in = weights.part.shape
        return self.graph.add(
            "MatMulNBits",
            *(x, self.graph.constant(f"{name}.codes{weights.bits}", weights.codes())),
            self.graph.constant(f"{name}.scales", weights.scales),
            domain=CONTRIB,
            K=n_in,
            N=n_out,
            bits=weights.bits,
            block_size=weights.size,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _unpacked(self, name: str, weights: Blocks) -> str:
        """The matrix as floats, (n_in, n_out), by operators of the standard."""
        graph = self.graph
        codes = graph.constant(f"{name}.signed{weights.bits}", weights.signed_codes())
        scales = graph.constant(f"{name}.scales", weights.scales)
        floats = graph.add("DequantizeLinear", codes, scales, axis=1, block_size=weights.size)
        return graph.add("Transpose", floats, perm=(1, 0))

    def _sums_of_blocks(self, x: str, size: int, n_blocks: int) -> str:
        """Sums of x (1, n, n_in) over each block: (1, n, n_blocks)."""

        def sums() -> str:
            by_block = self.graph.add("Reshape", x, self.graph.ints(0, 0, n_blocks, size))
            return self.graph.add("ReduceSum", by_block, self.graph.ints(3), keepdims=0)

        return self.once(f"sums {x} {size}", sums)

    def _transposed(self, name: str, values: Constant) -> str:
        """A constant matrix (n_out, n_in) as float32 (n_in, n_out), as MatMul has it."""
        return self.graph.add("Transpose", self._floats(name, values), perm=(1, 0))

    def _floats(self, name: str, values: Constant) -> str:
        """A constant as float32."""
        constant = self.graph.constant(name, values)
        return constant if values.dtype == np.float32 else self.graph.add("Cast", constant, to=FLOAT)


def _name(ref: TensorRef) -> str:
    """Name of a constant for a tensor or a part of one."""
    return f"{ref.name}[{ref.first}:{ref.last}]" if isinstance(ref, TensorRows) else ref
