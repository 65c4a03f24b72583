"""Every exception that edgeinfer raises on purpose, and its warnings.

All derive from EdgeInferError. A message says what was wanted, what was found and what to do. `exit_code` is what the
command line leaves with when the error reaches it.
"""

import sys
import warnings


class EdgeInferError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class InvalidArgument(EdgeInferError, ValueError):
    """A parameter is outside of its range, or two parameters do not go together."""

    exit_code = 2


class ShapeError(InvalidArgument):
    """An array has another shape, type or range of values than the call needs."""


class ModelFileError(EdgeInferError):
    """The model file cannot be used."""

    exit_code = 3


class ModelNotFound(ModelFileError):
    """There is no model file at the given place."""


class InvalidGGUF(ModelFileError):
    """The file breaks a rule of the GGUF format; `field` and `offset` (bytes) say where."""

    def __init__(self, path: object, field: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: {field} at byte {offset}: {reason}")
        self.field = field
        self.offset = offset
        self.reason = reason


class BadPack(ModelFileError):
    """The packed weights beside a model are damaged, of another version, or of another model: pack it again."""


class UnsupportedModel(ModelFileError):
    """The file is sound, but holds an architecture, a tensor type or a tokenizer that edgeinfer does not know."""


class TokenizerError(ModelFileError):
    """The vocabulary in the file is not usable, or a token id is outside of it."""


class TemplateError(EdgeInferError):
    """The chat template of the model is broken, refuses the messages, or takes too much time or memory."""

    exit_code = 3


class ContextOverflow(EdgeInferError):
    """The tokens do not fit into the context; `n_tokens` are wanted, `n_ctx` is all there is.

    at_least: the text was so long that it was not made into tokens; it has `n_tokens` or more.
    """

    def __init__(
        self, n_tokens: int, n_ctx: int, hint: str = "shorten the prompt or raise n_ctx (-c)", at_least: bool = False
    ) -> None:
        number = f"at least {n_tokens}" if at_least else str(n_tokens)
        super().__init__(f"{number} tokens do not fit into a context of {n_ctx}; {hint}")
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx


class BudgetExceeded(EdgeInferError):
    """The memory plan is larger than the memory that may be used."""

    exit_code = 4


class BackendUnavailable(EdgeInferError):
    """A backend, or the library behind it, is not installed or not usable on this machine."""


class BackendCrashed(BackendUnavailable):
    """A library ended the process of its own that it runs in, before there was a session."""

    exit_code = 5


class BackendLost(EdgeInferError):
    """A device or a worker stopped working during a run."""

    exit_code = 5


class NumericalError(EdgeInferError):
    """The model produced logits that are not numbers: the file is damaged or its hyper-parameters are wrong."""

    exit_code = 3


class Interrupted(EdgeInferError):
    """The forward pass was stopped by `Session.interrupt` from another thread; the session is as it was before."""

    exit_code = 130


def warn(message: str) -> None:
    """A RuntimeWarning at the line that called into this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith("edgeinfer."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)
