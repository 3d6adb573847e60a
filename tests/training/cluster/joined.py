"""A run without a model: joins, sums the processes' numbers, steps until asked to stop."""

import os
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from coat_jax import multihost
from coat_jax.training.cluster import distributed
from coat_jax.training.cluster.stop import Stop

MOST = 3_000  # steps, should nobody ask: a minute
STOPPED = 143


def say(text):
    """In one piece, whoever else writes there."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


distributed.start(timeout=600)
with Stop() as stop:
    total = multihost_utils.process_allgather(jnp.array(jax.process_index() + 1)).sum()
    say(f"joined {jax.process_index()} of {jax.process_count()}, sum {total}")
    step = 1
    while step < MOST and not stop.requested():
        time.sleep(0.02 * (1 + jax.process_index()))  # one is slower than the other
        step += 1
    say(f"stopped after {step}, main {multihost.is_main()}")
sys.exit(STOPPED if step < MOST else 0)
