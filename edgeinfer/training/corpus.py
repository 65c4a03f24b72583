"""Text that the target wrote, in shards on disk: a run that was stopped goes on with the shard that is missing.

A folder holds, for each of its parts ("train", "tasks", "held"), <part>-00000.npz, <part>-00001.npz and so on. A shard
has the answers to some prompts, one behind the other: tokens (n,) int32, lengths (m,), prompt_lengths (m,), is_greedy
(m,). It is whole or not there, and which prompts it answers follows from its number.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import InvalidArgument, ModelFileError
from edgeinfer.files import write_whole
from edgeinfer.sampling import SamplingParams
from edgeinfer.training.prompts import Prompt
from edgeinfer.types import TokenIds

Part = Literal["train", "tasks", "held"]
LEARNT: tuple[Part, ...] = ("train", "tasks")
SETTINGS = "texts.json"  # in the folder: what its texts were made with
# Of the draft vocabulary: how many tokens any text stands for, at most and as a share of those of the answers, and the
# part of a vocabulary, one in so many, of tokens so frequent that their order tells little.
_MOST_PRIOR, _PRIOR_SHARE, _FREQUENT = 50_000, 0.2, 160
Report = Callable[[str, float], None]  # called with what is being done and the share that is done, 0..1


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer. tokens: (n,) int32; the first n_prompt are the prompt, chat template included.

    An answer that the target ended ends with the token that it ended it with.  rows: (n, n_rows) half floats, the
    target's, where the author has them from writing.
    """

    tokens: TokenIds
    n_prompt: int
    is_greedy: bool
    rows: NDArray[np.float16] | None = field(default=None, compare=False, repr=False)

    @property
    def n_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.n_prompt


@dataclass(frozen=True)
class Request:
    """A prompt to answer, as what, and how."""

    prompt: Prompt
    params: SamplingParams


class Author(Protocol):
    """What writes answers with the target."""

    n_prompts: int  # answered at once, and so the prompts of a shard

    def write(self, requests: Sequence[Request]) -> list[Text]:
        """The answers, one for each turn of each prompt that fits into the context."""
        ...


@dataclass(frozen=True)
class Mix:
    """How answers are drawn: a share of them greedily, the others sampled at a temperature, by a seed.

    n_answers: to each prompt; all but the first are sampled.
    """

    seed: int
    greedy_share: float
    temperature: float
    n_answers: int = 1

    def requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Every prompt once, then every prompt for the second time, and so on."""
        return [self.request(prompt, number) for number in range(self.n_answers) for prompt in prompts]

    def request(self, prompt: Prompt, number: int = 0) -> Request:
        """The prompt with the parameters of its answer of that number, which depend on no other prompt."""
        if number == 0 and prompt.share("greedy", self.seed) < self.greedy_share:
            return Request(prompt, SamplingParams(temperature=0.0, seed=0))
        noise = prompt.number(f"noise {number}" if number else "noise", self.seed)
        return Request(prompt, SamplingParams(temperature=self.temperature, seed=noise))


class Corpus:
    """The shards of one part in a folder."""

    def __init__(self, folder: Path, part: Part) -> None:
        self.folder = folder
        self.part = part

    def shard(self, number: int) -> Path:
        """Where a shard is, or will be."""
        return self.folder / f"{self.part}-{number:05}.npz"

    @property
    def n_shards(self) -> int:
        """Shards that are there, up to the first that is missing."""
        number = 0
        while self.shard(number).exists():
            number += 1
        return number

    def texts(self, number: int) -> list[Text]:
        """What a shard has. Raises ModelFileError if it is damaged."""
        path = self.shard(number)
        try:
            with np.load(path, allow_pickle=False) as shard:
                ends = np.cumsum(shard["lengths"])
                parts = np.split(shard["tokens"].astype(np.int32), ends[:-1]) if len(ends) else []
                rows = zip(parts, shard["prompt_lengths"].tolist(), shard["is_greedy"].tolist(), strict=True)
                return [Text(tokens, n_prompt, is_greedy) for tokens, n_prompt, is_greedy in rows]
        except (ValueError, KeyError, OSError, EOFError, BadZipFile) as error:
            raise ModelFileError(f"{path} is no shard of texts: {error}; remove it, and it is written anew") from error

    def all_texts(self) -> list[Text]:
        """The texts of all shards, in their order."""
        return [text for number in range(self.n_shards) for text in self.texts(number)]

    def write(
        self,
        prompts: Sequence[Prompt],
        mix: Mix,
        author: Author,
        n_tokens: int | None,
        report: Report,
        share: tuple[int, int] = (0, 1),
        keep_rows: Callable[[Path, Sequence[Text]], None] | None = None,
    ) -> None:
        """Write the shards that are missing, until there are answers of n_tokens tokens or all requests are answered.

        share: (i, n) for one of n processes that write shards i, i + n, ... of them.  keep_rows: called with each shard
        and its texts before it is there.
        """
        requests = mix.requests(prompts)
        self.folder.mkdir(parents=True, exist_ok=True)
        rank, n_processes = share
        n_done = 0
        for number in range(rank, -(-len(requests) // author.n_prompts), n_processes):
            if n_tokens is not None and n_done * n_processes >= n_tokens:
                return
            if not self.shard(number).exists():
                first = number * author.n_prompts
                texts = author.write(requests[first : first + author.n_prompts])
                if keep_rows is not None:
                    keep_rows(self.shard(number), texts)
                _save(self.shard(number), texts)
            n_done += sum(text.n_answer for text in self.texts(number))
            done = (number + 1) * author.n_prompts / len(requests)
            if n_tokens is not None:
                done = max(done, n_done * n_processes / n_tokens)
            report(f"{self.part}: {n_done * n_processes:,} tokens of answers", min(1.0, done))


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Keep what a folder was made with, or compare it with what is wanted now.

    Raises InvalidArgument with the first difference: texts of two kinds must not lie in one folder.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(settings, indent=1).encode())
        return
    found = json.loads(path.read_text())
    for key in settings.keys() | found.keys():
        if found.get(key) != settings.get(key):
            raise InvalidArgument(
                f"{path.parent} was made with {key} = {found.get(key)!r:.80}, wanted is {settings.get(key)!r:.80}: "
                "name another folder (--work), or the same settings"
            )


def earlier_corpora(folder: Path, target: str, context: int, held: Sequence[Text]) -> list[Corpus]:
    """What another run wrote in its folder to train on, if that target wrote it and none of it is held out now.

    target: its fingerprint.  context: tokens that a text may have. Raises InvalidArgument.
    """
    path = folder / SETTINGS
    found = json.loads(path.read_text()) if path.exists() else {}
    corpora = [corpus for part in LEARNT if (corpus := Corpus(folder, part)).n_shards]
    author = found.get("target")
    if not corpora or author != target:
        others = f"those of the target {author!r:.17}" if corpora else "none"
        raise InvalidArgument(
            f"--texts-of {folder} must have texts that the target {target:.16} wrote: found {others}; name the --work "
            "folder of another run of distill"
        )
    if found["context"] > context:
        raise InvalidArgument(
            f"--texts-of {folder} has texts of up to {found['context']} tokens: --context is {context}"
        )
    asked = {text.tokens[: text.n_prompt].tobytes() for text in held}
    if any(text.tokens[: text.n_prompt].tobytes() in asked for corpus in corpora for text in corpus.all_texts()):
        raise InvalidArgument(f"--texts-of {folder} has answers to prompts that are held out: it cannot be trained on")
    return corpora


def draft_vocabulary(
    texts: Sequence[Text], n_vocab: int, size: int, always: Iterator[int], usual: Sequence[int] | TokenIds = ()
) -> NDArray[np.int32]:
    """The tokens to expect most often in answers, and those of `always`: at most size ids, ascending.

    What is expected is what the answers have, and as rare tokens are there by chance, some of what any text would have:
    ids of BPE vocabularies are in the order of frequency, which falls by Zipf's law. usual: tokens that count once
    more, those of a head that goes on. Of tokens that are as frequent the lower id is taken.
    Raises InvalidArgument where size has no room for `always`.
    """
    kept = sorted(set(always))
    if not len(kept) < size <= n_vocab:
        raise InvalidArgument(
            f"a draft vocabulary must have more than {len(kept)} and at most {n_vocab} tokens: {size}"
        )
    answers = [text.tokens[text.n_prompt :] for text in texts]
    counts = np.bincount(np.concatenate([np.empty(0, np.int32), *answers]), minlength=n_vocab).astype(np.float64)
    chances = 1.0 / (np.arange(n_vocab) + max(1.0, n_vocab / _FREQUENT))
    counts += min(_MOST_PRIOR, _PRIOR_SHARE * counts.sum()) * chances / chances.sum()
    counts[np.asarray(usual, dtype=np.int64)] += 1.0
    counts[kept] = -1.0  # not once more
    order = np.argsort(-counts, kind="stable")
    return np.sort(np.concatenate([order[: size - len(kept)], kept])).astype(np.int32)


def _save(path: Path, texts: Sequence[Text]) -> None:
    buffer = io.BytesIO()
    tokens = [text.tokens for text in texts]
    np.savez(
        buffer,
        tokens=np.concatenate([np.empty(0, np.int32), *tokens]),
        lengths=np.array([len(each) for each in tokens], dtype=np.int64),
        prompt_lengths=np.array([text.n_prompt for text in texts], dtype=np.int64),
        is_greedy=np.array([text.is_greedy for text in texts], dtype=bool),
    )
    write_whole(path, buffer.getvalue())
