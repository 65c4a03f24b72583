"""`edgeinfer cache`: the contexts on disk, which --cache-disk keeps."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.options import json_option
from edgeinfer.cli.streams import Command, check_stdout
from edgeinfer.cli.terminal import note, one_line, show
from edgeinfer.common.errors import EdgeInferError

if TYPE_CHECKING:
    from edgeinfer.context_cache.folder import SizedFolder


@click.command(cls=Command)
@click.option("--clear", is_flag=True, help="Remove all of them.")
@json_option
def cache(clear: bool, as_json: bool) -> None:
    """List or clear the contexts on disk.

    These are what texts had in the KV cache, which --cache-disk keeps so that a later text that begins so need not read
    it again. Without them texts are the same, and begin later. TOKENS are those of all beginnings, each counted once.
    """
    from edgeinfer.common.arguments import human_bytes
    from edgeinfer.context_cache.cache import contexts_folder
    from edgeinfer.context_cache.folder import SizedFolder

    check_stdout()
    if (path := contexts_folder()) is None:
        raise EdgeInferError(
            "there is no folder for contexts: this user has no home folder, set HOME or XDG_CACHE_HOME"
        )
    folder = SizedFolder(path, 0)
    rows = _rows(folder)
    n_bytes = sum(file.n_bytes for file in folder.files())
    if clear:
        n_bytes = folder.clear()
    if as_json:
        show(json.dumps({"folder": str(path), "n_bytes": n_bytes, "cleared": clear, "contexts": rows}))
    elif clear:
        note(f"removed: {human_bytes(n_bytes)} in {path}" if n_bytes else f"there are no contexts in {path}")
    else:
        _show(rows)
        note(f"{human_bytes(n_bytes)} in {path}" if n_bytes else f"there are no contexts in {path}")


def _rows(folder: SizedFolder) -> list[dict[str, Any]]:
    """What is kept of each model and type of cache, the last used first."""
    from edgeinfer.context_cache.blocks import block_of

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    seen: set[bytes] = set()
    for file in folder.files():
        block = None
        with suppress(OSError):
            block = block_of(folder.path, file)
        model, cache_type = ("?", "?") if block is None else (block.model, block.cache_type)
        row = rows.setdefault(
            (model, cache_type), {"model": model, "cache_type": cache_type, "tokens": 0, "n_bytes": 0}
        )
        row["n_bytes"] += file.n_bytes
        row["used"] = file.used_ns / 1e9
        if block is not None and block.key not in seen:
            seen.add(block.key)
            row["tokens"] += block.n_tokens
    return sorted(rows.values(), key=lambda row: -row["used"])


def _show(rows: list[dict[str, Any]]) -> None:
    from edgeinfer.common.arguments import human_bytes

    cells = [("MODEL", "CACHE", "TOKENS", "SIZE", "LAST USED")] if rows else []
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"]))
        size = human_bytes(row["n_bytes"])
        cells.append((one_line(row["model"]), one_line(row["cache_type"]), str(row["tokens"]), size, used))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        show("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
