"""Draft heads: the native engine against the numpy oracle, and the same bits however rows are cut into passes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from draft_sessions import check_branches_of_a_head
from exactness import TREE, same_bits
from peer import llama_cpp_eagle3, llama_cpp_layer_inputs, llama_cpp_mtp
from recurrent_models import write_recurrent_model
from reference_head import ReferenceHead, open_reference_head
from tiny_heads import write_tiny_eagle3, write_tiny_head
from tiny_models import write_tiny_model

from edgeinfer.backends.head_weights import read_head_beside, read_nextn_beside
from edgeinfer.backends.native import NativeBackend, NativeHeadSession, available_isas, load_head, plan_head
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import ContextOverflow, EdgeInferError, Interrupted, ShapeError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device, Features, TokenIds
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.draft_head import HeadSpec, read_head
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

# Models with blocks that draft, by kind.
BLOCKS: dict[int | str, str] = {"mtp": "qwen35", "mtp experts": "qwen35moe", "mtp plain": "nemotron_h_moe+latent"}


@dataclass
class Heads:
    """One head, opened as often as needed; rows of it."""

    native: Callable[..., NativeHeadSession]
    reference: Callable[[], ReferenceHead]
    rng: np.random.Generator

    def rows(self, n: int) -> tuple[TokenIds, Features]:
        tokens = self.rng.integers(0, 291, n).astype(np.int32)
        return tokens, self.rng.standard_normal((n, self.reference().spec.n_embd), dtype=np.float32)


def heads_of(
    folder: Path, tensor_type: str, kind: int | str, n_embd: int = 256, architecture: str = "llama", **options: object
) -> Heads:
    """kind: the number of blocks of a head with a gate, "eagle3", or one of BLOCKS. All take more options."""
    if kind in BLOCKS:
        return block_of(folder, tensor_type, architecture=BLOCKS[kind], n_embd=n_embd, **options)  # type: ignore
    target = write_tiny_model(folder / "tiny.gguf", architecture, tensor_type, n_embd=n_embd)  # type: ignore[arg-type]
    if kind == "eagle3":
        path = write_tiny_eagle3(folder / "head.gguf", target, tensor_type=tensor_type, **options)  # type: ignore
    else:
        n_layers = int(kind)
        path = write_tiny_head(
            folder / "head.gguf", target, tensor_type=tensor_type, n_layers=n_layers, n_ff=n_embd, **options
        )  # type: ignore
    file, model = ModelFile.open(path), ModelFile.open(target)
    of_target = read_spec(model)
    return opened_heads(file, read_head_beside(file, model, of_target), model, of_target)


def block_of(
    folder: Path,
    tensor_type: str,
    most: int = 1 << 15,
    architecture: str = "qwen35",
    **options: object,
) -> Heads:
    """The block of a model's own file that drafts; most: tokens that it does draft, beside the special ones."""
    path = write_recurrent_model(folder / "mtp.gguf", architecture, tensor_type, n_nextn=1, **options)
    file, model = ModelFile.open(path), ModelFile.open(path)
    of_target = read_spec(model)
    return opened_heads(file, read_nextn_beside(file, of_target, most), model, of_target)


def opened_heads(file: ModelFile, spec: HeadSpec, model: ModelFile, of_target: ModelSpec) -> Heads:
    """file: of the head.  model: of the target."""

    def native(n_threads: int = 2, isa: str | None = None, n_batch: int = 64) -> NativeHeadSession:
        plan = NativeBackend().plan(model, of_target, LoadSettings(256, n_batch=64, n_threads=n_threads))
        device = Device(n_threads, isa)
        loaded = NativeBackend().load(model, of_target, plan, device)
        return load_head(
            file, spec, loaded, plan_head(file, spec, LoadSettings(256, n_batch=n_batch, n_threads=n_threads)), device
        ).session()

    return Heads(
        native,
        lambda: open_reference_head(file, spec, model, of_target, 256, "int8"),
        np.random.default_rng(5),
    )


@pytest.fixture(params=[2, "eagle3", *BLOCKS], ids=["gate", "eagle3", *BLOCKS])
def heads(request: pytest.FixtureRequest, tmp_path: Path) -> Heads:
    return heads_of(tmp_path, "F16", request.param)


@pytest.mark.parametrize("kind", [0, 1, 2, "eagle3", *BLOCKS])
@pytest.mark.parametrize("tensor_type", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K"])
def test_logits_and_features_equal_the_reference(tmp_path: Path, tensor_type: str, kind: int | str) -> None:
    heads = heads_of(tmp_path, tensor_type, kind)
    native, reference = heads.native(), heads.reference()
    errors: dict[int, list[float]] = {3: [], 30: []}
    for n in [3] * 12 + [30]:
        tokens, features = heads.rows(n)
        ours = native.forward(tokens, features, logits="all")
        theirs = reference.forward(tokens, features, logits="all")
        assert ours.hidden is not None and theirs.hidden is not None
        for a, b in ((ours.logits, theirs.logits), (ours.hidden[0], theirs.hidden[0])):
            errors[n].extend(np.abs(a - b).max(axis=1) / np.abs(b).max())
    # As in test_native: a rounding to int8 that tips over, or float32's own.
    assert np.mean(np.array(errors[3]) < 5e-6) > 0.6
    assert np.max(errors[3] + errors[30]) < (1e-3 if tensor_type in ("F32", "F16") else 3e-2)


EAGLE3_OPTIONS: list[dict[str, object]] = [
    {},
    {"norm_before_fc": True},
    {"norm_before_residual": True},
    {"has_embeddings": True, "n_embd": 104, "draft_vocab": None},
    {"rope_freqs": True, "has_embeddings": True},
    {"leave_out": "output", "draft_vocab": None},
]


@pytest.mark.parametrize("options", EAGLE3_OPTIONS, ids=" ".join)
def test_the_reference_of_eagle3_heads_equals_llama_cpp(
    tmp_path: Path, llama_cpp: ModuleType, options: dict[str, object]
) -> None:
    """From the target's rows on: which layers they are of, and all that a head makes of them."""
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama", "F32", n_embd=96, n_layers=4)
    layers = (1, 2, 3)
    head = write_tiny_eagle3(tmp_path / "head.gguf", path, tensor_type="F32", target_layers=layers, **options)  # type: ignore[arg-type]
    tokens = np.random.default_rng(1).integers(0, 291, 41)
    with ModelFile.open(head) as file, ModelFile.open(path) as model:
        spec, of_target = read_head(file), read_spec(model)
        backend, device = ReferenceBackend(), Device(1)
        session = backend.load(model, of_target, backend.plan(model, of_target, LoadSettings(64)), device).session()
        out = session.forward(tokens[:-1], hidden=spec.taps)
        theirs = llama_cpp_layer_inputs(llama_cpp, path, tokens[:-1], layers)
        assert out.hidden is not None and np.abs(out.hidden - theirs).max() < 1e-2 * np.abs(theirs).max()
        rows = np.concatenate(list(theirs), axis=1)
        features, logits, own = llama_cpp_eagle3(llama_cpp, head, path, rows, tokens[1:])
        reference = open_reference_head(file, spec, model, of_target, 256, "float32")
        assert np.abs(reference.combine(rows) - features).max() < 1e-5 * np.abs(features).max()
        ours = reference.forward(tokens[1:], features, logits="all")
        assert ours.hidden is not None and np.abs(ours.hidden[0] - own).max() < 3e-3 * np.abs(own).max()
        assert np.abs(ours.logits - logits[:, spec.draft_vocab]).max() < 3e-3 * np.abs(ours.logits).max()
        assert np.isneginf(np.delete(logits, spec.draft_vocab, axis=1)).all()


@pytest.mark.parametrize("architecture", [*BLOCKS.values(), "qwen3next"])
def test_the_reference_of_a_block_that_drafts_equals_llama_cpp(
    tmp_path: Path, llama_cpp: ModuleType, architecture: str
) -> None:
    """With the hidden rows of llama.cpp's own model, which are those of the reference."""
    path, tokens = (
        write_recurrent_model(tmp_path / "m.gguf", architecture, n_nextn=1),
        np.random.default_rng(1).integers(0, 259, 40),
    )
    hidden, logits, own = llama_cpp_mtp(llama_cpp, path, tokens)
    with ModelFile.open(path) as file, ModelFile.open(path) as model:
        spec, backend = read_spec(model), ReferenceBackend()
        session = backend.load(model, spec, backend.plan(model, spec, LoadSettings(64)), Device(1)).session()
        out = session.forward(tokens, hidden=True)
        assert out.hidden is not None and np.abs(out.hidden[0] - hidden).max() < 1e-4 * np.abs(hidden).max()
        block = open_reference_head(file, read_nextn_beside(file, spec), model, spec, 256, "float32")
        features = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
        ours = block.forward(tokens, features, logits="all")
        assert ours.hidden is not None and np.abs(ours.hidden[0] - own).max() < 1e-3 * np.abs(own).max()
        assert np.abs(ours.logits - logits).max() < 1e-3 * np.abs(logits).max()


@pytest.mark.parametrize("n_embd", [96, 104])
def test_a_block_that_drafts_has_rows_for_the_first_and_the_special_tokens(tmp_path: Path, n_embd: int) -> None:
    """Where the rows are whole blocks of the type that they are rewritten in."""
    heads = block_of(tmp_path, "F16", most=64, n_embd=n_embd)
    native, reference = heads.native(), heads.reference()
    ids = native.spec.draft_vocab.tolist()
    with ModelFile.open(tmp_path / "mtp.gguf") as file:
        special = sorted(Tokenizer.from_file(file).special_ids)
    assert len(special) > 2 and ids == ([*range(64), *special] if n_embd == 96 else [*range(291)])
    tokens, features = heads.rows(30)
    ours, theirs = (one.forward(tokens, features, logits="all").logits for one in (native, reference))
    assert ours.shape == (30, len(ids)) and np.abs(ours - theirs).max() < 3e-2 * np.abs(theirs).max()
    whole = block_of(tmp_path, "F16", n_embd=n_embd).native().forward(tokens, features, logits="all").logits[:, ids]
    assert np.abs(ours - whole).max() < 0.3 * np.abs(whole).max()  # of 4 bits


@pytest.mark.parametrize("options", EAGLE3_OPTIONS, ids=" ".join)
def test_what_an_eagle3_head_may_have_equals_the_reference(tmp_path: Path, options: dict[str, object]) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama", "F16", n_embd=96)
    head = write_tiny_eagle3(tmp_path / "head.gguf", path, **options)  # type: ignore[arg-type]
    with ModelFile.open(head) as file, ModelFile.open(path) as model:
        spec, of_target = read_head(file), read_spec(model)
        plan, device = NativeBackend().plan(model, of_target, LoadSettings(256, n_batch=64, n_threads=2)), Device(2)
        of_head = plan_head(file, spec, LoadSettings(256, n_batch=16, n_threads=2))
        native = load_head(file, spec, NativeBackend().load(model, of_target, plan, device), of_head, device).session()
        reference = open_reference_head(file, spec, model, of_target, 256, "int8")
        assert native.memory().weights == of_head.use.weights
        rng = np.random.default_rng(1)
        rows = rng.standard_normal((40, 3 * 96), dtype=np.float32)
        features = native.combine(rows)
        assert np.abs(features - reference.combine(rows)).max() < 1e-5
        tokens = rng.integers(0, 291, 40).astype(np.int32)
        ours, theirs = (one.forward(tokens, features, logits="all") for one in (native, reference))
        assert (
            ours.logits.shape == (40, spec.decoder.n_logits) and ours.hidden is not None and theirs.hidden is not None
        )
        for a, b in ((ours.logits, theirs.logits), (ours.hidden[0], theirs.hidden[0])):
            assert np.abs(a - b).max() < 1e-3 * np.abs(b).max()


@pytest.mark.parametrize("tensor_type", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("taps", [(1,), (0, 1), (0, 0, 1)], ids=str)
def test_a_head_with_a_gate_combines_rows_of_several_layers_as_the_reference_does(
    tmp_path: Path, tensor_type: str, taps: tuple[int, ...]
) -> None:
    heads = heads_of(tmp_path, tensor_type, 1, taps=taps)
    native, reference = heads.native(), heads.reference()
    rows = heads.rng.standard_normal((40, len(taps) * 256), dtype=np.float32)
    rows[:, :256] *= 30.0  # layers have rows of very different sizes
    features = native.combine(rows)
    errors = np.abs(features - reference.combine(rows)).max(axis=1) / np.abs(features).max()
    assert np.mean(errors < 5e-6) > 0.6 and errors.max() < (1e-3 if tensor_type in ("F32", "F16") else 3e-2)
    tokens = heads.rng.integers(0, 291, 3).astype(np.int32)
    ours, theirs = (head.forward(tokens, features[:3], logits="all").logits for head in (native, reference))
    assert np.abs(ours - theirs).max() < 3e-2 * np.abs(theirs).max()
    with ModelFile.open(tmp_path / "head.gguf") as file:
        assert (
            native.memory().weights
            == plan_head(file, read_head(file), LoadSettings(256, n_batch=64, n_threads=2)).use.weights
        )


@pytest.mark.parametrize(
    "kind, options",
    [("eagle3", {"n_embd": 104}), ("eagle3", {"n_embd": 104, "norm_before_fc": True}), (1, {"taps": (0, 1, 1)})],
    ids=str,
)
def test_rows_are_combined_to_the_same_bits_in_any_cut(
    tmp_path: Path, kind: int | str, options: dict[str, object]
) -> None:
    heads = heads_of(tmp_path, "F16", kind, **options)  # type: ignore[arg-type]
    rows = heads.rng.standard_normal((70, heads.reference().spec.n_rows), dtype=np.float32)
    whole = heads.native().combine(rows)
    for native in (
        heads.native(n_batch=5),
        heads.native(n_threads=3),
        *(heads.native(isa=isa) for isa in available_isas()),
    ):
        assert same_bits(native.combine(rows), whole)
        assert same_bits(np.concatenate([native.combine(row[None]) for row in rows[:20]]), whole[:20])
    for wrong in (rows[:, :-1], rows.astype(np.float64), rows[0]):
        with pytest.raises(ShapeError):
            heads.native().combine(wrong)


@pytest.mark.parametrize("architecture", ["granite", "gemma2"])
def test_embeddings_are_scaled_as_the_target_does_and_a_width_of_no_whole_vectors_works(
    tmp_path: Path, architecture: str
) -> None:
    heads = heads_of(tmp_path, "F16", 1, n_embd=104, architecture=architecture)
    native, reference = heads.native(), heads.reference()
    tokens, features = heads.rows(9)
    ours, theirs = (head.forward(tokens, features, logits="all").logits for head in (native, reference))
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


def test_the_same_bits_in_any_cut_with_any_threads_and_instruction_set(heads: Heads) -> None:
    tokens, features = heads.rows(40)
    whole = heads.native().forward(tokens, features, logits="all")
    assert whole.hidden is not None

    def cut(head: NativeHeadSession, sizes: list[int], commit: bool) -> bool:
        at, logits, hidden = 0, [], []
        for size in sizes:
            part = slice(at, at + size)
            out = head.forward(tokens[part], features[part], n_pending=0 if commit else at, logits="all")
            assert out.hidden is not None
            logits.append(out.logits)
            hidden.append(out.hidden[0])
            if commit:
                head.commit(range(size))
            at += size
        same_logits = same_bits(np.concatenate(logits), whole.logits)
        return same_logits and same_bits(np.concatenate(hidden), whole.hidden[0])

    for sizes in ([1] * 40, [7, 1, 32], [40]):
        for commit in (False, True):
            assert cut(heads.native(), sizes, commit), (sizes, commit)
    for n_batch in (5, 16):
        assert cut(heads.native(n_batch=n_batch), [40], True)
    for n_threads in (1, 3):
        assert cut(heads.native(n_threads=n_threads), [7, 33], True)
    for isa in available_isas():
        assert cut(heads.native(isa=isa), [1, 39], True), isa
        assert same_bits(heads.native(isa=isa).forward(tokens, features, logits=[39, 3]).logits, whole.logits[[39, 3]])


@pytest.mark.parametrize("cuts", [[13], [1, 12], [1, 1, 3, 8]])
def test_a_tree_grown_level_by_level_equals_its_branches_alone(heads: Heads, cuts: list[int]) -> None:
    """Nodes of TREE are in the order of their rows, so that any first part of it is a tree."""
    tokens, features = heads.rows(20 + len(TREE))
    for head in (heads.native(), heads.reference()):
        check_branches_of_a_head(head, tokens, features, cuts, same_bits)


def test_truncation_takes_back_what_was_committed(heads: Heads) -> None:
    tokens, features = heads.rows(30)
    head = heads.native()
    head.forward(tokens, features)
    head.commit(range(30))
    head.truncate(10)
    assert head.n_past == 10
    again = head.forward(tokens[10:], features[10:], logits="all").logits
    fresh = heads.native().forward(tokens, features, logits="all").logits
    assert same_bits(again, fresh[10:])


def test_a_head_holds_what_was_planned_and_shares_the_targets_embeddings(tmp_path: Path) -> None:
    heads = heads_of(tmp_path, "Q8_0", 1)
    head = heads.native()
    with ModelFile.open(tmp_path / "head.gguf") as file:
        plan = plan_head(file, read_head(file), LoadSettings(256, n_batch=64, n_threads=2))
    tokens, features = heads.rows(255)
    head.forward(tokens, features)
    page = 1 << 21  # as in test_native
    for planned, used in zip(vars(plan.use).values(), vars(head.memory()).values(), strict=True):
        assert planned <= used < planned + page
    assert head.model._embedding_bytes == 0 and head.model.memory().weights == plan.use.weights


def test_misuse_raises_and_leaves_the_head_as_it_was(heads: Heads) -> None:
    tokens, features = heads.rows(12)
    for head in (heads.native(n_batch=8), heads.reference()):
        expected = head.forward(tokens[:4], features[:4]).logits
        for arguments, options in [
            ((tokens[:4], features[:3]), {}),
            ((tokens[:4], features[:4].astype(np.float64)), {}),
            ((tokens[:4], features[:4, :-1]), {}),
            ((np.array([291]), features[:1]), {}),
            ((tokens[:4], features[:4], [-1, 0, 1, 3]), {}),
            ((tokens[:4], features[:4]), {"n_pending": 5}),
            ((tokens[:4], features[:4]), {"n_pending": -1}),
        ]:
            with pytest.raises(ShapeError):
                head.forward(*arguments, **options)
        with pytest.raises(ContextOverflow):
            head.forward(np.zeros(257, dtype=np.int32), np.zeros((257, 256), dtype=np.float32))
        assert same_bits(head.forward(tokens[:4], features[:4]).logits, expected)
    native = heads.native(n_batch=8)
    native.forward(tokens[:6], features[:6], [-1, 0, 0, 1, 1, 2])
    with pytest.raises(ShapeError, match="a tree must fit"):
        native.forward(tokens[6:], features[6:], [2, 3, 4, 5, 6, 7], n_pending=6)
    native.close()
    with pytest.raises(EdgeInferError, match="closed"):
        native.forward(tokens, features)


def test_an_interrupt_stops_a_pass_between_its_batches(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, features = heads.rows(12)
    head = heads.native(n_batch=4)
    n_whole = 0

    class Stopping:
        def __init__(self, decoder: object) -> None:
            self._decoder = decoder

        def __getattr__(self, name: str) -> object:
            return getattr(self._decoder, name)

        def forward(self, *arguments: object) -> object:
            nonlocal n_whole
            is_whole = self._decoder.forward(*arguments)  # type: ignore[attr-defined]
            n_whole += is_whole
            head.interrupt()
            return is_whole

    monkeypatch.setattr(head.model, "_decoder", Stopping(head.model.decoder()))
    with pytest.raises(Interrupted):
        head.forward(tokens, features)
    assert n_whole == 1 and head.n_past == 0
