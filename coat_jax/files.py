"""Reads files that a user names, with errors that say what to do.

Only regular files are read: reading a pipe or a device may never end. Errors that the user cannot
fix, such as those of a broken disk, are raised unchanged.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coat_jax.errors import UserError

FIXABLE = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class MissingFile(UserError, FileNotFoundError):
    """A file that the user named does not exist."""


def expanded(path: str | Path) -> Path:
    """The path, with a leading ~ replaced by the home folder as a shell does."""
    if "\0" in str(path):
        raise UserError(f"{str(path)!r} cannot name a file: it has a null character.")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path} names the home of an unknown user: write the whole path."
        ) from None


def require_utf8(path: Path, what: str) -> None:
    """Raises unless the bytes of a path are UTF-8, for libraries that take no others.

    Args:
        path: any path.
        what: what is stored there, in the plural, for the error.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{path} has a name that is not UTF-8, and {what} need one that is: choose another "
            "folder, or rename this one."
        ) from None


@contextlib.contextmanager
def path_failures(path: Path) -> Iterator[None]:
    """Turns errors that a user can fix (a missing folder, no permission) into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno not in FIXABLE:
            raise
        name = error.filename or path
        raise UserError(
            f"{name}: {error.strerror}. Choose another path, or fix this one."
        ) from error


@contextlib.contextmanager
def utf8_failures(path: Path) -> Iterator[None]:
    """Turns the error of decoding bytes that are not UTF-8 into a UserError."""
    try:
        yield
    except UnicodeDecodeError as error:
        with path.open("rb") as file:
            lines = enumerate(file, 1)
            number = next((n for n, line in lines if line.decode(errors="ignore").encode() != line))
        raise UserError(f"{path}:{number} is not text in UTF-8: {error.reason}.") from None


def status(path: Path) -> os.stat_result | None:
    """The result of `os.stat`, which follows links; None if nothing is at the path."""
    if "\0" in str(path):
        return None  # no file has such a name
    with path_failures(path):
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None


def is_folder(path: Path) -> bool:
    """Whether the path is a folder."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_regular(path: Path) -> bool:
    """Whether the path is a regular file, which can be read to its end."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def require_regular(path: Path, what: str = "file") -> None:
    """Raises unless the path is a regular file.

    Args:
        path: the file.
        what: its name in errors, as in "config file".
    """
    found = status(path)
    if found is None and path.is_symlink():
        raise MissingFile(f"{path} is a link to {path.readlink()}, which does not exist.")
    if found is None:
        raise MissingFile(f"There is no {what} {path}.")
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"{path} is a folder: name the {what} itself.")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is a pipe or a device: a {what} must be a regular file.")


def read_bytes(path: Path, what: str = "file") -> bytes:
    """The content of a file."""
    require_regular(path, what)
    with path_failures(path):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark, its line ends unchanged."""
    with utf8_failures(path):
        return read_bytes(path).decode("utf-8-sig")


def lines_of(text: str) -> list[str]:
    """The lines of a text. Only newlines end them: U+2028 and its like are part of a line."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    value = parse_json(read_bytes(path), str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object, but {type(value).__name__}.")
    return value


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text.

    Args:
        text: the JSON; bytes are in UTF-8.
        where: the name of its source in errors, such as a path.
    """
    try:
        # json.loads would accept bytes that encode a lone surrogate, and UTF-16.
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(text)
        # A lone surrogate, such as \ud800, is half of a pair. It cannot be encoded or printed.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} has {error.object[error.start]!r}, half of a surrogate pair, which no text "
            "can have: remove it, or replace it by \\ufffd."
        ) from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        raise UserError(f"{where} is not JSON: {error.msg}: {line}column {error.colno}.") from None
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}.") from None
    except RecursionError:
        raise UserError(f"{where} is not JSON that can be read: it is nested too deeply.") from None
    return value
