"""From a config to a loader: which reader the data needs, and which part of it is held out.

No file is both trained on and held out, and one tokenizer makes the tokens of both.
"""

from pathlib import Path
from typing import Literal, get_args

import numpy as np

from coat_jax.errors import UserError
from coat_jax.tokenizers import AnyTokenizer, digest_of, document_tokenizer
from coat_jax.training.data import chat, corpus
from coat_jax.training.data.config import DataConfig
from coat_jax.training.data.loader import Loader
from coat_jax.training.data.packing import Packed
from coat_jax.training.data.paths import are_tokens, files_of, identity
from coat_jax.training.data.rows import TextRows, Windows
from coat_jax.training.data.stream import Stream, part_in_memory
from coat_jax.training.data.token_files import open_files, sidecar_of
from coat_jax.training.data.tokenizing import in_memory, require_small
from coat_jax.validation import brief

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
CORPUS = "corpus"  # in place of paths: the built-in one
UNKNOWN = "unknown"  # in place of the digest of a tokenizer
SEARCHED = 1 << 24  # how many tokens are searched for the beginning of a document


def load(
    config: DataConfig,
    *,
    split: Split,
    batch: int,
    sequence: int,
    vocab: int,
    seed: int = 0,
    process: int = 0,
    processes: int = 1,
    epochs: int | None = None,
) -> Loader:
    """Opens the data of one split, and checks as much of it as is cheap.

    Args:
        config: what the data is.
        split: "train", or "held_out", which shares no token with it.
        batch: rows in a batch, of all processes together.
        sequence: tokens in a row.
        vocab: the model's vocabulary; a token outside it is an error.
        seed: of the order of the rows.
        process: the number of this process among those that read different rows.
        processes: how many there are.
        epochs: how often all data is read, with the last batch padded; None continues without end.
    """
    rows = rows_of(config, split=split, sequence=sequence, vocab=vocab, seed=seed)
    return Loader(rows, batch=batch, seed=seed, process=process, processes=processes, epochs=epochs)


def rows_of(
    config: DataConfig, *, split: Split, sequence: int, vocab: int, seed: int = 0
) -> TextRows:
    """The rows of one split; for the arguments see `load`."""
    if split not in SPLITS:
        raise UserError(f"There is no split {brief(split)}: use {' or '.join(map(repr, SPLITS))}.")
    _require_apart(config)
    _require_one_tokenizer(config)
    patterns = config.train
    if split == "held_out" and config.held_out:
        patterns = config.held_out
    rows: TextRows
    if config.kind == "chat":
        rows = _conversations(config, split, files_of(patterns), sequence, vocab, seed)
    else:
        rows = _windows(config, split, patterns, sequence, vocab)
    # Usually one of the first rows has a label.
    if not any(rows.has_labels(rows[row]) for row in range(len(rows))):
        raise UserError(
            f"The {split} data has no token to predict: every label is masked. Is "
            "data.end_of_text the right token? Is each answer of a chat beyond sequence_length?"
        )
    return rows


# --- Readers ---------------------------------------------------------------------------------


def _windows(
    config: DataConfig, split: Split, patterns: tuple[str, ...], sequence: int, vocab: int
) -> Windows:
    """Rows of the corpus, of token files or of text."""
    end_of_text, divided = None, not config.held_out
    if CORPUS in patterns:
        text = getattr(corpus.load(), split)
        stream, divided = Stream([part_in_memory(f"the corpus ({split})", text)]), False
    elif are_tokens(paths := files_of(patterns)):
        notes = sidecar_of(paths) or {"vocab": 0, "end_of_text": None}
        _require_vocab(f"The data in {paths[0].parent}", notes["vocab"], vocab)
        end_of_text = notes["end_of_text"] if config.end_of_text is None else config.end_of_text
        stream = Stream(open_files(paths, dtype=config.dtype))
    else:
        tokenizer = _tokenizer(config, vocab)
        stream = Stream([part_in_memory(str(paths[0]), in_memory(paths, tokenizer))])
        end_of_text = tokenizer.end_of_text
    part = range(len(stream))
    if divided:
        boundary = len(stream) - round(config.held_out_part * len(stream))
        if end_of_text is not None and boundary < len(stream):
            boundary = _document_at(stream, boundary, end_of_text, vocab)
        part = part[:boundary] if split == "train" else part[boundary:]
    return Windows(stream, part, sequence=sequence, end_of_text=end_of_text, vocab=vocab)


def _conversations(
    config: DataConfig, split: Split, paths: list[Path], sequence: int, vocab: int, seed: int
) -> Packed:
    require_small(paths, chat.IN_MEMORY, "Divide the conversations among several runs.")
    tokenizer = _tokenizer(config, vocab, template=chat.spelled(config.template))
    documents = chat.read(paths, tokenizer, config.template)
    if not config.held_out:
        count = len(documents.ends)
        boundary = count - max(round(config.held_out_part * count), 1)
        if boundary < 1:
            raise UserError(f"{paths[0]}: one conversation cannot be split for held-out data.")
        documents = documents.part(range(boundary) if split == "train" else range(boundary, count))
    return Packed(documents, sequence=sequence, seed=seed, end_of_text=tokenizer.end_of_text)


def _tokenizer(config: DataConfig, vocab: int, *, template: str = "") -> AnyTokenizer:
    tokenizer = document_tokenizer(config.tokenizer, config.end_of_text, template=template)
    _require_vocab(config.tokenizer or "Text as bytes", tokenizer.vocab, vocab)
    return tokenizer


def _require_vocab(what: str, needed: int, vocab: int) -> None:
    if needed > vocab:
        raise UserError(
            f"{what} has a vocabulary of {needed:,}, and the model one of {vocab:,}. Give the "
            f"model at least that, as with --model.vocab {needed}."
        )


def _document_at(stream: Stream, place: int, end_of_text: int, vocab: int) -> int:
    """Where the first document after a place begins, or else the document at the place.

    If more than a tenth of all tokens follow the beginning of the latter: the place itself.
    """
    start = min(place, max(place - SEARCHED, len(stream) - len(stream) // 10))
    searched = stream.read(start, min(place + SEARCHED, len(stream)), vocab=vocab)
    begins = start + 1 + np.flatnonzero(searched[:-1] == end_of_text)
    return int([*begins[begins > place][:1], *begins[-1:], place][0])


# --- What training and held-out data must have in common, and what not -------------------------


def _require_apart(config: DataConfig) -> None:
    """Raises if a file is both trained on and held out."""
    train, held_out = (
        {identity(path): path for path in _files_of_split(config, split)} for split in SPLITS
    )
    if both := train.keys() & held_out.keys():
        path = min(train[own] for own in both)
        raise UserError(f"{path} is named in data.train and in data.held_out: use it in one.")


def _files_of_split(config: DataConfig, split: Split) -> list[Path]:
    patterns: tuple[str, ...] = getattr(config, split)
    if CORPUS not in patterns:
        return files_of(patterns)
    if len(patterns) > 1 or config.kind == "chat" or (config.tokenizer and split == "train"):
        raise UserError(
            f"data.{split}={patterns} names the built-in corpus, which is text as bytes: it takes "
            "no other files, no data.tokenizer, and no data.kind 'chat'. Name files instead."
        )
    return corpus.files_of()[SPLITS.index(split)]


def _require_one_tokenizer(config: DataConfig) -> None:
    """Raises if `data.tokenizer`, the training data and the held-out data are known to differ."""
    named = None if config.tokenizer is None else digest_of(config.tokenizer)
    made = {"data.tokenizer": named} if named else {}
    for split in SPLITS:
        patterns: tuple[str, ...] = getattr(config, split)
        if not patterns:
            continue  # held-out data is part of the training data
        if CORPUS in patterns:
            made[f"data.{split}"] = digest_of(None)
        elif not are_tokens(paths := files_of(patterns)):
            made[f"data.{split}"] = named or digest_of(None)
        elif notes := sidecar_of(paths):
            made[f"data.{split}"] = notes["tokenizer"]
        elif named is None:
            made[f"data.{split}"] = UNKNOWN
    kinds = set(made.values())
    if len(kinds - {UNKNOWN}) > 1 or kinds == {UNKNOWN, digest_of(None)}:
        raise UserError(
            f"The data have several tokenizers: {', '.join(f'{k} {v}' for k, v in made.items())}. "
            "Use one for all. data.tokenizer names that of text, and of token files that `coat "
            "tokenize` did not make."
        )
