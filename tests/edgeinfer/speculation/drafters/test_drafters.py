"""What each drafter proposes, on texts small enough to know the answer."""

import math
import random
import tracemalloc

import numpy as np
import pytest
from drafting import cost_model

from edgeinfer.sampling import SamplingParams, sample
from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.drafters.chains import Chains
from edgeinfer.speculation.drafters.foresight import Foresight
from edgeinfer.speculation.drafters.recycling import RecyclingDrafter
from edgeinfer.speculation.drafters.suffix import BYTES_PER_TOKEN, SuffixAutomaton, SuffixDrafter
from edgeinfer.speculation.policy import min_useful_probability
from edgeinfer.speculation.tree import checked


def context_of(tokens, min_probability=0.0):
    context = Context(list(tokens), lambda logits, text: int(logits.argmax()), True)
    context.acceptance = AcceptanceTable()
    context.acceptance.min_probability = min_probability
    return context


# ---- Suffix ----------------------------------------------------------------------------------------------------------


def longest_repeat(text):
    """(length of the longest end of the text that occurs earlier, the ends of its earlier occurrences)."""
    for length in range(len(text) - 1, 0, -1):
        ends = [end for end in range(length - 1, len(text) - 1) if text[end - length + 1 : end + 1] == text[-length:]]
        if ends:
            return length, ends
    return 0, []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n_symbols", [1, 2, 3, 8])
def test_the_automaton_finds_what_a_search_of_the_whole_text_finds(seed, n_symbols):
    rng, automaton, text = random.Random(seed), SuffixAutomaton(), []
    for _ in range(120):
        text.append(rng.randrange(n_symbols))
        automaton.append(text[-1])
        length, ends = longest_repeat(text)
        assert automaton.match_length == length
        if length:
            assert automaton.match_end in ends
            followers = {text[end + 1] for end in ends}
            assert {token for token, _ in automaton.followers(automaton.match)} == followers
            assert automaton.has_several(automaton.match) == (len(followers) > 1)


def test_the_automaton_stays_linear():
    automaton = SuffixAutomaton()
    for token in [1, 2] * 2000 + [1] * 2000:
        automaton.append(token)
    n_states = len(automaton.end)
    assert n_states <= 2 * 6000 and sum(len(automaton.followers(state)) for state in range(n_states)) <= 3 * 6000


def test_what_followed_the_longest_match_is_drafted():
    drafter = SuffixDrafter(1024)
    context = context_of([1, 2, 3, 4, 5, 6, 9, 9, 2, 3, 4])
    drafter.start(context)
    tree = drafter.propose(context, 3)
    assert (tree.tokens, tree.parents) == ([5, 6, 9], [-1, 0, 1]) and tree.p[0] < tree.p[1]
    assert checked(tree, 10, 3) == tree


def test_a_repetition_goes_on_after_the_end_of_the_text():
    drafter = SuffixDrafter(1024)
    context = context_of([7, 1, 2, 3, 1, 2, 3])
    drafter.start(context)
    assert drafter.propose(context, 7).tokens == [1, 2, 3, 1, 2, 3, 1]


def test_two_followers_become_two_branches():
    drafter = SuffixDrafter(1024)
    context = context_of([1, 2, 7, 1, 3, 9, 1])
    drafter.start(context)
    tree = drafter.propose(context, 8)
    firsts = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]
    assert sorted(firsts) == [2, 3]


def test_a_new_text_has_no_draft_and_an_unlikely_chain_is_short():
    drafter = SuffixDrafter(1024)
    context = context_of([1, 2, 3, 4])
    drafter.start(context)
    assert len(drafter.propose(context, 8)) == 0
    likely = context_of([1, 2, 3, 4, 1], min_probability=0.29)
    drafter = SuffixDrafter(1024)
    drafter.start(likely)
    assert len(drafter.propose(likely, 8)) == 1


def test_earlier_requests_are_remembered_and_never_joined_to_new_ones():
    drafter = SuffixDrafter(1024)
    drafter.start(context_of([1, 2, 3, 4, 5, 6]))
    other = context_of([9, 8, 3, 4])
    drafter.start(other)
    assert drafter.propose(other, 2).tokens == [5, 6]
    third = context_of([9, 8, 3, 4, 7, 7, 5, 6])
    drafter.start(third)  # begins with the last request: only the rest is read
    assert drafter.propose(third, 4).tokens[:1] != [9]
    assert all(token >= 0 for token in drafter.propose(third, 4).tokens)


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_requests_gives_valid_drafts_within_the_memory_of_the_plan(seed):
    rng, drafter = random.Random(seed), SuffixDrafter(256)
    for _ in range(60):
        tokens = [rng.randrange(5) for _ in range(rng.randint(1, 64))]
        context = context_of(tokens)
        drafter.start(context)
        for _ in range(5):
            tree = drafter.propose(context, 6)
            assert checked(tree, 5, 6) == tree
            context.tokens.append(rng.randrange(5))
        assert len(drafter._automaton.text) <= 256 + 64


def test_the_automaton_keeps_to_the_bytes_that_the_plan_counts():
    rng = random.Random(1)
    words = [[rng.randrange(50000) for _ in range(rng.randint(1, 6))] for _ in range(400)]
    text = [token for _ in range(2000) for token in rng.choice(words)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.3 * BYTES_PER_TOKEN < held / len(text) < BYTES_PER_TOKEN


def test_tokens_that_penalties_make_less_likely_are_learnt_apart():
    def buckets(**options):
        drafter, context = SuffixDrafter(1024), context_of([1, 2, 3, 4, 5, 9, 8, 7, 1, 2])
        context.params, context.is_plain = SamplingParams(temperature=0.0, **options), not options
        drafter.start(context)
        tree = drafter.propose(context, 3)
        assert tree.tokens == [3, 4, 5] and checked(tree, 50, 3) == tree
        return tree.buckets

    plain = buckets()
    assert len(set(plain)) == 1
    assert buckets(repeat_penalty=1.1) == buckets(presence_penalty=0.5) == [buckets(logit_bias={3: -1.0})[0]] * 3
    assert buckets(repeat_penalty=1.1)[0] != plain[0]
    assert buckets(repeat_penalty=1.1, penalty_last_n=4) == plain, "the tokens are not among the recent ones"
    assert buckets(logit_bias={3: 1.0}) == plain, "a bias may make a token likelier"


def test_a_token_of_the_draft_itself_is_recent_too():
    drafter, context = SuffixDrafter(1024), context_of([1, 2, 3, 3, 5, 9, 8, 7, 1, 2])
    context.params, context.is_plain = SamplingParams(temperature=0.0, repeat_penalty=1.1, penalty_last_n=2), False
    drafter.start(context)
    first, second, *_ = drafter.propose(context, 3).buckets
    assert first != second


@pytest.mark.parametrize("banned", [3, 4, 5])
def test_a_banned_token_and_what_follows_it_are_not_drafted(banned):
    drafter, context = SuffixDrafter(1024), context_of([1, 2, 3, 4, 5, 9, 8, 7, 1, 2])
    context.params, context.is_plain = SamplingParams(temperature=0.0, logit_bias={banned: False}), False
    drafter.start(context)
    assert drafter.propose(context, 3).tokens == [3, 4, 5][: banned - 3]
    copy = context_of([*range(20, 40), 1, *range(20, 30)])
    copy.params, copy.is_plain = SamplingParams(temperature=0.0, logit_bias={32: -100.0}), False
    drafter.start(copy)
    assert drafter.propose(copy, 8).tokens == [30, 31]


def test_chains_share_their_beginning_which_has_the_likelier_bucket():
    chains = Chains(context_of([1], min_probability=0.1), 5)
    chains.add([7, 8, 9], [1, 1, 1], [(0.5, 0.6)] * 3)
    chains.add([7, 8, 4], [2, 2, 2], [(0.9, 0.2)] * 3)
    chains.add([6, 5, 5], [3, 3, 3], [(0.3, 0.2)] * 3)
    chains.add([4], [3], [(0.05, 0.2)])
    tree = chains.tree()
    assert (tree.tokens, tree.parents) == ([7, 8, 9, 6], [-1, 0, 1, -1])
    assert (tree.buckets, tree.p) == ([2, 1, 1, 3], [0.9, 0.6, 0.6, 0.3])
    full = Chains(context_of([1]), 2)
    full.add([7, 8, 9], [1] * 3, [(0.5, 0.6)] * 3)
    assert full.tree().tokens == [7, 8]
    hopeless = Chains(context_of([1], min_probability=0.9), 5)
    hopeless.add([7, 8], [1, 1], [(0.1, 0.1)] * 2)
    assert hopeless.tree().tokens == [7], "one node, from which the acceptance is learnt"


# ---- Recycling -------------------------------------------------------------------------------------------------------


def logits_with(n_vocab, *likely):
    logits = np.full(n_vocab, -20.0, dtype=np.float32)
    logits[list(likely)] = [5.0 - rank for rank in range(len(likely))]
    return logits


def test_the_successors_that_the_model_thought_of_become_a_tree():
    drafter = RecyclingDrafter()
    context = context_of([1, 2])
    drafter.start(context)
    assert len(drafter.propose(context, 8)) == 0
    context.tokens.append(3)
    drafter.observe(context, 1, [logits_with(50, 3, 4)])  # after 1, 2
    context.tokens.append(2)
    drafter.observe(context, 1, [logits_with(50, 2, 7)])  # after 2, 3
    tree = drafter.propose(context, 8)  # after 2: 3 or 4; after 2, 3: 2 or 7
    paths = set()
    for node, token in enumerate(tree.tokens):
        path, above = [token], tree.parents[node]
        while above >= 0:
            path, above = [tree.tokens[above], *path], tree.parents[above]
        paths.add(tuple(path))
    assert {(3,), (4,), (3, 2), (3, 7)} <= paths and checked(tree, 50, 8) == tree


def test_two_tokens_are_looked_for_before_one():
    drafter = RecyclingDrafter()
    context = context_of([1, 2, 3])
    drafter.observe(context, 1, [logits_with(50, 3)])  # after 1, 2
    context.tokens.extend([5, 2, 6])
    drafter.observe(context, 1, [logits_with(50, 6)])  # after 5, 2, and after 2
    assert drafter.propose(context_of([1, 2]), 1).tokens == [3]
    assert drafter.propose(context_of([8, 2]), 1).tokens == [6]


def test_the_table_stays_below_three_megabytes_whatever_it_sees():
    drafter = RecyclingDrafter()
    assert drafter.held() == {"tables": RecyclingDrafter.memory()} and RecyclingDrafter.memory() < 3_000_000
    rng, context = np.random.default_rng(1), context_of([0])
    for token in rng.integers(0, 150_000, 300).tolist():
        context.tokens.append(token)
        drafter.observe(context, 1, [rng.standard_normal(150_000, dtype=np.float32)])
        tree = drafter.propose(context, 12)
        assert checked(tree, 150_000, 12) == tree
    assert drafter.held() == {"tables": RecyclingDrafter.memory()}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "repeat_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "penalty_last_n": -1},
        {"temperature": 0.0, "logit_bias": {7: 3.0, 9: -2.0}},
        {"temperature": 0.2, "top_k": 50, "top_p": 0.9, "min_p": 0.0, "repeat_penalty": 1.1},
        {"temperature": 0.8, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.5, "min_p": 0.1},
    ],
)
def test_the_first_draft_is_what_the_target_chooses_from_the_same_logits(options):
    rng = np.random.default_rng(3)
    for seed in range(60):
        params = SamplingParams(seed=seed, **options)
        tokens = rng.integers(0, 12, 30).tolist()
        logits = rng.normal(0.0, 3.0, 50).astype(np.float16).astype(np.float32)
        logits[rng.permutation(12)[:6]] += 12.0  # those that are kept have nearly all of the probability
        drafter, context = RecyclingDrafter(), context_of(tokens)
        drafter.observe(context, 1, [logits])  # the last token was sampled from these logits
        context = context_of(tokens[:-1])
        context.params, context.is_plain = params, False
        chosen = sample(logits, params, len(context.tokens), context.tokens)
        tree = drafter.propose(context, 3)
        assert tree.tokens[0] == chosen, (seed, options)
        assert checked(tree, 50, 3) == tree
        roots = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent < 0]
        assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("options", [{"temperature": 0.0, "repeat_penalty": 1.5}, {"temperature": 0.9, "min_p": 0.0}])
def test_drafts_after_drafts_are_chosen_with_the_noise_and_the_penalties_of_their_place(options):
    rng, n_seconds = np.random.default_rng(4), 0
    for seed in range(40):
        params, tokens = SamplingParams(seed=seed, top_p=1.0, **options), rng.integers(0, 12, 20).tolist()
        drafter, rows = (
            RecyclingDrafter(),
            [rng.normal(-2.0, 2.0, 40).astype(np.float16).astype(np.float32) for _ in "ab"],
        )
        for row in rows:
            row[rng.permutation(12)[:6]] += 14.0
        first = sample(rows[0], params, len(tokens), tokens)
        second = sample(rows[1], params, len(tokens) + 1, [*tokens, first])
        context = context_of([*tokens, first, second])
        drafter.observe(context, 2, rows)
        context = context_of(tokens)
        context.params, context.is_plain = params, False
        tree = drafter.propose(context, 8)
        assert tree.tokens[0] == first
        children = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0]
        n_seconds += len(children) > 0
        assert not children or children[0] == second, seed
    assert n_seconds > 20


def test_probabilities_are_those_of_the_softmax():
    logits = np.array([2.0, 1.0, -1.0, -3.0])
    total, candidates = float(np.log(np.exp(logits).sum())), list(enumerate(logits.tolist()))
    greedy = Foresight(SamplingParams(temperature=0.0, repeat_penalty=2.0), [0, 3])
    changed = np.array([1.0, 1.0, -1.0, -6.0])
    expected = np.exp(changed) / np.exp(changed).sum()
    found = greedy.ranked(candidates, total, ())
    assert [id for id, _ in found] == [0, 1, 2, 3] and [p for _, p in found] == pytest.approx(expected.tolist())
    half = Foresight(SamplingParams(temperature=0.0), []).ranked(candidates[:1], total, ())
    assert half == [(0, pytest.approx(np.exp(2.0 - total)))], "the rest of the vocabulary counts"
    sampled = Foresight(SamplingParams(temperature=1.0, seed=3, min_p=0.0, top_p=1.0), []).ranked(candidates, total, ())
    assert sum(p for _, p in sampled) == pytest.approx(1.0) and len(sampled) == 4
    assert [p for _, p in sampled] == sorted((p for _, p in sampled), reverse=True)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 0.5, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_candidates_that_are_banned_or_beyond_all_measure_are_no_fault(temperature, scale):
    ids, tokens = [3, 8, 11, 20, 21, 30], [1, 2, 3]
    for banned in (ids[:1], ids):
        params = SamplingParams(temperature=temperature, seed=1, logit_bias=dict.fromkeys(banned, -math.inf))
        drafter, context = RecyclingDrafter(), context_of(tokens)
        logits = np.full(40, -20.0, dtype=np.float32) * np.float32(scale)
        logits[ids] = np.arange(10.0, 4.0, -1.0, dtype=np.float32) * np.float32(scale)
        drafter.observe(context, 1, [logits])
        context = context_of(tokens[:-1])
        context.params, context.is_plain = params, False
        tree = drafter.propose(context, 4)
        assert not set(tree.tokens) & set(banned)
        assert len(tree) == 0 or checked(tree, 40, 4) == tree
        assert (len(tree) == 0) == (banned == ids)


def test_a_path_of_drafts_is_penalised_too():
    foresight = Foresight(SamplingParams(temperature=0.0, presence_penalty=5.0), [1, 2, 3])
    candidates, total = [(8, 4.0), (9, 3.0)], 5.0
    assert [id for id, _ in foresight.ranked(candidates, total, ())] == [8, 9]
    assert [id for id, _ in foresight.ranked(candidates, total, (8,))] == [9, 8]


def test_the_first_token_of_a_text_has_none_before_it():
    drafter = RecyclingDrafter()
    context = context_of([4, 5])
    drafter.observe(context, 1, [logits_with(50, 5)])
    assert drafter.propose(context_of([4]), 1).tokens == [5]


def test_the_least_useful_probability_is_the_cost_of_one_more_token():
    assert min_useful_probability(cost_model(lambda n: 10.0 + 2.0 * n).milliseconds(0)) == pytest.approx(2.0 / 12.0)
