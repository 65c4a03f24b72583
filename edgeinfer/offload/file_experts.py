"""The experts that a model file has, for any architecture: read off its metadata and the names of its tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from edgeinfer.models.gguf import ModelFile

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_\w*_exps\.weight")


@dataclass(frozen=True)
class FileExperts:
    """Experts of a file, in bytes of the file."""

    n_layers: int
    # n_experts, n_used: of a layer, and those that a token uses
    n_experts: int
    n_used: int
    expert_bytes: tuple[int, int]  # of one expert in the layers with the smallest and the largest ones
    token_bytes: int  # of all that one token uses
    total_bytes: int


def is_of_experts(tensor: str) -> bool:
    """Whether a tensor holds a matrix of each expert of a layer, by its name."""
    return _EXPERTS.fullmatch(tensor) is not None


def has_experts(file: ModelFile) -> bool:
    """Whether a model is a mixture of experts."""
    return any(map(is_of_experts, file.tensors))


def experts_of(file: ModelFile) -> FileExperts | None:
    """The experts of a file, None where it has none, or does not say how many there are and how many are used."""
    architecture = file.metadata.get("general.architecture")
    n_experts, n_used = (file.metadata.get(f"{architecture}.expert_{what}") for what in ("count", "used_count"))
    of_layer: dict[str, int] = defaultdict(int)
    for name, info in file.tensors.items():
        if found := _EXPERTS.fullmatch(name):
            of_layer[found[1]] += info.n_bytes
    if not of_layer or not isinstance(n_experts, int) or not isinstance(n_used, int) or not 0 < n_used <= n_experts:
        return None
    of_expert = [n_bytes // n_experts for n_bytes in of_layer.values()]
    return FileExperts(
        n_layers=len(of_layer),
        n_experts=n_experts,
        n_used=n_used,
        expert_bytes=(min(of_expert), max(of_expert)),
        token_bytes=n_used * sum(of_expert),
        total_bytes=sum(of_layer.values()),
    )
