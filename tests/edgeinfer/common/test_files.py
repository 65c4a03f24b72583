"""Names of files that callers give, the user's folders, and files that are written atomically."""

import errno
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.backends.native.packing.packed import write_packed
from edgeinfer.common.arguments import check_file_name
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.files import (
    cache_folder,
    check_writable,
    folder_beside,
    home_folder,
    state_folder,
    temporary_folder,
    whole_folder,
    write_whole,
    written_whole,
)
from edgeinfer.exporters.gguf.writer import write_gguf
from edgeinfer.models.gguf import ModelFile
from edgeinfer.speculation.calibration import load_curve, save_curve
from edgeinfer.speculation.cost import CostCurve

ME = pwd.getpwuid(os.getuid()).pw_name
MY_HOME = pwd.getpwuid(os.getuid()).pw_dir


@pytest.fixture
def nameless(monkeypatch):
    """A user whom the system does not know, as with docker run --user 12345."""
    monkeypatch.delenv("HOME", raising=False)
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)


# ---- Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, meant",
    [
        ("~", "HOME"),
        ("~/", "HOME"),
        ("~/a b/x.gguf", "HOME/a b/x.gguf"),
        ("~//x.gguf", "HOME/x.gguf"),
        (f"~{ME}/x.gguf", f"{MY_HOME}/x.gguf"),
        (f"~{ME}", MY_HOME),
        ("x/~/y", "x/~/y"),
        ("x~", "x~"),
        ("/~", "/~"),
        ("./~", "CWD/~"),
        ("./~/x", "CWD/~/x"),
        (f"./~{ME}", f"CWD/~{ME}"),
        ("$HOME", "$HOME"),  # a shell's, not ours
    ],
)
def test_a_tilde_in_front_is_a_home_folder_and_nowhere_else(given, meant, tmp_path, monkeypatch):
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(cwd)
    expected = Path(meant.replace("CWD", str(cwd)).replace("HOME", str(home)) if meant != "$HOME" else meant)
    found = check_file_name("path", given)
    assert found == expected
    assert check_file_name("path", found) == found  # names pass through several of these checks


def test_a_path_object_and_bytes_of_no_text_are_names_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_file_name("path", Path("~/x")) == tmp_path / "x"
    assert os.fsencode(check_file_name("path", os.fsdecode(b"~/\xff"))) == os.fsencode(tmp_path) + b"/\xff"


@pytest.mark.parametrize("given", ["~", "~/x.gguf"])
def test_without_a_home_folder_a_tilde_is_a_plain_error(given, nameless):
    with pytest.raises(InvalidArgument, match=rf"path {given}: this user has no home folder: set HOME.* is \./{given}"):
        check_file_name("path", given)


@pytest.mark.parametrize("home", ["", "relative", "./here"])
def test_a_home_that_is_no_absolute_path_is_none(home, nameless, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert home_folder() is None
    with pytest.raises(InvalidArgument, match="no home folder"):
        check_file_name("path", "~/x")


@pytest.mark.parametrize("home", ["", "relative"])
def test_the_system_knows_the_home_folder_where_the_variable_does_not(home, monkeypatch):
    monkeypatch.setenv("HOME", home)
    assert home_folder() == MY_HOME


def test_a_user_whom_nobody_knows_is_a_plain_error():
    with pytest.raises(InvalidArgument, match=r"there is no user 'no-such-user'; a file that is called so is \./~no"):
        check_file_name("path", "~no-such-user/x")


@pytest.mark.parametrize("given", ["", None, 5, b"", Path])
def test_what_names_no_file_is_refused(given):
    with pytest.raises(InvalidArgument, match="path must be the name of a file"):
        check_file_name("path", given)


def test_the_python_interface_takes_a_tilde_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tiny_model(tmp_path / "tiny.gguf")
    with ModelFile.open("~/tiny.gguf") as file:
        assert file.path == tmp_path / "tiny.gguf"
    with edgeinfer.load("~/tiny.gguf", backend="reference") as engine:
        chat = engine.chat("be brief")
        chat.save("~/talk.jsonl")
        chat.system = None
        chat.load(Path("~/talk.jsonl"))
        assert chat.system == "be brief" and (tmp_path / "talk.jsonl").exists()


def test_a_model_and_a_chat_that_are_called_tilde_can_be_reached(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "~")
    with edgeinfer.load("./~", backend="reference") as engine:
        chat = engine.chat("be brief")
        chat.save("./~talk")
        chat.load("./~talk")
        assert (tmp_path / "~talk").exists()


# ---- The user's folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder, variable", [(cache_folder, "XDG_CACHE_HOME"), (state_folder, "XDG_STATE_HOME")])
def test_folders_of_the_user_are_absolute_or_none(folder, variable, tmp_path, monkeypatch):
    if sys.platform != "linux":
        pytest.skip("XDG is Linux's")
    monkeypatch.setenv(variable, str(tmp_path))
    assert folder() == tmp_path / "edgeinfer"
    monkeypatch.setenv(variable, "relative")
    found = folder()
    assert found is None or found.is_absolute()
    monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path in folder().parents
    assert not folder().exists()


@pytest.mark.parametrize("variables", [{}, {"HOME": ""}, {"HOME": "relative"}, {"XDG_CACHE_HOME": "relative"}])
def test_without_a_home_folder_there_are_none(variables, nameless, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() is None and state_folder() is None


@pytest.mark.parametrize("home", ["~", "~/x", "RuntimeError"])
def test_what_platformdirs_says_without_a_home_folder_makes_no_folder_called_tilde(home, monkeypatch):
    def answer(application):
        if home == "RuntimeError":  # since 4.10
            raise RuntimeError("could not determine the home directory")
        return Path(home) / application  # before

    monkeypatch.setattr("platformdirs.user_cache_path", answer)
    monkeypatch.setattr("platformdirs.user_state_path", answer)
    assert cache_folder() is None and state_folder() is None


def test_costs_that_cannot_be_kept_are_measured_again_without_a_word(tmp_path, recwarn):
    curve = CostCurve(0, {1: 0.01, 2: 0.012}, 0, {})
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file", tmp_path / "file" / "costs", Path("/proc/costs")):
        save_curve("key", curve, folder)
        assert load_curve("key", folder) is None
    save_curve("key", curve, tmp_path / "new" / "costs")
    assert load_curve("key", tmp_path / "new" / "costs") == curve
    assert not recwarn.list


# ---- Writing ---------------------------------------------------------------------------------------------------------


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_that_the_umask_gives(umask, tmp_path):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "new", b"text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~umask
    assert (tmp_path / "new").read_bytes() == b"text" and names_in(tmp_path) == ["new"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o755, 0o666])
def test_a_file_that_is_there_keeps_its_mode(mode, tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_whole(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == mode and path.read_bytes() == b"new"


def test_a_file_that_is_there_keeps_its_owner_where_that_is_allowed(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root gives files away")
    path = tmp_path / "old"
    path.write_bytes(b"old")
    os.chown(path, 12345, 54321)
    path.chmod(0o640)
    write_whole(path, b"new")
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12345, 54321, 0o640)


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("link", ["{}/real", "real", "chain"])
def test_through_a_link_its_target_is_written_and_the_link_stays(link, is_there, tmp_path):
    target = tmp_path / "real"
    if is_there:
        target.write_bytes(b"old")
        target.chmod(0o640)
    (tmp_path / "chain").symlink_to("real")
    path = tmp_path / "folder" / "link"
    path.parent.mkdir()
    path.symlink_to(link.format(tmp_path) if link.startswith("{") else f"../{link}")
    write_whole(path, b"new")
    assert path.is_symlink() and not target.is_symlink() and target.read_bytes() == b"new"
    assert names_in(path.parent) == ["link"] and names_in(tmp_path) == ["chain", "folder", "real"]
    assert not is_there or stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_link_into_a_folder_that_is_not_there_names_that_folder(tmp_path):
    (tmp_path / "link").symlink_to("nowhere/file")
    with pytest.raises(FileNotFoundError, match="no such folder.*nowhere"):
        write_whole(tmp_path / "link", b"new")
    assert names_in(tmp_path) == ["link"]


def circle(folder):
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    return folder / "a"


def link_to_itself(folder):
    (folder / "a").symlink_to("a")
    return folder / "a"


def link_to_a_folder(folder):
    (folder / "there").mkdir()
    (folder / "a").symlink_to("there")
    return folder / "a"


def unread_pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def bound_socket(folder):
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(folder / "s"))
    return folder / "s"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: folder, "This is a folder"),
        (lambda folder: folder / "x" / "..", "This is a folder|No such file|no such folder"),
        (link_to_a_folder, "This is a folder"),
        (lambda folder: folder / "nowhere" / "file", "no such folder"),
        (lambda folder: Path("/dev/null/file"), "Not a directory|no such folder"),
        (circle, "Too many levels"),
        (link_to_itself, "Too many levels"),
        (lambda folder: folder / ("n" * 300), "too long"),
        (lambda folder: folder / "a\0b", "No file can have this name: embedded null"),
        (lambda folder: folder / "\ud800", "No file can have this name: .*surrogates"),
        (unread_pipe, "Nothing reads from it"),
        (bound_socket, "Nothing reads from it|No such device"),
        (lambda folder: Path("/proc/version"), "Permission denied|No such file|Nothing can|Input/output"),
    ],
)
def test_where_nothing_can_be_written_the_error_names_it_and_nothing_is_left(make, message, tmp_path):
    path = make(tmp_path)
    before = names_in(tmp_path)
    for write in (lambda: write_whole(path, b"new"), lambda: check_and_write(path)):
        with pytest.raises(OSError, match=message) as raised:
            write()
        assert raised.value.filename and ".partial" not in str(raised.value)
        assert names_in(tmp_path) == before


def check_and_write(path):
    check_writable(path)
    write_whole(path, b"new")


@pytest.mark.parametrize("case", ["folder", "file"])
def test_what_is_read_only_stays_as_it_is(case, tmp_path, monkeypatch):
    folder = tmp_path / "closed"
    folder.mkdir()
    path = folder / "talk.jsonl"
    path.write_bytes(b"old")
    closed, message = {
        "folder": (folder, "Nothing can be written in this folder"),
        "file": (path, "Permission denied"),
    }[case]
    closed.chmod(0o555)
    if os.getuid() == 0:  # for whom everything is open: as others would find it; whole commands in test_environment
        monkeypatch.setattr(os, "access", lambda path, mode: bool(os.stat(path).st_mode & 0o200))
    try:
        for write in (check_writable, lambda path: write_whole(path, b"new")):
            with pytest.raises(PermissionError, match=f"{message}: '{closed}'"):
                write(path)
    finally:
        folder.chmod(0o755)
    assert path.read_bytes() == b"old" and names_in(folder) == ["talk.jsonl"]


def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    path = tmp_path / "old"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and names_in(tmp_path) == ["old"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
def test_writing_that_is_stopped_half_way_leaves_the_old_file(error, tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"old")
    with pytest.raises(error), written_whole(path) as file:
        file.write(b"half")
        file.flush()
        raise error
    assert path.read_bytes() == b"old" and names_in(tmp_path) == ["old"]


def test_a_name_as_long_as_names_may_be_is_written(tmp_path):
    for name in ("n" * 255, "é" * 127):
        write_whole(tmp_path / name, b"new")
        assert (tmp_path / name).read_bytes() == b"new"


def test_what_a_killed_program_left_stops_no_later_one(tmp_path):
    (tmp_path / f"x.gguf.partial-{os.getpid()}").write_bytes(b"half")  # in a container all have the same number
    write_whole(tmp_path / "x.gguf", b"new")
    assert (tmp_path / "x.gguf").read_bytes() == b"new"


def test_a_pipe_with_a_reader_gets_the_text(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    descriptor = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)

    def drain():
        while piece := os.read(descriptor, 65536):
            read.append(piece)

    with written_whole(tmp_path / "pipe") as file:
        reader = threading.Thread(target=drain)
        reader.start()
        file.write(b"x" * 1_000_000)  # more than a pipe holds
    reader.join()
    os.close(descriptor)
    assert len(b"".join(read)) == 1_000_000 and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_standard_output_can_be_named_as_a_file(name, kind, tmp_path):
    if not os.path.exists(name):
        pytest.skip(f"there is no {name}")
    code = f"""
from pathlib import Path
from edgeinfer.common.files import write_whole
print("before", flush=True)
write_whole(Path({name!r}), b"text\\n")
print("after")
"""
    if kind == "pipe":
        found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    else:
        with (tmp_path / "out").open("wb") as out:
            subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
        found = (tmp_path / "out").read_bytes()
    assert found == b"before\ntext\nafter\n"


def test_the_null_device_takes_everything_and_stays_a_device():
    write_whole(Path(os.devnull), b"new")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_every_writer_of_the_package_goes_through_links_and_keeps_modes(tmp_path):
    real = tmp_path / "real"
    weights = np.zeros(64, np.uint8)
    model = write_tiny_model(tmp_path / "tiny.gguf")
    with edgeinfer.load(model, backend="reference") as engine, ModelFile.open(model) as file:
        chat = engine.chat("be brief")
        writers = {
            "chat": chat.save,
            "gguf": lambda path: write_gguf(path, {"a": 1}, []),
            "packed": lambda path: write_packed(path, file, weights, "2"),
        }
        for name, write in writers.items():
            link = tmp_path / f"link to {name}"
            link.symlink_to(real)
            real.write_bytes(b"old")
            real.chmod(0o640)
            write(link)
            assert link.is_symlink() and real.read_bytes() != b"old", name
            assert stat.S_IMODE(real.stat().st_mode) == 0o640, name


def test_a_folder_as_the_target_of_save_leaves_nothing_behind_and_says_so(tmp_path):
    model = write_tiny_model(tmp_path / "tiny.gguf")
    (tmp_path / "folder").mkdir()
    with edgeinfer.load(model, backend="reference") as engine:
        with pytest.raises(IsADirectoryError, match="This is a folder, expected a file"):
            engine.chat().save(tmp_path / "folder")
        engine.chat("é").save(tmp_path / "talk.jsonl")
    assert names_in(tmp_path) == ["folder", "talk.jsonl", "tiny.gguf"] and names_in(tmp_path / "folder") == []
    assert json.loads((tmp_path / "talk.jsonl").read_text())["content"] == "é"


def test_no_other_code_writes_files_in_a_way_of_its_own():
    """Files that are renamed into place, temporary names and home folders have one owner each."""
    root = Path(__file__).parents[3]
    owners = {
        "edgeinfer/common/files.py",
        "exporters/onnx.py",  # a model of two files, whose names change together
        "edgeinfer/context_cache/folder.py",  # under a lock that other processes wait for
    }
    folders = [root / name for name in ("edgeinfer", "backends", "exporters", "models")]
    for path in (path for folder in folders if folder.is_dir() for path in folder.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(root).as_posix()
        for word in (
            "expanduser",
            "Path.home",
            "getpass",
            "mkstemp",
            "NamedTemporary",
            "os.replace",
            "platformdirs",
        ):
            assert word not in text or name in owners, f"{name} has {word}: edgeinfer.common.files is the place for it"


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_whole_or_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "package"
    with whole_folder(out, ["*.txt"]) as folder:
        (folder / "a.txt").write_text("1")
        assert not out.exists()
    with pytest.raises(KeyboardInterrupt), whole_folder(out, ["*.txt"]) as folder:
        (folder / "b.txt").write_text("2")
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="No space left on device: '.*package'"), whole_folder(out, ["*.txt"]):
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write says it, which knows no name
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("a.txt", "1")]
    with whole_folder(out, ["*.txt"]) as folder:  # all in it is what such a folder has, so it is replaced
        (folder / "b.txt").write_text("2")
    assert [path.name for path in out.iterdir()] == ["b.txt"]
    (out / "mine").touch()
    with pytest.raises(FileExistsError, match="has other files, such as 'mine'"), whole_folder(out, ["*.txt"]):
        raise AssertionError("it must not begin")
    assert sorted(path.name for path in out.iterdir()) == ["b.txt", "mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["package"]
    (tmp_path / "file").touch()
    for place, error in ((tmp_path / "file", NotADirectoryError), (tmp_path / "none" / "x", FileNotFoundError)):
        with pytest.raises(error), whole_folder(place, ["*"]):
            raise AssertionError("it must not begin")


@pytest.mark.parametrize("opened", ["folder_beside(out)", "whole_folder(out, ['*'])", "temporary_folder()"])
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(
    opened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "edgeinfer"  # is what temporary folders are called too
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = f"""
import os, signal, tempfile
from pathlib import Path
from edgeinfer.common.files import *
tempfile.tempdir, out = {str(tmp_path)!r}, Path({str(out)!r})
with {opened} as folder:
    (folder / "half").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    (killed,) = tmp_path.iterdir()
    (others := tmp_path / "edgeinfer.partial-mine").mkdir()
    opens = {"folder_beside": lambda: folder_beside(out), "whole_folder": lambda: whole_folder(out, ["*"])}
    opens["temporary_folder"] = temporary_folder
    begin = opens[opened.partition("(")[0]]
    with begin() as first, begin() as second:
        assert not killed.exists() and first != second
        assert sorted(tmp_path.iterdir()) == sorted([first, second, others])
    assert set(tmp_path.iterdir()) <= {others, out}


def test_a_replaced_folder_stays_until_another_has_its_name(tmp_path: Path) -> None:
    out, replaced = tmp_path / "package", tmp_path / "package.replaced-0123abcd"
    replaced.mkdir()  # a kill between the two renames
    with pytest.raises(KeyboardInterrupt), whole_folder(out, ["*"]):
        raise KeyboardInterrupt
    assert replaced.exists()
    for _ in range(2):
        with whole_folder(out, ["*"]):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["package"]
