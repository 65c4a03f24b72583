"""How the checkpoints of one architecture become GGUF, as data; exporters/architectures/ has one for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from edgeinfer.exporters.source import SourceTensor
from edgeinfer.models.gguf import MetadataValue

if TYPE_CHECKING:
    from edgeinfer.exporters.checkpoint import Checkpoint
    from edgeinfer.exporters.conversion.model import Model

Keys = dict[str, MetadataValue]

# Names of modules in a layer of Hugging Face, and what they are after "blk.<index>." in GGUF.
ATTENTION = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
}
NORMS = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight"}
DENSE = {
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
QKV_BIASES = {
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
}
BIASES = {**QKV_BIASES, "self_attn.o_proj.bias": "attn_output.bias"}
QK_NORMS = {"self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight"}
NORMS_AFTER = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
GATED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def shared_experts(module: str) -> dict[str, str]:
    """Names of a network that every token goes through beside the experts."""
    return {f"{module}.{theirs}.weight": f"ffn_{ours}_shexp.weight" for theirs, ours in GATED.items()}


@dataclass(frozen=True)
class ExpertNames:
    """Where the experts of a checkpoint are."""

    module: str = "mlp.experts"  # in a layer
    # "gate", "up" and "down" by their names after "<module>.<number>."
    matrices: Mapping[str, str] = field(default_factory=lambda: GATED)
    router: str = "mlp.gate.weight"  # its weight
    # count, used: the keys of config.json, of which the first that is there counts
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    used: str = "num_experts_per_tok"
    # more, optional: further tensors of a layer with experts, as in Recipe
    more: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    joined: bool = False  # whether gate and up stay one tensor, where the checkpoint has them so
    may_lack: bool = False  # whether the count is missing, or null, in models without any


def _no_keys(model: Model) -> Keys:
    return {}


def _no_tensors(model: Model) -> list[SourceTensor]:
    return []


def _no_blocks(model: Model) -> Sequence[str]:
    return ()


def _unchanged(model: Model, tensor: SourceTensor) -> SourceTensor:
    return tensor


def _no_other(checkpoint: Checkpoint) -> Recipe | None:
    return None


def _everywhere(model: Model, layer: int) -> bool:
    return True


@dataclass(frozen=True)
class Recipe:
    """How one kind of checkpoint becomes a GGUF file; what most have in common is not mentioned."""

    name: str  # general.architecture
    # classes, model_types: of config.json, which say what a checkpoint is
    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what transformers takes for keys that config.json lacks
    # further spellings of keys of config.json, to the usual ones; where a file has both, these count
    spellings: Mapping[str, str] = field(default_factory=dict)
    # keys of config.json that would ask for another model, with the values that this one has, None for absent
    fixed: Mapping[str, Sequence[object]] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()  # keys that `keys` or `check` look at
    # attention, norms, dense, optional: tensors of a layer, those of Hugging Face to those of GGUF; `dense` in layers
    # without experts, `optional` where the checkpoint has them
    attention: Mapping[str, str] = field(default_factory=lambda: ATTENTION)
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    dense: Mapping[str, str] = field(default_factory=lambda: DENSE)
    optional: Mapping[str, str] = field(default_factory=dict)
    # those of a layer that has them in place of attention; in which layers, the tensors tell
    recurrent: Mapping[str, str] = field(default_factory=dict)
    final_norm: tuple[str, str] = ("model.norm.weight", "output_norm.weight")  # theirs and ours
    experts: ExpertNames | None = None  # where they are
    has_experts: Callable[[Model, int], bool] = _everywhere  # in which layers
    # further tensors, whose names in the checkpoint they take with Model.take
    special: Callable[[Model], list[SourceTensor]] = _no_tensors
    # what stands before the names of each block that drafts (MTP) and follows the layers in the file
    nextn: Callable[[Model], Sequence[str]] = _no_blocks
    # a tensor that has its GGUF name as the file has it: in another shape, in another order or as other numbers
    changed: Callable[[Model, SourceTensor], SourceTensor] = _unchanged
    interleaved: bool = False  # whether queries and keys are permuted to pairs that stand side by side
    norm_shift: float = 0.0  # what is added to the weights of norms
    plain_norms: frozenset[str] = frozenset()  # by GGUF names without the layer, those that nothing is added to
    # whether there may, must or cannot be an output matrix beside the embeddings
    output: Literal["optional", "required", "tied"] = "optional"
    # ways to scale the rotation for long contexts, beyond those that every architecture has
    rope_kinds: frozenset[str] = frozenset()
    part_rotated: bool = False  # whether a part of each head may be rotated
    keys: Callable[[Model], Keys] = _no_keys  # metadata beyond the common; last, so that it may replace
    check: Callable[[Model], None] = lambda model: None  # refuses what cannot be converted
    # another recipe for checkpoints of these classes that are of another architecture, None for the others
    instead: Callable[[Checkpoint], Recipe | None] = _no_other
    pre: str | None = None  # the pre-tokeniser that the file names, of those that cut alike
    cuts_vocabulary: bool = False  # whether rows of the embeddings after the last token are left out
