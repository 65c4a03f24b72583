"""How long passes of a model would take here, measured on made-up weights: a few layers stand for all of them.

Needs the header of the file only. Layers of the real shapes and formats, with bytes that mean nothing, run through the
real decoder; the speed does not depend on the values. What attention costs by length of the context is measured with
layers that have little else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import _core
from edgeinfer.backends.native.busy import Busy
from edgeinfer.backends.native.config import add_inputs, decoder_config
from edgeinfer.backends.native.machine import best_isa
from edgeinfer.backends.native.model import NativeModel, assemble
from edgeinfer.backends.native.session import NativeSession
from edgeinfer.backends.native.tuning import LEAST_BYTES, Prefetch, user_choice
from edgeinfer.backends.native.weights import (
    Packing,
    Part,
    inputs_of,
    is_mostly_ternary,
    map_weights,
    packed_bytes,
    parts_of,
)
from edgeinfer.common.settings import CacheType, LoadSettings, TernaryBits
from edgeinfer.common.types import Device, LogitsRows, MemoryPlan, MemoryUse
from edgeinfer.models import (
    Attention,
    Dense,
    Experts,
    Layer,
    LayerEnd,
    ModelSpec,
    PlainDense,
    PlainExperts,
    Weight,
)
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.spec import ExpertRows, TensorRows

SIZES = (1, 2, 4, 8, 16)  # tokens of a pass that are timed, and one long pass for prompts
PROMPT = 32  # a longer pass takes as long for each token
MOST_BYTES = 1 << 30  # of made-up weights: what needs more is not tried
_LAYER_BYTES, _OUTPUT_BYTES = 64 << 20, 32 << 20  # more than most caches have
_CONTEXT, _ROWS, _ATTENTION_LAYERS, _NARROW = 512, 256, 4, 64  # of what times attention; _NARROW: its n_embd
_OTHER_BYTES = 48 << 20
_TRIES = 3
_FILL = 0x3C  # about 1 as a half float, 0.01 as a float: nothing overflows, nothing is denormal
_SECONDS = 0.1  # for passes of several tokens
_ALIGNMENT = 64
_BLOCK = 256  # of rows, in every format


@dataclass(frozen=True)
class PassTimes:
    """Seconds of parts of a pass, of the whole model."""

    # layers, output: by number of tokens, with an empty context; output is the matrix after the last layer, for all of
    # them
    layers: Mapping[int, float]
    output: Mapping[int, float]
    # of attention for one token, for each layer and position that it sees; in long passes it is row_position_long
    row_position: float
    row_position_long: float
    was_disturbed: bool  # other processes had the cores meanwhile


def time_passes(
    model: ModelFile,
    spec: ModelSpec,
    device: Device,
    cache_type: CacheType,
    bits: TernaryBits,
    choices: Mapping[int, Prefetch] | None = None,
) -> PassTimes | None:
    """What passes would take, in about half a second; None where the layers are too large to be tried.

    choices: how the model reads its weights, of tuning.kept_choices; None tries some.
    """
    device = Device(device.n_threads, device.isa or best_isa())
    trial = _few_layers(model, spec, bits)
    parts = _parts(model, trial, bits)
    if packed_bytes(parts) > MOST_BYTES:
        return None
    busy = Busy(device.n_threads)
    layer_bytes, output_bytes = weight_bytes(model, spec, bits)
    with _Made(trial, parts, PROMPT, device, cache_type) as session:
        if layer_bytes + output_bytes >= LEAST_BYTES and user_choice() != "off":
            _choose_reading(session, choices, is_mostly_ternary(parts))
        layers, output = _times(session, busy)
    row_position, row_position_long = _attention(spec, device, cache_type, busy)
    more_layers = layer_bytes / max(1, packed_bytes([part for part in parts if part.block]))
    more_rows = spec.n_logits / max(1, trial.n_logits)
    return PassTimes(
        {n: more_layers * seconds for n, seconds in layers.items()},
        {n: more_rows * seconds for n, seconds in output.items()},
        row_position,
        row_position_long,
        busy.was_disturbed,
    )


def _choose_reading(session: NativeSession, choices: Mapping[int, Prefetch] | None, is_ternary: bool) -> None:
    """Read weights as the model does: as it was tuned, or in the best of some ways for one token."""
    decoder = session.model.decoder()
    known = Prefetch(*decoder.prefetch(is_ternary, 1))
    if choices is None:
        ways = [known, known._replace(at_once=2), known._replace(at_once=2, ahead=2048)]
        choices = {1: min(ways, key=lambda way: _seconds_of_one(session, way, is_ternary))}
    for n, choice in choices.items():
        with suppress(ValueError, TypeError):  # one that this decoder lacks
            decoder.set_prefetch(is_ternary, n, choice)


def _seconds_of_one(session: NativeSession, way: Prefetch, is_ternary: bool) -> float:
    """The least of some passes of one token, infinity for a way that this decoder lacks."""
    try:
        session.model.decoder().set_prefetch(is_ternary, 1, way)
    except ValueError:
        return math.inf
    least = math.inf
    for _ in range(_TRIES):
        started = time.perf_counter()
        session.forward([0], logits=())
        least = min(least, time.perf_counter() - started)
        session.commit(())
    return least


def _times(session: NativeSession, busy: Busy) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of the layers, and of the output matrix, by number of tokens."""
    tokens = np.zeros(PROMPT, np.int32)

    def run(n: int, logits: LogitsRows) -> float:
        seconds = busy.seconds(lambda: session.forward(tokens[:n], logits=logits))
        session.commit(())
        return seconds

    layers: dict[int, float] = {}
    whole: dict[int, float] = {}
    run(4, "all")  # warm-up
    deadline = time.perf_counter() + _SECONDS
    for n in (*SIZES, PROMPT):
        for turn in range(_TRIES if n < 8 else 2):
            if turn and n != PROMPT and time.perf_counter() > deadline:
                break
            layers[n] = min(run(n, ()), layers.get(n, math.inf))
            if n != PROMPT:
                whole[n] = min(run(n, "all"), whole.get(n, math.inf))
    return layers, {n: max(0.0, seconds - layers[n]) for n, seconds in whole.items()}


def _attention(spec: ModelSpec, device: Device, cache_type: CacheType, busy: Busy) -> tuple[float, float]:
    """Seconds of attention of one row for each position, of one layer: alone, and in a long pass."""
    blocks = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    n_layers = min(_ATTENTION_LAYERS, len(blocks))
    if not n_layers:
        return 0.0, 0.0
    narrow = _narrow(spec, blocks[:n_layers])
    other = _filled(_OTHER_BYTES).view(np.uint64)
    with _Made(narrow, list(_plain_parts(narrow)), _ROWS, device, cache_type, _CONTEXT + _ROWS) as session:
        tokens = np.zeros(_ROWS, np.int32)

        def alone() -> float:
            other.sum()  # as the weights of a real pass do, it takes the keys and values out of the caches
            return busy.seconds(lambda: session.forward(tokens[:1], logits=()))

        alone()
        near = min(alone() for _ in range(_TRIES))
        long = []
        for _ in range(_CONTEXT // _ROWS):
            long.append(busy.seconds(lambda: session.forward(tokens, logits=())))
            session.commit(range(_ROWS))
        far = min(alone() for _ in range(_TRIES))
    rise = (long[-1] - long[0]) / (len(long) - 1) / (_ROWS * _ROWS)
    return max(0.0, far - near) / (n_layers * _CONTEXT), max(0.0, rise) / n_layers


# ---- what is tried ---------------------------------------------------------------------------------------------------


def _few_layers(model: ModelFile, spec: ModelSpec, bits: TernaryBits) -> ModelSpec:
    """A model of some layers of this one. The experts of a token are one network."""
    n_layers = spec.n_layers
    each = weight_bytes(model, spec, bits)[0] / n_layers
    n = min(n_layers, max(1, math.ceil(_LAYER_BYTES / max(1.0, each))))
    layers = tuple(_alone(_without_experts(spec.layers[i * n_layers // n])) for i in range(n))
    trial = replace(spec, n_layers=n, layers=layers, layer_inputs=None)
    if isinstance(spec.output, str) and model.tensors[spec.output].type != GGMLType.I2_S:
        row_bytes = model.tensors[spec.output].n_bytes / spec.n_logits
        rows = min(spec.n_logits, 16 * math.ceil(_OUTPUT_BYTES / row_bytes / 16))
        trial = replace(trial, output=TensorRows(spec.output, 0, rows), n_logits=rows)
    return replace(trial, n_vocab=trial.n_logits)


def _alone(layer: Layer) -> Layer:
    """A layer that needs no other one: with its own keys, and without what all layers have for each token."""
    mixer, end = layer.mixer, layer.end
    if isinstance(mixer, Attention):
        mixer = replace(mixer, kv_of=None)
    if end is not None:
        end = LayerEnd(end.n_embd, scale=end.scale) if end.scale else None
    return replace(layer, mixer=mixer, end=end, is_beside=False)


def _without_experts(layer: Layer) -> Layer:
    block = layer.ffn
    if not isinstance(block, Experts):
        return layer
    n_ff = block.n_used * block.n_ff + block.n_ff_shared
    if isinstance(block, PlainExperts):
        if block.n_latent:  # a network with as many numbers as the experts of a token and what leads to them and back
            routed = block.n_used * block.n_ff * block.n_latent / block.n_embd
            n_ff = _BLOCK * math.ceil((routed + block.n_latent + block.n_ff_shared) / _BLOCK)
        return replace(layer, ffn=PlainDense(block.n_embd, n_ff, _name(block.up), _name(block.down), norm=block.norm))
    names = (_name(block.gate), _name(block.up), _name(block.down))
    dense = Dense(block.n_embd, n_ff, *names, norm=block.norm, post_norm=block.post_norm)
    return replace(layer, ffn=dense)


def _name(tensor: str | ExpertRows) -> str:
    return tensor if isinstance(tensor, str) else tensor.name


def _parts(model: ModelFile, trial: ModelSpec, bits: TernaryBits) -> list[Part]:
    """What the trial has in memory, in order."""
    packing = Packing(ternary_bits=bits)
    made = []
    for weight in trial.weights():
        info = model.tensors[_name(weight.tensor)] if isinstance(weight.tensor, str) else None
        if info is not None and len(info.shape) == 3:  # experts, as one matrix
            made.append(_made_up(weight, info.type, packing.format_of(info)))
        else:
            made += parts_of(model, [weight], packing)
    return made


def _made_up(weight: Weight, kind: GGMLType, packed_as: int) -> Part:
    return Part(weight.block, weight.role, "", kind, packed_as, weight.shape, 0)


def weight_bytes(model: ModelFile, spec: ModelSpec, bits: TernaryBits) -> tuple[int, int]:
    """Packed bytes that one token reads: of the layers, with the experts of one token, and of the output matrix."""
    dense = replace(spec, layers=tuple(map(_without_experts, spec.layers)))
    parts = _parts(model, dense, bits)
    output = [part for part in parts if not part.block]
    return packed_bytes([part for part in parts if part.block]), packed_bytes(output)


def _narrow(spec: ModelSpec, blocks: Sequence[Attention]) -> ModelSpec:
    """Layers with the attention of this model, but next to no weights."""
    few = []
    for block in blocks:
        attention: Attention = replace(block, n_embd=_NARROW, n_in=_NARROW, window=None, kv_of=None)
        few.append(Layer(attention, Dense(_NARROW, _NARROW, "", "", "", norm="")))
    made = replace(spec, layers=tuple(few), output="", output_norm="", token_embd="", layer_inputs=None)
    return replace(made, n_layers=len(few), n_vocab=_NARROW, n_embd=_NARROW, n_logits=_NARROW)


def _plain_parts(spec: ModelSpec) -> Iterator[Part]:
    for weight in spec.weights():
        kind = GGMLType.F16 if len(weight.shape) > 1 else GGMLType.F32
        yield _made_up(weight, kind, int(kind))


class _Made:
    """A session of a made-up model; a context."""

    def __init__(
        self,
        spec: ModelSpec,
        parts: Sequence[Part],
        n_batch: int,
        device: Device,
        cache_type: CacheType,
        n_ctx: int | None = None,
    ) -> None:
        weights = _core.Weights(packed_bytes(parts), _filled(packed_bytes(parts)))
        map_weights(weights, parts)
        _set_embedding(weights, spec.n_vocab, spec.n_embd)
        plan = MemoryPlan(LoadSettings(n_ctx or n_batch, n_batch=n_batch, cache_type=cache_type), MemoryUse(0, 0, 0))
        config = decoder_config(spec, plan.n_ctx, n_batch)
        add_inputs(config, inputs_of(parts))
        threads = _core.Threads(device.n_threads)
        made = assemble(spec, config, _core.FrontConfig(), plan, device, weights, threads, None)
        self._model = NativeModel(made, spec, plan)

    def __enter__(self) -> NativeSession:
        self._session = self._model.session()
        return self._session

    def __exit__(self, *error: object) -> None:
        self._session.close()
        self._model.close()


def _set_embedding(weights: _core.Weights, n_vocab: int, n_embd: int) -> None:
    """Embeddings of which only the first row takes memory."""
    rows = np.zeros(2 * n_vocab * n_embd, np.uint8)  # pages come when they are written
    rows[: 2 * n_embd] = _FILL
    weights.set_embedding(int(GGMLType.F16), n_vocab, n_embd, rows)


def _filled(n_bytes: int) -> NDArray[np.uint8]:
    """Bytes at a whole cache line."""
    space = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    first = -space.ctypes.data % _ALIGNMENT
    space[first : first + n_bytes] = _FILL
    return space[first : first + n_bytes]
