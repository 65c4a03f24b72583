"""llama.cpp ends its process: the host goes on, says how it ended, and leaves nothing behind."""

import gc
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from other_models import write_gpt2
from staging import CRASH, CRASH_WITH_EXTRA_BUFFERS, Stage, wait_for
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.driver_probe import interpreter
from edgeinfer.backends.llama_cpp import LlamaCppBackend, LlamaCppSession
from edgeinfer.backends.llama_cpp import process as process_module
from edgeinfer.common.errors import BackendCrashed, BackendLost, BackendUnavailable, ModelFileChanged
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models.gguf import GGMLType, ModelFile

TOKENS = np.arange(40, dtype=np.int32)


@pytest.fixture
def stage(llama_cpp: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    (tmp_path / "stage").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Stage(tmp_path / "stage", monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantised so that llama.cpp lays its weights out anew."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", "llama", "Q4_0", n_embd=256)


def open_session(path: Path, n_ctx: int = 64) -> LlamaCppSession:
    backend = LlamaCppBackend()
    with ModelFile.open(path) as file:
        return backend.load(file, None, backend.plan(file, None, LoadSettings(n_ctx)), Device(1)).session()


def is_running(pid: int) -> bool:
    """Whether there is such a process, a zombie too."""
    return Path(f"/proc/{pid}").exists()


def ends(pid: int, seconds: float = 30.0) -> bool:
    """Whether a process of another parent ends soon; a zombie has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def on_pass(number: int, what: str) -> str:
    """Source for a stage: something that happens in the pass of that number, 1 or more."""
    return (
        CRASH
        + f"""
import signal
_before = llama_cpp.llama_decode

def decode_until(context, batch):
    status = _before(context, batch)
    if len((_folder / "passes").read_text().split()) == {number}:
        {what}
    return status

llama_cpp.llama_decode = decode_until
"""
    )


# ---- extra buffers -----------------------------------------------------------------------------------------------


def test_where_extra_buffers_crash_it_runs_without_them_and_remembers(stage: Stage, model: Path) -> None:
    expected = open_session(model).forward(TOKENS, logits="all").logits
    assert stage.passes() == [1, 8, 40]
    stage.play(CRASH_WITH_EXTRA_BUFFERS)
    with pytest.warns(RuntimeWarning, match="crashes on this machine with its extra buffers .*SIGSEGV.*in the tiles"):
        session = open_session(model)
    assert stage.passes() == [1]  # the first one crashed before it was noted
    logits = session.forward(TOKENS, logits="all").logits
    assert np.abs(logits - expected).max() < 0.1 * expected.std()  # 8-bit activations, in blocks of other sizes
    assert not session.model._loaded.request.extra_buffers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = open_session(model)
    assert stage.passes() == [40, 1]  # no crash in between
    assert np.array_equal(again.forward(TOKENS, logits="all").logits, logits)


def test_an_engine_without_extra_buffers_says_so_once(stage: Stage, model: Path) -> None:
    stage.play(CRASH_WITH_EXTRA_BUFFERS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = edgeinfer.load(model, backend="llama.cpp", n_threads=1)
    (warning,) = caught
    assert warning.category is RuntimeWarning and warning.filename == __file__
    with engine:
        assert len(engine.generate("hello", max_tokens=5, temperature=0.0).tokens) > 0


def test_what_crashed_is_remembered_for_that_library_alone(stage: Stage, model: Path) -> None:
    stage.play(CRASH_WITH_EXTRA_BUFFERS)
    with pytest.warns(RuntimeWarning, match="extra buffers"):
        open_session(model)
    stage.play(CRASH_WITH_EXTRA_BUFFERS + "\nllama_cpp.__version__ = '0.3.37'")
    with pytest.warns(RuntimeWarning, match="extra buffers"):
        open_session(model)


def test_without_a_cache_folder_it_falls_back_each_time(
    stage: Stage, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    stage.play(CRASH_WITH_EXTRA_BUFFERS)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="extra buffers"):
            assert open_session(model).forward([1, 2]).logits.shape == (1, 291)


def test_a_crash_with_and_without_them_is_no_matter_of_extra_buffers(stage: Stage, model: Path, tmp_path: Path) -> None:
    stage.play(CRASH + "llama_cpp.llama_decode = lambda context, batch: crash('nothing helps')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BackendCrashed, match="crashed while it loaded the model: SIGSEGV.*nothing helps"):
            open_session(model)
    assert not (tmp_path / "cache" / "edgeinfer" / "llama.cpp").exists()


def test_a_process_that_is_killed_while_loading_is_not_started_again(stage: Stage, model: Path) -> None:
    stage.play(on_pass(1, "os.kill(os.getpid(), signal.SIGKILL)"))
    with pytest.raises(BackendCrashed, match="SIGKILL"):
        open_session(model)
    assert stage.passes() == [1]


# ---- before there is a session -----------------------------------------------------------------------------------


def write_norm_q8_1(path: Path) -> Path:
    """The last tensor of the file, a norm, has a type that llama.cpp cannot multiply by."""
    data = bytearray(write_tiny_model(path, "llama", "F32").read_bytes())
    name = b"blk.1.ffn_norm.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    assert struct.unpack_from("<I", data, at) == (1,)
    struct.pack_into("<I", data, at + 12, GGMLType.Q8_1)
    path.write_bytes(data)
    return path


def write_dynamic_rope(path: Path) -> Path:
    return write_tiny_model(path, "llama", "F32", metadata={"llama.rope.scaling.type": "dynamic"})


FATAL: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a norm in Q8_1": (write_norm_q8_1, "binary_op|unsupported types"),
    "rope": (write_dynamic_rope, "GGML_ASSERT"),
}


@pytest.mark.parametrize("kind", FATAL)
def test_a_file_on_which_llama_cpp_ends_its_process_is_refused_in_its_last_words(
    llama_cpp: ModuleType, tmp_path: Path, kind: str
) -> None:
    write, words = FATAL[kind]
    with pytest.raises(BackendUnavailable, match=f"m.gguf: llama.cpp crashed while .*: SIGABRT.*({words})") as caught:
        edgeinfer.load(write(tmp_path / "m.gguf"), backend="llama.cpp")
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("function", ["llama_model_load_from_file", "llama_init_from_model", "llama_get_memory"])
def test_a_crash_while_planning_is_told_and_the_backend_goes_on(stage: Stage, model: Path, function: str) -> None:
    stage.play(CRASH + f"llama_cpp.{function} = lambda *args: crash('what a file')")
    backend = LlamaCppBackend()
    with ModelFile.open(model) as file:
        with pytest.raises(
            BackendCrashed, match="m.gguf: llama.cpp crashed while .*SIGSEGV, its last line: what a file"
        ):
            backend.plan(file, None, LoadSettings(64))
        stage.play("")
        assert backend.plan(file, None, LoadSettings(64)).n_ctx == 64


def test_auto_says_what_native_lacks_and_how_llama_cpp_ended(stage: Stage, tmp_path: Path) -> None:
    stage.play(CRASH + "llama_cpp.llama_init_from_model = lambda *args: crash('not this one')")
    with pytest.raises(BackendCrashed, match="architecture 'gpt2' is not supported; .*not this one") as caught:
        edgeinfer.load(write_gpt2(tmp_path / "m.gguf"))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    "source, words",
    [
        (CRASH + "crash('no such instruction')", "SIGSEGV, its last line: no such instruction"),
        ("import os; os._exit(7)", "exit code 7, without a word"),
        ("raise SystemExit('not today')", "exit code 1, its last line: not today"),
        ("raise ZeroDivisionError('by design')", "exit code 1, its last line: ZeroDivisionError: by design"),
        ("time.sleep(1000)", "no sign of life within 1 s"),
        (CRASH + "crash('x' * 100000)", "its last line: x{300};"),
        (CRASH + "os.write(2, bytes(range(128, 256)) + b'\\n'); crash('')", "its last line: \ufffd+;"),
    ],
)
def test_a_process_that_does_not_start_is_a_backend_that_is_not_there(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    stage.play(source)
    if "sleep" in source:
        monkeypatch.setattr(process_module, "PATIENCE_SECONDS", 1)
    with pytest.raises(BackendUnavailable, match=words):
        LlamaCppBackend()


# ---- in a session ------------------------------------------------------------------------------------------------


def test_a_crash_in_an_answer_is_a_lost_backend_until_the_next_text(stage: Stage, model: Path) -> None:
    expected = open_session(model).forward(TOKENS[:10]).logits
    stage.passes()
    (stage.folder / "passes").unlink()
    stage.play(on_pass(5, "crash('halfway')"))
    session = open_session(model)
    session.forward(TOKENS[:10])
    session.commit(range(10))
    session.forward([1])
    session.commit([0])
    with pytest.raises(BackendLost, match="crashed on a pass of 1 tokens: SIGSEGV, its last line: halfway") as caught:
        session.forward([2])
    assert caught.value.exit_code == 5
    calls = lambda: session.forward([2]), lambda: session.commit([]), lambda: session.truncate(0), session.memory
    for call in (*calls, lambda: session.n_past):
        with pytest.raises(BackendLost, match="halfway"):
            call()
    session.interrupt()
    assert session.reuse_prefix(TOKENS) == 0 and session.n_past == 0
    assert not session.model._loaded.request.extra_buffers
    assert np.abs(session.forward(TOKENS[:10]).logits - expected).max() < 0.1 * expected.std()


def test_a_second_crash_on_starting_again_is_a_lost_backend_too(stage: Stage, model: Path) -> None:
    session = open_session(model)
    os.kill(session.model._process.pid, signal.SIGKILL)
    with pytest.raises(BackendLost, match="SIGKILL"):
        session.forward([1])
    stage.play(CRASH + "llama_cpp.llama_decode = lambda context, batch: crash('again')")
    for _ in range(2):
        with pytest.raises(BackendLost, match="SIGKILL.*started again, and failed: .*again"):
            session.reuse_prefix([1, 2])
    with pytest.raises(BackendLost, match="SIGKILL"):
        session.forward([1])
    stage.play("")
    assert session.reuse_prefix([1, 2]) == 0
    assert session.forward([1]).logits.shape == (1, 291)
    session.model.close()


def test_a_file_that_has_become_another_model_is_not_gone_on_with(stage: Stage, tmp_path: Path) -> None:
    session = open_session(write_tiny_model(tmp_path / "m.gguf", "llama", "F32"))
    os.kill(session.model._process.pid, signal.SIGKILL)
    with pytest.raises(BackendLost):
        session.forward([1])
    write_tiny_model(tmp_path / "m.gguf", "llama", "F32", n_vocab=300)
    for _ in range(2):
        with pytest.raises(ModelFileChanged, match="m.gguf: the file has changed while it was in use"):
            session.reuse_prefix([1])


def test_an_engine_goes_on_with_the_next_request(stage: Stage, model: Path) -> None:
    with edgeinfer.load(model, backend="llama.cpp", n_threads=1) as engine:
        expected = engine.generate("hello", max_tokens=5, temperature=0.0)
        os.kill(engine.session.model._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(BackendLost, match="SIGKILL"):
            engine.generate("hello", max_tokens=5, temperature=0.0)
        assert engine.generate("hello", max_tokens=5, temperature=0.0).tokens == expected.tokens


def test_a_process_is_deaf_to_ctrl_c_and_quiet(stage: Stage, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stage.play(on_pass(4, "print('to stdout'); os.system('echo to stderr >&2')"))
    session = open_session(model)
    os.kill(session.model._process.pid, signal.SIGINT)
    assert os.getpgid(session.model._process.pid) != os.getpgid(0)
    for _ in range(3):
        assert session.forward([1]).logits.shape == (1, 291)
    assert capfd.readouterr() == ("", "")


def test_what_a_process_prints_does_not_pile_up(stage: Stage, model: Path) -> None:
    stage.play(
        """
_quiet = llama_cpp.llama_decode

def loud_decode(context, batch):
    print("x" * 50000, flush=True)
    return _quiet(context, batch)

llama_cpp.llama_decode = loud_decode
"""
    )
    session = open_session(model)
    for _ in range(10):
        session.forward([1])
    assert 0 < os.fstat(session.model._process._words.fd).st_size < 200_000


# ---- nothing is left behind --------------------------------------------------------------------------------------


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("how", ["closed", "crashed", "killed", "dropped", "backend alone"])
def test_no_process_and_no_descriptor_is_left(stage: Stage, model: Path, how: str) -> None:
    stage.play(on_pass(3, "crash('now')") if how == "crashed" else "")
    gc.collect()  # what tests before this one left in cycles, with their errors
    before = open_files()
    if how == "backend alone":
        backend = LlamaCppBackend()
        assert backend._process is not None
        pid = backend._process.pid
        del backend
    else:
        session = open_session(model)
        pid = session.model._process.pid
        assert is_running(pid) and open_files() != before
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        if how in ("crashed", "killed"):
            with pytest.raises(BackendLost):
                session.forward([1])
        if how != "dropped":
            session.model.close()
        else:
            del session
    assert not is_running(pid)
    assert open_files() == before


def shared_by(*pids: int) -> set[str]:
    """What these processes have in /dev/shm, open or mapped. Other programs have theirs there."""
    paths: set[str] = set()
    for pid in pids:
        paths.update(str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir())
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        paths.update(fields[5] for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6)
    return {path for path in paths if path.startswith("/dev/shm/")}


HOST = """
import sys
from edgeinfer.backends.llama_cpp import LlamaCppBackend
from edgeinfer.models.gguf import ModelFile
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
file, backend = ModelFile.open(sys.argv[1]), LlamaCppBackend()
session = backend.load(file, None, backend.plan(file, None, LoadSettings(64)), Device(1)).session()
print(session.model._process.pid, flush=True)
sys.stdin.readline()
session.forward([1])
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("is_busy", [False, True])
def test_the_process_ends_with_its_host(stage: Stage, model: Path, sig: signal.Signals, is_busy: bool) -> None:
    stage.play(on_pass(3, "(_folder / 'busy').touch(); ctypes.CDLL(None).sleep(1000)"))
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert host.stdin is not None and host.stdout is not None
    pid = int(host.stdout.readline())
    if is_busy:
        host.stdin.write("\n")
        host.stdin.flush()
        wait_for(stage.folder / "busy")
    shared = shared_by(pid, host.pid)
    host.send_signal(sig)
    host.communicate()
    assert ends(pid)
    assert not any(map(os.path.exists, shared))


def test_what_does_not_stop_is_killed(stage: Stage, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.backends.llama_cpp import worker as worker_module

    monkeypatch.setattr(worker_module, "_STOP_SECONDS", 0.5)
    stage.play(on_pass(3, "os.kill(os.getppid(), signal.SIGINT); ctypes.CDLL(None).sleep(1000)"))
    session = open_session(model)
    with pytest.raises(KeyboardInterrupt):
        session.forward([1])
    with pytest.raises(BackendLost):
        session.forward([1])
    assert session.reuse_prefix([]) == 0


# ---- any host ----------------------------------------------------------------------------------------------------


def test_without_memfd_and_with_no_room_in_dev_shm_it_runs(
    stage: Stage, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = open_session(model).forward(TOKENS, logits="all").logits
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))

    def forbidden(*args: object) -> int:
        return os.open(tmp_path / "nowhere" / "x", os.O_RDONLY)

    for memfd in ("missing", "forbidden"):
        with monkeypatch.context() as patch:
            if memfd == "missing":
                patch.delattr(os, "memfd_create", raising=False)
            else:
                patch.setattr(os, "memfd_create", forbidden, raising=False)
            session = open_session(model)
            assert list(folder.iterdir()) == []
            assert np.array_equal(session.forward(TOKENS, logits="all").logits, expected)


def test_a_host_without_stdin_stdout_and_stderr_has_its_logits(stage: Stage, model: Path, tmp_path: Path) -> None:
    script = HOST.replace("print(session.model._process.pid, flush=True)\nsys.stdin.readline()\n", "") + (
        "import numpy as np; np.save(sys.argv[2], session.forward(list(range(40)), logits='all').logits)"
    )
    out = tmp_path / "logits.npy"
    code = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", script, model, out], check=False
    ).returncode
    assert code == 0
    assert np.array_equal(np.load(out), open_session(model).forward(TOKENS, logits="all").logits)


def test_an_embedded_python_starts_the_one_it_belongs_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: Stage, model: Path
) -> None:
    assert interpreter() == sys.executable
    for name in ("", None, "/usr/bin/blender", str(tmp_path / "python-that-is-gone")):
        monkeypatch.setattr(sys, "executable", name)
        found = subprocess.run([interpreter(), "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
        assert found.stdout.strip() == sys.version
    assert open_session(model).forward([1]).logits.shape == (1, 291)
    for name in ("prefix", "exec_prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    before = open_files()
    with pytest.raises(BackendUnavailable, match="set sys.executable to the file of a Python"):
        LlamaCppBackend()
    assert open_files() == before


def test_a_folder_that_looks_like_a_module_is_not_taken_for_it(
    llama_cpp: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process looks for modules where its host does, and not in the folder that it was started in."""
    for name in ("llama_cpp.py", "json.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert "" not in sys.path and str(tmp_path) not in sys.path
    assert open_session(model).forward([1]).logits.shape == (1, 291)


def test_a_fork_of_the_host_does_not_end_the_process(stage: Stage, model: Path) -> None:
    session = open_session(model)
    child = os.fork()
    if child == 0:
        session.model.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert session.forward([1]).logits.shape == (1, 291)


def test_no_core_is_dumped(stage: Stage, model: Path) -> None:
    session = open_session(model)
    assert resource.prlimit(session.model._process.pid, resource.RLIMIT_CORE)[0] == 0


def test_logits_of_more_rows_than_one_pass_has_come_whole(stage: Stage, model: Path) -> None:
    session = open_session(model, n_ctx=512)
    tokens = np.arange(300, dtype=np.int32) % 200
    every = session.forward(tokens, logits="all").logits
    kept = every.copy()
    last = session.forward(tokens[:5], logits="all").logits
    assert np.array_equal(every, kept)  # what was given stays what it is
    assert np.abs(every[:5] - last).max() < 0.2 * every.std()
    again = session.forward(tokens, logits="all").logits
    assert np.array_equal(again, kept)
