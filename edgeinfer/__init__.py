"""Language models on this machine, with speculative decoding.

    import edgeinfer

    with edgeinfer.load() as engine:
        print(engine.generate("The capital of France is", max_tokens=8).text)
        for piece in engine.chat().send("Name three rivers."):
            print(piece.text, end="", flush=True)

Names are imported when they are used: `import edgeinfer` loads no library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeinfer.chat import Answer, Conversation
    from edgeinfer.common.errors import (
        BackendCrashed,
        BackendLost,
        BackendUnavailable,
        BadBoardFolder,
        BadPack,
        BudgetExceeded,
        ConstraintError,
        ContextOverflow,
        DownloadError,
        EdgeInferError,
        Interrupted,
        InvalidArgument,
        InvalidConstraint,
        InvalidGGUF,
        ModelFileChanged,
        ModelFileError,
        ModelNotFound,
        NotPicklable,
        NumericalError,
        ShapeError,
        TemplateError,
        TokenizerError,
        UnsupportedModel,
    )
    from edgeinfer.completion import Completion, Piece, Timings, Usage
    from edgeinfer.engine import Engine
    from edgeinfer.loading.open import load
    from edgeinfer.loading.options import LoadOptions
    from edgeinfer.logprobs import Score, TokenLogprob
    from edgeinfer.models.reasoning import ToolCall
    from edgeinfer.profiler.report import Profile, profile
    from edgeinfer.sampling import SamplingParams
    from edgeinfer.speculation.stats import Speculation
    from edgeinfer.stream import Stream
    from edgeinfer.tools.running import CallResult, Round
    from edgeinfer.tools.selection import ToolSelection, select_tools

    __version__: str

__all__ = [
    "Answer",
    "BackendCrashed",
    "BackendLost",
    "BackendUnavailable",
    "BadBoardFolder",
    "BadPack",
    "BudgetExceeded",
    "CallResult",
    "Completion",
    "ConstraintError",
    "ContextOverflow",
    "Conversation",
    "DownloadError",
    "EdgeInferError",
    "Engine",
    "Interrupted",
    "InvalidArgument",
    "InvalidConstraint",
    "InvalidGGUF",
    "LoadOptions",
    "ModelFileChanged",
    "ModelFileError",
    "ModelNotFound",
    "NotPicklable",
    "NumericalError",
    "Piece",
    "Profile",
    "Round",
    "SamplingParams",
    "Score",
    "ShapeError",
    "Speculation",
    "Stream",
    "TemplateError",
    "Timings",
    "TokenLogprob",
    "TokenizerError",
    "ToolCall",
    "ToolSelection",
    "UnsupportedModel",
    "Usage",
    "__version__",
    "load",
    "profile",
    "select_tools",
]

_MODULES = {
    "chat": ("Answer", "Conversation"),
    "completion": ("Completion", "Piece", "Timings", "Usage"),
    "engine": ("Engine",),
    "loading.open": ("load",),
    "loading.options": ("LoadOptions",),
    "logprobs": ("Score", "TokenLogprob"),
    "models.reasoning": ("ToolCall",),
    "profiler.report": ("Profile", "profile"),
    "sampling": ("SamplingParams",),
    "speculation.stats": ("Speculation",),
    "stream": ("Stream",),
    "tools.running": ("CallResult", "Round"),
    "tools.selection": ("ToolSelection", "select_tools"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, from the module that has it (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        return version("edgeinfer")
    if name not in __all__:
        raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"edgeinfer.{_PLACES.get(name, 'common.errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
