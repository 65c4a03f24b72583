"""Figures into PNG files, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgeinfer.errors import BackendUnavailable


def check_matplotlib() -> None:
    """Raises BackendUnavailable where matplotlib is not installed: before work whose figure could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'edgeinfer[plot]'")


@contextmanager
def figure_into(target: Path, n_panels: int = 1, inches: tuple[float, float] | None = None) -> Iterator[Any]:
    """The axes to draw into, one or an array side by side; the file is written at the end. inches: width and height.

    Raises BackendUnavailable where matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, n_panels, figsize=inches or (2 + 4 * n_panels, 4), layout="constrained")
    try:
        yield axes
        figure.savefig(target, dpi=150)
    finally:
        pyplot.close(figure)
