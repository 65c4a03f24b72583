"""Any model file that llama.cpp loads, through the C API of llama-cpp-python: what the native engine lacks.

Promise 1 does not hold here. llama.cpp's logits depend on how a text is cut into batches and on which slots of the KV
cache it fell: on quantised models they move by some percent of their spread, and once in a while that tips a choice.
Nothing is added to that: the same calls, on a new session or after truncate(0), give the same bits.

llama.cpp checks less than `ModelFile` does, and ends its process on some files that are sound but make no sense, and on
some CPUs on any. So each loaded model is in a process of its own (`server.py`), which the host asks over a socket
(`process.py`); logits come through memory that both see. Only that process imports llama_cpp. Where it crashes, the
host raises BackendCrashed or BackendLost with llama.cpp's last line.

The host's side of the socket is one thread, while the caller waits for it in Python. So Ctrl-C is served at once, and
cannot strike within a message. llama.cpp asks between any two operations of a pass whether to stop; the answer is a
byte of the shared memory.
"""

from edgeinfer.backends.llama_cpp.backend import MAX_N_CTX, LlamaCppBackend
from edgeinfer.backends.llama_cpp.context import MAX_OUTPUTS
from edgeinfer.backends.llama_cpp.session import LlamaCppSession

__all__ = ["MAX_N_CTX", "MAX_OUTPUTS", "LlamaCppBackend", "LlamaCppSession"]
