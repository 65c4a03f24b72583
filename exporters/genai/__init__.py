"""Export to a folder that ONNX Runtime GenAI runs: on phones, in Foundry Local and in apps for Windows."""

from edgeinfer.exporters.genai.target import GenaiTarget

__all__ = ["GenaiTarget"]
