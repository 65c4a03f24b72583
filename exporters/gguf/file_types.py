"""What `--type Q4_K_M` and its kin mean: the type of each tensor, as llama.cpp's `llama-quantize` chooses it.

A file type has a type for most matrices; some categories of tensors get more bits, by layer, by the number of experts,
and by whether there is an importance matrix. llama.cpp counts layers in the order of its own list, tensors without a
layer first and then by layer and name, whatever their order in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.exporters.gguf.writer import Metadata
from edgeinfer.exporters.source import SourceTensor
from edgeinfer.models.arrays import Array
from edgeinfer.models.gguf import TERNARY_TYPES, GGMLType

QUANTIZATION_VERSION = 2  # general.quantization_version of the block layouts that are written


@dataclass(frozen=True)
class FileType:
    """A kind of file.  number: general.file_type.  type: of most matrices."""

    name: str
    number: int
    type: GGMLType


FILE_TYPES = {
    name: FileType(name, number, GGMLType[type])
    for name, number, type in (
        ("F32", 0, "F32"),
        ("F16", 1, "F16"),
        ("BF16", 32, "BF16"),
        ("Q8_0", 7, "Q8_0"),
        ("Q4_0", 2, "Q4_0"),
        ("Q4_1", 3, "Q4_1"),
        ("Q5_0", 8, "Q5_0"),
        ("Q5_1", 9, "Q5_1"),
        ("Q2_K", 10, "Q2_K"),
        ("Q2_K_S", 21, "Q2_K"),
        ("Q3_K_S", 11, "Q3_K"),
        ("Q3_K_M", 12, "Q3_K"),
        ("Q3_K_L", 13, "Q3_K"),
        ("Q4_K_S", 14, "Q4_K"),
        ("Q4_K_M", 15, "Q4_K"),
        ("Q5_K_S", 16, "Q5_K"),
        ("Q5_K_M", 17, "Q5_K"),
        ("Q6_K", 18, "Q6_K"),
    )
}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # as llama-quantize has them
_NUMBERS = {"TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "I2_S": 40}  # of files of mostly such tensors, which are not chosen
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_INTEGERS = (GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64, GGMLType.F64)

# Parts of names of tensors that stay as they are: norms, routers, small matrices.
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight", "per_layer_model_proj")
_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
_CATEGORIES = (  # the first part that a name has says what a tensor is
    ("attn_qkv.weight", "attn_v"),
    ("attn_kv_b.weight", "attn_v"),
    ("attn_v.weight", "attn_v"),
    ("attn_k.weight", "attn_k"),
    ("attn_q.weight", "attn_q"),
    ("attn_output.weight", "attn_output"),
    ("ffn_up", "ffn_up"),
    ("ffn_gate", "ffn_gate"),
    ("ffn_down", "ffn_down"),
)
_FALLBACKS = {  # where a row is no multiple of 256
    GGMLType.Q2_K: GGMLType.Q4_0,
    GGMLType.Q3_K: GGMLType.Q4_0,
    GGMLType.Q4_K: GGMLType.Q5_0,
    GGMLType.Q5_K: GGMLType.Q5_1,
    GGMLType.Q6_K: GGMLType.Q8_0,
}


def file_type(name: str) -> FileType:
    """The file type with a name such as "Q4_K_M", in any case. Raises InvalidArgument."""
    known = name.upper()
    known = _ALIASES.get(known, known)
    if known not in FILE_TYPES:
        raise InvalidArgument(f"there is no type {name!r}; there are {', '.join(FILE_TYPES)} and auto")
    return FILE_TYPES[known]


def name_of_file_type(number: int) -> str | None:
    """The name that general.file_type stands for; None for one that is not known here."""
    numbers = _NUMBERS | {name: kind.number for name, kind in FILE_TYPES.items()}
    return next((name for name, known in numbers.items() if known == number), None)


def tensor_types(
    kind: FileType, metadata: Metadata, tensors: Sequence[SourceTensor], has_imatrix: bool = False
) -> dict[str, GGMLType]:
    """The type of each tensor in a file of a kind, in the order of the tensors.

    What is not quantised (vectors, norms, routers) is F32. Integers keep their type, and so do ternary and MXFP4
    matrices where the kind is no float.
    """
    choice = _Choice(kind, _Model.of(metadata, tensors), has_imatrix)
    chosen = {tensor.name: choice.type_of(tensor) for tensor in sorted(tensors, key=_place)}
    return {tensor.name: chosen[tensor.name] for tensor in tensors}


def source_types(tensors: Sequence[SourceTensor]) -> dict[str, GGMLType]:
    """The type of each tensor where none is asked for: that of the source, F32 for what is never quantised."""
    return {tensor.name: tensor.type if is_quantised(tensor) else _unquantised(tensor) for tensor in tensors}


def file_type_number(types: Mapping[str, GGMLType], tensors: Sequence[SourceTensor]) -> int:
    """general.file_type of a file whose tensors have some types: that of the type that most weights have."""
    weights: Counter[str] = Counter()
    for tensor in tensors:
        if is_quantised(tensor):
            weights[types[tensor.name].name] += tensor.n_rows * tensor.n_in
    if not weights:
        return 0
    name = weights.most_common(1)[0][0]
    numbers = {each.type.name: each.number for each in reversed(FILE_TYPES.values())}
    return (_NUMBERS | numbers).get(name, 0)


def is_quantised(tensor: SourceTensor) -> bool:
    """Whether a tensor takes the type of the file: a matrix, or those of experts, no norm and no router."""
    n_axes = len(tensor.shape)
    while n_axes > 1 and tensor.shape[len(tensor.shape) - n_axes] == 1:  # an axis of one in front counts for nothing
        n_axes -= 1
    name = tensor.name
    if n_axes < 2 or not name.endswith("weight") or name in _KEPT_NAMES:
        return False
    return tensor.type not in _INTEGERS and not any(part in name for part in _KEPT)


def fitting(type: GGMLType, n_in: int) -> GGMLType:
    """The type, or what stands for it where rows of n_in are no whole blocks of it."""
    if n_in % type.block_elements == 0:
        return type
    type = _FALLBACKS.get(type, type)
    return type if n_in % type.block_elements == 0 else GGMLType.F16


def _unquantised(tensor: SourceTensor) -> GGMLType:
    return GGMLType.F32 if tensor.type in _FLOATS else tensor.type


def _place(tensor: SourceTensor) -> tuple[int, str]:
    return _layer(tensor.name), tensor.name


def _layer(name: str) -> int:
    """The layer of a tensor, -1 for none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 2 and parts[1].isdigit() else -1


def _category(name: str) -> str:
    if name in ("output.weight", "token_embd.weight", "per_layer_token_embd.weight"):
        return "output" if name == "output.weight" else "token_embd"
    return next((category for part, category in _CATEGORIES if part in name), "other")


def _more_bits(layer: int, n_layers: int) -> bool:
    """The layers that get more bits: the first and the last eighth, and each third between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


@dataclass(frozen=True)
class _Model:
    """What the choice needs to know of a model.  n_shared: query heads for each head of keys."""

    n_layers: int
    n_experts: int
    n_shared: int
    is_tied: bool
    is_70b: bool
    n_values: int

    @classmethod
    def of(cls, metadata: Metadata, tensors: Sequence[SourceTensor]) -> _Model:
        architecture = metadata.get("general.architecture", "")

        def number(key: str, default: int) -> int:
            value = metadata.get(f"{architecture}.{key}", default)
            if isinstance(value, Array | list):  # a value for each layer, the first of which counts
                value = value[0] if len(value) else default
            return int(value) if isinstance(value, int | float) else default

        n_heads = number("attention.head_count", 1)
        n_kv_heads, n_layers = number("attention.head_count_kv", n_heads), number("block_count", 0)
        n_experts = number("expert_count", 0)
        is_70b = n_layers == 80 and (architecture == "qwen2" or (architecture == "llama" and n_kv_heads != n_heads))
        return cls(
            n_layers,
            n_experts,
            n_heads // n_kv_heads if n_kv_heads else 0,
            all(tensor.name != "output.weight" for tensor in tensors),
            is_70b and not (architecture == "llama" and n_experts == 8),
            sum(_category(tensor.name) == "attn_v" for tensor in tensors),
        )


@dataclass
class _Choice:
    """The choice of types, tensor by tensor in llama.cpp's order.  seen: tensors of each category so far."""

    kind: FileType
    model: _Model
    has_imatrix: bool
    seen: Counter[str] = field(default_factory=Counter)

    def type_of(self, tensor: SourceTensor) -> GGMLType:
        if not is_quantised(tensor):
            return _unquantised(tensor)
        is_float = self.kind.type in _FLOATS
        if is_float:
            return self.kind.type
        is_kept = tensor.type in TERNARY_TYPES or tensor.type == GGMLType.MXFP4
        return tensor.type if is_kept else fitting(self._wanted(tensor), tensor.n_in)

    def _wanted(self, tensor: SourceTensor) -> GGMLType:
        """The type by category, whether or not the rows fit it."""
        category = _category(tensor.name)
        if category == "output" or (category == "token_embd" and self.model.is_tied):
            return self._output(tensor.n_in)
        rule = _RULES.get(category)
        wanted = rule(self, tensor) if rule is not None else None
        self.seen[category] += 1
        return self.kind.type if wanted is None else GGMLType[wanted]

    def _output(self, n_in: int) -> GGMLType:
        if self.kind.type == GGMLType.Q8_0 or n_in % self.kind.type.block_elements:
            return GGMLType.Q8_0
        return GGMLType.Q6_K

    def _layer(self, tensor: SourceTensor) -> int:
        """The layer, which models without experts count by their tensors."""
        return _layer(tensor.name) if self.model.n_experts > 1 else self.seen[_category(tensor.name)]

    def value(self, tensor: SourceTensor) -> str | None:
        """attn_v, or one matrix of which the values are a part."""
        if self.model.n_experts == 8:
            return "Q8_0"
        wanted = self._of_values()
        is_few = (wanted or self.kind.type.name) in ("Q3_K", "Q4_K")
        return "Q5_K" if self.model.is_70b and is_few else wanted

    def _of_values(self) -> str | None:
        n_seen, name = self.seen["attn_v"], self.kind.name
        is_shared = self.model.n_shared >= 4
        if name == "Q2_K":
            return "Q4_K" if is_shared else "Q3_K"
        if name == "Q2_K_S":
            return "Q4_K" if is_shared else None
        if name == "Q3_K_M":
            return "Q5_K" if n_seen < 2 else "Q4_K"
        if name in ("Q4_K_M", "Q5_K_M"):
            return "Q6_K" if _more_bits(n_seen, self.model.n_values) else None
        if name == "Q4_K_S":
            return "Q5_K" if n_seen < 4 else None
        return "Q5_K" if name == "Q3_K_L" else None

    def key(self, tensor: SourceTensor) -> str | None:
        """attn_k"""
        return "Q8_0" if self.model.n_experts == 8 else None

    def down(self, tensor: SourceTensor) -> str | None:
        """ffn_down"""
        layer, n_layers, name = self._layer(tensor), self.model.n_layers, self.kind.name
        is_first = layer < n_layers // 8
        if name == "Q3_K_M":
            return "Q5_K" if layer < n_layers // 16 else "Q4_K"
        if name in ("Q4_K_M", "Q5_K_M"):
            return "Q6_K" if _more_bits(layer, n_layers) else None
        if name in ("Q4_0", "Q5_0"):  # even with an importance matrix, the first of them can go astray
            return name[:3] + "1" if self.has_imatrix and is_first else None
        always = {"Q2_K": "Q3_K", "Q3_K_L": "Q5_K"}.get(name)
        return always or ({"Q2_K_S": "Q4_K", "Q4_K_S": "Q5_K"}.get(name) if is_first else None)

    def output_of_attention(self, tensor: SourceTensor) -> str | None:
        """attn_output"""
        if self.model.n_experts == 8:
            return "Q5_K" if self.kind.name in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M") else None
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(self.kind.name)


_RULES: dict[str, Callable[[_Choice, SourceTensor], str | None]] = {
    "attn_v": _Choice.value,
    "attn_k": _Choice.key,
    "ffn_down": _Choice.down,
    "attn_output": _Choice.output_of_attention,
}
