"""The model of boards against published ones, and against its own parts."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from published_boards import checks, tellme_fits
from tiny_models import write_tiny_model

from edgeinfer.cli import main
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.hls.board.boards import KV260, board_of
from edgeinfer.hls.board.model import Design, decode, first_token_seconds, floor_seconds, pass_seconds
from edgeinfer.hls.board.report import report, report_lines
from edgeinfer.hls.board.room import memory_of
from edgeinfer.hls.board.workload import BITNET_07B, BITNET_2B4T
from edgeinfer.hls.geometry import Geometry

DESIGN = Design(KV260, Geometry("base3", 4, 16))


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.what)
def test_published_boards_are_met(check) -> None:
    assert abs(check.difference) <= check.tolerance, f"{check.modelled} {check.unit} against {check.published}"


def test_the_fit_of_tellme_gives_its_published_times() -> None:
    v1, v2 = tellme_fits()
    assert v2.quadratic * 128**2 + v2.linear * 128 == pytest.approx(0.96)
    assert (round(v1.trits_per_cycle), round(v2.trits_per_cycle)) == (331, 414)
    assert v2.stream_rate == pytest.approx(3.54e9, rel=0.01)


def test_sizes_are_those_of_the_files() -> None:
    assert BITNET_2B4T.weight_bytes(DESIGN.geometry) == 417_546_240
    assert BITNET_2B4T.ternary_head_bytes == 65_667_072
    assert 8 * 417_546_240 / BITNET_2B4T.n_weights <= 1.603
    assert 8 * BITNET_07B.weight_bytes(DESIGN.geometry) / BITNET_07B.n_weights <= 1.658


def test_tied_int8_embeddings_are_in_memory_once() -> None:
    tied, own = (memory_of(DESIGN, work, 1024) for work in (BITNET_2B4T, BITNET_07B))
    assert tied["embeddings"] == 128_256 * (2560 + 4) and tied["output matrix"] == 0
    assert own["embeddings"] == own["output matrix"] == 32_002 * (1536 + 4)
    wide = memory_of(replace(DESIGN, embeddings="bf16"), BITNET_2B4T, 1024)
    assert wide["embeddings"] == 128_256 * 2560 * 2 and wide["output matrix"] == 128_256 * (2560 + 4)


def test_reading_is_the_limit_where_fills_are_hidden() -> None:
    assert pass_seconds(DESIGN, BITNET_2B4T) == pytest.approx(417_546_240 / KV260.stream_rate, rel=1e-9)
    narrow = Design(KV260, Geometry("base3", 1, 1))
    assert pass_seconds(narrow, BITNET_2B4T) > BITNET_2B4T.n_weights / 5 / KV260.clock_hz


def test_engines_share_the_weights_of_a_prompt() -> None:
    host = sum(KV260.host.scaled(30, 2560).values())
    four = Design(KV260, Geometry("base3", 4, 16), n_engines=4)
    rest = 64 * host + decode(DESIGN, BITNET_2B4T, 0).stages["head"]
    one_by_one, together = (first_token_seconds(each, BITNET_2B4T, 64) - rest for each in (DESIGN, four))
    assert one_by_one == pytest.approx(4 * together)
    at_64, at_65 = (first_token_seconds(four, BITNET_2B4T, n) for n in (64, 65))
    assert at_65 - at_64 == pytest.approx(host + pass_seconds(four, BITNET_2B4T))  # one token more begins a pass
    half = Design(KV260, Geometry("base3", 4, 16, n_ports=2))
    assert pass_seconds(half, BITNET_2B4T) == pytest.approx(2 * pass_seconds(DESIGN, BITNET_2B4T), rel=1e-3)


def test_attention_in_the_fabric_grows_with_the_context() -> None:
    design = Design(KV260, Geometry("base3", 4, 16), attention_lanes=64)
    near, far = decode(design, BITNET_2B4T, 0), decode(design, BITNET_2B4T, 4095)
    assert far.stages["attention"] == pytest.approx(4096 * near.stages["attention"])
    assert far.stages["attention"] == pytest.approx(2 * 30 * 2560 * 4096 / (64 * 250e6))


def test_the_report_says_model_at_each_speed_and_what_does_not_fit() -> None:
    counts = {"lut": 200_000, "ff": 1, "bram18": 9, "uram": 0, "dsp": 0}
    found = report(DESIGN, BITNET_2B4T, 4096, counts)
    lines = list(report_lines(found))
    assert all("(model)" in line for line in lines if "tokens/s" in line or " s to the first" in line)
    assert not found.fits and any(line.startswith("LUT") and "too few" in line for line in lines)
    assert report(DESIGN, BITNET_07B, 1024, counts | {"lut": 2000}).fits
    assert found.as_dict()["modelled"]["floor_seconds"] == floor_seconds(DESIGN, BITNET_2B4T)


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="there are kv260"):
        board_of("de10")
    with pytest.raises(InvalidArgument, match="engines"):
        Design(KV260, DESIGN.geometry, n_engines=0)
    with pytest.raises(InvalidArgument, match="4 ports"):
        Design(KV260, Geometry("base3", 4, 16, n_ports=8))


@pytest.fixture(scope="module")
def ternary(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("board") / "tiny.gguf", "llama", "TQ2_0", n_embd=256, n_ff=512)


def profiled(*arguments):
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


def test_the_command_prints_the_report(ternary) -> None:
    found = profiled(ternary, "--board", "kv260", "--engines", "2", "-c", "100")
    assert found.exit_code == 0, found.output
    assert "tokens/s (model) behind 99 tokens" in found.output and "not ternary" not in found.output
    as_data = json.loads(profiled(ternary, "--board", "kv260", "--json", "--attention-lanes", "8").output)
    assert as_data["modelled"]["tokens"][0]["stage_seconds"]["attention"] > 0
    assert as_data["weight_bytes"] == as_data["memory_bytes"]["ternary weights"]


def test_the_command_refuses_what_does_not_go_with_a_board(ternary) -> None:
    for arguments, message in (
        ([ternary, "--rows", "4"], "--rows goes with --board"),
        ([ternary, "--board", "kv260", "--fit", "1G"], "--fit does not go with --board"),
        ([ternary, "--board", "de10"], "there are kv260"),
        (["--board", "kv260"], "needs MODEL"),
    ):
        found = profiled(*arguments)
        assert found.exit_code != 0 and message in str(found.exception) + found.output, found.output


def test_a_model_that_is_not_ternary_is_named_so(tmp_path) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", "llama", "Q4_0")
    assert "Q4_0, not ternary" in profiled(model, "--board", "kv260").output
