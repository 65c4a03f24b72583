"""Mixtures of experts in plain numpy, written like the equations of `Experts`. All in float32, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.reference_math import Floats, activated, gated, scale, sigmoid
from edgeinfer.models import Experts, PlainExperts, RouterFunction
from edgeinfer.models.spec import ExpertsRef, TensorRef

SMALLEST_SUM = np.float32(2.0**-14)  # that weights are divided by: the smallest normal half float, as in llama.cpp


class Products(Protocol):
    """What computes with the tensors of a model."""

    def linear(self, matrix: TensorRef, bias: TensorRef | None, x: Floats) -> Floats:
        """Matrix times each row of x, plus bias: (n, n_in) to (n, n_out)."""

    def expert_linear(self, matrix: ExpertsRef, expert: int, x: Floats) -> Floats:
        """The matrix of one expert times x: (n_in,) to (n_out,)."""

    def norm(self, weight: TensorRef | None, x: Floats) -> Floats:
        """RMS norm over the last axis; x itself where there is no weight."""

    def values_of(self, ref: ExpertsRef | TensorRef) -> Floats:
        """A tensor, or a part of one."""


@dataclass(frozen=True)
class Choice:
    """The experts of a token in the order in which they are added up, and what each is multiplied by, (n_used,)."""

    experts: NDArray[np.intp]
    weights: Floats


def chances(z: Floats, function: RouterFunction) -> Floats:
    """What a router makes of its products z (n_experts,)."""
    if function == "softmax":
        return _softmax(z)
    if function == "sigmoid":
        return sigmoid(z)
    if function == "sqrt_softplus":
        root: Floats = np.sqrt(np.logaddexp(np.float32(0), z))
        return root
    return z  # softmax_of_top_k: those of the chosen ones become weights


def choose(block: Experts, z: Floats, selection_bias: Floats | None = None) -> Choice:
    """The experts of a token with the router's products z (n_experts,); of equal ones those with the lower index."""
    p = chances(z, block.router_function)
    scores = p if selection_bias is None else p + selection_bias
    if block.n_groups > 1:
        scores = _within_groups(block, scores)
    experts = np.argsort(-scores, kind="stable")[: block.n_used]
    weights = _softmax(p[experts]) if block.router_function == "softmax_of_top_k" else p[experts]
    if block.is_normalised:
        weights = weights / np.maximum(weights.sum(), SMALLEST_SUM)
    return Choice(experts, weights * np.float32(block.weight_scale))


def expert_rows(block: Experts, products: Products, x: Floats) -> Floats:
    """The sum over the chosen experts and the shared network of each row of x, (n, n_embd) to the same."""
    h = products.norm(block.norm, x)
    routed = h if block.router_norm is None else products.norm(block.router_norm, x)
    z = scale(products.linear(block.router, None, routed), block.router_scale)
    z = z if block.router_bias is None else z + products.values_of(block.router_bias)
    bias = None if block.selection_bias is None else products.values_of(block.selection_bias)
    inputs = h
    if isinstance(block, PlainExperts) and block.latent_down is not None:
        inputs = products.linear(block.latent_down, None, h)
    rows = [_row(block, products, choose(block, each, bias), row) for each, row in zip(z, inputs, strict=True)]
    y = np.array(rows, dtype=np.float32).reshape(inputs.shape)
    if isinstance(block, PlainExperts) and block.latent_up is not None:
        y = products.linear(block.latent_up, None, y)
    y = products.norm(block.routed_post_norm, y)
    if block.shared_down is None:
        return y
    of_shared = h if block.shared_norm is None else products.norm(block.shared_norm, x)
    return y + products.norm(block.shared_post_norm, _shared(block, products, of_shared))


def _row(block: Experts, products: Products, choice: Choice, x: Floats) -> Floats:
    """The weighted sum of a token, x (n_embd,)."""
    y = np.zeros_like(x)
    for expert, weight in zip(choice.experts.tolist(), choice.weights, strict=True):
        y = y + weight * _expert(block, products, expert, x)
    return y


def _expert(block: Experts, products: Products, expert: int, x: Floats) -> Floats:
    """What one expert makes of x (n_embd,)."""

    def product(role: str, vector: Floats) -> Floats:
        matrix, factor, bias = (getattr(block, role + ending) for ending in ("", "_scale", "_bias"))
        y = products.expert_linear(matrix, expert, vector)
        y = y if factor is None else y * products.values_of(factor)[expert]
        return y if bias is None else y + products.values_of(bias)[expert]

    if isinstance(block, PlainExperts):
        return product("down", activated(block.activation, product("up", x)))
    return product("down", gated(block.activation, product("gate", x), product("up", x)))


def _shared(block: Experts, products: Products, h: Floats) -> Floats:
    """What the shared network adds to each row of h (n, n_embd)."""
    assert block.shared_up is not None and block.shared_down is not None
    up = products.linear(block.shared_up, None, h)
    if block.shared_gate is None:
        inner = activated(block.activation, up)
    else:
        inner = gated(block.activation, products.linear(block.shared_gate, None, h), up)
    y = products.linear(block.shared_down, None, inner)
    if block.shared_router is None:
        return y
    router = products.values_of(block.shared_router)
    shares = sigmoid(np.array([row @ router for row in h], dtype=np.float32))
    scaled: Floats = shares[:, None] * y
    return scaled


def _within_groups(block: Experts, scores: Floats) -> Floats:
    """Scores (n_experts,), minus infinity outside the groups whose two best add up to most, or whose best is best."""
    groups = scores.reshape(block.n_groups, -1)
    of_groups = np.sort(groups, axis=1)[:, -1 if block.groups_by_best else -2 :].sum(axis=1)
    used = np.argsort(-of_groups, kind="stable")[: block.n_used_groups]
    within = np.full_like(groups, -np.inf)
    within[used] = groups[used]
    return within.reshape(-1)


def _softmax(z: Floats) -> Floats:
    e: Floats = np.exp(z - z.max())
    e /= e.sum()
    return e
