"""From text to tokens: with a Hugging Face `tokenizers` file, or byte by byte.

Nothing is added in front of a text. What ends a document is `end_of_text`, a token that is put
there by whoever knows where it ends. A text that spells a special token out is ordinary text: it
cannot end a document or speak for another role.
"""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import UInt

from coat_jax import tokenizer_file
from coat_jax.errors import UserError

ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Encoder(Protocol):
    """What makes tokens of texts.

    Attributes:
        vocab: how many different tokens there are.
        end_of_text: the one that ends a document.
        digest: names the encoder.
        dtype: the smallest that holds the tokens.
    """

    vocab: int
    end_of_text: int
    digest: str
    dtype: np.dtype

    def encode(self, texts: list[str]) -> list[UInt[np.ndarray, " N"]]:
        """The tokens of each text."""

    def encode_markers(self, text: str) -> UInt[np.ndarray, " N"]:
        """The tokens of a text in which special tokens are meant as such."""


def encoder_of(tokenizer: str | None, end_of_text: int | None) -> Encoder:
    """The encoder of a tokenizer's file, or without one that of bytes."""
    return Bytes(end_of_text) if tokenizer is None else Tokenizer(tokenizer, end_of_text)


class Bytes:
    """The bytes of UTF-8. A document ends with 0, which text does not contain."""

    vocab = 256
    digest = "bytes"
    dtype = np.dtype(np.uint16)

    def __init__(self, end_of_text: int | None = None):
        self.end_of_text = _known(0 if end_of_text is None else end_of_text, self.vocab)

    def encode(self, texts: list[str]) -> list[UInt[np.ndarray, " N"]]:
        """See `Encoder`."""
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def encode_markers(self, text: str) -> UInt[np.ndarray, " N"]:
        """See `Encoder`."""
        return self.encode([text])[0]


class Tokenizer:
    """A `tokenizers` file, on all cores of this machine."""

    def __init__(self, path: str | Path, end_of_text: int | None = None):
        """Reads a tokenizer.json.

        Args:
            path: of the file.
            end_of_text: by default the first of ENDS_OF_TEXT that the tokenizer knows.
        """
        self._path = path
        self._plain, content = tokenizer_file.read(path)
        self._with_markers = tokenizer_file.parsed(content, str(path))
        self._plain.encode_special_tokens = True  # as ordinary text, that is
        self.vocab = max(self._plain.get_vocab().values()) + 1
        self.digest = hashlib.sha256(content).hexdigest()[:16]
        self.dtype = np.dtype(np.uint16 if self.vocab <= 1 << 16 else np.uint32)
        known = map(self._plain.token_to_id, ENDS_OF_TEXT)
        if end_of_text is None:
            end_of_text = next((token for token in known if token is not None), None)
        if end_of_text is None:
            raise UserError(
                f"{path} has none of {', '.join(ENDS_OF_TEXT)}: set end_of_text to the number of "
                "the token that ends a document."
            )
        self.end_of_text = _known(end_of_text, self.vocab)

    def encode(self, texts: list[str]) -> list[UInt[np.ndarray, " N"]]:
        """See `Encoder`."""
        with tokenizer_file.failures_named(f"{self._path} cannot tokenize the data"):
            found = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, self.dtype) for one in found]

    def encode_markers(self, text: str) -> UInt[np.ndarray, " N"]:
        """See `Encoder`."""
        with tokenizer_file.failures_named(f"{self._path} cannot tokenize {text!r}"):
            found = self._with_markers.encode(text, add_special_tokens=False)
        return np.array(found.ids, self.dtype)


def _known(end_of_text: int, vocab: int) -> int:
    if not 0 <= end_of_text < vocab:
        raise UserError(
            f"end_of_text={end_of_text} is not in the tokenizer's vocabulary of {vocab:,}: it must "
            f"be from 0 to {vocab - 1}."
        )
    return end_of_text
