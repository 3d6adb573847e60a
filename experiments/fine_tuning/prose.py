"""Which rows of a text are prose: those with the most words.

The text of the loss study is mostly source code. Comments, guides and licences have more tokens
that are words, so the rows with the largest share of them are another kind of text.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int32, UInt16

from coat_jax.errors import UserError
from experiments.loss_study import text as texts
from experiments.loss_study.arm import Settings
from experiments.loss_study.rows import row_order

PROSE = 0.25  # of all rows
SPACE = "Ġ"  # before a word, in a byte-level BPE


def rows_of(
    text: Path, vocab: int, settings: Settings, seed: int, *, steps: int
) -> tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " H"]]:
    """The rows to tune on in the order of the steps, and those of held-out text to evaluate on.

    Training has read none of them. Raises if the text has too few.

    Args:
        text: the folder of the loss study's text.
        vocab: of its tokens.
        settings: of the training before.
        seed: of the training before.
        steps: of tuning, with batches of the same size.
    """
    words = words_of(text, vocab)
    tokens = texts.load(text, "train", vocab)
    shares = shares_of_words(tokens, words, settings.sequence)
    bound = float(np.quantile(shares, 1 - PROSE))
    longest = replace(settings, steps=max(settings.steps, len(shares) // settings.batch))
    unread = row_order(tokens, longest, seed)[settings.rows :]
    tune = unread[shares[unread] >= bound]
    needed = steps * settings.batch
    if len(tune) < needed:
        raise UserError(
            f"Tuning needs {needed:,} rows of prose, and of the {len(unread):,} rows that are left "
            f"after training {len(tune):,} are: take fewer steps or a smaller batch."
        )
    of_others = shares_of_words(texts.load(text, "held_out", vocab), words, settings.sequence)
    held_out = np.flatnonzero(of_others >= bound)[: settings.held_out].astype(np.int32)
    if len(held_out) == 0:
        raise UserError(
            f"None of the {len(of_others):,} rows of held-out text is prose: give more."
        )
    return tune[:needed], held_out


def words_of(text: Path, vocab: int) -> Bool[np.ndarray, " V"]:
    """Which tokens are words or parts of words; of bytes, letters."""
    if vocab == texts.BYTES:
        pieces = list(map(chr, range(vocab)))
    else:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(text / f"tokenizer_{vocab}.json"))
        pieces = [tokenizer.id_to_token(i) or "" for i in range(vocab)]
    pieces = [piece.removeprefix(SPACE) for piece in pieces]
    return np.array([piece.isascii() and piece.isalpha() for piece in pieces])


def shares_of_words(
    tokens: UInt16[np.ndarray, " N"], words: Bool[np.ndarray, " V"], sequence: int
) -> Float[np.ndarray, " R"]:
    """The share of each row's tokens that are words."""
    rows = (len(tokens) - 1) // sequence
    shares: np.ndarray = words[tokens[: rows * sequence]].reshape(rows, sequence).mean(axis=1)
    return shares
