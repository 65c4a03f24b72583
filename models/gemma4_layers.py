"""What the layers of Gemma 4 and of its assistants have in common: kinds of attention, network, and scale."""

from __future__ import annotations

from edgeinfer.models import rope
from edgeinfer.models.reader import Reader
from edgeinfer.models.spec import Attention, Dense, LayerEnd, RopeSpec

PERIOD = 6  # the last of which sees everything, where the file does not say it


def attention_by_kind(reader: Reader, n_embd: int) -> dict[bool, Attention]:
    """What the layers with a window (True) have in common, and the others. Tensors are those of layer 0."""
    n_heads = reader.integer("attention.head_count", 1, 1 << 14)
    window = reader.integer("attention.sliding_window", 1, 1 << 30)
    found = {}
    for is_windowed, ending in ((False, ""), (True, "_swa")):
        head_dim = reader.integer(f"attention.key_length{ending}", 2, 1 << 14)
        for key in (f"attention.value_length{ending}", f"rope.dimension_count{ending}"):
            if reader.integer(key, 2, 1 << 14, default=head_dim) != head_dim or head_dim % 2:
                reader.refuse(key, f"must equal the key length {head_dim}, which must be even")
        found[is_windowed] = Attention(
            n_embd=n_embd,
            n_in=n_embd,
            n_heads=n_heads,
            n_kv_heads=1,
            head_dim=head_dim,
            scale=1.0,
            q="",
            k="",
            v="",
            output="",
            rope=_rotation(reader, head_dim, is_windowed),
            window=window if is_windowed else None,
            qk_norm="per_head",
            normed_values=True,
        )
    return found


def _rotation(reader: Reader, head_dim: int, is_windowed: bool) -> RopeSpec:
    """The rotation of a kind of layer. rope_freqs.weight is of those that see everything."""
    base = reader.rope_base()
    if is_windowed:
        base = reader.number("rope.freq_base_swa", 1.0, 1e15, default=base)
    plain = RopeSpec("halves", head_dim, tuple(rope.inverse_frequencies(base, head_dim)))
    return plain if is_windowed else reader.with_factors(plain)


def dense_network(index: int, n_embd: int, n_ff: int) -> Dense:
    """The network of a layer without experts."""
    prefix = f"blk.{index}."
    return Dense(
        n_embd=n_embd,
        n_ff=n_ff,
        gate=f"{prefix}ffn_gate.weight",
        up=f"{prefix}ffn_up.weight",
        down=f"{prefix}ffn_down.weight",
        activation="gelu_tanh",
        norm=f"{prefix}ffn_norm.weight",
        post_norm=f"{prefix}post_ffw_norm.weight",
    )


def scale_of_layer(reader: Reader, index: int, n_embd: int) -> LayerEnd | None:
    """What multiplies the residual stream after a layer, None in files without."""
    scale = f"blk.{index}.layer_output_scale.weight"
    return LayerEnd(n_embd, scale=scale) if scale in reader.file.tensors else None
