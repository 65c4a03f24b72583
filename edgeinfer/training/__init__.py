"""Training of draft heads on text that the target generates; the only package that imports torch."""
