"""The memory that this process has, page by page."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """Of this process now, on Linux. Counted page by page: the counts that the system keeps lag behind on each core.

    0 where the system cannot tell.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))
