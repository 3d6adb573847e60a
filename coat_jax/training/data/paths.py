"""Paths of data: patterns become files, and what a file is can be told from its name."""

import glob
from pathlib import Path

TOKENS, CHAT = (".npy", ".bin"), ".jsonl"


def files_of(patterns: tuple[str, ...]) -> list[Path]:
    """The files that these paths and patterns name: in their order, a pattern's by name."""
    return [path for pattern in patterns for path in _files(pattern)]


def are_tokens(paths: list[Path]) -> bool:
    """Whether these are token files; raises where some are and some are not."""
    tokens = [path for path in paths if path.suffix in TOKENS]
    if tokens and len(tokens) < len(paths):
        other = next(path for path in paths if path.suffix not in TOKENS)
        raise ValueError(
            f"{tokens[0]} holds tokens, and {other} text: make tokens of the text with `coat "
            "tokenize`, and train on token files."
        )
    return bool(tokens)


def _files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise IsADirectoryError(
            f"{pattern} is a folder. Name its files by a pattern, as in '{path}/*.npy'."
        )
    if path.exists():
        return [path]
    found = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 (absolute patterns)
    files = [path for path in found if path.is_file()]
    if not files:
        what = "No file matches" if glob.has_magic(pattern) else "There is no file"
        raise FileNotFoundError(f"{what} {pattern}, looked for from {Path.cwd()}.")
    return files
