"""Export to a folder that MNN's LLM engine runs, on phones and PCs."""

from edgeinfer.exporters.mnn.target import MnnTarget

__all__ = ["MnnTarget"]
