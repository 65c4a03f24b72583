"""Types for drafters: how many tokens are accepted, and the most of them a millisecond."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.testing import assert_allclose, assert_array_equal
from tiny_heads import write_tiny_head
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.errors import BudgetExceeded, InvalidArgument
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.auto import candidates, draft_choice, speed, trial
from edgeinfer.exporters.auto import target as target_module
from edgeinfer.exporters.auto.allocation import Options, best_mix, front_of, small_mix
from edgeinfer.exporters.auto.chains import NEVER, Drafting, Expected, accepted, margins_of, of_rows
from edgeinfer.exporters.auto.draft_search import DraftSearch
from edgeinfer.exporters.auto.drafters import DraftModel
from edgeinfer.exporters.auto.progress import State
from edgeinfer.exporters.auto.target import open_target
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.source import GgufSource
from edgeinfer.models.gguf import GGMLType, ModelFile

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(autouse=True)
def times_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shape: tuple[int, int], formats: Sequence[GGMLType], n: int, n_threads: int, isa: str) -> speed.Times:
        return speed.Times({type: 1e-9 * type.n_bytes(shape[0] * shape[1]) for type in formats}, 0.0)

    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(speed, "record_folder", lambda kind: None)
    monkeypatch.setattr(trial, "_TIMED_SECONDS", 0.0)
    monkeypatch.setattr(target_module, "HELD_OUT", target_module.HELD_OUT[:2])
    monkeypatch.setattr(target_module, "PROMPTS", target_module.PROMPTS[:17])
    monkeypatch.setattr(target_module, "ANSWER_TOKENS", 24)
    monkeypatch.setattr(target_module, "_CALIBRATION_SECONDS", 0.1)


# ---- Numbers by hand -------------------------------------------------------------------------------------------------


def test_what_is_accepted_is_counted_up_to_the_first_wrong_token() -> None:
    rows = np.array([1.0, 2.0, -1.0, 0.5, 3.0])
    assert_array_equal(of_rows(rows, 3), [[1, 2, -1], [2, -1, 0.5], [-1, 0.5, 3]])
    assert_allclose(accepted(of_rows(rows, 3)), [2 / 3, 1.0, 1.0])  # 1, 1, 0; then 1, 0, 0; then none
    assert of_rows(rows[:2], 3).shape == (0, 3)
    one = np.array([[1.0, NEVER]])
    assert_allclose(accepted(one, 1.0), [0.841345, 0.841345], atol=1e-5)  # Phi(1), and a token that cannot be drafted
    assert_allclose(Expected(one).accepted(np.array([1.0]))[0], [0.841345] * 2, atol=1e-3)
    wrong = Expected(np.array([[-1.0]]))  # which noise makes right now and then, and is not counted on
    assert wrong.acceptance(1.0) == 0.0 and accepted(np.array([[-1.0]]), 1.0)[0] > 0.1


def test_the_length_of_the_draft_is_the_best_one() -> None:
    drafting = Drafting([0.0, 10.0, 11.0, 12.0, 30.0], [1, 2, 3])
    rates, lengths = drafting.best(np.array([[0.8, 1.4, 1.9], [0.1, 0.1, 0.1]]), np.array([1.0, 5.0]))
    assert_array_equal(lengths, [2, 1])
    assert_allclose(rates, [2.4 / 14.0, 1.1 / 16.0])


def test_a_margin_is_against_the_largest_other_logit() -> None:
    logits = np.array([[1.0, 5.0, 3.0], [1.0, 5.0, 3.0], [2.0, 2.0, 0.0], [1.0, 2.0, 3.0]], dtype=np.float32)
    assert_allclose(margins_of(logits, np.array([1, 2, 0, -1])), [2.0, -2.0, 0.0, NEVER])


# ---- Against all mixes -----------------------------------------------------------------------------------------------


def options(seed: int) -> Options:
    rng = np.random.default_rng(seed)
    n_bytes = np.sort(rng.uniform(1, 9, (6, 4)), axis=1)
    losses = np.sort(rng.exponential(0.05, (6, 4)), axis=1)[:, ::-1].copy()
    losses[0, 1] = np.inf
    return Options(losses, n_bytes, n_bytes * rng.uniform(0.5, 1.5, (6, 4)))


def sums_of(of: Options, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    losses, seconds = (values[np.arange(6), chosen].sum(keepdims=True) for values in (of.losses, of.seconds))
    return losses, seconds


@pytest.mark.parametrize("seed", range(3))
def test_the_best_mix_is_the_best_of_all(seed: int) -> None:
    of, rng = options(seed), np.random.default_rng(seed)
    expected, drafting = Expected(rng.normal(1, 1, (200, 3))), Drafting([0.0, 40.0, 44.0, 48.0, 60.0], [1, 2, 3])

    def rate(losses: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        return drafting.best(expected.accepted(losses), seconds)[0]

    every = np.array([each for each in itertools.product(range(4), repeat=6) if each[0] != 1])
    sums = [values[np.arange(6), every].sum(axis=1) for values in (of.losses, of.seconds, of.n_bytes)]
    rates = rate(sums[0], sums[1])
    found = best_mix(of, rate).chosen
    assert_array_equal(found, every[rates.argmax()])
    small = small_mix(of, rate).chosen
    enough = rates >= 0.999 * rates.max()
    assert rate(*sums_of(of, small))[0] >= 0.999 * rates.max()
    assert of.n_bytes[np.arange(6), small].sum() <= 1.1 * sums[2][enough].min()
    most = float(np.quantile(sums[2], 0.3))
    within = best_mix(of, rate, most).chosen
    assert of.n_bytes[np.arange(6), within].sum() <= most
    assert rate(*sums_of(of, within))[0] > 0.99 * rates[sums[2] <= most].max()
    with pytest.raises(BudgetExceeded, match="the smallest formats take"):
        best_mix(of, rate, 1.0)


def test_many_tensors_come_near_to_the_bound_of_the_hull() -> None:
    rng = np.random.default_rng(0)
    seconds = np.sort(rng.uniform(1, 9, (40, 6)), axis=1)
    losses = np.sort(rng.exponential(1, (40, 6)), axis=1)[:, ::-1].copy()
    of, rows = Options(losses, seconds, seconds), np.arange(40)
    front = front_of(of)
    assert_allclose(front.losses, [losses[rows, each].sum() for each in front.chosen])
    for worth in (0.1, 0.5, 2.0):  # where a straight line touches the whole front
        best = (losses + worth * seconds).min(axis=1).sum()
        assert (front.losses + worth * front.seconds).min() <= 1.001 * best

    def rate(losses: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        return np.exp(-losses - 0.5 * seconds)

    chosen = best_mix(of, rate).chosen
    assert (losses + 0.5 * seconds)[rows, chosen].sum() == pytest.approx((losses + 0.5 * seconds).min(axis=1).sum())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    write_tiny_model(folder / "target.gguf", "llama", "F32", n_embd=64, n_layers=1, tied=True)
    write_tiny_model(folder / "draft.gguf", "llama", "F16", n_embd=64, n_layers=1, tied=True)
    return folder


def test_the_types_of_a_tiny_draft_model_are_the_best_of_all_mixes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all mixes of three tensors in four formats, run one by one; the others have a single format."""
    names = ("blk.0.ffn_up.weight", "blk.0.attn_output.weight", "token_embd.weight")
    formats = tuple(GGMLType[name] for name in ("Q3_K", "Q4_0", "Q5_1", "Q8_0"))
    monkeypatch.setattr(candidates, "FORMATS", formats[1:])
    device, source = Device(1), GgufSource(ModelFile.open(folder / "draft.gguf"))
    with open_target(folder / "target.gguf", device) as target:
        drafter = DraftModel(source, target, None, device)
        drafter.subjects = [each for each in drafter.subjects if each.name in names]
        texts = target.texts(None, 600, 4)
        drafting, state = Drafting([0, 0.03, 0.032, 0.034, 0.05], [1, 2, 3]), State(None, "")
        search = DraftSearch(source, drafter, drafting, texts, device, state)
        monkeypatch.setattr(drafter, "seconds", lambda types: 0.0)  # what a pass takes beside its products
        search.measure()
        mix = search.choose(float("inf"))
        search.close()
        every = itertools.product(*(each.formats for each in drafter.subjects))
        mixes = [dict(zip((each.name for each in drafter.subjects), types, strict=True)) for types in every]
        predicted, measured = [], []
        for types in mixes:
            of_types = search.predicted(types)
            chains, _ = drafter.run(types, texts, 3)
            predicted.append(of_types.best(search.drafting)[0])
            measured.append(float(search.drafting.best(accepted(chains)[None], of_types.draft_ms)[0][0]))
    chosen = mixes.index(dict(mix.types))
    assert predicted[chosen] == pytest.approx(max(predicted), rel=1e-3)
    assert measured[chosen] > 0.97 * max(measured)
    assert measured[chosen] > np.median(measured)


# ---- The command -----------------------------------------------------------------------------------------------------


def run(source: Path, *arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["export", str(source), "--to", "gguf", "--type", "auto", *map(str, arguments)])


def test_a_draft_model_is_written_as_it_was_measured_and_drafts(folder: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "draft.gguf", tmp_path / "text"
    text.write_text("Some text of words that stand one behind the other. " * 6)
    asked = ("--target", folder / "target.gguf", "--calibration", text, "-o", out)
    result = run(folder / "draft.gguf", *asked)
    assert result.exit_code == 0, result.output
    assert "losses: 8 of 8 tensors" in result.stderr and "s left" in result.stderr
    assert "note: auto: for target.gguf; measured on other texts of it" in result.stderr
    assert "note: auto: Q8_0" in result.stderr and "tokens a ms" in result.stderr
    with ModelFile.open(out) as file:
        assert file.metadata["edgeinfer.export.draft_for"] == "tiny llama F32"
        assert file.metadata["edgeinfer.draft.as_stored"] is True
        backend = NativeBackend(for_drafts=True)
        spec = backend.read_spec(file)
        kept = sum(file.tensors[name].n_bytes for name in file.tensors)
        assert backend.plan(file, spec, LoadSettings(64)).use.weights > 0.9 * kept  # nothing is rounded further
    again = run(folder / "draft.gguf", *asked, "--dry-run")
    assert again.exit_code == 0 and "s left" not in again.stderr
    with edgeinfer.load(folder / "target.gguf", draft=[str(out)]) as engine:
        completion = engine.generate("some text of words", max_tokens=24, temperature=0.0)
    assert completion.timings.speculation.dropped == {}


def test_a_head_is_measured_beside_its_target(folder: Path, tmp_path: Path) -> None:
    with open_target(folder / "target.gguf", Device(1)) as target:
        texts = [list(text.tokens) for text in target.texts(None, 400, 5)]
    head = write_tiny_head(tmp_path / "head.gguf", folder / "target.gguf", texts, tensor_type="F16")
    result = run(head, "--target", folder / "target.gguf", "-o", tmp_path / "out.gguf", "--cost", "verify:3")
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stderr.splitlines() if line.startswith("note: auto: auto"))
    assert "a pass with 2 drafted" in line
    with ModelFile.open(tmp_path / "out.gguf") as file:
        assert {info.type.name for info in file.tensors.values() if len(info.shape) == 2} != {"F16"}
    refused = run(head, "-o", tmp_path / "other.gguf", "--size", "1MB")
    assert "is a draft head: --type auto needs --target" in refused.output


@pytest.mark.parametrize("cost", ["verify:1", "verify:4:2ms"])
def test_a_cost_that_no_drafter_has_is_refused(cost: str) -> None:
    assert draft_choice.lengths_of(Request(Path("a"), Path("b"), cost="verify:4"), 8) == [3]
    assert draft_choice.lengths_of(Request(Path("a"), Path("b"), cost="verify"), 3) == [1, 2, 3]
    with pytest.raises(InvalidArgument, match="--cost of a drafter must be verify"):
        draft_choice.lengths_of(Request(Path("a"), Path("b"), cost=cost), 8)
