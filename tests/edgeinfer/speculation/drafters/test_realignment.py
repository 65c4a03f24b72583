"""Copies that survive edits: what is guessed after each kind of difference, and how many passes a whole edit takes."""

import random
import sys
from array import array

import pytest

from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.drafters.realignment import FIRST, LATER, N_BUCKETS, Realignment
from edgeinfer.speculation.drafters.suffix import SuffixAutomaton, SuffixDrafter
from edgeinfer.speculation.tree import checked

SOURCE = list(range(100, 160))
SEPARATOR = [1, 2]


class Reader:
    """An automaton that reads a text, and what follows it."""

    def __init__(self, tokens):
        self.automaton = SuffixAutomaton()
        self.realignment = Realignment(self.automaton.text)
        self.read(tokens)

    def read(self, tokens):
        for token in tokens:
            self.automaton.append(token)
            self.realignment.follow(token, self.automaton.match_length, self.automaton.match_end)
        return self

    def guessed(self, n):
        return [guess.tokens for guess in self.realignment.guesses(n)]

    def expects(self, tokens):
        """Whether the first guess begins with these."""
        return self.guessed(64)[0][: len(tokens)] == tokens


def after(target):
    """What is guessed after the source and the beginning of an edited copy."""
    return Reader([*SOURCE, *SEPARATOR, *target])


def test_nothing_is_guessed_where_nothing_is_copied():
    assert after([]).guessed(8) == []
    assert after(SOURCE[:3]).guessed(8) == [], "too short to be a copy"
    assert after(SOURCE[:4]).guessed(4) == [SOURCE[4:8]]
    assert after(SOURCE[:20]).guessed(0) == []


@pytest.mark.parametrize(
    ("edited", "goes_on"),
    [
        ([*SOURCE[:20], 7], SOURCE[21:29]),  # one for one
        ([*SOURCE[:20], 7, 8], SOURCE[22:30]),  # two for two
        ([*SOURCE[:20], 7], SOURCE[20:28]),  # inserted
        ([*SOURCE[:20], 7, 8], SOURCE[20:28]),  # two inserted
        ([*SOURCE[:20], 7, 8], SOURCE[21:29]),  # two for one
        ([*SOURCE[:20], SOURCE[23]], SOURCE[24:32]),  # three deleted
        ([*SOURCE[:20], 7, SOURCE[27]], SOURCE[28:36]),  # seven replaced by one
        ([*SOURCE[:20], *range(10, 20), SOURCE[21], SOURCE[22]], SOURCE[23:31]),  # one replaced by ten
    ],
)
def test_the_source_goes_on_after_the_difference(edited, goes_on):
    assert goes_on in after(edited).guessed(8)


def test_two_tokens_that_agree_end_a_difference_and_the_copy_is_whole_again():
    reader = after([*SOURCE[:20], 7, 8, SOURCE[25], SOURCE[26]])
    assert reader.realignment.is_copying and reader.guessed(5) == [SOURCE[27:32]]
    assert not after([*SOURCE[:20], 7]).realignment.is_copying


@pytest.mark.parametrize(
    ("rest", "gap", "goes_on"),
    [
        ([50, 60, 61, 50, 62, 63], [7, 8, 9, 50], [62, 63]),  # as long as what it stands for, not three tokens longer
        ([50, 60, 61, 50, 62, 63], [50], [60, 61]),
        ([60, 50, 61, 50, 62, 63], [7, 8, 50], [61, 50]),  # of two that are as near, the first
    ],
)
def test_of_places_that_agree_with_the_last_token_the_nearest_is_taken(rest, gap, goes_on):
    found = Reader([*SOURCE[:20], *rest, *SOURCE[20:], *SEPARATOR, *SOURCE[:20], *gap]).guessed(2)
    assert found[0] == goes_on


@pytest.mark.parametrize(
    ("rest", "gap", "goes_on"),
    [
        ([60, 50, 51, 61, 62, 63, 50, 51, 64, 65], [7, 50, 51], [61, 62]),
        ([60, 50, 51, 61, 62, 63, 50, 51, 64, 65], [7, 8, 9, 10, 11, 12, 50, 51], [64, 65]),
    ],
)
def test_of_places_that_agree_with_the_last_two_tokens_the_nearest_is_taken(rest, gap, goes_on):
    reader = Reader([*SOURCE[:20], *rest, *SOURCE[20:], *SEPARATOR, *SOURCE[:20], *gap])
    assert reader.realignment.is_copying and reader.guessed(2) == [goes_on]


def test_a_copy_that_has_left_its_source_is_given_up():
    reader = after(SOURCE[:20])
    for token in range(10, 35):
        reader.read([token])
    assert reader.guessed(8) == []
    assert reader.read(SOURCE[30:36]).guessed(3) == [SOURCE[36:39]], "another copy begins"


def renamed(tokens, old, new):
    """The tokens with one sequence replaced by another wherever it is."""
    found, place = [], 0
    while place < len(tokens):
        if tokens[place : place + len(old)] == old:
            found += new
            place += len(old)
        else:
            found.append(tokens[place])
            place += 1
    return found


@pytest.mark.parametrize("old", [[50], [50, 51], [50, 51, 52]])
@pytest.mark.parametrize("new", [[60], [60, 61], [60, 61, 62, 63]])
def test_a_renamed_identifier_is_renamed_in_the_rest_of_the_copy(old, new):
    source = [*range(100, 110), *old, *range(110, 118), *old, *range(118, 126), *old, *range(126, 140)]
    target = renamed(source, old, new)
    first = 10 + len(new) + 3  # after the first one and some of what follows
    reader = Reader([*source, *SEPARATOR, *target[:first]])
    assert reader.expects(target[first:])
    assert reader.read(target[first : first + 6]).expects(target[first + 6 :]), "in the middle of the second"


@pytest.mark.parametrize("kind", ["inserted", "deleted"])
def test_what_was_inserted_or_deleted_between_two_tokens_is_there_each_time(kind):
    long, short = [50, 55, 51], [50, 51]
    old, new = (short, long) if kind == "inserted" else (long, short)
    source = [*range(100, 110), *old, *range(110, 118), *old, *range(118, 126), *old, *range(126, 140)]
    target = renamed(source, old, new)
    first = 10 + len(new) + 4
    assert Reader([*source, *SEPARATOR, *target[:first]]).expects(target[first:])


def test_a_rule_that_is_wrong_is_offered_beside_the_source_and_then_forgotten():
    source = [*range(100, 110), 50, *range(110, 118), 50, *range(118, 126), 50, *range(126, 134), 50, *range(134, 140)]
    target = renamed(source, [50], [60])[:19] + source[19:]  # only the first is renamed
    reader = Reader([*source, *SEPARATOR, *target[:19]])
    assert [guess[0] for guess in reader.guessed(4)] == [60, 50]
    reader.read(target[19:36])  # past the second and the third
    assert reader.expects(source[36:])


def test_a_longer_match_elsewhere_takes_the_copy_over():
    other = [*SOURCE[30:35], *range(200, 240)]
    reader = Reader([*SOURCE, *SEPARATOR, *other, *SEPARATOR, *SOURCE[:20], *other[:3]])
    assert reader.read(other[3:14]).guessed(4) == [other[14:18]]


# ---- Whole edits -----------------------------------------------------------------------------------------------------


def passes(drafter, prompt, target):
    """Passes that a target takes whose every draft of up to 31 tokens is verified."""
    context = Context(list(prompt), lambda logits, text: 0, True)
    context.acceptance = AcceptanceTable()
    context.acceptance.min_probability = 0.06
    drafter.start(context)
    place = n_passes = 0
    while place < len(target):
        tree = drafter.propose(context, 31)
        assert checked(tree, 1000, 31) == tree
        children = {(parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        node, n = -1, 0
        while place + n < len(target) - 1 and (node := children.get((node, target[place + n]), -2)) != -2:
            n += 1
        context.acceptance.learn(tree, target[place : place + n + 1]) if len(tree) else None
        context.tokens.extend(target[place : place + n + 1])
        place, n_passes = place + n + 1, n_passes + 1
    return n_passes


def text_of(rng, n):
    """Tokens as code has them: a few are everywhere, the others are seldom."""
    return [rng.randrange(8) if rng.random() < 0.5 else rng.randrange(100, 400) for _ in range(n)]


def with_edits(rng, source, kind, n):
    places = sorted(rng.sample(range(20, len(source) - 10, 12), n), reverse=True)
    target = list(source)
    for place in places:
        new = [rng.randrange(400, 900) for _ in range(rng.randint(1, 3))]
        if kind == "inserted":
            target[place:place] = new
        elif kind == "deleted":
            del target[place : place + len(new)]
        else:
            target[place : place + len(new)] = new if kind == "replaced" else new[:1]
    return target


@pytest.mark.parametrize(
    ("kind", "most"), [("inserted", 0.9), ("deleted", 0.8), ("replaced", 0.85), ("shortened", 0.85), ("renamed", 0.6)]
)
def test_edits_take_fewer_passes_than_with_matches_alone(kind, most, monkeypatch):
    rng, counts = random.Random(5), {}
    edits = []
    for _ in range(6):
        source = text_of(rng, 300)
        if kind == "renamed":
            for place in range(15, 290, 14):
                source[place : place + 2] = [950, 951]
            target = renamed(source, [950, 951], [960, 961, 962])
        else:
            target = with_edits(rng, source, kind, 12)
        edits.append((source, target))
    for name in ("realigned", "matches"):
        if name == "matches":
            monkeypatch.setattr(Realignment, "guesses", lambda self, n: [])
        counts[name] = sum(passes(SuffixDrafter(4096), [*source, 998, 999], target) for source, target in edits)
    assert counts["realigned"] < most * counts["matches"], counts


@pytest.mark.parametrize("seed", range(6))
def test_any_text_gives_valid_guesses_in_bounded_memory(seed):
    rng, reader = random.Random(seed), Reader([])
    text = []
    for _ in range(300):
        if text and rng.random() < 0.6:
            start = rng.randrange(len(text))
            piece = text[start : start + rng.randint(1, 20)]
        else:
            piece = [rng.randrange(12) for _ in range(rng.randint(1, 4))]
        text += piece
        reader.read(piece)
        for guess in reader.realignment.guesses(31):
            assert 0 < len(guess.tokens) == len(guess.buckets) <= 31
            assert all(0 <= token < 12 for token in guess.tokens)
            assert all(0 <= bucket < N_BUCKETS for bucket in guess.buckets)
    rules = reader.realignment._rules.values()
    assert len(rules) <= 64 and sum(len(rule.old) + len(rule.new) for rule in rules) <= 512
    assert len(reader.realignment._gap) <= 24


def test_there_is_a_prior_for_every_bucket():
    assert len(FIRST) == len(LATER) == N_BUCKETS
    assert all(0.0 < p < 1.0 for p in (*FIRST, *LATER))


def test_another_request_does_not_go_on_with_the_copy_of_the_last():
    drafter = SuffixDrafter(1024)
    context = Context([*SOURCE, *SEPARATOR, *SOURCE[:20]], lambda logits, text: 0, True)
    context.acceptance = AcceptanceTable()
    drafter.start(context)
    assert drafter.propose(context, 4).tokens == SOURCE[20:24]
    other = Context([900, 901, 902], lambda logits, text: 0, True)
    other.acceptance = context.acceptance
    drafter.start(other)
    assert len(drafter.propose(other, 4)) == 0


class CountedText(array):
    """Counts the tokens that are read."""

    n_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.n_read += len(found) if isinstance(key, slice) else 1
        return found


def n_lines(function):
    """Lines of Python that a call takes."""
    n = 0

    def count(frame, event, argument):
        nonlocal n
        n += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return n


def test_a_text_of_one_token_does_not_make_steps_slow():
    """Each takes as little, by what it does and reads, as in a text of a few tokens."""
    reader = Reader([])
    text = reader.automaton.text = reader.realignment._text = CountedText(reader.automaton.text.typecode)
    reader.read([*[5] * 4000, *SOURCE, *[5] * 4000, *SOURCE[:20]])
    for token in [7, 5, 7, 5, 5, 9, 5, 5, 5] * 3:
        text.n_read = 0
        assert n_lines(lambda token=token: (reader.read([token]), reader.realignment.guesses(31))) < 5000
        assert text.n_read < 1000


def test_the_oldest_replacements_are_forgotten_where_there_are_many():
    source = list(range(1000, 3000))
    for n_new, most in ((1, 64), (11, 40)):  # 512 tokens are 42 rules of one old token and eleven new ones
        reader = Reader(source)
        copy = []
        for token in source:
            copy += [token * 20 + i for i in range(1, n_new + 1)] if token % 10 == 9 else [token]
        reader.read([1, *copy])
        rules = reader.realignment._rules
        n_tokens = sum(len(rule.old) + len(rule.new) for rule in rules.values())
        assert most <= len(rules) <= 64 and n_tokens <= 512 and min(rules) > 2000  # of 200 that were made
