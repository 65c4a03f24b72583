"""Draft heads on OpenCL and on ONNX Runtime: near the numpy oracle, and without consequence for the text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from draft_sessions import KINDS, Kind, check_branches_of_a_head, difference, head_backend_of, open_head
from drafting import FixedCosts, cost_model, tree_of_head
from exactness import TREE, branch_to
from interrupts import interrupted_every
from reference_head import ReferenceHead, open_reference_head
from tiny_assistants import write_tiny_assistant
from tiny_gemma4 import write_tiny_gemma4
from tiny_heads import write_tiny_eagle3, write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.base import DraftingHead, HeadSession
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.opencl import OpenCLDevice, OpenCLHead, OpenCLHeadBackend, OpenCLHeadModel
from edgeinfer.common.errors import (
    BackendLost,
    ContextOverflow,
    EdgeInferError,
    Interrupted,
    InvalidArgument,
    ShapeError,
    UnsupportedModel,
)
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Features, TokenIds
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import read_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.drafters.head import HeadDrafter
from edgeinfer.speculation.pipeline import Speculator

PROMPT = "hello world, there is the one, there is the one and hello"


@dataclass
class Heads:
    """A head of a tiny model, opened as often as needed; rows of it."""

    head: Path
    target: Path
    kind: Kind

    def open(self, n_batch: int = 64) -> HeadSession:
        return open_head(self.head, self.target, self.kind, n_batch)

    def reference(self, activations: Literal["float32", "int8"] = "float32") -> ReferenceHead:
        with ModelFile.open(self.head) as file, ModelFile.open(self.target) as model:
            of_target = read_spec(model)
            return open_reference_head(
                file, read_head_beside(file, model, of_target), model, of_target, 256, activations
            )


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    request.getfixturevalue("opencl_device" if found == "opencl" else "onnx_provider")  # skips where there is none
    return found


def heads_of(folder: Path, tensor_type: str, n_layers: int, kind: Kind, architecture: str = "llama") -> Heads:
    target = write_tiny_model(folder / "tiny.gguf", architecture, tensor_type, n_embd=256)  # type: ignore[arg-type]
    head = write_tiny_head(folder / "head.gguf", target, tensor_type=tensor_type, n_layers=n_layers, n_ff=256)
    return Heads(head, target, kind)


@pytest.fixture
def heads(kind: Kind, tmp_path: Path) -> Heads:
    return heads_of(tmp_path, "F16", 2, kind)


# Of quantised heads, to the reference in floats: where activations are rounded to 8 bits, or are not.
_LIMITS: dict[Kind, float] = {"opencl": 6e-2, "onnx contrib": 6e-2, "onnx plain": 1e-3}


def rows(n: int) -> tuple[TokenIds, Features]:
    rng = np.random.default_rng(5)
    return rng.integers(0, 291, n).astype(np.int32), rng.standard_normal((n, 256), dtype=np.float32)


@pytest.mark.parametrize("n_layers", [0, 1, 2])
@pytest.mark.parametrize("tensor_type", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K"])
def test_logits_and_features_are_near_the_reference(
    tmp_path: Path, tensor_type: str, n_layers: int, kind: Kind
) -> None:
    heads = heads_of(tmp_path, tensor_type, n_layers, kind)
    ours, theirs = heads.open(), heads.reference()
    limit = _LIMITS[kind] if tensor_type.startswith("Q") else 1e-3
    for n in (1, 3, 30):
        tokens, features = rows(n)
        a, b = (head.forward(tokens, features, logits="all") for head in (ours, theirs))
        assert a.hidden is not None and b.hidden is not None
        assert difference(a.logits, b.logits) < limit and difference(a.hidden, b.hidden) < limit


def test_embeddings_are_scaled_as_the_target_does(tmp_path: Path, kind: Kind) -> None:
    heads = heads_of(tmp_path, "F16", 1, kind, "granite")
    tokens, features = rows(9)
    ours, theirs = (head.forward(tokens, features, logits="all").logits for head in (heads.open(), heads.reference()))
    assert difference(ours, theirs) < 1e-3


@pytest.mark.parametrize("tensor_type", ["F16", "Q8_0"])
def test_a_head_takes_the_rows_that_its_file_leaves_out_from_its_target(
    kind: Kind, tensor_type: str, tmp_path: Path
) -> None:
    target = write_tiny_model(tmp_path / "tiny.gguf", "llama", "F16", n_embd=256)
    stored = write_tiny_head(tmp_path / "stored.gguf", target, tensor_type=tensor_type)
    keys = {"draft-head.output_type": tensor_type}
    left_out = write_tiny_head(tmp_path / "h.gguf", target, tensor_type=tensor_type, metadata=keys, leave_out="output")
    tokens, features = rows(5)
    ours, theirs = (
        open_head(head, target, kind).forward(tokens, features, logits="all").logits for head in (left_out, stored)
    )
    assert difference(ours, theirs) < (1e-5 if tensor_type == "F16" else 5e-3)  # the gguf package rounds otherwise


@pytest.mark.parametrize("cuts", [[13], [1, 12], [1, 1, 3, 8]])
def test_a_tree_grown_level_by_level_equals_its_branches_alone(heads: Heads, cuts: list[int]) -> None:
    tokens, features = rows(20 + len(TREE))
    check_branches_of_a_head(heads.open(), tokens, features, cuts, lambda a, b: difference(a, b) < 1e-4)


def test_logits_come_for_the_rows_asked_for_however_a_chain_is_cut(heads: Heads) -> None:
    tokens, features = rows(40)
    whole = heads.open().forward(tokens, features, logits="all")
    head = heads.open(n_batch=16)
    head.forward(tokens[:9], features[:9])
    some = head.forward(tokens[9:], features[9:], n_pending=9, logits=[30, 0, 20])
    assert whole.hidden is not None and some.hidden is not None
    assert difference(some.logits, whole.logits[[39, 9, 29]]) < 1e-4
    assert difference(some.hidden, whole.hidden[:, 9:]) < 1e-4
    head.commit(range(40))
    assert head.n_past == 40 and not head.forward(tokens[:2], features[:2], logits=()).logits.size


def test_misuse_is_refused_and_leaves_the_head_as_it_was(heads: Heads) -> None:
    tokens, features = rows(12)
    head = heads.open(n_batch=8)
    expected = head.forward(tokens[:4], features[:4]).logits
    with pytest.raises(ShapeError):
        head.forward(tokens[:4], features[:3])
    with pytest.raises(ShapeError):
        head.forward(tokens[:4], features[:4], n_pending=5)
    with pytest.raises(ContextOverflow):
        head.forward(np.zeros(257, dtype=np.int32), np.zeros((257, 256), dtype=np.float32))
    assert difference(head.forward(tokens[:4], features[:4]).logits, expected) < 1e-6
    head.forward(tokens[:6], features[:6], [-1, 0, 0, 1, 1, 2])
    with pytest.raises(ShapeError, match="a tree must fit"):
        head.forward(tokens[6:], features[6:], [2, 3, 4, 5, 6, 7], n_pending=6)
    head.close()
    with pytest.raises(EdgeInferError, match="closed"):
        head.forward(tokens, features)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 1}], ids=str)
@pytest.mark.parametrize("n_layers", [0, 1])
def test_its_drafts_are_taken_and_the_text_is_that_of_plain_decoding(
    n_layers: int, options: dict[str, float], kind: Kind, tmp_path: Path
) -> None:
    target = write_tiny_model(tmp_path / "tiny.gguf", n_ctx_train=256)
    with edgeinfer.load(target, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        plain = engine.generate(PROMPT, max_tokens=60, **options)
        text = [*engine.tokenize(PROMPT), *plain.tokens]
        heads = Heads(write_tiny_head(tmp_path / "h.gguf", target, [text], n_layers=n_layers), target, kind)
        with ModelFile.open(heads.head) as file:
            vocabulary = read_head(file).draft_vocab
        n_vocab = engine.tokenizer.n_vocab
        drafter = HeadDrafter(heads.open(), vocabulary, n_vocab, cost_model())
        engine.speculator = Speculator(engine.session, [drafter], FixedCosts(), n_vocab, 8)
        drafted = engine.generate(PROMPT, max_tokens=60, **options)
        engine.speculator.close()
    assert drafted.tokens == plain.tokens
    speculation = drafted.timings.speculation
    assert speculation is not None and speculation.dropped == {}
    assert speculation.by_drafter["head"].accepted > 20


@pytest.mark.parametrize("tensor_type", ["F16", "Q8_0", "Q4_K"])
def test_rows_of_several_layers_are_combined_near_the_reference(tmp_path: Path, tensor_type: str, kind: Kind) -> None:
    target = write_tiny_model(tmp_path / "tiny.gguf", "llama", tensor_type, n_embd=256)  # type: ignore[arg-type]
    head = write_tiny_head(tmp_path / "head.gguf", target, tensor_type=tensor_type, n_ff=256, taps=(0, 1))
    heads, of_target = Heads(head, target, kind), np.random.default_rng(5).standard_normal((40, 512), dtype=np.float32)
    of_target[:, :256] *= 30.0
    if kind == "opencl":
        with pytest.raises(UnsupportedModel, match="several layers .*: run them on the native engine"):
            heads.open(n_batch=16)
        return
    ours, theirs = heads.open(n_batch=16), heads.reference()
    limit = _LIMITS[kind] if tensor_type.startswith("Q") else 1e-3
    assert difference(ours.combine(of_target), theirs.combine(of_target)) < limit
    with pytest.raises(ShapeError):
        ours.combine(of_target[:, :256])
    ours.close()
    with pytest.raises(EdgeInferError, match="closed"):
        ours.combine(of_target)


def test_an_eagle3_head_is_refused_with_what_runs_it(kind: Kind, tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "tiny.gguf")
    with (
        ModelFile.open(target) as model,
        ModelFile.open(write_tiny_eagle3(tmp_path / "h.gguf", target)) as file,
        pytest.raises(UnsupportedModel, match="EAGLE-3 heads .*: run them on the native engine"),
    ):
        head_backend_of(kind, model).plan(file, read_head(file), LoadSettings(256))


def test_an_assistant_is_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    target = write_tiny_gemma4(tmp_path / "t.gguf")
    with (
        ModelFile.open(target) as model,
        ModelFile.open(write_tiny_assistant(tmp_path / "a.gguf", target)) as file,
        pytest.raises(UnsupportedModel, match="assistants that attend to their target's .* on the native engine"),
    ):
        head = read_head_beside(file, model, read_spec(model))
        head_backend_of(kind, model).plan(file, head, LoadSettings(256))


def test_another_thread_can_stop_a_pass(heads: Heads) -> None:
    head, (tokens, features) = heads.open(n_batch=4), rows(200)
    with interrupted_every(0.0005, head), pytest.raises(Interrupted):
        for _ in range(10_000):  # until an interrupt comes while a pass runs
            head.forward(tokens, features)
    assert head.n_past == 0 and np.isfinite(head.forward(tokens[:5], features[:5]).logits).all()


# ---- on OpenCL alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_layers", [0, 2])
@pytest.mark.parametrize("tensor_type", ["F16", "Q8_0", "Q4_0"])
def test_groups_as_on_a_gpu_and_the_same_rounding_are_near_the_reference(
    tensor_type: str, n_layers: int, tmp_path: Path, opencl_device: OpenCLDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rounding tips over, that row and those that see it move by a step of it: so most rows alone do not."""
    monkeypatch.setattr(OpenCLDevice, "is_cpu", False)
    heads = heads_of(tmp_path, tensor_type, n_layers, "opencl")
    ours, theirs = heads.open(), heads.reference("int8")

    def errors(tokens: TokenIds, features: Features) -> list[float]:
        a, b = (head.forward(tokens, features, logits="all") for head in (ours, theirs))
        return list(np.abs(a.logits - b.logits).max(axis=1) / np.abs(b.logits).max())

    tokens, features = rows(30)
    alone = [error for i in range(30) for error in errors(tokens[i : i + 1], features[i : i + 1])]
    together = [error for n in (3, 4, 30) for error in errors(*rows(n))]
    assert max(alone + together) < (3e-4 if tensor_type == "F16" else 3e-2) and np.median(alone) < 1e-4


@pytest.mark.parametrize("n_layers", [0, 1])
@pytest.mark.parametrize("tensor_type", ["F16", "Q4_K"])
def test_the_plan_is_what_a_head_on_opencl_takes(
    tensor_type: str, n_layers: int, tmp_path: Path, opencl_device: OpenCLDevice
) -> None:
    heads = heads_of(tmp_path, tensor_type, n_layers, "opencl")
    with ModelFile.open(heads.head) as file, ModelFile.open(heads.target) as model:
        of_target = read_spec(model)
        spec = read_head_beside(file, model, of_target)
        plan = OpenCLHeadBackend(opencl_device.info, model, of_target).plan(file, spec, LoadSettings(100, n_batch=32))
        device = OpenCLDevice(opencl_device.info)
        n_before = device.n_allocated
        head = OpenCLHeadModel(file, spec, model, of_target, plan, device).session()
    assert head.memory() == plan.use and device.n_allocated - n_before == plan.use.total
    head.forward(*rows(60))
    assert device.n_allocated - n_before == plan.use.total


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize(
    "n_layers, n_levels, width, assumed",
    [(0, 4, 2, ()), (1, 1, 3, ()), (1, 6, 1, (7, 8)), (2, 5, 3, ()), (2, 3, 8, (9, 9, 4))],
)
def test_a_tree_made_on_the_device_is_the_one_of_single_levels(
    n_layers: int,
    n_levels: int,
    width: int,
    assumed: tuple[int, ...],
    is_cpu: bool,
    tmp_path: Path,
    opencl_device: OpenCLDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OpenCLDevice, "is_cpu", is_cpu)
    heads = heads_of(tmp_path, "F32", n_layers, "opencl")
    with ModelFile.open(heads.head) as file:
        vocabulary = read_head(file).draft_vocab
    made, alone, (tokens, features) = heads.open(n_batch=8), heads.open(), rows(30)
    assert isinstance(made, DraftingHead)
    for head in (made, alone):
        head.forward(tokens[:9], features[:9])
        head.commit(range(9))
    text, of_text = tokens[9:], features[9:]
    n_vocab = int(vocabulary[-20])  # not all
    ours = made.draft(text, of_text, n_levels, width, assumed, n_vocab)
    theirs = tree_of_head(alone, vocabulary, text.tolist(), of_text, n_levels, width, assumed, n_vocab)
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.parents.tolist() == theirs.parents.tolist()
    assert set(ours.candidates.ravel().tolist()) <= set(vocabulary[:-20].tolist())
    assert (ours.candidates[:, 0] == theirs.candidates[:, 0]).all() and len(ours.candidates) == len(theirs.candidates)
    for a, b in ((ours.p, theirs.p), (ours.probabilities, theirs.probabilities)):
        np.testing.assert_allclose(a, b, rtol=2e-3)

    path = [*range(21 + len(assumed))]
    if n_levels > 1:
        leaf = (n_levels - 1) * width - 1  # the last node that was passed on
        path += [len(path) + node for node in branch_to(leaf, ours.parents.tolist())]
    for head in (made, alone):
        head.commit(path)
    assert made.n_past == 9 + len(path)
    after = [head.forward(tokens[:3], features[:3], logits="all").logits for head in (made, alone)]
    assert difference(*after) < 1e-4


def test_trees_that_cannot_be_made_are_refused(tmp_path: Path, opencl_device: OpenCLDevice) -> None:
    head, (tokens, features) = heads_of(tmp_path, "F16", 1, "opencl").open(), rows(250)
    assert isinstance(head, DraftingHead)
    with pytest.raises(ShapeError, match="features must be"):
        head.draft(tokens[:2], features[:3], 2)
    with pytest.raises(ShapeError, match="token ids must be"):
        head.draft(tokens[:2], features[:2], 2, 1, [-1])
    with pytest.raises(InvalidArgument, match="levels of 1..8 nodes, 128 in all: found 2 of 9"):
        head.draft(tokens[:2], features[:2], 2, 9)
    with pytest.raises(InvalidArgument, match="one of the head's tokens must be below n_vocab 0: found none"):
        head.draft(tokens[:2], features[:2], 2, 1, (), 0)
    few = head.draft(tokens[:2], features[:2], 2, 3, (), 4)
    assert set(few.candidates.ravel().tolist()) == {0, 2} and (few.probabilities[:, 2:] == 0).all()
    assert few.p[:2].sum() == pytest.approx(1) and few.p[2] == 0
    with pytest.raises(ShapeError, match="1-D array of integers"):
        head.draft(tokens[:2], features[:2], 2, 1, [1.5])
    for assumed, n_levels in (((), 8), ((1,), 7), ((1,) * 7, 1)):
        with pytest.raises(ContextOverflow):
            head.draft(tokens, features, n_levels, 1, assumed)
    assert len(head.draft(tokens, features, 7).tokens) == 7 and head.n_past == 0
    head.close()
    with pytest.raises(EdgeInferError, match="closed"):
        head.draft(tokens, features, 1)


def test_a_device_that_fails_is_a_lost_backend(tmp_path: Path, opencl_device: OpenCLDevice) -> None:
    head = heads_of(tmp_path, "F16", 1, "opencl").open()
    assert isinstance(head, OpenCLHead)
    head.model.decoder.group = 1 << 20  # no device has such groups
    with pytest.raises(BackendLost, match="running kernel rms_norm failed"):
        head.forward(*rows(3))
