"""What a request for an expert cache is in bytes, and the size that measured throughput leads to."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.sizes import SizeRequest
from edgeinfer.common.types import ExpertSizes
from edgeinfer.offload.cache_size import ALL, AUTO, fitting_bytes, largest_cache, parse, wanted_bytes
from edgeinfer.offload.size_search import LEAST_TOKENS, CacheSizeSearch, load_search, save_search

MIB, GIB = 1 << 20, 1 << 30
SIZES = ExpertSizes(total=16 * GIB, least=64 * MIB, a_token=3 * GIB, n_layers=48, n_experts=128, n_used=8)


@pytest.mark.parametrize(
    "value, request_of_it",
    [
        ("auto", AUTO),
        (" Auto", AUTO),
        (None, ALL),
        ("25%", SizeRequest(share=0.25)),
        ("12.5 %", SizeRequest(share=0.125)),
        ("100%", ALL),
        ("3.5GiB", SizeRequest(n_bytes=3584 * MIB)),
        ("800MB", SizeRequest(n_bytes=800_000_000)),
        ("800 mb", SizeRequest(n_bytes=800_000_000)),
        ("2TiB", SizeRequest(n_bytes=2 << 40)),
        ("4G", SizeRequest(n_bytes=4_000_000_000)),
        ("1000000", SizeRequest(n_bytes=1_000_000)),
        ("9007199254740993", SizeRequest(n_bytes=9007199254740993)),  # which no float is
        ("12B", SizeRequest(n_bytes=12)),
        (4096, SizeRequest(n_bytes=4096)),
        (np.int64(7), SizeRequest(n_bytes=7)),
    ],
)
def test_a_request_is_read(value: object, request_of_it: SizeRequest) -> None:
    assert parse(value) == request_of_it


@pytest.mark.parametrize(
    "value",
    [
        "",
        "all of it",
        "0%",
        "101%",
        "-5%",
        "25%%",
        "3.5",
        "3 gallons",
        "nan%",
        "\u0663%",
        "1e3",
        "0",
        0,
        -1,
        True,
        2.5,
        b"1",
        [],
    ],
)
def test_what_is_no_size_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(InvalidArgument, match="expert_cache must be"):
        parse(value)


def test_where_not_all_fit_it_is_the_largest_that_leaves_some_memory_free_or_what_was_measured() -> None:
    largest = largest_cache(SIZES, 8 * GIB, 2 * GIB)
    assert largest == fitting_bytes(SIZES, None, largest, None) == 5632 * MIB
    assert fitting_bytes(SIZES, None, largest, 3 * GIB) == 3 * GIB
    assert fitting_bytes(SIZES, None, largest, 7 * GIB) == largest
    assert fitting_bytes(SIZES, None, largest, 1) == SIZES.least
    assert fitting_bytes(SIZES, 4 * GIB, largest, None) == 4 * GIB  # no more than was asked for


def test_with_all_but_no_memory_left_it_is_the_least() -> None:
    assert largest_cache(SIZES, 2 * GIB + 70 * MIB, 2 * GIB) == 64 * MIB
    assert largest_cache(SIZES, 2 * GIB, 2 * GIB) < SIZES.least


@pytest.mark.parametrize(
    "value, n_bytes",
    [("25%", 4 * GIB), ("6GiB", 6 * GIB), (64 * MIB, 64 * MIB), ("16GiB", None), ("1TB", None), ("auto", None)],
)
def test_a_share_is_of_all_experts_and_what_holds_them_all_is_no_cache(value: object, n_bytes: int | None) -> None:
    assert wanted_bytes(parse(value), SIZES) == n_bytes
    assert wanted_bytes(parse(None), SIZES) is None


def test_a_cache_that_is_too_small_is_refused_with_the_number_that_works() -> None:
    with pytest.raises(InvalidArgument, match=f"10.0 MiB is too small: a pass needs 64.0 MiB .8 experts.*{64 * MIB}"):
        wanted_bytes(parse("10MiB"), SIZES)
    assert wanted_bytes(parse(str(64 * MIB)), SIZES) == 64 * MIB


# ---- the search ------------------------------------------------------------------------------------------------------


def searched(speed_of: Callable[[int], float], largest: int, n_runs: int = 20) -> tuple[CacheSizeSearch, list[int]]:
    """The sizes of one run after the other on a machine where a cache has a speed."""
    search, sizes = CacheSizeSearch(), []
    for _ in range(n_runs):
        sizes.append(search.next_size(64 * MIB, largest))
        search.tell(sizes[-1], speed_of(sizes[-1]), sizes[-1] / (16 * GIB), 100)
    return search, sizes


def test_the_first_run_has_the_largest_cache_and_a_speed_that_grows_keeps_it() -> None:
    _, sizes = searched(lambda size: size / GIB, 6 * GIB)
    assert sizes[0] == 6 * GIB and sizes[1] < 6 * GIB and set(sizes[2:]) == {6 * GIB}


def test_where_speed_collapses_the_size_goes_down_to_where_it_does_not() -> None:
    """Hit rates rise up to 6 GiB; above 4 GiB the system has too little memory."""
    _, sizes = searched(lambda size: size / GIB if size <= 4 * GIB else 0.5, 6 * GIB)
    assert sizes[-1] == int(int(6 * GIB * 0.8) * 0.8) and len(set(sizes)) == 4


def test_of_sizes_that_are_equally_fast_the_smallest_is_kept() -> None:
    _, sizes = searched(lambda size: min(size, 2 * GIB) / GIB, 6 * GIB)
    assert 1.9 * GIB < sizes[-1] < 2.6 * GIB and sizes[-1] == sizes[-5]


def test_the_search_keeps_to_its_limits() -> None:
    search, sizes = searched(lambda size: 1.0, 6 * GIB, 40)
    assert min(sizes) >= 64 * MIB and sizes[-1] < 100 * MIB
    assert search.next_size(GIB, 6 * GIB) == GIB
    grown, sizes = searched(lambda size: size / GIB, GIB)
    assert sizes[-1] == GIB and grown.next_size(64 * MIB, 4 * GIB) == 4 * GIB
    assert grown.next_size(64 * MIB, GIB // 2) == GIB // 2  # nothing so small was measured


def test_short_runs_and_figures_that_are_none_do_not_count() -> None:
    search = CacheSizeSearch()
    assert not search.tell(GIB, 5.0, 0.5, LEAST_TOKENS - 1)
    assert not search.tell(GIB, float("nan"), 0.5, 100) and not search.tell(GIB, 0.0, 0.5, 100)
    assert search.runs == {} and search.tell(GIB, 5.0, 0.5, 100)


def test_one_slow_run_does_not_change_the_size() -> None:
    search, sizes = searched(lambda size: size / GIB, 6 * GIB)
    search.tell(6 * GIB, 0.1, 0.3, 100)
    assert search.next_size(64 * MIB, 6 * GIB) == sizes[-1] == 6 * GIB


def test_runs_are_kept_on_disk_and_damaged_files_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    search, _ = searched(lambda size: size / GIB, 6 * GIB)
    save_search("key", search)
    assert load_search("key") == search and load_search("other") == CacheSizeSearch()
    (path,) = tmp_path.rglob("key.json")
    whole = path.read_text()
    for text in ("", whole[:-9], whole.replace("6442450944", "x"), "[1]", '{"format": 1, "runs": {"7": [[1]]}}'):
        path.write_text(text)
        assert load_search("key") == CacheSizeSearch()


def test_sizes_of_a_damaged_record_that_no_memory_has_are_left_out() -> None:
    search = CacheSizeSearch.from_record({"format": 1, "runs": {"9" * 400: [[1.0, 0.5]], str(GIB): [[1.0, 0.5]]}})
    assert list(search.runs) == [GIB]
    assert search.tell(2 * GIB, 2.0, 0.5, LEAST_TOKENS) and search.best(1 << 62) == 2 * GIB
