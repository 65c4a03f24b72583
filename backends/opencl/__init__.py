"""Ternary products and draft models on any OpenCL device: graphics processors first, a CPU through PoCL as a stand-in.

Sums of floats run in whatever order suits the device, so models here do not keep promise one:
they are for drafting, where the text does not depend on them. Products of trits and codes are exact integers.
"""

from edgeinfer.backends.opencl.device import OpenCLDevice, check_device
from edgeinfer.backends.opencl.head import OpenCLHead, OpenCLHeadBackend, OpenCLHeadModel
from edgeinfer.backends.opencl.library import DeviceInfo, choose_device, list_devices
from edgeinfer.backends.opencl.session import OpenCLBackend, OpenCLModel, OpenCLSession
from edgeinfer.backends.opencl.ternary import TernaryMatrix, available_ways, fastest_way, measure_ways

__all__ = [
    "DeviceInfo",
    "OpenCLBackend",
    "OpenCLDevice",
    "OpenCLHead",
    "OpenCLHeadBackend",
    "OpenCLHeadModel",
    "OpenCLModel",
    "OpenCLSession",
    "TernaryMatrix",
    "available_ways",
    "check_device",
    "choose_device",
    "fastest_way",
    "list_devices",
    "measure_ways",
]
