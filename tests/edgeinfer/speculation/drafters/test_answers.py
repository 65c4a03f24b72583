"""Drafts from earlier answers: what is found again, what is forgotten, and the file that keeps them."""

import os
import random
import struct
import sys
import tracemalloc
import warnings

import pytest

from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.drafters.answer_file import AnswerFile
from edgeinfer.speculation.drafters.answers import AnswerIndex, AnswersDrafter
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.tree import checked

PROMPT = [1, 2, 3]
ANSWER = list(range(100, 130))


def context_of(tokens, min_probability=0.0):
    context = Context(list(tokens), lambda logits, text: 0, True)
    context.acceptance = AcceptanceTable()
    context.acceptance.min_probability = min_probability
    return context


def having_answered(drafter, *answers, prompt=PROMPT):
    """The drafter after requests that were answered so."""
    for answer in answers:
        context = context_of(prompt)
        drafter.start(context)
        context.tokens.extend(answer)
        context.is_over = True
    return drafter


def drafted(drafter, tokens, limit=8):
    """The tree after these tokens, which belong to a new request."""
    context = context_of(tokens)
    drafter.start(context)
    context.is_over = True
    tree = drafter.propose(context, limit)
    assert checked(tree, 1000, limit) == tree
    return tree


def test_what_an_earlier_answer_went_on_with_is_drafted():
    drafter = having_answered(AnswersDrafter(), ANSWER)
    assert drafted(drafter, [50, *ANSWER[4:9]]).tokens == ANSWER[9:17]
    assert len(drafted(drafter, [50, *ANSWER[4:6]])) == 0, "two tokens are no match"
    assert len(drafted(drafter, [ANSWER[4], ANSWER[6], ANSWER[5]])) == 0
    assert len(drafted(drafter, ANSWER[-3:])) == 0, "nothing followed"


def test_the_beginning_of_an_answer_is_drafted_from_what_the_template_has_before_it():
    drafter = having_answered(AnswersDrafter(), ANSWER, prompt=[9, *PROMPT])
    assert drafted(drafter, [8, 7, *PROMPT], 4).tokens == ANSWER[:4]


def test_only_whole_answers_are_kept_and_no_prompts():
    drafter = AnswersDrafter()
    context = context_of(PROMPT)
    drafter.start(context)
    context.tokens.extend(ANSWER)
    assert len(drafter.propose(context_of([5, *ANSWER[:6]]), 4)) == 0, "the answer is not whole yet"
    context.is_over = True
    prompt = list(range(200, 230))
    having_answered(drafter, ANSWER, prompt=prompt)
    assert len(drafted(drafter, prompt[:10])) == 0 and len(drafted(drafter, ANSWER[:6])) == 8
    short = having_answered(AnswersDrafter(), [300, 301, 302, 303])
    assert len(drafted(short, [300, 301, 302])) == 0, "an answer of a few tokens is not worth its place"


def test_several_answers_become_a_tree_that_counts_them():
    often, seldom = [*ANSWER[:10], 500, 501, 502, 503], [*ANSWER[:10], 600, 601, 602, 603]
    drafter = having_answered(AnswersDrafter(), often, often, seldom, often)
    tree = drafted(drafter, [9, *ANSWER[3:10]], 8)
    roots = {token: p for token, parent, p in zip(tree.tokens, tree.parents, tree.p, strict=True) if parent < 0}
    assert list(roots) == [500, 600] and roots[500] == pytest.approx(3 * roots[600])
    assert tree.tokens[1:4] == [501, 502, 503] and tree.parents[1:4] == [0, 1, 2]


def test_the_longest_match_counts():
    drafter = having_answered(AnswersDrafter(), [40, *ANSWER[:10], 500, 501], *[[41, *ANSWER[5:10], 600, 601, 602]] * 3)
    assert drafted(drafter, [7, *ANSWER[1:10]], 2).tokens == [500, 501]
    assert drafted(drafter, [7, *ANSWER[6:10]], 1).tokens == [600], "where both are as long, the more frequent"


def test_an_unlikely_chain_is_short():
    drafter = having_answered(AnswersDrafter(), ANSWER)
    context = context_of([5, *ANSWER[:4]], min_probability=0.3)
    drafter.start(context)
    assert 1 <= len(drafter.propose(context, 20)) < 8
    context.acceptance.min_probability = 0.0
    assert len(drafter.propose(context, 20)) == 20 and len(drafter.propose(context, 0)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_index_finds_what_a_search_finds_and_forgets_the_oldest(seed):
    rng, index, kept = random.Random(seed), AnswerIndex(400), []
    for _ in range(60):
        answer = [rng.randrange(4) for _ in range(rng.randint(8, 40))]
        index.add(answer)
        kept.append(answer)
        assert len(index.text) <= 400
        text = index.text.tolist()
        assert text[-len(answer) - 1 :] == [*answer, -1]
        end = [rng.randrange(4) for _ in range(6)]
        found = index.places(end)
        best = 0
        for place in range(len(text)):
            length = 0
            while length < min(place, 6) and text[place - 1 - length] == end[-1 - length]:
                length += 1
            best = max(best, length * (text[place] != -1))
        if best >= 3 and len(found) < 8:
            assert found, (text, end)
        for length, place in found:
            assert text[place - length : place] == end[-length:] and text[place] != -1 and length >= 3
    assert text.count(-1) < 60, "the oldest were forgotten"
    long = list(range(500))
    index.add(long)
    assert index.text[-2] == 499 and len(index.text) <= 400


def test_the_memory_is_what_the_plan_counts():
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    drafter, rng = AnswersDrafter(4096), random.Random(1)
    for _ in range(100):
        having_answered(drafter, [rng.randrange(50000) for _ in range(120)])
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.5 * AnswersDrafter.memory(4096, 0) < held < AnswersDrafter.memory(4096, 123)
    assert drafter.held() == {"tables": AnswersDrafter.memory(4096, 123)}
    of_request = 8 * 5000 + sum(sys.getsizeof(1000 + id) for id in range(5000))  # places of a list, and integers
    assert of_request <= AnswersDrafter.memory(4096, 5000) - AnswersDrafter.memory(4096, 0) < 1.1 * of_request


# ---- The file --------------------------------------------------------------------------------------------------------


def kept_in(path, mark="a tokenizer", n_vocab=1000):
    return AnswersDrafter(4096, AnswerFile(path, mark, n_vocab))


def test_answers_are_there_in_the_next_process(tmp_path):
    path = tmp_path / "answers.bin"
    drafter = having_answered(kept_in(path), ANSWER, ANSWER[::-1])
    assert not path.exists()
    drafter.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = kept_in(path)
    assert drafted(again, [5, *ANSWER[:6]]).tokens == ANSWER[6:14]
    assert drafted(again, [5, *ANSWER[::-1][:6]]).tokens == ANSWER[::-1][6:14]
    assert drafted(again, PROMPT, 2).tokens[:1] in ([ANSWER[0]], [ANSWER[-1]])


def test_each_token_is_kept_in_four_bytes_the_lowest_first(tmp_path):
    path, answer = tmp_path / "answers.bin", [0, 258, 0, *ANSWER]
    having_answered(kept_in(path), answer, ANSWER, prompt=[]).close()
    data = path.read_bytes().split(b"\n", 1)[1]
    assert struct.unpack(f"<{len(data) // 4}i", data) == (*answer, -1, *ANSWER, -1)
    assert AnswerFile(path, "a tokenizer", 1000).read() == [answer, ANSWER]


def test_a_long_run_does_not_lose_all_if_it_is_killed(tmp_path):
    path, rng = tmp_path / "answers.bin", random.Random(1)
    having_answered(kept_in(path), *[[rng.randrange(1000) for _ in range(100)] for _ in range(30)])
    assert path.exists()


def test_nothing_is_written_without_something_new(tmp_path):
    path = tmp_path / "answers.bin"
    kept_in(path).close()
    assert not path.exists()
    having_answered(kept_in(path), ANSWER).close()
    before = path.stat().st_mtime_ns, path.stat().st_ino
    kept_in(path).close()
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def damaged(data):
    """A file of answers, damaged in every way."""
    header, tokens = data.split(b"\n", 1)
    yield "cut", data[:-3]
    yield "a token less", data[:-4]
    yield "a flipped bit", data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
    yield "another token", data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]
    yield "more", data + b"\0\0\0\0"
    yield "header only", header + b"\n"


def foreign(data):
    header, tokens = data.split(b"\n", 1)
    yield "another tokenizer", data.replace(b"a tokenizer", b"another one")
    yield "another version", data.replace(b'"version": 1', b'"version": 2')
    yield "a text", b"Dear diary,\n" + tokens
    yield "JSON", b"[1, 2]\n"
    yield "deep JSON", b"[" * 4000
    yield "empty", b""


def test_a_damaged_file_is_told_and_replaced(tmp_path):
    path = tmp_path / "answers.bin"
    having_answered(kept_in(path), ANSWER).close()
    for what, data in damaged(path.read_bytes()):
        path.write_bytes(data)
        with pytest.warns(RuntimeWarning, match=r"answers\.bin is damaged.*will be replaced"):
            drafter = kept_in(path)
        assert len(drafted(drafter, ANSWER[:6])) == 0, what
        having_answered(drafter, ANSWER).close()
        assert len(drafted(kept_in(path), ANSWER[:6])) == 8, what


def test_a_foreign_file_is_told_and_left_alone(tmp_path):
    path = tmp_path / "answers.bin"
    having_answered(kept_in(path), ANSWER).close()
    for what, data in foreign(path.read_bytes()):
        path.write_bytes(data)
        with pytest.warns(RuntimeWarning, match=r"answers\.bin (has|must|is no).*none are kept: name another file"):
            drafter = kept_in(path)
        assert len(drafted(drafter, ANSWER[:6])) == 0, what
        having_answered(drafter, ANSWER).close()
        assert path.read_bytes() == data, what


def test_tokens_that_the_model_has_not_are_damage(tmp_path):
    path = tmp_path / "answers.bin"
    having_answered(kept_in(path), ANSWER).close()
    with pytest.warns(RuntimeWarning, match=r"is damaged: its tokens must be in -1\.\.119"):
        assert len(drafted(kept_in(path, n_vocab=120), ANSWER[:6])) == 0


def test_a_file_that_cannot_be_read_or_written_is_told(tmp_path):
    with pytest.warns(RuntimeWarning, match="could not be read"):
        having_answered(kept_in(tmp_path), ANSWER).close()
    drafter = having_answered(kept_in(tmp_path / "no folder" / "answers.bin"), ANSWER)
    with pytest.warns(RuntimeWarning, match="could not be kept"):
        drafter.close()
    assert os.listdir(tmp_path) == []
