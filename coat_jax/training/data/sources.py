"""From a config to rows: which reader the data needs, and which part of it is held out.

No file is both trained on and held out, and one tokenizer makes the tokens of both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

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
from coat_jax.training.data.stream import Stream, open_files, read_notes
from coat_jax.training.data.tokenizing import in_memory

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
CORPUS = "corpus"  # in place of paths: the built-in one
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
    files = {name: _files(config, name) for name in SPLITS if getattr(config, name)}
    notes = {name: read_notes(of) if are_tokens(of) else {} for name, of in files.items()}
    train = {identity(path): path for path in files["train"]}
    if both := train.keys() & set(map(identity, files.get("held_out", []))):
        path = min(train[own] for own in both)
        raise UserError(f"{path} is named in data.train and in data.held_out: use it in one.")
    _require_one_tokenizer(config, files, notes)
    source = split if getattr(config, split) else "train"  # of which the end is held out
    rows: TextRows
    if config.kind == "chat":
        rows = _conversations(config, split, files[source], sequence, vocab, seed)
    else:
        if CORPUS in getattr(config, source):
            end_of_text = None
            stream = Stream({f"the corpus ({split})": getattr(corpus.load(), split)}, vocab)
        elif are_tokens(files[source]):
            noted, end_of_text = notes[source], config.end_of_text
            _require_vocab(f"The data in {files[source][0].parent}", noted.get("vocab", 0), vocab)
            if end_of_text is None:
                end_of_text = noted.get("end_of_text")
            else:
                _require_vocab(f"data.end_of_text={end_of_text}", end_of_text + 1, vocab)
            stream = Stream(open_files(files[source], dtype=config.dtype), vocab)
        else:
            tokenizer = _tokenizer(config, vocab)
            end_of_text = tokenizer.end_of_text
            parts = {str(files[source][0]): in_memory(files[source], tokenizer)}
            stream = Stream(parts, vocab)
        part = range(len(stream))
        if not config.held_out and CORPUS not in config.train:
            boundary = len(part) - round(config.held_out_part * len(part))
            if end_of_text is not None and boundary < len(part):
                boundary = _document_at(stream, boundary, end_of_text)
            part = part[:boundary] if split == "train" else part[boundary:]
        rows = Windows(stream, part, sequence=sequence, end_of_text=end_of_text)
    # Usually one of the first rows has a label.
    if not any(rows.has_labels(rows[row]) for row in range(len(rows))):
        raise UserError(
            f"The {split} data has no token to predict in its {amount(len(rows), 'row')}. Is "
            "data.end_of_text the right token? Is each answer of a chat beyond sequence_length?"
        )
    return rows


def _files(config: DataConfig, split: Split) -> list[Path]:
    patterns: tuple[str, ...] = getattr(config, split)
    if CORPUS not in patterns:
        return files_of(patterns)
    if len(patterns) > 1 or config.kind == "chat" or config.tokenizer:
        raise UserError(
            f"data.{split}={patterns} names the built-in corpus, which is text as bytes: it takes "
            "no other files, no data.tokenizer, and no data.kind 'chat'. Name files instead."
        )
    return corpus.files_of()[SPLITS.index(split)]


def _require_one_tokenizer(
    config: DataConfig, files: Mapping[Split, list[Path]], notes: Mapping[Split, dict[str, Any]]
) -> None:
    """Raises unless `data.tokenizer`, the training data and the held-out data agree."""
    path = config.tokenizer
    named = None if path is None else digest_of(read_bytes(Path(path), "tokenizer file"))
    made = {"data.tokenizer": named} if named else {}
    for split, paths in files.items():
        unnoted = named or ("unknown" if are_tokens(paths) else Bytes.digest)
        made[f"data.{split}"] = notes[split].get("tokenizer", unnoted)
    if len(set(made.values())) > 1:
        raise UserError(
            f"The data have several tokenizers: {', '.join(f'{k} {v}' for k, v in made.items())}. "
            "Use one for all. data.tokenizer names that of text, and of token files that `coat "
            "tokenize` did not make."
        )


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


def _document_at(stream: Stream, place: int, end_of_text: int) -> int:
    """Returns where the first document after a place begins, or else the document at the place.

    If the latter is longer than a tenth of all tokens, returns the place itself.
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
