"""Text files into tokens: into memory, or into files that are read without loading them.

    out/00000.npy, 00001.npy, ...    documents one after another, each ended by `end_of_text`
    out/tokens.json                  vocabulary, dtype, end_of_text, tokenizer, counts
    out/manifest.json                checksums of these files

The files depend on the text and the tokenizer alone, not on the number of cores. The
folder appears under its name when it is complete.
"""

import collections
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import UInt

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.tokenizers import AnyTokenizer
from coat_jax.training.data.paths import listed
from coat_jax.training.data.text_files import Piece, encode, pieces, require_small
from coat_jax.training.data.token_files import SIDECAR
from coat_jax.writing import NewFolder, full_disk

IN_MEMORY = 256 << 20  # bytes of text; more would take minutes at the start of every run
TOGETHER = 4 << 20  # characters that are tokenized at once
AHEAD = 2  # batches that are tokenized while the one before is written
SHARD = 1 << 27  # tokens in a file, plus the rest of its last document


class Encoded(NamedTuple):
    """The tokens of some pieces of text."""

    tokens: UInt[np.ndarray, " N"]
    documents: int  # how many documents end among them
    ended: bool  # whether the last one does
    size: int  # in bytes, of the text


def encoded(paths: list[Path], tokenizer: AnyTokenizer) -> Iterator[Encoded]:
    """The tokens of all documents, in order."""

    def encoded_batch(batch: list[Piece]) -> Encoded:
        texts, continued = [piece.text for piece in batch], [not piece.first for piece in batch]
        found = encode(tokenizer, texts, continued, [piece.place for piece in batch])
        end = np.array([tokenizer.end_of_text], tokenizer.dtype)
        ends = [end if piece.last else end[:0] for piece in batch]
        return Encoded(
            np.concatenate([part for pair in zip(found, ends, strict=True) for part in pair]),
            documents=sum(piece.last for piece in batch),
            ended=batch[-1].last,
            size=sum(piece.size for piece in batch),
        )

    return _ahead(encoded_batch, _together(pieces(paths)))


def in_memory(paths: list[Path], tokenizer: AnyTokenizer) -> UInt[np.ndarray, " N"]:
    """All tokens at once; raises if the text is large."""
    require_small(
        paths,
        IN_MEMORY,
        "Run `coat tokenize` once, and train on the files that it writes.",
    )
    parts = [part.tokens for part in encoded(paths, tokenizer)]
    return np.concatenate(parts) if parts else np.empty(0, tokenizer.dtype)


def write(
    paths: list[Path],
    out: Path,
    tokenizer: AnyTokenizer,
    *,
    progress: Callable[[Encoded], None] = lambda part: None,
    shard: int = SHARD,
) -> dict[str, Any]:
    """Writes token files to a new folder; returns what `tokens.json` in it says.

    Args:
        paths: text files and .jsonl.
        out: the folder.
        tokenizer: makes the tokens.
        progress: called after each batch that was written.
        shard: tokens in a file; it ends with a document, so it may have more.
    """
    new = NewFolder(out, "coat tokenize")
    new.require_new()
    with full_disk(out.parent, out.name), new.appearing() as folder:
        notes = {
            "vocab": tokenizer.vocab,
            "dtype": tokenizer.dtype.name,
            "end_of_text": tokenizer.end_of_text,
            "tokenizer": tokenizer.digest,
            **_write_shards(folder, encoded(paths, tokenizer), tokenizer.dtype, progress, shard),
        }
        if not notes["tokens"]:
            raise UserError(f"There is no text in {listed(paths)}.")
        (folder / SIDECAR).write_text(json.dumps(notes, indent=2) + "\n", "utf-8")
        manifest.write(folder)
    return notes


def _write_shards(
    folder: Path,
    parts: Iterator[Encoded],
    dtype: np.dtype,
    progress: Callable[[Encoded], None],
    shard: int,
) -> dict[str, Any]:
    files: list[int] = []
    documents = 0
    for first in parts:
        tokens = 0
        with (folder / f"{len(files):05}.npy").open("wb") as file:
            _write_header(file, dtype, 0)
            for part in itertools.chain([first], parts):
                file.write(part.tokens.data)
                tokens += len(part.tokens)
                documents += part.documents
                progress(part)
                if tokens >= shard and part.ended:
                    break
            file.seek(0)
            _write_header(file, dtype, tokens)
        files.append(tokens)
    return {"documents": documents, "tokens": sum(files), "files": files}


def _write_header(file: BinaryIO, dtype: np.dtype, count: int) -> None:
    """NumPy leaves room in a header for a growing first axis: any count takes the same space."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})


def _together(all_pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in batches of about TOGETHER characters."""
    batch, size = [], 0
    for piece in all_pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _ahead(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """`map` that computes some results ahead in threads; tokenizers release the GIL."""
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting: collections.deque[Any] = collections.deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
