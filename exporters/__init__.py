"""Export of checkpoints and model files to other formats."""
