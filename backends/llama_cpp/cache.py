"""What llama.cpp remembers of a sequence and its branches."""

from __future__ import annotations

from typing import Any


class Cache:
    """What llama.cpp remembers, by sequence; sequence 0 is the committed one.

    With cells, one a token, a sequence can be cut short and branches share what they have in common. Without, there is
    a state that is the sum of all tokens: passes then run on a copy, sequence 1, that is adopted whole or dropped.
    """

    def __init__(self, library: Any, memory: int, has_cells: bool) -> None:
        self.has_cells = has_cells
        self._library = library
        self._memory = memory
        self._is_branched = False

    def length(self, sequence: int) -> int:
        """Number of tokens of a sequence."""
        n: int = self._library.llama_memory_seq_pos_max(self._memory, sequence) + 1
        return n

    def branch(self, n: int) -> int:
        """Make n sequences that go on from sequence 0, which may be the first of them; gives the first."""
        first = 0 if self.has_cells else 1
        for sequence in range(max(first, 1), first + n):
            self._is_branched = True
            self._library.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        return first

    def adopt(self, sequence: int, n: int) -> None:
        """Make the first n tokens of a sequence the committed ones, and drop the rest and all other sequences."""
        library, memory = self._library, self._memory
        library.llama_memory_seq_rm(memory, sequence, n, -1)
        if sequence:
            library.llama_memory_seq_keep(memory, sequence)
            library.llama_memory_seq_cp(memory, sequence, 0, -1, -1)
        self._drop_branches()

    def rewind(self, n: int) -> int:
        """Keep the first n committed tokens and nothing else; gives n, or 0 where that was not possible."""
        library, memory = self._library, self._memory
        self._drop_branches()
        removed = library.llama_memory_seq_rm(memory, 0, n, -1)
        # Cells that are after a sliding window may have been used again.
        is_whole = not self.has_cells or library.llama_memory_seq_pos_min(memory, 0) <= 0
        if removed and is_whole:
            return n
        self.clear()
        return 0

    def clear(self) -> None:
        """Forget everything."""
        self._library.llama_memory_clear(self._memory, True)

    def _drop_branches(self) -> None:
        if self._is_branched:
            self._library.llama_memory_seq_keep(self._memory, 0)
            self._is_branched = False
