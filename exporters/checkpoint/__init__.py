"""Checkpoints of Hugging Face: a folder with config.json and safetensors files, read without torch or transformers."""

from edgeinfer.exporters.checkpoint.checkpoint import Checkpoint
from edgeinfer.exporters.checkpoint.config import Config, Rope
from edgeinfer.exporters.checkpoint.folder import Folder
from edgeinfer.exporters.checkpoint.ternary import TernaryCheckpoint

__all__ = ["Checkpoint", "Config", "Folder", "Rope", "TernaryCheckpoint"]
