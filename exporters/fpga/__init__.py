"""Export to a folder for an FPGA board, its doctor, and the way back."""

from edgeinfer.exporters.fpga.target import FpgaTarget

__all__ = ["FpgaTarget"]
