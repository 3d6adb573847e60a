"""Text files into tokens: into memory, or into files that are read without loading them.

A text file is one document, and so is each line of a .jsonl, {"text": ...}. A long text is
tokenized in pieces of about a quarter of a megabyte, split at line ends, so it need not fit in
memory. A folder of token files depends on the text and the tokenizer alone, and appears under its
name when it is complete:

    out/00000.npy, 00001.npy, ...    documents one after another, each ended by `end_of_text`
    out/tokens.json                  vocabulary, dtype, end_of_text, tokenizer, counts
    out/manifest.json                checksums of these files
"""

import collections
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import numpy as np
from jaxtyping import UInt

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.files import json_lines, read_failures
from coat_jax.tokenizers import AnyTokenizer
from coat_jax.training.data.paths import listing
from coat_jax.training.data.token_files import SIDECAR
from coat_jax.validation import brief
from coat_jax.writing import atomic_folder

COMMAND, CHAT = "coat tokenize", ".jsonl"
IN_MEMORY = 256 << 20  # bytes of text; more would take minutes at the start of every run
PIECE = 1 << 18  # characters
TOGETHER = 4 << 20  # characters that are tokenized at once
AHEAD = 2  # batches that are tokenized while the one before is written
SHARD = 1 << 27  # tokens in a file, plus the rest of its last document


class Piece(NamedTuple):
    """Some text of a document."""

    text: str
    first: bool  # whether the document begins here
    last: bool  # whether it ends here
    size: int  # in bytes, of what was read for it
    place: str  # file and line, for errors


def pieces(paths: list[Path]) -> Iterator[Piece]:
    """Yields the documents of these files, in order, without empty ones."""
    for path in paths:
        if path.suffix.lower() == CHAT:
            for place, record, size in json_lines(path):
                if not isinstance(text := record.get("text"), str):
                    raise UserError(
                        f'{place} has no "text" that is a string; its keys are '
                        f"{brief(sorted(record))}. For conversations, set --data.kind chat."
                    )
                for piece in _document(io.StringIO(text, newline="\n"), place):
                    yield piece._replace(size=size if piece.last else 0)
        else:
            with read_failures(path), path.open(encoding="utf-8-sig", newline="\n") as file:
                yield from _document(file, str(path))


def encode(
    tokenizer: AnyTokenizer, texts: Sequence[str], places: Sequence[str], *, continued: bool
) -> list[np.ndarray]:
    """Returns the tokens of each text; an error names the place of the text that it is about."""
    try:
        return tokenizer.encode_documents(texts, continued=continued)
    except UserError:
        for text, place in zip(texts, places, strict=True):
            try:
                tokenizer.encode_documents([text])
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
        raise


def _document(file: TextIO, place: str) -> Iterator[Piece]:
    """Yields the pieces of a text, each with some lines."""
    texts = iter(lambda: file.read(PIECE) + file.readline(PIECE), "")
    following = itertools.pairwise(itertools.chain(texts, [""]))
    for number, (text, after) in enumerate(following):
        yield Piece(text, number == 0, not after, len(text.encode()), place)


class Encoded(NamedTuple):
    """The tokens of some pieces of text."""

    tokens: UInt[np.ndarray, " N"]
    documents: int  # how many documents end among them
    ended: bool  # whether the last one does
    size: int  # in bytes, of the text


def encode_files(paths: list[Path], tokenizer: AnyTokenizer) -> Iterator[Encoded]:
    """Yields the tokens of all documents, in order; threads compute some ahead."""
    end = np.array([tokenizer.end_of_text], tokenizer.dtype)

    def encode_batch(batch: list[Piece]) -> Encoded:
        texts, firsts, lasts, sizes, places = zip(*batch, strict=True)
        found = encode(tokenizer, texts, places, continued=not firsts[0])
        ends = [end if last else end[:0] for last in lasts]
        tokens = np.concatenate([*itertools.chain(*zip(found, ends, strict=True))])
        return Encoded(tokens, sum(lasts), lasts[-1], sum(sizes))

    read = 0

    def batch_of(piece: Piece) -> tuple[int, bool]:
        nonlocal read
        read += len(piece.text)
        return read // TOGETHER, piece.first

    with ThreadPoolExecutor(AHEAD) as pool:  # tokenizers release the GIL
        waiting: collections.deque[Future[Encoded]] = collections.deque()
        for _, batch in itertools.groupby(pieces(paths), batch_of):
            waiting.append(pool.submit(encode_batch, list(batch)))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def in_memory(paths: list[Path], tokenizer: AnyTokenizer) -> UInt[np.ndarray, " N"]:
    """Returns all tokens at once; raises if the text is large."""
    size = sum(path.stat().st_size for path in paths)
    if size > IN_MEMORY:
        raise UserError(
            f"{listing(paths)} have {size / 2**20:,.0f} MiB, and a run tokenizes up to "
            f"{IN_MEMORY / 2**20:,.0f} when it begins. Run `coat tokenize` once, and train on the "
            "files that it writes."
        )
    parts = (part.tokens for part in encode_files(paths, tokenizer))
    return np.concatenate([np.empty(0, tokenizer.dtype), *parts])


def write(
    paths: list[Path],
    out: Path,
    tokenizer: AnyTokenizer,
    *,
    progress: Callable[[int], None] = lambda size: None,
) -> dict[str, Any]:
    """Writes token files to a new folder; returns what `tokens.json` in it says.

    Args:
        paths: text files and .jsonl.
        out: the folder.
        tokenizer: makes the tokens.
        progress: called with the bytes of text that were written since the last call.
    """
    notes: dict[str, Any] = {
        "vocab": tokenizer.vocab,
        "dtype": tokenizer.dtype.name,
        "end_of_text": tokenizer.end_of_text,
        "tokenizer": tokenizer.digest,
        "documents": 0,
        "tokens": 0,
        "files": [],  # the number of tokens in each
    }
    parts = encode_files(paths, tokenizer)
    with atomic_folder(out, COMMAND) as folder:
        for first in parts:
            tokens = 0
            with (folder / f"{len(notes['files']):05}.npy").open("wb") as file:
                _write_header(file, tokenizer.dtype, 0)
                for part in itertools.chain([first], parts):
                    file.write(part.tokens.data)
                    tokens += len(part.tokens)
                    notes["documents"] += part.documents
                    progress(part.size)
                    if tokens >= SHARD and part.ended:
                        break
                file.seek(0)
                _write_header(file, tokenizer.dtype, tokens)
            notes["files"].append(tokens)
        notes["tokens"] = sum(notes["files"])
        if not notes["tokens"]:
            raise UserError(f"There is no text in {listing(paths)}.")
        (folder / SIDECAR).write_text(json.dumps(notes, indent=2) + "\n", "utf-8")
        manifest.write(folder)
    return notes


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """NumPy leaves room in a header for a growing first axis: any count takes the same space."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
