"""Draft models and draft heads on ONNX Runtime, on any of its execution providers, and their graphs as files.

Sums of floats run in whatever order suits the provider, so sessions here do not keep promise one (`is_exact` is False):
they are for drafting, where the text does not depend on them.
"""

from edgeinfer.backends.onnx.head import OnnxHead, plan_onnx_head
from edgeinfer.backends.onnx.library import ProviderInfo, choose_provider, library_version, list_providers, open_onnx
from edgeinfer.backends.onnx.session import OnnxBackend, OnnxSession

__all__ = [
    "OnnxBackend",
    "OnnxHead",
    "OnnxSession",
    "ProviderInfo",
    "choose_provider",
    "library_version",
    "list_providers",
    "open_onnx",
    "plan_onnx_head",
]
