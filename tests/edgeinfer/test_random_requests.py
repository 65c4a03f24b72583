"""Random requests of eight threads, on an engine of each kind, give the bytes of serial runs."""

import pytest
from drafting import FixedCosts
from random_requests import random_requests, served
from tiny_models import write_tiny_model

import edgeinfer

pytestmark = pytest.mark.usefixtures("native")

SIZES = {"n_ctx_train": 256}
# Options of load for what is tested, against an engine that runs one text at a time without drafts.
KINDS = {
    "suffix": {"draft": ["suffix"]},
    "answers": {"draft": ["answers"]},
    "recycling": {"draft": ["recycling"]},
    "all drafts": {"draft": "auto", "parallel": 8},
    "a small pool": {"draft": "auto", "parallel": 8, "n_ctx": 160, "n_batch": 32},
    "a pool that keeps": {"draft": "none", "cache_ram": "8MiB"},
    "one place": {"draft": "auto", "parallel": 1},
}
ON_DISK = {
    "room for all": {"draft": "auto", "cache_disk": "64MiB"},
    "room for little": {"draft": "auto", "cache_disk": "300KiB"},
    "a small pool": {"draft": "auto", "parallel": 8, "n_ctx": 560, "n_batch": 32, "cache_disk": "64MiB"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def contexts(tmp_path, monkeypatch):
    """An empty folder for the contexts on disk, and for what else is measured only once here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "edgeinfer" / "contexts"


def compared(path, seed, n, n_words=(1, 8, 24), **options):
    """Run n random requests on an engine with these options and on one without anything; both give the same."""
    requests = random_requests(n, seed, n_words=n_words)
    lone = {name: value for name, value in options.items() if name in ("n_ctx", "backend")}
    with edgeinfer.load(path, draft="none", parallel=1, **lone) as engine:
        expected = [request.run(engine) for request in requests]
    with edgeinfer.load(path, **options) as engine:
        if engine.speculator is not None:
            engine.speculator.costs = FixedCosts()
        if engine.contexts is not None:
            served(engine, requests[::3], 8)  # so that there is something on disk
            assert engine.contexts.flush(60) and engine.contexts.problem is None  # before it is forgotten
            engine.forget()
        found = served(engine, requests, 8)
        assert not engine.scheduler.texts, "every text has given its place back"
    for request, before, now in zip(requests, expected, found, strict=True):
        assert now == before, request


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_eight_threads_get_what_one_request_after_the_other_gets(folder, kind, seed):
    path = folder / "tiny.gguf"
    if not path.exists():
        write_tiny_model(path, **SIZES)
    compared(path, seed, 50, **KINDS[kind])


@pytest.mark.parametrize("seed", range(3))
def test_texts_with_windows(folder, seed):
    path = folder / "windows.gguf"
    if not path.exists():
        write_tiny_model(path, "gemma3", metadata={"gemma3.attention.sliding_window": 16}, **SIZES)
    compared(path, seed, 50, draft="auto", parallel=4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ON_DISK)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_texts_with_contexts_on_disk(folder, contexts, architecture, kind, seed):
    path = folder / f"long {architecture}.gguf"
    if not path.exists():
        metadata = {"gemma3.attention.sliding_window": 16} if architecture == "gemma3" else {}
        write_tiny_model(path, architecture, metadata=metadata, n_ctx_train=1024)
    compared(path, seed, 50, (24, 40, 80), **{"parallel": 2, "n_batch": 64, "n_ctx": 1024, **ON_DISK[kind]})
    kinds = {name.name.rpartition("-")[2] for name in contexts.iterdir()} - {".lock"}
    assert kinds == {"0", "16"} if architecture == "gemma3" and kind != "room for little" else "0" in kinds


@pytest.mark.parametrize("seed", range(3))
def test_texts_with_experts_that_are_read_from_disk(folder, seed):
    from tiny_experts import write_tiny_experts

    path = folder / "experts.gguf"
    if not path.exists():
        write_tiny_experts(path)
    compared(path, seed, 50, draft="auto", parallel=4, expert_cache="25%", n_ctx=256)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["all drafts", "a small pool", "a pool that keeps", "one place"])
@pytest.mark.parametrize("architecture", ["qwen35", "lfm2"])
def test_texts_of_hybrids(folder, architecture, kind, seed):
    from tiny_hybrids import write_tiny_hybrid

    path = folder / f"{architecture}.gguf"
    if not path.exists():
        write_tiny_hybrid(path, architecture, "Q8_0", **SIZES)
    compared(path, seed, 50, **KINDS[kind])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_same", [True, False])
def test_texts_with_a_draft_model(folder, is_same, seed):
    path, draft = folder / "target.gguf", folder / f"draft{is_same}.gguf"
    if not path.exists():
        write_tiny_model(path, **SIZES)
    if not draft.exists():
        write_tiny_model(draft, seed=0 if is_same else 1, **SIZES)
    compared(path, seed, 50, draft=[str(draft)], parallel=4)
