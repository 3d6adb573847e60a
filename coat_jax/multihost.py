"""Decisions of process 0, broadcast to all others.

For a moment two machines may see different contents of a shared folder. Only process 0 reads it.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from coat_jax.errors import UserError

T = TypeVar("T")


def run_on_main(work: Callable[[], T]) -> T:
    """Runs `work` on process 0 and returns its result, which is pickled, on all processes.

    Its error is raised on all of them, too; on the others as a RuntimeError unless it is a
    UserError or an OSError.
    """
    if jax.process_count() == 1:
        return work()
    own: Exception | None = None
    content = b""
    is_main = jax.process_index() == 0
    if is_main:
        try:
            content = pickle.dumps((work(), None))
        except Exception as error:
            own = error
            known = isinstance(error, UserError | OSError)
            content = pickle.dumps(
                (None, error if known else RuntimeError(f"Process 0 failed: {error!r}"))
            )
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    # broadcast_one_to_all needs an array of the same shape on every process.
    content = content if is_main else bytes(length)
    received: Any = multihost_utils.broadcast_one_to_all(np.frombuffer(content, np.uint8))
    result: T
    result, failure = pickle.loads(np.asarray(received, np.uint8).tobytes())
    if own or failure:
        raise own or failure
    return result
