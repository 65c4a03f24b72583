"""Prompts built of answers: of which kinds, how long, and always the same."""

import re

from edgeinfer.training.prompts import Prompt
from edgeinfer.training.tasks import FOLLOW_UPS, LANGUAGES, MOST_ASKED, Written, task_prompts

WRITTEN = [Written(f"What is {n}?", f"It is the number {n}. Nobody knows more of {n}.\nIt is so.") for n in range(50)]


def kind(prompt: Prompt) -> str:
    text = prompt.turns[0]
    if len(prompt.turns) == 2:
        return "translation" if text.startswith("Translate") else "second turn"
    return "summary" if "ummarize" in text else "passages"


def test_all_kinds_come_in_their_shares() -> None:
    prompts = task_prompts(WRITTEN, 120, 700, seed=1)
    counts = {name: sum(kind(each) == name for each in prompts) for name in map(kind, prompts)}
    assert counts["summary"] == counts["passages"] == 40
    assert 10 <= counts["translation"] <= 20 and 10 <= counts["second turn"] <= 20
    assert len(set(prompts)) == len(prompts)


def test_prompts_are_made_of_what_was_written() -> None:
    questions, answers = {each.question for each in WRITTEN}, {each.answer for each in WRITTEN}
    sentences = {sentence for answer in answers for sentence in re.split(r"(?<=\.)\s", answer)}
    for prompt in task_prompts(WRITTEN, 120, 700, seed=1):
        text = prompt.turns[0]
        if kind(prompt) == "second turn":
            assert text in questions and prompt.turns[1] in FOLLOW_UPS
        elif kind(prompt) == "translation":
            language, _, sentence = text.removeprefix("Translate English to ").partition(": ")
            assert language in LANGUAGES and sentence in sentences
        elif kind(prompt) == "passages":
            passages, _, question = text.rpartition("\n")
            (asked,) = (each for each in WRITTEN if each.question == question)
            assert asked.answer in passages
        else:
            assert any(answer in text for answer in answers)


def test_material_is_as_long_as_it_may_be_and_of_many_lengths() -> None:
    lengths = [len(each.turns[0]) for each in task_prompts(WRITTEN, 300, 3000, seed=1) if kind(each) == "summary"]
    assert min(lengths) < 1000 and 2500 < max(lengths) < 3000 + 200


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert task_prompts(WRITTEN, 60, 700, seed=1) == task_prompts(WRITTEN, 60, 700, seed=1)
    assert task_prompts(WRITTEN, 60, 700, seed=1) != task_prompts(WRITTEN, 60, 700, seed=2)
    assert task_prompts([], 60, 700, seed=1) == []


def test_what_does_not_do_is_left_out() -> None:
    long = [Written("Why? " * MOST_ASKED, "So.")]
    prompts = task_prompts(long, 60, 50, seed=1)
    assert prompts and {kind(each) for each in prompts} == {"summary", "second turn"}
