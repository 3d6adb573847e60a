"""Text and JSONL files, read in pieces so that a file need not fit in memory.

A text file is one document, and so is each line of a .jsonl, {"text": ...}. A long text is
tokenized in pieces of about a quarter of a megabyte, split at line ends.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from coat_jax.errors import UserError
from coat_jax.files import parse_json, path_failures, utf8_failures
from coat_jax.limits import shown
from coat_jax.tokenizers import AnyTokenizer
from coat_jax.training.data.paths import CHAT

PIECE = 1 << 18  # characters


class Piece(NamedTuple):
    """Some text of a document."""

    text: str
    first: bool  # whether the document begins here
    last: bool  # whether it ends here
    size: int  # in bytes, of what was read for it
    place: str = ""  # file and line, for errors


def pieces(paths: list[Path]) -> Iterator[Piece]:
    """The documents of these files, in order; empty ones are left out."""
    for path in paths:
        yield from _of_lines(path) if path.suffix.lower() == CHAT else _of_text(path)


def encode(
    tokenizer: AnyTokenizer, texts: Sequence[str], continued: Sequence[bool], places: Sequence[str]
) -> list[np.ndarray]:
    """The tokens of each text; an error names the place of the text that it is about."""
    try:
        return tokenizer.encode_documents(texts, continued)
    except UserError:
        for text, place in zip(texts, places, strict=True):
            try:
                tokenizer.encode_documents([text])
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
        raise


def require_small(paths: list[Path], limit: int, remedy: str) -> None:
    """Raises if these files together have more bytes than are tokenized when a run begins."""
    size = sum(path.stat().st_size for path in paths)
    if size > limit:
        raise UserError(
            f"{paths[0]} and what comes with it have {size / 2**20:,.0f} MiB, and a run tokenizes "
            f"up to {limit / 2**20:,.0f} when it begins. {remedy}"
        )


def records(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """The lines of a .jsonl: where each stands, what it says, and its size in bytes."""
    with path_failures(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            if not line.strip():
                continue
            record = parse_json(line.rstrip(), place)
            if not isinstance(record, dict):
                raise UserError(f"{place} is not a JSON object, but {type(record).__name__}.")
            yield place, record, len(line)


def _of_lines(path: Path) -> Iterator[Piece]:
    for place, record, size in records(path):
        if not isinstance(text := record.get("text"), str):
            chat = " For conversations, set --data.kind chat." if "messages" in record else ""
            keys = shown(sorted(record))
            raise UserError(f'{place} has no "text" that is a string; its keys are {keys}.{chat}')
        for piece in _document(io.StringIO(text, newline="\n")):
            yield piece._replace(size=size if piece.last else 0, place=place)


def _of_text(path: Path) -> Iterator[Piece]:
    with (
        path_failures(path),
        utf8_failures(path),
        path.open(encoding="utf-8-sig", newline="\n") as file,
    ):
        line = 1
        for piece in _document(file):
            yield piece._replace(place=f"{path}, from line {line:,}")
            line += piece.text.count("\n")


def _document(file: TextIO) -> Iterator[Piece]:
    text, first = _some(file), True
    while text:
        following = _some(file)
        yield Piece(text, first, not following, len(text.encode()))
        text, first = following, False


def _some(file: TextIO) -> str:
    return file.read(PIECE) + file.readline(PIECE)
