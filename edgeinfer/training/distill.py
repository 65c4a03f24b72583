"""From a target and prompts to a draft head: texts, features, training, a report on held-out texts, and a file.

Every stage keeps its results in a folder, so a run that was stopped continues where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.common import devices
from edgeinfer.common.errors import Interrupted, InvalidArgument, UnsupportedModel
from edgeinfer.common.file_identity import Sources
from edgeinfer.common.files import write_whole
from edgeinfer.common.types import TokenIds
from edgeinfer.engine import Engine
from edgeinfer.exporters.drafters.draft_head import HeadTypes, write_draft_head
from edgeinfer.loading.open import load
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.draft_head import MOST_TAPS, HeadSpec, check_target, fingerprint, read_head
from edgeinfer.models.formats import dequantize, quantize
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.training import agreement
from edgeinfer.training.author import NativeAuthor, encode, tree_rows
from edgeinfer.training.batch_author import BatchAuthor, TorchRecorder
from edgeinfer.training.batches import Batches
from edgeinfer.training.chats import FOLDER, write_chats
from edgeinfer.training.corpus import (
    HELD_SHARE,
    SETTINGS,
    Author,
    Corpus,
    Mix,
    Report,
    TrainingText,
    check_settings,
    draft_vocabulary,
    earlier_corpora,
)
from edgeinfer.training.features import Features, NativeRecorder, Recorder, Taps, rows_path, save_rows
from edgeinfer.training.head import DraftHead, HeadSizes
from edgeinfer.training.objective import Objective, Weights, linear_guess, unchanged
from edgeinfer.training.own_prompts import own_prompts
from edgeinfer.training.prompts import Prompt, held_out, read_prompts, shuffled
from edgeinfer.training.quality import DEPTHS, judged
from edgeinfer.training.recipe import Recipe
from edgeinfer.training.replay import Replay
from edgeinfer.training.rounding import rounded
from edgeinfer.training.rounds import Rounds
from edgeinfer.training.target import TorchTarget
from edgeinfer.training.tasks import Written, task_prompts
from edgeinfer.training.trainer import Schedule, Trainer, use_deterministic_kernels
from edgeinfer.training.workers import Workers

CHARACTERS = 3  # of a token, at least, in what prompts are built of
N_BATCHES_FITTED = 128  # from which the head's first guess is taken
N_TEXTS_CHECKED, N_CHECKED = 4, 256  # texts that the target in torch is checked on, and tokens of each


@dataclass(frozen=True, kw_only=True)
class Settings(Recipe):
    """The options of `edgeinfer distill`, see its --help, and the keys of its --config."""

    tokens: int
    max_tokens: int
    context: int
    epochs: int
    seed: int
    type: str
    init: Path | None = None
    tasks: int = 0
    device: str = "auto"
    disk_bytes: int = 20 << 30
    n_threads: int | None = None
    texts_of: tuple[Path, ...] = ()
    own_prompts: int = 0
    chats: Path | None = None

    def facts(self) -> dict[str, Any]:
        """The options as JSON, with names in place of paths."""
        names: dict[str, Any] = {"init": self.init and self.init.name, "chats": self.chats and self.chats.name}
        names |= {"texts_of": [folder.name for folder in self.texts_of]}
        return asdict(self) | names


def distill(
    target: Path, prompts: Path | None, out: Path, work: Path, held: Path | None, settings: Settings, report: Report
) -> dict[str, Any] | None:
    """Train a head for a target, write it, and return the report, which is written beside it as JSON.

    Of several processes the first returns the report, the others None.
    target: a GGUF file that the native engine runs.  prompts, held: see read_prompts; None holds out a part of the
    prompts. Without prompts, settings.chats has all that is trained on.  work: a folder for texts, features and the
    checkpoint.
    Raises InvalidArgument, UnsupportedModel and other errors of model files; NumericalError where the logits of torch
    and the native engine differ; Interrupted after SIGINT, once a checkpoint is written; OSError.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic; read when it starts
    with ExitStack() as opened:
        workers = opened.enter_context(Workers.join(settings.device))
        n_threads = settings.n_threads or max(1, devices.default_n_threads() // workers.n)
        file = opened.enter_context(ModelFile.open(target))
        spec = read_spec(file)
        n_rows = tree_rows(spec, settings.context)
        run = opened.enter_context(
            load(target, n_ctx=n_rows, n_batch=n_rows, n_threads=n_threads, backend="native", draft="none")
        )
        is_first = workers.rank == 0
        opened.enter_context(Sources(file.paths).unchanged())
        distillation = _Distillation(file, run, spec, out, work, settings, workers)
        summary = distillation.run(prompts, held, report if is_first else lambda what, share: None)
        return summary if is_first else None


class _Distillation:
    """One run of `distill`."""

    def __init__(
        self,
        file: ModelFile,
        run: Engine,
        spec: ModelSpec,
        out: Path,
        work: Path,
        settings: Settings,
        workers: Workers,
    ) -> None:
        agreement.precise_products()
        torch.set_num_threads(run.device.n_threads)
        self._file = file
        self._engine = run
        self._spec = spec
        self._out = out
        self._work = work
        self._settings = settings
        self._workers = workers
        self._target = TorchTarget(file, spec, workers.device)
        self._taps = taps_named(settings.taps, spec)
        self._sizes = HeadSizes.of(file, spec, settings.blocks, self._taps)
        self._usual: Sequence[int] | TokenIds = ()  # tokens that the head of --init can draft
        if settings.init:  # a head that does not fit is refused before answers are written
            self._usual = self._begin_with(DraftHead(self._sizes), settings.init).draft_vocab
        on_gpu = workers.device.type == "cuda"
        use_torch = settings.author == "torch" or (settings.author == "auto" and on_gpu)
        self._author: Author = NativeAuthor(run, settings.context, settings.max_tokens, None if on_gpu else self._taps)
        self._recorder: Recorder = NativeRecorder(run.session, self._taps)
        self._n_bytes_kept = 0  # of rows that came with texts
        if use_torch:
            self._author = self._batch_author()
        if on_gpu:
            self._recorder = TorchRecorder(self._target, n_texts=128, taps=self._taps)

    def _batch_author(self) -> BatchAuthor:
        """Torch's author; on a GPU its caches take half of the free memory at most."""
        device, settings = self._workers.device, self._settings
        limits = {"n_prompts": 32}
        if device.type == "cuda":
            limits = {"n_prompts": 4096, "cache_bytes": torch.cuda.mem_get_info(device)[0] // 2}
        return BatchAuthor(self._target, self._engine, settings.context, settings.max_tokens, **limits)

    def run(self, prompts: Path | None, held: Path | None, report: Report) -> dict[str, Any]:
        """Run all stages; returns the report."""
        started = time.time()
        self._write_texts(prompts, held, report)
        train, tasks, *kept = self._corpora()
        learnt, mark = [train, tasks] if self._settings.tasks else [train], fingerprint(self._file)
        if self._settings.chats is not None:
            folder = self._work / FOLDER
            learnt.append(Corpus(folder, "train"))
            kept.append(Corpus(folder, "held"))
        held_texts = [text for corpus in kept for text in corpus.all_texts()]
        for folder in self._settings.texts_of:
            learnt += earlier_corpora(folder, mark, self._settings.context, held_texts)
        texts = [text for corpus in learnt for text in corpus.all_texts()]
        if not texts or not any(text.n_answer > 2 for text in held_texts):
            raise InvalidArgument(
                f"there must be answers to train on and answers to hold out: found {len(texts)} and {len(held_texts)} "
                f"texts in {self._work}; give more prompts"
            )
        agreed = self._check([text.tokens for text in held_texts])
        tokenizer = self._engine.tokenizer
        size, stops = self._settings.draft_vocab, iter(tokenizer.stop_ids)
        vocabulary = draft_vocabulary(texts, tokenizer.n_vocab, size, stops, self._usual)
        features = self._features(learnt, report), self._features(kept, report)
        trainer, head = self._trainer(*features, vocabulary)
        before = self._before(trainer, head, features[1], vocabulary, report)
        if not trainer.run(report):
            raise Interrupted(f"stopped; the same command goes on from {self._work / 'checkpoint.pt'}")
        tensors = self._rounded_as_stored(head)
        summary = {
            "target": {"name": self._engine.name, "fingerprint": mark},
            "settings": self._settings.facts(),
            "prompts": prompts and prompts.name,
            "held_out_prompts": held.name if held else f"{HELD_SHARE:.0%} of the prompts",
            "texts": len(texts),
            "texts_of_tasks": sum(len(corpus.all_texts()) for corpus in learnt if corpus.part == "tasks"),
            "answer_tokens": sum(text.n_answer for text in texts),
            "torch_against_native": asdict(agreed),
            "head_parameters": sum(values.size for values in tensors.values()),
            **self._effort(trainer, started),
            **self._quality(trainer, head, features[1], vocabulary, report),
            **before,
            "curve": trainer.progress.curve,
        }
        self._write(tensors, vocabulary, summary)
        return summary

    # ---- The stages --------------------------------------------------------------------------------------------------

    def _write_texts(self, prompts: Path | None, held: Path | None, report: Report) -> None:
        """Write the shards of texts that are missing."""
        settings, seed = self._settings, self._settings.seed
        if settings.chats is not None:
            self._write_chats(settings.chats)
        questions = [] if prompts is None else shuffled(read_prompts(prompts), seed)
        questions, others = self._split(questions, prompts, held)
        settings_of_texts = {
            "target": fingerprint(self._file),
            "prompts": _digest(questions),
            "held_out": _digest(others),
            "author": type(self._author).__name__,
            "prompts_of_a_shard": self._author.n_prompts,
            **{
                name: getattr(settings, name)
                for name in (
                    *("max_tokens", "context", "answers", "greedy_share", "temperature", "chat_share", "own_prompts"),
                    "seed",
                )
            },
        }
        if self._workers.rank == 0:
            check_settings(self._work / SETTINGS, settings_of_texts)
        self._workers.wait()
        if isinstance(self._author, BatchAuthor):
            turns = (other.turns[0] for other in others[:N_TEXTS_CHECKED])
            tokens = [encode(self._engine, [{"role": "user", "content": turn}]) for turn in turns]
            self._check([np.array(each, dtype=np.int32) for each in tokens])
        if settings.own_prompts:
            questions = shuffled([*questions, *self._own_prompts(others, report)], seed)
        train, tasks, kept = self._corpora()
        greedy = Mix(seed, 1.0, settings.temperature)
        as_chat = self._engine.default_params, settings.chat_share
        mix = Mix(seed, settings.greedy_share, settings.temperature, settings.answers, *as_chat)
        self._answer(kept, others, greedy, None, report)
        self._answer(train, questions, mix, settings.tokens, report)
        if settings.tasks:
            longest = CHARACTERS * (settings.context - settings.max_tokens)
            built = task_prompts(self._written(train, questions), settings.tasks, longest, seed)
            if self._workers.rank == 0:
                check_settings(self._work / "tasks.json", {"tasks": _digest(built)})
            self._answer(tasks, built, replace(mix, n_answers=1), None, report)

    def _split(
        self, questions: list[Prompt], prompts: Path | None, held: Path | None
    ) -> tuple[list[Prompt], list[Prompt]]:
        """The prompts to train on, and those to evaluate on."""
        n_held = self._settings.n_held
        if held is not None:
            others = shuffled(read_prompts(held), self._settings.seed)
            asked = set(others)
            return [question for question in questions if question not in asked], others[:n_held]
        if prompts is None:
            return questions, []
        questions, others = held_out(questions, min(n_held, max(1, round(HELD_SHARE * len(questions)))))
        return questions, others[:n_held]

    def _write_chats(self, chats: Path) -> None:
        """Write the texts of saved conversations."""
        if self._workers.rank == 0:
            mark, settings = fingerprint(self._file), self._settings
            write_chats(self._work / FOLDER, self._engine, chats, mark, settings.context, settings.n_held)
        self._workers.wait()

    def _own_prompts(self, others: Sequence[Prompt], report: Report) -> list[Prompt]:
        """Prompts that the target writes itself, without those held out; see own_prompts."""
        path, settings = self._work / "own.jsonl", self._settings
        if self._workers.rank == 0:
            own_prompts(path, self._engine, self._author, settings.own_prompts, settings.seed, report)
        self._workers.wait()
        asked = set(others)
        return [prompt for prompt in read_prompts(path) if prompt not in asked]

    def _answer(
        self, corpus: Corpus, prompts: Sequence[Prompt], mix: Mix, n_tokens: int | None, report: Report
    ) -> None:
        """Write the shards of a corpus that are missing."""
        corpus.write(prompts, mix, self._author, n_tokens, report, self._workers.share, self._keep_rows)
        self._workers.wait()

    def _keep_rows(self, shard: Path, texts: Sequence[TrainingText]) -> None:
        """Keep the rows that texts come with, while there is room for them."""
        rows = [text.rows for text in texts if text.rows is not None]
        n_bytes = sum(each.nbytes for each in rows)
        if len(rows) == len(texts) and self._n_bytes_kept + n_bytes <= self._settings.disk_bytes // self._workers.n:
            self._n_bytes_kept += n_bytes
            save_rows(rows_path(shard, self._taps), rows, self._n_rows)

    def _written(self, corpus: Corpus, prompts: Sequence[Prompt]) -> list[Written]:
        """The first turns of these prompts with their answers in the corpus, each once, if the target ended them."""
        asked = [(prompt.turns[0], [{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
        questions = {tuple(encode(self._engine, messages)): question for question, messages in asked}
        found = []
        for text in corpus.all_texts():
            question = questions.get(tuple(text.tokens[: text.n_prompt].tolist()))
            if question is not None and int(text.tokens[-1]) in self._engine.tokenizer.stop_ids:
                answer = self._engine.detokenize(text.tokens[text.n_prompt :].tolist(), skip_special=True).strip()
                if answer:
                    found.append(Written(question, answer))
        return list(dict.fromkeys(found))

    def _corpora(self) -> tuple[Corpus, Corpus, Corpus]:
        """Answers to the prompts, to the tasks built of these, and those held out."""
        return Corpus(self._work, "train"), Corpus(self._work, "tasks"), Corpus(self._work, "held")

    def _check(self, texts: Sequence[TokenIds]) -> agreement.Agreement:
        """Compare torch with the native engine on the first texts. Raises NumericalError."""
        sample = [tokens[:N_CHECKED] for tokens in texts[:N_TEXTS_CHECKED]]
        return agreement.check(self._target, self._engine.session, sample)

    @property
    def _n_rows(self) -> int:
        return self._spec.n_embd * max(1, self._sizes.n_taps)

    def _features(self, corpora: Sequence[Corpus], report: Report) -> Features:
        features = Features(corpora, self._recorder, self._n_rows, self._settings.disk_bytes, self._taps)
        features.prepare(report, self._workers.share)
        self._workers.wait()
        return features

    def _trainer(self, train: Features, held: Features, vocabulary: NDArray[np.int32]) -> tuple[Trainer, DraftHead]:
        settings = self._settings
        use_deterministic_kernels()
        torch.manual_seed(settings.seed)
        head = DraftHead(self._sizes).to(self._workers.device)
        ids = torch.from_numpy(vocabulary.astype(np.int64)).to(self._workers.device)
        features_of = self._target.after_last_norm if self._sizes.n_taps else unchanged
        first = torch.from_numpy(np.array(train.of(train.samples[:1])[0])).to(self._workers.device)
        unit = float(np.sqrt(np.mean(np.square(features_of(first.float()).cpu().numpy()))))
        weights = Weights(settings.feature_weight, settings.token_weight, settings.decay, settings.noise)
        output = self._target.output[ids]
        stored = rounded(output, self._types.ffn)
        objective = Objective(head, self._target.embedding, output, unit, weights, features_of, stored)
        draft_ids = np.full(self._spec.n_vocab, -1, dtype=np.int64)
        draft_ids[vocabulary] = np.arange(len(vocabulary))
        length = settings.context - settings.context % 8
        rows = max(1, settings.batch_tokens // (length * self._workers.n))
        batches = Batches(train, draft_ids, rows, length, settings.steps - 1)
        checkpoint = self._work / "checkpoint.pt"
        if settings.init:
            self._begin_with(head, settings.init)
        elif not checkpoint.exists():
            fitted = batches.stream(batches.plans(settings.seed, 0)[:N_BATCHES_FITTED], self._workers.device)
            guess = linear_guess(fitted, self._spec.n_embd, self._workers.device, features_of)
            head.begin_with(guess, self._target.last_norm)
        replay = Replay(head, self._target.embedding, stored, ids)
        trainer = Trainer(
            objective,
            batches,
            Batches(held, draft_ids, rows, length, 0),
            self._schedule(),
            self._facts(train),
            checkpoint,
            self._workers,
            Rounds(batches, replay, self._recorder, settings.steps, settings.seed),
        )
        return trainer, head

    def _schedule(self) -> Schedule:
        settings = self._settings
        return Schedule(
            settings.epochs,
            settings.steps,
            settings.learning_rate,
            settings.warm_up,
            settings.seed,
            settings.evaluate_every,
            settings.optimizer,
            settings.rounds,
            settings.steps_from,
            settings.rounded_from,
            self._types,
        )

    def _facts(self, train: Features) -> dict[str, Any]:
        """What a checkpoint must have been made with to be continued."""
        settings = self._settings
        names = "draft_vocab blocks epochs rounds steps steps_from rounded_from type gate_type batch_tokens optimizer"
        names += " learning_rate warm_up feature_weight token_weight decay noise evaluate_every seed"
        facts: dict[str, Any] = {name: getattr(settings, name) for name in names.split()}
        facts |= {"texts": len(train.samples), "n_workers": self._workers.n}
        facts["taps"] = settings.taps if isinstance(self._taps, bool) else list(self._taps)
        facts["init"] = settings.init and hashlib.sha256(settings.init.read_bytes()).hexdigest()
        return facts

    def _begin_with(self, head: DraftHead, path: Path) -> HeadSpec:
        """Start as the head in a file is. Raises UnsupportedModel for one of another target or of other sizes."""
        with ModelFile.open(path) as file:
            spec = read_head(file)
            check_target(spec, path, self._file, self._spec)
            try:
                head.load_file(file)
                return spec
            except UnsupportedModel as error:
                raise UnsupportedModel(
                    f"--init {path} must have the sizes of the head to train: {error}; give its blocks and taps "
                    "(--config)"
                ) from None

    def _rounded_as_stored(self, head: DraftHead) -> dict[str, NDArray[np.float32]]:
        """The weights. The head gets them as rounded in the file, so that the report is on what is written."""
        tensors = head.tensors()
        types = self._types
        stored = {
            name: _rounded(values, types.of(name)) if values.ndim == 2 else values for name, values in tensors.items()
        }
        head.load_tensors(stored)
        return tensors

    @property
    def _types(self) -> HeadTypes:
        ffn, others = self._settings.type, self._settings.gate_type or self._settings.type
        return HeadTypes(GGMLType[ffn.upper()], GGMLType[others.upper()])

    # ---- The report and the file -------------------------------------------------------------------------------------

    def _effort(self, trainer: Trainer, started: float) -> dict[str, Any]:
        """Devices and times. seconds: of this run; seconds_trained: of all runs that made the checkpoint."""
        is_gpu = self._workers.device.type == "cuda"
        return {
            "trained_on": torch.cuda.get_device_name() if is_gpu else devices.cpu_name(),
            "n_workers": self._workers.n,
            "tokens_trained": trainer.progress.tokens,
            "seconds_trained": trainer.progress.seconds,
            "seconds": time.time() - started,
        }

    def _quality(
        self, trainer: Trainer, head: DraftHead, held: Features, vocabulary: NDArray[np.int32], report: Report
    ) -> dict[str, Any]:
        """Matches by depth and tokens a step for trees, on the texts that are held out."""
        ids = torch.from_numpy(vocabulary.astype(np.int64)).to(self._workers.device)
        replay = Replay(head, self._target.embedding, rounded(self._target.output[ids], self._types.ffn), ids)
        return judged(held, replay, trainer.match_counts(DEPTHS), report).report()

    def _before(
        self, trainer: Trainer, head: DraftHead, held: Features, vocabulary: NDArray[np.int32], report: Report
    ) -> dict[str, Any]:
        """Quality of the head that training starts from, under "before"; nothing without --init."""
        if not self._settings.init:
            return {}
        path = self._work / "before.json"
        if not path.exists() and not (self._work / "checkpoint.pt").exists():
            quality = self._quality(trainer, head, held, vocabulary, report)
            if self._workers.rank == 0:
                write_whole(path, json.dumps({"before": quality}).encode())
        self._workers.wait()
        return cast(dict[str, Any], json.loads(path.read_bytes())) if path.exists() else {}

    def _write(
        self, tensors: dict[str, NDArray[np.float32]], vocabulary: NDArray[np.int32], summary: dict[str, Any]
    ) -> None:
        if self._workers.rank == 0:
            sizes = self._sizes.keys()
            write_draft_head(
                self._out,
                self._file,
                self._spec,
                sizes,
                tensors,
                vocabulary,
                self._types,
                self._taps,
                summary["match_by_depth"],
            )
            write_whole(report_path(self._out), (json.dumps(summary, indent=1) + "\n").encode())
        self._workers.wait()


def taps_named(name: str, spec: ModelSpec) -> Taps:
    """The layers that a head is fed by: "none", "auto", or their numbers, the last of which must be the model's last.

    "auto" is an early one, the middle one and the last. Raises InvalidArgument.
    """
    n = spec.n_layers
    if name == "none":
        return True
    if name == "auto":
        return tuple(sorted({min(2, n // 4), n // 2, n - 1}))
    parts = name.split(",")
    taps = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(taps) < len(parts) or [*taps] != sorted(set(taps)) or taps[-1] != n - 1 or len(taps) > MOST_TAPS:
        raise InvalidArgument(
            f"taps must be at most {MOST_TAPS} layers in ascending order up to the last one, {n - 1}, or auto, or "
            f"none: found {name!r:.80}"
        )
    return taps


def report_path(head: Path) -> Path:
    """Where the report on a head lies."""
    return head.with_suffix(".json")


def _rounded(values: NDArray[np.float32], type: GGMLType) -> NDArray[np.float32]:
    return dequantize(type, quantize(type, values), values.shape)


def _digest(prompts: Sequence[Prompt]) -> str:
    """A digest of a list of prompts, in hex."""
    text = json.dumps([prompt.turns for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()
