"""Models with experts, all of them in memory: exact, and equal to the reference within rounding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import comparisons, same_bits
from interrupts import interrupted_every
from tiny_experts import EXPERT_ARCHITECTURES, ExpertArchitecture, write_tiny_experts
from tiny_models import BLOCK_256_TYPES

from edgeinfer.backends import reference_experts
from edgeinfer.backends.native import NativeBackend, NativeModel, NativeSession, _core, available_isas
from edgeinfer.backends.native.experts import model_experts
from edgeinfer.backends.native.experts.model_experts import EXPERT_ROLES
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.backends.reference_experts import Choice, choose
from edgeinfer.common.errors import BadPack, ExpertReadError, Interrupted, ModelFileChanged, UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Experts, ModelSpec, RouterFunction, read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile

N_VOCAB = 291
# Every architecture in a format whose experts are quantised, and formats of each kind of inputs and tiles.
MODELS = [(name, "Q8_0") for name in EXPERT_ARCHITECTURES] + [("gpt-oss", "MXFP4"), ("glm4moe", "Q4_K")]
MODELS += [("qwen2moe", "Q6_K"), ("olmoe", "F16"), ("qwen3moe", "Q4_K"), ("granitemoe", "Q5_1")]
MODELS += [("olmoe", "Q2_K"), ("olmoe", "Q3_K")]


def load(
    path: Path | ModelFile,
    n_threads: int = 2,
    isa: str | None = None,
    n_batch: int = 128,
    spec: ModelSpec | None = None,
) -> NativeModel:
    file, backend = path if isinstance(path, ModelFile) else ModelFile.open(path), NativeBackend(tuned=False)
    spec = spec or read_spec(file)
    return backend.load(
        file,
        spec,
        backend.plan(file, spec, LoadSettings(256, n_batch=n_batch, n_threads=n_threads)),
        Device(n_threads, isa),
    )


def opener(path: Path) -> Callable[..., NativeSession]:
    file = ModelFile.open(path)
    return lambda **options: load(file, **options).session()


def tokens_of(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, N_VOCAB, n).astype(np.int32)


def logits_of(path: Path | ModelFile, tokens: np.ndarray, **options: Any) -> np.ndarray:
    return load(path, **options).session().forward(tokens, logits="all").logits


def reference_logits(file: ModelFile, spec: ModelSpec, tokens: np.ndarray) -> np.ndarray:
    backend = ReferenceBackend("int8")
    return (
        backend.load(file, spec, backend.plan(file, spec, LoadSettings(256)), Device(1))
        .session()
        .forward(tokens, logits="all")
        .logits
    )


# ---- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture, tensor_type", MODELS)
def test_the_bits_depend_on_nothing_but_the_text(
    architecture: ExpertArchitecture, tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    open_session = opener(write_tiny_experts(tmp_path / "m.gguf", architecture, tensor_type))
    differing = [what for what, equal in comparisons(open_session, available_isas(), tokens_of(rng, 100)) if not equal]
    assert differing == []


@pytest.mark.parametrize(
    "shape",
    [
        {"architecture": "olmoe", "tensor_type": "F16", "n_embd": 100, "head_dim": 24, "n_ff": 34, "n_experts": 5},
        {"architecture": "qwen3moe", "tensor_type": "Q8_0", "n_experts": 3, "n_used": 1},
        {"architecture": "qwen2moe", "tensor_type": "Q4_0", "n_experts": 6, "n_used": 6, "n_ff": 96},
        {"architecture": "qwen3moe", "tensor_type": "Q4_K", "types": {"ffn_down_exps": "Q6_K", "ffn_up_exps": "Q5_0"}},
        {"architecture": "llama", "tensor_type": "Q8_0", "n_ff": 1248, "n_experts": 40, "n_used": 8},
    ],
)
def test_odd_shapes_are_exact_too(shape: dict[str, Any], tmp_path: Path, rng: np.random.Generator) -> None:
    open_session = opener(write_tiny_experts(tmp_path / "m.gguf", **shape))
    differing = [what for what, equal in comparisons(open_session, available_isas(), tokens_of(rng, 100)) if not equal]
    assert differing == []


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
def test_fused_gate_and_up_give_the_bits_of_two_tensors(
    architecture: ExpertArchitecture, tmp_path: Path, rng: np.random.Generator
) -> None:
    tokens = tokens_of(rng, 30)
    apart, fused = (
        logits_of(write_tiny_experts(tmp_path / f"{fused}.gguf", architecture, "Q8_0", fused=fused), tokens)
        for fused in (False, True)
    )
    assert same_bits(apart, fused)


# ---- against the reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", EXPERT_ARCHITECTURES)
def test_floats_agree_with_the_reference(
    architecture: ExpertArchitecture, tmp_path: Path, rng: np.random.Generator
) -> None:
    file, tokens = ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", architecture, "F32")), tokens_of(rng, 60)
    theirs = reference_logits(file, read_spec(file), tokens)
    assert np.abs(logits_of(file, tokens) - theirs).max() < 2e-3 * theirs.std()


@pytest.mark.parametrize("architecture, tensor_type", MODELS)
def test_quantised_experts_agree_with_the_reference(
    architecture: ExpertArchitecture, tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """All but the rows in which a number comes out on the other side of a rounding."""
    file = ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", architecture, tensor_type))
    spec, session = read_spec(file), load(file).session()
    errors: list[float] = []
    for _ in range(12):
        tokens = tokens_of(rng, 4)
        theirs = reference_logits(file, spec, tokens)
        ours = session.forward(tokens, logits="all").logits
        errors.extend(np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max())
    assert np.mean(np.array(errors) < 5e-6) > 0.6
    assert np.max(errors) < (0.2 if tensor_type in BLOCK_256_TYPES else 0.03)


def changed(**fields: Any) -> Callable[[ModelSpec], ModelSpec]:
    """Another block of experts in every layer, of the same tensors."""

    def change(spec: ModelSpec) -> ModelSpec:
        layers = (replace(layer, ffn=replace(layer.ffn, **fields)) for layer in spec.layers)
        return replace(spec, layers=tuple(layers))

    return change


@pytest.mark.parametrize(
    "fields",
    [
        {"is_normalised": True, "weight_scale": 2.5},
        {"is_normalised": False},
        {"router_function": "sigmoid"},
        {"router_function": "sqrt_softplus", "is_normalised": True},
        {"router_function": "softmax_of_top_k"},
        {"n_groups": 4, "n_used_groups": 2},
        {"n_groups": 4, "n_used_groups": 2, "groups_by_best": True},
        {"activation": "gelu_tanh"},
        {"post_norm": "output_norm.weight"},
        {"norm": None},
    ],
)
def test_every_field_of_the_block_does_what_it_says(
    fields: dict[str, Any], tmp_path: Path, rng: np.random.Generator
) -> None:
    file = ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", "qwen2moe", "F32", scales=True))
    spec, tokens = changed(**fields)(read_spec(file)), tokens_of(rng, 40)
    theirs, ours = reference_logits(file, spec, tokens), logits_of(file, tokens, spec=spec)
    assert np.abs(ours - theirs).max() < 2e-3 * theirs.std()
    if fields != {"is_normalised": False}:
        assert np.abs(ours - logits_of(file, tokens)).max() > 0.05 * theirs.std()


# ---- routing ---------------------------------------------------------------------------------------------------------


def block_of(function: RouterFunction = "softmax", n_experts: int = 8, n_used: int = 3, **fields: Any) -> Experts:
    names = dict.fromkeys(("router", "gate", "up", "down"), "t")
    return Experts(64, 64, n_experts, n_used, **names, router_function=function, **fields)


def routed(block: Experts, products: np.ndarray, bias: np.ndarray | None = None, isa: str = "scalar") -> Choice:
    config = _core.ExpertsConfig(
        n_ff=64,
        n_experts=block.n_experts,
        n_used=block.n_used,
        router_function=_core.RouterFunction[block.router_function],
        is_normalised=block.is_normalised,
        weight_scale=block.weight_scale,
        n_groups=block.n_groups,
        n_used_groups=block.n_used_groups,
        groups_by_best=block.groups_by_best,
        activation=_core.Activation.silu,
        n_ff_shared=0,
    )
    experts, weights = _core.route(config, isa, products, bias)
    return Choice(np.array(experts), np.array(weights, np.float32))


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "softmax_of_top_k", "sqrt_softplus"])
@pytest.mark.parametrize("sizes", [(8, 3), (61, 7), (256, 8), (33, 33)])
def test_choices_are_those_of_the_reference_in_every_instruction_set(
    function: RouterFunction, sizes: tuple[int, int], rng: np.random.Generator
) -> None:
    block = block_of(function, *sizes, is_normalised=True, weight_scale=1.7)
    for spread in (0.1, 1.0, 20.0):
        products = rng.normal(0, spread, sizes[0]).astype(np.float32)
        bias = rng.normal(0, 0.3, sizes[0]).astype(np.float32)
        for each in (None, bias):
            theirs, ours = choose(block, products, each), routed(block, products, each)
            assert ours.experts.tolist() == theirs.experts.tolist()
            np.testing.assert_allclose(ours.weights, theirs.weights, rtol=2e-5, atol=1e-7)
            for isa in available_isas():
                again = routed(block, products, each, isa)
                assert np.array_equal(again.experts, ours.experts) and same_bits(again.weights, ours.weights)


def test_of_equal_ones_the_lower_index_comes_first() -> None:
    products = np.array([1, 3, 2, 3, 3, 0, 2, 1], np.float32)
    assert routed(block_of("sigmoid", n_used=5), products).experts.tolist() == [1, 3, 4, 2, 6]
    assert routed(block_of(), np.zeros(8, np.float32)).experts.tolist() == [0, 1, 2]


@pytest.mark.parametrize("by_best", [False, True])
def test_the_groups_whose_best_are_best_are_chosen_from(by_best: bool, rng: np.random.Generator) -> None:
    block = block_of("sigmoid", 12, 4, n_groups=4, n_used_groups=2, groups_by_best=by_best)
    n_others = 0
    for _ in range(50):
        products = rng.normal(0, 2, 12).astype(np.float32)
        bias = np.round(rng.normal(0, 1, 12)).astype(np.float32)
        found = routed(block, products, bias).experts.tolist()
        assert found == choose(block, products, bias).experts.tolist()
        n_others += found != choose(replace(block, groups_by_best=not by_best), products, bias).experts.tolist()
    assert n_others > 5


def test_a_product_that_is_not_a_number_is_chosen_last() -> None:
    products = np.array([np.nan, 1, 2, np.nan, -np.inf, 0, -1, np.inf], np.float32)
    found = routed(block_of("softmax_of_top_k", n_used=8), products)
    assert sorted(found.experts.tolist()) == list(range(8))
    assert found.experts.tolist()[:5] == [7, 2, 1, 5, 6]


def test_the_routing_of_the_last_pass_is_that_of_the_reference(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", "glm4moe", "F32"))
    chosen: list[list[int]] = []

    def recorded(*arguments: Any) -> Choice:
        choice = choose(*arguments)
        chosen.append(choice.experts.tolist())
        return choice

    monkeypatch.setattr(reference_experts, "choose", recorded)
    tokens, model = tokens_of(rng, 20), load(file)
    reference_logits(file, read_spec(file), tokens)
    session = model.session()
    session.forward(tokens)
    routing = model.routing()
    assert routing.shape == (3, 20, 3) and routing.dtype == np.int32
    assert (routing[0] == -1).all()  # a dense layer
    assert routing[1:].reshape(-1, 3).tolist() == chosen
    session.forward(tokens[:1])
    assert model.routing()[:, 0].tolist() == routing[:, 0].tolist()


# ---- in memory, and in packed files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture, tensor_type", [("qwen2moe", "Q4_K"), ("gpt-oss", "MXFP4"), ("glm4moe", "F16")])
def test_packed_experts_are_mapped_and_give_the_same_bits(
    architecture: ExpertArchitecture, tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path, tokens = write_tiny_experts(tmp_path / "m.gguf", architecture, tensor_type), tokens_of(rng, 30)
    expected, records = logits_of(path, tokens), records_of(path)
    with ModelFile.open(path) as file:
        n_bytes = NativeBackend().pack(file, read_spec(file), packed_path(path))
    assert n_bytes == packed_path(path).stat().st_size
    assert packed_path(path).read_bytes().endswith(records)
    assert same_bits(logits_of(path, tokens), expected)
    packed_path(path).unlink()
    assert same_bits(logits_of(path, tokens), expected)


def records_of(path: Path) -> bytes:
    """Of all experts, one after the other."""
    with ModelFile.open(path) as file:
        of_model = NativeBackend().experts(file, read_spec(file))
        return bytes(model_experts.resident_experts(of_model, file, _core.Threads(2)).data)


def test_damaged_records_are_found_where_all_bytes_are_compared(tmp_path: Path) -> None:
    path = write_tiny_experts(tmp_path / "m.gguf", "olmoe", "Q8_0")
    with ModelFile.open(path) as file:
        NativeBackend().pack(file, read_spec(file), packed_path(path))
        whole = packed_path(path).read_bytes()
        backend, spec = NativeBackend(verify=True, tuned=False), read_spec(file)
        plan = backend.plan(file, spec, LoadSettings(64))
        backend.load(file, spec, plan, Device(1)).close()
        packed_path(path).write_bytes(whole[:-5000] + bytes([whole[-5000] ^ 1]) + whole[-4999:])
        with pytest.raises(BadPack, match="damaged, the SHA-256 of its weights"):
            backend.load(file, spec, plan, Device(1))
        packed_path(path).write_bytes(whole[:-4096])
        with pytest.raises(BadPack, match=r"expected \d+ bytes of weights, found \d+"):
            NativeBackend().load(file, spec, plan, Device(1))


@pytest.mark.parametrize("architecture", ["qwen2moe", "glm4moe"])
def test_the_plan_is_what_the_model_holds(architecture: ExpertArchitecture, tmp_path: Path) -> None:
    file = ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", architecture))
    backend, spec = NativeBackend(tuned=False), read_spec(file)
    plan = backend.plan(file, spec, LoadSettings(128, n_batch=32, n_threads=2))
    model = backend.load(file, spec, plan, Device(2))
    held = model.memory()
    assert (held.weights, held.experts) == (plan.use.weights, plan.use.experts)
    assert 0 <= held.activations - plan.use.activations < 4096
    sizes = backend.experts(file, spec).sizes()
    assert sizes is not None and plan.use.experts == sizes.total > 0
    record = sizes.total // (sizes.n_layers * sizes.n_experts)
    assert (sizes.least, sizes.a_token) == (3 * record, 3 * record * sizes.n_layers)
    assert (sizes.n_layers, sizes.n_experts, sizes.n_used) == (2, 8, 3)
    assert model.session().memory().experts == sizes.total


def test_where_the_matrices_of_experts_lie(tmp_path: Path) -> None:
    for fused in (False, True):
        path = write_tiny_experts(tmp_path / f"{fused}.gguf", "qwen3moe", "Q8_0", fused=fused)
        with ModelFile.open(path) as file:
            of_model, whole = NativeBackend().experts(file, read_spec(file)), path.read_bytes()
            for role in EXPERT_ROLES:
                name = f"blk.1.ffn_{'gate_up' if fused and role != 'down' else role}_exps.weight"
                rows = file.data(name).tobytes()
                each, n_bytes = len(rows) // 8, len(rows) // 8 // (2 if fused and role != "down" else 1)
                first = 5 * each + (n_bytes if fused and role == "up" else 0)
                found = of_model.slice_of(file, 1, role, 5)
                assert (found.part, found.n_bytes, found.name) == (0, n_bytes, name)
                assert whole[found.offset : found.offset + found.n_bytes] == rows[first : first + n_bytes]


def test_a_draft_model_has_its_experts_rounded(tmp_path: Path, rng: np.random.Generator) -> None:
    file, tokens = ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", "qwen2moe", "F32")), tokens_of(rng, 40)
    backend, spec = NativeBackend(tuned=False, for_drafts=True), read_spec(file)
    plan = backend.plan(file, spec, LoadSettings(64))
    model = backend.load(file, spec, plan, Device(2))
    assert model.memory().experts == plan.use.experts < 0.25 * load(file).memory().experts
    whole = logits_of(file, tokens)
    ours = model.session().forward(tokens, logits="all").logits
    assert 0.01 < np.abs(ours - whole).mean() / whole.std() < 0.5


def test_a_type_without_a_kernel_for_experts_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", "qwen3moe", "Q8_0"))
    monkeypatch.setattr(model_experts, "EXPERT_TYPES", model_experts.EXPERT_TYPES - {GGMLType.Q8_0})
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.0\.ffn_gate_exps\.weight .* has type Q8_0"):
        NativeBackend().plan(file, read_spec(file), LoadSettings(64))


def test_more_experts_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    file = ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", n_experts=70, n_used=65))
    spec, expected = read_spec(file), r"m\.gguf: a token uses 65 experts of layer 0, in 1 groups; .* 64 experts"
    for refuse in (NativeBackend().expert_sizes, lambda *model: NativeBackend().plan(*model, LoadSettings(64))):
        with pytest.raises(UnsupportedModel, match=expected):
            refuse(file, spec)


def test_tuning_counts_the_experts_of_one_token(tmp_path: Path) -> None:
    model = load(write_tiny_experts(tmp_path / "m.gguf", "qwen3moe", "Q8_0"))
    decoder, use = model.decoder(), model.memory()
    assert use.experts * 3 // 8 < decoder.part_bytes(1, 0) < use.weights + use.experts * 3 // 8
    assert model.tuned(4).weight_bytes == decoder.part_bytes(1, 0)
    assert model.tuned(4).seconds_of_part(4, 2, 1) > 0


# ---- passes that end early -------------------------------------------------------------------------------------------


def test_a_pass_that_is_stopped_between_experts_leaves_the_text_as_it_was(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path, tokens = write_tiny_experts(tmp_path / "m.gguf", "qwen2moe", "Q4_K", n_experts=16), tokens_of(rng, 120)
    session = load(path).session()
    expected = session.forward(tokens, logits="all").logits
    n_stopped = 0
    with interrupted_every(0.0004, session):
        for i in range(2000):  # when one is stopped is up to the machine
            if i >= 60 and n_stopped:
                break
            try:
                assert same_bits(session.forward(tokens, logits="all").logits, expected)
            except Interrupted:
                n_stopped += 1
    assert n_stopped > 0 and session.n_past == 0
    assert same_bits(session.forward(tokens, logits="all").logits, expected)


def test_the_first_pass_may_be_stopped_before_any_expert_is_chosen(tmp_path: Path, rng: np.random.Generator) -> None:
    n_tokens = 4000  # so that the interrupt comes in the first layer
    file, backend = (
        ModelFile.open(write_tiny_experts(tmp_path / "m.gguf", n_ctx_train=4096)),
        NativeBackend(tuned=False),
    )
    spec = read_spec(file)
    session = backend.load(
        file, spec, backend.plan(file, spec, LoadSettings(4096, n_batch=n_tokens, n_threads=2)), Device(2)
    ).session()
    tokens = tokens_of(rng, n_tokens)
    with interrupted_every(0.005, session), pytest.raises(Interrupted):
        for _ in range(50):  # the first one, unless the machine keeps the other thread from its core
            session.forward(tokens)
    assert session.n_past == 0


def test_an_expert_that_cannot_be_read_ends_the_pass_with_an_error(tmp_path: Path, rng: np.random.Generator) -> None:
    path, tokens = write_tiny_experts(tmp_path / "m.gguf", "qwen2moe", "Q4_K", n_experts=16), tokens_of(rng, 20)
    expected = logits_of(path, tokens)
    with pytest.raises(ModelFileChanged), ModelFile.open(path) as file:  # raised at the end, where it is closed
        backend, spec = NativeBackend(tuned=False), read_spec(file)
        sizes = backend.experts(file, spec).sizes()
        assert sizes is not None
        plan = backend.plan(file, spec, LoadSettings(64, expert_cache=sizes.least))
        session = backend.load(file, spec, plan, Device(2)).session()
        assert same_bits(session.forward(tokens[:4], logits="all").logits, expected[:4])
        session.commit(range(4))
        with path.open("r+b") as damaged:
            damaged.truncate(file.tensors["blk.1.ffn_down_exps.weight"].offset + 4096)
        for _ in range(2):
            with pytest.raises(ExpertReadError, match=r"m\.gguf: tensor blk.*_exps\.weight, expert \d+ at byte \d+: "):
                session.forward(tokens[4:], logits="all")
        assert session.n_past == 4
