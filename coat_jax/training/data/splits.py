"""Training and held-out data: no file in both, and one tokenizer for both."""

from pathlib import Path
from typing import Literal, get_args

from coat_jax.errors import UserError
from coat_jax.tokenizers import digest_of
from coat_jax.training.data import corpus
from coat_jax.training.data.config import DataConfig
from coat_jax.training.data.paths import are_tokens, files_of, identity
from coat_jax.training.data.token_files import sidecar_of

CORPUS = "corpus"  # in place of paths: the built-in one

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)


def require_apart(config: DataConfig) -> None:
    """Raises if a file is both trained on and held out."""
    train = {identity(path): path for path in _named(config.train, "train")}
    held_out = {identity(path) for path in _named(config.held_out, "held_out")}
    if both := [path for own, path in train.items() if own in held_out]:
        raise UserError(f"{min(both)} is named in data.train and in data.held_out: name others.")


def require_one_tokenizer(config: DataConfig) -> None:
    """Raises if `data.tokenizer`, the training data and the held-out data differ in the tokenizer.

    Token files that `coat tokenize` did not make do not say what made them.
    """
    made = {
        split: (_are_token_files(patterns), _digest(config, patterns))
        for split in SPLITS
        if (patterns := getattr(config, split))
    }
    if len(made) < len(SPLITS):
        return
    (train_in_tokens, train), (held_in_tokens, held_out) = made["train"], made["held_out"]
    if train and held_out and train != held_out:
        raise UserError(
            f"data.train has tokens of one tokenizer ({train}), and data.held_out of another "
            f"({held_out}). Use the same for both; data.tokenizer names that of text files."
        )
    if train_in_tokens != held_in_tokens and config.tokenizer is None and None in (train, held_out):
        raise UserError(
            "One of data.train and data.held_out has token files and the other has text, which "
            "is read as bytes: name the tokenizer of the token files with data.tokenizer."
        )


def _digest(config: DataConfig, patterns: tuple[str, ...]) -> str | None:
    """What identifies the tokenizer of some data; None if it is not known."""
    if CORPUS in patterns:
        return digest_of(None)
    if not _are_token_files(patterns):
        return digest_of(config.tokenizer)
    paths = files_of(patterns)
    notes = sidecar_of(paths)
    if notes is None:
        return None if config.tokenizer is None else digest_of(config.tokenizer)
    made = str(notes["tokenizer"])
    if config.tokenizer is not None and digest_of(config.tokenizer) != made:
        raise UserError(
            f"data.tokenizer={config.tokenizer} is not the tokenizer that made the files in "
            f"{paths[0].parent}: leave it out, or name the one that did."
        )
    return made


def _are_token_files(patterns: tuple[str, ...]) -> bool:
    return CORPUS not in patterns and are_tokens(files_of(patterns))


def _named(patterns: tuple[str, ...], split: Split) -> list[Path]:
    """All files of a split, those of the corpus among them."""
    paths = files_of(tuple(pattern for pattern in patterns if pattern != CORPUS))
    if CORPUS not in patterns:
        return paths
    train, held_out = corpus.files_of()
    return paths + (train if split == "train" else held_out)
