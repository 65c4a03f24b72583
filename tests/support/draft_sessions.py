"""Sessions of the backends that are there for drafts: opened by kind, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from exactness import LEAVES, TREE, branch_to
from numpy.typing import NDArray

from edgeinfer.backends.base import Backend, HeadSession, Session
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile

Kind: TypeAlias = Literal["opencl", "onnx contrib", "onnx plain"]
KINDS: tuple[Kind, ...] = ("opencl", "onnx contrib", "onnx plain")
Compare: TypeAlias = Callable[[NDArray[np.float32], NDArray[np.float32]], bool]
Open: TypeAlias = Callable[..., Any]  # (n_batch=) to a session with the attributes of its backend


def backend_of(kind: Kind) -> Backend:
    """The backend, and for ONNX Runtime the style of its graphs."""
    if kind == "opencl":
        from edgeinfer.backends.opencl import OpenCLBackend

        return OpenCLBackend()
    from edgeinfer.backends.onnx import OnnxBackend

    return OnnxBackend(_provider_of(kind))


def _provider_of(kind: Kind) -> Any:
    from edgeinfer.backends.onnx import choose_provider

    style: Literal["contrib", "plain"] = "contrib" if kind == "onnx contrib" else "plain"
    return replace(choose_provider("CPU"), style=style)


def head_backend_of(kind: Kind, target: ModelFile) -> Any:
    """The same of heads beside a target."""
    if kind == "opencl":
        from edgeinfer.backends.opencl import OpenCLHeadBackend

        return OpenCLHeadBackend(None, target, read_spec(target))
    from edgeinfer.backends.onnx import OnnxHeadBackend

    return OnnxHeadBackend(_provider_of(kind), target, read_spec(target))


def open_head(head: Path, target: Path, kind: Kind, n_batch: int = 64) -> HeadSession:
    """A session of a head, both of whose files are closed."""
    with ModelFile.open(head) as file, ModelFile.open(target) as model:
        backend, spec = head_backend_of(kind, model), read_head_beside(file, model, read_spec(model))
        session: HeadSession = backend.load(
            file, spec, backend.plan(file, spec, LoadSettings(256, n_batch=n_batch)), Device(1)
        ).session()
        return session


def opener(path: Path, kind: Kind, n_ctx: int = 256) -> Open:
    """open_session(n_batch=) for a model file."""
    file = ModelFile.open(path)
    spec = read_spec(file)
    backend = backend_of(kind)

    def open_session(n_batch: int = 128) -> Session:
        return backend.load(
            file, spec, backend.plan(file, spec, LoadSettings(n_ctx, n_batch=n_batch)), Device(1)
        ).session()

    return open_session


def some_tokens(rng: np.random.Generator, n: int) -> NDArray[np.int32]:
    return rng.integers(0, 259, n).astype(np.int32)


def check_branches_of_a_head(
    head: HeadSession, tokens: NDArray[np.int32], features: NDArray[np.float32], cuts: Sequence[int], is_same: Compare
) -> None:
    """A tree after 20 rows that grows by `cuts` has the logits of its branches alone, and so has what is committed."""
    head.forward(tokens[:20], features[:20])
    head.commit(range(20))
    at, logits = 0, []
    for size in cuts:
        part = slice(20 + at, 20 + at + size)
        out = head.forward(tokens[part], features[part], TREE[at : at + size], n_pending=at, logits="all")
        logits.append(out.logits)
        at += size
    of_tree = np.concatenate(logits)
    for leaf in LEAVES:
        branch = np.array(branch_to(leaf, TREE))
        alone = head.forward(tokens[20 + branch], features[20 + branch], logits="all").logits
        assert is_same(alone, of_tree[branch]), leaf
    branch = np.array(branch_to(7, TREE))
    head.forward(tokens[20:], features[20:], TREE)
    head.commit(branch)
    after = head.forward(tokens[:3], features[:3], logits="all").logits
    head.truncate(20)
    head.forward(tokens[20 + branch], features[20 + branch])
    head.commit(range(len(branch)))
    assert is_same(head.forward(tokens[:3], features[:3], logits="all").logits, after)


def difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The largest, as a share of the largest value."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def differences_to_the_reference(
    path: Path,
    kind: Kind,
    rng: np.random.Generator,
    activations: Literal["float32", "int8"] = "float32",
    sizes: Sequence[int] = (1, 3, 40),
) -> NDArray[np.float64]:
    """Of the logits and hidden states of each token of some texts, the last one longer than the windows."""
    file = ModelFile.open(path)
    spec = read_spec(file)
    oracle = ReferenceBackend(activations)
    reference = oracle.load(file, spec, oracle.plan(file, spec, LoadSettings(256, n_batch=128)), Device(1)).session()
    session = opener(path, kind)()
    errors: list[float] = []
    for n in sizes:
        tokens = some_tokens(rng, n)
        a, b = (each.forward(tokens, logits="all", hidden=(0, -1)) for each in (session, reference))
        assert a.hidden is not None and b.hidden is not None
        c, d = (each.forward(tokens, logits=(), hidden=True) for each in (session, reference))
        assert c.hidden is not None and d.hidden is not None
        for ours, theirs in zip([a.logits, *a.hidden, *c.hidden], [b.logits, *b.hidden, *d.hidden], strict=True):
            errors.extend(np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max())
    return np.array(errors)
