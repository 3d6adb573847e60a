"""From a config to a loader: which reader the data needs, and which part of it is held out."""

from pathlib import Path

import numpy as np

from coat_jax.errors import UserError
from coat_jax.limits import shown
from coat_jax.tokenizers import AnyTokenizer, document_tokenizer
from coat_jax.training.data import chat, corpus
from coat_jax.training.data.config import DataConfig
from coat_jax.training.data.loader import Loader
from coat_jax.training.data.packing import Packed
from coat_jax.training.data.paths import are_tokens, files_of
from coat_jax.training.data.rows import IGNORED, Rows, Windows
from coat_jax.training.data.splits import (
    CORPUS,
    SPLITS,
    Split,
    require_apart,
    require_one_tokenizer,
)
from coat_jax.training.data.stream import Stream, TokensInMemory
from coat_jax.training.data.text_files import require_small
from coat_jax.training.data.token_files import open_files, sidecar_of
from coat_jax.training.data.tokenizing import in_memory

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
    if split not in SPLITS:
        raise UserError(f"There is no split {shown(split)}: use {' or '.join(map(repr, SPLITS))}.")
    rows = _rows(config, split, sequence, vocab, seed)
    _require_labels(rows, split)
    return Loader(rows, batch=batch, seed=seed, process=process, processes=processes, epochs=epochs)


def _rows(config: DataConfig, split: Split, sequence: int, vocab: int, seed: int) -> Rows:
    require_apart(config)
    require_one_tokenizer(config)
    own = split == "held_out" and config.held_out
    patterns = config.held_out if own else config.train
    if config.kind == "chat":
        if CORPUS in patterns:
            raise UserError(
                "data.kind='chat' needs conversations, and the built-in corpus has none: name "
                ".jsonl files in data.train."
            )
        return _chat_rows(config, split, files_of(patterns), sequence, vocab, seed)
    if CORPUS in patterns and config.tokenizer is not None:
        raise UserError(
            f"data.tokenizer={shown(config.tokenizer)} has nothing to turn into tokens: the "
            "built-in corpus is read as bytes. Name text files in data.train, or no tokenizer."
        )
    if CORPUS in patterns:
        stream, end_of_text, shared = _corpus(patterns, split), None, False
    else:
        stream, end_of_text = _files(config, files_of(patterns), vocab)
        shared = not config.held_out
    part = range(len(stream))
    if shared:
        part = _share(stream, split, config.held_out_part, end_of_text, vocab)
    return Windows(stream, part, sequence=sequence, end_of_text=end_of_text, vocab=vocab)


def _require_labels(rows: Rows, split: Split) -> None:
    """Raises if no row has a label; usually one of the first rows has."""
    if not any(np.any(rows[row].labels != IGNORED) for row in range(len(rows))):
        raise UserError(
            f"The {split} data has no token to predict: every label is masked. Is "
            "data.end_of_text the right token? Is each answer of a chat beyond sequence_length?"
        )


def _corpus(patterns: tuple[str, ...], split: Split) -> Stream:
    if len(patterns) > 1:
        raise UserError(f"{patterns} mixes the built-in corpus with files: name one or the other.")
    return Stream([TokensInMemory(f"the corpus ({split})", getattr(corpus.load(), split))])


def _files(config: DataConfig, paths: list[Path], vocab: int) -> tuple[Stream, int | None]:
    """Token files or text as a stream, and the token that ends its documents."""
    if are_tokens(paths):
        notes = sidecar_of(paths) or {"vocab": 0, "end_of_text": None}
        _require_vocab(f"The data in {paths[0].parent}", notes["vocab"], vocab)
        end_of_text = notes["end_of_text"] if config.end_of_text is None else config.end_of_text
        return Stream(open_files(paths, dtype=config.dtype)), end_of_text
    tokenizer = _tokenizer(config, vocab)
    tokens = TokensInMemory(str(paths[0]), in_memory(paths, tokenizer))
    return Stream([tokens]), tokenizer.end_of_text


def _chat_rows(
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


def _share(
    stream: Stream, split: Split, held_out: float, end_of_text: int | None, vocab: int
) -> range:
    """The split's part of a stream; its end is held out, from the beginning of a document on."""
    boundary = len(stream) - round(held_out * len(stream))
    if end_of_text is not None and boundary < len(stream):
        boundary = _document_at(stream, boundary, end_of_text, vocab)
    return range(boundary) if split == "train" else range(boundary, len(stream))


def _document_at(stream: Stream, place: int, end_of_text: int, vocab: int) -> int:
    """Where the first document after a place begins, or else the document at the place.

    If more than a tenth of all tokens follow the beginning of the latter: the place itself.
    """
    searched = stream.read(place, min(place + SEARCHED, len(stream)), vocab=vocab)
    ends = np.flatnonzero(searched[:-1] == end_of_text)
    if len(ends):
        return place + int(ends[0]) + 1
    stop, first = place, len(stream) - len(stream) // 10
    while stop > first:
        start = max(stop - SEARCHED, first)
        ends = np.flatnonzero(stream.read(start, stop, vocab=vocab) == end_of_text)
        if len(ends):
            return start + int(ends[-1]) + 1
        stop = start
    return place
