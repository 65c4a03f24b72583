"""The benchmark's arithmetic, and the commands `bench` and `pack` on a tiny model. No timing decides anything here."""

import csv
import importlib.util
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from parts import missing
from tiny_models import write_tiny_model

from edgeinfer.backends.native import MachineLimits
from edgeinfer.bench import Point, Report, work_of_a_token
from edgeinfer.cli import main
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "m.gguf", tensor_type="Q4_0", n_ctx_train=2048)


def test_shares_and_costs_are_what_the_times_say() -> None:
    curve = [Point(1, {"ours": 10.0, "peer": 20.0}, {}), Point(4, {"ours": 12.0, "peer": 80.0}, {})]
    prefill = Point(100, {"ours": 50.0, "peer": 100.0}, {})
    limits = MachineLimits(read_bytes_per_second=1e9, int8_multiply_adds_per_second=1e12)
    report = Report("m", "cpu", "isa", 2, 8_000_000, 10**9, limits, curve, prefill, ["ours", "peer"])
    assert report.bandwidth_share == pytest.approx(0.8)
    assert report.int8_share == pytest.approx(2.0)
    assert report.cost(curve[1], "ours") == pytest.approx(1.2)
    assert report.cost(curve[1], "peer") == pytest.approx(4.0)
    assert prefill.tokens_per_second("ours") == pytest.approx(2000)


def test_the_work_of_a_token_leaves_out_the_embedding_unless_it_is_the_head(tmp_path: Path) -> None:
    for tied in (False, True):
        path = write_tiny_model(tmp_path / f"{tied}.gguf", tensor_type="F32", tied=tied)
        with ModelFile.open(path) as file:
            spec = read_spec(file)
            n_bytes, multiply_adds = work_of_a_token(file, spec)
            embedding = file.tensors["token_embd.weight"].n_bytes
            everything = sum(info.n_bytes for info in file.tensors.values())
            assert n_bytes == everything - (0 if tied else embedding)
            vectors = sum(info.n_bytes for info in file.tensors.values() if len(info.shape) == 1)
            assert 4 * multiply_adds == n_bytes - vectors


def test_bench_reports_in_every_form(model: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["bench", str(model), "--rounds", "2", "-t", "1", "--json"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert [point["n"] for point in report["curve"]] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert report["cost"]["edgeinfer"]["1"] == 1.0
    limits, prefill = report["limits"], report["prefill"]
    read = 1e3 * report["weight_bytes"] / report["curve"][0]["milliseconds"]["edgeinfer"]
    added = 1e3 * report["multiply_adds"] * prefill["n"] / prefill["milliseconds"]["edgeinfer"]
    assert read > 0 and report["bandwidth_share"] == pytest.approx(read / limits["read_bytes_per_second"])
    assert added > 0 and report["int8_share"] == pytest.approx(added / limits["int8_multiply_adds_per_second"])

    rows = list(
        csv.DictReader(io.StringIO(CliRunner().invoke(main, ["bench", str(model), "--rounds", "2", "--csv"]).stdout))
    )
    assert [row["n"] for row in rows] == ["1", "2", "3", "4", "6", "8", "12", "16", "512"]

    if importlib.util.find_spec("matplotlib") is None:
        missing("train", "matplotlib is not installed: pip install 'edgeinfer[plot]'")
    timeline = tmp_path / "timeline.png"
    flags = ["bench", str(model), "--rounds", "2", "--timeline", str(timeline), "-md", str(model), "-t", "1"]
    run = CliRunner().invoke(main, flags)
    assert run.exit_code == 0, run.output
    assert timeline.read_bytes()[:4] == b"\x89PNG" and "of the time waiting for drafts" in run.stderr
    plot = tmp_path / "curve.png"
    run = CliRunner().invoke(main, ["bench", str(model), "--rounds", "2", "--plot", str(plot)])
    assert run.exit_code == 0, run.output
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert "% of" in run.stdout


def test_pack_writes_beside_the_model_and_chat_uses_it(model: Path) -> None:
    plain = CliRunner().invoke(main, ["generate", "-m", str(model), "-p", "a", "-n", "5", "--temp", "0"])
    run = CliRunner().invoke(main, ["pack", str(model)])
    assert run.exit_code == 0, run.output
    packed = model.with_name("m.gguf.packed")
    assert packed.exists()
    again = CliRunner().invoke(main, ["generate", "-m", str(model), "-p", "a", "-n", "5", "--temp", "0"])
    assert again.stdout == plain.stdout
    packed.write_bytes(b"nonsense")
    broken = CliRunner().invoke(main, ["generate", "-m", str(model), "-p", "a", "-n", "5"])
    assert broken.exit_code == 3
    assert "not a file of packed weights" in broken.stderr


def test_a_number_of_threads_that_cannot_be_is_refused(tmp_path):
    model = write_tiny_model(tmp_path / "m.gguf")
    result = CliRunner().invoke(main, ["bench", str(model), "-t", "3000"])
    assert result.exit_code == 2 and "n_threads must be an integer in 1..1024" in result.output
