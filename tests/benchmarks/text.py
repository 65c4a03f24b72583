"""Real text that every clone of the project has: the license, and 5 kB of source code as it once was."""

from pathlib import Path

LICENSE_TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
SAMPLE_TEXT = (Path(__file__).parent / "sample.txt").read_text()
