"""The output of commands: notes on standard error, and output whose reader may close it early.

When nobody reads the output any more, as after `coat train ... | head -1`, training continues
(`ignore_closed_output`): its results are in its folder, and hours of work must not end with a pager
or a closed terminal. Other commands end, as Unix tools do (`discard_broken`).
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from coat_jax.printable import printable


@contextlib.contextmanager
def ignore_closed_output() -> Iterator[None]:
    """Within this context, output is dropped from the first failed write on."""
    with Path(os.devnull).open("w") as nowhere:  # where one is closed: `>&-`
        out: Any = ClosableStream(sys.stdout or nowhere)
        err: Any = ClosableStream(sys.stderr or nowhere)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield


def escape_unencodable() -> None:
    """From now on, characters that an output's encoding lacks are printed as Python escapes.

    No encoding has lone surrogates, which stand for bytes of an argument that are not UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_on_signals() -> None:
    """From now on, SIGTERM and SIGHUP raise SystemExit, so that unfinished files are removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def note(text: str) -> None:
    """Prints a line that is not part of a command's result."""
    print(printable(text), file=sys.stderr)


def progress_bar() -> Any:
    """Returns a `rich.progress.Progress`, drawn if standard error is a terminal, and removed."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


class ClosableStream:
    """A stream that writes to another one until a write fails, and then drops its output."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes and flushes; if that fails, drops the text and what the stream has buffered."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard_broken() -> None:
    """Discards output that nobody reads any more, so that Python ends silently."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        ClosableStream(stream).write("")
