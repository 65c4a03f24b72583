"""Published designs and what the model says of them: how far it can be trusted.

Of bitnet-kv260 and llama-fpga the model is checked: its inputs are theirs, its results are compared with theirs. The
figures of TeLLMe are a fit: three published numbers give three parameters, so nothing is left to compare.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.hls.board.boards import KV260
from edgeinfer.hls.board.model import Design, floor_seconds, head_seconds
from edgeinfer.hls.board.workload import BITNET_07B, BITNET_2B4T
from edgeinfer.hls.geometry import Geometry

_POSITIONS_A_PASS = 2  # of a prompt: bitnet-kv260 reads all weights twice for four positions
_SHARE_OF_ATTENTION = 0.6  # of that after a full text, assumed: a prompt's tokens see fewer positions
_LLAMA_BYTES, _LLAMA_RATE, _LLAMA_EFFICIENCY = 3.5e9, 19.2e9, 0.85  # as llama-fpga says of LLaMA2-7B in 4 bits


@dataclass(frozen=True)
class Check:
    """A published figure and the model's."""

    what: str
    source: str
    unit: str
    published: float
    modelled: float
    tolerance: float  # the difference that is allowed, relative

    @property
    def difference(self) -> float:
        """Of the model from what is published, relative."""
        return self.modelled / self.published - 1


def checks() -> list[Check]:
    """The model against published boards."""
    open_design = "MerlijnW70/bitnet-kv260"
    design = Design(KV260, Geometry("base3", 4, 16))
    host = KV260.host.scaled(BITNET_2B4T.n_layers, BITNET_2B4T.n_embd)
    stream = BITNET_2B4T.weight_bytes(design.geometry) / KV260.stream_rate
    token = stream + head_seconds(design, BITNET_2B4T) + sum(host.values())
    prompt = stream / _POSITIONS_A_PASS + sum(host.values()) - (1 - _SHARE_OF_ATTENTION) * host["attention"]
    floor = 1e3 * floor_seconds(design, BITNET_2B4T)
    llama = _LLAMA_RATE * _LLAMA_EFFICIENCY / _LLAMA_BYTES
    return [
        Check("generation, 2B-4T", open_design, "tokens/s", 16.78, 1 / token, 0.05),
        Check("prompt, 2B-4T", open_design, "tokens/s", 28.78, 1 / prompt, 0.05),
        Check("least time of a token, 2B-4T", open_design, "ms", 30.2, round(floor, 1), 0.0),
        Check("generation, LLaMA2-7B in 4 bits", "adamgallas/llama-fpga", "tokens/s", 5.0, llama, 0.10),
    ]


@dataclass(frozen=True)
class Fit:
    """TeLLMe's published times to the first token as a * n^2 + b * n, and its speed."""

    version: str
    quadratic: float
    linear: float
    trits_per_cycle: float  # of prefill
    stream_rate: float  # bytes a second of decoding at five bits for three weights


def tellme_fits() -> list[Fit]:
    """Parameters that give TeLLMe's published figures (arXiv:2504.16266, 2510.15926); a fit, no check."""
    found = []
    for version, at_64, at_128, rate in (("v1", 0.55, 1.15, 9.0), ("v2", 0.45, 0.96, 25.0)):
        quadratic = (at_128 - 2 * at_64) / (128**2 - 2 * 64**2)
        linear = (at_64 - 64**2 * quadratic) / 64
        multiply_adds = BITNET_07B.n_weights / linear
        stream = BITNET_07B.n_weights * 5 / 3 / 8 * rate
        found.append(Fit(version, quadratic, linear, multiply_adds / KV260.clock_hz, stream))
    return found
