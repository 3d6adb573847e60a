"""`coat`: the commands of coat_jax.

Each is a module of this package: its docstring is its help, `add_arguments` says what it takes,
`run` does it. Only the one that is asked for is imported.

What a user can mend ends in one line and code 2; `--debug` shows where it came from. An
interrupt ends with code 130, as shells expect.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

COMMANDS = {
    "train": "train a model, from a config to a checkpoint",
    "generate": "continue a text with a trained model",
    "convert": "turn a Hugging Face folder into a checkpoint, or back",
    "tokenize": "turn text into files of tokens",
    "plot": "draw the loss curves of runs",
}
BAD_INPUT, INTERRUPTED = 2, 130


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (--help explains)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if not given:
        parser.print_help()
        return BAD_INPUT
    if given[0] not in COMMANDS:
        parser.parse_args(given)  # --help, --version, or an error that lists the commands
        return BAD_INPUT
    name, debug = given[0], "--debug" in given
    try:
        command = importlib.import_module(f"coat_jax.cli.{name}")
        return int(command.run(_command_parser(name, command).parse_args(given[1:])))
    except KeyboardInterrupt:
        print(f"coat {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        if debug:
            traceback.print_exc()
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"coat {name}: {message}", file=sys.stderr)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    from coat_jax import __version__

    listed = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    parser = Parser(
        prog="coat",
        description="FP8 training for JAX.",
        epilog=f"commands:\n{listed}\n\n`coat COMMAND --help` explains each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"coat_jax {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    return parser


def _command_parser(name: str, command: ModuleType) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"coat {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    return parser
