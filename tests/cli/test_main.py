"""Every way in which a command ends: its exit code, and what it says."""

import argparse
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
        (UserError(), 2, "UserError"),
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
        ValueError("invalid literal for int()"),
        RuntimeError("a bug"),
        KeyError("name"),
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
        (["xyz"], "coat: argument COMMAND: invalid choice: 'xyz'"),
        (["generate", "x", "--promt", "y"], "arguments: --promt y. Did you mean --prompt?"),
        (["generate", "x", "--max_tokens=3"], "arguments: --max_tokens=3. Did you mean --max-tok"),
        (["generate", "x", "--qqq"], "coat generate: unrecognized arguments: --qqq (--help"),
        (["generate", "x", "y"], "coat generate: unrecognized arguments: y (--help"),
    ],
)
def test_a_misspelt_name_gets_a_suggestion(arguments, line, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert line in capsys.readouterr().err


def test_a_bug_ends_with_code_1_and_a_traceback():
    program = """
import sys
from coat_jax import cli
from coat_jax.cli import plot
plot.run = lambda options: 1 > "x"
sys.exit(cli.main(["plot", "x"]))
"""
    done = python(program)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "TypeError" in done.stderr


@pytest.mark.parametrize("platform", ["cuda", "gpuu"])
def test_a_platform_on_which_jax_does_not_start_is_named(platform, tmp_path):
    """Without its plugin JAX fails an assertion, and of an unknown one it says what it knows."""
    arguments = ["train", "llama_tiny", "--total_steps", "1", "--out", str(tmp_path)]
    program = f"import sys; from coat_jax import cli; sys.exit(cli.main({arguments}))"
    variables = ON_CPU | {"JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""}  # nor a GPU
    done = python(program, variables, stdout=subprocess.DEVNULL)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert last.startswith("coat train: JAX finds no device: ")
    assert platform in last
    assert last.endswith("`coat doctor` says what to fix.")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("error", [RuntimeError("NCCL failed"), AssertionError("a law")])
def test_other_errors_keep_their_traceback_where_jax_starts(command, error):
    with pytest.raises(type(error), match=str(error)):
        command(raising(error))


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


def test_a_wrong_argument_cannot_reach_the_terminal(capsys):
    with pytest.raises(SystemExit):
        cli.main(["\x1b[2J"])
    assert "\x1b" not in capsys.readouterr().err


def python(program, variables=ON_CPU, **options):
    return subprocess.run(
        [sys.executable, "-c", program],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
        env=variables,
        timeout=SECONDS,
        **options,
    )


PRINTING = """
import sys
from coat_jax import cli
from coat_jax.cli import plot
def run(options):
    for _ in range(10_000):
        print("a line of output", file=sys.{stream})
    return 0
plot.run = run
sys.exit(cli.main(["plot", "x"]))
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    "program", [PRINTING.format(stream="stdout"), PRINTING.format(stream="stderr")]
)
def test_a_command_that_nobody_reads_ends_quietly(program, tmp_path):
    read, write = os.pipe()
    os.close(read)
    with (tmp_path / "said").open("w+") as said:
        streams = {"stdout": write, "stderr": said}
        if "stderr" in program:
            streams = {"stdout": said, "stderr": write}
        done = subprocess.run(
            [sys.executable, "-c", program],
            check=False,
            cwd=ROOT,
            env=ON_CPU,
            timeout=SECONDS,
            **streams,
        )
        os.close(write)
        said.seek(0)
        assert done.returncode == 141
        assert "Error" not in said.read()


def test_results_stay_if_nobody_reads_the_output(tmp_path):
    (tmp_path / "a.txt").write_text("a text\n")
    arguments = ["tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "tokens")]
    read, write = os.pipe()
    os.close(read)
    program = f"import sys; from coat_jax import cli; sys.exit(cli.main({arguments}))"
    assert python(program, stdout=write).returncode == 141
    os.close(write)
    assert (tmp_path / "tokens" / "tokens.json").exists()


def test_help_that_nobody_reads_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    program = "import sys; from coat_jax.cli import main; sys.exit(main(['--help']))"
    done = python(program, stdout=write)
    os.close(write)
    assert done.returncode == 141
    assert "Error" not in done.stderr


LASTING = """
import sys
from rich.console import Console
from coat_jax.cli.output import lasting
with lasting():
    console = Console()
    for step in range(1_000):
        console.print("step", step)
        print("more", file=sys.stderr)
print("after")
open(sys.argv[1], "w").write("whole")
"""


@pytest.mark.costly
@pytest.mark.parametrize("outputs", ["closed pipes", "full", "closed"])
def test_training_continues_when_its_output_cannot_be_written(tmp_path, outputs):
    """Also when Python exits, which flushes what is left."""
    done = tmp_path / "done"
    arguments = [sys.executable, "-c", LASTING, str(done)]
    if outputs == "closed":
        code = subprocess.run(
            ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *arguments],
            check=False,
            cwd=ROOT,
            env=ON_CPU,
            timeout=SECONDS,
        ).returncode
    else:
        read, write = os.pipe()
        os.close(read)
        if outputs == "full":
            write = os.open("/dev/full", os.O_WRONLY)
        code = subprocess.run(
            arguments,
            check=False,
            cwd=ROOT,
            env=ON_CPU,
            timeout=SECONDS,
            stdout=write,
            stderr=write,
        ).returncode
        os.close(write)
    assert code == 0
    assert done.read_text() == "whole"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_says_what_each_option_is(name):
    """Not only how often it may be given, what it belongs to, its default, or where to look."""
    parser = argparse.ArgumentParser()
    importlib.import_module(f"coat_jax.cli.{name}").add_arguments(parser)
    for action in (action for action in parser._actions if action.option_strings):
        assert action.help, action
        empty = ("may be repeated", "see above", "of ", "for both", "share ", "(")
        assert not action.help.startswith(empty), action


def test_the_list_of_commands_says_that_convert_makes_8_bits(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("  convert "))
    assert "Hugging Face" in line
    assert "8 bits" in line


def test_an_option_that_takes_all_words_is_blamed_only_where_it_was_given(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plot"])
    assert "required: RUN (--help explains)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plot", "--names", "a", "out/a"])
    assert "required: RUN; options take all words" in capsys.readouterr().err
