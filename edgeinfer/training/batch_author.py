"""Answers of the target in torch, many side by side; on a GPU this is far faster than the native engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.overriding import override
from edgeinfer.common.types import TokenIds
from edgeinfer.engine import Engine
from edgeinfer.sampling import SamplingParams
from edgeinfer.training.author import Answer, Asked, TurnAuthor
from edgeinfer.training.features import Halves, Recorder, Taps, checked_halves
from edgeinfer.training.target import KVCache, TorchTarget

MOST_K = 256  # most likely tokens that are drawn from, where there is no top_k
SHORT = 256  # tokens; longer prompts are answered apart, as attention of a batch takes as long as for its longest text
READ_AT_ONCE = 32  # prompts
LOOKED_EVERY = 8  # tokens; looking whether texts have ended waits for the GPU
WHEN_HALF = 0.5  # share of the texts still being written at which the others are dropped from the batch


@dataclass
class _Drawing:
    """How the tokens of each of n texts are sampled; fields are as in SamplingParams."""

    temperature: torch.Tensor  # (n, 1), 0 for the most likely token
    top_k: torch.Tensor  # (n, 1)
    top_p: torch.Tensor  # (n, 1)
    min_p: torch.Tensor  # (n, 1)
    repeat_penalty: torch.Tensor  # (n, 1)
    recent: torch.Tensor  # (n, k) last tokens of each text, which the repeat penalty makes less likely; k may be 0
    generator: torch.Generator

    @classmethod
    def of(
        cls,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        n_vocab: int,
        n_ctx: int,
        device: torch.device,
    ) -> _Drawing:
        """For texts of up to n_ctx tokens that begin with these prompts.

        Raises InvalidArgument for parameters that are not known here.
        """
        for each in params:
            _check_known(each)

        def column(values: Iterable[float]) -> torch.Tensor:
            return torch.tensor(list(values), device=device)[:, None]

        widths = {_n_recent(each, n_ctx) for each in params if each.has_penalties} or {0}
        if len(widths) > 1:
            raise InvalidArgument(f"texts side by side must have one penalty_last_n: found {sorted(widths)}")
        width = widths.pop()
        # A text's first token fills the places of tokens before it: it is itself recent as long as they are.
        recent = [([prompt[0]] * width + prompt)[len(prompt) :] for prompt in prompts]
        return cls(
            column(0.0 if each.is_greedy else each.temperature for each in params),
            column(each.top_k or n_vocab for each in params),
            column(each.top_p for each in params),
            column(each.min_p for each in params),
            column(each.repeat_penalty if each.has_penalties else 1.0 for each in params),
            torch.tensor(recent, dtype=torch.int64, device=device).view(len(prompts), width),
            torch.Generator(device).manual_seed((params[0].seed or 0) & (2**63 - 1)),
        )

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all texts but these."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                setattr(self, field.name, value[rows])

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """(n,) tokens of logits (n, n_vocab): repeat penalty, top_k, top_p, min_p, temperature and draw, as
        edgeinfer.sampling."""
        if self.recent.shape[1]:
            found = logits.gather(1, self.recent)
            less = torch.where(found > 0.0, found / self.repeat_penalty, found * self.repeat_penalty)
            logits = logits.scatter(1, self.recent, less)
        best, ids = logits.topk(min(MOST_K, logits.shape[-1]), dim=-1)
        rank = torch.arange(best.shape[1], device=best.device)
        best = best.masked_fill(rank >= self.top_k, -torch.inf)
        probabilities = best.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = (before < self.top_p) & (probabilities >= self.min_p * probabilities[:, :1])
        noise = torch.rand(best.shape, generator=self.generator, device=best.device)
        gumbel = -(-noise.clamp(1e-20, 1.0 - 1e-7).log()).log()
        scores = (best / self.temperature.clamp(min=1e-6) + gumbel).masked_fill(~kept, -torch.inf)
        drawn = ids.gather(1, scores.argmax(dim=-1, keepdim=True))
        tokens = torch.where(self.temperature > 0.0, drawn, ids[:, :1])
        if self.recent.shape[1]:
            self.recent = torch.cat([self.recent[:, 1:], tokens], dim=1)
        return tokens.squeeze(1)


def _n_recent(params: SamplingParams, n_ctx: int) -> int:
    """Tokens of a text that its penalty looks at."""
    return n_ctx if params.penalty_last_n < 0 else min(params.penalty_last_n, n_ctx)


def _check_known(params: SamplingParams) -> None:
    """Raises InvalidArgument for parameters that sampling side by side does not support."""
    unknown = {
        "frequency_penalty": params.has_penalties and params.frequency_penalty != 0.0,
        "presence_penalty": params.has_penalties and params.presence_penalty != 0.0,
        "dry_multiplier": params.has_dry,
        "logit_bias": bool(params.logit_bias),
    }
    for name in (name for name, is_set in unknown.items() if is_set):
        raise InvalidArgument(
            f"torch samples by temperature, top_k, top_p, min_p and repeat_penalty: found {name} = "
            f"{getattr(params, name)!r:.80}; set author = 'native' in --config, or chat_share = 0 if the model's file "
            "has it"
        )


class BatchAuthor(TurnAuthor):
    """Answers prompts side by side. Each batch has one stream of noise, from its first prompt's seed.

    n_prompts: answered at once, while their caches take at most cache_bytes.  context, max_tokens: as for TurnAuthor.
    """

    def __init__(
        self,
        target: TorchTarget,
        engine: Engine,
        context: int,
        max_tokens: int,
        n_prompts: int,
        cache_bytes: int = 4 << 30,
    ) -> None:
        super().__init__(engine, context, max_tokens)
        self.n_prompts = n_prompts
        self._target = target
        self._cache_bytes = cache_bytes

    @override
    def _groups(self, asked: Sequence[Asked]) -> Iterator[Sequence[Asked]]:
        """Sorted by length, so that little is padded where some are read at a time."""
        group: list[Asked] = []
        for each in sorted(asked, key=lambda each: len(each[1])):
            n_bytes = (len(group) + 1) * KVCache.bytes_of(self._target.spec, self._n_ctx(len(each[1])))
            if group and (n_bytes > self._cache_bytes or len(group[0][1]) <= SHORT < len(each[1])):
                yield group
                group = []
            group.append(each)
        if group:
            yield group

    def _n_ctx(self, longest: int) -> int:
        """Most tokens of a text, of prompts of at most `longest` tokens."""
        return min(self._context, longest + self._max_tokens)

    @override
    def _answers(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Answer]:
        return [(answer, None) for answer in self.answers(prompts, params)]

    @torch.inference_mode()
    def answers(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        """The tokens that follow each prompt, end token included."""
        device, stop_ids = self._target.device, self._stop_ids()
        longest = max(map(len, prompts))
        n_ctx = self._n_ctx(longest)
        n_vocab = self._engine.tokenizer.n_vocab
        drawing = _Drawing.of(prompts, params, n_vocab, n_ctx, device)
        cache = KVCache.empty(self._target.spec, len(prompts), n_ctx, device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        features = self._read(prompts, lengths, cache)
        texts = torch.arange(len(prompts), device=device)  # which one each row of the batch is
        written = torch.full((len(prompts), self._max_tokens), -1, dtype=torch.int64, device=device)
        active = torch.ones(len(prompts), dtype=torch.bool, device=device)
        for step in range(self._max_tokens):
            tokens = drawing(self._target.logits(features)[:, :n_vocab])
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
        """Features (n, n_embd) of the last token of each prompt. All tokens go into the cache, some at a time."""
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
        """See Recorder.record_branches. One pass computes all: a branch sees the text before it, and itself."""
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
