"""Several processes act as one: the first decides, and the others do as it says.

A shared folder may look different from two machines for a moment, or have filled up between two
looks at it. What depends on such a look is looked at once.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from coat_jax.training.distributed import is_main

T = TypeVar("T")


def on_first(work: Callable[[], T]) -> T:
    """What `work` returns on the first process, on all of them; it must be made of JSON's types.

    An OSError or a ValueError is raised on all of them, too.
    """
    if jax.process_count() == 1:
        return work()
    error: Exception | None = None
    answer: dict[str, Any] = {}
    if is_main():
        try:
            answer = {"result": work()}
        except (OSError, ValueError) as raised:
            error, answer = raised, {"error": str(raised), "os": isinstance(raised, OSError)}
    answer = _broadcast(answer)
    if error is not None:
        raise error
    if "error" in answer:
        raise (OSError if answer["os"] else ValueError)(answer["error"])
    result: T = answer["result"]
    return result


def _broadcast(answer: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(answer).encode()
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    # Other processes bring what the first one's text is laid over.
    text = text if is_main() else bytes(length)
    told = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    received: dict[str, Any] = json.loads(np.asarray(told, np.uint8).tobytes())
    return received
