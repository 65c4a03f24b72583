"""Tools that a model may call: declared, chosen, constrained, run."""
