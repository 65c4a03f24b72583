"""All exceptions that edgeinfer raises, and its warnings.

All derive from EdgeInferError. A message says what was expected, what was found and what to do. `exit_code` is that of
the command line.
"""

import sys
import warnings


class EdgeInferError(Exception):
    """Base of all errors of this package."""

    exit_code = 1

    def __reduce__(self) -> tuple[object, ...]:
        """As pickle and copy make it again: by its message and attributes, whatever its constructor takes."""
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[EdgeInferError], args: tuple[object, ...]) -> EdgeInferError:
    return kind.__new__(kind, *args)


class InvalidArgument(EdgeInferError, ValueError):
    """An argument is out of range, or two arguments exclude each other."""

    exit_code = 2


class InvalidConstraint(InvalidArgument):
    """A schema, regular expression or grammar is wrong, has a part that is not supported, or takes too much to read."""


class ShapeError(InvalidArgument):
    """An array has the wrong shape, type or range of values."""


class NotPicklable(InvalidArgument, TypeError):
    """Something that lives in one process, such as an engine, was to be pickled or copied."""


class ModelFileError(EdgeInferError):
    """The model file cannot be used."""

    exit_code = 3


class ModelNotFound(ModelFileError):
    """There is no model file with that name."""


class DownloadError(EdgeInferError):
    """A model could not be downloaded; what there is of it is kept for the next try, unless it is damaged."""


class InvalidGGUF(ModelFileError):
    """The file violates the GGUF format; `field` and `offset` (bytes) say where."""

    def __init__(self, path: object, field: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: {field} at byte {offset}: {reason}")
        self.field = field
        self.offset = offset
        self.reason = reason


class BadPack(ModelFileError):
    """The packed weights beside a model are damaged, of another version, or of another model: pack it again."""


class BadBoardFolder(ModelFileError):
    """A folder for an FPGA board is damaged, of another version, or of another engine: export the model again."""


class UnsupportedModel(ModelFileError):
    """The file is valid, but has an architecture, a tensor type or a tokenizer that is not supported."""


class TokenizerError(ModelFileError):
    """The vocabulary in the file cannot be used, or a token id is outside of it."""


class TemplateError(EdgeInferError):
    """The chat template of the model is broken, refuses the messages, or takes too much time or memory."""

    exit_code = 3


class ContextOverflow(EdgeInferError):
    """The tokens do not fit into the context: `n_tokens` are needed, `n_ctx` is its size.

    at_least: the text was too long to be tokenised; it has `n_tokens` or more.
    """

    def __init__(
        self, n_tokens: int, n_ctx: int, hint: str = "shorten the prompt or raise n_ctx (-c)", at_least: bool = False
    ) -> None:
        number = f"at least {n_tokens}" if at_least else str(n_tokens)
        super().__init__(f"{number} tokens do not fit into a context of {n_ctx}; {hint}")
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx
        self.at_least = at_least


class CacheFull(EdgeInferError):
    """Sequences that run hold all of the KV cache, which has `n_positions`; the sessions are unchanged."""

    def __init__(self, n_positions: int) -> None:
        super().__init__(
            f"the KV cache of {n_positions} positions is full; run fewer texts at once, or raise n_ctx (-c) or "
            "cache_ram (--cache-ram)"
        )
        self.n_positions = n_positions


class EngineBusy(EdgeInferError):
    """Too many texts wait for the engine: `n_waiting`. Ask again later."""

    def __init__(self, n_waiting: int) -> None:
        super().__init__(f"{n_waiting} texts wait already, which is the most: ask again when some have ended")
        self.n_waiting = n_waiting


class BudgetExceeded(EdgeInferError):
    """The memory plan needs more memory than is available."""

    exit_code = 4


class BackendUnavailable(EdgeInferError):
    """A backend, or its library, is not installed or cannot be used on this machine."""


class BackendCrashed(BackendUnavailable):
    """A backend that runs in its own process crashed before there was a session."""

    exit_code = 5


class BackendLost(EdgeInferError):
    """A device or a backend's process stopped working during a run."""

    exit_code = 5


class ExpertReadError(ModelFileError):
    """An expert could not be read from its file during a forward pass; the session is unchanged."""

    exit_code = 1


class ModelFileChanged(ExpertReadError):
    """A file of the model was changed while it was in use: load it again. The session is unchanged."""

    exit_code = 3


class NumericalError(EdgeInferError):
    """The logits are not numbers: the file is damaged or its hyper-parameters are wrong."""

    exit_code = 3


class ConstraintError(EdgeInferError):
    """What may follow a text cannot be told within the limits of time and memory; the grammar is too complex there."""


class SimulationError(EdgeInferError):
    """A Verilog engine cannot be compiled, or does not do in simulation what it must."""


class Interrupted(EdgeInferError):
    """`Session.interrupt` stopped the forward pass from another thread; the session is unchanged."""

    exit_code = 130


def warn(message: str) -> None:
    """A RuntimeWarning at the line that called into this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith("edgeinfer."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)
