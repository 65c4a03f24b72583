"""How much of a prompt goes into a pass beside texts that run, so that they need not wait long for their next token."""

from __future__ import annotations

from edgeinfer.common.settings import DEFAULT_TBT_MS

LEAST_PIECE = 32  # tokens of a prompt that a pass takes at least
_DECAY = 0.7  # of what was measured, with each pass that reads


class Pace:
    """Measures what reading takes, and says how many tokens of prompts a pass may take.

    target_ms: of a pass in which texts decode too.
    """

    def __init__(self, target_ms: float = DEFAULT_TBT_MS) -> None:
        self.target_ms = target_ms
        self._tokens = self._ms = 0.0  # of pieces of prompts, decayed
        self._plain_ms = 0.0  # of the last pass that only decoded

    def piece(self, n_decoding: int, most: int) -> int:
        """Tokens of prompts for a pass in which that many texts decode; most without any."""
        if n_decoding == 0:
            return most
        if not self._tokens:
            return min(2 * LEAST_PIECE, most)
        room = self.target_ms - self._plain_ms
        return max(LEAST_PIECE, min(most, int(room * self._tokens / max(self._ms, 1e-6))))

    def count(self, n_decoding: int, n_read: int, milliseconds: float) -> None:
        """A pass of so many texts and tokens of prompts took that long."""
        if n_read == 0:
            self._plain_ms = milliseconds
            return
        alone = self._plain_ms if n_decoding else 0.0
        if n_read >= LEAST_PIECE:
            self._tokens = _DECAY * self._tokens + n_read
            self._ms = _DECAY * self._ms + max(0.1 * milliseconds, milliseconds - alone)
