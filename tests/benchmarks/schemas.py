"""Schemas of JSONSchemaBench (a clone of guidance-ai/jsonschemabench, not shipped here) for benchmarks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def mixed_schemas(folder: Path, seed: int, most_bytes: int) -> Iterator[tuple[str, Any]]:
    """(name, schema) of all *.json files of a folder, in a random order, as many of each subfolder as there are.

    folder: `data` of the clone.  most_bytes: larger files are left out, as their schema is part of a prompt.
    """
    rng = random.Random(seed)
    by_group: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.stat().st_size <= most_bytes:
            by_group.setdefault(path.parent, []).append(path)
    if not by_group:
        raise SystemExit(f"{folder} has no *.json files of at most {most_bytes} bytes: name `data` of JSONSchemaBench")
    for paths in by_group.values():
        rng.shuffle(paths)
    while by_group:
        for group in list(by_group):
            path = by_group[group].pop()
            if not by_group[group]:
                del by_group[group]
            yield f"{path.parent.name}/{path.name}", json.loads(path.read_text(encoding="utf-8"))


def question_of(schema: Any, n_characters: int = 300) -> str:
    """A question with the beginning of the schema, as the model does not see it otherwise."""
    return f"Write an example in JSON that is valid by this schema: {json.dumps(schema)[:n_characters]}"
