"""The first files of BitNet b1.58 2B4T, under another name."""

from dataclasses import replace

from edgeinfer.models.architectures import bitnet_b158

ARCHITECTURE = replace(bitnet_b158.ARCHITECTURE, name="bitnet-25")
