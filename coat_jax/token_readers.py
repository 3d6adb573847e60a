"""Tokens to text, piece by piece.

New tokens of a model become text as they arrive. A character may take several tokens, and the text
of a token may depend on the one before it (a space that only stands between words), so a reader
returns a piece once its characters are complete. All pieces together are the text of all tokens.
"""

import codecs
from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 8  # the last of a prompt, to decode with; the text of a new token needs fewer


class BytesReader:
    """Reads tokens that are bytes of UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete and that was not returned before."""
        # A model may have more tokens than there are bytes. 0xFF occurs in no text in UTF-8.
        return self._decoder.decode(bytes(min(token, 0xFF) for token in tokens))

    def end(self) -> str:
        """The remaining text once no token follows."""
        return self._decoder.decode(b"", final=True)


class TokensReader:
    """Compares the texts of a tokenizer's last tokens with and without new ones.

    Args:
        decode: tokens to text.
        prompt: the tokens before those that are read.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]):
        self._decode = decode
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._returned = len(self._tokens)  # the tokens whose text was returned

    def read(self, tokens: Sequence[int]) -> str:
        """See `BytesReader`."""
        text = ""
        for token in tokens:
            self._tokens.append(token)
            # A character whose bytes are not complete is decoded as REPLACEMENT.
            if not self._decode(self._tokens).endswith(REPLACEMENT):
                text += self.end()
        return text

    def end(self) -> str:
        """See `BytesReader`."""
        text = self._decode(self._tokens)
        before = self._decode(self._tokens[: self._returned])
        if len(text) <= len(before):
            return ""
        self._tokens = self._tokens[self._returned :]
        self._returned = len(self._tokens)
        return text[len(before) :]


Reader = BytesReader | TokensReader
