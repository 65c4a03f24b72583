"""Ternary models: read from GGUF files and from packed checkpoints, and written as GGUF files."""

from edgeinfer.exporters.ternary.target import Format, Head, TernaryTarget, export_ternary

__all__ = ["Format", "Head", "TernaryTarget", "export_ternary"]
