"""Export to a folder that ExecuTorch's runner for language models takes, on phones and PCs."""

from edgeinfer.exporters.pte.target import PteTarget

__all__ = ["PteTarget"]
