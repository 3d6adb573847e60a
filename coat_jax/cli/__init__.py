"""`coat`: the commands of coat_jax.

Each command is a module of this package, imported when the command is used. The module's docstring
is the help text, `add_arguments` declares the arguments, and `run` does the work. If there is a
`run_without_arguments`, it runs when no arguments are given; if there is a `check`, it explains
mistakes that argparse would report badly.

An error that a user can fix is printed as one line: a UserError, a missing file or permission (the
commands open only files that somebody named), a full disk, a package that is not installed, a
platform on which JAX does not start. The exit code is that of the error, 2 for bad input; `--debug`
adds the traceback. Every other exception is a bug, or a failure of the machine: it shows its
traceback and ends with code 1.
"""

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from coat_jax import files
from coat_jax.cli import devices
from coat_jax.cli.output import discard_broken, escape_unencodable
from coat_jax.errors import UserError
from coat_jax.printable import printable
from coat_jax.writing import FULL, NotWritten

COMMANDS = {
    "train": "train a model, from a config to a checkpoint",
    "generate": "continue a text with a trained model",
    "evaluate": "measure perplexity on texts, and accuracy on questions",
    "convert": "convert a model from or to Hugging Face's format, or to 8 bits",
    "tokenize": "turn text into files of tokens",
    "plot": "draw the loss curves of runs",
    "formats": "compare small number formats on each tensor of a model",
    "doctor": "check whether training works on this machine, and what to fix",
}
# Errors about a path that another path, a permission or removing a file fixes.
FIXABLE = files.FIXABLE | {errno.ENOTEMPTY}
BAD_INPUT, INTERRUPTED = UserError.exit_code, 130
# How argparse begins errors.
MISSING = "the following arguments are required"
UNKNOWN = "unrecognized arguments: "
NO_READER = 141  # what shells report of a program that SIGPIPE ended


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage.

    Attributes:
        given: the arguments of the command.
    """

    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2."""
        taking_all = [action for action in self._actions if action.nargs == "+"]
        names = {name for action in taking_all for name in action.option_strings}
        if message.startswith(MISSING) and names.intersection(self.given):
            message += "; options take all words that follow, so put it first"
        elif message.startswith(UNKNOWN):
            message += self._suggestion(message.removeprefix(UNKNOWN).split()[0])
        self.exit(BAD_INPUT, f"{self.prog}: {_one_line(message)} (--help explains)\n")

    def _suggestion(self, unknown: str) -> str:
        """Which of the options an unknown one probably means."""
        if not unknown.startswith("--"):
            return ""
        name = unknown.partition("=")[0].replace("_", "-")
        options = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(name, options, n=1)
        return f". Did you mean {near[0]}?" if near else ""


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
    parser = _parser()
    if not given:
        parser.print_help()
        return BAD_INPUT
    if given[0] not in COMMANDS:
        near = difflib.get_close_matches(given[0], COMMANDS, n=1)
        if near:
            parser.error(f"there is no command {given[0]!r}. Did you mean {near[0]}?")
        parser.parse_args(given)  # --help, --version, or an error that lists the commands
        return BAD_INPUT
    name, debug = given[0], "--debug" in given
    try:
        command = importlib.import_module(f"coat_jax.cli.{name}")
        if not given[1:] and hasattr(command, "run_without_arguments"):
            return int(command.run_without_arguments())
        if hasattr(command, "check"):
            command.check(given[1:])
        parser = _command_parser(name, command)
        parser.given = given[1:]
        return int(command.run(parser.parse_args(parser.given)))
    except KeyboardInterrupt:
        _report(f"coat {name}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except (UserError, OSError, ModuleNotFoundError, RuntimeError, AssertionError) as error:
        line, code = _explained(error)
        if line is None:
            raise
        if debug:
            _report(printable(traceback.format_exc()))
        _report(f"coat {name}: {_one_line(line)}")
        return code


def _explained(error: Exception) -> tuple[str | None, int]:
    """The line to print for an error, None if it needs a traceback; and the exit code."""
    if isinstance(error, UserError):
        return str(error) or type(error).__name__, error.exit_code
    if isinstance(error, OSError) and error.errno in FULL | FIXABLE:
        where = "" if error.filename is None else f": '{os.fsdecode(error.filename)}'"
        code = NotWritten.exit_code if error.errno in FULL else BAD_INPUT
        return f"{error.strerror}{where}.", code
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0]
        if package != "coat_jax":
            extra = "The trainer's packages come with pip install 'coat_jax[train]'."
            return f"The package {package} is not installed. {extra}", BAD_INPUT
    if isinstance(error, RuntimeError | AssertionError) and "jax" in sys.modules:
        why = devices.why_none()
        if why is not None:
            return f"JAX finds no device: {why} `coat doctor` says what to fix.", BAD_INPUT
    return None, 1


def _report(text: str) -> None:
    """Prints an error. If standard error is closed, only the exit code reports it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _parser() -> argparse.ArgumentParser:
    from coat_jax import __version__

    listed = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    parser = Parser(
        prog="coat",
        description="FP8 training for JAX.",
        epilog=f"commands:\n{listed}\n\n`coat COMMAND --help` explains each. "
        "docs/, examples/ and launch/ are in the repository.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"coat_jax {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    return parser


def _command_parser(name: str, command: ModuleType) -> Parser:
    parser = Parser(
        prog=f"coat {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    return parser
