"""What an export for a board is asked for, with the values that were left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from edgeinfer.common.arguments import check_integer
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.exporters.request import Request
from edgeinfer.hls.board.boards import Board, board_of
from edgeinfer.hls.geometry import ENCODINGS, Geometry

EmbeddingType = Literal["int8", "bf16"]
USUAL_N_CTX = 4096
MOST_CTX = 1 << 20  # angles beyond it are not reduced exactly: tables.sines_and_cosines
GOLDEN_TOKENS = 4  # of the stages of a layer
USUAL_GOLDEN = 4  # vectors a matrix
_USUAL_SHAPES = {"base3": (4, 16), "g3x5": (16, 4), "2bit": (4, 64)}  # rows, tables


@dataclass(frozen=True)
class BoardOptions:
    """The options of an export.

    n_golden: golden vectors of each matrix of some layers.  rescored: tokens that the ternary first stage of the output
    matrix lets through, 0 without that stage.  n_ctx: None for the usual one.
    """

    board: Board
    geometry: Geometry
    n_golden: int
    embeddings: EmbeddingType
    rescored: int
    n_ctx: int | None

    @classmethod
    def of(cls, request: Request) -> BoardOptions:
        """Those of a request. Raises InvalidArgument."""
        more = request.more
        board, encoding = board_of(more.get("board") or "kv260"), more.get("encoding") or "base3"
        if encoding not in ENCODINGS:
            raise InvalidArgument(f"--encoding must be one of {', '.join(ENCODINGS)}: found {encoding!r}")
        rows, tables = _USUAL_SHAPES[encoding]
        geometry = Geometry(encoding, more.get("rows") or rows, more.get("tables") or tables, board.n_ports)
        golden, embeddings, rescored = more.get("golden"), more.get("embeddings") or "int8", more.get("rescored") or 0
        if embeddings not in ("int8", "bf16"):
            raise InvalidArgument(f"--embeddings must be int8 or bf16: found {embeddings!r}")
        if request.n_ctx is not None and request.n_ctx > MOST_CTX:
            raise InvalidArgument(
                f"--ctx must be at most {MOST_CTX}, up to which rotations are exact: found {request.n_ctx}"
            )
        n_golden = check_integer("--golden", USUAL_GOLDEN if golden is None else golden, 0, 4096)
        if n_golden and request.n_ctx is not None and request.n_ctx < GOLDEN_TOKENS:
            raise InvalidArgument(
                f"the {GOLDEN_TOKENS} tokens of the golden stages do not fit into {request.n_ctx} tokens (-c): take at "
                f"least {GOLDEN_TOKENS}, or --golden 0"
            )
        return cls(
            board=board,
            geometry=geometry,
            n_golden=n_golden,
            embeddings=cast(EmbeddingType, embeddings),
            rescored=check_integer("--rescored", rescored, 0, 1 << 20),
            n_ctx=request.n_ctx,
        )
