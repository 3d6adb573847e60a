"""Between text and tokens: a Hugging Face `tokenizers` file, or bytes where there is none.

New text is read from tokens as they come. A character may take several tokens, and a token's
text may depend on the one before it (a space that only stands between words), so a `Reader` says
a piece when its characters are whole. All pieces together are the text of all tokens.
"""

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from coat_jax import tokenizer_file
from coat_jax.errors import UserError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
BEFORE = 8  # tokens of the prompt that a new one's text may depend on, generously


class Reader(Protocol):
    """Turns tokens into text, piece by piece."""

    def read(self, tokens: Sequence[int]) -> str:
        """What is certain of the text after these tokens too, and was not said yet."""

    def end(self) -> str:
        """The rest, when no token follows."""


class Text(Protocol):
    """A way to write text as tokens."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""

    def token(self, text: str) -> int:
        """The token that is written like this; raises if there is none."""

    def end_of_text(self) -> int | None:
        """The token that ends a text, if that can be told."""

    def reader(self, prompt: Sequence[int]) -> Reader:
        """For the tokens after a prompt."""


class Bytes:
    """Tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> list[int]:
        """See `Text`. What a terminal passed on without understanding it stays as it was."""
        return list(_bytes_of(text))

    def token(self, text: str) -> int:
        """See `Text`."""
        tokens = self.encode(text)
        if len(tokens) != 1:
            raise UserError(f"{text!r} is no token: tokens are bytes, and it has {len(tokens)}.")
        return tokens[0]

    def end_of_text(self) -> int | None:
        """See `Text`: what text does not contain."""
        return 0

    def reader(self, prompt: Sequence[int]) -> Reader:
        """See `Text`."""
        return _BytesReader()


def _bytes_of(text: str) -> bytes:
    """Its UTF-8, and the bytes that a terminal passed on and Python could not read."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise UserError(f"{text[:40]!r} is no text: {error.reason}.") from None


def _clean(text: str) -> str:
    """The text, what is no text in it replaced: a tokenizer takes nothing else."""
    return _bytes_of(text).decode("utf-8", "replace")


class _BytesReader:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, tokens: Sequence[int]) -> str:
        # A model may have more tokens than there are bytes: 0xFF is in no text.
        return self._decoder.decode(bytes(min(token, 0xFF) for token in tokens))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """A `tokenizers` file, usually named tokenizer.json."""

    def __init__(self, path: str | Path, *, begin: bool = True):
        """Reads the file.

        Args:
            path: of the file.
            begin: whether texts begin with what the file says, such as <s>, if anything.
        """
        self._path = path
        self._tokenizer, _ = tokenizer_file.read(path)
        self._begin = begin

    def encode(self, text: str) -> list[int]:
        """See `Text`."""
        return self._encode(text, add_special_tokens=self._begin)

    def token(self, text: str) -> int:
        """See `Text`."""
        token = self._tokenizer.token_to_id(_clean(text))
        if token is not None:
            return int(token)
        tokens = self._encode(text, add_special_tokens=False)
        if len(tokens) != 1:
            raise UserError(f"{text!r} is no token of the tokenizer, which makes it {tokens}.")
        return int(tokens[0])

    def end_of_text(self) -> int | None:
        """See `Text`: by its usual names."""
        known = map(self._tokenizer.token_to_id, ENDS_OF_TEXT)
        return next((int(token) for token in known if token is not None), None)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with tokenizer_file.failures_named(f"{self._path} cannot tokenize this text"):
            return list(
                self._tokenizer.encode(_clean(text), add_special_tokens=add_special_tokens).ids
            )

    def reader(self, prompt: Sequence[int]) -> Reader:
        """See `Text`. Special tokens are left out."""
        return _TokensReader(self._tokenizer.decode, prompt)


class _TokensReader:
    """Compares the texts of the last tokens with and without the new ones."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]):
        self._decode = decode
        self._tokens = list(prompt[-BEFORE:])
        self._said = len(self._tokens)  # the tokens whose text was said

    def read(self, tokens: Sequence[int]) -> str:
        return "".join(map(self._read, tokens))

    def _read(self, token: int) -> str:
        self._tokens.append(token)
        # A character that lacks bytes is UNKNOWN so far.
        return self._say(self._decode(self._tokens), unless=UNKNOWN)

    def end(self) -> str:
        return self._say(self._decode(self._tokens))

    def _say(self, text: str, *, unless: str | None = None) -> str:
        before = self._decode(self._tokens[: self._said])
        if len(text) <= len(before) or (unless is not None and text.endswith(unless)):
            return ""
        self._tokens = self._tokens[self._said :]
        self._said = len(self._tokens)
        return text[len(before) :]
