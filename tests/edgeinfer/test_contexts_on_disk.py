"""Contexts on disk: they change no text, whatever has happened to the files."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from drafting import FixedCosts
from tiny_experts import write_tiny_experts
from tiny_gemma4 import GEMMA4_VARIANTS, Gemma4Variant, write_tiny_gemma4
from tiny_heads import write_tiny_head
from tiny_hybrids import write_tiny_hybrid
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.base import SegmentedSession
from edgeinfer.backends.native import NativeBackend
from edgeinfer.cli.answering import stats_lines
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.completion import Completion
from edgeinfer.context_cache import cache as caches
from edgeinfer.context_cache import folder as folders
from edgeinfer.context_cache import model_content
from edgeinfer.context_cache.blocks import HEADER_BYTES, Block, block_of
from edgeinfer.context_cache.cache import ContextCache, contexts_folder
from edgeinfer.context_cache.folder import Kept, SizedFolder
from edgeinfer.engine import Engine
from edgeinfer.models.gguf import ModelFile

pytestmark = pytest.mark.usefixtures("native")

SIZE = "64MiB"
ROOT = Path(__file__).parents[2]
ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 4}


def tokens(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=n)


PROMPT = tokens(700)
FOUND = len(PROMPT) - 1  # all of it but the last token, which is always run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def path(models: Path) -> Path:
    return write_tiny_model(models / "tiny.gguf", n_ctx_train=1024)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = contexts_folder()
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are closed wait until all is written: that thread gives way to all that the machine does."""
    monkeypatch.setattr(caches, "_CLOSING_SECONDS", 100.0)
    monkeypatch.setattr(ContextCache.flush, "__defaults__", (100.0,))


def load(path: Path, **options: Any) -> Engine:
    return edgeinfer.load(path, **{"draft": "none", "cache_disk": SIZE, **options})


def ask(path: Path, prompt: list[int] = PROMPT, **options: Any) -> Completion:
    """The answer of an engine of its own, which has written all before it is closed."""
    with load(path, **options) as engine:
        completion = engine.generate(prompt, **ASKED)
        if engine.contexts is not None:
            assert engine.contexts.flush(60) and engine.contexts.problem is None
    return completion


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))


# ---- round trips -----------------------------------------------------------------------------------------------------

WINDOW_20: dict[str, Any] = {"metadata": {"gemma3.attention.sliding_window": 20}}
WINDOW_200: dict[str, Any] = {"metadata": {"gemma3.attention.sliding_window": 200}}
LONG: dict[str, Any] = {"metadata": {"gemma3.attention.sliding_window": 700}}
TRIPS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "q8_0": ("llama", {}, {"cache_type": "q8_0"}),
    "k6v4": ("qwen2", {}, {"cache_type": "k6v4"}),
    "a window": ("gemma3", WINDOW_20, {"n_batch": 32, "parallel": 1}),
    "a window over segments": ("gemma3", WINDOW_200, {"n_batch": 32, "parallel": 1}),
    "a window that is most of the text": ("gemma3", LONG, {"n_batch": 32, "parallel": 1}),
    "a window in a large cache": ("gemma3", WINDOW_20, {"n_batch": 512, "n_ctx": 800}),
    "windows with caps": ("gemma2", {}, {"n_batch": 64, "parallel": 1}),
}


@pytest.mark.parametrize("trip", TRIPS)
def test_what_is_read_from_disk_gives_the_text_of_what_is_computed(models: Path, trip: str) -> None:
    architecture, sizes, options = TRIPS[trip]
    path = write_tiny_model(models / f"{trip}.gguf", architecture, n_ctx_train=1024, **sizes)
    whole = ask(path, cache_disk=None, **options)
    assert ask(path, **options).tokens == whole.tokens
    again = ask(path, **options)
    assert again.usage.cached_tokens == FOUND and again.tokens == whole.tokens
    longer = [*PROMPT, *whole.tokens, *tokens(60, seed=1)]
    assert ask(path, longer, **options).tokens == ask(path, longer, cache_disk=None, **options).tokens
    other = [*PROMPT[:500], *tokens(100, seed=2)]  # which leaves the kept text in the midst of it
    found = ask(path, other, **options)
    assert found.usage.cached_tokens == 384 or "window" in trip  # of which only the last were there to be written
    assert found.tokens == ask(path, other, cache_disk=None, **options).tokens


@pytest.mark.parametrize("variant", GEMMA4_VARIANTS)
def test_layers_that_read_the_keys_of_others(variant: Gemma4Variant, models: Path) -> None:
    path = write_tiny_gemma4(models / f"{variant}.gguf", variant, n_ctx_train=1024)
    whole = ask(path, cache_disk=None, n_batch=32, parallel=1)
    assert ask(path, n_batch=32, parallel=1).tokens == whole.tokens
    again = ask(path, n_batch=32, parallel=1)
    assert again.usage.cached_tokens == FOUND and again.tokens == whole.tokens


def test_layers_with_sinks_and_experts(models: Path) -> None:
    path = write_tiny_experts(models / "sinks.gguf", "gpt-oss", n_ctx_train=1024)
    whole = ask(path, cache_disk=None, n_batch=32)
    assert ask(path, n_batch=32).tokens == whole.tokens
    again = ask(path, n_batch=64, expert_cache="50%")
    assert again.usage.cached_tokens == FOUND and again.tokens == whole.tokens


def test_what_an_answer_adds_is_found_too(path: Path) -> None:
    with load(path) as engine:
        first = engine.generate(PROMPT[:120], max_tokens=300, temperature=0.8, seed=1)
    assert len(first.tokens) > 150, "else the test shows nothing"
    longer = [*PROMPT[:120], *first.tokens, *tokens(20, seed=3)]
    found = ask(path, longer)
    assert found.usage.cached_tokens >= 256
    assert found.tokens == ask(path, longer, cache_disk=None).tokens


def test_a_text_in_memory_goes_before_one_on_disk(path: Path) -> None:
    ask(path)
    with load(path) as engine:
        first = engine.generate(PROMPT, **ASKED)
        again = engine.generate([*PROMPT, *first.tokens, 9], **ASKED)
        assert first.usage.cached_tokens == FOUND
        assert again.usage.cached_tokens == len(PROMPT) + len(first.tokens) - 1


def test_several_texts_at_once_read_and_write(path: Path) -> None:
    prompts = [[*PROMPT[: 150 * n], *tokens(30 + 40 * n, seed=n)] for n in range(4)]
    with load(path, cache_disk=None, n_ctx=1024) as engine:
        expected = [engine.generate(prompt, **ASKED).tokens for prompt in prompts]
    for _ in range(2):
        with load(path, n_ctx=1024, parallel=4) as engine:
            found = [each.tokens for each in engine.generate_many(prompts, **ASKED)]
        assert found == expected


# ---- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["model", "head", "auto"])
def test_drafts_go_on_after_a_text_from_disk(models: Path, path: Path, kind: str) -> None:
    draft: Any = "auto"
    if kind == "model":
        draft = [str(write_tiny_model(models / "draft.gguf", n_ctx_train=1024))]  # the same: it drafts well
    elif kind == "head":
        draft = [str(write_tiny_head(models / "head.gguf", path))]
    prompt = [*PROMPT[:300], *(PROMPT[300:310] * 9)]
    whole = ask(path, prompt, cache_disk=None)
    for _ in range(2):
        with load(path, draft=draft) as engine:
            assert engine.speculator is not None
            engine.speculator.costs = FixedCosts()
            found = engine.generate(prompt, **ASKED)
        assert found.tokens == whole.tokens
    assert found.usage.cached_tokens == len(prompt) - 1
    assert found.timings.speculation is not None
    assert kind == "auto" or found.timings.speculation.steps < len(found.tokens)


# ---- what is a miss --------------------------------------------------------------------------------------------------


def test_another_model_finds_nothing(models: Path, path: Path) -> None:
    ask(path)
    other = write_tiny_model(models / "other.gguf", n_ctx_train=1024, seed=1)
    assert ask(other).usage.cached_tokens == 0
    assert ask(other).tokens == ask(other, cache_disk=None).tokens


def test_one_changed_weight_is_another_model(path: Path, tmp_path: Path) -> None:
    ask(path)
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    other = tmp_path / "changed.gguf"
    other.write_bytes(changed)
    assert ask(other).usage.cached_tokens == 0
    (tmp_path / "same.gguf").write_bytes(path.read_bytes())
    assert ask(tmp_path / "same.gguf").usage.cached_tokens == FOUND, "the content counts, not the name"


def test_packed_weights_have_contexts_of_their_own(path: Path, tmp_path: Path) -> None:
    """Whether they are those of the model is not compared byte by byte at a load."""
    copy = Path(shutil.copy(path, tmp_path / "packed.gguf"))
    whole = ask(path)
    with ModelFile.open(copy) as file:
        backend = NativeBackend(tuned=False)
        backend.pack(file, backend.read_spec(file), tmp_path / "packed.gguf.packed")
    assert ask(copy).usage.cached_tokens == 0
    again = ask(copy)
    assert again.usage.cached_tokens == FOUND and again.tokens == whole.tokens


def test_another_type_of_cache_finds_nothing(models: Path) -> None:
    path = write_tiny_model(models / "wide.gguf", n_ctx_train=1024)
    ask(path)
    assert ask(path, cache_type="q8_0").usage.cached_tokens == 0
    assert ask(path, cache_type="f16", n_batch=16, n_threads=2, n_ctx=900).usage.cached_tokens == FOUND


def test_another_token_at_the_beginning_finds_nothing(path: Path) -> None:
    ask(path)
    assert ask(path, [PROMPT[0] + 1, *PROMPT[1:]]).usage.cached_tokens == 0


def damaged(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1 << (at % 8)
    return bytes(changed)


def cases(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Every byte of a header, and bytes of the rest, with a flipped bit; cut files, long ones and empty ones."""
    for at in [*range(HEADER_BYTES), *range(HEADER_BYTES, len(data), 1009), len(data) - 1]:
        yield f"byte {at}", damaged(data, at)
    for n in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(data) // 2, len(data) - 1):
        yield f"{n} bytes", data[:n]
    yield "longer", data + b"\0"
    yield "zeros", bytes(len(data))


@pytest.mark.parametrize("is_tail", [False, True])
def test_each_damaged_byte_is_a_miss(path: Path, folder: Path, is_tail: bool) -> None:
    short = PROMPT[:150]
    ask(path, short)
    (name,) = (each.name for each in SizedFolder(folder, 0).files() if is_block(folder, each, is_tail))
    data = (folder / name).read_bytes()
    with load(path) as engine:
        whole = engine.session.forward(short, logits="last").logits
        engine.session.truncate(0)
        assert engine.contexts is not None and isinstance(engine.session, SegmentedSession)
        n = 0
        for what, content in [("whole", data), *cases(data)]:
            (folder / name).write_bytes(content)
            text = engine.contexts.text(engine.session, short)
            assert text is not None
            while text.is_reading:
                text.read(1.0)
            assert engine.session.n_past == (149 if what == "whole" else 128 if is_tail else 0), what
            if what == "whole":
                rest = engine.session.forward(short[149:], logits="last").logits
                assert rest.tobytes() == whole.tobytes()
            engine.session.truncate(0)
            n += 1
        assert n > 200


def is_block(folder: Path, kept: Kept, is_tail: bool) -> bool:
    block = block_of(folder, kept)
    assert block is not None
    return bool(block.tokens) == is_tail


def tails(folder: Path) -> list[int]:
    """The numbers of segments that are not whole."""
    blocks = [block_of(folder, each) for each in SizedFolder(folder, 0).files()]
    return [block.number for block in blocks if block is not None and block.tokens]


def test_a_tail_serves_texts_that_go_on_otherwise(path: Path, folder: Path) -> None:
    first = ask(path, PROMPT[:200])
    assert tails(folder) == [1]
    other = [*PROMPT[:190], *tokens(40, seed=8)]
    found = ask(path, other)
    assert found.usage.cached_tokens == 190
    assert found.tokens == ask(path, other, cache_disk=None).tokens
    longer = [*PROMPT[:200], *first.tokens, *tokens(60, seed=9)]
    ask(path, longer)  # beyond the segment: the tail in it is of no use any more
    assert tails(folder) == [2]
    again = ask(path, longer)
    assert again.usage.cached_tokens == len(longer) - 1
    assert again.tokens == ask(path, longer, cache_disk=None).tokens


@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_damaged_block_ends_what_is_read(models: Path, folder: Path, architecture: Any, number: int) -> None:
    """In a model with windows, what was read far from the end has none, and all of the text is computed."""
    path = write_tiny_model(models / f"damaged {architecture}.gguf", architecture, n_ctx_train=1024)
    options: dict[str, Any] = {"n_batch": 32, "parallel": 1}
    whole = ask(path, **options)
    blocks = [folder / name for name in names(folder) if name.endswith("-0")]
    target = sorted(blocks, key=lambda each: -each.stat().st_mtime_ns)[number]  # the later, the older
    target.write_bytes(damaged(target.read_bytes(), HEADER_BYTES + 5))
    found = ask(path, **options)
    assert found.usage.cached_tokens == (0 if architecture == "gemma3" and number < 4 else 128 * number)
    assert found.tokens == whole.tokens
    assert ask(path, **options).usage.cached_tokens == FOUND, "it was written again"


def test_without_blocks_of_a_window_less_is_read(models: Path, folder: Path) -> None:
    path = write_tiny_model(models / "windows.gguf", "gemma3", n_ctx_train=1024)
    options: dict[str, Any] = {"n_batch": 32, "parallel": 1}
    ask(path, PROMPT[:400], **options)  # whose last windows are those in the midst of the longer text
    whole = ask(path, **options)
    windows = {}
    for kept in SizedFolder(folder, 0).files():
        block = block_of(folder, kept)
        assert block is not None
        if block.kind:
            windows[block.number] = folder / kept.name
    assert {1, 2, 3, 4} <= windows.keys()
    for number in (4, 3):
        windows[number].unlink()
        with load(path, **options) as engine:
            found = engine.generate(PROMPT, max_tokens=1)
            assert found.usage.cached_tokens == 128 * number
    found = ask(path, **options)
    assert found.tokens == whole.tokens
    assert ask(path, **options).usage.cached_tokens == FOUND


def test_a_block_under_another_name_is_a_miss(path: Path, folder: Path) -> None:
    whole = ask(path)
    blocks = [folder / name for name in names(folder)]
    contents = [block.read_bytes() for block in blocks]
    for block, content in zip(blocks, [*contents[1:], contents[0]], strict=True):
        block.write_bytes(content)
    found = ask(path)
    assert found.usage.cached_tokens == 0 and found.tokens == whole.tokens


def test_links_folders_and_pipes_in_the_place_of_blocks(path: Path, folder: Path, tmp_path: Path) -> None:
    whole = ask(path)
    for number, name in enumerate(names(folder)):
        moved = tmp_path / name
        (folder / name).rename(moved)
        if number % 2:
            (folder / name).symlink_to(moved)
        else:
            (folder / name).mkdir()
    found = ask_without_flush(path)
    assert found.usage.cached_tokens == 0 and found.tokens == whole.tokens


def ask_without_flush(path: Path, **options: Any) -> Completion:
    with load(path, **options) as engine:
        return engine.generate(PROMPT, **ASKED)


# ---- a disk that fails -----------------------------------------------------------------------------------------------


def failing(number: int) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_disk_changes_no_text(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(path, cache_disk=None)
    n_written = 0
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        nonlocal n_written
        if "contexts" in str(target) and (n_written := n_written + 1) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "replace", full)
        with load(path) as engine:
            assert engine.generate(PROMPT, **ASKED).tokens == whole.tokens
            assert engine.contexts is not None and engine.contexts.flush(60)
            assert engine.contexts.problem == "No space left on device"
            assert "nothing more is written: No space left on device" in "\n".join(stats_lines(engine, 0, None))
            assert engine.generate(PROMPT[:300], **ASKED).text
    assert len(names(folder)) == 2 and not list(folder.glob(".partial*"))
    found = ask(path)
    assert found.usage.cached_tokens == 256 and found.tokens == whole.tokens


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_folder_that_can_only_be_read_is_read(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    whole = ask(path)
    open_file = os.open

    def opened(name: Any, flags: int, *mode: Any, **options: Any) -> int:
        if flags & os.O_CREAT and "contexts" in str(name):
            raise OSError(error, os.strerror(error))
        return open_file(name, flags, *mode, **options)

    before = names(folder)
    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "open", opened)
        patch.setattr(folders.os, "utime", failing(error))
        with load(path) as engine:
            found = engine.generate([*PROMPT, *tokens(200, seed=7)], **ASKED)
            assert engine.contexts is not None and engine.contexts.flush(60)
            assert engine.contexts.problem == os.strerror(error)
            assert engine.generate(PROMPT, **ASKED).tokens == whole.tokens
    assert found.usage.cached_tokens == len(PROMPT) and names(folder) == before


def test_a_folder_of_another_user_is_refused(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(path)
    monkeypatch.setattr(folders.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.warns(RuntimeWarning, match="contexts are not kept on disk: .*another user"):
        with load(path) as engine:
            assert engine.contexts is None
            found = engine.generate(PROMPT, **ASKED)
    assert found.usage.cached_tokens == 0 and found.tokens == whole.tokens


def test_a_file_in_the_place_of_the_folder_is_refused(path: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("")
    with pytest.warns(RuntimeWarning, match="contexts are not kept on disk: .*Expected a folder"):
        load(path).close()
    load(path, cache_disk="auto").close()  # which says nothing


def test_folder_and_files_are_private(path: Path, folder: Path) -> None:
    old = os.umask(0)
    try:
        ask(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}
    folder.chmod(0o755)
    ask(path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# ---- size and age ----------------------------------------------------------------------------------------------------


def total(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.iterdir())


def test_the_size_holds_and_the_oldest_go_first(path: Path, folder: Path) -> None:
    ask(path, PROMPT[:300])
    most = 3 * total(folder)  # two segments and a tail each
    others = [tokens(300, seed=10 + n) for n in range(3)]
    for prompt in others:
        ask(path, prompt, cache_disk=most)
        assert total(folder) <= most
        assert ask(path, PROMPT[:300], cache_disk=most).usage.cached_tokens == 299, "it was used last"
    assert len(names(folder)) == 9
    assert ask(path, others[0], cache_disk=most).usage.cached_tokens == 0
    assert ask(path, others[2], cache_disk=most).usage.cached_tokens >= 128


def test_of_a_text_the_end_goes_first(path: Path, folder: Path) -> None:
    ask(path)
    most = total(folder)  # five segments and a tail
    ask(path, tokens(300, seed=9), cache_disk=most)
    assert ask(path, cache_disk=most).usage.cached_tokens == 384


def test_a_size_below_a_block_keeps_nothing(path: Path, folder: Path) -> None:
    assert ask(path, cache_disk=1000).text is not None
    assert not folder.exists() or names(folder) == []


def test_the_size_is_counted_with_what_others_write(tmp_path: Path) -> None:
    first, second = (SizedFolder(tmp_path / "kept", 1000) for _ in range(2))
    for n in range(20):
        of = (first, second)[n % 2]
        assert of.write(f"{n:03}", 100, n * 10**9, lambda file: file.write(bytes(100)) and None)
        assert total(tmp_path / "kept") <= 1000
    assert [each.name for each in first.files()] == [f"{n:03}" for n in range(10, 20)]
    assert first.touch("010", 100, 99 * 10**9) and not first.touch("000", 100, 0) and not first.touch("011", 99, 0)
    assert second.write("last", 100, 100 * 10**9, lambda file: file.write(bytes(100)) and None)
    assert "010" in names(tmp_path / "kept") and "011" not in names(tmp_path / "kept")


# ---- processes -------------------------------------------------------------------------------------------------------

CHILD = """
import sys, edgeinfer
path, size, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
import random
def tokens(n, seed): return random.Random(seed).choices(range(3, 250), k=n)
with edgeinfer.load(path, draft="none", cache_disk=size) as engine:
    for n in range(6):
        prompt = [*tokens(700, 0)[: 150 * (n % 3)], *tokens(200, seed * (n % 2) + n)]
        print(engine.generate(prompt, max_tokens=40, temperature=0.8, seed=4).tokens, flush=True)
    assert engine.contexts.problem is None, engine.contexts.problem
"""


@pytest.mark.parametrize("size", ["64MiB", "400KiB", "0"])
def test_processes_share_a_folder(path: Path, folder: Path, size: str, tmp_path: Path) -> None:
    def run(seed: int, size: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(path), size if size != "0" else "1", str(seed)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    both = [run(seed, size) for seed in (1, 2)]
    found = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    for seed, text in zip((1, 2), found, strict=True):
        alone = run(seed, "1")
        assert alone.communicate(timeout=120)[0] == text and text.count("\n") == 6
    if size != "0":
        assert total(folder) <= (400 << 10 if size == "400KiB" else 64 << 20)
        assert not list(folder.glob(".partial*"))


KILLED = """
import os, sys, time
from edgeinfer.context_cache import folder as folders
from edgeinfer.context_cache import model_content
import edgeinfer
from random import Random
path = sys.argv[1]
n = 0
utime = os.utime
def stalls(*arguments, **options):
    global n
    n += 1
    if n == 3:  # the file is written, and has no name yet
        print("writing", flush=True)
        time.sleep(600)
    utime(*arguments, **options)
folders.os.utime = stalls
with edgeinfer.load(path, draft="none", cache_disk="64MiB") as engine:
    engine.generate(Random(0).choices(range(3, 250), k=700), max_tokens=40, temperature=0.8, seed=4)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks(path: Path, folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    assert len(names(folder)) == 2 and len(list(folder.glob(".partial*"))) == 1
    found = ask(path)
    assert found.usage.cached_tokens == 256 and found.tokens == ask(path, cache_disk=None).tokens
    assert not list(folder.glob(".partial*")) and len(names(folder)) == 6


def test_a_lock_that_another_process_holds_stops_nothing(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(folders, "_LOCK_SECONDS", 0.01)
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ask(path).usage.cached_tokens == 0
        assert names(folder) == []
    ask(path)
    assert ask(path).usage.cached_tokens == FOUND


# ---- requests that end early, and engines ----------------------------------------------------------------------------


def test_a_text_that_is_left_while_it_is_read_frees_its_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(path)
    from edgeinfer.context_cache.kept_text import KeptText

    read, whole = KeptText._read_blocks, ask(path)
    with load(path, parallel=1) as engine:

        def slow(text: KeptText, blocks: Sequence[Block], tokens: list[int]) -> bool:
            time.sleep(0.05)
            if blocks[0].number == 2:
                engine.interrupt()
            return read(text, blocks, tokens)

        monkeypatch.setattr(KeptText, "_read_blocks", slow)
        assert engine.generate(PROMPT, **ASKED).finish_reason == "interrupted"
        assert not engine.scheduler.texts
        monkeypatch.undo()
        assert engine.generate(PROMPT, **ASKED).tokens == whole.tokens


def test_a_windowed_text_that_is_left_while_it_is_read(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been read of it by then has no windows: nothing may go on after it."""
    path = write_tiny_model(models / "left.gguf", "gemma3", n_ctx_train=1024)
    options: dict[str, Any] = {"n_batch": 32, "parallel": 1}
    whole = ask(path, **options)
    from edgeinfer.context_cache.kept_text import KeptText

    read = KeptText._read_blocks
    with load(path, **options) as engine:

        def stops(text: KeptText, blocks: Sequence[Block], tokens: list[int]) -> bool:
            is_third = text.segments.n_past == 256
            if is_third:
                engine.interrupt()
            return not is_third and read(text, blocks, tokens)

        with monkeypatch.context() as patch:
            patch.setattr(KeptText, "_read_blocks", stops)
            assert engine.generate(PROMPT, **ASKED).finish_reason == "interrupted"
        assert engine.session.n_past == 0
        assert engine.generate(PROMPT, **ASKED).tokens == whole.tokens


def test_texts_that_are_put_aside_find_themselves_on_disk(path: Path) -> None:
    prompts = [tokens(300, seed=n) for n in range(4)]
    options: dict[str, Any] = {"n_ctx": 512, "parallel": 4, "n_batch": 64}
    asked: dict[str, Any] = {"max_tokens": 150, "temperature": 0.8, "seed": 3}
    with load(path, cache_disk=None, n_ctx=512) as engine:
        expected = [engine.generate(prompt, **asked).tokens for prompt in prompts]
    with load(path, **options) as engine:
        assert [each.tokens for each in engine.generate_many(prompts, **asked)] == expected


def test_nothing_is_left_of_a_closed_engine(path: Path) -> None:
    before = set(threading.enumerate())
    n_files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    ask(path)
    assert not set(threading.enumerate()) - before
    if n_files:
        assert len(os.listdir("/proc/self/fd")) <= n_files


def test_a_large_model_is_hashed_behind_the_answer_and_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    old = time.time() - 60
    os.utime(path, (old, old))
    monkeypatch.setattr(model_content, "_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(model_content, "_SETTLED_NS", 0)
    assert ask(path).usage.cached_tokens == 0
    assert ask(path).usage.cached_tokens == FOUND
    monkeypatch.setattr(model_content.ModelContent, "compute", failing(errno.EIO))
    assert ask(path).usage.cached_tokens == FOUND
    os.utime(path, (old + 1, old + 1))
    with load(path) as engine:
        assert engine.generate(PROMPT, **ASKED).usage.cached_tokens == 0
        assert engine.contexts is not None and engine.contexts.flush(60)
        assert engine.contexts.problem is not None


def test_what_cannot_be_kept_is_said(models: Path, path: Path) -> None:
    hybrid = write_tiny_hybrid(models / "hybrid.gguf", "qwen35", "Q8_0", n_ctx_train=256)
    with pytest.warns(RuntimeWarning, match="contexts are not kept on disk: the model has recurrent layers"):
        load(hybrid).close()
    with pytest.warns(RuntimeWarning, match="contexts are not kept on disk: the reference backend"):
        load(path, backend="reference").close()
    load(hybrid, cache_disk="auto").close()
    for wrong in (-1, True, "many", "10%", 1.5):
        with pytest.raises(InvalidArgument, match="cache_disk"):
            load(path, cache_disk=wrong)


def test_a_text_that_was_cut_is_not_written(path: Path) -> None:
    with load(path, cache_disk=None) as engine:
        session = engine.session
        assert isinstance(session, SegmentedSession) and (segments := session.segments) is not None
        engine.generate(PROMPT, max_tokens=1)
        stamps = [segments.stamp(number) for number in range(5)]
        assert [len(list(segments.pieces(0, number, 128, stamps[number]))) for number in range(5)] == [2] * 5  # layers
        session.truncate(300)
        assert list(segments.pieces(0, 1, 128, stamps[1]))
        for number in (2, 3):
            with pytest.raises(LookupError):
                list(segments.pieces(0, number, 128, stamps[number]))
        session.forward(PROMPT[300:600], logits=())
        session.commit(range(300))
        with pytest.raises(LookupError):
            list(segments.pieces(0, 2, 128, stamps[2]))
        assert list(segments.pieces(0, 2, 128, segments.stamp(2)))
        with pytest.raises(LookupError):
            list(segments.pieces(0, 4, 128, segments.stamp(4)))
    with pytest.raises(LookupError):
        list(segments.pieces(0, 1, 128, stamps[1]))


@pytest.mark.parametrize("age, is_kept", [(1, False), (3, True)])
def test_the_hash_of_a_file_is_kept_once_nobody_writes_to_it_any_more(
    models: Path, age: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """age: seconds since it was written. Within two seconds a second change might leave its times as they are."""
    path = write_tiny_model(models / f"aged-{age}.gguf")
    written = max(path.stat().st_mtime_ns, path.stat().st_ctime_ns)
    monkeypatch.setattr(model_content.time, "time_ns", lambda: written + age * 1_000_000_000)
    with ModelFile.open(path) as file:
        content = model_content.ModelContent(file)
        content.close()
    assert content.value is not None
    monkeypatch.setattr(model_content.ModelContent, "compute", lambda self, is_wanted=None: None)
    with ModelFile.open(path) as file:
        again = model_content.ModelContent(file)
        again.close()
    assert again.value == (content.value if is_kept else None)
