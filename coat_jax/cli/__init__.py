"""`coat`: the commands of coat_jax.

Each command is a module of this package, imported when the command is used. The module's docstring
is the help text, `add_arguments` declares the arguments, and `run` does the work. The options of
`train` are the fields of a config, so it has no `add_arguments`, and reads its arguments itself.

An error that a user can fix is printed as one line: a UserError, a missing file or permission (the
commands open only files that somebody named), a full disk, a package that is not installed, a
platform on which JAX does not start. The exit code is that of the error, 2 for bad input; `--debug`
adds the traceback. Every other exception is a bug, or a failure of the machine: it shows its
traceback and ends with code 1.
"""

import argparse
import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from coat_jax import __version__
from coat_jax.cli.output import discard_broken, escape_unencodable
from coat_jax.errors import UserError
from coat_jax.printable import printable
from coat_jax.writing import FULL, NotWritten

COMMANDS = {
    "train": "train a model, from a config to a checkpoint",
    "generate": "continue a text with a trained model",
    "evaluate": "measure perplexity on texts, and accuracy on questions",
    "convert": "make a Hugging Face folder of a model, also in 8 bits",
    "tokenize": "turn text into files of tokens",
    "plot": "draw the loss curves of runs",
    "formats": "compare small number formats on each tensor of a model",
    "doctor": "check whether training works on this machine, and what to fix",
}
USAGE = """usage: coat COMMAND [argument ...]

FP8 training for JAX. `coat COMMAND --help` explains a command, `coat --version` prints the version.
docs/, examples/ and launch/ are in the repository.

commands:"""
# Errors about a path that another path, a permission or removing a file fixes.
FIXABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY}
FIXABLE |= {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
BAD_INPUT, INTERRUPTED = UserError.exit_code, 130
NO_READER = 141  # what shells report of a program that SIGPIPE ended


class Parser(argparse.ArgumentParser):
    """Raises a UserError, without the usage, for wrong arguments."""

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise UserError(f"{message.removeprefix('argument ')} (--help explains)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    escape_unencodable()
    try:
        try:
            return _run(given)
        finally:
            if sys.stdout is not None:  # closed by `>&-`
                sys.stdout.flush()
    except BrokenPipeError:
        discard_broken()
        return NO_READER


def _run(given: list[str]) -> int:
    name = given[0] if given and given[0] in COMMANDS else ""
    program = f"coat {name}".strip()
    try:
        return _run_command(name, given[1:]) if name else _explain_commands(given)
    except KeyboardInterrupt:
        _report(f"{program}: interrupted")
        return INTERRUPTED
    except Exception as error:
        explanation = _explain(error)
        if explanation is None:
            raise
        line, code = explanation
        if "--debug" in given:
            _report(printable(traceback.format_exc()))
        _report(printable(f"{program}: {' '.join(line.split())}"))
        return code


def _run_command(name: str, given: list[str]) -> int:
    command = importlib.import_module(f"coat_jax.cli.{name}")
    if not hasattr(command, "add_arguments"):
        return int(command.run(given))
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"coat {name}", description=command.__doc__, formatter_class=style)
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    return int(command.run(parser.parse_args(given)))


def _explain_commands(given: list[str]) -> int:
    """Prints the help, or the version, or raises for an unknown command."""
    first = given[0] if given else ""
    if first == "--version":
        print(f"coat_jax {__version__}")
    elif first in ("", "--help", "-h"):
        print(USAGE, *(f"  {name:10} {what}" for name, what in COMMANDS.items()), sep="\n")
    else:
        raise UserError(f"there is no command {first!r}. There are {', '.join(COMMANDS)}.")
    return 0 if given else BAD_INPUT


def _explain(error: Exception) -> tuple[str, int] | None:
    """Returns the line to print for an error, and the exit code; None if it needs a traceback."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.errno in FULL | FIXABLE:
        where = "" if error.filename is None else f": '{os.fsdecode(error.filename)}'"
        code = NotWritten.exit_code if error.errno in FULL else BAD_INPUT
        return f"{error.strerror}{where}.", code
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0]
        if package != "coat_jax":
            extra = "The trainer's packages come with pip install 'coat_jax[train]'."
            return f"The package {package} is not installed. {extra}", BAD_INPUT
    if isinstance(error, RuntimeError | AssertionError):
        from coat_jax.cli.doctor import why_no_device

        if (why := why_no_device()) is not None:
            return f"JAX finds no device: {why} `coat doctor` says what to fix.", BAD_INPUT
    return None


def _report(text: str) -> None:
    """Prints an error. If standard error is closed, only the exit code reports it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)
