"""C simulation: the C++ of the kernels run on this machine, bit for bit what synthesis is given.

`build_library` and `build_program` (compiler.py) compile any sources; ctypes calls them.
"""

from edgeinfer.hls.compiler import Headers, build_library, build_program, vendor_headers

__all__ = ["Headers", "build_library", "build_program", "vendor_headers"]
