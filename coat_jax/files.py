"""Reads files that a user names, with errors that say what to do.

Only regular files are read: reading a pipe or a device may never end. A missing permission or a
broken disk remains the OSError that Python raises, which names the file.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coat_jax.errors import UserError


class MissingFile(UserError, FileNotFoundError):
    """A file that the user named does not exist."""


def expand_user(path: str | Path) -> Path:
    """The path, with a leading ~ replaced by the home folder as a shell does."""
    if "\0" in str(path):
        raise UserError(f"{str(path)!r} cannot name a file: it has a null character.")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path} names the home of an unknown user: write the whole path."
        ) from None


@contextlib.contextmanager
def read_failures(path: Path) -> Iterator[None]:
    """Turns errors of reading a file, or text that is not UTF-8, into a UserError.

    What is read while a folder is written is read in this: an OSError would be one of writing.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        with path.open("rb") as file:
            lines = enumerate(file, 1)
            number = next((n for n, line in lines if line.decode(errors="ignore").encode() != line))
        raise UserError(f"{path}:{number} is not text in UTF-8: {error.reason}.") from None


def require_regular(path: Path, what: str = "file") -> None:
    """Raises unless the path is a regular file, called `what` in errors."""
    if not path.exists():
        if path.is_symlink():
            raise MissingFile(f"{path} is a link to {path.readlink()}, which does not exist.")
        raise MissingFile(f"There is no {what} {path}.")
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the {what} itself.")
    if not path.is_file():
        raise UserError(f"{path} is a pipe or a device: a {what} must be a regular file.")


def read_bytes(path: Path, what: str = "file") -> bytes:
    """The content of a file."""
    require_regular(path, what)
    return path.read_bytes()


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark, its line ends unchanged."""
    content = read_bytes(path)
    with read_failures(path):
        return content.decode("utf-8-sig")


def lines_of(text: str) -> list[str]:
    """The lines of a text. Only newlines end them: U+2028 and its like are part of a line."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    return _require_object(parse_json(read_bytes(path), str(path)), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text.

    Args:
        text: the JSON; bytes are in UTF-8.
        where: the name of its source in errors, such as a path.
    """
    try:
        # json.loads would accept bytes in UTF-16.
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(text)
        # Half of a surrogate pair, such as \ud800, could neither be encoded nor printed.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}.") from None


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields the JSON objects in the lines of a file: where each is, its value, and its bytes."""
    with read_failures(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _require_object(parse_json(line.rstrip(), where), where), len(line)


def _require_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object, but {type(value).__name__}.")
    return value
