"""Acceptance of a head's drafts on recorded answers of its target, as counts that can be added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgeinfer.training.corpus import Report
from edgeinfer.training.features import Features
from edgeinfer.training.replay import Replay, tokens_per_step

TREES = (4, 8, 16)  # nodes of the trees that are replayed
DEPTHS = 6  # of the matches

Counts = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Quality:
    """Counts on some answers."""

    n_texts: int  # answers
    n_tokens: int  # of the answers
    n_drafted: int  # those of them that are in the draft vocabulary
    matches: Counts  # by depth, (compared, accepted) of drafted tokens after accepted ones
    steps: Counts  # for trees of each size in TREES, (tokens, steps) of decoding with them

    def __add__(self, other: Quality) -> Quality:
        return Quality(
            self.n_texts + other.n_texts,
            self.n_tokens + other.n_tokens,
            self.n_drafted + other.n_drafted,
            _sums(self.matches, other.matches),
            _sums(self.steps, other.steps),
        )

    def report(self) -> dict[str, Any]:
        """Shares and rates, for JSON."""
        return {
            "held_out_texts": self.n_texts,
            "vocabulary_coverage": self.n_drafted / max(1, self.n_tokens),
            "match_by_depth": [right / max(1, judged) for judged, right in self.matches],
            "tokens_per_step": {
                str(size): tokens / max(1, steps) for size, (tokens, steps) in zip(TREES, self.steps, strict=True)
            },
        }


def judged(features: Features, replay: Replay, matches: torch.Tensor, report: Report) -> Quality:
    """Quality of a head on texts. matches: (n_depths, 2), see Objective.matches."""
    device = replay.draft_vocab.device
    answers = [sample.text.tokens[sample.text.n_prompt :] for sample in features.samples]
    tokens = np.concatenate([np.empty(0, np.int32), *answers])
    counts = {size: (0, 0) for size in TREES}
    for number, sample in enumerate(features.samples):
        rows = torch.from_numpy(np.array(features.of([sample])[0])).to(device).float()
        accepted = replay.accepted(sample.text.tokens, rows, sample.text.n_prompt, TREES)
        for size, lengths in accepted.items():
            n_tokens, n_steps = tokens_per_step(lengths)
            counts[size] = counts[size][0] + n_tokens, counts[size][1] + n_steps
        report("replay of trees", (number + 1) / len(features.samples))
    n_drafted = int(np.isin(tokens, replay.draft_vocab.cpu().numpy()).sum())
    pairs = tuple((before, right) for before, right in matches.tolist())
    return Quality(len(answers), len(tokens), n_drafted, pairs, tuple(counts.values()))


def _sums(ours: Counts, theirs: Counts) -> Counts:
    return tuple((a + c, b + d) for (a, b), (c, d) in zip(ours, theirs, strict=True))
