"""How much memory a load may take: what was asked for with a budget, or what is free less a margin."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.common import devices
from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.sizes import SizeRequest, parse_size

# Without a budget, a sixteenth of what is free is left, within these bounds: page tables and buffers of the kernel, the
# page cache that files are read through, and what other programs take while the model runs.
MARGIN_SHARE = 16
LEAST_MARGIN, MOST_MARGIN = 32 << 20, 1 << 30


@dataclass(frozen=True)
class Limit:
    """Most bytes that this process may hold, those that it holds already among them.

    free: what it could hold at most.  is_asked: a budget says so, and not what is free.
    """

    n_bytes: int
    free: int
    is_asked: bool = True

    def __str__(self) -> str:
        if self.is_asked:
            return f"the budget is {human_bytes(self.n_bytes)}"
        if self.n_bytes == self.free:
            return f"available are {human_bytes(self.free)}, less than the budget"
        n_bytes, free, margin = map(human_bytes, (self.n_bytes, self.free, self.free - self.n_bytes))
        return f"available are {n_bytes} ({free} less a margin of {margin})"


def parse_budget(value: object) -> SizeRequest:
    """The request that a budget is: bytes, a size, or a share of what is free; None and "auto" leave a margin.

    Raises InvalidArgument.
    """
    return parse_size("auto" if value is None else value, "budget", "the memory that is free")


def limit_of(request: SizeRequest, resident: int, n_threads: int) -> Limit:
    """The limit that a request means now. resident: bytes that this process holds already; they are no longer free, but
    they count in what it may hold.  n_threads: that it will start.

    No request raises the limit above what is free.
    """
    allowed = devices.memory_within_limits(n_threads)
    free = devices.available_memory()
    free = resident + (free if allowed is None else min(free, allowed))
    if request.n_bytes is not None:
        return Limit(min(request.n_bytes, free), free, is_asked=request.n_bytes <= free)
    if request.share is not None:
        return Limit(int(free * request.share), free)
    return Limit(max(0, free - margin_of(free)), free, is_asked=False)


def margin_of(free: int) -> int:
    """Bytes that are left to others where there is no budget."""
    return min(max(free // MARGIN_SHARE, LEAST_MARGIN), MOST_MARGIN)
