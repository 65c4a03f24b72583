"""Any model file that llama.cpp loads, through the C API of llama-cpp-python: what the native engine lacks.

Promise 1 does not hold here. llama.cpp's logits depend on how a text is cut into batches and on which slots of the KV
cache it fell: on quantised models they move by some percent of their spread, and once in a while that tips a choice.
Nothing is added to that: the same calls, on a new session or after truncate(0), give the same bits.

Every call of a session into llama.cpp is made by one thread of its own, one after the other, while the caller waits
for it in Python. So Ctrl-C is served at once, and cannot strike between two changes that belong together. llama.cpp
asks between any two operations of a pass whether to stop; the answer is a byte, read without Python's lock.

llama.cpp checks less than `ModelFile` does, and ends the process on some files that are sound but make no sense.
"""

from edgeinfer.backends.llama_cpp.backend import MAX_N_CTX, LlamaCppBackend
from edgeinfer.backends.llama_cpp.context import MAX_OUTPUTS
from edgeinfer.backends.llama_cpp.library import open_library
from edgeinfer.backends.llama_cpp.session import LlamaCppSession

__all__ = ["MAX_N_CTX", "MAX_OUTPUTS", "LlamaCppBackend", "LlamaCppSession", "open_library"]
