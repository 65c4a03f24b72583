"""The table of export targets, and what is checked before one writes."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.common import devices
from edgeinfer.common.arguments import human_bytes
from edgeinfer.common.errors import BudgetExceeded, InvalidArgument, ModelNotFound, UnsupportedModel
from edgeinfer.common.file_identity import Sources
from edgeinfer.common.files import behind_links, check_kept, check_writable
from edgeinfer.exporters.from_gguf import FromGguf
from edgeinfer.exporters.gguf.partial import journal_path, partial_path
from edgeinfer.exporters.manifest import manifest_path, source_files
from edgeinfer.exporters.request import ExportTarget, Plan, Progress, Request, Result


@dataclass(frozen=True)
class Entry:
    """Where a target is, and what it writes.

    module: imported when the target is used.  name: of the class there.  writes: for messages.  has_manifest: whether
    one is written beside it, or into its folder.  takes_gguf: whether its source must be a GGUF file, in the types that
    are wanted: such a file is made where it is not.  target_folders: whether --target may be a folder of Hugging Face.
    """

    module: str
    name: str
    writes: str
    has_manifest: bool = True
    takes_gguf: bool = False
    target_folders: bool = True

    @property
    def is_folder(self) -> bool:
        """Whether it writes a folder, which takes the place of one that is there."""
        return self.writes.startswith("a folder")


TARGETS = {  # in the order of --help
    "gguf": Entry("edgeinfer.exporters.gguf.target", "GgufTarget", "a GGUF file"),
    "genai": Entry("edgeinfer.exporters.genai", "GenaiTarget", "a folder for ONNX Runtime GenAI", takes_gguf=True),
    "litertlm": Entry("edgeinfer.exporters.litertlm", "LitertlmTarget", "a .litertlm file", takes_gguf=True),
    "mnn": Entry("edgeinfer.exporters.mnn", "MnnTarget", "a folder for MNN", takes_gguf=True),
    "pte": Entry("edgeinfer.exporters.pte", "PteTarget", "a folder for ExecuTorch", takes_gguf=True),
    "onnx": Entry("edgeinfer.exporters.onnx", "OnnxTarget", "an ONNX file", takes_gguf=True, target_folders=False),
    "ternary": Entry("edgeinfer.exporters.ternary", "TernaryTarget", "a GGUF file with ternary matrices", False),
    "fpga": Entry("edgeinfer.exporters.fpga", "FpgaTarget", "a folder for an FPGA board", has_manifest=False),
}


def open_target(name: str) -> ExportTarget:
    """The target with that name. Raises InvalidArgument for a name that is not in the table."""
    if name not in TARGETS:
        raise InvalidArgument(f"there is no export target {name!r}; there are {', '.join(TARGETS)}")
    entry = TARGETS[name]
    if importlib.util.find_spec(entry.module) is None:
        raise UnsupportedModel(f"this version of edgeinfer cannot write {entry.writes} (--to {name})")
    target: ExportTarget = getattr(importlib.import_module(entry.module), entry.name)()
    return Watched(FromGguf(target) if entry.takes_gguf else target)


class Watched:
    """A target whose plan and output are of sources that stayed what they were, from the plan on."""

    def __init__(self, target: ExportTarget) -> None:
        self._target = target
        self._planned: tuple[Request, Sources] | None = None

    def plan(self, request: Request) -> Plan:
        """See ExportTarget.plan. Raises ModelFileChanged too."""
        sources = Sources(read_files(request))
        with sources.unchanged():
            plan = self._target.plan(request)
            sources.check()
        self._planned = request, sources
        return plan

    def write(self, request: Request, progress: Progress) -> Result:
        """See ExportTarget.write. Raises ModelFileChanged too, and nothing is written then."""
        planned = self._planned
        sources = planned[1] if planned is not None and planned[0] == request else Sources(read_files(request))
        with sources.unchanged():
            return self._target.write(request, progress)


def read_files(request: Request) -> list[Path]:
    """The files that an export reads. Raises ModelFileError, OSError."""
    named = (request.imatrix, request.calibration, request.draft, *request.more.values())
    return [*source_files(request.source), *(path for path in named if isinstance(path, Path) and path.is_file())]


def check_places(name: str, request: Request) -> None:
    """Raises OSError where the output cannot be written, InvalidArgument where it is what is read, ModelNotFound.

    Changes nothing.
    """
    source, out = request.source, request.out
    if not source.exists():
        raise ModelNotFound(f"{source}: there is no such file or folder")
    if out.is_dir():
        written = _files_in(name, out)
        check_writable(manifest_path(out))
    else:
        check_writable(out)
        written = [out, partial_path(out), journal_path(out), manifest_path(out)]
    named = (request.imatrix, request.calibration, request.draft, *request.more.values())
    check_kept(out, written, [source, *source_files(source), *(path for path in named if isinstance(path, Path))])


def _files_in(name: str, folder: Path) -> list[Path]:
    """What a target writes or replaces in a folder that is there."""
    if TARGETS[name].is_folder:
        return [folder, *(path for path in folder.rglob("*") if path.is_file())]
    return [folder, *folder.glob("model.onnx*")]


def check_gguf_files(name: str, request: Request) -> None:
    """Raises InvalidArgument where a folder of Hugging Face stands for what the target reads of GGUF files alone."""
    read = {"--draft": request.draft}
    if not TARGETS[name].target_folders:
        read["--target"] = request.more.get("model")
    for what, path in read.items():
        if isinstance(path, Path) and path.is_dir() and not any(path.glob("*.gguf")):
            made = shlex.join(["edgeinfer", "export", str(path), "--to", "gguf", "-o", f"{path.resolve().name}.gguf"])
            raise InvalidArgument(
                f"{path}: {what} reads GGUF files, and this is a folder: make one of it first: {made}"
            )


def check_room(plan: Plan, out: Path) -> None:
    """Raises BudgetExceeded or OSError with the shortfall where memory or the disk has too little room for a plan."""
    available = devices.available_memory()
    if plan.peak_bytes > available:
        raise BudgetExceeded(
            f"{out}: the export needs {human_bytes(plan.peak_bytes)} of memory, available are "
            f"{human_bytes(available)}: {human_bytes(plan.peak_bytes - available)} are missing"
        )
    if out.exists() and not out.is_file() and not out.is_dir():  # a pipe or a device
        return
    folder = out if out.is_dir() else behind_links(out).parent
    free = shutil.disk_usage(folder).free
    if plan.disk_bytes > free:
        reason = f"needs {human_bytes(plan.disk_bytes)}, free are {human_bytes(free)}: "
        raise OSError(errno.ENOSPC, f"{reason}{human_bytes(plan.disk_bytes - free)} are missing", str(folder))
