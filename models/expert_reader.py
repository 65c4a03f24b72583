"""From the keys and tensors of a model file to the `Experts` of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer.models.key_reader import KeyReader
from edgeinfer.models.spec import Activation, ExpertRows, Experts, ExpertsRef, PlainExperts, RouterFunction, TensorRef

MOST_EXPERTS = 4096
EXPERT_BIASES = frozenset({"router_bias", "gate_bias", "up_bias", "down_bias"})
# What the numbers of expert_gating_func mean.
_FUNCTIONS: dict[int, RouterFunction] = {1: "softmax", 2: "sigmoid", 3: "softmax_of_top_k", 4: "sqrt_softplus"}
# Tensors after "blk.<index>.", by role. Gate and up are apart, or one tensor.
_ALWAYS = {"router": "ffn_gate_inp.weight", "down": "ffn_down_exps.weight"}
_SPECIAL = {
    "router_bias": "ffn_gate_inp.bias",
    "selection_bias": "exp_probs_b.bias",
    "down_bias": "ffn_down_exps.bias",
}
_SCALES = {"gate_scale": "ffn_gate_exps.scale", "up_scale": "ffn_up_exps.scale", "down_scale": "ffn_down_exps.scale"}
_SHARED = {
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
}
_SHARED_ROUTER = "ffn_gate_inp_shexp.weight"
# vectors that some files have as matrices of one row
MAY_BE_ROWS = (_SHARED_ROUTER, _SPECIAL["selection_bias"], "ssm_norm.weight")


@dataclass(frozen=True)
class ExpertRecipe:
    """How the experts of one architecture depart from a softmax over all of them, which is used as it is."""

    is_required: bool = True  # whether every file has them; without, one that lacks expert_count is dense
    # the key of the numbers between gate and down: "whole" is feed_forward_length, "own" is expert_feed_forward_length,
    # "own or share" is feed_forward_length over the experts of a token where that is absent
    n_ff: Literal["whole", "own", "own or share"] = "whole"
    # the same of the shared network, None without one: expert_shared_feed_forward_length, with none or
    # feed_forward_length where that is absent, or expert_shared_count times n_ff
    n_ff_shared: Literal["length or none", "length or whole", "count"] | None = None
    shared_router: bool = False  # whether a router scales the shared network
    router_function: RouterFunction = "softmax"
    is_normalised: bool = False
    activation: Activation = "silu"
    is_plain: bool = False  # whether no network has a gate; then experts may have rows of their own, moe_latent_size
    # required, optional: tensors of a layer beyond those that all have, by role
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    # further keys that count. What other keys say of the weights of experts is not looked at, as in llama.cpp, whose
    # reading of a file is the standard here.
    reads: frozenset[str] = frozenset()


class ExpertReader:
    """Reads what a file says about its experts. Every method raises UnsupportedModel for what does not fit."""

    def __init__(self, recipe: ExpertRecipe, keys: KeyReader, n_embd: int) -> None:
        self._recipe = recipe
        self._keys = keys
        self._n_experts = keys.integer("expert_count", 1, MOST_EXPERTS)
        self._n_used = keys.integer("expert_used_count", 1, self._n_experts)
        self._n_ff = self._width()
        self._n_ff_shared = self._shared_width()
        self._n_dense = self._read_integer("leading_dense_block_count", 0, 0)
        self._step = self._read_integer("interleave_moe_layer_step", 1, 1)
        self._common = {
            "n_embd": n_embd,
            "n_ff": self._n_ff,
            "n_experts": self._n_experts,
            "n_used": self._n_used,
            "n_ff_shared": self._n_ff_shared,
            "activation": recipe.activation,
            **self._routing(),
        }

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts; the others have a dense network."""
        return layer >= self._n_dense and (layer + 1) % self._step == 0

    def of_layer(self, layer: int, norm: TensorRef | None) -> Experts:
        """The experts of a layer. norm: of their input."""
        if self._recipe.is_plain:
            return PlainExperts(**self._common, norm=norm, **self._plain_tensors(f"blk.{layer}."))
        return Experts(**self._common, norm=norm, **self._tensors(f"blk.{layer}."))

    # ---- keys ------------------------------------------------------------------------------------------------------

    def _read_integer(self, key: str, least: int, default: int) -> int:
        return self._keys.integer(key, least, 4096, default) if key in self._recipe.reads else default

    def _whole_width(self) -> int:
        return self._keys.integer("feed_forward_length", 1, 1 << 20)

    def _width(self) -> int:
        if self._recipe.n_ff == "whole":
            return self._whole_width()
        is_required = self._recipe.n_ff == "own"
        n_ff = self._keys.integer("expert_feed_forward_length", int(is_required), 1 << 20, None if is_required else 0)
        return n_ff or self._whole_width() // self._n_used

    def _shared_width(self) -> int:
        if self._recipe.n_ff_shared is None:
            return 0
        if self._recipe.n_ff_shared == "count":
            return self._n_ff * self._keys.integer("expert_shared_count", 0, MOST_EXPERTS)
        n_ff = self._keys.integer("expert_shared_feed_forward_length", 0, 1 << 20, default=0)
        return n_ff or (self._whole_width() if self._recipe.n_ff_shared == "length or whole" else 0)

    def _routing(self) -> dict[str, Any]:
        """The fields of Experts that say how a router's products become weights."""
        recipe, keys = self._recipe, self._keys
        is_normalised, scale = recipe.is_normalised, 1.0
        if "expert_weights_norm" in recipe.reads:
            is_normalised = keys.flag("expert_weights_norm", is_normalised)
        if "expert_weights_scale" in recipe.reads:
            scale = keys.scale("expert_weights_scale", 1.0)
        n_groups, n_used_groups = self._groups()
        return {
            "router_function": self._router_function(),
            "is_normalised": is_normalised,
            "weight_scale": scale,
            "n_groups": n_groups,
            "n_used_groups": n_used_groups,
            "groups_by_best": n_groups > 1 and keys.flag("expert_groups_by_best", False),  # edgeinfer's own key
        }

    def _router_function(self) -> RouterFunction:
        """What the key says, if the architecture reads it; else the recipe's, which the key must not contradict."""
        own, key = self._recipe.router_function, "expert_gating_func"
        known = _FUNCTIONS if key in self._recipe.reads else {i: name for i, name in _FUNCTIONS.items() if name == own}
        number = self._keys.integer(key, 0, 1 << 16, default=0)  # 0 says nothing
        if number and number not in known:
            only = ", ".join(f"{i} ({name})" for i, name in known.items())
            self._keys.refuse(key, f"must be {only}: found {number}, which is not a router that edgeinfer knows here")
        return _FUNCTIONS.get(number, own)

    def _groups(self) -> tuple[int, int]:
        """Groups of experts, and how many of them a token chooses from."""
        n_groups = self._keys.integer("expert_group_count", 0, self._n_experts, default=0) or 1
        if n_groups == 1:
            return 1, 1
        size, rest = divmod(self._n_experts, n_groups)
        if rest or size < 2:
            reason = f"must divide the {self._n_experts} experts into groups of 2 or more: found {n_groups}"
            self._keys.refuse("expert_group_count", reason)
        n_used_groups = self._keys.integer("expert_group_used_count", 1, n_groups)
        if n_used_groups * size < self._n_used:
            reason = f"must be enough to have {self._n_used} experts in groups of {size}: found {n_used_groups}"
            self._keys.refuse("expert_group_used_count", reason)
        return n_groups, n_used_groups

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def _tensors(self, prefix: str) -> dict[str, Any]:
        """The tensors of a layer, by role."""
        recipe, there = self._recipe, self._keys.file.tensors
        names = dict(_ALWAYS)
        names |= {role: name for role, name in _SPECIAL.items() if role in recipe.required}
        names |= {role: name for role, name in _SPECIAL.items() if role in recipe.optional and prefix + name in there}
        names |= _SHARED if self._n_ff_shared else {}
        names |= {"shared_router": _SHARED_ROUTER} if recipe.shared_router else {}
        names |= {role: name for role, name in _SCALES.items() if prefix + name in there}
        return {role: prefix + name for role, name in names.items()} | self._gate_and_up(prefix)

    def _plain_tensors(self, prefix: str) -> dict[str, Any]:
        """The same of experts without gates."""
        n_latent = self._keys.integer("moe_latent_size", 0, 1 << 20, default=0)
        refs = {role: ref for role, ref in self._tensors(prefix).items() if role not in ("gate_scale", "shared_gate")}
        latent = {f"latent_{role}": f"{prefix}ffn_latent_{role}.weight" for role in ("down", "up") if n_latent}
        return refs | {"gate": refs["up"], "n_latent": n_latent, **latent}

    def _gate_and_up(self, prefix: str) -> dict[str, ExpertsRef]:
        """Their matrices and biases: two tensors, or parts of one, whose first rows are the gate's."""
        n_ff, there = self._n_ff, self._keys.file.tensors
        kinds = {"": "weight", "_bias": "bias"} if "gate_bias" in self._recipe.required else {"": "weight"}
        refs: dict[str, ExpertsRef] = {}
        for ending, kind in kinds.items():
            both = f"{prefix}ffn_gate_up_exps.{kind}"
            if both in there:
                refs |= {"gate" + ending: ExpertRows(both, 0, n_ff), "up" + ending: ExpertRows(both, n_ff, 2 * n_ff)}
            else:
                refs |= {f"{role}{ending}": f"{prefix}ffn_{role}_exps.{kind}" for role in ("gate", "up")}
        scale = f"{prefix}ffn_gate_up_exps.scale"
        return refs | ({"gate_scale": scale, "up_scale": scale} if scale in there else {})
