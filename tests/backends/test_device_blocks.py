"""OpenCL and ONNX Runtime walk blocks: each layer by its own, and what they do not know is refused by name."""

from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_sessions import Kind, backend_of, difference, head_backend_of, some_tokens
from more_blocks import experts_like
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.onnx import decoder as onnx_blocks
from edgeinfer.backends.opencl import parts as opencl_blocks
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Attention, Dense, ModelSpec, RopeSpec, read_spec
from edgeinfer.models.gguf import ModelFile


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    return ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "F32"))


def with_block(spec: ModelSpec, role: str, block: object) -> ModelSpec:
    """The spec with another block in its last layer."""
    changed: dict[str, Any] = {role: block}
    return replace(spec, layers=(*spec.layers[:-1], replace(spec.layers[-1], **changed)))


def with_field(block: Any, name: str, value: object) -> Any:
    """A block of a subclass with one field more, whose default is None."""
    extended = make_dataclass(f"{type(block).__name__}Next", [(name, object, None)], bases=(type(block),), frozen=True)
    return extended(**{field.name: getattr(block, field.name) for field in fields(block)}, **{name: value})


def known_to(kind: Kind) -> dict[type, tuple[str, ...]]:
    return opencl_blocks.BLOCKS if kind == "opencl" else onnx_blocks.BLOCKS


@dataclass(frozen=True)
class ShortConv:
    """A kind of block that no device has."""

    n_embd: int


@pytest.mark.parametrize("role", ["mixer", "ffn"])
def test_a_block_of_an_unknown_kind_is_refused_by_name(kind: Kind, file: ModelFile, role: str) -> None:
    spec, backend = read_spec(file), backend_of(kind)
    name, plan = kind.split()[0], backend.plan(file, spec, LoadSettings(64))
    other = with_block(spec, role, ShortConv(96))
    message = f"layers.1.{role} is a block ShortConv, which the {name} backend cannot run; it runs Attention, Dense"
    with pytest.raises(UnsupportedModel, match=message):
        backend.plan(file, other, LoadSettings(64))
    with pytest.raises(UnsupportedModel, match=message):
        backend.load(file, other, plan, Device(1))


@pytest.mark.parametrize("role, field", [("mixer", "head_gate"), ("ffn", "clamp")])
def test_an_unknown_field_of_a_known_block_is_refused_by_name(
    kind: Kind, file: ModelFile, role: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, backend = read_spec(file), backend_of(kind)
    block = getattr(spec.layers[1], role)
    asked, unasked = with_field(block, field, "blk.1.further.weight"), with_field(block, field, None)
    for each in (asked, unasked):  # as if the class itself had got the field
        monkeypatch.setitem(known_to(kind), type(each), known_to(kind)[type(block)])
    plan = backend.plan(file, with_block(spec, role, unasked), LoadSettings(64))
    message = f"layers.1.{role} has {field}, which the {kind.split()[0]} backend does not know"
    with pytest.raises(UnsupportedModel, match=message):
        backend.plan(file, with_block(spec, role, asked), LoadSettings(64))
    with pytest.raises(UnsupportedModel, match=message):
        backend.load(file, with_block(spec, role, asked), plan, Device(1))


def test_experts_and_attention_sinks_are_refused_by_name(kind: Kind, file: ModelFile) -> None:
    spec, backend, name = read_spec(file), backend_of(kind), kind.split()[0]
    sinks = replace(spec.layers[1].mixer, sinks="blk.1.attn_sinks.weight")
    for role, block, message in [
        ("ffn", experts_like(spec.layers[1]), f"layers.1.ffn is a block Experts, which the {name} backend cannot run"),
        ("mixer", sinks, f"layers.1.mixer has sinks, which the {name} backend does not know"),
    ]:
        with pytest.raises(UnsupportedModel, match=message):
            backend.plan(file, with_block(spec, role, block), LoadSettings(64))


def test_attention_from_rows_of_another_length_is_refused(kind: Kind, file: ModelFile) -> None:
    spec = read_spec(file)
    wide = with_block(spec, "mixer", replace(spec.layers[1].mixer, n_in=192))
    with pytest.raises(UnsupportedModel, match="layers.1.mixer attends from rows of 192 numbers, .* the model's 96"):
        backend_of(kind).plan(file, wide, LoadSettings(64))


def test_an_unknown_field_of_the_front_of_a_head_is_refused_by_name(
    kind: Kind, file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = head_backend_of(kind, file)
    with ModelFile.open(write_tiny_head(file.path.with_name("h.gguf"), file.path)) as head:
        spec = read_head_beside(head, file, read_spec(file))
        front = with_field(spec.front, "bias", "gate.bias")
        known = opencl_blocks.FRONTS if kind == "opencl" else onnx_blocks.OF_HEADS
        monkeypatch.setitem(known, type(front), known[type(spec.front)])
        with pytest.raises(UnsupportedModel, match="front has bias, which the"):
            backend.plan(head, replace(spec, front=front), LoadSettings(64))


def test_each_layer_has_its_own_heads_rotation_window_and_activation(
    kind: Kind, file: ModelFile, rng: np.random.Generator
) -> None:
    """The second layer's rows are read as half the heads of twice the size."""
    spec = read_spec(file)
    rope = RopeSpec("halves", 16, tuple(0.3**i for i in range(8)))
    mixer = replace(
        spec.layers[1].mixer,
        n_heads=2,
        n_kv_heads=1,
        head_dim=48,
        scale=0.11,
        rope=rope,
        window=9,
        soft_cap=4.0,
    )
    other = with_block(with_block(spec, "mixer", mixer), "ffn", replace(spec.layers[1].ffn, activation="relu2"))
    tokens, found = some_tokens(rng, 40), []
    for backend in (backend_of(kind), ReferenceBackend()):
        session = backend.load(
            file, other, backend.plan(file, other, LoadSettings(64, n_batch=16)), Device(1)
        ).session()
        session.forward(tokens[:20])
        session.commit(range(20))
        of_tree = session.forward(tokens[20:26], [-1, 0, 0, 1, 1, 2], logits="all").logits
        session.commit([0, 2, 5])  # rows that move in the caches of both shapes
        found.append(np.concatenate([of_tree, session.forward(tokens[26:], logits="all").logits]))
    assert difference(*found) < 1e-3
    plain = (
        backend_of(kind)
        .load(file, spec, backend_of(kind).plan(file, spec, LoadSettings(64, n_batch=16)), Device(1))
        .session()
    )
    assert difference(plain.forward(tokens[:26], logits="all").logits[20:], found[0][:6]) > 0.1


def test_both_kinds_of_block_are_known_in_all_their_fields_but_some(kind: Kind) -> None:
    gates = {"output_gate", "gate", "gate_function"}
    unknown = {
        Attention: {"sinks", *gates, "post_norm_epsilon", "normed_values", "kv_of", "of_target"},
        Dense: {"post_norm_epsilon"},
    }
    for block, others in unknown.items():
        assert set(known_to(kind)[block]) == {field.name for field in fields(block)} - others
