"""What a load reduces to fit, by plans without a model."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.common.errors import BudgetExceeded, InvalidArgument
from edgeinfer.memory.budget import Item, Ledger
from edgeinfer.memory.fit import (
    FitSettings,
    Fitting,
    SteppedSetting,
    fit,
    largest_n_ctx,
    least_settings,
    smaller_batches,
)
from edgeinfer.memory.limit import Limit
from edgeinfer.memory.refusal import FileSizes, refusal

REQUESTED = FitSettings(n_ctx=100, n_batch=128)
REDUCIBLE = [
    SteppedSetting("tables", [0, 1, 2, None]),
    SteppedSetting("places", ["all", "none"]),
    SteppedSetting("expert_cache", [None, 300, 100]),
    smaller_batches(128),
]
FILE = FileSizes(Path("some.gguf"), 1100, 1000, 1000)


def ledger_of(settings: FitSettings) -> Ledger:
    """1000 bytes of weights, 10 a position, 1 a row, 400 of experts, 64 of tables, 200 of a draft model."""
    tables = 0 if settings.tables is None else 64 >> settings.tables
    items = [
        Item("weights", 1000),
        Item("KV cache", (10 if settings.cache_type == "f16" else 6) * settings.n_ctx),
        Item("activations", settings.n_batch),
        Item("experts", 400 if settings.expert_cache is None else settings.expert_cache),
        Item("drafters", tables + (200 if settings.places == "all" else 0)),
    ]
    return Ledger(tuple(items), loading=8)


def settled(limit: int, requested: FitSettings = REQUESTED) -> FitSettings | None:
    return fit(requested, REDUCIBLE, Fitting(ledger_of, limit))


ALL = ledger_of(REQUESTED).peak
LEAST = ledger_of(least_settings(REQUESTED, REDUCIBLE)).peak


@pytest.mark.parametrize(
    "missing, changes",
    [
        (0, {}),
        (1, {"tables": 1}),
        (33, {"tables": 2}),
        (49, {"tables": None}),
        (65, {"tables": 0, "places": "none"}),  # the tables are back
        (201, {"tables": 1, "places": "none"}),
        (101, {"tables": 0, "places": "none"}),
        (564, {"tables": None, "places": "none", "expert_cache": 100}),
    ],
)
def test_things_are_given_up_in_their_order_and_come_back_as_far_as_there_is_room(missing: int, changes: dict) -> None:
    found = settled(ALL - missing)
    assert found is not None and ledger_of(found).peak <= ALL - missing
    assert found == replace(REQUESTED, **changes)


def test_whatever_fits_with_the_least_is_found_and_nothing_below_it() -> None:
    assert settled(LEAST - 1) is None
    before = 0
    for limit in range(LEAST, ALL + 1):
        found = settled(limit)
        assert found is not None and ledger_of(found).peak <= limit
        assert found.n_batch >= before  # the batch is the last to shrink
        before = found.n_batch


def test_no_setting_that_would_fit_better_is_missed() -> None:
    """Of all combinations that fit, the one that gives up least of the last thing, then of the one before it."""
    values = [setting.values for setting in REDUCIBLE]
    for limit in range(LEAST, ALL, 13):
        ranks = [
            tuple(reversed(rank))
            for rank in itertools.product(*(range(len(each)) for each in values))
            if ledger_of(_with(rank, values)).peak <= limit
        ]
        best = min(ranks)
        found = settled(limit)
        assert found == _with(tuple(reversed(best)), values)


def _with(rank: tuple[int, ...], values: list) -> FitSettings:
    changes = {setting.field: each[at] for setting, each, at in zip(REDUCIBLE, values, rank, strict=True)}
    return replace(REQUESTED, **changes)


@pytest.mark.parametrize("n_batch, steps", [(512, [512, 256, 128, 64, 32, 16]), (100, [100, 50, 25, 16]), (7, [7])])
def test_batches_are_halved_down_to_the_least(n_batch: int, steps: list[int]) -> None:
    assert smaller_batches(n_batch).values == steps


# ---- what is said where nothing fits ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.memory.refusal._NOISE", 0)


def refused(limit: int, requested: FitSettings = REQUESTED) -> str:
    settings = least_settings(requested, REDUCIBLE)
    return str(refusal(FILE, settings, Fitting(ledger_of, limit), Limit(limit, limit)))


def test_the_refusal_has_the_shortfall_and_what_fits() -> None:
    message = refused(LEAST - 1)
    assert message.startswith("some.gguf needs at least 2.1 KiB (weights 1.0 KiB, KV cache 1.0 KiB at n_ctx 100, ")
    assert "the budget is 2.1 KiB, 1 B too few: n_ctx 64 fits (-c 64); --cache-type q8_0 fits" in message
    assert "in a file of at most 1.0 KiB" in message


def test_what_does_not_help_is_not_proposed() -> None:
    assert "-c 60)" in refused(LEAST - 400) and "q8_0 fits" in refused(LEAST - 400)
    assert "-c 59)" in refused(LEAST - 401) and "q8_0" not in refused(LEAST - 401)
    assert "no n_ctx fits" in refused(LEAST - 1000) and "in a file of at most" not in refused(LEAST - 1000)


@pytest.mark.parametrize("limit, n_ctx", [(LEAST - 991, 0), (LEAST - 990, 1), (LEAST - 370, 63), (LEAST - 1, 64)])
def test_the_largest_n_ctx_keeps_to_the_limit(limit: int, n_ctx: int) -> None:
    assert largest_n_ctx(least_settings(REQUESTED, REDUCIBLE), Fitting(ledger_of, limit)) == n_ctx


def test_a_cache_type_that_the_model_cannot_have_is_not_proposed() -> None:
    def picky(settings: FitSettings) -> Ledger:
        if settings.cache_type != "f16":
            raise InvalidArgument("heads of 80 numbers have no q8_0")
        return ledger_of(settings)

    settings = least_settings(REQUESTED, REDUCIBLE)
    message = str(refusal(FILE, settings, Fitting(picky, LEAST - 1), Limit(LEAST - 1, LEAST - 1)))
    assert "-c 64" in message and "q8_0" not in message


def test_what_fits_is_found_in_few_plans() -> None:
    asked = []

    def counted(settings: FitSettings) -> Ledger:
        asked.append(settings)
        return ledger_of(settings)

    assert largest_n_ctx(replace(REQUESTED, n_ctx=2**31 - 1), Fitting(counted, 1_000_000)) == 99776
    assert len(asked) <= 32


def test_what_a_device_refuses_is_refused_with_what_fits_too() -> None:
    def of_a_device(settings: FitSettings) -> Ledger:
        if settings.n_ctx > 70:
            raise BudgetExceeded(f"{settings.n_ctx} are too many for the device")
        return ledger_of(settings)

    fitting = Fitting(of_a_device, 10**9)
    assert fit(REQUESTED, REDUCIBLE, fitting) is None
    error = refusal(FILE, REQUESTED, fitting, Limit(10**9, 10**9))
    assert str(error) == "100 are too many for the device: n_ctx 64 fits (-c 64)"
