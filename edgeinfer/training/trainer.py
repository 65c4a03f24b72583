"""The training loop: Muon or AdamW, warm-up and cosine, on one device or several, with checkpoints.

All randomness follows from the seed and the number of the step, so a run that was stopped and continued ends with the
same weights, bit for bit, on the same machine.
"""

from __future__ import annotations

import contextlib
import io
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from edgeinfer.common.errors import InvalidArgument, ModelFileError, NumericalError
from edgeinfer.common.files import write_whole
from edgeinfer.common.signal_handlers import is_from_handler
from edgeinfer.exporters.drafters.draft_head import HeadTypes
from edgeinfer.models.gguf import GGMLType
from edgeinfer.training.batches import Batch, Batches
from edgeinfer.training.corpus import Report
from edgeinfer.training.objective import Objective
from edgeinfer.training.optimizer import Optimizers
from edgeinfer.training.recipe import OptimizerName
from edgeinfer.training.rounding import rounded
from edgeinfer.training.rounds import Rounds
from edgeinfer.training.workers import Workers

CLIP = 1.0  # largest norm of the gradients


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a head is trained."""

    n_epochs: int  # without rounds
    n_steps: int  # of the head's own drafts in each batch
    learning_rate: float  # the largest
    warm_up: float  # share of the training, 0..1
    seed: int
    evaluate_every: int  # batches
    optimizer: OptimizerName = "muon"
    n_rounds: int = 0  # further epochs, in which the head also learns after its own drafts
    # Share of the training before which a batch has one step only. Until the first step is often right, the others
    # take time and teach little.
    steps_from: float = 0.0
    rounded_from: float = 1.0  # share of the training before which matrices are not rounded to `types`
    types: HeadTypes = HeadTypes(GGMLType.F16, GGMLType.F16)  # noqa: RUF009

    @property
    def n_in_all(self) -> int:
        """Epochs, including rounds."""
        return self.n_epochs + self.n_rounds

    def steps(self, done: float) -> int:
        """Steps in each batch when this share of the training is done."""
        return self.n_steps if done >= self.steps_from else 1

    def rate(self, done: float) -> float:
        """The learning rate when this share of the training is done."""
        if done < self.warm_up:
            return self.learning_rate * done / self.warm_up
        angle = math.pi * (done - self.warm_up) / (1.0 - self.warm_up)
        return self.learning_rate * 0.5 * (1.0 + math.cos(angle))


@dataclass
class Progress:
    """How far a training is, and how it went."""

    epoch: int = 0
    batch: int = 0  # of the epoch
    step: int = 0  # batches in all
    tokens: int = 0  # positions judged, each as often as it was
    seconds: float = 0.0
    # Points with the tokens, the seconds, the losses since the point before, and the matches by depth on held-out
    # texts.
    curve: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains a head, keeping a checkpoint in a file. settings: what a checkpoint must have been made with."""

    def __init__(
        self,
        objective: Objective,
        train: Batches,
        held: Batches,
        schedule: Schedule,
        settings: dict[str, Any],
        checkpoint: Path,
        workers: Workers,
        rounds: Rounds | None = None,
    ) -> None:
        self.progress = Progress()
        self._objective = objective.to(workers.device)
        self._train = train
        self._held = held
        self._rounds = rounds
        self._schedule = schedule
        self._settings = settings
        self._checkpoint = checkpoint
        self._workers = workers
        self._optimizers = Optimizers(
            objective.head.parameters(), schedule.optimizer, schedule.learning_rate, workers.has_bfloat16
        )
        self._module: Any = objective
        if workers.n > 1:
            ids = [workers.device.index] if workers.device.type == "cuda" else None
            self._module = DistributedDataParallel(objective, device_ids=ids, broadcast_buffers=False)
        self._losses = torch.zeros(2, device=workers.device)
        self._n_losses = 0
        if checkpoint.exists():
            self._resume()

    def run(self, report: Report) -> bool:
        """Train to the end; returns False if SIGINT or SIGTERM came before it. Either way a checkpoint is written.

        Raises NumericalError if the loss is not finite.
        """
        with _signals_noted() as noted:
            finished = all(self._epoch(epoch, noted, report) for epoch in self._epochs_left())
        self._save()
        return finished

    def matches(self, n_steps: int) -> list[float]:
        """Share of right drafts at each depth on held-out texts, of those after right ones."""
        return [right / max(1, judged) for judged, right in self.match_counts(n_steps).tolist()]

    @torch.no_grad()
    def match_counts(self, n_steps: int) -> torch.Tensor:
        """(n_steps, 2): see Objective.matches, of all workers."""
        counts = torch.zeros((n_steps, 2), dtype=torch.int64, device=self._workers.device)
        plans = self._held.plans(0, 0)[self._workers.rank :: self._workers.n]
        for batch in self._held.stream(plans, self._workers.device):
            with self._autocast():
                counts += self._objective.matches(batch, n_steps)
        return self._workers.summed(counts)

    # ---- An epoch ----------------------------------------------------------------------------------------------------

    def _epochs_left(self) -> range:
        return range(self.progress.epoch, self._schedule.n_in_all)

    def _epoch(self, epoch: int, noted: list[int], report: Report) -> bool:
        """Train from the current progress to the end of the epoch; returns False if a signal came."""
        progress, n = self.progress, self._workers.n
        rounds = self._rounds if epoch >= self._schedule.n_epochs else None
        plans = self._train.plans(self._schedule.seed, epoch) if rounds is None else rounds.plans(epoch)
        n_batches = len(plans) // n  # of each worker; the rest is dropped, another one in each epoch
        if not n_batches:
            raise InvalidArgument(
                f"{len(self._train)} texts are too few for a batch for each of {n} workers: write more (--tokens)"
            )
        started = time.perf_counter()
        own = plans[progress.batch * n + self._workers.rank : n_batches * n : n]
        device = self._workers.device
        for batch in self._train.stream(own, device) if rounds is None else rounds.stream(own, epoch, device):
            done = (epoch + progress.batch / n_batches) / self._schedule.n_in_all
            self._step(batch, done)
            progress.batch, progress.step = progress.batch + 1, progress.step + 1
            progress.tokens += batch.n_tokens * n
            progress.seconds, started = progress.seconds + time.perf_counter() - started, time.perf_counter()
            if progress.step % self._schedule.evaluate_every == 0:
                self._evaluate(report, done)
            if self._workers.any(bool(noted)):
                return False
        progress.epoch, progress.batch = epoch + 1, 0
        if epoch + 1 == self._schedule.n_in_all and self._n_losses:  # not twice at the same step
            self._evaluate(report, 1.0)
        return True

    def _step(self, batch: Batch, done: float) -> None:
        device, schedule = self._workers.device, self._schedule
        generator = torch.Generator(device).manual_seed(
            (schedule.seed << 32) + self.progress.step * self._workers.n + self._workers.rank
        )
        shape = (*batch.tokens.shape, self._objective.head.sizes.n_embd)
        noise = torch.rand(shape, generator=generator, device=device)
        self._optimizers.zero_grad()
        with self._rounded(done):
            with self._autocast():
                loss, parts = self._module(batch, schedule.steps(done), noise)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._objective.head.parameters(), CLIP)
        self._optimizers.step(schedule.rate(done))
        self._losses += parts
        self._n_losses += 1

    def _evaluate(self, report: Report, done: float) -> None:
        """Add a point to the curve, and write a checkpoint."""
        feature, token = (self._losses / max(1, self._n_losses)).tolist()
        if not math.isfinite(feature + token):
            raise NumericalError(
                f"the loss is {feature} and {token} at step {self.progress.step}: lower learning_rate (--config)"
            )
        self._losses.zero_()
        self._n_losses = 0
        with self._rounded(done):
            match = self.matches(self._schedule.n_steps)
        progress = self.progress
        point = {"tokens": progress.tokens, "seconds": progress.seconds, "feature_loss": feature, "token_loss": token}
        progress.curve.append(point | {"match": match})
        report(
            f"training: {progress.tokens:,} tokens, losses {feature:.4f} {token:.3f}, match "
            + " ".join(f"{share:.3f}" for share in match),
            done,
        )
        self._save()

    def _autocast(self) -> Any:
        kind, is_faster = self._workers.device.type, self._workers.has_bfloat16
        return torch.autocast(kind, dtype=torch.bfloat16) if is_faster else contextlib.nullcontext()

    @contextlib.contextmanager
    def _rounded(self, done: float) -> Iterator[None]:
        """Inside, matrices are rounded as in the file, if the share `done` of the training has reached rounded_from.

        Gradients at the rounded weights are used for the weights that are kept: the straight-through estimator (Bengio
        et al., arXiv:1308.3432).
        """
        if done < self._schedule.rounded_from:
            yield
            return
        matrices = {name: each for name, each in self._objective.head.named_parameters() if each.ndim == 2}
        kept = [each.data for each in matrices.values()]
        for name, each in matrices.items():
            each.data = rounded(each.data, self._schedule.types.of(name))
        try:
            yield
        finally:
            for each, values in zip(matrices.values(), kept, strict=True):
                each.data = values

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self._workers.rank == 0:
            state = {
                "settings": self._settings,
                "progress": asdict(self.progress),
                "head": self._objective.head.state_dict(),
                "optimizers": self._optimizers.state_dicts(),
                "losses": (self._losses.cpu(), self._n_losses),
            }
            buffer = io.BytesIO()
            torch.save(state, buffer)
            write_whole(self._checkpoint, buffer.getvalue())
        self._workers.wait()

    def _resume(self) -> None:
        try:
            state = torch.load(self._checkpoint, map_location=self._workers.device, weights_only=True)
        except Exception as error:  # whatever the bytes make torch raise
            if is_from_handler(error):
                raise
            raise ModelFileError(f"{self._checkpoint} is no checkpoint: {error}; remove it to train anew") from error
        for key, expected in self._settings.items():
            found = state["settings"].get(key)
            if found != expected:
                raise InvalidArgument(
                    f"{self._checkpoint} was made with other settings: expected {key} = {expected!r:.80}, found "
                    f"{found!r:.80}: remove it to train anew, or name the same settings"
                )
        self.progress = Progress(**state["progress"])
        self._objective.head.load_state_dict(state["head"])
        self._optimizers.load_state_dicts(state["optimizers"])
        self._losses, self._n_losses = state["losses"][0].to(self._workers.device), state["losses"][1]


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """A list that SIGINT and SIGTERM are added to. A second signal does what it did before."""
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: object) -> None:
        noted.append(number)
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in before:
            signal.signal(number, note)
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def use_deterministic_kernels() -> None:
    """Use kernels that give the same bits each time, where torch has them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would only cost time
