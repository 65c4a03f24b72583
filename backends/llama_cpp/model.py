"""A model that llama.cpp has loaded, or knows the sizes of."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeinfer.backends.llama_cpp.log import log, mebibytes, refuse
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import ModelSizes


class Model:
    """A model in llama.cpp; without `on_progress` its sizes and vocabulary only. Raises UnsupportedModel.

    name: of the file, in messages.  extra_buffers: whether weights may be laid out anew for the CPU, and multiplied
    by other functions (AMX, repacked weights).  on_progress: called with the share that is loaded; stops loading with
    False.  n_bytes: of the weights.  has_extra_buffers: whether any were laid out anew.
    """

    def __init__(
        self,
        library: Any,
        path: Path,
        name: Path,
        extra_buffers: bool,
        on_progress: Callable[[float, object], bool] | None = None,
    ) -> None:
        self.library = library
        params = library.llama_model_default_params()
        no_devices = (ctypes.c_void_p * 1)()  # a list that ends at once: no GPU
        params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
        params.n_gpu_layers = 0
        params.load_mode = library.LLAMA_LOAD_MODE_NONE  # not mapped: repacked weights would be there twice
        params.no_alloc = on_progress is None
        params.use_extra_bufts = extra_buffers
        if on_progress is not None:
            params.progress_callback = library.llama_progress_callback(on_progress)
        with log.record() as lines:
            pointer = library.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            refuse(name, lines)
        self.pointer = pointer
        self.close = weakref.finalize(self, library.llama_model_free, pointer)
        self.n_vocab: int = library.llama_vocab_n_tokens(library.llama_model_get_vocab(pointer))
        logged = sum(mebibytes(line, r"model buffer size") for line in lines)
        in_file: int = library.llama_model_size(pointer)
        self.n_bytes = logged if logged > in_file + 2**15 else in_file  # more than rounding: repacked copies
        self.has_cells = not library.llama_model_is_recurrent(pointer) and not library.llama_model_is_hybrid(pointer)
        self.has_extra_buffers = any(mebibytes(line, r"(?<!CPU)(?<!CPU_Mapped) model buffer size") for line in lines)
        self.path = name
        self._check_kind()

    @property
    def sizes(self) -> ModelSizes:
        """What the C API tells of them."""
        library, pointer = self.library, self.pointer
        return ModelSizes(
            architecture=self._architecture,
            n_vocab=self.n_vocab,
            n_ctx_train=library.llama_model_n_ctx_train(pointer),
            n_layers=library.llama_model_n_layer(pointer),
            n_embd=library.llama_model_n_embd(pointer),
        )

    @property
    def _architecture(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self.library.llama_model_meta_val_str(self.pointer, b"general.architecture", buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def _check_kind(self) -> None:
        """Raises UnsupportedModel for a model that does not go on with a text token by token."""
        library, pointer = self.library, self.pointer
        if (
            library.llama_model_has_encoder(pointer)
            or not library.llama_model_has_decoder(pointer)
            or library.llama_model_is_diffusion(pointer)
        ):
            raise UnsupportedModel(
                f"{self.path}: architecture {self._architecture!r} has an encoder or fills in texts; "
                "only models that go on with a text are supported"
            )
