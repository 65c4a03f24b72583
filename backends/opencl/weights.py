"""The weights of a model or a draft head on a device."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.backends.base import Progress
from edgeinfer.backends.opencl.device import Buffer, OpenCLDevice
from edgeinfer.backends.opencl.matrices import Activations, DeviceMatrix
from edgeinfer.backends.opencl.parts import AttentionParts, DenseParts, FusionParts, LinearParts, ModelParts, Norms
from edgeinfer.models import Attention, Dense


class Linear:
    """Matrices side by side on the device, and their bias. before: one that is no longer needed, see DeviceMatrix."""

    def __init__(self, device: OpenCLDevice, parts: LinearParts, before: Linear | None = None) -> None:
        old = iter(() if before is None else before.matrices)
        self.matrices: list[DeviceMatrix] = [DeviceMatrix(device, run, next(old, None)) for run in parts.runs]
        self.n_out = sum(matrix.n_out for matrix in self.matrices)
        self.n_in = self.matrices[0].n_in
        self.takes_codes = any(matrix.format.bits for matrix in self.matrices)
        self.has_no_bias = parts.bias is None
        self._bias = None if parts.bias is None else device.upload(parts.bias)

    def multiply(
        self,
        x: Activations,
        out: Buffer,
        n: int,
        factor: float = 1.0,
        keep: float = 0.0,
        first: int = 0,
        stride: int | None = None,
        first_row: int = 0,
    ) -> None:
        """out (n, n_out) = keep * out + factor * product + bias; or columns of out (n, stride), from `first` on.

        first_row: of the n rows, in x as in out.
        """
        stride = self.n_out if stride is None else stride
        for matrix in self.matrices:
            matrix.multiply(x, out, n, first, stride, self._bias, factor, keep, first_row)
            first += matrix.n_out


class DeviceAttention:
    """See AttentionParts; on the device."""

    def __init__(self, device: OpenCLDevice, parts: AttentionParts) -> None:
        self.block: Attention = parts.block
        self.qkv = Linear(device, parts.qkv)
        self.output = Linear(device, parts.output)
        self.norms = _uploaded(device, parts.norms)


class DeviceDense:
    """See DenseParts; on the device."""

    def __init__(self, device: OpenCLDevice, parts: DenseParts) -> None:
        self.block: Dense = parts.block
        self.gate_up = Linear(device, parts.gate_up)
        self.down = Linear(device, parts.down)
        self.norms = _uploaded(device, parts.norms)


@dataclass(frozen=True)
class DeviceFusion:
    """See FusionParts; on the device."""

    feature: Linear
    token_norm: Buffer
    token: Linear
    mix: Linear

    @classmethod
    def of(cls, device: OpenCLDevice, parts: FusionParts) -> DeviceFusion:
        """Convert and upload it."""
        feature, token, mix = (Linear(device, linear) for linear in (parts.feature, parts.token, parts.mix))
        return cls(feature, device.upload(parts.token_norm), token, mix)


class Weights:
    """All of ModelParts on a device. n_bytes: of the buffers."""

    def __init__(self, device: OpenCLDevice, parts: ModelParts, progress: Progress | None = None) -> None:
        n_steps = len(parts.layers) + 2

        def loaded(n: int) -> None:
            if progress is not None:
                progress(n / n_steps)

        n_before = device.n_allocated
        self.token_embd = Linear(device, parts.token_embd)
        loaded(1)
        self.output = self.token_embd if parts.output is None else Linear(device, parts.output)
        loaded(2)
        self.output_norm = None if parts.output_norm is None else device.upload(parts.output_norm)
        self.draft_vocab = None if parts.draft_vocab is None else device.upload(parts.draft_vocab)
        self.fusion = None if parts.fusion is None else DeviceFusion.of(device, parts.fusion)
        self.layers: list[tuple[DeviceAttention, DeviceDense]] = []
        for mixer, ffn in parts.layers:
            self.layers.append((DeviceAttention(device, mixer), DeviceDense(device, ffn)))
            loaded(2 + len(self.layers))
        self.n_bytes = device.n_allocated - n_before


def _uploaded(device: OpenCLDevice, norms: Norms) -> dict[str, Buffer]:
    return {role: device.upload(norm) for role, norm in norms.items()}
