"""The head, and drafting with it: its equations in numpy, and steps in parallel against one node after the other."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from parts import missing

if importlib.util.find_spec("torch") is None:
    missing("train", "torch is not installed: pip install 'edgeinfer[train]'")
import torch

from edgeinfer.backends.reference_math import attend, rms_norm, rotate, silu
from edgeinfer.models import RopeSpec
from edgeinfer.models.rope import inverse_frequencies
from edgeinfer.training import rounds
from edgeinfer.training.batches import Batch, Batches, pack
from edgeinfer.training.corpus import TrainingText
from edgeinfer.training.features import Sample
from edgeinfer.training.head import DraftHead, HeadSizes
from edgeinfer.training.objective import Objective, Weights, chain_mask, linear_guess
from edgeinfer.training.replay import BEAM, DEPTH, Replay, tokens_per_step
from edgeinfer.training.rounds import Rounds

N_VOCAB, N_EMBD = 40, 32
VOCABULARY = np.array([0, 2, 3, 5, 8, 9, 13, 21, 30, 34, 35, 36, 37, 38, 39])


def a_head(n_layers: int, seed: int = 0, n_taps: int = 0) -> DraftHead:
    torch.manual_seed(seed)
    head = DraftHead(HeadSizes(N_EMBD, n_layers, 48, 4, 2, 1e-5, 500.0, 64, n_taps))
    for name, values in head.named_parameters():
        if name.endswith("norm.weight"):
            values.data += 0.2 * torch.randn_like(values)
    return head.eval()


@pytest.fixture
def embedding() -> torch.Tensor:
    return torch.randn((N_VOCAB, N_EMBD), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def output() -> torch.Tensor:
    return torch.randn((len(VOCABULARY), N_EMBD), generator=torch.Generator().manual_seed(2)) * 0.5


def in_numpy(weights: dict[str, np.ndarray], n_layers: int, features: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    """The equations of docs/draft-heads.md for a chain of rows at positions 0, 1, ...: (n, n_embd)."""
    rope = RopeSpec("interleaved", 8, tuple(inverse_frequencies(500.0, 8)))
    h1 = features @ weights["gate.feature.weight"].T
    h2 = silu(rms_norm(embeddings, weights["gate.token_norm.weight"], 1e-5) @ weights["gate.token.weight"].T)
    z = 1 / (1 + np.exp(-np.concatenate([h1, h2], axis=1) @ weights["gate.mix.weight"].T))
    x = z * h1 + (1 - z) * h2
    positions = np.arange(len(x))
    for layer in range(n_layers):
        block = {name.split(".")[2]: values for name, values in weights.items() if name.startswith(f"blk.{layer}.")}
        h = rms_norm(x, block["attn_norm"], 1e-5)
        q, k = (rotate((h @ block[name].T).reshape(len(x), -1, 8), positions, rope) for name in ("attn_q", "attn_k"))
        v = (h @ block["attn_v"].T).reshape(len(x), -1, 8)
        y = [attend(q[i] / np.sqrt(np.float32(8)), k[: i + 1], v[: i + 1]).reshape(-1) for i in range(len(x))]
        x = x + np.stack(y) @ block["attn_output"].T
        h = rms_norm(x, block["ffn_norm"], 1e-5)
        x = x + (silu(h @ block["ffn_gate"].T) * (h @ block["ffn_up"].T)) @ block["ffn_down"].T
    return x


@pytest.mark.parametrize("n_layers", [0, 1, 2])
def test_the_head_computes_its_equations(n_layers: int, rng: np.random.Generator) -> None:
    head = a_head(n_layers)
    features, embeddings = rng.standard_normal((2, 9, N_EMBD), dtype=np.float32)
    place = torch.arange(9)
    rows, _ = head(
        torch.from_numpy(features)[None],
        torch.from_numpy(embeddings)[None],
        place[None],
        (place[:, None] >= place)[None, None],
    )
    expected = in_numpy(head.tensors(), n_layers, features, embeddings)
    assert_allclose(rows[0].detach().numpy(), expected, atol=2e-5)
    other = a_head(n_layers, seed=5)
    other.load_tensors(head.tensors())
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), other.parameters(), strict=True))


def test_rows_of_several_layers_are_combined_as_documented(rng: np.random.Generator) -> None:
    head = a_head(1, n_taps=3)
    rows = 5.0 * rng.standard_normal((7, 3 * N_EMBD), dtype=np.float32)
    tensors = head.tensors()
    gains = tensors["combine_norm.weight"].reshape(3, N_EMBD)
    normed = [rms_norm(part, gain, 1e-5) for part, gain in zip(np.split(rows, 3, axis=1), gains, strict=True)]
    expected = np.concatenate(normed, axis=1) @ tensors["combine.weight"].T
    with torch.no_grad():
        assert_allclose(head.combined(torch.from_numpy(rows)).numpy(), expected, atol=1e-5)
    other = a_head(1, seed=5, n_taps=3)
    other.load_tensors(tensors)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), other.parameters(), strict=True))


def test_a_head_with_taps_begins_with_what_the_last_norm_gives(rng: np.random.Generator) -> None:
    head, rows = a_head(1, n_taps=2), rng.standard_normal((7, 2 * N_EMBD), dtype=np.float32)
    last_norm = 3.0 + rng.standard_normal(N_EMBD, dtype=np.float32)
    head.begin_with(torch.eye(N_EMBD), torch.from_numpy(last_norm))
    with torch.no_grad():
        found = head.combined(torch.from_numpy(rows)).numpy()
    assert_allclose(found, rms_norm(rows[:, N_EMBD:], last_norm, 1e-5), atol=1e-5)
    assert_allclose(head.combine_norm.weight[:N_EMBD].detach().numpy(), np.sqrt(np.mean(last_norm**2)), rtol=1e-5)


def drafted(
    weights: dict[str, np.ndarray], n_layers: int, features: np.ndarray, embeddings: np.ndarray, n_known: int
) -> np.ndarray:
    """The last row's predicted feature where only the first n_known features are the target's."""
    features = features[:n_known].copy()
    while True:
        rows = in_numpy(weights, n_layers, features, embeddings[: len(features)])
        if len(features) == len(embeddings):
            return rows[-1]
        features = np.concatenate([features, rows[-1:]])


def a_batch(rng: np.random.Generator, lengths: list[list[int]], m: int, n_rows: int = N_EMBD) -> Batch:
    """Rows of random texts of these lengths, all but the last position of each judged."""
    n = len(lengths)
    tokens = rng.integers(0, N_VOCAB, (n, m))
    positions, documents = np.zeros((2, n, m), dtype=np.int64)
    places = []
    for row, of_row in enumerate(lengths):
        start = 0
        for number, length in enumerate(of_row, start=1):
            positions[row, start : start + length] = range(length)
            documents[row, start : start + length] = number
            places += range(row * m + start, row * m + start + length - 1)
            start += length
    draft_ids = np.full(N_VOCAB, -1)
    draft_ids[VOCABULARY] = np.arange(len(VOCABULARY))
    labels = draft_ids[tokens.reshape(-1)[np.array(places) + 1]]
    features = torch.from_numpy(rng.standard_normal((n, m, n_rows), dtype=np.float32))
    arrays = (torch.from_numpy(each) for each in (tokens, positions, documents))
    return Batch(*arrays, features, torch.tensor(places), torch.from_numpy(labels))


@pytest.mark.parametrize("n_layers", [0, 1, 2])
def test_steps_in_parallel_equal_drafting_one_after_the_other(
    n_layers: int, rng: np.random.Generator, embedding: torch.Tensor, output: torch.Tensor
) -> None:
    head = a_head(n_layers)
    batch = a_batch(rng, [[7, 4], [10]], 12)
    objective = Objective(head, embedding, output, 1.0, Weights(1.0, 1.0, 0.8, 0.0))
    with torch.no_grad():
        steps = objective._steps(batch, batch.features, 3)
    weights = head.tensors()
    for row, start, length in ((0, 0, 7), (0, 7, 4), (1, 0, 10)):
        features = batch.features[row, start : start + length].numpy()
        embeddings = embedding[batch.tokens[row, start : start + length]].numpy()
        for step in range(3):
            for i in range(step, length):
                expected = drafted(weights, n_layers, features, embeddings[: i + 1], i + 1 - step)
                assert_allclose(steps[step][row, start + i].numpy(), expected, atol=1e-4)


def test_a_row_sees_its_own_text_and_its_own_chain(rng: np.random.Generator) -> None:
    documents = torch.tensor([[1, 1, 1, 2, 2, 0]])
    assert chain_mask(documents, 0)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    third = chain_mask(documents, 2)[0, 0, 2].int().tolist()
    assert third == [1, 0, 0, 0, 0, 0] + [0, 1, 0, 0, 0, 0] + [0, 0, 1, 0, 0, 0]


def test_matches_count_chains_that_are_right_up_to_each_depth(
    rng: np.random.Generator, embedding: torch.Tensor, output: torch.Tensor
) -> None:
    head = a_head(1)
    batch = a_batch(rng, [[9, 3], [12]], 12)
    objective = Objective(head, embedding, output, 1.0, Weights(1.0, 1.0, 0.8, 0.0))
    with torch.no_grad():
        tokens = [
            VOCABULARY[(rows @ output.T).argmax(dim=-1).numpy()] for rows in objective._steps(batch, batch.features, 3)
        ]
    expected = np.zeros((3, 2), dtype=int)
    texts = [(0, 0, 9), (0, 9, 3), (1, 0, 12)]
    # One chain out of three is made right, so that deeper ones are counted at all.
    labels, places = batch.labels.clone(), batch.places.tolist()
    for n, place in enumerate(places):
        if n % 3:
            drawn = tokens[n % 3 - 1][place // 12, place % 12]
            labels[n] = int(np.flatnonzero(VOCABULARY == drawn)[0])
    batch = Batch(batch.tokens, batch.positions, batch.documents, batch.features, batch.places, labels)
    label_of = dict(zip(places, labels.tolist(), strict=True))
    for row, start, length in texts:
        for first in range(length):
            for step in range(3):
                place = row * 12 + start + first + step
                if first + step >= length or place not in label_of:
                    break
                expected[step, 0] += 1
                if VOCABULARY[label_of[place]] != tokens[step][row, start + first + step] or label_of[place] < 0:
                    break
                expected[step, 1] += 1
    assert_array_equal(objective.matches(batch, 3).numpy(), expected)
    assert expected[1, 1] > 0


def last_part(rows: torch.Tensor) -> torch.Tensor:
    """Features of rows of layers, as if there were no last norm."""
    return rows[..., -N_EMBD:]


@pytest.mark.parametrize("n_taps", [0, 2])
def test_losses_are_what_they_are_defined_as_and_fall_with_the_gradient(
    n_taps: int, rng: np.random.Generator, embedding: torch.Tensor, output: torch.Tensor
) -> None:
    head = a_head(1, n_taps=n_taps)
    batch = a_batch(rng, [[7, 4], [10]], 12, N_EMBD * max(1, n_taps))
    objective = Objective(head, embedding, output, 2.0, Weights(0.7, 0.3, 0.5, 0.0), last_part)
    noise = torch.rand((*batch.tokens.shape, N_EMBD))
    with torch.no_grad():
        combined = head.combined(batch.features)
        steps = [rows.flatten(0, 1)[batch.places].numpy() for rows in objective._steps(batch, combined, 2)]
        loss, parts = objective(batch, 2, noise)
    expected = batch.features.flatten(0, 1)[batch.places + 1, -N_EMBD:].numpy()
    known = batch.labels.numpy() >= 0
    losses = []
    for rows in steps:
        distance = np.abs(rows - expected) / 2.0
        feature = np.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean()
        ours, theirs = (softmax(each @ output.numpy().T) for each in (rows, expected))
        losses.append((feature, -(theirs * np.log(ours)).sum(axis=1)[known].mean()))
    assert 0 < known.sum() < len(known)
    assert_allclose(parts.numpy(), losses[0], rtol=1e-4)
    assert_allclose(float(loss), sum(0.5**i * (0.7 * a + 0.3 * b) for i, (a, b) in enumerate(losses)), rtol=1e-4)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        now, _ = objective(batch, 2, noise)
        now.backward()
        optimizer.step()
    assert float(now.detach()) < 0.9 * float(loss)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def test_a_head_begins_with_the_linear_guess(rng: np.random.Generator, embedding: torch.Tensor) -> None:
    rule = rng.standard_normal((N_EMBD, N_EMBD), dtype=np.float32) / 6
    batches = []
    for _ in range(20):
        batch = a_batch(rng, [[12], [5, 7]], 12)
        for i in range(1, 12):
            batch.features[:, i] = batch.features[:, i - 1] @ torch.from_numpy(rule).T + 0.5 * batch.features[:, i]
        batches.append(batch)
    guess = linear_guess(batches, N_EMBD, torch.device("cpu"))
    now = np.concatenate([batch.features.flatten(0, 1)[batch.places].numpy() for batch in batches])
    after = np.concatenate([batch.features.flatten(0, 1)[batch.places + 1].numpy() for batch in batches])
    expected = np.linalg.lstsq(now, after, rcond=None)[0].T
    assert_allclose(guess.numpy(), expected, atol=1e-3)
    head = a_head(2)
    head.token.weight.data.zero_()
    head.begin_with(guess)
    place = torch.arange(12)
    features = torch.from_numpy(now[:12])[None]
    rows, _ = head(features, embedding[None, :12], place[None], (place[:, None] >= place)[None, None])
    assert_allclose(rows[0].detach().numpy(), now[:12] @ guess.numpy().T, atol=1e-4)


def test_texts_are_packed_into_rows_without_overflow(rng: np.random.Generator) -> None:
    lengths = rng.integers(1, 30, 200).tolist()
    order = rng.permutation(200).tolist()
    plans = pack(lengths, 4, 24, order)
    assert sorted(index for plan in plans for row in plan for index in row) == list(range(200))
    for plan in plans:
        assert len(plan) <= 4
        assert all(sum(min(lengths[index], 24) for index in row) <= 24 for row in plan)
    filled = sum(min(length, 24) for length in lengths) / (24 * sum(map(len, plans)))
    assert filled > 0.8


# ---- replay ------------------------------------------------------------------------------------------------------


def accepted_one_by_one(
    head: DraftHead, embedding: np.ndarray, output: np.ndarray, tokens: np.ndarray, features: np.ndarray, start: int
) -> dict[int, int]:
    """As Replay for trees of 2, 8 and 20 nodes, each path computed anew."""
    weights = head.tensors()
    nodes: list[tuple[float, list[int]]] = []  # path probability and the tokens after the start's own
    beam = [(1.0, list[int]())]
    for _ in range(DEPTH):
        children = []
        for probability, path in beam:
            ids = [*tokens[1 : start + 2], *path]
            row = drafted(weights, head.sizes.n_layers, features, embedding[ids], start + 1)
            of_paths = probability * softmax(row[None] @ output.T)[0]
            children += [(of_paths[index], [*path, int(VOCABULARY[index])]) for index in np.argsort(-of_paths)[:BEAM]]
        nodes += children
        beam = sorted(children, key=lambda child: -child[0])[:BEAM]
    nodes.sort(key=lambda node: -node[0])
    record = tokens[start + 2 :].tolist()
    right = [len(path) if path == record[: len(path)] else 0 for _, path in nodes]
    return {size: max(right[:size]) for size in (2, 8, 20)}


@pytest.mark.parametrize("n_layers, n_taps", [(0, 0), (1, 0), (2, 0), (1, 2)])
def test_a_replay_equals_drafting_node_by_node(
    n_layers: int, n_taps: int, rng: np.random.Generator, embedding: torch.Tensor, output: torch.Tensor
) -> None:
    head = a_head(n_layers, n_taps=n_taps)
    replay = Replay(head, embedding, output, torch.from_numpy(VOCABULARY))
    tokens = rng.choice(VOCABULARY, 14).astype(np.int32)
    target_rows = torch.from_numpy(rng.standard_normal((14, N_EMBD * max(1, n_taps)), dtype=np.float32))
    features = head.combined(target_rows).detach().numpy()
    for position in (8, 9, 10, 12):  # what the head drafts, so that something is right
        row = drafted(head.tensors(), n_layers, features, embedding.numpy()[tokens[1:position]], position - 1)
        tokens[position] = VOCABULARY[(output.numpy() @ row).argmax()]
    found = replay.accepted(tokens, target_rows, 4, (2, 8, 20))
    for place, start in enumerate(range(3, 12, 2)):
        expected = accepted_one_by_one(head, embedding.numpy(), output.numpy(), tokens, features, start)
        assert {size: lengths[2 * place] for size, lengths in found.items()} == expected
    assert sum(found[8]) > 2


def test_steps_follow_from_what_is_right_at_each_position() -> None:
    assert tokens_per_step([2, 0, 5, 1, 0, 0]) == (6, 3)  # 3 tokens, 2 tokens, the last one
    assert tokens_per_step([0, 0, 0]) == (3, 3)
    assert tokens_per_step([9]) == (1, 1)


# ---- rounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_layers, n_taps", [(0, 0), (2, 0), (1, 2)])
def test_a_chain_is_what_the_head_drafts_from_its_own_tokens(
    n_layers: int, n_taps: int, rng: np.random.Generator, embedding: torch.Tensor, output: torch.Tensor
) -> None:
    head = a_head(n_layers, n_taps=n_taps)
    replay = Replay(head, embedding, output, torch.from_numpy(VOCABULARY))
    tokens = rng.integers(0, N_VOCAB, 12).astype(np.int32)
    rows = torch.from_numpy(rng.standard_normal((12, N_EMBD * max(1, n_taps)), dtype=np.float32))
    features, starts = head.combined(rows).detach().numpy(), [2, 5, 9, 10]
    found = replay.chains(tokens, rows, torch.tensor(starts), 4, None)
    for start, chain in zip(starts, found.tolist(), strict=True):
        path: list[int] = []
        for _ in range(4):
            ids = [*tokens[1 : start + 2], *path]
            row = drafted(head.tensors(), n_layers, features, embedding.numpy()[ids], start + 1)
            path.append(int(VOCABULARY[(output.numpy() @ row).argmax()]))
        assert chain == path
    many = torch.full((4000,), 5)
    drawn = replay.chains(tokens, rows, many, 1, torch.Generator().manual_seed(3))
    again = replay.chains(tokens, rows, many, 1, torch.Generator().manual_seed(3))
    row = drafted(head.tensors(), n_layers, features, embedding.numpy()[tokens[1:7]], 6)
    shares = np.bincount(drawn[:, 0].numpy(), minlength=N_VOCAB)[VOCABULARY] / 4000
    assert torch.equal(drawn, again) and np.abs(shares - softmax(row[None] @ output.numpy().T)[0]).max() < 0.04


class OfPrefixes:
    """Features that are kept, and a recorder of them: each row follows from the tokens up to it."""

    n_texts = 1

    def __init__(self, samples: list[Sample], n_rows: int) -> None:
        self.samples = samples
        self.n_rows = n_rows

    def of(self, samples: list[Sample]) -> list[np.ndarray]:
        return [self.rows(sample.text.tokens) for sample in samples]

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        prefixes = (tokens[: n + 1].tolist() for n in range(len(tokens)))
        return np.stack([np.random.default_rng(each).standard_normal(self.n_rows) for each in prefixes]).astype("f2")

    def record_branches(self, tokens: np.ndarray, firsts: np.ndarray, branches: np.ndarray) -> np.ndarray:
        texts = [np.concatenate([tokens[:first], each]) for first, each in zip(firsts, branches, strict=True)]
        assert all(firsts[1:] > firsts[:-1])
        return np.stack([self.rows(text)[first:] for text, first in zip(texts, firsts, strict=True)])


@pytest.mark.parametrize("n_layers, n_taps, n_steps", [(2, 0, 3), (1, 2, 1)])
def test_chains_in_a_batch_are_texts_of_their_own_that_share_their_beginnings(
    n_layers: int,
    n_taps: int,
    n_steps: int,
    rng: np.random.Generator,
    embedding: torch.Tensor,
    output: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "STRIDE", 7)
    head, n_rows = a_head(n_layers, n_taps=n_taps), N_EMBD * max(1, n_taps)
    texts = [TrainingText(rng.integers(0, N_VOCAB, n).astype(np.int32), 6, True) for n in (18, 30, 13, 60, 64)]
    recorder = OfPrefixes([Sample(text, Path(), 0, first) for first, text in enumerate(texts)], n_rows)
    draft_ids = np.full(N_VOCAB, -1)
    draft_ids[VOCABULARY] = np.arange(len(VOCABULARY))
    batches = Batches(recorder, draft_ids, 4, 64, n_steps - 1)  # type: ignore[arg-type]
    replay = Replay(head, embedding, output, torch.from_numpy(VOCABULARY))
    own = Rounds(batches, replay, recorder, n_steps, seed=1)  # type: ignore[arg-type]
    (batch,) = own.stream(own.plans(3), 3, torch.device("cpu"))
    (again,) = own.stream(own.plans(3), 3, torch.device("cpu"))
    (other,) = own.stream(own.plans(4), 4, torch.device("cpu"))
    assert torch.equal(batch.tokens, again.tokens) and not torch.equal(batch.tokens, other.tokens)
    objective = Objective(head, embedding, output, 1.0, Weights(1.0, 1.0, 0.8, 0.0))
    with torch.no_grad():
        steps = objective._steps(batch, head.combined(batch.features.float()), n_steps)
    labels = dict(zip(batch.places.tolist(), batch.labels.tolist(), strict=True))
    n_judged, branches = 0, batch.branches
    assert branches is not None
    for row, documents in enumerate(batch.documents.tolist()):
        for document in sorted({*documents} - {0}):
            places = [place for place, each in enumerate(documents) if each == document]
            left, first = int(branches.left[row, places[0]]), int(batch.positions[row, places[0]])
            if left < 0:
                continue
            trunk = batch.tokens[row, torch.tensor(documents) == left].tolist()
            (text,) = [each.tokens for each in texts if each.tokens[1:].tolist() == trunk]
            tokens = np.concatenate([text[: first + 1], batch.tokens[row, places].numpy()])
            n_shared = len(tokens) - rounds.DEPTH
            assert tokens[:n_shared].tolist() == text[:n_shared].tolist() and n_shared > 6
            rows = recorder.rows(tokens)
            assert_array_equal(batch.features[row, places].numpy(), rows[first:-1])
            features = head.combined(torch.from_numpy(rows.astype(np.float32))).detach().numpy()
            for place in [place for place in places if row * 64 + place in labels]:
                n_judged, i = n_judged + 1, int(batch.positions[row, place])
                assert i + 1 >= n_shared and labels[row * 64 + place] == draft_ids[tokens[i + 2]] >= 0
                for step in range(n_steps):
                    expected = drafted(
                        head.tensors(), n_layers, features, embedding.numpy()[tokens[1 : i + 2]], i + 1 - step
                    )
                    assert_allclose(steps[step][row, place].numpy(), expected, atol=1e-4)
    assert n_judged >= 5 * (rounds.DEPTH - 1)
    assert {len(text.tokens) - 1 for text in texts} == {63, 59, 29, 17, 12}
    in_texts = sum(len(text.tokens) - 2 - max(4, n_steps - 1) for text in texts)
    assert len(labels) == n_judged + in_texts  # those of the texts are as in an epoch
