"""A graph that runs: a session of onnxruntime, its constants in memory, inputs and outputs where they are wanted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import Progress
from edgeinfer.backends.onnx.graph import CONTRIB, Graph, beside, within
from edgeinfer.backends.onnx.library import ProviderInfo, errors_translated, open_library
from edgeinfer.common.errors import BackendLost, BackendUnavailable, Interrupted, UnsupportedModel

_WITHIN_BYTES = 1024  # ONNX Runtime wants shapes and the like in the graph itself
_STOPPED = "the forward pass was interrupted; the session is as it was before"


class Buffer:
    """Numbers that stay in a provider's memory, zeros at first; input and output of graphs."""

    def __init__(self, provider: ProviderInfo, shape: tuple[int, ...]) -> None:
        value = open_library().OrtValue
        with errors_translated(f"taking {4 * math.prod(shape)} bytes of memory"):
            self.value = value.ortvalue_from_numpy(np.zeros(shape, dtype=np.float32), provider.memory, 0)

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        return int(self.value.tensor_size_in_bytes())


class Program:
    """A graph on a provider. The arrays of its constants are copied, and may be made anew."""

    def __init__(self, graph: Graph, provider: ProviderInfo, n_threads: int, progress: Progress | None = None) -> None:
        library = open_library()
        options = library.SessionOptions()
        options.intra_op_num_threads = n_threads
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # what a pass takes is given back
        # Threads wait awake for the next operator, but not for the next pass: others need the cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        tensors, names, values = [], [], []
        for done, (name, constant) in enumerate(graph.constants.items(), start=1):
            if constant.n_bytes <= _WITHIN_BYTES or constant.is_int4:  # numpy has no arrays of these
                tensors.append(within(name, constant))
            else:
                tensors.append(beside(name, constant, "memory", 0))
                names.append(name)
                values.append(
                    library.OrtValue.ortvalue_from_numpy_with_onnx_type(constant.make(), tensors[-1].data_type)
                )
            if progress is not None:
                progress(done / (len(graph.constants) + 1))
        options.add_external_initializers(names, values)
        providers = [provider.full_name] if provider.is_cpu else [provider.full_name, "CPUExecutionProvider"]
        with errors_translated(f"loading the graph on {provider.name}", load=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a provider that cannot be had is an error, below
            model = graph.model(tensors).SerializeToString()
            self._session = library.InferenceSession(model, options, providers)
        if provider.full_name not in self._session.get_providers():
            raise BackendUnavailable(
                f"this onnxruntime does not use {provider.name}: the provider, or a driver that it needs, is missing"
            )
        self._run_options: Any = None
        self._is_stopped = False
        if progress is not None:
            progress(1.0)

    def binding(self, buffers: Mapping[str, Buffer]) -> Binding:
        """Inputs and outputs for passes, with those that stay bound already."""
        return Binding(self._session.io_binding(), buffers)

    def start(self) -> None:
        """Passes begin: what `interrupt` stopped before does not matter."""
        self._is_stopped = False

    def run(self, binding: Binding) -> None:
        """A pass. Raises BackendLost, and Interrupted if `interrupt` was called since `start`."""
        self._run_options = options = open_library().RunOptions()
        try:
            if self._is_stopped:
                raise Interrupted(_STOPPED)
            with errors_translated("a pass"):
                self._session.run_with_iobinding(binding.io, options)
        except BackendLost:
            if self._is_stopped:
                raise Interrupted(_STOPPED) from None
            raise
        finally:
            self._run_options = None

    def interrupt(self) -> None:
        """Stop the running pass before its next operator; callable from any thread."""
        self._is_stopped = True
        options = self._run_options
        if options is not None:
            options.terminate = True


class Binding:
    """Where inputs of a program come from and outputs go. io: onnxruntime's IOBinding."""

    def __init__(self, io: Any, buffers: Mapping[str, Buffer]) -> None:
        self.io = io
        self._arrays: dict[str, NDArray[Any]] = {}  # must live while they are bound
        for name, buffer in buffers.items():
            to = io.bind_ortvalue_output if name.startswith("present") else io.bind_ortvalue_input
            to(name, buffer.value)

    def give(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Bind inputs in the memory of the CPU."""
        for name, array in arrays.items():
            self._arrays[name] = array = np.ascontiguousarray(array)
            self.io.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def take(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Bind outputs in the memory of the CPU, to be written into these contiguous arrays."""
        for name, array in arrays.items():
            self._arrays[name] = array
            self.io.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def constant_bytes(graphs: Sequence[Graph]) -> int:
    """Bytes that programs hold for the constants of their graphs: a copy of each, and of most another, repacked."""
    return 2 * sum(graph.constant_bytes for graph in graphs)


def check_provider(info: ProviderInfo) -> str | None:
    """Why a provider cannot be used, None if it can: a small graph is run on it, with an operator that it must have."""
    graph = Graph("check")
    graph.input("x", np.float32, 1, "n", 32)
    weights = np.eye(32, dtype=np.float32)
    if info.style == "contrib":
        codes = (8 + 7 * weights).astype(np.uint8)  # 15 in the diagonal, else the zero point
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4)[:, None]
        names = graph.constant("codes", packed), graph.constant("scales", np.full((32, 1), 1 / 7, dtype=np.float32))
        y = graph.add("MatMulNBits", "x", *names, domain=CONTRIB, K=32, N=32, bits=4, block_size=32)
    else:
        y = graph.add("MatMul", "x", graph.constant("weights", weights))
    graph.output("y", y, 1, "n", 32)
    x, found = np.arange(96, dtype=np.float32).reshape(1, 3, 32), np.zeros((1, 3, 32), dtype=np.float32)
    try:
        program = Program(graph, info, 1)
        binding = program.binding({})
        binding.give({"x": x})
        binding.take({"y": found})
        program.run(binding)
    except (BackendLost, BackendUnavailable, UnsupportedModel) as error:
        return str(error)
    return None if np.allclose(found, x, rtol=1e-2) else f"{info.name} computes wrong numbers: update its driver"
