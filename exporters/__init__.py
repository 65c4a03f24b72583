"""What edgeinfer writes for itself and for others, from the checkpoints that models come in."""
