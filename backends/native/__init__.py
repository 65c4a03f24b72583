"""The C++ engine: packed weights, kernels by instruction set, a pool of threads, the KV cache and the decoder."""

from edgeinfer.backends.native.head import NativeHead, plan_head
from edgeinfer.backends.native.session import (
    MachineLimits,
    NativeBackend,
    NativeSession,
    available_isas,
    best_isa,
    build_id,
    likeliest,
)

__all__ = [
    "MachineLimits",
    "NativeBackend",
    "NativeHead",
    "NativeSession",
    "available_isas",
    "best_isa",
    "build_id",
    "likeliest",
    "plan_head",
]
