"""The ledger: every byte that a loaded model makes this process take, named once, planned and taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

Purpose: TypeAlias = Literal[
    "process",
    "vocabulary",
    "weights",
    "mapped weights",
    "KV cache",
    "window",
    "recurrent state",
    "activations",
    "drafters",
    "experts",
    "expert device",
    "threads",
    "sampling",
    "constraints",
]


@dataclass(frozen=True)
class Item:
    """Bytes of one purpose, or of a part of it."""

    # "process" is the interpreter and its libraries, "window" the KV cache of layers with a sliding window,
    # "recurrent state" what recurrent layers have in place of one
    purpose: Purpose
    planned: int  # before anything is loaded
    taken: int | None = None  # what is held now, None before that is known
    is_mapped: bool = False  # pages of a file, which the system may take back and read again
    detail: str = ""  # which part, as "rows" of the drafters, "" for it all

    @property
    def name(self) -> str:
        """Purpose and part: "drafters (rows)"."""
        return f"{self.purpose} ({self.detail})" if self.detail else self.purpose


@dataclass(frozen=True)
class Ledger:
    """What a model takes, by purpose. All sizes are in bytes."""

    items: tuple[Item, ...]
    loading: int = 0  # the most that is held above `planned` while it loads
    # resident memory of the process and of those that work for it, None before anything is loaded
    taken: int | None = None
    peak_taken: int | None = None  # the most that it ever was, None where the system does not tell

    @property
    def planned(self) -> int:
        """Bytes of all items, with a filled context and when nothing is loading."""
        return sum(item.planned for item in self.items)

    @property
    def peak(self) -> int:
        """The most that the process will hold: what a budget is compared with."""
        return self.planned + self.loading

    def of(self, purpose: Purpose) -> int:
        """Planned bytes of all parts of a purpose."""
        return sum(item.planned for item in self.items if item.purpose == purpose)

    def parts(self, purpose: Purpose) -> tuple[Item, ...]:
        """The items of a purpose."""
        return tuple(item for item in self.items if item.purpose == purpose)

    def with_item(self, item: Item) -> Ledger:
        """The same with what is planned only when it is used; nothing of no bytes."""
        return replace(self, items=(*self.items, item)) if item.planned else self

    def with_taken(self, held: Mapping[str, int], resident: int, peak: int | None) -> Ledger:
        """The same with what is taken now.

        held: bytes by name of the item. What no item tells is the process's own.  resident, peak: of the process.
        """
        rest = max(0, resident - sum(held.values()))
        taken = (rest if item.purpose == "process" else held.get(item.name) for item in self.items)
        items = tuple(replace(item, taken=n_bytes) for item, n_bytes in zip(self.items, taken, strict=True))
        return Ledger(items, self.loading, resident, peak)

    def as_json(self) -> dict[str, Any]:
        """The ledger as JSON has it."""
        return {
            "planned": self.planned,
            "loading": self.loading,
            "peak": self.peak,
            "taken": self.taken,
            "peak_taken": self.peak_taken,
            "items": [
                {
                    "purpose": item.purpose,
                    "detail": item.detail,
                    "planned": item.planned,
                    "taken": item.taken,
                    "mapped": item.is_mapped,
                }
                for item in self.items
            ],
        }


def ledger(items: Iterable[Item], loading: int = 0) -> Ledger:
    """A plan of items; those of no bytes are left out."""
    return Ledger(tuple(item for item in items if item.planned), loading)
