"""Export to one .litertlm file, which Google's LiteRT-LM runtime runs on phones, in browsers and on PCs."""

from edgeinfer.exporters.litertlm.target import LitertlmTarget

__all__ = ["LitertlmTarget"]
