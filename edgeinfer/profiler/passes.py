"""How long passes of a model are expected to take, on this machine or on another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from edgeinfer.backends.native import best_isa, build_id
from edgeinfer.backends.native.trial import PROMPT, PassTimes, time_passes, weight_bytes
from edgeinfer.backends.native.tuning import kept_choices
from edgeinfer.common import devices
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.types import Device, MemoryPlan
from edgeinfer.models import Mixer, ModelSizes, ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.offload.file_experts import experts_of, is_of_experts
from edgeinfer.profiler.hits import union_of
from edgeinfer.profiler.machine import Machine
from edgeinfer.record_cache import read_record, record_folder, record_key, write_record
from edgeinfer.speculation.calibration import default_folder, load_curve, monotonic
from edgeinfer.speculation.open import costs_key

Origin = Literal["calibrated", "made-up weights", "limits"]
_KIND, _FORMAT = "passes", 1
_MOST_SECONDS = 1e5


@dataclass(frozen=True)
class Passes:
    """Expected seconds of passes."""

    whole: Mapping[int, float]  # of a pass with all logits and an empty context, by number of tokens
    prompt: float  # of the layers for PROMPT tokens
    output: float  # of the output matrix for one token
    row_position: float  # see PassTimes
    row_position_long: float
    mixers: Sequence[Mixer | None]  # of each layer, None where all positions are seen
    # "calibrated": speculation timed passes of this model here.  "made-up weights": layers of its shapes were timed.
    # "limits": bytes over bandwidth and multiply-adds over their rate, which no engine reaches.
    origin: Origin
    expert_share: float = 0.0  # of the bytes of a token, that experts are
    n_experts: int = 0  # of a layer, 0 without experts
    n_used: int = 0
    is_disturbed: bool = False  # other processes had the cores meanwhile

    def seconds(self, n: int, n_past: int) -> float:
        """Of a pass that verifies n tokens after n_past others: c(n) is this over that of one token."""
        sizes = sorted(self.whole)
        found = float(np.interp(n, sizes, [self.whole[size] for size in sizes]))
        if n > sizes[-1]:
            found *= n / sizes[-1]
        if self.n_experts:  # n tokens need more experts than one, which are more bytes to read
            union = union_of(n, self.n_experts, self.n_used)
            found = max(found, self.whole[1] * (1.0 + self.expert_share * (union - 1.0)))
        row = self.row_position + (n - 1) * self.row_position_long
        return found + row * sum(n_past if mixer is None else mixer.n_seen(n_past) for mixer in self.mixers)

    def prompt_seconds(self, n_tokens: int, n_batch: int) -> float:
        """Until the logits after a prompt of so many tokens are there."""
        at_once = max(1, min(n_tokens, n_batch, PROMPT))
        sizes = [*sorted(self.whole), PROMPT]
        of_layers = [*(self.whole[size] for size in sizes[:-1]), self.prompt]
        each = float(np.interp(at_once, sizes, of_layers)) / at_once
        everything = n_tokens * n_tokens / 2
        seen = sum(everything if mixer is None else mixer.n_seen_in_prompt(n_tokens) for mixer in self.mixers)
        return n_tokens * each + self.output + self.row_position_long * seen


def expected_passes(
    file: ModelFile, spec: ModelSizes, plan: MemoryPlan, times: PassTimes | None, here: Machine, machine: Machine
) -> Passes:
    """What passes of a model will take on a machine.

    times: of trial_times.  here: this machine.  machine: the one that is asked for. Both have limits if it is another
    one, or there are no times.
    """
    work = Work.of(file, spec, plan)
    mixers = [layer.mixer for layer in spec.layers] if isinstance(spec, ModelSpec) else [None] * spec.n_layers
    origin: Origin = "limits" if times is None else "made-up weights"
    if times is None:
        found = work.limits(machine, plan, spec)
    else:
        found = times if machine.is_here else _elsewhere(times, here, machine)
    whole = {n: seconds + found.output.get(n, 0.0) for n, seconds in found.layers.items() if n in found.output}
    is_calibrated = times is not None and machine.is_here and not work.n_experts
    if is_calibrated and (kept := _calibrated(file, plan, here.n_threads)):
        whole, origin = whole | kept, "calibrated"
    return Passes(
        monotonic(whole),
        found.layers[PROMPT],
        found.output[1],
        found.row_position,
        found.row_position_long,
        mixers,
        origin,
        work.expert_bytes / max(1, work.n_bytes),
        work.n_experts,
        work.n_used,
        found.was_disturbed and origin == "made-up weights",
    )


@dataclass(frozen=True)
class Work:
    """What one token takes: bytes of weights and of states of recurrent layers that are read and written, those of
    experts among them, and multiply-adds of matrices.
    """

    n_bytes: int
    output_bytes: int
    expert_bytes: int
    multiply_adds: int
    n_experts: int = 0
    n_used: int = 0

    @classmethod
    def of(cls, file: ModelFile, spec: ModelSizes, plan: MemoryPlan) -> Work:
        """The work of a token of a model; of one that only llama.cpp knows, by the sizes of its tensors."""
        experts = experts_of(file)
        n_experts, n_used = (0, 0) if experts is None else (experts.n_experts, experts.n_used)
        share = n_used / n_experts if n_experts else 1.0
        output = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        n_bytes = multiply_adds = of_experts = 0.0
        for info in file.tensors.values():
            if info.name == "token_embd.weight" != output:
                continue
            part = share if is_of_experts(info.name) else 1.0
            n_bytes += part * info.n_bytes
            of_experts += part * info.n_bytes if is_of_experts(info.name) else 0
            multiply_adds += part * info.n_elements if len(info.shape) > 1 else 0
        output_bytes = file.tensors[output].n_bytes if output in file.tensors else 0
        if isinstance(spec, ModelSpec):
            layer_bytes, output_bytes = weight_bytes(file, spec, plan.ternary_bits)
            n_bytes = layer_bytes + output_bytes + sum(layer.mixer.step_bytes for layer in spec.layers)
            multiply_adds = sum(block.multiply_adds() for _, block in spec.blocks()) + spec.n_logits * spec.n_embd
        return cls(round(n_bytes), output_bytes, round(of_experts), round(multiply_adds), n_experts, n_used)

    def limits(self, machine: Machine, plan: MemoryPlan, spec: ModelSizes) -> PassTimes:
        """The least that passes can take: bytes over bandwidth, or multiply-adds over their rate."""
        read, compute = _limits_of(machine)
        of_output = self.output_bytes / max(1, self.n_bytes)
        whole = {n: max(self.n_bytes / read, n * self.multiply_adds / compute) for n in (1, 2, 4, 8, 16, 32, PROMPT)}
        position = (plan.use.kv_cache - plan.use.states) / max(1, plan.n_positions * spec.n_layers) / read
        layers = {n: seconds * (1.0 - of_output) for n, seconds in whole.items()}
        output = {n: seconds * of_output for n, seconds in whole.items()}
        return PassTimes(layers, output, position, 0.0, False)


def _limits_of(machine: Machine) -> tuple[float, float]:
    """Bytes and multiply-adds a second."""
    read, compute = machine.read_bytes_per_second, machine.multiply_adds_per_second
    if read is None or compute is None:
        raise InvalidArgument(f"{machine.name}: its limits are needed, and were not measured")
    return read, compute


def _elsewhere(times: PassTimes, here: Machine, there: Machine) -> PassTimes:
    """The times on another machine, whose engine comes as near to its limits as it does here.

    A pass is as long as reading its weights, or as its multiply-adds in a long pass, whichever is longer.
    """
    (own_read, own_compute), (read, compute) = _limits_of(here), _limits_of(there)
    slower_read, slower_compute = own_read / read, own_compute / compute
    most = max(times.output)
    each_layer, each_output = times.layers[PROMPT] / PROMPT, times.output[most] / most

    def of(seconds: Mapping[int, float], each: float) -> dict[int, float]:
        return {n: max(seconds[1] * slower_read, n * each * slower_compute) for n in seconds}

    return replace(
        times,
        layers=of(times.layers, each_layer),
        output=of(times.output, each_output),
        row_position=times.row_position * max(slower_read, slower_compute),
        row_position_long=times.row_position_long * slower_compute,
    )


# ---- what was measured before ----------------------------------------------------------------------------------------


def _calibrated(file: ModelFile, plan: MemoryPlan, n_threads: int) -> dict[int, float] | None:
    """Seconds of passes as speculation measured them with this model here, None if it did not yet."""
    curve = load_curve(costs_key(file, plan, Device(n_threads, best_isa())), default_folder())
    return None if curve is None or curve.n_near else dict(curve.near)


def trial_times(file: ModelFile, spec: ModelSpec, plan: MemoryPlan, n_threads: int) -> PassTimes | None:
    """Times of made-up layers here, from disk or measured now; None where they are too large to be tried.

    What was disturbed is not kept.
    """
    isa = best_isa()
    choices = kept_choices(file, n_threads, isa, build_id(), False, plan.ternary_bits)
    facts = (devices.cpu_name(), n_threads, isa, build_id(), plan.cache_type, plan.ternary_bits, choices)
    key = record_key(file, _KIND, _FORMAT, *facts)
    kept = _times_in(read_record(record_folder(_KIND), key))
    if kept is not None:
        return kept
    times = time_passes(file, spec, Device(n_threads, isa), plan.cache_type, plan.ternary_bits, choices)
    if times is not None and not times.was_disturbed:
        write_record(record_folder(_KIND), key, asdict(times))
    return times


def _times_in(record: Any) -> PassTimes | None:
    """What was kept, None for anything else."""
    try:
        layers, output = ({int(n): float(of) for n, of in record[name].items()} for name in ("layers", "output"))
        rows = float(record["row_position"]), float(record["row_position_long"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    if not {1, PROMPT} <= set(layers) or 1 not in output or not set(output) <= set(layers):
        return None
    values = (*layers.values(), *output.values(), *rows)
    if not all(math.isfinite(value) and 0.0 <= value < _MOST_SECONDS for value in values) or not layers[1]:
        return None
    return PassTimes(layers, output, *rows, False)
