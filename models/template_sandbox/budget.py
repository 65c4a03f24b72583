"""What a rendering may take: steps, time, memory, and the sizes of values."""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeVar

from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.provenance import Text

MAX_SECONDS = 1.5  # of the processor, with what cannot look at the clock for a while 2
MAX_LENGTH = 4 << 20  # characters of the conversation, and of any text on the way
MAX_MEMORY_BYTES = 128 << 20  # of all that is made on the way, kept or not
MAX_STEPS = 1_000_000
STEPS_A_PAIR = 8  # more steps, and time in proportion, for each two messages: some templates compare all with all
MAX_DEPTH = 64  # of lists and mappings in each other, and of macros that call macros
MAX_INT_BITS = 1 << 14

_T = TypeVar("_T")


class Budget:
    """What is left of the limits."""

    def __init__(self, n_messages: int) -> None:
        self.max_steps = self._steps = MAX_STEPS + STEPS_A_PAIR * n_messages * (n_messages - 1)
        self.max_seconds = MAX_SECONDS * self.max_steps / MAX_STEPS
        self._bytes = MAX_MEMORY_BYTES
        self._depth = 0
        self._end = time.thread_time() + self.max_seconds
        self._look = time.monotonic() + self.max_seconds

    def step(self, n_bytes: int = 0) -> None:
        """Count a step that makes n_bytes. Raises TemplateError."""
        self._steps -= 1
        self._bytes -= n_bytes
        if self._bytes < 0:
            raise TemplateError(f"the chat template makes more than {MAX_MEMORY_BYTES >> 20} MiB of texts and lists")
        if self._steps < 0:
            raise TemplateError(f"the chat template takes more than {self.max_steps} steps")
        now = time.monotonic()
        if now > self._look:  # no sooner can the thread have used its time, and this clock is the quicker one to read
            left = self._end - time.thread_time()
            if left < 0:
                raise TemplateError(f"the chat template takes more than {self.max_seconds:.3g} s")
            self._look = now + left

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count what runs inside as one level deeper. Raises TemplateError."""
        if self._depth == MAX_DEPTH:
            raise TemplateError(f"the chat template calls its macros more than {MAX_DEPTH} deep")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


BUDGET: ContextVar[Budget] = ContextVar("budget")


def check_length(length: int) -> None:
    """Refuse a text or list of this length before it is made."""
    if length > MAX_LENGTH:
        raise TemplateError(f"the chat template makes a text or list longer than {MAX_LENGTH}")


def counted(value: _T) -> _T:
    """The value, once its memory is taken from the budget."""
    n_bytes = 0
    if isinstance(value, (str, list, tuple, dict)):
        n_bytes = sys.getsizeof(value)
    if isinstance(value, (list, tuple)):
        # New elements as well, if it is the result of a split or a slice of a text.
        n_bytes += (112 if value and isinstance(value[0], Text) else 48) * len(value)
    elif isinstance(value, int) and (n_bits := value.bit_length()) > 64:
        if n_bits > MAX_INT_BITS:
            raise TemplateError(f"the chat template makes an integer of more than {MAX_INT_BITS} bits")
        n_bytes = n_bits // 8
    BUDGET.get().step(n_bytes)
    return value


def counted_slice(value: _T) -> _T:
    """A slice, once its memory is taken from the budget; what it holds is not new."""
    BUDGET.get().step(sys.getsizeof(value))
    return value


def listed(value: Any) -> list[Any]:
    """The elements of something that can be looped over."""
    if isinstance(value, str):
        check_length(16 * len(value))
    elements: list[Any] = []
    rest = iter(value)
    while part := counted(list(islice(rest, 4096))):
        elements += part
        check_length(len(elements))
    return elements


def measured(value: Any) -> Any:
    """The value, if Python is quick to print, compare, sort or hash it; a list in place of an iterator."""
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        value = listed(value)
    BUDGET.get().step()
    weight_of(value)
    return value


def weight_of(value: Any) -> int:
    """Characters and elements of a value, each counted as often as it would be printed. Raises TemplateError."""
    return _tree_weight(value, {}, 0)


def _tree_weight(value: Any, known: dict[int, int], depth: int) -> int:
    if isinstance(value, str):
        return len(value) + 1
    if id(value) in known:
        return known[id(value)]
    parts = _parts(value)
    if parts is None:
        return 1
    if depth == MAX_DEPTH:
        raise TemplateError(f"the chat template nests lists and mappings more than {MAX_DEPTH} deep")
    known[id(value)] = 1 + sum(_tree_weight(part, known, depth + 1) for part in parts)
    check_length(known[id(value)])
    return known[id(value)]


def _parts(value: Any) -> list[Any] | None:
    """What a container holds; None for what is none."""
    if isinstance(value, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
        return list(value)
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    return [*value, *value.values()] if isinstance(value, dict) else None
