"""Packages of any source and in any type: a target that takes GGUF files gets one, made in a work folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.files import folder_beside, temporary_folder
from edgeinfer.common.overriding import override
from edgeinfer.exporters.gguf.skeleton import write_skeleton
from edgeinfer.exporters.gguf.target import Choices, prepare, write_file
from edgeinfer.exporters.request import ExportTarget, Plan, Progress, Request, Result
from edgeinfer.exporters.source import named_as, open_source


class FromGguf(ExportTarget):
    """A target behind the one for GGUF files, where the request names a folder of Hugging Face or a type."""

    def __init__(self, target: ExportTarget) -> None:
        self.target = target
        self._choices = Choices()

    @override
    def plan(self, request: Request) -> Plan:
        if not _needs_file(request):
            plan = self.target.plan(request)
            with open_source(request.source) as source:  # a GGUF file
                return replace(plan, notes=[*source.notes, *plan.notes])
        with open_source(request.source, request.more.get("model")) as source, temporary_folder() as folder:
            job = prepare(source, replace(request, resume=False), self._choices)  # a package begins again
            first = job.plan()
            path = folder / _name(request)
            write_skeleton(path, job.layout, job.tensors)
            with named_as(path, request.source):
                then = self.target.plan(_of_file(request, path))
        n_bytes = job.layout.n_bytes
        made = f"first a GGUF file of {human_bytes(n_bytes)} is made in a work folder, which is gone afterwards"
        peak = max(first.peak_bytes, then.peak_bytes)
        return replace(
            then, peak_bytes=peak, disk_bytes=then.disk_bytes + n_bytes, notes=[*first.notes, made, *then.notes]
        )

    @override
    def write(self, request: Request, progress: Progress) -> Result:
        if not _needs_file(request):
            return self.target.write(request, progress)
        with _work_folder(request.out) as folder:
            path = folder / _name(request)
            facts = write_file(request, path, self._choices, lambda share: progress(0.5 * share))
            with named_as(path, request.source):
                result = self.target.write(_of_file(request, path), lambda share: progress(0.5 + 0.5 * share))
        return replace(result, facts={**facts, **result.facts})


def _needs_file(request: Request) -> bool:
    return request.type is not None or request.source.is_dir()


def _of_file(request: Request, path: Path) -> Request:
    """The request with a GGUF file as its source, whose types are those that are wanted."""
    return replace(request, source=path, type=None, imatrix=None, calibration=None, size=None, fit=None, cost=None)


def _name(request: Request) -> str:
    return f"{request.source.name if request.source.is_dir() else request.source.stem}.gguf"


@contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """A folder on the file system of the output."""
    with folder_beside(out.with_name(f"{out.name}.work")) as folder:
        yield folder
