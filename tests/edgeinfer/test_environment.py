"""The command and the library where the machine lacks what programs take for granted.

Streams that are closed, full or without a reader; users without a name, a home or a folder that they may write in;
locales and terminals that can show little.
"""

import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

MAIN = "from edgeinfer.cli import main; main(prog_name='edgeinfer')"
NOBODY = 54321  # a user whom no passwd file has
GENERATE = ("generate", "hello", "-m", "MODEL", "-n", "4", "-s", "1", "--backend", "reference")
CHAT = ("chat", "hello", "-m", "MODEL", "-n", "4", "-s", "1", "--backend", "reference")
COMMANDS = {  # and whether what they make is on standard output, or a file
    "chat": (CHAT, "stdout"),
    "generate": (GENERATE, "stdout"),
    "generate --json": ((*GENERATE, "--json"), "stdout"),
    "inspect": (("inspect", "MODEL", "--tensors"), "stdout"),
    "bench": (("bench", "MODEL", "--rounds", "2", "-t", "1", "--csv"), "stdout"),
    "devices": (("devices", "--json"), "stdout"),
    "help": (("--help",), "stdout"),
    "help of chat": (("chat", "--help"), "stdout"),
    "version": (("--version",), "stdout"),
    "pack": (("pack", "MODEL"), "MODEL.packed"),
    "export": (("export", "TERNARY", "--to", "ternary", "-o", "OUT", "--format", "tq2_0"), "OUT"),
}
SAME = {"chat", "generate", "inspect", "help", "help of chat", "version"}  # the same text each time
CLOSED = "error: standard output cannot be written: it is closed\n"


class Machine:
    """A model in a folder that all users can reach, and commands that are run beside it."""

    def __init__(self, folder):
        self.folder = folder
        folder.chmod(0o755)
        self.cwd = folder / "cwd"
        self.cwd.mkdir()
        self.names = {
            "MODEL": write_tiny_model(folder / "tiny.gguf"),
            "TERNARY": write_tiny_model(folder / "trits.gguf", "bitnet-25", tensor_type="TQ1_0"),
            "OUT": folder / "out.gguf",
        }
        self.names["MODEL.packed"] = Path(f"{self.names['MODEL']}.packed")

    def run(self, arguments, *, redirect="", user=(), cwd=None, code=MAIN, **variables):
        """Run a command; a variable that is None is not set. redirect: as a shell has it, "<&- 2>/dev/full".

        user: the command that makes the process another user's.
        """
        command = [*user, sys.executable, "-c", code, *(str(self.names.get(word, word)) for word in arguments)]
        cache = self.folder / "cache"
        others = ("EDGEINFER_", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONVERBOSE")  # which have more on stderr
        environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        environment |= {"XDG_CACHE_HOME": str(cache), "XDG_STATE_HOME": str(cache), **variables}
        return subprocess.run(
            ["bash", "-c", f"{shlex.join(command)} {redirect}"],
            **{"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120},
            **{"cwd": cwd or self.cwd, "errors": "replace"},
            env={name: value for name, value in environment.items() if value is not None},
        )


@pytest.fixture(scope="module")
def machine():
    with tempfile.TemporaryDirectory(dir=folder_of_all_users()) as name:  # pytest's folders are for one user
        yield Machine(Path(name))


def folder_of_all_users():
    """The usual one for temporary files, unless TMPDIR names one that is for one user."""
    for folder in (Path(name).resolve() for name in (tempfile.gettempdir(), "/tmp", "/var/tmp")):
        if folder.is_dir() and all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents)):
            return folder
    return None


@pytest.fixture(scope="module")
def usual(machine):
    """What the commands write where nothing is in their way, by name."""
    return {name: machine.run(COMMANDS[name][0]).stdout for name in SAME}


@pytest.fixture(scope="module")
def usual_file(machine):
    """What a command writes into its file where nothing is in its way, by name."""

    @functools.cache
    def written(name):
        arguments, result = COMMANDS[name]
        machine.run(arguments)
        whole = machine.names[result].read_bytes()
        machine.names[result].unlink()
        return whole

    return written


@pytest.fixture(scope="module")
def usual_answer(machine):
    """What LIBRARY writes with the usual streams, by backend."""

    @functools.cache
    def written(backend):
        file = machine.folder / "usual"
        machine.run(("MODEL", backend, str(file)), code=LIBRARY.replace("OPENING", ""))
        return file.read_bytes()

    return written


@pytest.fixture(scope="module")
def nobody(machine):
    """The command that makes a process one of a user without a name, a home or rights.

    Where only root can reach this Python it is root under another number, in a user namespace.
    """
    code = "import edgeinfer.cli, os, subprocess, sys; "
    code += "subprocess.run([sys.executable, '-c', 'import edgeinfer.cli'], check=True); print(os.getuid())"
    for user in (
        ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
        ("unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}"),
    ):
        done = machine.run((), user=user, code=code)
        if done.stdout == f"{NOBODY}\n":
            return user
    pytest.skip(f"no process can become another user's here: {done.stderr}")


# ---- Standard streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, closed",
    # `bench` and `devices` take long, and are as the others where notes are lost.
    [
        (name, closed)
        for name in COMMANDS
        for closed in ((0,), (1,), (2,), (0, 1, 2))
        if name not in ("bench", "devices") or closed != (2,)
    ],
    ids=str,
)
def test_a_closed_stream_is_an_empty_input_a_result_that_is_lost_or_notes_that_are(
    machine, usual, usual_file, name, closed
):
    arguments, result = COMMANDS[name]
    if result != "stdout":
        machine.names[result].unlink(missing_ok=True)
    done = machine.run(arguments, redirect=" ".join(f"{number}>&-" for number in closed))
    is_lost = result == "stdout" and 1 in closed
    assert done.returncode == (1 if is_lost else 0), done.stderr
    assert done.stdout == ("" if 1 in closed else usual.get(name, done.stdout))
    if 2 in closed:
        assert done.stderr == ""
    elif is_lost:
        assert done.stderr == CLOSED
    else:
        assert "rror" not in done.stderr and "Traceback" not in done.stderr
    if result != "stdout":  # nothing that was meant for a stream has gone into the file
        written = machine.names[result].read_bytes()
        machine.names[result].unlink()
        assert written == usual_file(name)


@pytest.mark.parametrize("arguments, message", [(("chat",), "the message is empty"), (("generate",), "no prompt")])
def test_a_closed_input_without_a_message_is_a_usage_error(machine, arguments, message):
    done = machine.run((*arguments, "-m", "MODEL", "--backend", "reference"), redirect="<&-")
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_what_is_meant_for_a_closed_stream_goes_to_no_file_that_is_opened_later(machine):
    code = f"""
import os
import edgeinfer.loading.open
load = edgeinfer.loading.open.load
def load_and_keep(*arguments, **options):
    with open("kept", "wb", buffering=0) as file:
        for descriptor in (1, 2):
            try:
                os.write(descriptor, b"noise")
            except OSError:
                pass
        os.system("echo noise; echo noise >&2")
        assert os.read(0, 1) == b""
        file.write(b"kept")
    return load(*arguments, **options)
edgeinfer.loading.open.load = load_and_keep
edgeinfer.cli.options.check_stdout = lambda: None
{MAIN}
"""
    for redirect in ("<&- 2>&-", ">&-", "<&- >&- 2>&-"):
        machine.run(GENERATE, redirect=redirect, code=f"import edgeinfer.cli.options{code}")
        kept = machine.cwd / "kept"
        assert kept.read_bytes() == b"kept"
        kept.unlink()


def test_an_error_of_usage_keeps_its_exit_code_where_it_cannot_be_told(machine):
    for redirect in ("2>&-", "2>/dev/full", "<&- >&- 2>&-"):
        assert machine.run(("chat", "--nonsense"), redirect=redirect).returncode == 2
        assert machine.run(("inspect", "nowhere.gguf"), redirect=redirect).returncode == 3


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"bench", "devices", "pack", "export"}))
def test_a_full_standard_output_is_one_line(machine, name):
    done = machine.run(COMMANDS[name][0], redirect="> /dev/full")
    assert done.returncode == 1
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("name", sorted(SAME))
def test_a_full_standard_error_loses_the_notes_alone(machine, usual, name):
    done = machine.run(COMMANDS[name][0], redirect="2> /dev/full")
    assert (done.returncode, done.stdout) == (0, usual[name])


@pytest.mark.parametrize("name", ["inspect", "help", "version", "generate", "generate --json"])
def test_a_reader_that_has_gone_ends_the_program_without_a_word(machine, name):
    done = machine.run(COMMANDS[name][0], redirect="| true; exit ${PIPESTATUS[0]}")
    # A short text may have been written before the reader went.
    assert done.returncode in (0, 1) and "rror" not in done.stderr and "Exception" not in done.stderr
    done = machine.run(COMMANDS[name][0], redirect="2>&1 | (sleep 0; exec <&-; true)")
    assert "rror" not in done.stdout + done.stderr


@pytest.mark.parametrize("redirect", ["1< /dev/null", "1< MODEL"])
def test_a_standard_output_that_is_open_for_reading_is_one_line(machine, redirect):
    redirect = redirect.replace("MODEL", shlex.quote(str(machine.names["MODEL"])))
    done = machine.run(GENERATE, redirect=redirect)
    assert (done.returncode, done.stderr) == (1, CLOSED)


def test_a_standard_input_that_is_open_for_writing_is_one_line(machine):
    done = machine.run((*CHAT[:1], *CHAT[2:]), redirect="0> /dev/null")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: standard input cannot be read: Bad file descriptor\n"
    assert machine.run(CHAT, redirect="0> /dev/null").returncode == 0


LIBRARY = """
import os, sys
OPENING
import edgeinfer
with edgeinfer.load(sys.argv[1], backend=sys.argv[2]) as engine:
    text = "".join(piece.text for piece in engine.stream("hello", max_tokens=4, seed=1))
    chat = engine.chat("be brief")
    list(chat.send("hello", max_tokens=4, seed=1))
    chat.save(sys.argv[3])
with open(sys.argv[3], "a", encoding="utf-8") as file:
    file.write(text)
"""


@pytest.mark.parametrize("backend", ["reference", "native", "llama.cpp"])
@pytest.mark.parametrize(
    "opening",
    [
        "sys.stdin = sys.stdout = sys.stderr = None",  # as under pythonw, or in a host without a console
        "[os.close(descriptor) for descriptor in range(3)]",
        "sys.stdin = sys.stdout = sys.stderr = None; [os.close(descriptor) for descriptor in range(3)]",
        "sys.stdin = sys.stdout = sys.stderr = object()",
    ],
)
def test_the_library_needs_no_streams(machine, usual_answer, request, opening, backend):
    if backend == "llama.cpp":
        request.getfixturevalue("llama_cpp")
    code = LIBRARY.replace("OPENING", opening)
    done = machine.run(("MODEL", backend, str(machine.folder / "without")), code=code)
    assert (machine.folder / "without").read_bytes() == usual_answer(backend), done
    (machine.folder / "without").unlink()


# ---- Users and folders -----------------------------------------------------------------------------------------------

NATIVE = ("generate", "hello", "-m", "MODEL", "-n", "4", "-s", "1", "--backend", "native")  # measures, and keeps costs
NOT_SET = {"XDG_CACHE_HOME": None, "XDG_STATE_HOME": None, "XDG_CONFIG_HOME": None, "XDG_DATA_HOME": None}
USERS = {
    "no home variable": {"HOME": None},
    "no variable at all": {name: None for name in os.environ if name != "PATH"},
    "an empty home": {"HOME": ""},
    "a relative home": {"HOME": "home"},
    "a home that is a file": {"HOME": "MODEL"},
    "a home that is not there": {"HOME": "/proc/nowhere/home"},
    "a home that cannot be written": {"HOME": "/proc"},
    "no folder for temporary files": {"TMPDIR": "/proc/nowhere"},
    "a relative cache": {"XDG_CACHE_HOME": "cache"},
    "a cache that is a file": {"XDG_CACHE_HOME": "MODEL"},
    "a cache that cannot be written": {"XDG_CACHE_HOME": "/proc/self"},
    "a cache in a terminal": {"XDG_CACHE_HOME": "/dev/tty"},
}


@pytest.fixture(scope="module")
def answer(machine):
    return machine.run(NATIVE).stdout


@pytest.mark.parametrize("case", USERS)
def test_a_user_without_folders_gets_the_same_answer(machine, nobody, answer, case):
    variables = {
        name: value and value.replace("MODEL", str(machine.names["MODEL"])) for name, value in USERS[case].items()
    }
    done = machine.run(NATIVE, user=nobody, **(NOT_SET | variables))
    assert (done.returncode, done.stdout) == (0, answer), done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("4 tokens, "), done.stderr
    assert [path.name for path in machine.cwd.iterdir()] == []  # no folder called ~, nor home


@pytest.mark.parametrize("name", ["chat", "inspect", "help", "version"])
def test_commands_work_for_a_user_without_a_name_in_a_tree_that_cannot_be_written(machine, nobody, usual, name):
    everything_closed = NOT_SET | {"HOME": None, "TMPDIR": "/proc/nowhere", "USER": None, "LOGNAME": None}
    machine.cwd.chmod(0o555)
    try:
        done = machine.run(COMMANDS[name][0], user=nobody, **everything_closed)
    finally:
        machine.cwd.chmod(0o755)
    assert (done.returncode, done.stdout) == (0, usual[name]), done.stderr


@pytest.mark.parametrize("case", ["no home variable", "a home that cannot be written", "a cache that is a file"])
def test_devices_are_found_without_a_folder_for_caches(machine, nobody, opencl_device, case):
    model = str(machine.names["MODEL"])
    variables = {name: value and value.replace("MODEL", model) for name, value in USERS[case].items()}
    found = machine.run(("devices", "--json"), user=nobody, **(NOT_SET | variables))
    assert found.returncode == 0 and found.stderr == ""
    assert [device["name"] for device in json.loads(found.stdout)["opencl"]["devices"]][:1] == [opencl_device.info.name]


@pytest.mark.parametrize("name", ["pack", "export"])
def test_a_file_that_cannot_be_written_is_one_line_that_names_it(machine, nobody, name):
    machine.folder.chmod(0o555)
    try:
        done = machine.run(COMMANDS[name][0], user=nobody)
    finally:
        machine.folder.chmod(0o755)
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "Nothing can be written in this folder" in done.stderr and str(machine.folder) in done.stderr


@pytest.mark.parametrize("name", ["chat", "generate", "inspect", "help", "version"])
def test_commands_work_in_a_folder_that_has_gone(machine, usual, name):
    arguments, _ = COMMANDS[name]
    code = f"import os, tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd()); {MAIN}"
    done = machine.run(arguments, code=code)
    assert (done.returncode, done.stdout) == (0, usual[name]), done.stderr


def test_a_relative_name_in_a_folder_that_has_gone_is_one_line(machine):
    code = f"import os, tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd()); {MAIN}"
    for given in ("x.gguf", "./~"):
        done = machine.run(("inspect", given), code=code)
        assert done.returncode in (1, 2, 3) and "bug" not in done.stderr and "Traceback" not in done.stderr
        assert "No such file" in done.stderr or "no such file" in done.stderr


# ---- Locales and terminals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"LANG": None, "LC_ALL": None},
        {"LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"LC_ALL": "xx_YY.nothing"},
        {"PYTHONIOENCODING": "ascii:strict"},
        {"PYTHONIOENCODING": "latin-1"},
        {"TERM": None},
        {"TERM": "dumb"},
        {"TERM": "no-such-terminal"},
        {"COLUMNS": "many"},
        {"TZ": "nowhere"},
    ],
    ids=str,
)
def test_no_locale_and_no_terminal_is_needed(machine, variables):
    for arguments in ((*CHAT[:1], "grüße 漢字 🙂", *CHAT[2:]), ("inspect", "MODEL")):
        done = machine.run(arguments, **variables)
        assert done.returncode == 0 and done.stdout and "rror" not in done.stderr, done.stderr


def test_a_character_that_an_encoding_lacks_is_replaced(machine):
    name = machine.folder / "größe.gguf"
    name.write_bytes(machine.names["MODEL"].read_bytes())
    done = machine.run(("inspect", str(name)), PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "e.gguf (" in done.stdout
    done = machine.run(("inspect", str(machine.folder / "nöwhere.gguf")), PYTHONIOENCODING="ascii:strict")
    assert done.returncode == 3 and "where.gguf: no such file" in done.stderr
    done = machine.run((*CHAT, "--json"), PYTHONIOENCODING="ascii:strict")
    assert done.returncode == 0 and json.loads(done.stdout)["usage"]["completion_tokens"] <= 4


# ---- Names of files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, made",
    [
        (("inspect", "~/tiny.gguf"), None),
        (("pack", "~/tiny.gguf"), "tiny.gguf.packed"),
        (("generate", "hello", "-m", "~/tiny.gguf", "-n", "2"), None),
        (("generate", "hello", "--model=~/tiny.gguf", "-n", "2"), None),
        (("chat", "hello", "-m", "~/tiny.gguf", "-md", "~/tiny.gguf", "-n", "2"), None),
        (("generate", "-f", "~/text", "-m", "~/tiny.gguf", "-n", "2"), None),
        (("export", "~/trits.gguf", "--to", "ternary", "--format=tq2_0", "--out=~/new.gguf"), "new.gguf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_tilde_is_the_home_folder_in_every_option(machine, arguments, made):
    (machine.folder / "text").write_text("hello")
    done = machine.run(arguments, HOME=str(machine.folder))
    assert done.returncode == 0 and "~" not in done.stderr, done.stderr
    assert "goes on without" not in done.stderr
    if made is not None:
        (machine.folder / made).unlink()
    assert list(machine.cwd.iterdir()) == []


@pytest.mark.parametrize("option", ["-m", "-md"])
@pytest.mark.parametrize("name", ["~/x.gguf", "~no-such-user/x.gguf"])
def test_a_home_that_is_not_there_is_a_usage_error(machine, nobody, option, name):
    others = ("-m", "MODEL") if option != "-m" else ()
    done = machine.run(("generate", "hello", *others, option, name, "-n", "2"), user=nobody, HOME=None, **NOT_SET)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert ("no home folder" if name.startswith("~/") else "there is no user") in " ".join(done.stderr.split())


def test_variables_that_name_files_take_a_tilde(machine):
    variables = {"EDGEINFER_MODEL": "~/tiny.gguf", "EDGEINFER_MODEL_DRAFT": "~/tiny.gguf", "HOME": str(machine.folder)}
    done = machine.run(("generate", "hello", "-n", "2", "--json"), **variables)
    assert json.loads(done.stdout)["model"] == str(machine.folder / "tiny.gguf")
    assert done.stderr == ""
    done = machine.run(("generate", "hello"), **(variables | {"HOME": "/proc/nowhere"}))
    assert done.returncode == 3 and "/proc/nowhere/tiny.gguf" in done.stderr


def test_files_that_are_called_tilde_can_be_reached(machine, tmp_path):
    (tmp_path / "~").write_bytes(machine.names["MODEL"].read_bytes())
    for arguments in (
        ("inspect", "./~"),
        ("pack", "./~"),
        ("generate", "hello", "-m", "./~", "-md", "./~", "-n", "2"),
    ):
        done = machine.run(arguments, cwd=tmp_path, HOME="/proc/nowhere")
        assert done.returncode == 0 and "without" not in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["~", "~.packed"]
