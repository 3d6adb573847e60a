"""A full disk, found before writing where possible, and named in any case."""

import contextlib
import errno
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from coat_jax.errors import UserError

# No space, over quota, over the largest file allowed.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
METADATA = 1 << 20  # what a checkpoint takes beside its arrays, generously


class NotWritten(UserError, OSError):
    """What was to be saved could not be written."""

    exit_code = 3


class DiskFull(NotWritten):
    """What was to be written does not fit."""


def require_space(folder: Path, what: str, size: int) -> None:
    """Raises unless `size` bytes and some metadata can be written in a folder."""
    if shutil.disk_usage(folder).free < size + METADATA:
        raise _full(folder, what, size)


@contextlib.contextmanager
def failures_named(folder: Path, what: str, size: int | None = None) -> Iterator[None]:
    """Errors of writing inside become a NotWritten that says what was not written, and where."""
    try:
        yield
    except NotWritten:
        raise
    except Exception as error:
        code = _os_error(error)
        if code in FULL:
            raise _full(folder, what, size) from error
        if code is not None:
            raise NotWritten(f"{what} could not be written in {folder}: {error}") from error
        raise


def _os_error(error: Exception) -> int | None:
    """The system's number of an error; tensorstore has it in the text only."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"os_error_code='(\d+)'", str(error))
    return int(match[1]) if match else None


def _full(folder: Path, what: str, size: int | None) -> DiskFull:
    needed = "" if size is None else f"it takes up to {_megabytes(size + METADATA)}, and "
    free = shutil.disk_usage(folder).free
    return DiskFull(
        f"{what} does not fit in {folder}: {needed}{_megabytes(free)} are free. Make room there, "
        "or raise the quota; what was saved before is intact."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
