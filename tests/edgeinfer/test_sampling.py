"""Sampling: filters by hand, the distribution by chi-squared, and bits that may not change on any machine."""

import dataclasses
import json
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import sampling_reference as reference

from edgeinfer import _sampler
from edgeinfer.common.errors import InvalidArgument, NumericalError, ShapeError
from edgeinfer.sampling import SamplingParams, adjusted, candidates, penalize, sample

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def params(**changes):
    return dataclasses.replace(PLAIN, **changes)


def logits_of(probabilities):
    return np.log(np.array(probabilities)).astype(np.float32)


def kept(probabilities, **changes):
    return sorted(candidates(logits_of(probabilities), params(**changes)).tolist())


# ---- filters by hand -------------------------------------------------------------------------------------------


def test_top_k_keeps_the_largest():
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=2) == [1, 3]


def test_top_k_tells_equal_logits_apart_by_the_lower_id():
    assert kept([0.25, 0.25, 0.25, 0.25], top_k=2) == [0, 1]


def test_top_k_above_the_vocabulary_keeps_all():
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=40) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "top_p, ids", [(0.0, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_the_share(top_p, ids):
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=top_p) == ids


@pytest.mark.parametrize(
    "min_p, ids", [(0.2, [0, 1, 2, 3]), (0.26, [1, 2, 3]), (0.51, [1, 3]), (0.76, [1]), (1.0, [1])]
)
def test_min_p_is_a_share_of_the_largest_probability(min_p, ids):
    assert kept([0.1, 0.4, 0.2, 0.3], min_p=min_p) == ids


def test_top_p_looks_at_the_probabilities_that_top_k_leaves():
    # 0.4 of all is 0.4 / 0.7 = 0.57 of what top_k leaves
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=2, top_p=0.56) == [1]
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.56) == [1, 3]


def test_top_p_and_min_p_do_not_look_at_the_temperature():
    for temperature in (0.1, 5.0):
        assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.71, temperature=temperature) == [1, 2, 3]
        assert kept([0.1, 0.4, 0.2, 0.3], min_p=0.51, temperature=temperature) == [1, 3]


def test_repeat_penalty_divides_positive_logits_and_multiplies_negative_ones():
    logits = np.array([2.0, -2.0, 2.0, 0.0], dtype=np.float32)
    assert penalize(logits, params(repeat_penalty=2.0), [0, 1, 3]).tolist() == [1.0, -4.0, 2.0, 0.0]


def test_frequency_penalty_counts_and_presence_penalty_does_not():
    logits = np.array([2.0, 2.0, 2.0, 2.0], dtype=np.float32)
    penalized = penalize(logits, params(frequency_penalty=0.25, presence_penalty=0.5), [1, 2, 2])
    assert penalized.tolist() == [2.0, 1.25, 1.0, 2.0]


@pytest.mark.parametrize("last_n, seen", [(1, [3]), (2, [2, 3]), (-1, [0, 2, 3])])
def test_penalties_reach_penalty_last_n_tokens_back(last_n, seen):
    chosen = params(presence_penalty=1.0, penalty_last_n=last_n)
    assert np.flatnonzero(penalize(np.zeros(4, np.float32), chosen, [0, 2, 3])).tolist() == seen


def test_penalty_last_n_of_zero_switches_the_penalties_off():
    logits = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    assert sample(logits, params(temperature=0.0, presence_penalty=9.0, penalty_last_n=0), 1, [1]) == 1


def test_penalties_change_the_greedy_choice_and_not_the_logits_given():
    logits = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    assert sample(logits, params(temperature=0.0, presence_penalty=1.5), 1, [1]) == 2
    assert logits.tolist() == [1.0, 3.0, 2.0]


def test_logit_bias_is_added_before_all_else_and_bans():
    logits = np.array([1.0, 3.0, 2.0, 0.0], dtype=np.float32)
    assert sample(logits, params(temperature=0.0, logit_bias={0: 2.5}), 0) == 0
    assert sample(logits, params(temperature=0.0, logit_bias={1: -math.inf}), 0) == 2
    assert sample(logits, params(temperature=0.0, logit_bias={1: False, 2: -5}), 0) == 0
    # before the penalties: 2 * 1.5 is still below 4 * 1.5 / 2
    biased = adjusted(logits, params(logit_bias={1: 1.0}, repeat_penalty=2.0), [1])
    assert biased.tolist() == [1.0, 2.0, 2.0, 0.0] and logits.tolist() == [1.0, 3.0, 2.0, 0.0]


def test_a_banned_token_is_never_drawn_and_others_keep_their_shares():
    logits = logits_of([0.5, 0.3, 0.2])
    drawn = [sample(logits, params(logit_bias={0: False}), position) for position in range(3000)]
    assert set(drawn) == {1, 2} and 0.55 < drawn.count(1) / 3000 < 0.65


def test_a_bias_of_tokens_that_a_drafter_lacks_is_left_out():
    assert adjusted(np.zeros(3, np.float32), params(logit_bias={1: 2.0, 7: 3.0}), []).tolist() == [0.0, 2.0, 0.0]


def test_to_ban_every_token_is_an_error_that_says_so():
    with pytest.raises(InvalidArgument, match="bans every"):
        sample(np.zeros(3, np.float32), params(logit_bias=dict.fromkeys(range(3), False)), 0)


def test_dry_makes_the_greedy_choice_leave_a_loop():
    logits = np.array([0.0, 3.0, 2.0, 1.0], dtype=np.float32)
    text = [2, 1, 3, 1, 3, 1, 2, 1, 3]
    assert sample(logits, params(temperature=0.0), 9, text) == 1
    assert sample(logits, params(temperature=0.0, dry_multiplier=0.8), 9, text) == 2
    assert sample(logits, params(temperature=0.0, dry_multiplier=0.8, dry_penalty_last_n=0), 9, text) == 1
    assert sample(logits, params(temperature=0.0, dry_multiplier=0.8), 9, text, {3: [()]}) == 1  # a breaker


# ---- the choice ------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_ids_and_needs_no_seed():
    logits = np.array([0.0, 7.0, 7.0, 7.0], dtype=np.float32)
    assert sample(logits, SamplingParams(temperature=0.0), 0) == 1


def test_a_temperature_next_to_zero_draws_only_among_the_largest():
    logits = np.array([1.0, 2.0, 2.0], dtype=np.float32)
    assert {sample(logits, params(temperature=1e-300), position) for position in range(40)} == {1, 2}


def test_minus_infinity_is_never_drawn():
    logits = np.full(8, -np.inf, dtype=np.float32)
    logits[5] = 0.0
    assert {sample(logits, params(temperature=1e6), position) for position in range(50)} == {5}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(bad, temperature):
    logits = np.zeros(5000, dtype=np.float32)
    logits[4321] = bad
    with pytest.raises(NumericalError, match="position 7"):
        sample(logits, params(temperature=temperature), 7)


def test_logits_without_a_finite_one_are_an_error():
    with pytest.raises(NumericalError):
        sample(np.full(5, -np.inf, dtype=np.float32), PLAIN, 0)


@pytest.mark.parametrize("logits", [np.zeros((1, 4), np.float32), np.zeros(4), np.zeros(0, np.float32)])
def test_logits_of_another_shape_or_type_are_an_error(logits):
    with pytest.raises(ShapeError):
        sample(logits, PLAIN, 0)


def test_a_draw_without_a_seed_is_an_error():
    with pytest.raises(InvalidArgument, match="seed"):
        sample(np.zeros(4, np.float32), params(seed=None), 0)


def test_with_seed_draws_one_and_keeps_a_given_one():
    drawn = [params(seed=None).with_seed().seed for _ in range(3)]
    assert None not in drawn and len(set(drawn)) == 3
    assert params(seed=5).with_seed().seed == 5


def test_the_noise_depends_on_seed_position_and_id_and_on_nothing_else():
    logits = np.zeros(1000, dtype=np.float32)
    at_position = [sample(logits, PLAIN, position) for position in range(20)]
    of_seed = [sample(logits, params(seed=seed), 0) for seed in range(20)]
    assert len(set(at_position)) > 15 and len(set(of_seed)) > 15
    again = [sample(logits, PLAIN, position) for position in reversed(range(20))]
    assert again[::-1] == at_position


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 2.5}, {"temperature": 0.3}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.4}]
)
def test_drawn_tokens_follow_the_softmax_of_what_is_left(changes):
    """Chi-squared over 20 000 positions; each position has its own noise. 5 sigma above the mean for the bound."""
    probabilities = [0.05, 0.3, 0.25, 0.02, 0.18, 0.2]
    chosen = params(seed=20240607, **changes)
    logits = logits_of(probabilities)
    ids = np.sort(candidates(logits, chosen))
    expected = np.exp(logits[ids].astype(float) / chosen.temperature)
    expected *= 20_000 / expected.sum()
    drawn = [sample(logits, chosen, position) for position in range(20_000)]
    assert set(drawn) <= set(ids.tolist())
    observed = np.bincount(drawn, minlength=6)[ids]
    chi_squared = float(((observed - expected) ** 2 / expected).sum())
    freedom = ids.size - 1
    assert chi_squared < freedom + 5 * math.sqrt(2 * max(freedom, 1))


def test_neighbouring_positions_and_seeds_are_independent():
    """Pairs of draws from four equal tokens: 16 equally likely pairs, chi-squared with 15 degrees of freedom."""
    logits = np.zeros(4, dtype=np.float32)
    for pairs in (
        [(sample(logits, PLAIN, i), sample(logits, PLAIN, i + 1)) for i in range(8000)],
        [(sample(logits, params(seed=i), 0), sample(logits, params(seed=i + 1), 0)) for i in range(8000)],
    ):
        observed = np.bincount([4 * a + b for a, b in pairs], minlength=16)
        assert float(((observed - 500) ** 2 / 500).sum()) < 15 + 5 * math.sqrt(30)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"top_k": 1000, "top_p": 0.9},
        {"top_p": 0.95},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"top_p": 0.5, "min_p": 0.01},
        {"temperature": 3.0},
        {"temperature": 0.2},
    ],
)
@pytest.mark.parametrize("n_vocab", [5, 1500, 30_001])
@pytest.mark.parametrize("deviation", [0.01, 3.0])
def test_the_shortcuts_lose_no_winner(changes, n_vocab, deviation, rng):
    for position in range(6):
        logits = (deviation * rng.standard_normal(n_vocab)).round(2).astype(np.float32)  # rounded: many are equal
        chosen = params(seed=position, **changes)
        assert sample(logits, chosen, position) == reference.simply_drawn(logits, chosen, position)


def test_candidates_and_draws_are_those_of_the_reference(rng):
    """Any parameters, sizes around those of the blocks and groups that the fast way looks at, and equal logits."""
    for position in range(300):
        n_vocab = int(rng.choice([1, 2, 5, 40, 41, 255, 256, 257, 1500, 4096, 4097, 9001]))
        logits = (rng.choice([0.0, 0.01, 1.0, 3.0, 30.0, 1000.0]) * rng.standard_normal(n_vocab)).astype(np.float32)
        if rng.random() < 0.4:
            logits = logits.round(int(rng.integers(0, 3))).astype(np.float32)
        if rng.random() < 0.2:
            logits[rng.random(n_vocab) < 0.5] = -np.inf
            logits[int(rng.integers(n_vocab))] = 1.0
        chosen = SamplingParams(
            temperature=float(rng.choice([1e-300, 0.01, 0.8, 1.0, 3.0, 1e6])),
            top_k=int(rng.choice([0, 2, 5, 40, 1000, n_vocab, n_vocab + 5])),
            top_p=float(rng.choice([0.0, 1e-9, 0.5, 0.95, 0.999, 1 - 1e-12, 1.0])),
            min_p=float(rng.choice([0.0, 1e-12, 0.01, 0.05, 0.5, 1.0])),
            seed=int(rng.integers(0, 2**63)),
        )
        expected = np.sort(reference.simple_candidates(logits, chosen)).tolist()
        assert np.sort(candidates(logits, chosen)).tolist() == expected, chosen
        assert sample(logits, chosen, position) == reference.simply_drawn(logits, chosen, position), chosen


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_penalised_choice_leaves_the_logits_as_they_are(rng, temperature):
    chosen = params(temperature=temperature, repeat_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.1, top_k=40)
    for n_vocab in (3, 1000, 50_000):
        logits = (4 * rng.standard_normal(n_vocab)).astype(np.float32)
        previous = [*rng.integers(0, n_vocab, 50).tolist(), int(logits.argmax()), -5, n_vocab + 7]
        before = logits.copy()
        found = [sample(logits, chosen, position, previous) for position in range(20)]
        assert logits.tobytes() == before.tobytes()
        plain = dataclasses.replace(chosen, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        penalized = penalize(logits, chosen, previous)
        assert found == [sample(penalized, plain, position) for position in range(20)]
        logits.flags.writeable = False
        assert found == [sample(logits, chosen, position, previous) for position in range(20)]


def test_penalised_logits_that_are_no_numbers_are_named():
    logits = np.zeros(1000, np.float32)
    logits[[700, 900]] = np.nan
    for temperature in (0.0, 0.8):
        with pytest.raises(NumericalError, match=r"is nan \(token 700\)"):
            sample(logits, params(temperature=temperature, repeat_penalty=1.5), 0, [3])


def draws_written_down():
    """The logits come from integers: no library that may differ computes them."""
    logits = ((np.arange(40_000, dtype=np.int64) * 2654435761 % 65_521).astype(np.float32) - 32_760) / 4096
    default = SamplingParams(seed=42)
    return {
        "default": [sample(logits, default, p) for p in range(6)],
        "plain": [sample(logits, params(seed=2**64 - 1), p) for p in range(6)],
        "nucleus": [sample(logits, params(top_p=0.9, temperature=1.3), p) for p in range(6)],
        "penalized": [sample(logits, params(repeat_penalty=1.3, top_k=5), p, [39_999, 7]) for p in range(6)],
    }


def test_the_choice_is_the_same_on_every_machine():
    assert draws_written_down() == {
        "default": [39661, 2984, 33693, 4849, 35185, 1492],
        "plain": [2782, 8726, 14428, 18107, 19797, 24194],
        "nucleus": [2274, 19440, 377, 8373, 36828, 2738],
        "penalized": [33693, 373, 32947, 33693, 373, 746],
    }


def test_noise_and_weights_have_the_bits_of_the_reference(rng):
    x = np.concatenate([-np.arange(1201) / 37, -800 * rng.random(2000), [0.0, -700.0, -np.inf]]).astype(np.float32)
    assert _sampler.weights(x) == reference.exp(x, np.float32(0)).tolist()
    ids = rng.integers(0, 2**32, 2000)
    for key in (0, 2**64 - 1, 1234567):
        noise = reference.gumbel(reference.noise_bits(ids, key)).tolist()
        assert [_sampler.noise(id, key) for id in ids.tolist()] == noise


def test_the_noise_is_splitmix64():
    """First outputs of SplitMix64 seeded with 1234567 (Steele et al.; the vectors of Rosetta Code)."""
    bits = reference.noise_bits(np.arange(5), 1234567)
    assert bits.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_gumbel_noise_is_finite_for_the_extreme_bits():
    least, most = reference.gumbel(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert -3.61 < least < -3.60 and 36.7 < most < 36.74


# ---- exp and log -----------------------------------------------------------------------------------------------


def test_exp_and_log_are_within_one_ulp():
    x = -(np.arange(1, 2000) ** 1.1 % 90).astype(np.float32)
    with localcontext(prec=40):
        exact = [float(Decimal(float(value)).exp()) for value in x]
        y = np.abs(x.astype(np.float64)) * 1e-3
        exact_log = [float(Decimal(float(value)).ln()) for value in y]
    np.testing.assert_array_max_ulp(reference.exp(x, np.float32(0)), np.array(exact), maxulp=1)
    np.testing.assert_array_max_ulp(reference.log(y), np.array(exact_log), maxulp=1)


def test_log_is_exact_next_to_one():
    # log(1 - e) = -(e + e**2 / 2 + ...): for e = 2**-52 just above half a unit in the last place.
    logs = reference.log(np.array([1 - 2.0**-53, 1 - 2.0**-52, 1.0])).tolist()
    assert logs == [-(2.0**-53), -math.nextafter(2.0**-52, 1.0), 0.0]


def test_exp_gives_the_same_for_long_and_short_arrays(rng):
    x = (-30 * rng.random(10_001)).astype(np.float32)
    one_by_one = np.concatenate([reference.exp(x[i : i + 1], np.float32(0)) for i in range(0, x.size, 97)])
    assert np.array_equal(reference.exp(x, np.float32(0))[::97], one_by_one)


# ---- parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -2},
        {"top_k": 1.5},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repeat_penalty": 0.0},
        {"penalty_last_n": -2},
        {"seed": -2},
        {"seed": 2**64},
        {"seed": True},
        {"temperature": "warm"},
        {"dry_multiplier": -0.1},
        {"dry_base": 0.9},
        {"dry_allowed_length": -1},
        {"dry_penalty_last_n": -2},
        {"dry_sequence_breakers": ["a", ""]},
        {"dry_sequence_breakers": 3},
        {"dry_sequence_breakers": [b"a"]},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {1: True}},
        {"logit_bias": {"one": 1.0}},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": {"-1": 1.0}},
        {"logit_bias": {"": 1.0}},
        {"logit_bias": {"\u00b2": 1.0}},
        {"logit_bias": {"9" * 5000: 1.0}},
        {"logit_bias": "260"},
        {"logit_bias": {"260": None}},
        {"logit_bias": [1, 2]},
        {"logit_bias": 7},
        {"loop_guard": -1},
        {"loop_guard": 63},
        {"loop_guard": False},
    ],
)
def test_a_parameter_out_of_range_is_named(wrong):
    (name,) = wrong
    with pytest.raises(InvalidArgument, match="breaker" if name == "dry_sequence_breakers" else name):
        SamplingParams(**wrong)


def test_the_defaults_are_those_of_llama_cpp():
    default = SamplingParams()
    assert (default.temperature, default.top_k, default.top_p, default.min_p) == (0.8, 40, 0.95, 0.05)
    assert (default.repeat_penalty, default.frequency_penalty, default.presence_penalty) == (1.0, 0.0, 0.0)
    assert default.penalty_last_n == 64 and default.seed is None and not default.has_penalties
    assert (default.dry_multiplier, default.dry_base, default.dry_allowed_length) == (0.0, 1.75, 2)
    assert default.dry_penalty_last_n == -1 and default.dry_sequence_breakers == ("\n", ":", '"', "*")
    assert default.logit_bias == () and not default.changes_logits and default.loop_guard == 512


def test_parameters_are_values_however_they_are_given():
    bias = {7: 1, np.int64(3): np.float32(-2.5), 5: False}
    chosen = SamplingParams(logit_bias=bias, dry_sequence_breakers=["a", "b"], seed=1)
    assert chosen.logit_bias == ((3, -2.5), (5, -math.inf), (7, 1.0))
    assert chosen == SamplingParams(logit_bias=list(bias.items()), dry_sequence_breakers=("a", "b"), seed=1)
    assert hash(chosen) == hash(dataclasses.replace(chosen)) and {chosen: 1}[dataclasses.replace(chosen)] == 1
    bias[9] = 1.0
    assert chosen.logit_bias == ((3, -2.5), (5, -math.inf), (7, 1.0))


def test_parameters_go_through_json_and_back():
    chosen = SamplingParams(temperature=0.3, logit_bias={7: 1.5, 5: False}, dry_sequence_breakers=("x",), seed=2)
    written = json.loads(json.dumps(chosen.to_json(), allow_nan=False))
    assert written["logit_bias"] == {"5": False, "7": 1.5} and written["loop_guard"] == 512
    assert SamplingParams(**written) == chosen


@pytest.mark.parametrize("changes", [{"logit_bias": {1: 0.5}}, {"dry_multiplier": 0.8}, {"repeat_penalty": 1.1}])
def test_what_changes_the_choice_says_so(changes):
    assert params(**changes).changes_logits
    assert not params(dry_multiplier=0.8, dry_penalty_last_n=0).changes_logits
    assert not params(loop_guard=0).changes_logits


NOT_GIVEN = dict.fromkeys(field.name for field in dataclasses.fields(SamplingParams))


def test_what_is_none_is_not_given():
    assert SamplingParams(**NOT_GIVEN) == SamplingParams()
    own = SamplingParams(temperature=0.3, top_k=7, logit_bias={3: 1.0}, loop_guard=0, seed=5)
    assert own.changed(NOT_GIVEN) == dataclasses.replace(own, seed=None)
    assert own.changed({}) == own and own.changed({"top_p": 0.5, "min_p": None}).top_p == 0.5


@pytest.mark.parametrize("minus_one", [-1, np.int64(-1), np.int8(-1)])
def test_minus_one_is_what_it_is_in_llama_cpp(minus_one):
    params = SamplingParams(top_k=minus_one, seed=minus_one, penalty_last_n=minus_one, dry_penalty_last_n=minus_one)
    assert params == SamplingParams(top_k=0, seed=None, penalty_last_n=-1, dry_penalty_last_n=-1)
    assert params.with_seed().seed is not None


@pytest.mark.parametrize(
    "bias", [{"260": -100}, {260: -100}, {np.int32(260): np.float16(-100)}, [("260", -100.0)], [(260, -100)]]
)
def test_ids_of_a_bias_may_be_written_in_digits(bias):
    assert SamplingParams(logit_bias=bias) == SamplingParams(logit_bias={260: -100.0})


def test_numbers_of_numpy_become_pythons():
    params = SamplingParams(np.float32(0.5), np.int16(7), np.float64(0.9), seed=np.uint64(3), loop_guard=np.int64(64))
    assert params == SamplingParams(0.5, 7, 0.9, seed=3, loop_guard=64)
    assert {type(value) for value in (params.temperature, params.top_k, params.top_p, params.seed)} == {int, float}


@pytest.mark.parametrize(
    "name, hint",
    [("repetition_penalty", "repeat_penalty"), ("topp", "top_p"), ("max_new_tokens", "max_tokens"), ("mirostat", "")],
)
def test_an_unknown_parameter_is_answered_with_the_name_that_it_has_here(name, hint):
    with pytest.raises(TypeError, match=f"no sampling parameter '{name}'" + (f": {hint} is" if hint else "$")):
        SamplingParams().changed({name: 1.1})


def test_the_most_likely_of_logits_with_nan_among_them_are_no_more_than_there_are():
    logits = np.full(100, np.nan, dtype=np.float32)
    logits[[3, 70]] = 1.0, 2.0
    assert list(_sampler.candidates(logits, 8, 1.0, 0.0)) == [70, 3]
