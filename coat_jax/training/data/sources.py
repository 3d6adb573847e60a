"""From a config to rows: which reader the data needs, and which part of it is held out.

No file is both trained on and held out, and one tokenizer makes the tokens of both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from coat_jax.errors import UserError
from coat_jax.files import read_bytes
from coat_jax.printable import amount
from coat_jax.tokenizers import AnyTokenizer, Bytes, digest_of, document_tokenizer
from coat_jax.training.data import chat, corpus
from coat_jax.training.data.config import DataConfig
from coat_jax.training.data.packing import Packed
from coat_jax.training.data.paths import are_tokens, files_of, identity
from coat_jax.training.data.rows import TextRows, Windows
from coat_jax.training.data.stream import Stream
from coat_jax.training.data.token_files import open_files, sidecar_of
from coat_jax.training.data.tokenizing import in_memory
from coat_jax.validation import brief

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
CORPUS = "corpus"  # in place of paths: the built-in one
UNKNOWN = "unknown"  # in place of the digest of a tokenizer
SEARCHED = 1 << 24  # how many tokens are searched for the beginning of a document


def rows_of(
    config: DataConfig, *, split: Split, sequence: int, vocab: int, seed: int = 0
) -> TextRows:
    """Opens the data of one split, and checks as much of it as is cheap.

    Args:
        config: what the data is.
        split: "train", or "held_out", which shares no token with it.
        sequence: tokens in a row.
        vocab: the model's vocabulary; a token outside it is an error.
        seed: decides which conversations share a row.
    """
    if split not in SPLITS:
        raise UserError(f"There is no split {brief(split)}: use {' or '.join(map(repr, SPLITS))}.")
    files = {name: _files(config, name) for name in SPLITS if getattr(config, name)}
    _require_apart(files)
    _require_one_tokenizer(config, files)
    source = split if split in files else "train"  # of which the end is held out
    rows: TextRows
    if config.kind == "chat":
        rows = _conversations(config, split, files[source], sequence, vocab, seed)
    elif CORPUS in getattr(config, source):
        stream = Stream({f"the corpus ({split})": getattr(corpus.load(), split)}, vocab)
        rows = Windows(stream, range(len(stream)), sequence=sequence, end_of_text=None)
    else:
        rows = _windows(config, split, files[source], sequence, vocab)
    # Usually one of the first rows has a label.
    if not any(rows.has_labels(rows[row]) for row in range(len(rows))):
        raise UserError(
            f"The {split} data has no token to predict in its {amount(len(rows), 'row')}. Is "
            "data.end_of_text the right token? Is each answer of a chat beyond sequence_length?"
        )
    return rows


# --- What training and held-out data must have in common, and what not -------------------------


def _files(config: DataConfig, split: Split) -> list[Path]:
    patterns: tuple[str, ...] = getattr(config, split)
    if CORPUS not in patterns:
        return files_of(patterns)
    if len(patterns) > 1 or config.kind == "chat" or (config.tokenizer and split == "train"):
        raise UserError(
            f"data.{split}={patterns} names the built-in corpus, which is text as bytes: it takes "
            "no other files, no data.tokenizer, and no data.kind 'chat'. Name files instead."
        )
    return corpus.files_of()[SPLITS.index(split)]


def _require_apart(files: Mapping[Split, list[Path]]) -> None:
    """Raises if a file is both trained on and held out."""
    train = {identity(path): path for path in files["train"]}
    if both := train.keys() & set(map(identity, files.get("held_out", []))):
        path = min(train[own] for own in both)
        raise UserError(f"{path} is named in data.train and in data.held_out: use it in one.")


def _require_one_tokenizer(config: DataConfig, files: Mapping[Split, list[Path]]) -> None:
    """Raises if `data.tokenizer`, the training data and the held-out data are known to differ."""
    path = config.tokenizer
    named = None if path is None else digest_of(read_bytes(Path(path), "tokenizer file"))
    made = {"data.tokenizer": named} if named else {}
    for split, paths in files.items():
        if CORPUS in getattr(config, split):
            made[f"data.{split}"] = Bytes.digest
        elif not are_tokens(paths):
            made[f"data.{split}"] = named or Bytes.digest
        else:
            notes = sidecar_of(paths)
            made[f"data.{split}"] = notes["tokenizer"] if notes else named or UNKNOWN
    kinds = set(made.values())
    if len(kinds - {UNKNOWN}) > 1 or kinds == {UNKNOWN, Bytes.digest}:
        raise UserError(
            f"The data have several tokenizers: {', '.join(f'{k} {v}' for k, v in made.items())}. "
            "Use one for all. data.tokenizer names that of text, and of token files that `coat "
            "tokenize` did not make."
        )


# --- Readers ---------------------------------------------------------------------------------


def _windows(
    config: DataConfig, split: Split, files: list[Path], sequence: int, vocab: int
) -> Windows:
    """Rows of token files or of text."""
    if are_tokens(files):
        notes = sidecar_of(files) or {"vocab": 0, "end_of_text": None}
        _require_vocab(f"The data in {files[0].parent}", notes["vocab"], vocab)
        end_of_text = notes["end_of_text"] if config.end_of_text is None else config.end_of_text
        if end_of_text is not None:
            _require_vocab(f"data.end_of_text={end_of_text}", end_of_text + 1, vocab)
        stream = Stream(open_files(files, dtype=config.dtype), vocab)
    else:
        tokenizer = _tokenizer(config, vocab)
        stream = Stream({str(files[0]): in_memory(files, tokenizer)}, vocab)
        end_of_text = tokenizer.end_of_text
    part = range(len(stream))
    if not config.held_out:
        boundary = len(stream) - round(config.held_out_part * len(stream))
        if end_of_text is not None and boundary < len(stream):
            boundary = _document_at(stream, boundary, end_of_text)
        part = part[:boundary] if split == "train" else part[boundary:]
    return Windows(stream, part, sequence=sequence, end_of_text=end_of_text)


def _document_at(stream: Stream, place: int, end_of_text: int) -> int:
    """Where the first document after a place begins, or else the document at the place.

    If more than a tenth of all tokens follow the beginning of the latter: the place itself.
    """
    start = min(place, max(place - SEARCHED, len(stream) - len(stream) // 10))
    searched = stream.read(start, min(place + SEARCHED, len(stream)))
    begins = start + 1 + np.flatnonzero(searched[:-1] == end_of_text)
    return int([*begins[begins > place][:1], *begins[-1:], place][0])


def _conversations(
    config: DataConfig, split: Split, files: list[Path], sequence: int, vocab: int, seed: int
) -> Packed:
    tokenizer = _tokenizer(config, vocab, template=chat.spelling(config.template))
    documents = chat.read(files, tokenizer, config.template)
    if not config.held_out:
        count = len(documents.ends)
        boundary = count - max(round(config.held_out_part * count), 1)
        documents = documents.part(range(boundary) if split == "train" else range(boundary, count))
    return Packed(documents, sequence=sequence, seed=seed, end_of_text=tokenizer.end_of_text)


def _tokenizer(config: DataConfig, vocab: int, *, template: str = "") -> AnyTokenizer:
    tokenizer = document_tokenizer(config.tokenizer, config.end_of_text, template=template)
    _require_vocab(config.tokenizer or "Text as bytes", tokenizer.vocab, vocab)
    return tokenizer


def _require_vocab(what: str, needed: int, vocab: int) -> None:
    if needed > vocab:
        raise UserError(
            f"{what} needs a vocabulary of {needed:,}, and the model has one of {vocab:,}. Give it "
            f"at least that, as with --model.vocab {needed}."
        )
