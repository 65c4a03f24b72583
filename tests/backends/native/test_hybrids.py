"""Recurrent layers on the native engine: the bits of a text depend on nothing but the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import LEAVES, TREE, branch_to, comparisons, same_bits
from interrupts import interrupted_every
from recurrent_models import RECURRENT_MODELS, write_recurrent_model
from rounded import check_rounded
from tiny_hybrids import write_tiny_hybrid
from tiny_mamba import write_tiny_mamba

from edgeinfer.backends.base import Rows, run_sequence
from edgeinfer.backends.native import NativeBackend, NativeModel, NativeSession, available_isas
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.errors import Interrupted, ShapeError, UnsupportedModel
from edgeinfer.common.settings import CacheType, LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

N_CTX, N_BATCH = 512, 64
MOST_ROWS, BACK = 32, 32  # tokens whose rows are kept, and tokens before the end of a chain where a checkpoint is


class Opener:
    """Sessions of one model file."""

    def __init__(self, path: Path, cache_type: CacheType = "f16") -> None:
        self.file = ModelFile.open(path)
        self.spec = read_spec(self.file)
        self.cache_type = cache_type

    def model(self, n_threads: int = 1, isa: str | None = None, n_batch: int = N_BATCH, **settings: Any) -> NativeModel:
        backend = NativeBackend(tuned=False)
        settings |= {"n_threads": n_threads, "cache_type": self.cache_type}
        plan = backend.plan(self.file, self.spec, LoadSettings(N_CTX, n_batch=n_batch, **settings))
        return backend.load(self.file, self.spec, plan, Device(n_threads, isa))

    def __call__(self, n_threads: int = 1, isa: str | None = None, n_batch: int = N_BATCH) -> NativeSession:
        return self.model(n_threads, isa, n_batch).session()


@pytest.fixture(scope="module", params=RECURRENT_MODELS)
def opener(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opener:
    return Opener(write_recurrent_model(tmp_path_factory.mktemp("hybrids") / "m.gguf", request.param, "Q8_0"))


@pytest.fixture(scope="module", params=["qwen35", "lfm2", "granitehybrid", "falcon-h1"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opener:
    return Opener(write_recurrent_model(tmp_path_factory.mktemp("dense") / "m.gguf", request.param, "Q8_0"))


def some_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 291, n)]


def read(session: NativeSession, tokens: Sequence[int]) -> np.ndarray:
    """All logits of tokens, which are committed."""
    return run_sequence(session, tokens, logits="all").logits.copy()


# ---- against others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", RECURRENT_MODELS)
def test_the_order_of_operations_is_as_good_as_the_textbook_s(
    architecture: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path, tokens = write_recurrent_model(tmp_path / "m.gguf", architecture), rng.integers(0, 291, 200)
    found, expected = [], []
    with ModelFile.open(path) as file:
        spec = read_spec(file)
        for backend, outputs in ((NativeBackend(tuned=False), found), (ReferenceBackend(), expected)):
            session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(256)), Device(1)).session()
            output = session.forward(tokens, logits="all", hidden=[0])
            outputs += [output.hidden, output.logits]
    assert np.abs(found[0] - expected[0]).max() < 1e-6 * np.abs(expected[0]).max()  # a recurrent layer alone
    assert np.abs(found[1] - expected[1]).max() < 1e-3  # keys and values, rounded to halves, may fall on other ones


@pytest.mark.parametrize("tensor_type", ["Q4_K", "Q6_K", "F16"])
def test_quantised_layers_are_those_of_the_reference(
    tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    with ModelFile.open(write_tiny_hybrid(tmp_path / "m.gguf", "qwen35", tensor_type)) as file:
        spec, sessions = read_spec(file), []
        for backend in (NativeBackend(tuned=False), ReferenceBackend("int8")):
            plan = backend.plan(file, spec, LoadSettings(64))
            sessions.append(backend.load(file, spec, plan, Device(1)).session())
    check_rounded(sessions, rng)


# ---- the same bits -------------------------------------------------------------------------------------------------


def test_the_bits_depend_on_nothing_but_the_text(opener: Opener, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 291, 150).astype(np.int32)
    differing = [what for what, equal in comparisons(opener, available_isas(), tokens) if not equal]
    assert differing == []


@pytest.mark.parametrize("cache_type", ["q8_0", "k6v4"])
def test_the_type_of_the_kv_cache_is_that_of_attention_alone(
    cache_type: CacheType, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_hybrid(tmp_path / "m.gguf", "qwen35", "Q8_0")
    plain, other = Opener(path), Opener(path, cache_type)
    tokens = rng.integers(0, 291, 100).astype(np.int32)
    differing = [what for what, equal in comparisons(other, (), tokens, sizes=(1, 5)) if not equal]
    assert differing == []
    hidden = [each().forward(tokens[:60], hidden=[2, 3]).hidden for each in (plain, other)]
    assert hidden[0] is not None and hidden[1] is not None
    assert same_bits(hidden[0][0], hidden[1][0]) and not same_bits(hidden[0][1], hidden[1][1])


@pytest.mark.parametrize("shape", [{"n_state": 16}, {"n_state": 48}, {"n_key_heads": 1, "n_value_heads": 1}])
def test_states_of_other_shapes(shape: dict[str, int], tmp_path: Path, rng: np.random.Generator) -> None:
    """Blocks of 16 columns, of 32 and then 16, and one head."""
    opener = Opener(write_tiny_hybrid(tmp_path / "m.gguf", "qwen35", "F32", **shape))
    tokens = rng.integers(0, 291, 100).astype(np.int32)
    assert [what for what, equal in comparisons(opener, (), tokens, sizes=(1, 3, 16)) if not equal] == []
    backend = ReferenceBackend()
    plan = backend.plan(opener.file, opener.spec, LoadSettings(128))
    expected = backend.load(opener.file, opener.spec, plan, Device(1)).session().forward(tokens, logits="all").logits
    assert np.abs(read(opener(), tokens.tolist()) - expected).max() < 1e-3


@pytest.mark.parametrize(
    "shape", [{"n_mamba_heads": 16}, {"n_per_key": 48}, {"n_mamba_heads": 4, "n_groups": 1}, {"n_groups": 8}]
)
def test_states_of_mamba_of_other_shapes(shape: dict[str, int], tmp_path: Path, rng: np.random.Generator) -> None:
    """Heads of 16, 32 and 64 numbers; keys of 16 and 48; groups of one and of all heads."""
    opener = Opener(write_tiny_mamba(tmp_path / "m.gguf", "granitehybrid", "F32", **shape))
    tokens = rng.integers(0, 291, 100).astype(np.int32)
    assert [what for what, equal in comparisons(opener, (), tokens, sizes=(1, 3, 16)) if not equal] == []
    backend = ReferenceBackend()
    plan = backend.plan(opener.file, opener.spec, LoadSettings(128))
    expected = backend.load(opener.file, opener.spec, plan, Device(1)).session().forward(tokens, logits="all").logits
    assert np.abs(read(opener(), tokens.tolist()) - expected).max() < 1e-3


class Text:
    """A session that does what comes, compared with another one that reads the same text from its start."""

    def __init__(self, model: NativeModel, rng: np.random.Generator) -> None:
        self.model, self.rng = model, rng
        self.session, self._fresh = model.session(), model.session(N_CTX)  # which has memory of its own
        self.tokens: list[int] = []
        self.asked: list[list[int]] = []
        self.n_reached: list[bool] = []

    def check(self, logits: np.ndarray, after: Sequence[int], n_dropped: int = 0) -> None:
        """That these are the logits of the last tokens of `after`, which follow the text."""
        self._fresh.truncate(0)
        expected = read(self._fresh, [*self.tokens, *after])[len(self.tokens) + n_dropped :]
        assert same_bits(np.ascontiguousarray(logits), expected)

    def decode(self) -> None:
        token = some_tokens(self.rng, 1)
        self.check(self.session.forward(token).logits, token)
        self.session.commit([0])
        self.tokens += token

    def chain(self) -> None:
        """A part of it is committed now and then."""
        n = int(self.rng.integers(2, N_BATCH + 1))
        tokens = some_tokens(self.rng, n)
        self.check(self.session.forward(tokens, logits="all").logits, tokens)
        if self.rng.random() < 0.2:  # more after it, before anything is committed
            more = some_tokens(self.rng, int(self.rng.integers(1, N_BATCH + 1)))
            logits = self.session.forward(more, n_pending=n, logits="all").logits
            self.check(logits, [*tokens, *more], n)
            tokens += more
        kept = len(tokens) if self.rng.random() < 0.7 else int(self.rng.integers(len(tokens)))
        self.session.commit(range(kept))
        self.tokens += tokens[:kept]

    def tree(self) -> None:
        """It grows once more now and then."""
        n = int(self.rng.integers(2, MOST_ROWS + 1))
        tokens, parents = some_tokens(self.rng, n), [int(self.rng.integers(max(-1, i - 6), i)) for i in range(n)]
        self._check_branch(self.session.forward(tokens, parents, logits="all").logits, tokens, parents, 0)
        if n < MOST_ROWS and self.rng.random() < 0.4:
            kept = int(self.rng.integers(1, n + 1))
            n_more = int(self.rng.integers(1, MOST_ROWS + 1 - kept))
            tokens, parents = tokens[:kept] + some_tokens(self.rng, n_more), parents[:kept]
            parents += [int(self.rng.integers(-1, kept + i)) for i in range(n_more)]
            logits = self.session.forward(tokens[kept:], parents[kept:], n_pending=kept, logits="all").logits
            self._check_branch(logits, tokens, parents, kept)
        branch = branch_to(int(self.rng.integers(len(tokens))), parents)
        branch = branch[: int(self.rng.integers(len(branch) + 1))]
        self.session.commit(branch)
        self.tokens += [tokens[row] for row in branch]

    def _check_branch(self, logits: np.ndarray, tokens: list[int], parents: list[int], first: int) -> None:
        branch = branch_to(int(self.rng.integers(first, len(tokens))), parents)
        new = [row for row in branch if row >= first]
        self.check(logits[[row - first for row in new]], [tokens[row] for row in branch], len(branch) - len(new))

    def truncate(self) -> None:
        n = int(self.rng.integers(len(self.tokens) + 1))
        n = max(n, len(self.tokens) - 40) if self.rng.random() < 0.5 else n
        reached = self.session.truncate(n)
        assert reached <= n
        self.n_reached.append(reached > 0)
        del self.tokens[reached:]

    def ask(self) -> None:
        """Another prompt, that begins as one before."""
        self.asked.append(list(self.tokens))
        before = self.asked[int(self.rng.integers(len(self.asked)))]
        prompt = before[: int(self.rng.integers(len(before) + 1))] + some_tokens(
            self.rng, int(self.rng.integers(2, 50))
        )
        reached = self.session.reuse_prefix(prompt[:-1])
        self.n_reached.append(reached > 0)
        self.tokens = prompt[:reached]
        logits = read(self.session, prompt[reached:])
        self.check(logits, prompt[reached:])
        self.tokens = prompt

    def go_on(self, n_steps: int) -> None:
        steps: list[Callable[[], None]] = [self.decode, self.decode, self.chain, self.tree, self.tree]
        for _ in range(n_steps):
            too_long = len(self.tokens) > N_CTX - 3 * N_BATCH
            self.rng.choice([self.truncate, self.ask] if too_long else [*steps, self.truncate, self.ask])()  # type: ignore[arg-type]
            assert self.session.n_past == len(self.tokens)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_a_session_did_before(dense: Opener, seed: int) -> None:
    text = Text(dense.model(n_threads=2), np.random.default_rng(seed))
    text.go_on(150)
    assert 5 < sum(text.n_reached) < len(text.n_reached)  # both kinds came


def test_experts_in_a_hybrid_with_a_small_cache(tmp_path: Path) -> None:
    for architecture in ("qwen35moe", "lfm2moe", "granitehybrid+experts", "nemotron_h_moe", "nemotron_h_moe+latent"):
        opener = Opener(write_recurrent_model(tmp_path / f"{architecture}.gguf", architecture, "Q8_0"))
        sizes = NativeBackend().expert_sizes(opener.file, opener.spec)
        resident, cached = opener.model(), opener.model(expert_cache=max(sizes.total // 4, sizes.least))
        tokens = some_tokens(np.random.default_rng(4), 60)
        assert same_bits(read(resident.session(), tokens), read(cached.session(), tokens))
        Text(cached, np.random.default_rng(5)).go_on(15)


def test_experts_with_rows_of_their_own_from_packed_weights(tmp_path: Path) -> None:
    path, tokens = tmp_path / "m.gguf", some_tokens(np.random.default_rng(4), 60)
    opener = Opener(write_tiny_mamba(path, "nemotron_h_moe+latent", "Q4_K"))
    expected, sizes = read(opener(), tokens), NativeBackend().expert_sizes(opener.file, opener.spec)
    NativeBackend().pack(opener.file, opener.spec, packed_path(path))
    assert opener.model().memory().mapped_experts == sizes.total
    assert same_bits(read(opener(), tokens), expected)
    assert same_bits(read(opener.model(expert_cache=sizes.least).session(), tokens), expected)


@pytest.mark.parametrize("n_latent, tensor_type", [(32, "Q8_0"), (40, "F16"), (192, "Q8_0"), (256, "Q4_K")])
def test_rows_of_experts_may_be_shorter_or_longer_than_the_stream(
    n_latent: int, tensor_type: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_mamba(tmp_path / "m.gguf", "nemotron_h_moe+latent", tensor_type, n_latent=n_latent)
    tokens = rng.integers(0, 291, 100).astype(np.int32)
    assert [what for what, equal in comparisons(Opener(path), available_isas(), tokens) if not equal] == []
    with ModelFile.open(path) as file:
        spec, sessions = read_spec(file), []
        for backend in (NativeBackend(tuned=False), ReferenceBackend("int8")):
            plan = backend.plan(file, spec, LoadSettings(64))
            sessions.append(backend.load(file, spec, plan, Device(1)).session())
    check_rounded(sessions, rng)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_states_of_texts_in_one_pass_do_not_mix(dense: Opener, seed: int) -> None:
    rng, model = np.random.default_rng(seed), dense.model(n_threads=2, parallel=8, cache_ram="1MiB")
    texts = [Text(model, rng) for _ in range(8)]
    for text in texts:
        text.chain()
    for _ in range(6):
        batch, kept = [], []
        for text in texts:
            n = int(rng.integers(1, 12))
            is_tree = rng.random() < 0.5
            tokens = some_tokens(rng, len(TREE) if is_tree else n)
            batch.append(Rows(text.session, tokens, TREE if is_tree else None, "all"))
            kept.append(branch_to(int(rng.choice(LEAVES)), TREE) if is_tree else list(range(n)))
        outputs = model.forward(batch)
        for text, rows, branch, output in zip(texts, batch, kept, outputs, strict=True):
            tokens = [int(np.asarray(rows.tokens)[row]) for row in branch]
            text.check(output.logits[branch], tokens)
            text.session.commit(branch)
            text.tokens += tokens


def test_a_pass_that_is_stopped_changes_nothing(dense: Opener, rng: np.random.Generator) -> None:
    """Some heads of some layers may have their committed rows applied by then, and others not."""
    text, n_stopped = Text(dense.model(n_threads=2), rng), 0
    text.chain()
    for attempt in range(4000):
        with interrupted_every(0.0002, text.session):
            try:
                text.session.forward(some_tokens(rng, int(rng.integers(1, N_BATCH))))
                text.session.commit(())
            except Interrupted:
                n_stopped += 1
        if attempt % 8 == 0:
            text.decode()
        if n_stopped > 8:
            break
    text.decode()
    assert n_stopped > 8


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_cut_within_the_last_tokens_is_free(dense: Opener, rng: np.random.Generator) -> None:
    session = dense()
    read(session, some_tokens(rng, 40))
    session.forward(some_tokens(rng, 10))
    session.commit(range(10))
    assert session.truncate(47) == 47
    session.forward(some_tokens(rng, 5))
    session.commit(range(5))
    assert session.truncate(50) == 50 and session.truncate(47) == 47
    assert session.truncate(46) == 8  # what was committed before is in the state by now


def test_a_conversation_whose_prompt_ends_otherwise_reads_its_last_turn_anew(
    dense: Opener, rng: np.random.Generator
) -> None:
    """As templates change it that leave earlier thoughts out."""
    text = Text(dense.model(n_batch=512), rng)
    prompt, text.tokens = some_tokens(rng, 300), []
    assert text.session.reuse_prefix(prompt[:-1]) == 0
    text.check(read(text.session, prompt), prompt)
    text.tokens = list(prompt)
    for _ in range(50):
        text.decode()
    second = prompt[:-4] + some_tokens(rng, 60)
    assert text.session.reuse_prefix(second[:-1]) == 300 - BACK
    text.tokens = second[: 300 - BACK]
    text.check(read(text.session, second[300 - BACK :]), second[300 - BACK :])
    text.tokens = list(second)
    for _ in range(20):
        text.decode()
    assert text.session.reuse_prefix([*second[:-2], 7, 8]) == len(second) - BACK
    # The start of the request before is still there, and where the text goes on nothing is read again.
    assert text.session.reuse_prefix([*prompt[:280], 7, 8]) == 300 - BACK


def test_a_text_that_goes_on_is_not_read_again(dense: Opener, rng: np.random.Generator) -> None:
    session, prompt = dense(), some_tokens(rng, 100)
    read(session, prompt)
    answer = some_tokens(rng, 9)
    read(session, answer)
    assert session.reuse_prefix([*prompt, *answer, 1, 2, 3]) == 109


def test_long_texts_keep_checkpoints_at_growing_distances(dense: Opener, rng: np.random.Generator) -> None:
    session, text = dense(n_batch=64), some_tokens(rng, 448)
    read(session, text)
    reached = sorted({session.reuse_prefix([*text[:n], 0]) for n in (440, 380, 300, 200, 100)})
    assert reached[-1] == 448 - BACK and len(reached) > 2
    assert all(n % 64 == BACK or n == 0 for n in reached)


def test_the_time_of_the_recurrence_is_a_part_of_a_pass(dense: Opener, rng: np.random.Generator) -> None:
    model = dense.model()
    session = model.session()
    began = time.perf_counter()
    session.forward(some_tokens(rng, 8))
    assert 0.0 < model.decoder().recurrence_seconds < time.perf_counter() - began


def test_what_is_held_is_within_the_plan(opener: Opener, rng: np.random.Generator) -> None:
    text = Text(opener.model(), rng)
    text.go_on(10)
    planned = NativeBackend().plan(opener.file, opener.spec, LoadSettings(N_CTX, n_batch=N_BATCH)).use.kv_cache
    assert 0 < text.session.memory().kv_cache <= planned
    states = [layer.mixer for layer in opener.spec.layers if layer.mixer.state_kind == "recurrent"]
    assert planned > 4 * sum(state.state_bytes(N_CTX, "f16") for state in states)


# ---- refused -------------------------------------------------------------------------------------------------------


def test_a_tree_of_more_tokens_than_have_rows_is_refused(dense: Opener, rng: np.random.Generator) -> None:
    session = dense()
    parents = [-1, *[0] * MOST_ROWS]
    with pytest.raises(ShapeError, match="recurrent layers, so a tree must fit into 32 tokens"):
        session.forward(some_tokens(rng, MOST_ROWS + 1), parents)
    session.forward(some_tokens(rng, MOST_ROWS), parents[:-1])
    session.commit([0, 5])


def test_of_a_long_chain_that_is_pending_all_stay_or_none(dense: Opener, rng: np.random.Generator) -> None:
    text = Text(dense.model(), rng)
    tokens = some_tokens(rng, 50)
    text.session.forward(tokens)
    with pytest.raises(ShapeError, match="of a chain of more that is pending all must stay or none: found 46 tokens"):
        text.session.forward([1], n_pending=45)
    with pytest.raises(ShapeError, match="recurrent layers"):
        text.session.forward([1, 2], [49, 20], n_pending=50)
    text.check(text.session.forward([1, 2], [49, 49], n_pending=50, logits="all").logits[1:], [*tokens, 2], 50)
    text.session.commit([*range(50), 51])
    text.tokens = [*tokens, 2]
    text.decode()


def test_heads_that_no_kernel_has_are_refused(tmp_path: Path) -> None:
    with ModelFile.open(write_tiny_hybrid(tmp_path / "m.gguf", "qwen35", n_state=24)) as file:
        with pytest.raises(UnsupportedModel, match=r"layers\.0\.mixer has heads of 24 numbers, .* a multiple of 16"):
            NativeBackend().plan(file, read_spec(file), LoadSettings(64))
    with ModelFile.open(write_tiny_mamba(tmp_path / "k.gguf", n_per_key=24)) as file:
        with pytest.raises(UnsupportedModel, match=r"layers\.0\.mixer has keys of 24 numbers, .* a multiple of 16"):
            NativeBackend().plan(file, read_spec(file), LoadSettings(64))
    with ModelFile.open(write_tiny_hybrid(tmp_path / "n.gguf", "lfm2", n_embd=100, n_heads=2)) as file:
        with pytest.raises(UnsupportedModel, match=r"layers\.0\.mixer has rows of 100 numbers"):
            NativeBackend().plan(file, read_spec(file), LoadSettings(64))
