"""Every way in which a command ends: its exit code, and what it says."""

import errno
import functools
import importlib
import io
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from forks import Fork
from processes import SECONDS

from coat_jax import cli
from coat_jax.cli import generate
from coat_jax.errors import UserError
from coat_jax.writing import DiskFull

ROOT = Path(__file__).parents[2]
ON_CPU = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""}


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


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("total_steps=0 must be\n1 or more."), 2, "total_steps=0 must be 1 or more."),
        (UserError("a\x1b[2Jb\x9b"), 2, r"a\x1b[2Jb\x9b"),
        (DiskFull("It does not fit."), 3, "It does not fit."),
        (
            PermissionError(errno.EACCES, "Permission denied", "a\x1bb"),
            2,
            "Permission denied: 'a\\x1bb'.",
        ),
        (FileExistsError(errno.EEXIST, "File exists", b"/data/x"), 2, "File exists: '/data/x'."),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            3,
            "No space left on device: '/x'.",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 3, "No space left on device."),
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
        (["trian"], "coat: there is no command 'trian'. Did you mean train?"),
        (["\x1b[2J"], r"coat: there is no command '\x1b[2J'. There are train, generate"),
        (["generate", "x", "--promt", "y"], "arguments: --promt y. Did you mean --prompt?"),
        (["generate", "x", "--max_tokens=3"], "arguments: --max_tokens=3. Did you mean --max-tok"),
        (["generate", "x", "--qqq"], "coat generate: unrecognized arguments: --qqq (--help"),
        (["generate", "x", "y"], "coat generate: unrecognized arguments: y (--help"),
        (["tokenize"], "required: INPUT, --out (--help explains)"),
        (
            ["plot", "--names", "a", "out/a"],
            "required: RUN, before options that take all words",
        ),
    ],
)
def test_wrong_arguments_are_explained_in_one_line(arguments, line, capsys):
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert "\x1b" not in said


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


def python(program, *arguments, redirect="", **options):
    """Runs a program, with the redirection of a shell."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", program, *arguments],
        check=False,
        cwd=ROOT,
        env=ON_CPU,
        text=True,
        timeout=SECONDS,
        **options,
    )


@pytest.fixture
def unread():
    """A pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def test_results_stay_if_nobody_reads_the_output(tmp_path, unread):
    (tmp_path / "a.txt").write_text("a text\n")
    arguments = ["tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "tokens")]
    program = "import sys; from coat_jax import cli; sys.exit(cli.main(sys.argv[1:]))"
    done = python(program, *arguments, stdout=unread, stderr=subprocess.PIPE)
    assert (done.returncode, "Error" in done.stderr) == (141, False)
    assert (tmp_path / "tokens" / "tokens.json").exists()


COMPLAINING = """
import sys
from coat_jax import cli
from coat_jax.cli import plot
def run(options):
    for _ in range(10_000):
        print("a line of output", file=sys.stderr)
plot.run = run
sys.exit(cli.main(["plot", "x"]))
"""


def test_a_command_whose_errors_nobody_reads_ends_quietly(tmp_path):
    script = tmp_path / "complaining.py"
    script.write_text(COMPLAINING)
    process = Fork([script])
    process.stderr.close()
    with process.stdout as out:
        assert out.read() == ""
    process.wait(SECONDS)
    assert process.returncode == 141


LASTING = """
import sys
from rich.console import Console
from coat_jax.cli.output import ignore_closed_output
with ignore_closed_output():
    console = Console()
    for step in range(1_000):
        console.print("step", step)
        print("more", file=sys.stderr)
print("after")
open(sys.argv[1], "w").write("whole")
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    "redirect", ["", ">/dev/full 2>&1", ">&- 2>&-"], ids=["unread", "full", "closed"]
)
def test_training_continues_when_its_output_cannot_be_written(tmp_path, unread, redirect):
    """Also when Python exits, which flushes what is left."""
    done = tmp_path / "done"
    ended = python(LASTING, done, redirect=redirect, stdout=unread, stderr=unread)
    assert ended.returncode == 0
    assert done.read_text() == "whole"
