"""Contexts on disk: what texts have in the KV cache, kept for later processes in segments of their tokens."""
