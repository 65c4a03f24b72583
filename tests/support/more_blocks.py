"""Blocks in place of those that a tiny model has, for what backends refuse. Nothing can compute with them."""

from edgeinfer.models import Experts, Layer, dense_of


def experts_like(layer: Layer) -> Experts:
    """Four experts of the size of a layer's network, whose tensors no file has."""
    dense = dense_of(layer)
    names = {role: f"ffn_{role}_exps.weight" for role in ("gate", "up", "down")}
    return Experts(
        n_embd=dense.n_embd,
        n_ff=dense.n_ff,
        n_experts=4,
        n_used=2,
        router="ffn_gate_inp.weight",
        norm=dense.norm,
        **names,
    )
