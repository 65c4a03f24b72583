"""Curves into PNG files, with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgeinfer.errors import BackendUnavailable


@contextmanager
def figure_into(target: Path, n_panels: int = 1) -> Iterator[Any]:
    """The axes to draw into, one or an array side by side; the file is written at the end.

    Raises BackendUnavailable where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'edgeinfer[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, n_panels, figsize=(2 + 4 * n_panels, 4), layout="constrained")
    try:
        yield axes
        figure.savefig(target, dpi=150)
    finally:
        pyplot.close(figure)
