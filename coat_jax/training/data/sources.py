"""From a config to rows: which reader the data needs, and which part of it is held out.

No file is both trained on and held out, and one tokenizer makes the tokens of both.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np

from coat_jax.errors import UserError
from coat_jax.files import expand_user, read_bytes
from coat_jax.printable import amount
from coat_jax.tokenizers import AnyTokenizer, Bytes, digest_of, document_tokenizer
from coat_jax.training.data import chat, corpus
from coat_jax.training.data.packing import Packed
from coat_jax.training.data.paths import files_of, require_apart
from coat_jax.training.data.rows import Stream, TextRows, Windows
from coat_jax.training.data.token_files import open_files, read_notes
from coat_jax.training.data.tokenizing import in_memory
from coat_jax.validation import Between, CountOrZero, require_fields

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
CORPUS = "corpus"  # in place of paths: the built-in one
TOKENS = (".npy", ".bin")  # the suffixes of token files
SEARCHED = 1 << 24  # how many tokens are searched for the beginning of a document
TEMPLATE = "<|{role}|>\n{content}{end}\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from. A path may be a pattern: 'tokens/*.npy', 'notes/**/*.md'.

    Attributes:
        train: paths of token files (.npy, .bin), or of text files and .jsonl; or "corpus", the
            source of Python's standard library as bytes.
        held_out: paths of data for evaluation. Without any, the end of the training data is held
            out; of the corpus, every 20th file.
        held_out_part: the share of the training data that is held out in this way.
        kind: what is learned: "text" learns every token; "chat" reads .jsonl files with
            {"messages": [{"role": ..., "content": ...}]} and learns only the assistant's answers.
        tokenizer: a tokenizer.json for text; None takes bytes as tokens.
        dtype: the dtype of token files without a header, uint16 or uint32; None is uint16.
        end_of_text: the token that ends a document; attention stays within a document. None takes
            the tokenizer's, or the one that `coat tokenize` noted beside its files.
        template: how a message of a chat is written; {end} is the token `end_of_text`, and {Role}
            a role that begins with a capital letter.
    """

    train: tuple[str, ...] = ("corpus",)
    held_out: tuple[str, ...] = ()
    held_out_part: Annotated[float, Between(above=0, below=1)] = 0.01
    kind: Literal["text", "chat"] = "text"
    tokenizer: str | None = None
    dtype: Literal["uint16", "uint32"] | None = None
    end_of_text: CountOrZero | None = None
    template: str = TEMPLATE

    def __post_init__(self) -> None:
        require_fields(self, "data.")
        if not self.train:
            raise UserError("data.train=() names no data: give paths, or 'corpus'.")
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", str(expand_user(self.tokenizer)))


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
    notes = {name: read_notes(of) for name, of in files.items() if are_tokens(of)}
    if config.held_out:
        require_apart(files["train"], files["held_out"])
    _require_one_tokenizer(config, files, notes)
    source = split if getattr(config, split) else "train"  # of which the end is held out
    rows: TextRows
    if config.kind == "chat":
        rows = _conversations(config, split, files[source], sequence, vocab, seed)
    else:
        if CORPUS in getattr(config, source):
            end_of_text = None
            stream = Stream({f"the corpus ({split})": getattr(corpus.load(), split)}, vocab)
        elif source in notes:
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


def are_tokens(paths: list[Path]) -> bool:
    """Returns whether these are token files; raises if only some are."""
    other = [path for path in paths if path.suffix.lower() not in TOKENS]
    if other and len(other) < len(paths):
        raise UserError(
            f"{other[0]} holds text, and other files of the same data hold tokens: make tokens of "
            "the text with `coat tokenize`, and train on token files."
        )
    return not other


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
    config: DataConfig, files: Mapping[Split, Any], notes: Mapping[Split, dict[str, Any]]
) -> None:
    """Raises unless `data.tokenizer`, the training data and the held-out data agree."""
    path = config.tokenizer
    named = None if path is None else digest_of(read_bytes(Path(path), "tokenizer file"))
    made = {"data.tokenizer": named} if named else {}
    for split in files:
        unnoted = named or ("unknown" if split in notes else Bytes.digest)
        made[f"data.{split}"] = notes.get(split, {}).get("tokenizer", unnoted)
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


def documents_of_split(split: Split, count: int, held_out_part: float) -> range:
    """Returns which of so many documents a split has, if their end is held out."""
    boundary = count - max(round(held_out_part * count), 1)
    return range(boundary) if split == "train" else range(boundary, count)


def _conversations(
    config: DataConfig, split: Split, files: list[Path], sequence: int, vocab: int, seed: int
) -> Packed:
    tokenizer = _tokenizer(config, vocab, template=chat.spelling(config.template))
    documents = chat.read(files, tokenizer, config.template)
    if not config.held_out:
        count = len(documents.ends)
        documents = documents.part(documents_of_split(split, count, config.held_out_part))
    return Packed(documents, sequence=sequence, seed=seed, end_of_text=tokenizer.end_of_text)
