"""The search on a tiny model: what it measures, keeps, and gives."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny_latents import write_tiny_latents
from tiny_mamba import write_tiny_mamba
from tiny_models import write_tiny_model

from edgeinfer.common.errors import BudgetExceeded, InvalidArgument
from edgeinfer.common.types import Device
from edgeinfer.exporters.auto import choice, speed, trial
from edgeinfer.exporters.auto.candidates import subjects_of, uniform
from edgeinfer.exporters.auto.search import Limits, Mix, Search
from edgeinfer.exporters.auto.trial import CalibrationText, Window, windows_of
from edgeinfer.exporters.calibration import collect
from edgeinfer.exporters.calibration.prompts import PROMPTS
from edgeinfer.exporters.divergence import Distance, Reference, mean_distance
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.source import GgufSource
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile

Q8_0 = GGMLType.Q8_0
TEXTS = [CalibrationText([(7 * i * i + 3 * i + seed) % 259 for i in range(40)], 5) for seed in range(3)]


@pytest.fixture
def source(tmp_path: Path) -> GgufSource:
    return GgufSource(ModelFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", "F16", tied=True)))


def test_divergence_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    logits, others = rng.normal(0, 3, (2, 6, 50)).astype(np.float32)
    p, q = (np.exp(each.astype(np.float64)) for each in (logits, others))
    p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
    same = Reference(logits.copy())
    found = mean_distance([same], [others])
    assert found.divergence == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-5)
    assert found.agreement == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert mean_distance([same], [logits]).divergence == 0.0


def test_windows_have_the_rows_that_count() -> None:
    whole, rest = windows_of(TEXTS, 60, 2, 1000)
    assert len(whole.tokens) == 60 and whole.rows == [*range(4, 39), *range(44, 59)]
    assert len(rest.tokens) == 40 and rest.rows == [*range(4, 39)]
    assert [len(each.rows) for each in windows_of(TEXTS, 60, 2, 10)] == [10, 10]


def test_formats_are_chosen_of_matrices_only(tmp_path: Path) -> None:
    """Not of vectors that files have as matrices; of a head's own matrices a token uses all, of experts' some."""
    with ModelFile.open(write_tiny_mamba(tmp_path / "m.gguf", "nemotron_h_moe+latent", "F16")) as file:
        names = {subject.name for subject in subjects_of(GgufSource(file), read_spec(file))}
    assert not any("ssm_norm" in name or "ssm_a" in name or "conv1d" in name for name in names)
    assert {f"blk.1.ffn_{role}.weight" for role in ("latent_down", "latent_up", "up_exps", "down_shexp")} <= names
    types = dict.fromkeys(("attn_k_b", "attn_v_b", "ffn_up_exps", "attn_q"), "F16")
    with ModelFile.open(write_tiny_latents(tmp_path / "l.gguf", "lite", "Q8_0", types=types)) as file:
        subjects = {subject.name: subject for subject in subjects_of(GgufSource(file), read_spec(file))}
    for name, expected in (("attn_k_b", (4, 4)), ("attn_v_b", (4, 4)), ("ffn_up_exps", (8, 3)), ("attn_q", (1, 1))):
        subject = subjects[f"blk.1.{name}.weight"]
        assert (subject.n_matrices, subject.n_used) == expected, name


def seconds_by_bytes(
    shape: tuple[int, int], formats: Sequence[GGMLType], n: int, n_threads: int, isa: str
) -> speed.Times:
    """In place of measured times: up to five tokens cost as much as one."""
    seconds = max(1.0, n - 4.0) * 1e-9
    return speed.Times({type: seconds * type.n_bytes(shape[0] * shape[1]) for type in formats}, 0.0)


@pytest.fixture(autouse=True)
def quick_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "measure", seconds_by_bytes)
    monkeypatch.setattr(speed, "record_folder", lambda kind: None)


def test_a_mix_is_nearer_to_the_source_than_a_uniform_format_of_its_size(
    source: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = subjects_of(source, read_spec(source.file))
    windows = windows_of(TEXTS, 60, 2, 1000)
    flat = uniform(subjects, GGMLType.Q4_1)
    search = Search(source, subjects, {}, windows, Device(2), state=tmp_path / "state.jsonl")
    search.measure()
    limits = Limits(search.n_bytes(flat), 4, 1.0)
    mix = search.refine(limits)
    found = search.compare([flat, mix.types], windows)
    search.close()
    assert mix.n_bytes <= limits.n_bytes and found[1].divergence < found[0].divergence
    again = Search(source, subjects, {}, windows, Device(2), state=tmp_path / "state.jsonl")
    monkeypatch.setattr(trial, "TrialModel", None)  # all of it is known
    again.measure()
    assert again.refine(limits) == mix
    assert again.compare([flat, mix.types], windows) == found


def test_what_was_measured_of_something_else_is_not_used(source: GgufSource, tmp_path: Path) -> None:
    subjects, path = subjects_of(source, read_spec(source.file)), tmp_path / "state.jsonl"
    for n_rows in (10, 20):
        Search(source, subjects, {}, windows_of(TEXTS, 60, 1, n_rows), Device(1), state=path)
        lines = path.read_text().splitlines()
        assert len(lines) == 1 and json.loads(lines[0])["fingerprint"]
        path.write_text(f'{lines[0]}\n["loss alone x Q4_0", 0.5]\n["loss al')
    assert Search(source, subjects, {}, windows_of(TEXTS, 60, 1, 20), Device(1), state=path)
    assert path.read_text().splitlines()[1:] == ['["loss alone x Q4_0", 0.5]']  # without the line that was cut


def test_a_request_says_what_it_lacks(source: GgufSource) -> None:
    subjects = subjects_of(source, read_spec(source.file))
    request = Request(source.path, Path("out.gguf"), "auto")
    with pytest.raises(InvalidArgument, match="--type auto needs --size"):
        choice.limits_of(request, source, subjects, Device(1))
    with pytest.raises(BudgetExceeded, match="--size must be at least"):
        choice.limits_of(Request(source.path, Path("o"), "auto", size=1000), source, subjects, Device(1))
    assert choice.parse_cost("verify:4") == (4, None) and choice.parse_cost("verify:8:2.5ms") == (8, 0.0025)
    assert choice.parse_cost("verify") == (None, None) and choice.parse_cost("verify:1.5ms") == (None, 0.0015)
    for cost in ("verify:0", "verifying", "draft:4", "verify:4:"):
        with pytest.raises(InvalidArgument, match="--cost must be verify:N"):
            choice.parse_cost(cost)


def test_figures_come_from_texts_that_nothing_was_calibrated_on(
    source: GgufSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the importance matrix nor the losses; whether the text of calibration is built in or a file."""
    read, compared = list[Sequence[int]](), list[Sequence[int]]()

    def answers(model: object, file: object, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
        """In place of answers, which repeat themselves in a tiny model: the prompts."""
        return [list(prompt.encode()) for prompt in prompts]

    def squares(model: object, texts: Sequence[Sequence[int]], progress: object) -> dict[str, object]:
        read.extend(texts)
        return {}

    def compare(self: Search, mixes: object, windows: Sequence[Window], report: object) -> list[Distance]:
        compared.extend(window.tokens for window in windows)
        return [Distance(0.0, 1.0)]

    monkeypatch.setattr(collect, "own_answers", answers)
    monkeypatch.setattr(choice, "own_answers", answers)
    monkeypatch.setattr(collect, "_squares", squares)
    monkeypatch.setattr(Search, "compare", compare)
    monkeypatch.setattr(Search, "measure", lambda self, report: setattr(self, "_losses", np.zeros((9, 99))))
    monkeypatch.setattr(Search, "refine", lambda self, limits, report: Mix(uniform(self._subjects, Q8_0), 0.0, 0, 0.0))
    text = tmp_path / "text"
    text.write_text("Some words that stand one behind the other. " * 20)
    for calibration in (None, text):
        read.clear()
        imatrix = collect.imatrix_of(source, calibration)
        request = Request(source.path, tmp_path / "o", "auto", size=1 << 22, calibration=calibration)
        choice.choose_types(source, request, imatrix)
        pieces = {tuple(tokens[first : first + 36]) for tokens in read for first in range(len(tokens) - 35)}
        assert pieces and sum(map(len, compared)) > 300
        for tokens in compared:
            assert not pieces & {tuple(tokens[first : first + 36]) for first in range(len(tokens) - 35)}
