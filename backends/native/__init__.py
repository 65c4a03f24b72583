"""The C++ engine for CPUs: packed weights, kernels per instruction set, threads, KV cache and decoder."""

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
