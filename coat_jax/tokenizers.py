"""Text to tokens and back: with a tokenizer.json of the `tokenizers` library, or as bytes.

    encode              one text, as a prompt of a model
    encode_documents    many texts to train on: no token is put in front of them, and a special
                        token that a text spells out is ordinary text, which cannot end a document
    encode_markers      the text of a chat template, in which special tokens count as special
    reader              tokens to text, piece by piece: `token_readers`

Tokenizers like SentencePiece put a space in front of each text. A part of a document that follows
another part gets none, so that it has the tokens that it would have in the whole document, unless
one of these spans the end of a part.
"""

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt

from coat_jax.errors import UserError
from coat_jax.files import expand_user, read_bytes
from coat_jax.token_readers import BytesReader, Reader, TokensReader
from coat_jax.validation import INT32_MAX

After = Literal["nothing", "end", "text"]
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# Settings with which steps of a tokenizer put no space in front of a text, as SentencePiece does.
WITHOUT_SPACE: dict[Any, dict[str, Any]] = {
    "Prepend": {"prepend": ""},
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}


class Bytes:
    """Tokens are the bytes of UTF-8. A document ends with 0, which text does not contain.

    Attributes and methods are those of `Tokenizer`.
    """

    vocab = 256
    digest = "bytes"
    dtype = np.dtype(np.uint16)

    def __init__(self, end_of_text: int = 0):
        self.end_of_text = end_of_text

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Bytes that a terminal could not decode are kept unchanged."""
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_documents(
        self, texts: Sequence[str], continued: Sequence[bool] = ()
    ) -> list[UInt[np.ndarray, " N"]]:
        """The tokens of each text; see `Tokenizer`."""
        for text in texts if self.end_of_text == 0 else ():
            if (place := text.find("\0")) >= 0:
                around = text[max(place - 20, 0) : place + 20]
                raise UserError(
                    "A text has the character NUL, which ends documents whose tokens are bytes, "
                    f"in {around!r}: remove it, or set end_of_text to 255, which no text has."
                )
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def encode_markers(self, text: str, *, after: After = "nothing") -> UInt[np.ndarray, " N"]:
        """The tokens of a text of a template; see `Tokenizer`."""
        return self.encode_documents([text])[0]

    def token(self, text: str) -> int:
        """The token whose text is exactly `text`; raises if there is none."""
        tokens = self.encode(text)
        if len(tokens) != 1:
            raise UserError(f"{text!r} is not a token: tokens are bytes, and it has {len(tokens)}.")
        return tokens[0]

    def reader(self, prompt: Sequence[int]) -> Reader:
        """Reads the tokens that follow a prompt."""
        return BytesReader()


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
        self._path, self._begin = expand_user(path), begin
        self.content = read_bytes(self._path, "tokenizer file")
        self._tokenizer = parse(self.content, str(self._path))
        self.vocab = max(self._tokenizer.get_vocab().values()) + 1
        self.digest = digest_of(self.content)
        self.dtype = np.dtype(np.uint16 if self.vocab <= 1 << 16 else np.uint32)
        known = known_end_of_text(self._tokenizer)
        self.end_of_text = known if end_of_text is None else end_of_text
        self._template = template

    def require_fits(self, vocab: int) -> None:
        """Raises if it has more tokens than the model, besides added ones, as for padding."""
        needed = max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
        if needed > vocab:
            raise UserError(
                f"{self._path} has a vocabulary of {needed:,}, and the model one of {vocab:,}: it "
                "is the tokenizer of another model."
            )

    @functools.cached_property
    def _document_encoders(self) -> tuple[Any, Any]:
        """Encodes documents, and parts that continue one; special tokens are ordinary text."""
        content = json.loads(self._tokenizer.to_str())
        for token in content["added_tokens"]:
            word = token["content"].strip()
            is_marker = len(word) > 1 and word in self._template
            token["special"] |= is_marker or token["id"] == self.end_of_text
        first = parse(json.dumps(content).encode(), str(self._path))
        continuing = _without_space(first, str(self._path))
        for tokenizer in (first, continuing):
            tokenizer.encode_special_tokens = True  # encodes their spelling as ordinary text
        return first, continuing

    @functools.cached_property
    def _continuing_encoder(self) -> Any:
        """Encodes the parts of a template that continue a text."""
        return _without_space(self._tokenizer, str(self._path))

    @property
    def end_spelling(self) -> str:
        """The spelling of end_of_text; empty if it has none."""
        return self._tokenizer.id_to_token(self.end_of_text) or ""

    @property
    def spells_end(self) -> bool:
        """Whether a document that spells end_of_text out has that token."""
        try:
            (found,) = self.encode_documents([self.end_spelling])
        except UserError:  # the tokenizer cannot encode it
            return False
        return self.end_of_text in found

    @functools.cached_property
    def beginning(self) -> list[int]:
        """The tokens that the file puts in front of a text, such as <s>."""
        return beginning_of(self._tokenizer, str(self._path))

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. `beginning` is not added if the text spells it out itself."""
        own = self._encode(text)
        return begin_with(self.beginning, own) if self._begin else own

    def encode_documents(
        self, texts: Sequence[str], continued: Sequence[bool] = ()
    ) -> list[UInt[np.ndarray, " N"]]:
        """The tokens of each text, on all cores of this machine.

        Args:
            texts: documents, or parts of documents.
            continued: for each text, whether another part of its document precedes it; by default,
                none does.
        """
        tokens: list[Any] = [None] * len(texts)
        follows = continued or [False] * len(texts)
        for tokenizer, kind in zip(self._document_encoders, (False, True), strict=True):
            numbers = [number for number in range(len(texts)) if follows[number] == kind]
            with library_failures(f"{self._path} cannot tokenize the data"):
                found = tokenizer.encode_batch_fast(
                    [texts[number] for number in numbers], add_special_tokens=False
                )
            for number, encoding in zip(numbers, found, strict=True):
                tokens[number] = np.array(encoding.ids, self.dtype)
        return tokens

    def encode_markers(self, text: str, *, after: After = "nothing") -> UInt[np.ndarray, " N"]:
        """The tokens of a text of a template, in which special tokens count as special.

        Args:
            text: from the template.
            after: what precedes it: nothing, the token that ends a document, or other text.
        """
        with library_failures(f"{self._path} cannot tokenize {text!r}"):
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
            if after != "nothing" and self._continuing_encoder is not self._tokenizer:
                # Some tokenizers put a space in front of what follows a special token, too.
                end = self.end_spelling
                if after == "end" and self._encode(end) == [self.end_of_text]:
                    tokens = self._encode(end + text)[1:]
                else:
                    special = self._tokenizer.get_added_tokens_decoder()
                    begin = self._continuing_encoder.encode(text, add_special_tokens=False).ids
                    tokens = [*_until(begin, special), *tokens[len(_until(tokens, special)) :]]
        return np.array(tokens, self.dtype)

    def token(self, text: str) -> int:
        """The token whose text is exactly `text`; raises if there is none."""
        token = self._tokenizer.token_to_id(_clean(text))
        if token is not None:
            return int(token)
        tokens = self._encode(text)
        if len(tokens) != 1:
            raise UserError(f"{text!r} is not one token: the tokenizer encodes it as {tokens}.")
        return int(tokens[0])

    def reader(self, prompt: Sequence[int]) -> Reader:
        """Reads the tokens that follow a prompt. Special tokens are left out."""
        return TokensReader(self._tokenizer.decode, prompt)

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


def _until(tokens: list[int], ends: Container[int]) -> list[int]:
    """The tokens before the first one of `ends`."""
    return list(itertools.takewhile(lambda token: token not in ends, tokens))


def _without_space(tokenizer: Any, where: str) -> Any:
    """A tokenizer of the library that puts no space in front of a text; perhaps the same one."""
    content = json.loads(tokenizer.to_str())
    before = json.dumps([content["normalizer"], content["pre_tokenizer"]])
    after = json.loads(before, object_hook=lambda p: p | WITHOUT_SPACE.get(p.get("type"), {}))
    # If white space is dropped, only the space in front of each word separates it from others.
    if "WhitespaceSplit" in before or json.dumps(after) == before:
        return tokenizer
    content["normalizer"], content["pre_tokenizer"] = after
    return parse(json.dumps(content).encode(), where)


def document_tokenizer(
    path: str | Path | None, end_of_text: int | None = None, *, template: str = ""
) -> AnyTokenizer:
    """A tokenizer for documents, which must have a token that ends them.

    Args:
        path: of a tokenizer.json; None for bytes.
        end_of_text: the token that ends a document; by default the tokenizer's own.
        template: the chat template; see `Tokenizer`.
    """
    tokenizer: AnyTokenizer
    if path is None:
        tokenizer = Bytes(end_of_text or 0)
    else:
        tokenizer = Tokenizer(path, end_of_text=end_of_text, template=template)
    if tokenizer.end_of_text is None:
        raise UserError(
            f"{path} has none of {', '.join(ENDS_OF_TEXT)}: set end_of_text to the number of "
            "the token that ends a document."
        )
    if not 0 <= tokenizer.end_of_text < tokenizer.vocab:
        raise UserError(
            f"end_of_text={end_of_text} is not in the tokenizer's vocabulary of "
            f"{tokenizer.vocab:,}: it must be from 0 to {tokenizer.vocab - 1}."
        )
    if end_of_text is None and isinstance(tokenizer, Tokenizer) and tokenizer.spells_end:
        raise UserError(
            f"{path} encodes {tokenizer.end_spelling} in a text as the token that ends documents. "
            f"Set end_of_text to another token, or to {tokenizer.end_of_text} if no text has that "
            "word."
        )
    return tokenizer


# --- The library's files ----------------------------------------------------------------------


def digest_of(content: bytes) -> str:
    """Identifies a tokenizer by the content of its file."""
    return hashlib.sha256(content).hexdigest()[:16]


def parse(content: bytes, where: str) -> Any:
    """The tokenizer that a file holds, without truncation and padding.

    Args:
        content: of the file.
        where: the name of the file in errors.
    """
    import tokenizers

    with library_failures(
        f"{where} is not a file of the `tokenizers` library, as tokenizer.json is"
    ):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        highest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= highest < INT32_MAX:
        raise UserError(f"{where} has no vocabulary that a model can use: create it again.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def known_end_of_text(tokenizer: Any) -> int | None:
    """The first of ENDS_OF_TEXT that a tokenizer of the library has; None if it has none."""
    known = map(tokenizer.token_to_id, ENDS_OF_TEXT)
    return next((int(token) for token in known if token is not None), None)


def beginning_of(tokenizer: Any, where: str) -> list[int]:
    """The tokens that a tokenizer of the library puts in front of a text.

    Tokens that it appends, such as </s>, are left out: they would end a prompt before a model
    continues it.

    Args:
        tokenizer: from `parse`.
        where: the name of its file in errors.
    """
    for text in ("a", *tokenizer.get_vocab()):
        try:
            with library_failures(f"{where} cannot tokenize {text!r}"):
                found = tokenizer.encode(text)
        except UserError:
            continue  # a vocabulary of words without a token for unknown ones
        added = found.special_tokens_mask  # 0 for special tokens that the text spells out
        if 0 in added:
            return list(found.ids[: added.index(0)])
    return []  # no text has tokens


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
    """The text with undecodable bytes replaced, since the library accepts only valid text."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
