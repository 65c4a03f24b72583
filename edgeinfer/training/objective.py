"""The training objective of a head: losses and acceptance over several steps of its own drafts.

The first step has the target's features. Each further step has, at every position, what the step before predicted for
it, so that the head learns to continue from its own features as it does when it drafts (HASS, arXiv:2408.15766;
EAGLE-3, arXiv:2503.01840). A row of step s sees the first step's rows up to s positions before it, then one row of each
step: the chain that drafting would have made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from edgeinfer.training.batches import Batch, Branches
from edgeinfer.training.cross_entropy import soft_cross_entropy
from edgeinfer.training.head import DraftHead, KeysValues


@dataclass(frozen=True)
class Weights:
    """Weights of the losses."""

    feature: float  # of the SmoothL1 distance to the target's feature, in units of Objective's `unit`
    token: float  # of the cross-entropy with the target's probabilities over the draft vocabulary
    decay: float  # factor on the losses of each further step
    noise: float  # added to features, uniform in +-noise units (EAGLE, arXiv:2401.15077, section 3.2)


FeaturesOf = Callable[[torch.Tensor], torch.Tensor]  # from recorded rows (..., n_rows) to (..., n_embd)


def unchanged(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, where they are features."""
    return rows


class Objective(nn.Module):
    """Losses of a head. embedding: (n_vocab, n_embd).  output: (n_logits, n_embd), the rows of the draft vocabulary.

    unit: root mean square of the features.  features_of: from the rows of a batch to what the head is to
    predict.  stored: the rows of output as rounded in the head's file, by default as in the target's.
    """

    def __init__(
        self,
        head: DraftHead,
        embedding: torch.Tensor,
        output: torch.Tensor,
        unit: float,
        weights: Weights,
        features_of: FeaturesOf = unchanged,
        stored: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self._features_of = features_of
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("output", output, persistent=False)
        self.register_buffer("stored", output if stored is None else stored, persistent=False)
        self._unit = unit
        self._weights = weights

    def forward(self, batch: Batch, n_steps: int, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, its parts): parts are the feature and the token loss of the first step, detached.

        noise: (n, m, n_embd), in 0..1.
        """
        weights = self._weights
        with torch.no_grad():
            expected = self._features_of(_at(batch.features, batch.places + 1).float())
        features = self.head.combined(batch.features.float()) + (2.0 * noise - 1.0) * (weights.noise * self._unit)
        steps = self._steps(batch, features, n_steps)
        rows = torch.stack([_at(predicted, batch.places) for predicted in steps])
        of_features = [functional.smooth_l1_loss(each / self._unit, expected / self._unit) for each in rows]
        known = batch.labels >= 0  # the tokens that can be drafted
        of_tokens = soft_cross_entropy(rows[:, known], expected[known], self.stored, self.output)
        total = torch.zeros((), device=noise.device)
        for step, (feature, token) in enumerate(zip(of_features, of_tokens, strict=True)):
            total = total + weights.decay**step * (weights.feature * feature + weights.token * token)
        return total, torch.stack([of_features[0], of_tokens[0]]).detach()

    @torch.no_grad()
    def matches(self, batch: Batch, n_steps: int) -> torch.Tensor:
        """(n_steps, 2): of chains drafted from each position, the tokens of each step whose chain was accepted so far,
        and how many of these were accepted.
        """
        judged = torch.zeros(batch.tokens.numel(), dtype=torch.bool, device=batch.tokens.device)
        judged[batch.places] = True
        judged, alive = judged.view_as(batch.tokens), judged.view_as(batch.tokens)
        counts = []
        for step, predicted in enumerate(self._steps(batch, self.head.combined(batch.features.float()), n_steps)):
            found = functional.linear(_at(predicted, batch.places), self.stored).argmax(dim=-1)
            right = torch.zeros_like(judged).view(-1)
            right[batch.places] = found == batch.labels
            reached = alive & _ahead(judged, step)
            alive = reached & _ahead(right.view_as(judged), step)
            counts.append(torch.stack([reached.sum(), alive.sum()]))
        return torch.stack(counts)

    def _steps(self, batch: Batch, features: torch.Tensor, n_steps: int) -> list[torch.Tensor]:
        """The features that each step predicts, (n, m, n_embd)."""
        embeddings = functional.embedding(batch.tokens, self.embedding)
        past: list[list[KeysValues]] = []
        outputs = []
        for step in range(n_steps):
            mask = chain_mask(batch.documents, step)
            if batch.branches is not None:
                mask[..., : batch.tokens.shape[1]] |= trunk_mask(batch, batch.branches)
            predicted, own = self.head(features, embeddings, batch.positions, mask, past)
            outputs.append(predicted)
            past.append(own)
            features = predicted.roll(1, dims=1)
        return outputs


def linear_guess(
    batches: Iterable[Batch], n_embd: int, device: torch.device, features_of: FeaturesOf = unchanged
) -> torch.Tensor:
    """(n_embd, n_embd): the matrix that predicts the next feature from a feature with the least squared error.

    Starting with it saves the many steps in which gradient descent would find it. 1e-4 of the features' mean square is
    added to the diagonal, as there may be fewer features than numbers in one.
    """
    squares, products = (torch.zeros((n_embd, n_embd), dtype=torch.float64, device=device) for _ in range(2))
    for batch in batches:
        now, after = (features_of(_at(batch.features, batch.places + ahead).float()).double() for ahead in (0, 1))
        squares += now.T @ now
        products += now.T @ after
    squares += 1e-4 * squares.diagonal().mean() * torch.eye(n_embd, dtype=torch.float64, device=device)
    return torch.linalg.solve(squares, products).T.float()


def chain_mask(documents: torch.Tensor, step: int) -> torch.Tensor:
    """(n, 1, m, (step + 1) m), True for what rows of a step see of the rows of the steps up to it.

    documents: (n, m). Of the first step a row sees its text up to `step` positions before itself; of step t the one
    position step - t before itself.
    """
    n, m = documents.shape
    place = torch.arange(m, device=documents.device)
    distance = place[:, None] - place  # of a row to what it sees
    same = documents[:, :, None] == documents[:, None]
    first = same & (distance >= step)
    others = [(distance == step - earlier).expand(n, -1, -1) for earlier in range(1, step + 1)]
    return torch.cat([first, *others], dim=-1)[:, None]


def trunk_mask(batch: Batch, branches: Branches) -> torch.Tensor:
    """(n, 1, m, m), True for what rows of branches see of the first step's rows of the texts that they leave."""
    left = branches.left[:, :, None] == batch.documents[:, None]
    return (left & (batch.positions[:, None] < branches.begins[:, :, None]))[:, None]


def _ahead(values: torch.Tensor, step: int) -> torch.Tensor:
    """values (n, m) of `step` positions further on, False after the end."""
    return functional.pad(values, (0, step))[:, step:]


def _at(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(k, n_embd) of (n, m, n_embd)."""
    return rows.flatten(0, 1)[places]
