"""The C++ engine for CPUs: packed weights, kernels per instruction set, threads, KV cache and decoder."""

from edgeinfer.backends.native.assistant import NativeAssistantModel, NativeAssistantSession, load_assistant
from edgeinfer.backends.native.backend import NativeBackend
from edgeinfer.backends.native.config import most_rows_of_tree
from edgeinfer.backends.native.head import NativeHeadModel, NativeHeadSession, load_head, plan_head
from edgeinfer.backends.native.machine import (
    MachineLimits,
    available_isas,
    best_isa,
    build_id,
    missing_isas,
    top_k,
)
from edgeinfer.backends.native.model import NativeModel
from edgeinfer.backends.native.session import NativeSession

__all__ = [
    "MachineLimits",
    "NativeAssistantModel",
    "NativeAssistantSession",
    "NativeBackend",
    "NativeHeadModel",
    "NativeHeadSession",
    "NativeModel",
    "NativeSession",
    "available_isas",
    "best_isa",
    "build_id",
    "load_assistant",
    "load_head",
    "missing_isas",
    "most_rows_of_tree",
    "plan_head",
    "top_k",
]
