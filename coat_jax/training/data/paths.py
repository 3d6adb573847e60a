"""Paths of data: patterns become files.

A file is read once, however many names, links and patterns lead to it: held-out text must
not occur in the training data under another name.
"""

import glob
from collections.abc import Sequence
from pathlib import Path

from coat_jax.errors import UserError
from coat_jax.files import MissingFile, expand_user, require_regular
from coat_jax.printable import amount


def files_of(patterns: tuple[str, ...]) -> list[Path]:
    """Returns the files of these paths and patterns, in this order; those of a pattern by name."""
    named: dict[tuple[int, int], Path] = {}
    for pattern in patterns:
        path = expand_user(pattern)
        found = [path]
        if glob.has_magic(str(path)) and not path.exists():
            # Path.glob would follow no links to folders.
            matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
            found = sorted(match for match in matches if not match.is_dir())
        if not found:
            raise MissingFile(f"No file matches {pattern}, searched from {Path.cwd()}.")
        for match in found:
            require_regular(match)
            named.setdefault(identity(match), match)
    return list(named.values())


def listing(paths: Sequence[str | Path]) -> str:
    """Returns the first of these files, and how many others there are."""
    others = f" and {amount(len(paths) - 1, 'other file')}" if len(paths) > 1 else ""
    return f"{paths[0]}{others}"


def require_apart(files: Sequence[Path], others: Sequence[Path]) -> None:
    """Raises if a file is trained on and held out; the error has its name among `files`."""
    known = {identity(path): path for path in files}
    if both := known.keys() & set(map(identity, others)):
        path = min(known[own] for own in both)
        raise UserError(f"{path} is named in data.train and in data.held_out: use it in one.")


def identity(path: Path) -> tuple[int, int]:
    """Returns an identity that all names of a file share, links included."""
    found = path.stat()
    return found.st_dev, found.st_ino
