"""Models that the native engine does not run, through the C API of llama-cpp-python.

Results are not bit-identical: llama.cpp's logits depend on the batch size and on the slots of the KV cache. On
quantised models they differ by some percent of their spread, which sometimes changes a token. The same calls, on a new
session or after truncate(0), give the same bits.

llama.cpp checks less than `ModelFile` does: it aborts on some well-formed files with meaningless content, and on some
CPUs on any file. So each loaded model runs in a process of its own (`server.py`). The host talks to it over a socket
(`process.py`); logits come through shared memory. Only that process imports llama_cpp. If it crashes, the host raises
BackendCrashed or BackendLost with llama.cpp's last line.

One thread of the host reads and writes the socket, while the caller waits for it in Python. So Ctrl-C is served at once
and cannot interrupt a message. llama.cpp checks between any two operations of a pass whether to stop; the flag is a
byte of the shared memory.
"""

from edgeinfer.backends.llama_cpp.backend import MAX_N_CTX, LlamaCppBackend
from edgeinfer.backends.llama_cpp.context import MAX_OUTPUTS
from edgeinfer.backends.llama_cpp.session import LlamaCppModel, LlamaCppSession

__all__ = ["MAX_N_CTX", "MAX_OUTPUTS", "LlamaCppBackend", "LlamaCppModel", "LlamaCppSession"]
