"""Paths of data: patterns become files, whose formats are recognized by their names.

A file is read once, however many names, links and patterns lead to it: held-out text must
not occur in the training data under another name.
"""

import fnmatch
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from coat_jax.errors import UserError
from coat_jax.files import MissingFile, expanded, is_folder, path_failures, require_regular, status
from coat_jax.printable import counted

TOKENS, CHAT = (".npy", ".bin"), ".jsonl"
ANY_FOLDERS = "**"

Identity = tuple[int, int]


def files_of(patterns: tuple[str, ...]) -> list[Path]:
    """The files that these paths and patterns name, in this order; those of a pattern by name."""
    named: dict[Identity, Path] = {}
    for pattern in patterns:
        for path in _files(pattern):
            named.setdefault(identity(path), path)
    return list(named.values())


def are_tokens(paths: list[Path]) -> bool:
    """Whether these are token files; raises if only some are."""
    tokens = [path for path in paths if path.suffix.lower() in TOKENS]
    if tokens and len(tokens) < len(paths):
        other = next(path for path in paths if path.suffix.lower() not in TOKENS)
        raise UserError(
            f"{tokens[0]} holds tokens, and {other} text: make tokens of the text with `coat "
            "tokenize`, and train on token files."
        )
    return bool(tokens)


def listed(paths: list[Path]) -> str:
    """The first of these files by its name, and how many others there are."""
    others = counted(len(paths) - 1, "other file")
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {others}"


def identity(path: Path) -> Identity:
    """An identity that all names of a file or folder share, links included."""
    found = path.stat()
    return found.st_dev, found.st_ino


def _files(pattern: str) -> list[Path]:
    if not pattern:
        raise UserError("The name of a file is empty. Is a variable of the shell not set?")
    path = expanded(pattern)
    if is_folder(path):
        raise UserError(
            f"{pattern} is a folder. Name its files by a pattern, as in '{path}/*.npy' or "
            f"'{path}/*.txt'."
        )
    if not glob.has_magic(str(path)) or status(path):
        require_regular(path)
        return [path]
    with path_failures(path):
        found = sorted(match for match in _matches(path) if not match.is_dir())
    if not found:
        raise MissingFile(f"No file matches {pattern}, searched from {Path.cwd()}.")
    for match in found:
        require_regular(match)
    return found


# --- Patterns --------------------------------------------------------------------------------
#
# glob.glob follows links in circles until the system refuses.


def _matches(pattern: Path) -> list[Path]:
    """Everything that matches a pattern, in which ** stands for any number of folders."""
    parts = pattern.parts[bool(pattern.anchor) :]
    found = [Path(pattern.anchor or ".")]
    for part in (*parts, "*") if parts[-1] == ANY_FOLDERS else parts:
        folders = [path for path in found if path.is_dir()]
        if part == ANY_FOLDERS:
            seen: set[Identity] = set()
            found = [below for folder in folders for below in _walk(folder, {}, seen)]
        else:
            found = [child for folder in folders for child in _children(folder, part)]
    return found


def _walk(folder: Path, above: dict[Identity, Path], seen: set[Identity]) -> Iterator[Path]:
    """A folder and all folders below it, links included, except those in `seen`, which grows."""
    own = identity(folder)
    if own in above:
        raise UserError(
            f"{folder} leads back to {above[own]}: ** would go round in circles. Remove the link, "
            "or name the folders."
        )
    if own not in seen:
        seen.add(own)
        yield folder
        for child in _children(folder, "*"):
            if child.is_dir():
                yield from _walk(child, {**above, own: folder}, seen)


def _children(folder: Path, part: str) -> list[Path]:
    """What in a folder matches one part of a pattern; hidden names only if the pattern's is."""
    if not glob.has_magic(part):
        child = folder / part
        return [child] if os.path.lexists(child) else []
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if fnmatch.fnmatchcase(entry.name, part)]
    return [folder / name for name in sorted(names) if part[0] == "." or name[0] != "."]
