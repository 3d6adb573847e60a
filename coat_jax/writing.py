"""Writes files and folders that appear when they are complete, with an error if the disk is full.

`replace` and `atomic_folder` write under a temporary name first, and rename when all is written. A
process that is killed leaves the temporary file or folder behind. `atomic_folder` does not remove
it, because another process may be writing there.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from coat_jax.errors import UserError

# No space, over quota, over the largest file allowed.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
UNFINISHED = ".unfinished"  # the suffix of a file or folder that is being written
METADATA = 1 << 20  # the most bytes that a checkpoint takes besides its arrays


class NotWritten(UserError, OSError):
    """A file or folder could not be written."""

    exit_code = 3


class DiskFull(NotWritten):
    """A file or folder does not fit on the disk, or is beyond a limit for files."""


def require_space(folder: Path, what: str, size: int) -> None:
    """Raises unless `size` bytes and some metadata can be written in a folder."""
    with write_failures(folder, what, size):
        if shutil.disk_usage(folder).free < size + METADATA:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def write_failures(folder: Path, what: str, size: int | None = None) -> Iterator[None]:
    """Turns errors of writing into a NotWritten that says what was not written, and where."""
    try:
        yield
    except Exception as error:
        # tensorstore has the error number of the operating system in its message only.
        found = re.search(r"os_error_code='(\d+)'", str(error))
        code = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        if code is None:
            raise
        if code not in FULL:
            raise NotWritten(f"{what} could not be written in {folder}: {error}") from error
        needed = "" if size is None else f"it takes up to {(size + METADATA) / 1e6:,.1f} MB, and "
        raise DiskFull(
            f"{what} does not fit in {folder} ({os.strerror(code)}): {needed}"
            f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free. Make room there, or raise "
            "the quota or `ulimit -f`; what was saved before is intact."
        ) from error


def flush(path: Path) -> None:
    """Returns when the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file, text in UTF-8; at any time it has all of its old or all of its new content."""
    unfinished = _unfinished(path)
    try:
        # A link of this name would lead to a file elsewhere, and a pipe would wait for a reader.
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


@contextlib.contextmanager
def atomic_folder(out: Path, command: str, size: int | None = None) -> Iterator[Path]:
    """A new folder to write in. It is renamed to `out` at the end, and removed after an error.

    Args:
        out: must not exist, complete or not.
        command: writes it, for errors.
        size: the bytes that it takes, if known, for errors.
    """
    unfinished = _unfinished(out)
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists already: choose another folder, or remove it.")
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError:
        raise UserError(
            f"{unfinished} exists: another `{command}` is writing it, or was killed. Remove it if "
            "none is running."
        ) from None
    with write_failures(out.parent, out.name, size):
        try:
            yield unfinished
            # Otherwise a power failure could leave the name without the content.
            for path in (*unfinished.rglob("*"), unfinished):
                flush(path)
            unfinished.rename(out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _unfinished(path: Path) -> Path:
    if path.name in ("", ".", ".."):
        raise UserError(f"{path} does not end in the name of a new file or folder: add one.")
    return path.with_name(path.name + UNFINISHED)
