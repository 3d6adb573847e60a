"""Errors that orbax raises are not logged as well."""

import logging
import sys

import jax.numpy as jnp

from coat_jax.training.checkpoint import Checkpoints


def record(path, raise_in=None, level=logging.ERROR):
    """A log record of a file, with an error that a function of another file raised."""
    error = None
    if raise_in:
        try:
            exec(compile("raise ValueError", raise_in, "exec"))
        except ValueError:
            error = sys.exc_info()
    return logging.LogRecord("absl", level, path, 1, "said", None, error)


def test_only_errors_of_orbax_are_not_logged(tmp_path):
    with Checkpoints(tmp_path) as saving:
        saving.save(1, {"w": jnp.ones(3)}, {})
    of_orbax, asyncio = "/lib/orbax/checkpoint/async_checkpointer.py", "/lib/asyncio/base_events.py"
    for made, logged in (
        (record(of_orbax), False),
        (record(of_orbax, level=logging.WARNING), True),
        (record(asyncio, "/lib/orbax/serialization.py"), False),
        (record(asyncio, "/home/own/server.py"), True),
        (record("/lib/grain/loader.py"), True),
    ):
        for name in ("absl", "asyncio"):
            assert bool(logging.getLogger(name).filter(made)) is logged
