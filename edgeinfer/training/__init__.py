"""Training of draft heads from the target's own text; torch is imported here and nowhere else."""
