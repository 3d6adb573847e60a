"""The first process decides, and the others do the same.

For a moment two machines may see different contents of a shared folder. Only the first process
reads it, and sends its decision to the others.
"""

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from coat_jax.errors import UserError

T = TypeVar("T")


class Refused(UserError):
    """An error of the first process, raised on the others."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


def is_main() -> bool:
    """Whether this process writes what only one may write."""
    return jax.process_index() == 0


def on_first(work: Callable[[], T]) -> T:
    """Runs `work` on the first process and returns its result, of JSON's types, on all of them.

    An error there ends the other processes, too: with the same message and exit code for a
    UserError or an OSError about a file, and with a RuntimeError for any other.
    """
    if jax.process_count() == 1:
        return work()
    error: Exception | None = None
    text = ""
    if is_main():
        try:
            text = json.dumps({"result": work()})
        except Exception as raised:
            error, text = raised, json.dumps(_described(raised))
    answer = _broadcast(text.encode())
    if error is not None:
        raise error
    if "refused" in answer:
        raise Refused(answer["refused"], answer["exit_code"])
    if "file" in answer:
        raise OSError(*answer["file"])
    if "bug" in answer:
        raise RuntimeError(f"The first process failed: {answer['bug']}")
    result: T = answer["result"]
    return result


def _described(error: Exception) -> dict[str, Any]:
    """An error in JSON's types."""
    if isinstance(error, UserError):
        return {"refused": str(error), "exit_code": error.exit_code}
    if isinstance(error, OSError) and error.filename is not None:
        return {"file": [error.errno, error.strerror, os.fsdecode(error.filename)]}
    return {"bug": repr(error)}


def _broadcast(text: bytes) -> dict[str, Any]:
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    # broadcast_one_to_all needs an array of the same shape on every process.
    text = text if is_main() else bytes(length)
    told = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    received: dict[str, Any] = json.loads(np.asarray(told, np.uint8).tobytes())
    return received
