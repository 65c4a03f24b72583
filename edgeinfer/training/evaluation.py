"""Acceptance of a draft head: its drafts are compared with the target's answers to prompts, or in conversations."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.common.errors import InvalidArgument, UnsupportedModel
from edgeinfer.engine import Engine
from edgeinfer.loading.open import load
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.draft_head import ARCHITECTURE, HeadSpec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile
from edgeinfer.training.author import NativeAuthor, tree_rows
from edgeinfer.training.batches import Batches
from edgeinfer.training.chats import read_chats, save_chats
from edgeinfer.training.corpus import Corpus, Mix, Report, TrainingText
from edgeinfer.training.features import Features, NativeRecorder, rows_path, save_rows
from edgeinfer.training.head import DraftHead, HeadSizes
from edgeinfer.training.objective import Objective, Weights
from edgeinfer.training.prompts import Prompt, read_prompts
from edgeinfer.training.quality import DEPTHS, Quality, judged
from edgeinfer.training.replay import Replay

_WITHOUT_CATEGORY = "all"
_NO_LOSS = Weights(feature=0.0, token=0.0, decay=0.0, noise=0.0)


@dataclass(frozen=True)
class Evaluated:
    """The options of `edgeinfer evaluate`; see its --help."""

    temperature: float
    max_tokens: int
    context: int
    seed: int
    n_threads: int | None = None


def evaluate(
    target: Path, head: Path, prompts: Path | None, chats: Path | None, settings: Evaluated, report: Report
) -> dict[str, Any]:
    """How often a head is right on the target's answers to prompts, in all and by category, as JSON.

    target: a GGUF file that the native engine runs.  head: see docs/draft-heads.md.  prompts: see read_prompts.
    chats: without prompts, saved conversations, whose answers are compared as they are; see read_chats.
    Raises UnsupportedModel for a head of another model or form, InvalidArgument where no prompt leaves room for an
    answer or no answer of the conversations fits, and the errors of files.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(ModelFile.open(path)) for path in (target, head)]
        judge = _Judge(*files)
        n_rows = tree_rows(judge.spec, settings.context)
        n_threads = settings.n_threads
        run = opened.enter_context(
            load(target, n_ctx=n_rows, n_batch=n_rows, n_threads=n_threads, backend="native", draft="none")
        )
        torch.set_num_threads(run.device.n_threads)
        work = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="edgeinfer-")))
        corpora: dict[str, Corpus] = {}
        if chats is not None:
            corpora[_WITHOUT_CATEGORY] = Corpus(work, "held")
            save_chats(corpora[_WITHOUT_CATEGORY], run, read_chats(chats, run, least=1), settings.context)
        for category, asked in _by_category([] if prompts is None else read_prompts(prompts)).items():
            corpora[category] = judge.answers(asked, run, work / str(len(corpora)), settings, report)
        by_category = {
            category: judge.quality(corpus, run, settings.context, report)
            for category, corpus in corpora.items()
            if corpus.all_texts()
        }
    if not by_category:
        raise InvalidArgument(
            f"--ctx-size {settings.context} leaves no room for an answer to a prompt of {prompts or chats}"
        )
    made: dict[str, Any] = {"chats": None if chats is None else chats.name}
    if prompts is not None:
        made = {"prompts": prompts.name, "temperature": settings.temperature, "max_tokens": settings.max_tokens}
        made["seed"] = settings.seed
    qualities = list(by_category.values())
    return {
        "target": {"name": run.name, "fingerprint": judge.head.target.fingerprint},
        "head": head.name,
        **made,
        "context": settings.context,
        **sum(qualities[1:], qualities[0]).report(),
        "by_category": {category: quality.report() for category, quality in by_category.items()},
    }


def _by_category(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts by the part of their category before a colon."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.category.partition(":")[0] or _WITHOUT_CATEGORY, []).append(prompt)
    return found


class _Judge:
    """A head in torch."""

    def __init__(self, target: ModelFile, file: ModelFile) -> None:
        self.spec: ModelSpec = read_spec(target)
        self.head: HeadSpec = read_head_beside(file, target, self.spec)
        if file.metadata.get("general.architecture") != ARCHITECTURE:
            raise UnsupportedModel(
                f"{file.path} must be a head of the form {ARCHITECTURE!r} to be judged: found "
                f"{file.metadata.get('general.architecture')!r:.80}; measure the speed of drafting with it instead"
            )
        self._head = DraftHead(HeadSizes.of_head(file, self.head))
        self._head.load_file(file)
        assert self.spec.token_embd is not None  # whole models have it
        self._embedding = _matrix(target, self.spec.token_embd) * self.head.decoder.embedding_scale
        self._output = _matrix(file, "output.weight")
        self._ids = torch.from_numpy(self.head.draft_vocab.astype(np.int64))

    @property
    def _n_rows(self) -> int:
        return self.spec.n_embd * max(1, self._head.sizes.n_taps)

    def answers(
        self, prompts: Sequence[Prompt], run: Engine, folder: Path, settings: Evaluated, report: Report
    ) -> Corpus:
        """The target's answers, and files of its rows beside them."""

        def keep_rows(shard: Path, texts: Sequence[TrainingText]) -> None:
            rows = [text.rows for text in texts if text.rows is not None]
            save_rows(rows_path(shard, self.head.taps), rows, self._n_rows)

        corpus = Corpus(folder, "held")
        author = NativeAuthor(run, settings.context, settings.max_tokens, self.head.taps)
        mix = Mix(settings.seed, float(settings.temperature == 0.0), settings.temperature or 1.0)
        corpus.write(prompts, mix, author, None, report, keep_rows=keep_rows)
        return corpus

    def quality(self, corpus: Corpus, run: Engine, context: int, report: Report) -> Quality:
        """Quality of the head on the answers of a corpus."""
        taps = self.head.taps
        features = Features([corpus], NativeRecorder(run.session, taps), self._n_rows, 1 << 40, taps)
        features.prepare(report)  # answers that the target did not write here come without rows
        draft_ids = np.full(self.spec.n_vocab, -1, dtype=np.int64)
        draft_ids[self.head.draft_vocab] = np.arange(len(self.head.draft_vocab))
        objective = Objective(self._head, self._embedding, self._output, 1.0, _NO_LOSS)
        batches = Batches(features, draft_ids, 1, context, 0)
        matches = torch.zeros((DEPTHS, 2), dtype=torch.int64)
        for batch in batches.stream(batches.plans(0, 0), torch.device("cpu")):
            matches += objective.matches(batch, DEPTHS)
        return judged(features, Replay(self._head, self._embedding, self._output, self._ids), matches, report)


def _matrix(file: ModelFile, name: str) -> torch.Tensor:
    info = file.tensors[name]
    return torch.from_numpy(dequantize(info.type, file.data(name), info.shape))
