"""Plots to PNG files, with matplotlib if it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.common.errors import BackendUnavailable, InvalidArgument
from edgeinfer.common.files import check_writable, written_whole

if TYPE_CHECKING:
    from edgeinfer.speculation.timeline import Event

_IMAGES = {  # first bytes of files, by the endings of their names
    ".png": (b"\x89PNG",),
    ".pdf": (b"%PDF",),
    ".svg": (b"<?xml", b"<svg"),
    **dict.fromkeys((".jpg", ".jpeg"), (b"\xff\xd8\xff",)),
    **dict.fromkeys((".tif", ".tiff"), (b"II*\0", b"MM\0*")),
    ".webp": (b"RIFF",),
    **dict.fromkeys((".eps", ".ps"), (b"%!PS",)),
}


def check_plot(target: Path | None) -> None:
    """Call before work that will be plotted. Raises BackendUnavailable without matplotlib, OSError for a file that
    cannot be written, InvalidArgument for one that is or would be no image.
    """
    if target is None:
        return
    ending = target.suffix.lower()
    if ending not in ("", *_IMAGES):
        raise InvalidArgument(f"{target}: --plot writes an image: its name must end in {', '.join(_IMAGES)}")
    if target.is_file() and not _is_image(target):
        raise InvalidArgument(
            f"{target}: --plot writes an image, and this file is none: name another one, or remove it"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'edgeinfer[plot]'")
    check_writable(target)


def _is_image(path: Path) -> bool:
    """Whether a file is an image, or empty."""
    with path.open("rb") as file:
        begin = file.read(8)
    return not begin or begin.startswith(tuple(each for of in _IMAGES.values() for each in of))


@contextmanager
def figure_into(target: Path, n_panels: int = 1, inches: tuple[float, float] | None = None) -> Iterator[Any]:
    """The axes to plot into, one or an array for a row; the file is written at the end.  inches: width and height.

    The format follows from the file's ending, PNG without one. Raises BackendUnavailable without matplotlib, OSError,
    InvalidArgument.
    """
    check_plot(target)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, n_panels, figsize=inches or (2 + 4 * n_panels, 4), layout="constrained")
    try:
        yield axes
        with written_whole(target) as file:
            figure.savefig(file, format=target.suffix[1:].lower() or "png", dpi=150)
    finally:
        pyplot.close(figure)


def drawable(text: str) -> str:
    """A text as matplotlib takes it: without formulas between two $, and UTF-8, which names of files need not be."""
    return text.encode(errors="replace").decode().replace("$", r"\$")


def draw_timeline(events: Sequence[Event], title: str, target: Path) -> None:
    """Passes of the target with their tokens above, drafts below, and in red where the target waited."""
    rows = {"verify": (1.0, "tab:blue"), "wait": (1.0, "tab:red"), "draft": (0.0, "tab:green")}
    start = min((event.start for event in events), default=0.0)
    with figure_into(target, inches=(11, 2.6)) as axes:
        for kind, (row, color) in rows.items():
            of_kind = [event for event in events if event.kind == kind]
            bars = [(1e3 * (event.start - start), 1e3 * (event.end - event.start)) for event in of_kind]
            axes.broken_barh(bars, (row - 0.35, 0.7), color=color, edgecolor="white", linewidth=0.5, label=kind)
            for event, (left, width) in zip(of_kind, bars, strict=True):
                if kind == "verify":
                    axes.text(left + width / 2, row, str(event.n), ha="center", va="center", fontsize=7, color="white")
        axes.set_ylim(-0.5, 1.9)  # room for the legend
        axes.set_yticks([0.0, 1.0], ["drafter", "target (tokens)"])
        axes.set_xlabel("milliseconds")
        axes.set_title(drawable(title), fontsize=8)
        axes.legend(loc="upper right", fontsize=7, ncols=3)
