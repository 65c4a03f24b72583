"""The prompts that benchmarks of drafts ask: JSON Lines with "turns", the first of which is asked, and "category"."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """All prompts of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the prompts to ask, and how much is to be answered."""
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="a draft model, or a head")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--every", type=int, default=1, help="only every n-th prompt")
    parser.add_argument("--skip", type=int, default=0, help="without the first n prompts")


def asked_prompts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Those that the flags choose."""
    return read_prompts(arguments.prompts)[arguments.skip :: arguments.every]
