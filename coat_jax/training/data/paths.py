"""Paths of data: patterns become files, whose formats are recognized by their names.

A file is read once, however many names, links and patterns lead to it: held-out text must
not occur in the training data under another name.
"""

import glob
from pathlib import Path

from coat_jax.errors import UserError
from coat_jax.files import MissingFile, expand_user, require_regular
from coat_jax.printable import amount

TOKENS, CHAT = (".npy", ".bin"), ".jsonl"


def files_of(patterns: tuple[str, ...]) -> list[Path]:
    """The files that these paths and patterns name, in this order; those of a pattern by name."""
    named: dict[tuple[int, int], Path] = {}
    for pattern in patterns:
        for path in _files(pattern):
            named.setdefault(identity(path), path)
    return list(named.values())


def are_tokens(paths: list[Path]) -> bool:
    """Whether these are token files; raises if only some are."""
    other = [path for path in paths if path.suffix.lower() not in TOKENS]
    if other and len(other) < len(paths):
        raise UserError(
            f"{other[0]} holds text, and other files of the same data hold tokens: make tokens of "
            "the text with `coat tokenize`, and train on token files."
        )
    return not other


def listing(paths: list[Path]) -> str:
    """The first of these files by its name, and how many others there are."""
    others = amount(len(paths) - 1, "other file")
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {others}"


def identity(path: Path) -> tuple[int, int]:
    """An identity that all names of a file share, links included."""
    found = path.stat()
    return found.st_dev, found.st_ino


def _files(pattern: str) -> list[Path]:
    path = expand_user(pattern)
    if path.is_dir():
        raise UserError(
            f"{path} is a folder. Name its files by a pattern, as in '{path}/*.npy' or "
            f"'{path}/*.txt'."
        )
    found = [path]
    if glob.has_magic(str(path)) and not path.exists():
        # Path.glob would follow no links to folders.
        matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207
        found = sorted(match for match in matches if not match.is_dir())
    if not found:
        raise MissingFile(f"No file matches {pattern}, searched from {Path.cwd()}.")
    for match in found:
        require_regular(match)
    return found
