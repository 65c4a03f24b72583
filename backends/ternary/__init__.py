"""Ternary matrices: the packed formats in plain numpy."""
