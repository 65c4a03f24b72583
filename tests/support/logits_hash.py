"""Prints the instruction set that is used and the SHA-256 of the logits of a model file: the engine as it is installed.

Needs nothing of the tests, so that another installation, or an emulated CPU, can run it.
"""

import hashlib
import sys

import numpy as np

from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile


def main() -> None:
    backend = NativeBackend(tuned=False)
    with ModelFile.open(sys.argv[1]) as file:
        spec = read_spec(file)
        model = backend.load(
            file, spec, backend.plan(file, spec, LoadSettings(64, n_batch=32, n_threads=1, cache_type="f16")), Device(1)
        )
        logits = model.session().forward(np.arange(3, 20, dtype=np.int32), logits="all").logits
        print(model.isa, hashlib.sha256(np.ascontiguousarray(logits)).hexdigest())


if __name__ == "__main__":
    main()
