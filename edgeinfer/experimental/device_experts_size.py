"""Where experts are to compute beside the CPU, and how many a device holds: what a caller asked for, in experts."""

from __future__ import annotations

import re
from typing import Protocol

from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import BudgetExceeded, InvalidArgument
from edgeinfer.common.sizes import AUTO, SizeRequest
from edgeinfer.offload.cache_size import parse


class Buffers(Protocol):
    """Bytes of the buffers of experts on a device."""

    @property
    def n_experts(self) -> int:
        """Of the model, all layers together."""
        ...

    def total(self, n_slots: int) -> int:
        """With so many experts on the device."""
        ...


def check_device(name: str) -> None:
    """Raises InvalidArgument unless this names a device that can compute experts, whether or not it is there."""
    if not re.fullmatch(r"gpu(:[0-9]{1,3})?|opencl:[0-9]{1,3}", name):
        raise InvalidArgument(f"expert_device must be gpu, gpu:N, opencl:N or None: found {name!r:.80}")


def parse_bytes(value: object) -> SizeRequest:
    """What expert_device_bytes asks for, in the ways of expert_cache; None and "auto" are what the device has room for.

    Raises InvalidArgument.
    """
    return AUTO if value is None else parse(value, "expert_device_bytes")


def slots_of(request: SizeRequest, buffers: Buffers, room: int, title: str) -> int:
    """How many experts the device holds. room: bytes that there are for it.  title: of the device, for messages.

    Raises InvalidArgument for fewer bytes than one expert needs, with the number that works, and BudgetExceeded where
    there is no room for that much.
    """
    least = buffers.total(1)
    if request.n_bytes is not None and request.n_bytes < least:
        raise InvalidArgument(
            f"expert_device_bytes of {human_bytes(request.n_bytes)} are too few: one expert and its buffers take "
            f"{human_bytes(least)}; use --expert-device-bytes {least} or more"
        )
    requested = buffers.n_experts if request.share is None else max(1, int(buffers.n_experts * request.share))
    limit = room if request.n_bytes is None else request.n_bytes
    if request != AUTO:
        n_bytes = buffers.total(requested) if request.n_bytes is None else min(limit, buffers.total(requested))
        if n_bytes > room:
            raise BudgetExceeded(
                f"{title} has room for {human_bytes(max(room, 0))} of experts, {human_bytes(n_bytes)} are asked for: "
                "use a smaller --expert-device-bytes, or auto"
            )
    elif least > room:
        raise BudgetExceeded(
            f"{title} has room for {human_bytes(max(room, 0))}, and one expert with its buffers takes "
            f"{human_bytes(least)}: load without expert_device (--expert-device), or with smaller batches"
        )
    of_expert = buffers.total(1) - buffers.total(0)
    return min(requested, (limit - buffers.total(0)) // of_expert)
