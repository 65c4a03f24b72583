"""How large the weights of a model may be, so that a load takes no more than a given memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import NoReturn

from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.common.types import MemoryUse
from edgeinfer.exporters.auto.candidates import Subject, subjects_of
from edgeinfer.exporters.gguf.writer import Tensor
from edgeinfer.exporters.source import Bytes, GgufSource
from edgeinfer.exporters.virtual_file import VirtualModelFile
from edgeinfer.loading.options import LoadOptions
from edgeinfer.loading.plan import LoadPlan, plan_load
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile

Types = Mapping[str, GGMLType]


def weight_bytes_that_fit(file: ModelFile, memory: int, n_ctx: int | None = None) -> int:
    """The most bytes of tensors with which `edgeinfer.load` takes no more than `memory`, all in its ledger counted.

    It holds for every mix of types that `--type auto` chooses from. Batches and draft tables are those that a load has
    with the smallest types. Embeddings that no product reads lie in the file alone, and take no memory.
    Raises BudgetExceeded where not even the smallest types fit, and what plan_load raises.
    """
    subjects = subjects_of(GgufSource(file), read_spec(file))
    options = LoadOptions(budget=memory) if n_ctx is None else LoadOptions(budget=memory, n_ctx=n_ctx)
    with _in_types(file, {each.name: each.formats[0] for each in subjects}) as smallest:
        plan = plan_load(smallest, options)
        try:
            return _Fit(smallest, plan, subjects).weight_bytes(memory)
        finally:
            plan.close()


@dataclass
class _Fit:
    """A file in the smallest types, which are replaced by others here, and the plan of its load."""

    file: ModelFile
    plan: LoadPlan
    subjects: Sequence[Subject]

    def weight_bytes(self, memory: int) -> int:
        """See weight_bytes_that_fit."""
        use = self.plan.model.plan.use
        room = memory - self.plan.ledger.peak + _held(use) - max(0, self._mixed().activations - use.activations)
        if room <= 0:
            raise BudgetExceeded(
                f"{self.file.path}: {human_bytes(memory - room)} are needed beside the weights, {human_bytes(memory)} "
                "may be taken in all"
            )
        # Of the embeddings no more than their smallest type is added: which one they get is not known yet.
        in_file = sum(each.n_bytes(each.formats[0]) for each in self.subjects if self._is_in_file_alone(each))
        return int(room / self._most_growth()) + in_file

    def _is_in_file_alone(self, subject: Subject) -> bool:
        """Whether a tensor takes no memory. Beside experts on disk, embeddings are read into it."""
        return subject.n_used == 0 and self.plan.settings.expert_cache is None

    def _mixed(self) -> MemoryUse:
        """With all types in matrices of each width: what is made of the inputs of all of them takes memory too."""
        turns = {each.shape[1]: cycle(each.formats) for each in self.subjects}
        return self._use({each.name: next(turns[each.shape[1]]) for each in self.subjects})

    def _most_growth(self) -> float:
        """Bytes in memory for one in the file, by the type that grows most. Rows are packed in groups, with padding."""
        found = [1.0]
        for type in {type for each in self.subjects for type in each.formats}:
            held = _held(self._use({each.name: type for each in self.subjects if type in each.formats}))
            alone = {each.name for each in self.subjects if self._is_in_file_alone(each)}
            found.append(held / sum(info.n_bytes for name, info in self.file.tensors.items() if name not in alone))
        return max(found)

    def _use(self, types: Types) -> MemoryUse:
        """What the model takes with these types, the others as they are."""
        for each in self.subjects:
            if each.name in types and not self._is_in_file_alone(each):
                self.file.define(each.name, types[each.name], each.tensor.shape, _never_read)
        model = self.plan.model
        return model.backend.plan(self.file, model.spec, self.plan.settings.of_model).use


def _held(use: MemoryUse) -> int:
    """Bytes of weights, mapped or not."""
    return use.weights + use.experts


@contextmanager
def _in_types(file: ModelFile, types: Types) -> Iterator[ModelFile]:
    """The same model with other types, as a file without its matrices, of which a plan reads none."""
    source = GgufSource(file)
    tensors = [
        Tensor(each.name, types.get(each.name, each.type), each.shape, partial(_pieces, file, each.name))
        for each in source.tensors
    ]
    with VirtualModelFile.without_matrices(file.path, source.metadata, tensors) as made:
        yield made


def _pieces(file: ModelFile, name: str) -> Iterator[Bytes]:
    yield file.data(name)


def _never_read(first: int, last: int) -> NoReturn:
    raise AssertionError("a plan reads no weights")
