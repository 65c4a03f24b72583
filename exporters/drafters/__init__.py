"""Export of draft heads and draft models."""
