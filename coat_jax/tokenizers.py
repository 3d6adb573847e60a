"""Text to tokens and back: with a tokenizer.json of the `tokenizers` library, or as bytes.

    encode              one text, as a prompt of a model
    encode_documents    many texts to train on: no token is put in front of them, and a special
                        token that a text spells out is ordinary text, which cannot end a document
    encode_markers      the text of a chat template, in which special tokens count as special
    reader              tokens to text as a model generates them

Tokenizers like SentencePiece put a space in front of each text. A part of a document that follows
another part gets none, so that it has the tokens that it would have in the whole document, unless
one of these spans the end of a part. A character may take several tokens, and the text of a token
may depend on the one before it, so a reader returns text once its characters are complete.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt

from coat_jax.errors import UserError
from coat_jax.files import expand_user, read_bytes

After = Literal["nothing", "end", "text"]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 8  # the last of a prompt, to decode with; the text of a new token needs fewer
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# Settings with which steps of a tokenizer put no space in front of a text, as SentencePiece does.
WITHOUT_SPACE: dict[Any, dict[str, Any]] = {
    "Prepend": {"prepend": ""},
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}


# --- Tokens to text ---------------------------------------------------------------------------


class Reader:
    """Compares the texts of the last tokens with and without new ones.

    Args:
        decode: tokens to text.
        prompt: the tokens before those that are read.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]):
        self._decode = decode
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._returned = len(self._tokens)  # the tokens whose text was returned

    def read(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens complete and that was not returned before."""
        text = ""
        for token in tokens:
            self._tokens.append(token)
            # A character whose bytes are not complete is decoded as REPLACEMENT.
            if not self._decode(self._tokens).endswith(REPLACEMENT):
                text += self.end()
        return text

    def end(self) -> str:
        """Returns the remaining text once no token follows."""
        text = self._decode(self._tokens)
        before = self._decode(self._tokens[: self._returned])
        if len(text) <= len(before):
            return ""
        self._tokens = self._tokens[self._returned :]
        self._returned = len(self._tokens)
        return text[len(before) :]


# --- Text to tokens ---------------------------------------------------------------------------


BYTES = "bytes"  # in place of a file


class Bytes:
    """Tokens are the bytes of UTF-8. A document ends with 0, which text does not contain.

    Attributes and methods are those of `Tokenizer`.
    """

    vocab = 256
    digest = BYTES
    dtype = np.dtype(np.uint16)

    def __init__(self, end_of_text: int = 0):
        self.end_of_text = end_of_text

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt. Bytes that a terminal could not decode are unchanged."""
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_documents(
        self, texts: Sequence[str], *, continued: bool = False
    ) -> list[UInt[np.ndarray, " N"]]:
        """See `Tokenizer`."""
        for text in texts if self.end_of_text == 0 else ():
            if (place := text.find("\0")) >= 0:
                around = text[max(place - 20, 0) : place + 20]
                raise UserError(
                    "A text has the character NUL, which ends documents whose tokens are bytes, "
                    f"in {around!r}: remove it, or set end_of_text to 255, which no text has."
                )
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def encode_markers(self, text: str, *, after: After = "nothing") -> UInt[np.ndarray, " N"]:
        """See `Tokenizer`."""
        return self.encode_documents([text])[0]

    def token(self, text: str) -> int:
        """See `Tokenizer`."""
        tokens = self.encode(text)
        if len(tokens) != 1:
            raise UserError(f"{text!r} is not a token: tokens are bytes, and it has {len(tokens)}.")
        return tokens[0]

    def reader(self, prompt: Sequence[int]) -> Reader:
        """See `Tokenizer`."""
        # A model may have more tokens than there are bytes. 0xFF occurs in no text in UTF-8.
        return Reader(lambda new: bytes(min(n, 0xFF) for n in new).decode(errors="replace"), [])


class Tokenizer:
    """A file of the `tokenizers` library, usually named tokenizer.json.

    Args:
        path: of the file.
        begin: whether a prompt begins with `beginning`.
        end_of_text: by default the first of ENDS_OF_TEXT that the tokenizer knows.
        template: the text of the chat template. Tokens of several characters in it are special: no
            document can contain them.

    Attributes:
        vocab: how many different tokens there are.
        end_of_text: the token that ends a document; None if none is known.
        digest: identifies the tokenizer.
        dtype: the smallest that holds the tokens.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        begin: bool = True,
        end_of_text: int | None = None,
        template: str = "",
    ):
        import tokenizers

        self._path, self._begin, self._template = expand_user(path), begin, template
        self.content = read_bytes(self._path, "tokenizer file")
        with library_failures(
            f"{self._path} is not a file of the `tokenizers` library, as tokenizer.json is"
        ):
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(self.content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.digest = digest_of(self.content)
        self.dtype = np.dtype(np.uint16 if self.vocab <= 1 << 16 else np.uint32)
        known = (end_of_text, *map(self._tokenizer.token_to_id, ENDS_OF_TEXT))
        self.end_of_text = next((token for token in known if token is not None), None)

    def require_fits(self, vocab: int) -> None:
        """Raises if it has more tokens than the model, besides added ones, as for padding."""
        needed = max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        if needed > vocab:
            raise UserError(
                f"{self._path} has a vocabulary of {needed:,}, and the model one of {vocab:,}: it "
                "is the tokenizer of another model."
            )

    @functools.cached_property
    def _document_encoders(self) -> list[Any]:
        """Encodes documents, and parts that continue one; special tokens are ordinary text."""
        content = json.loads(self._tokenizer.to_str())
        for token in content["added_tokens"]:
            word = token["content"].strip()
            is_marker = len(word) > 1 and word in self._template
            token["special"] |= is_marker or token["id"] == self.end_of_text
        first = json.dumps(content)
        continuing = json.dumps(
            json.loads(first, object_hook=lambda p: p | WITHOUT_SPACE.get(p.get("type"), {}))
        )
        # If white space is dropped, only the space in front of each word separates it from others.
        if '"type": "WhitespaceSplit"' in first:
            continuing = first
        encoders = [type(self._tokenizer).from_str(text) for text in (first, continuing)]
        for tokenizer in encoders:
            tokenizer.encode_special_tokens = True  # encodes their spelling as ordinary text
        return encoders

    def spelling(self, token: int | None) -> str:
        """Returns the spelling of a token; empty if it has none."""
        return self._tokenizer.id_to_token(token) or ""

    @functools.cached_property
    def beginning(self) -> list[int]:
        """The tokens that the file puts in front of a text, such as <s>.

        Tokens that it appends, such as </s>, are left out: they would end a prompt before a model
        continues it.
        """
        for text in ("a", *self._tokenizer.get_vocab()):
            # A vocabulary of words may have no token for unknown ones.
            with contextlib.suppress(UserError), library_failures("not a known word"):
                found = self._tokenizer.encode(text)
                added = found.special_tokens_mask  # 0 for special tokens that the text spells out
                if 0 in added:
                    return list(found.ids[: added.index(0)])
        return []  # no text has tokens

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, after `beginning` unless the text spells it out."""
        own = self._encode(text)
        return begin_with(self.beginning, own) if self._begin else own

    def encode_documents(
        self, texts: Sequence[str], *, continued: bool = False
    ) -> list[UInt[np.ndarray, " N"]]:
        """Returns the tokens of each text, computed on all cores of this machine.

        Args:
            texts: documents, or parts of documents.
            continued: whether another part of its document precedes each text.
        """
        encoder = self._document_encoders[continued]
        with library_failures(f"{self._path} cannot tokenize the data"):
            found = encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in found]

    def encode_markers(self, text: str, *, after: After = "nothing") -> UInt[np.ndarray, " N"]:
        """Returns the tokens of a text of a template, in which special tokens count as special.

        Args:
            text: from the template.
            after: what precedes it: nothing, the token that ends a document, or other text.
        """
        end = self.spelling(self.end_of_text) if after == "end" else ""
        if end and self._encode(end) == [self.end_of_text]:
            # Some tokenizers put a space in front of what follows a special token, too.
            return np.array(self._encode(end + text)[1:], self.dtype)
        with library_failures(f"{self._path} cannot tokenize {text!r}"):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = found.ids
        if after != "nothing":
            # Only what comes before the first special token continues other text.
            special = self._tokenizer.get_added_tokens_decoder()
            at = next((n for n, token in enumerate(tokens) if token in special), len(tokens))
            begin = text[: found.offsets[at][0]] if at < len(tokens) else text
            tokens = [*self.encode_documents([begin], continued=True)[0], *tokens[at:]]
        return np.array(tokens, self.dtype)

    def token(self, text: str) -> int:
        """Returns the token whose text is exactly `text`; raises if there is none."""
        token = self._tokenizer.token_to_id(_clean(text))
        if token is not None:
            return int(token)
        tokens = self._encode(text)
        if len(tokens) != 1:
            raise UserError(f"{text!r} is not one token: the tokenizer encodes it as {tokens}.")
        return int(tokens[0])

    def reader(self, prompt: Sequence[int]) -> Reader:
        """Returns a reader of the tokens that follow a prompt. Special tokens are left out."""
        return Reader(self._tokenizer.decode, prompt)

    def _encode(self, text: str) -> list[int]:
        with library_failures(f"{self._path} cannot tokenize this text"):
            return list(self._tokenizer.encode(_clean(text), add_special_tokens=False).ids)


AnyTokenizer = Bytes | Tokenizer


def begin_with(begin: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Puts `begin` in front of `tokens`, unless they begin with these already.

    The chat templates of Llama 3 and Mistral spell out <|begin_of_text|> and <s>.
    """
    begun = list(tokens[: len(begin)]) == list(begin)
    return [*tokens] if begun else [*begin, *tokens]


def document_tokenizer(
    path: str | Path | None, end_of_text: int | None = None, *, template: str = ""
) -> AnyTokenizer:
    """Returns a tokenizer for documents, which must have a token that ends them.

    Args:
        path: of a tokenizer.json; None for bytes.
        end_of_text: the token that ends a document; by default the tokenizer's own.
        template: the chat template; see `Tokenizer`.
    """
    tokenizer: AnyTokenizer = Bytes(end_of_text or 0)
    if path is not None:
        tokenizer = Tokenizer(path, end_of_text=end_of_text, template=template)
    end = tokenizer.end_of_text
    if end is None or not 0 <= end < tokenizer.vocab:
        raise UserError(
            f"end_of_text={end} must be the number of the token that ends a document, from 0 to "
            f"{tokenizer.vocab - 1}. Set it if a tokenizer has none of {', '.join(ENDS_OF_TEXT)}."
        )
    if end_of_text is None and isinstance(tokenizer, Tokenizer):
        spelling = tokenizer.spelling(end)
        if end in tokenizer.encode_documents([spelling])[0]:
            raise UserError(
                f"{path} encodes {spelling} in a text as the token that ends documents. Set "
                f"end_of_text to another token, or to {end} if no text has that word."
            )
    return tokenizer


def digest_of(content: bytes) -> str:
    """Returns a name of 16 hexadecimal digits for this content."""
    return hashlib.sha256(content).hexdigest()[:16]


@contextlib.contextmanager
def library_failures(what: str) -> Iterator[None]:
    """Turns an error of the library, which has no exception class of its own, into a UserError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        raise UserError(f"{what}: {error}.") from None


def _clean(text: str) -> str:
    """Replaces undecodable bytes, since the library accepts only valid text."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
