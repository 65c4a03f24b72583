"""Draft models and draft heads on ONNX Runtime, with any execution provider, and their graphs as files.

Float sums run in the provider's order, so results are not bit-identical. These models are for drafting, where the text
does not depend on them.
"""

from edgeinfer.backends.onnx.decoder import build_head, build_model
from edgeinfer.backends.onnx.files import check_file, data_names, open_file, write_graph
from edgeinfer.backends.onnx.head import OnnxHeadBackend, OnnxHeadModel
from edgeinfer.backends.onnx.library import ProviderInfo, choose_provider, library_version, list_providers, open_onnx
from edgeinfer.backends.onnx.runtime import check_provider
from edgeinfer.backends.onnx.session import OnnxBackend, OnnxModel

__all__ = [
    "OnnxBackend",
    "OnnxHeadBackend",
    "OnnxHeadModel",
    "OnnxModel",
    "ProviderInfo",
    "build_head",
    "build_model",
    "check_file",
    "check_provider",
    "choose_provider",
    "data_names",
    "library_version",
    "list_providers",
    "open_file",
    "open_onnx",
    "write_graph",
]
