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
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

from coat_jax.errors import UserError
from coat_jax.files import expand_user, read_bytes
from coat_jax.token_readers import BytesReader, Reader, TokensReader
from coat_jax.validation import INT32_MAX

ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
LONGEST = 10_000  # characters that the replacements of a tokenizer make of each other
# Stands for whatever precedes a part of a document. No text has this character, so no tokenizer
# joins it to what follows.
OTHER_TEXT = "\ue000"


class Bytes:
    """Tokens are the bytes of UTF-8. A document ends with 0, which text does not contain.

    Attributes and methods are those of `Tokenizer`.
    """

    vocab = 256
    digest = "bytes"
    dtype = np.dtype(np.uint16)
    end_marker = OTHER_TEXT

    def __init__(self, end_of_text: int = 0):
        _require_known(end_of_text, self.vocab)
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

    def encode_markers(self, text: str, *, after: str = "") -> UInt[np.ndarray, " N"]:
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
        self._tokenizer = parsed(self.content, str(self._path))
        self.vocab = max(self._tokenizer.get_vocab().values()) + 1
        self.digest = _digest(self.content)
        self.dtype = np.dtype(np.uint16 if self.vocab <= 1 << 16 else np.uint32)
        if end_of_text is None:
            end_of_text = known_end_of_text(self._tokenizer)
        else:
            _require_known(end_of_text, self.vocab)
        self.end_of_text = end_of_text
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
    def end_marker(self) -> str:
        """The spelling of end_of_text, or `OTHER_TEXT` if a template cannot spell it out."""
        spelling = self._tokenizer.id_to_token(self.end_of_text) or ""
        found = self._tokenizer.encode(spelling, add_special_tokens=False).ids
        return spelling if found == [self.end_of_text] else OTHER_TEXT

    @functools.cached_property
    def _without_special_tokens(self) -> Any:
        content = json.loads(self.content)
        for token in content.get("added_tokens") or ():
            word = token["content"].strip()
            is_marker = len(word) > 1 and word in self._template
            token["special"] |= is_marker or token["id"] == self.end_of_text
        tokenizer = parsed(json.dumps(content).encode(), str(self._path))
        tokenizer.encode_special_tokens = True  # encodes their spelling as ordinary text
        return tokenizer

    @functools.cached_property
    def spelling_that_ends_documents(self) -> str | None:
        """The spelling of end_of_text, if it is that token in documents, too; None if not."""
        spelling = self._tokenizer.id_to_token(self.end_of_text) or ""
        try:
            (found,) = self.encode_documents([spelling])
        except UserError:  # the tokenizer cannot encode it
            return None
        return spelling if self.end_of_text in found else None

    @functools.cached_property
    def _puts_a_space_first(self) -> bool:
        """Whether a text gets a space in front of it, as in SentencePiece.

        If the tokenizer drops white space, only that space separates two words, so it stays.
        """
        return self._prepared("x") not in ("x", self._prepared("x\n"))

    def _prepared(self, text: str) -> str:
        """The text after normalization and pre-tokenization."""
        if (normalizer := self._tokenizer.normalizer) is not None:
            text = normalizer.normalize_str(text)
        if (pre_tokenizer := self._tokenizer.pre_tokenizer) is not None:
            text = "".join(part for part, _ in pre_tokenizer.pre_tokenize_str(text))
        return text

    @functools.cached_property
    def beginning(self) -> list[int]:
        """The tokens that the file puts in front of a text, such as <s>."""
        return beginning_of(self._tokenizer, str(self._path))

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt. `beginning` is not added if the text spells it out itself."""
        own = self._encode(text)
        return begun_with(self.beginning, own) if self._begin else own

    def encode_documents(
        self, texts: Sequence[str], continued: Sequence[bool] = ()
    ) -> list[UInt[np.ndarray, " N"]]:
        """The tokens of each text, on all cores of this machine.

        Args:
            texts: documents, or parts of documents.
            continued: for each text, whether another part of its document precedes it; by default,
                none does.
        """
        before = [""] * len(texts)
        if self._puts_a_space_first and continued:
            before = [OTHER_TEXT if follows else "" for follows in continued]
        tokenizer = self._without_special_tokens
        with library_failures(f"{self._path} cannot tokenize the data"):
            found = tokenizer.encode_batch_fast(
                [first + text for first, text in zip(before, texts, strict=True)],
                add_special_tokens=False,
            )
            tokens = [
                _following(tokenizer, first, text, encoding.ids)
                for first, text, encoding in zip(before, texts, found, strict=True)
            ]
        return [np.array(of_text, self.dtype) for of_text in tokens]

    def encode_markers(self, text: str, *, after: str = "") -> UInt[np.ndarray, " N"]:
        """The tokens of a text of a template, in which special tokens count as special.

        Args:
            text: from the template.
            after: what precedes it: `OTHER_TEXT`, `end_marker`, or nothing.
        """
        before = after if self._puts_a_space_first else ""
        with library_failures(f"{self._path} cannot tokenize {text!r}"):
            both = self._tokenizer.encode(before + text, add_special_tokens=False)
            tokens = _following(self._tokenizer, before, text, both.ids)
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


def begun_with(begin: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """`tokens` with `begin` in front, unless they begin with these already.

    The chat templates of Llama 3 and Mistral spell out <|begin_of_text|> and <s>.
    """
    begun = list(tokens[: len(begin)]) == list(begin)
    return [*tokens] if begun else [*begin, *tokens]


def _following(tokenizer: Any, before: str, text: str, both: list[int]) -> list[int]:
    """Those tokens of `both`, the tokens of `before` + `text`, that belong to `text`."""

    def tokens_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    if not before:
        return both
    first = tokens_of(before)
    if both[: len(first)] != first:
        return tokens_of(text)  # one token spans the end of `before` and the start of `text`
    # Some tokenizers do not know OTHER_TEXT, and have one token for several unknown characters.
    adds_none = tokens_of(before + text[:1]) == first
    shares_last = adds_none and tokens_of(text[:1])[-1:] == first[-1:]
    return both[len(first) - shares_last :]


def document_tokenizer(
    path: str | Path | None, end_of_text: int | None = None, *, template: str = ""
) -> AnyTokenizer:
    """A tokenizer for documents, which must have a token that ends them.

    Args:
        path: of a tokenizer.json; None for bytes.
        end_of_text: the token that ends a document; by default the tokenizer's own.
        template: the chat template; see `Tokenizer`.
    """
    if path is None:
        return Bytes() if end_of_text is None else Bytes(end_of_text)
    tokenizer = Tokenizer(path, end_of_text=end_of_text, template=template)
    if tokenizer.end_of_text is None:
        raise UserError(
            f"{path} has none of {', '.join(ENDS_OF_TEXT)}: set end_of_text to the number of "
            "the token that ends a document."
        )
    if end_of_text is None and (spelling := tokenizer.spelling_that_ends_documents):
        raise UserError(
            f"{path} encodes {spelling} in a text as the token that ends documents. Set "
            f"end_of_text to another token, or to {tokenizer.end_of_text} if no text has that word."
        )
    return tokenizer


def _require_known(end_of_text: int, vocab: int) -> None:
    if not 0 <= end_of_text < vocab:
        raise UserError(
            f"end_of_text={end_of_text} is not in the tokenizer's vocabulary of {vocab:,}: it must "
            f"be from 0 to {vocab - 1}."
        )


# --- The library's files ----------------------------------------------------------------------


def digest_of(path: str | Path | None) -> str:
    """The `digest` of the tokenizer in a file; None is bytes."""
    if path is None:
        return Bytes.digest
    return _digest(read_bytes(expand_user(path), "tokenizer file"))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def parsed(content: bytes, where: str) -> Any:
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
        _require_bounded(tokenizer, where)
    if not 0 <= highest < INT32_MAX:
        raise UserError(f"{where} has no vocabulary that a model can use: create it again.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _require_bounded(tokenizer: Any, where: str) -> None:
    """Raises if replacements make texts ever longer, so that encoding or decoding does not end."""
    from tokenizers.normalizers import Sequence

    for kind, part in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        steps = [] if part is None else _steps(json.loads(part.__getstate__()))
        steps = [step for step in steps if kind == "normalizer" or step["type"] == "Replace"]
        # What one step writes may be what another one replaces.
        text = "".join(step.get("content", "") for step in steps)
        for step in steps:
            if len(text) > LONGEST:
                raise UserError(f"{where} has a {kind} that makes short texts endlessly long.")
            normalizer = Sequence([])
            normalizer.__setstate__(json.dumps(step).encode())
            text = normalizer.normalize_str(text)


def _steps(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The normalizers or decoders of a sequence, which may have sequences in it."""
    inside = part.get("normalizers") or part.get("decoders")
    return [step for one in inside for step in _steps(one)] if inside else [part]


def known_end_of_text(tokenizer: Any) -> int | None:
    """The first of ENDS_OF_TEXT that a tokenizer of the library has; None if it has none."""
    known = map(tokenizer.token_to_id, ENDS_OF_TEXT)
    return next((int(token) for token in known if token is not None), None)


def beginning_of(tokenizer: Any, where: str) -> list[int]:
    """The tokens that a tokenizer of the library puts in front of a text.

    Tokens that it appends, such as </s>, are left out: they would end a prompt before a model
    continues it.

    Args:
        tokenizer: from `parsed`.
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
