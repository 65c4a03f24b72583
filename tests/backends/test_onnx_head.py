"""Draft heads on ONNX Runtime: near the numpy oracle, and without consequence for the text."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from drafting import FixedCosts, cost_model
from exactness import LEAVES, TREE, branch_to
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.onnx import OnnxHead, choose_provider, plan_onnx_head
from edgeinfer.backends.reference_head import ReferenceHead, open_reference_head
from edgeinfer.drafters.head import HeadDrafter
from edgeinfer.errors import ContextOverflow, EdgeInferError, ShapeError
from edgeinfer.gguf import ModelFile
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import read_head
from edgeinfer.speculation.pipeline import Speculator
from edgeinfer.types import Device, Features, TokenIds

PROMPT = "hello world, there is the one, there is the one and hello"

pytestmark = pytest.mark.usefixtures("onnx_provider")


@dataclass
class Heads:
    """A head of a tiny model, opened as often as wanted; rows of it."""

    head: Path
    target: Path
    style: str

    def onnx(self, n_batch: int = 64) -> OnnxHead:
        info = replace(choose_provider("CPU"), style=self.style)
        with ModelFile.open(self.head) as file, ModelFile.open(self.target) as model:
            spec, of_target = read_head(file).decoder, read_spec(model)
            plan = plan_onnx_head(file, spec, model, of_target, 256, n_batch, info)
            return OnnxHead(file, spec, model, of_target, plan, Device(1), info)

    def reference(self) -> ReferenceHead:
        with ModelFile.open(self.head) as file, ModelFile.open(self.target) as model:
            return open_reference_head(file, read_head(file).decoder, model, read_spec(model), 256, "float32")


def heads_of(folder: Path, tensor_type: str, n_layers: int, style: str, architecture: str = "llama") -> Heads:
    target = write_tiny_model(folder / "tiny.gguf", architecture, tensor_type, n_embd=256)  # type: ignore[arg-type]
    head = write_tiny_head(folder / "head.gguf", target, tensor_type=tensor_type, n_layers=n_layers, n_ff=256)
    return Heads(head, target, style)


@pytest.fixture(params=["contrib", "plain"])
def heads(request: pytest.FixtureRequest, tmp_path: Path) -> Heads:
    return heads_of(tmp_path, "F16", 2, request.param)


def rows(n: int) -> tuple[TokenIds, Features]:
    rng = np.random.default_rng(5)
    return rng.integers(0, 291, n).astype(np.int32), rng.standard_normal((n, 256), dtype=np.float32)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("style", ["contrib", "plain"])
@pytest.mark.parametrize("n_layers", [0, 1, 2])
@pytest.mark.parametrize("tensor_type", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K"])
def test_logits_and_features_are_near_the_reference(
    tmp_path: Path, tensor_type: str, n_layers: int, style: str
) -> None:
    heads = heads_of(tmp_path, tensor_type, n_layers, style)
    ours, theirs = heads.onnx(), heads.reference()
    limit = 6e-2 if style == "contrib" and tensor_type.startswith("Q") else 1e-3
    for n in (1, 3, 30):
        tokens, features = rows(n)
        a, b = (head.forward(tokens, features, logits="all") for head in (ours, theirs))
        assert a.hidden is not None and b.hidden is not None
        assert difference(a.logits, b.logits) < limit and difference(a.hidden, b.hidden) < limit


@pytest.mark.parametrize("style", ["contrib", "plain"])
@pytest.mark.parametrize("tensor_type", ["F16", "Q8_0", "Q4_K"])
def test_rows_of_several_layers_are_combined_near_the_reference(tmp_path: Path, tensor_type: str, style: str) -> None:
    target = write_tiny_model(tmp_path / "tiny.gguf", "llama", tensor_type, n_embd=256)
    head = write_tiny_head(tmp_path / "head.gguf", target, tensor_type=tensor_type, n_ff=256, taps=(0, 1))
    heads, of_target = Heads(head, target, style), np.random.default_rng(5).standard_normal((40, 512), dtype=np.float32)
    of_target[:, :256] *= 30.0
    ours, theirs = heads.onnx(n_batch=16), heads.reference()
    limit = 6e-2 if style == "contrib" and tensor_type.startswith("Q") else 1e-3
    assert difference(ours.combine(of_target), theirs.combine(of_target)) < limit
    with pytest.raises(ShapeError):
        ours.combine(of_target[:, :256])
    ours.close()
    with pytest.raises(EdgeInferError, match="closed"):
        ours.combine(of_target)


def test_embeddings_are_scaled_as_the_target_does(tmp_path: Path) -> None:
    heads = heads_of(tmp_path, "F16", 1, "contrib", "granite")
    tokens, features = rows(9)
    ours, theirs = (head.forward(tokens, features, logits="all").logits for head in (heads.onnx(), heads.reference()))
    assert difference(ours, theirs) < 1e-3


@pytest.mark.parametrize("cuts", [[13], [1, 12], [1, 1, 3, 8]])
def test_a_tree_grown_level_by_level_equals_its_branches_alone(heads: Heads, cuts: list[int]) -> None:
    tokens, features = rows(20 + len(TREE))
    head = heads.onnx()
    head.forward(tokens[:20], features[:20])
    head.commit(range(20))
    at, logits = 0, []
    for size in cuts:
        part = slice(20 + at, 20 + at + size)
        out = head.forward(tokens[part], features[part], TREE[at : at + size], n_pending=at, logits="all")
        logits.append(out.logits)
        at += size
    of_tree = np.concatenate(logits)
    for leaf in LEAVES:
        branch = np.array(branch_to(leaf, TREE))
        alone = head.forward(tokens[20 + branch], features[20 + branch], logits="all").logits
        assert difference(of_tree[branch], alone) < 1e-4, leaf
    branch = np.array(branch_to(7, TREE))
    head.forward(tokens[20:], features[20:], TREE)
    head.commit(branch)
    behind = head.forward(tokens[:3], features[:3], logits="all").logits
    head.truncate(20)
    head.forward(tokens[20 + branch], features[20 + branch])
    head.commit(range(len(branch)))
    assert difference(behind, head.forward(tokens[:3], features[:3], logits="all").logits) < 1e-4


def test_misuse_is_refused_and_leaves_the_head_as_it_was(heads: Heads) -> None:
    tokens, features = rows(12)
    head = heads.onnx(n_batch=8)
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
    n_layers: int, options: dict[str, float], tmp_path: Path
) -> None:
    target = write_tiny_model(tmp_path / "tiny.gguf", n_ctx_train=256)
    with edgeinfer.load(target, draft="none") as engine:
        engine.tokenizer.stop_ids = frozenset()
        plain = engine.generate(PROMPT, max_tokens=60, **options)
        text = [*engine.tokenize(PROMPT), *plain.tokens]
        heads = Heads(write_tiny_head(tmp_path / "h.gguf", target, [text], n_layers=n_layers), target, "contrib")
        with ModelFile.open(heads.head) as file:
            vocabulary = read_head(file).draft_vocab
        n_vocab = engine.tokenizer.n_vocab
        drafter = HeadDrafter(heads.onnx(), vocabulary, n_vocab, cost_model())
        engine.speculator = Speculator(engine.session, [drafter], FixedCosts(), n_vocab, 8)
        drafted = engine.generate(PROMPT, max_tokens=60, **options)
        engine.speculator.close()
    assert drafted.tokens == plain.tokens
    speculation = drafted.timings.speculation
    assert speculation is not None and speculation.dropped == {}
    assert speculation.by_drafter["head"].accepted > 20
