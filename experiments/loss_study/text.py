"""The text of `loss_study`: what is on the machine, each document once, as tokens.

    files -> documents without near-duplicates -> training | held out -> tokens

Documents are ordered by a hash of their content. A document is dropped if most of it was seen in
earlier ones (`duplicates`). The last documents are held out, and therefore share little with the
training text.

    folder/text.json                     counts, and a digest of both parts
    folder/{train,held_out}.jsonl        the documents
    folder/tokenizer_V.json              a byte-level BPE of V tokens, learnt from the text
    folder/{train,held_out}_V.npy        tokens, each document ended by token 0

What is in the folder is not made again. Machines that were installed alike have the same packages,
and the same digest; runs on different text are never compared.
"""

import hashlib
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt16

from coat_jax import writing
from coat_jax.errors import UserError
from experiments.loss_study.duplicates import distinct

SUFFIXES = (
    *(".py", ".pyi", ".pyx", ".pxd", ".md", ".rst", ".txt"),
    *(".h", ".hpp", ".hh", ".cuh", ".cu", ".c", ".cc", ".cpp", ".inl"),
    *(".sh", ".pl", ".pm", ".pod", ".cmake", ".proto"),
)
SYSTEM = ("/usr/include", "/usr/lib", "/usr/local", "/usr/share", "/opt")
SMALLEST, LARGEST = 500, 1_000_000  # bytes of a file
LETTERS = 0.65  # of a text are letters or white space, at least: others are tables
HELD_OUT = 8_000_000  # bytes of documents
FOR_TOKENIZER = 40_000_000  # bytes of documents
NOTES = "text.json"
PARTS = ("train", "held_out")
END = "<|endoftext|>"
BYTES = 256  # the vocabulary that needs no tokenizer; byte 0 ends a document
TOGETHER = 2000  # documents that are tokenized at once


def roots() -> list[Path]:
    """Folders with text on this machine: Python's library, its packages, the system's."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    places |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    places |= set(SYSTEM)
    return [Path(place).resolve() for place in sorted(places) if Path(place).is_dir()]


def prepare(folder: Path, vocab: int, *, places: list[Path], limit: int) -> dict[str, Any]:
    """Makes what is missing of text and tokens; returns the notes in `text.json`.

    Args:
        folder: for all of it.
        vocab: of the tokenizer, or `BYTES`.
        places: folders to read.
        limit: bytes of text at most.
    """
    if not (folder / NOTES).exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = list(_read(places, avoid=folder))
        parts = dict(zip(PARTS, split(found, limit), strict=True))
        read = {"documents": len(found), "bytes": sum(map(len, found))}
        made: dict[str, Any] = {"digest": _digest(parts), "limit": limit, "read": read}
        for name, part in parts.items():
            made[name] = {"documents": len(part), "bytes": sum(map(len, part))}
            lines = [json.dumps(document.decode()) + "\n" for document in part]
            writing.replace(folder / f"{name}.jsonl", "".join(lines).encode())
        writing.replace(folder / NOTES, json.dumps(made, indent=2).encode() + b"\n")
    made = notes(folder)
    if made["limit"] != limit:
        raise UserError(
            f"{folder} holds text limited to {made['limit']:,} bytes, not {limit:,}. Name another "
            "folder, or the same limit."
        )
    if not _tokens(folder, "held_out", vocab).exists():
        _tokenize(folder, vocab)
    return made


def notes(folder: Path) -> dict[str, Any]:
    """What `prepare` noted of the text in a folder."""
    return dict(json.loads((folder / NOTES).read_text()))


def require_rows(tokens: int, rows: int, sequence: int) -> None:
    """Raises unless the tokens hold this many different rows: no run reads any text twice."""
    available = (tokens - 1) // sequence
    if rows > available:
        raise UserError(
            f"The run needs {rows:,} rows of {sequence} tokens and the text has {available:,}. No "
            "run reads any of it twice: take fewer steps or a smaller batch."
        )


def load(folder: Path, part: str, vocab: int) -> UInt16[np.ndarray, " N"]:
    """The tokens of "train" or "held_out", read from disk as they are needed."""
    tokens: np.ndarray = np.load(_tokens(folder, part, vocab), mmap_mode="r")
    return tokens


def _tokens(folder: Path, part: str, vocab: int) -> Path:
    return folder / f"{part}_{vocab}.npy"


# --- Reading and dropping near-duplicates -----------------------------------------------------


def split(texts: list[bytes], limit: int) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on and to hold out, the last ones, without near-duplicates.

    Args:
        texts: in any order.
        limit: bytes of documents at most.
    """
    ordered = sorted(texts, key=_hash)
    kept = [text for text, new in zip(ordered, distinct(ordered), strict=True) if new]
    kept = kept[: int(np.searchsorted(np.cumsum([len(text) for text in kept]), limit, "right"))]
    left, held = min(HELD_OUT, sum(map(len, kept)) // 10), len(kept)
    while held > 1 and left > 0:
        held -= 1
        left -= len(kept[held])
    return kept[:held], kept[held:]


def _read(places: list[Path], avoid: Path) -> Iterator[bytes]:
    """Every text below `places`, but for this repository and the folder `avoid`."""
    here = (Path(__file__).resolve().parent.parent, avoid.resolve())
    paths = set()
    for place in places:
        for base, folders, names in os.walk(place):
            inside = Path(base)
            if inside in here:
                folders.clear()
                continue
            paths |= {inside / name for name in names if name.endswith(SUFFIXES)}
    with ThreadPoolExecutor(4 * (os.cpu_count() or 1)) as pool:
        for text in pool.map(_text, sorted(paths), chunksize=64):
            if text is not None:
                yield text


def _text(path: Path) -> bytes | None:
    """The content of a file, if that is text."""
    try:
        if path.is_symlink() or not SMALLEST <= path.stat().st_size <= LARGEST:
            return None
        content = path.read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    counts = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
    return content if counts[0] == 0 and counts[_LETTERS].sum() >= LETTERS * len(content) else None


_LETTERS = np.array([i >= 128 or chr(i).isalpha() or chr(i).isspace() for i in range(256)])


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _digest(parts: dict[str, list[bytes]]) -> str:
    """A hash of the documents and of how they become tokens."""
    state = hashlib.blake2b(f"{FOR_TOKENIZER} {END}".encode(), digest_size=6)
    for part in PARTS:
        for document in parts[part]:
            state.update(_hash(document))
    return state.hexdigest()


# --- Tokens -----------------------------------------------------------------------------------


def _documents(path: Path) -> Iterator[str]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def _tokenize(folder: Path, vocab: int) -> None:
    """Writes the tokens of both parts; the held-out file comes last, and marks them complete."""
    encode = _bytes_of if vocab == BYTES else _learn(folder, vocab)
    for part in PARTS:
        tokens = list(_encoded(_documents(folder / f"{part}.jsonl"), encode))
        unfinished = folder / f"{part}_{vocab}.unfinished.npy"
        np.save(unfinished, np.concatenate(tokens))
        unfinished.replace(_tokens(folder, part, vocab))


def _encoded(documents: Iterator[str], encode: Any) -> Iterator[UInt16[np.ndarray, " N"]]:
    while batch := list(itertools.islice(documents, TOGETHER)):
        yield from encode(batch)


def _bytes_of(batch: list[str]) -> Iterator[UInt16[np.ndarray, " N"]]:
    for document in batch:
        yield np.frombuffer(document.encode() + b"\0", np.uint8).astype(np.uint16)


def _learn(folder: Path, vocab: int) -> Any:
    """A byte-level BPE of the first documents; returns what encodes a list of texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def some() -> Iterator[str]:
        left = FOR_TOKENIZER
        for document in _documents(folder / "train.jsonl"):
            left -= len(document)
            if left < 0:
                return
            yield document

    path = folder / f"tokenizer_{vocab}.json"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(some(), trainer)
    tokenizer.save(str(path))

    def encode(batch: list[str]) -> Iterator[UInt16[np.ndarray, " N"]]:
        for one in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array([*one.ids, 0], np.uint16)

    return encode
