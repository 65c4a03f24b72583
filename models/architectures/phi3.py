"""Phi-3 to Phi-4 (Abdin et al., arXiv:2404.14219): Llama with fused matrices and two sets of frequencies (LongRoPE).

A window in `attention.sliding_window` is not applied: the converters write numbers there that do not fit the models,
and llama.cpp, whose reading of a file is the standard here, ignores them too (its pull request #13676).
"""

from edgeinfer.models.reader import LONG_AND_SHORT, Architecture

ARCHITECTURE = Architecture(name="phi3", rope_kind="halves", fused_ffn=True, rope_factors=LONG_AND_SHORT)
