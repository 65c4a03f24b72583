"""Draft models, draft heads, experts and ternary products on OpenCL devices: GPUs first, or a CPU through PoCL.

Float sums run in the device's order, so results are not bit-identical. These models are for drafting, where the text
does not depend on them; experts that compute on a device change it a little. Ternary products are exact integers.
"""

from edgeinfer.backends.opencl.device import OpenCLDevice, check_device
from edgeinfer.backends.opencl.experts import ExpertBuffers, OpenCLExperts, expert_buffers
from edgeinfer.backends.opencl.head import OpenCLHead, OpenCLHeadBackend, OpenCLHeadModel
from edgeinfer.backends.opencl.library import DeviceInfo, choose_device, list_devices
from edgeinfer.backends.opencl.session import OpenCLBackend, OpenCLModel, OpenCLSession
from edgeinfer.backends.opencl.ternary import TernaryMatrix, available_ways, fastest_way, measure_ways

__all__ = [
    "DeviceInfo",
    "ExpertBuffers",
    "OpenCLBackend",
    "OpenCLDevice",
    "OpenCLExperts",
    "OpenCLHead",
    "OpenCLHeadBackend",
    "OpenCLHeadModel",
    "OpenCLModel",
    "OpenCLSession",
    "TernaryMatrix",
    "available_ways",
    "check_device",
    "choose_device",
    "expert_buffers",
    "fastest_way",
    "list_devices",
    "measure_ways",
]
