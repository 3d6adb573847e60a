"""A tokenizer.json of the `tokenizers` library, from a file that may be anything."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coat_jax.errors import UserError
from coat_jax.files import expanded, read_bytes

LARGEST = 2**31 - 1  # the tokens of a model are int32


def read(path: str | Path) -> tuple[Any, bytes]:
    """The tokenizer in a file, and the file's content."""
    path = expanded(path)
    content = read_bytes(path, "tokenizer file")
    return parsed(content, str(path)), content


def parsed(content: bytes, where: str) -> Any:
    """The tokenizer that a file holds, which neither cuts nor fills up texts.

    Args:
        content: of the file.
        where: it comes from, for the error.
    """
    import tokenizers

    with failures_named(f"{where} is no file of the `tokenizers` library, as tokenizer.json is"):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        highest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= highest < LARGEST:
        raise UserError(f"{where} has no vocabulary that a model can have: make it anew.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Turns an error of the library, which has no class of its own, into one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:  # the library panics on some files, which is no Exception
        raise UserError(f"{what}: {error}.") from None
