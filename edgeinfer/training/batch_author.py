"""Answers of the target in torch, many side by side; on a GPU this is far faster than the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.engine import Engine
from edgeinfer.overriding import override
from edgeinfer.sampling import SamplingParams
from edgeinfer.training.author import MIN_ANSWER, encode
from edgeinfer.training.corpus import AnswerRequest, Author, TrainingText
from edgeinfer.training.features import Halves, Recorder, Taps, checked_halves
from edgeinfer.training.target import KVCache, TorchTarget
from edgeinfer.types import TokenIds

SHORT = 256  # tokens: longer prompts are answered apart, as every text of a batch is attended to up to the longest
READ_AT_ONCE = 32  # prompts
LOOKED_EVERY = 8  # tokens; to look whether texts have ended, a GPU must be waited for
WHEN_HALF = 0.5  # share of the texts still being written at which the others are dropped from the batch


@dataclass
class _Drawing:
    """How the tokens of each text are sampled: (n, 1) each; temperature 0 takes the most likely one."""

    temperature: torch.Tensor
    params: SamplingParams
    generator: torch.Generator

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all texts but these."""
        self.temperature = self.temperature[rows]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """(n,) tokens of logits (n, n_vocab): top_k, top_p, min_p, temperature and draw, as edgeinfer.sampling."""
        best, ids = logits.topk(min(self.params.top_k, logits.shape[-1]), dim=-1)
        probabilities = best.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = (before < self.params.top_p) & (probabilities >= self.params.min_p * probabilities[:, :1])
        noise = torch.rand(best.shape, generator=self.generator, device=best.device)
        gumbel = -(-noise.clamp(1e-20, 1.0 - 1e-7).log()).log()
        scores = (best / self.temperature.clamp(min=1e-6) + gumbel).masked_fill(~kept, -torch.inf)
        drawn = ids.gather(1, scores.argmax(dim=-1, keepdim=True))
        return torch.where(self.temperature > 0.0, drawn, ids[:, :1]).squeeze(1)


class BatchAuthor(Author):
    """Answers the first turns of prompts side by side. Noise comes from the first prompt's seed, one stream per batch.

    n_prompts: answered at once.  context, max_tokens: as for NativeAuthor.
    """

    def __init__(self, target: TorchTarget, engine: Engine, context: int, max_tokens: int, n_prompts: int) -> None:
        self.n_prompts = n_prompts
        self._target = target
        self._engine = engine
        self._context = context
        self._max_tokens = max_tokens

    @override
    def write(self, requests: Sequence[AnswerRequest]) -> list[TrainingText]:
        prompts = [(request, self._prompt(request)) for request in requests]
        fitting = [pair for pair in prompts if len(pair[1]) + MIN_ANSWER <= self._context]
        fitting.sort(key=lambda pair: len(pair[1]))  # so that little is padded where some are read at a time
        n_short = sum(len(prompt) <= SHORT for _, prompt in fitting)
        return [*self._texts(fitting[:n_short]), *self._texts(fitting[n_short:])]

    def _texts(self, prompts: Sequence[tuple[AnswerRequest, list[int]]]) -> list[TrainingText]:
        """The prompts with their answers."""
        if not prompts:
            return []
        answers = self.answers([prompt for _, prompt in prompts], [request.params for request, _ in prompts])
        return [
            TrainingText(np.array(prompt + answer, dtype=np.int32), len(prompt), request.params.is_greedy)
            for (request, prompt), answer in zip(prompts, answers, strict=True)
        ]

    @torch.inference_mode()
    def answers(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        """The tokens that follow each prompt, the one that ends it included."""
        device, stop_ids = self._target.device, self._stop_ids()
        drawing = _Drawing(
            torch.tensor([[0.0 if each.is_greedy else each.temperature] for each in params], device=device),
            params[0],
            torch.Generator(device).manual_seed((params[0].seed or 0) & (2**63 - 1)),
        )
        longest = max(map(len, prompts))
        n_ctx = min(self._context, longest + self._max_tokens)
        cache = KVCache.empty(self._target.spec, len(prompts), n_ctx, device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        features = self._read(prompts, lengths, cache)
        texts = torch.arange(len(prompts), device=device)  # which one each row of the batch is
        written = torch.full((len(prompts), self._max_tokens), -1, dtype=torch.int64, device=device)
        active = torch.ones(len(prompts), dtype=torch.bool, device=device)
        for step in range(self._max_tokens):
            tokens = drawing(self._target.logits(features)[:, : self._engine.tokenizer.n_vocab])
            written[texts, step] = torch.where(active, tokens, -1)
            active = active & ~torch.isin(tokens, stop_ids) & (lengths + 1 < n_ctx)
            n_active = int(active.sum()) if step % LOOKED_EVERY == 0 else len(texts)
            if not n_active:
                break
            if n_active < WHEN_HALF * len(texts):
                kept = active.nonzero().squeeze(1)
                cache.keep(kept)
                drawing.keep(kept)
                texts, lengths, tokens, active = texts[kept], lengths[kept], tokens[kept], active[kept]
            # A text that has ended goes on, unseen, in the last place.
            features = self._step(tokens, lengths.clamp(max=n_ctx - 1), min(longest + step + 1, n_ctx), cache)
            lengths = lengths + 1
        return [[token for token in row if token >= 0] for row in written.tolist()]

    def _read(self, prompts: Sequence[list[int]], lengths: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Features (n, n_embd) of the last token of each prompt, all of which go into the cache, some at a time."""
        device, last = self._target.device, []
        for first in range(0, len(prompts), READ_AT_ONCE):
            part = slice(first, first + READ_AT_ONCE)
            tokens, positions, mask = self._target.side_by_side(prompts[part])
            rows = self._target.features(tokens, positions, mask, cache.part(part))
            last.append(rows[torch.arange(len(rows), device=device), lengths[part] - 1])
        return torch.cat(last)

    def _step(self, tokens: torch.Tensor, positions: torch.Tensor, n_seen: int, cache: KVCache) -> torch.Tensor:
        """Features (n, n_embd) of one more token for each text; n_seen: positions up to the last of them."""
        mask = torch.arange(n_seen, device=tokens.device) <= positions[:, None]
        return self._target.features(tokens[:, None], positions[:, None], mask[:, None, None], cache)[:, 0]

    def _prompt(self, request: AnswerRequest) -> list[int]:
        return encode(self._engine, [{"role": "user", "content": request.prompt.turns[0]}])

    def _stop_ids(self) -> torch.Tensor:
        return torch.tensor(sorted(self._engine.tokenizer.stop_ids), dtype=torch.int64, device=self._target.device)


class TorchRecorder(Recorder):
    """Rows as the target in torch computes them: see Recorder."""

    def __init__(self, target: TorchTarget, n_texts: int, taps: Taps = True) -> None:
        self.n_texts = n_texts
        self._target = target
        self._taps = taps

    @override
    def record(self, texts: Sequence[TokenIds]) -> list[Halves]:
        return [checked_halves(rows.half().cpu().numpy()) for rows in self._target.text_features(texts, self._taps)]

    @override
    def record_branches(self, tokens: TokenIds, firsts: NDArray[np.int64], branches: NDArray[np.int32]) -> Halves:
        """See Recorder.record_branches: in one pass, in which a branch sees what it stands behind, and itself."""
        device, (n, k), n_text = self._target.device, branches.shape, int(firsts[-1])
        ids = torch.from_numpy(np.concatenate([tokens[:n_text], branches.reshape(-1)]).astype(np.int64)).to(device)
        begins = torch.from_numpy(firsts.repeat(k)).to(device)
        place = torch.arange(n_text, device=device)
        own = torch.arange(n * k, device=device)
        positions = torch.cat([place, begins + own % k])
        mask = torch.zeros((len(ids), len(ids)), dtype=torch.bool, device=device)
        mask[:n_text, :n_text] = place[:, None] >= place
        mask[n_text:, :n_text] = place < begins[:, None]
        mask[n_text:, n_text:] = (own[:, None] // k == own // k) & (own[:, None] >= own)
        rows = self._target.features(ids[None], positions[None], mask[None, None], taps=self._taps)[0, n_text:]
        return checked_halves(rows.half().cpu().numpy().reshape(n, k, -1))
