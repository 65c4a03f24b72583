"""The packed dot products of cl_khr_integer_dot_product on a device that lacks them, as the extension defines them."""

from __future__ import annotations

from edgeinfer.backends.opencl import OpenCLDevice

_EMULATED = """
int dot_4x8packed_us_int(uint a, uint b) {
    int sum = 0;
    for (int i = 0; i < 4; i++) sum += (int)(a >> 8 * i & 255u) * (int)(char)(b >> 8 * i & 255u);
    return sum;
}
int dot_4x8packed_ss_int(uint a, uint b) {
    int sum = 0;
    for (int i = 0; i < 4; i++) sum += (int)(char)(a >> 8 * i & 255u) * (int)(char)(b >> 8 * i & 255u);
    return sum;
}
"""


def with_packed_dot(device: OpenCLDevice) -> OpenCLDevice:
    """Another on the same hardware, which takes packed dot products: its own, or emulated ones."""
    other = OpenCLDevice(device.info, has_integer_dot=True)
    if not device.info.has_integer_dot:
        build = other._build
        other._build = lambda text, *rest, **named: build(_EMULATED + text, *rest, **named)  # type: ignore[method-assign]
    return other
