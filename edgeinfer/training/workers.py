"""The processes that train together: one, or as many as torchrun started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
from torch import distributed

from edgeinfer.common.errors import BackendUnavailable

PATIENCE = timedelta(hours=24)  # while another process writes texts


@dataclass(frozen=True)
class Workers:
    """This process among those that train together. A context manager."""

    rank: int  # of this process, 0..n - 1
    n: int
    device: torch.device  # that this process computes on

    @classmethod
    def join(cls, device: str) -> Workers:
        """The group that torchrun's variables describe, or this process alone.

        device: "cpu", "cuda", or "auto" for the GPU where there is one. Raises BackendUnavailable.
        """
        has_gpu = torch.cuda.is_available()
        if device == "cuda" and not has_gpu:
            raise BackendUnavailable("--device cuda: torch finds no GPU here; use --device cpu")
        kind = "cuda" if device != "cpu" and has_gpu else "cpu"
        n = int(os.environ.get("WORLD_SIZE", "1"))
        if n > 1:
            distributed.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=PATIENCE)
        rank, local = (int(os.environ.get(name, "0")) if n > 1 else 0 for name in ("RANK", "LOCAL_RANK"))
        if kind == "cuda":
            torch.cuda.set_device(local)
        return cls(rank, n, torch.device(kind, local) if kind == "cuda" else torch.device(kind))

    @property
    def has_bfloat16(self) -> bool:
        """Whether the device multiplies numbers of 16 bits several times as fast as those of 32."""
        return self.device.type == "cuda" or cpu_has_bfloat16()

    @property
    def share(self) -> tuple[int, int]:
        """(rank, n)."""
        return self.rank, self.n

    def wait(self) -> None:
        """Return when all processes have come here."""
        if self.n > 1:
            distributed.barrier()

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        if self.n > 1:
            distributed.all_reduce(values)
        return values

    def any(self, value: bool) -> bool:
        """Whether it is true in any process."""
        if self.n == 1:
            return value
        return bool(self.summed(torch.tensor([int(value)], device=self.device)).item())

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.n > 1:
            distributed.destroy_process_group()


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16: AVX512_BF16 (Zen 4, Cooper Lake) or AMX."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # older torch: none known
    return any(capabilities.get(name) is True for name in ("avx512_bf16", "amx_bf16"))
