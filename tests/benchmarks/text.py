"""Real text that every clone of the project has."""

from pathlib import Path

LICENSE_TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
