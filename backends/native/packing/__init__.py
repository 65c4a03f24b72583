"""Weights in the layout of the kernels: packing them, and packed files."""
