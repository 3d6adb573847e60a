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
        raise UserError(f"{min(both)} is named in data.train and in data.held_out: use it in one.")


def require_one_tokenizer(config: DataConfig) -> None:
    """Raises if `data.tokenizer`, the training data and the held-out data differ in the tokenizer.

    Token files that `coat tokenize` did not make do not say what made them.
    """
    made = [_made(config, patterns) for split in SPLITS if (patterns := getattr(config, split))]
    if len(made) < len(SPLITS):
        return
    (in_tokens, digest), (also_in_tokens, other_digest) = made
    if digest and other_digest and digest != other_digest:
        raise UserError(
            f"data.train has tokens of one tokenizer ({digest}), and data.held_out of "
            f"another ({other_digest}). Use the same for both; data.tokenizer names that of "
            "text files."
        )
    unknown = config.tokenizer is None and None in (digest, other_digest)
    if unknown and in_tokens != also_in_tokens:
        raise UserError(
            "One of data.train and data.held_out has token files and the other has text, which "
            "is read as bytes: name the tokenizer of the token files with data.tokenizer."
        )


def _made(config: DataConfig, patterns: tuple[str, ...]) -> tuple[bool, str | None]:
    """Whether a split is read from token files, and its tokenizer's digest, if that is known."""
    if CORPUS in patterns:
        return False, digest_of(None)
    paths = files_of(patterns)
    if not are_tokens(paths):
        return False, digest_of(config.tokenizer)
    named = None if config.tokenizer is None else digest_of(config.tokenizer)
    notes = sidecar_of(paths)
    if notes is None:
        return True, named
    if named not in (None, notes["tokenizer"]):
        raise UserError(
            f"data.tokenizer={config.tokenizer} is not the tokenizer that made the files in "
            f"{paths[0].parent}: leave it out, or name the one that did."
        )
    return True, notes["tokenizer"]


def _named(patterns: tuple[str, ...], split: Split) -> list[Path]:
    """All files of a split, those of the corpus among them."""
    paths = files_of(tuple(pattern for pattern in patterns if pattern != CORPUS))
    if CORPUS not in patterns:
        return paths
    train, held_out = corpus.files_of()
    return paths + (train if split == "train" else held_out)
