"""Every way in which a command ends: its exit code, and what it says."""

import contextlib
import errno
import functools
import importlib
import io
import os
import sys
import types
from pathlib import Path

import pytest
from forks import Fork
from processes import SECONDS
from rich.console import Console

from coat_jax import __version__, cli
from coat_jax.cli import generate
from coat_jax.cli.output import ignore_closed_output
from coat_jax.errors import UserError
from coat_jax.writing import DiskFull


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `coat plot` with a body of one's own; the code and what it said of errors."""

    def run(body, *arguments):
        module = types.ModuleType("coat_jax.cli.plot", "A command.")
        module.add_arguments = lambda parser: None
        module.run = lambda options: body() or 0
        monkeypatch.setattr(importlib, "import_module", lambda name: module)
        return cli.main(["plot", *arguments]), capsys.readouterr().err

    return run


def raising(error):
    def body():
        raise error

    return body


DENIED = PermissionError(errno.EACCES, "Permission denied", "a\x1bb")
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("total_steps=0 must be\n1 or more."), 2, "total_steps=0 must be 1 or more."),
        (UserError("a\x1b[2Jb\x9b"), 2, r"a\x1b[2Jb\x9b"),
        (DiskFull("It does not fit."), 3, "It does not fit."),
        (DENIED, 2, "Permission denied: 'a\\x1bb'."),
        (FileExistsError(errno.EEXIST, "File exists", b"/data/x"), 2, "File exists: '/data/x'."),
        (FULL, 3, "No space left on device."),
        (ModuleNotFoundError("No", name="grain.x"), 2, "The package grain is not installed."),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_that_a_user_can_fix_is_one_line(command, error, code, line):
    ended, err = command(raising(error))
    assert ended == code
    assert err.startswith(f"coat plot: {line}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        TypeError("'>' not supported between instances of 'str' and 'int'"),
        RuntimeError("a bug"),
        OSError(errno.EIO, "Input/output error", "/data/x"),
        OSError("of no number"),
        FileNotFoundError("of no file"),
        ImportError("cannot import name 'x'"),
        ModuleNotFoundError("No module", name="coat_jax.nothing"),
        AssertionError(),
    ],
    ids=repr,
)
def test_a_bug_shows_where_it_is(command, error):
    with pytest.raises(type(error)) as raised:
        command(raising(error))
    assert raised.value is error


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "coat: there is no command 'trian'. There are train, generate"),
        (["\x1b[2J"], r"coat: there is no command '\x1b[2J'. There are train, generate"),
        (["generate", "x", "--qqq"], "coat generate: unrecognized arguments: --qqq (--help"),
        (["generate", "x", "y"], "coat generate: unrecognized arguments: y (--help"),
        (["tokenize"], "required: INPUT, --out (--help explains)"),
    ],
)
def test_wrong_arguments_are_explained_in_one_line(arguments, line, capsys):
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert "\x1b" not in said


def test_the_commands_are_listed_without_one(capsys):
    for arguments, code in (([], 2), (["--help"], 0)):
        assert cli.main(arguments) == code
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"coat_jax {__version__}\n"


def test_a_platform_on_which_jax_does_not_start_is_named(tmp_path):
    """Without its plugin, and where no GPU is visible, JAX fails an assertion."""
    script = tmp_path / "coat.py"
    script.write_text(
        "import sys, jax\nfrom coat_jax import cli\n"
        "jax.config.update('jax_platforms', 'cuda')\nsys.exit(cli.main(sys.argv[1:]))\n"
    )
    train = ["train", "llama_tiny", "--total_steps", "1", "--out", tmp_path / "out"]
    process = Fork([script, *train], CUDA_VISIBLE_DEVICES="")
    _, errors = process.communicate(timeout=SECONDS)
    last = errors.splitlines()[-1]
    assert process.returncode == 2
    assert last.startswith("coat train: JAX finds no device: ")
    assert "cuda" in last
    assert last.endswith("`coat doctor` says what to fix.")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", rb"f\xfc\u2192\udc80"), ("utf-8", "fü→".encode() + rb"\udc80")],
)
@pytest.mark.parametrize("say", [functools.partial(print, end=""), generate._say])
def test_what_the_encoding_of_the_output_lacks_is_escaped(
    say, encoding, shown, command, monkeypatch
):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    ended, _ = command(lambda: say("fü→\udc80"))
    assert (ended, out.getvalue()) == (0, shown)


def test_debug_adds_the_traceback_without_control_characters(command):
    code, err = command(raising(UserError("\x1b[2J")), "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "\x1b" not in err


# --- Where nobody reads ----------------------------------------------------------------------


@contextlib.contextmanager
def unwritable(kind):
    """With output and errors closed, on a full disk, or in a pipe that nobody reads."""

    def stream():
        if kind == "full":
            return Path("/dev/full").open("w")
        if kind == "closed":
            return None
        read, write = os.pipe()
        os.close(read)
        return os.fdopen(write, "w")

    with contextlib.redirect_stdout(stream()), contextlib.redirect_stderr(stream()):
        yield
        for opened in filter(None, (sys.stdout, sys.stderr)):
            opened.close()  # as when Python ends; fails if it cannot write what is buffered


def test_results_stay_if_nobody_reads_the_output(tmp_path):
    (tmp_path / "a.txt").write_text("a text\n")
    with unwritable("unread"):
        code = cli.main(["tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "tokens")])
    assert code == 141
    assert (tmp_path / "tokens" / "tokens.json").exists()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_command_whose_output_nobody_reads_ends_quietly(command, name):
    def complain():
        for _ in range(10_000):
            print("a line of output", file=getattr(sys, name))

    with unwritable("unread"):
        code, _ = command(complain)
    assert code == 141


@pytest.mark.parametrize("kind", ["unread", "full", "closed"])
def test_training_continues_when_its_output_cannot_be_written(kind):
    with unwritable(kind):
        with ignore_closed_output():
            console = Console()
            for step in range(1_000):
                console.print("step", step)
                print("more", file=sys.stderr)
        print("after")
