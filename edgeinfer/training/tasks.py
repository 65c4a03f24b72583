"""Longer prompts made of the target's answers, of kinds that lists of questions lack.

People paste long texts into prompts, and answers then follow those texts. A head that has seen only short questions
drafts badly there. The target's answers to these are free material.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.training.prompts import Prompt

LONGEST_OVER_SHORTEST = 7  # of the material of a prompt
MOST_ASKED = 240  # characters of a question that is asked of passages
LEAST_TRANSLATED, MOST_TRANSLATED = 20, 200  # characters of a sentence
LANGUAGES = ("German", "French", "Spanish", "Italian")
TRANSLATE_BACK = "Translate that back to English."
SUMMARISE = (
    "Summarize: {}",
    "Summarize the following text: {}",
    "Summarize this article in a few sentences.\n\n{}",
    "{}\n\nSummarize the text above.",
)
FOLLOW_UPS = (
    "Explain that in more detail.",
    "Rewrite your answer in fewer words.",
    "Give me an example.",
    "Are you sure? Check your answer step by step.",
    "Rewrite your answer as a list of short points.",
    "Now say it so that a child understands it.",
    "Summarize your answer in one sentence.",
    "What could be wrong with your answer? Correct it.",
    "Write the same as a poem.",
    "What else should I know about this?",
    "Rewrite your answer, and begin each sentence with another letter.",
    "Now answer as if you were a pirate.",
    "Change one of the conditions, and solve it again.",
    "Write a short story about it.",
)


@dataclass(frozen=True)
class Written:
    """A question and the target's answer to it."""

    question: str
    answer: str


def task_prompts(written: Sequence[Written], n: int, longest: int, seed: int) -> list[Prompt]:
    """At most n prompts, each once: a third summaries, a third questions about passages, a sixth translations of a
    sentence and back, and a sixth questions with a second turn.

    written: answers that the target has ended, in a fixed order; without any there are no prompts.
    longest: characters of the text to summarise or to answer from; a drawn text may exceed it by one answer.
    """
    if not written:
        return []
    tasks = _Tasks(written, longest, random.Random(seed))
    kinds = (tasks.summary, tasks.passages, tasks.summary, tasks.passages, tasks.translation, tasks.second_turn)
    made = (kinds[number % len(kinds)]() for number in range(n))
    return list(dict.fromkeys(prompt for prompt in made if prompt is not None))


class _Tasks:
    """Draws prompts at random; a method returns None where its draw is not suitable."""

    def __init__(self, written: Sequence[Written], longest: int, draw: random.Random) -> None:
        self._written = written
        self._longest = longest
        self._draw = draw

    def summary(self) -> Prompt:
        return Prompt((self._draw.choice(SUMMARISE).format("\n\n".join(self._material([]))),))

    def passages(self) -> Prompt | None:
        """Passages, one of which answers the question after them."""
        asked = self._draw.choice(self._written)
        if len(asked.question) > MOST_ASKED:
            return None
        return Prompt(("\n".join([*self._material([asked.answer]), asked.question]),))

    def translation(self) -> Prompt | None:
        sentences = re.split(r"(?<=[.!?])\s+", self._draw.choice(self._written).answer)
        sentence = self._draw.choice(sentences).strip()
        if not LEAST_TRANSLATED <= len(sentence) <= MOST_TRANSLATED or "\n" in sentence:
            return None
        return Prompt((f"Translate English to {self._draw.choice(LANGUAGES)}: {sentence}", TRANSLATE_BACK))

    def second_turn(self) -> Prompt:
        return Prompt((self._draw.choice(self._written).question, self._draw.choice(FOLLOW_UPS)))

    def _material(self, first: list[str]) -> list[str]:
        """Answers, those of `first` among them, shuffled, of a drawn total length."""
        length = self._draw.randint(self._longest // LONGEST_OVER_SHORTEST, self._longest)
        found = list(first)
        while sum(map(len, found)) < length:
            found.append(self._draw.choice(self._written).answer)
        self._draw.shuffle(found)
        return found
