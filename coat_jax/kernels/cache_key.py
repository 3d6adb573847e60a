"""Gives partitioned kernels a stable key in JAX's compilation cache.

Under a mesh of several devices a kernel is a `CustomSPMDPartitioning` call until XLA partitions the
program. That call holds the address of a Python function, which differs in every process, so JAX's
cache would never find the program again. The trainer therefore tells JAX to leave the address out
of the key (`jax_remove_custom_partitioning_ptr_from_cache_key`). Two programs that differ only in a
kernel would then share a key, so the call is in a function whose name contains the kernel's hash.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array


def call_with_stable_key(
    partitioned: Callable[..., Any], run: Callable[..., Any], arrays: Sequence[Array]
) -> Any:
    """Calls `partitioned` on the arrays, in a function named after a hash of what `run` computes.

    Args:
        partitioned: `run` under custom_partitioning.
        run: the function whose jaxpr is hashed.
        arrays: the arguments.
    """

    def kernel(*arrays: Array) -> Any:
        return partitioned(*arrays)

    program = str(jax.make_jaxpr(run)(*arrays)) + _sources()
    kernel.__name__ = f"kernel_{hashlib.sha256(program.encode()).hexdigest()[:16]}"
    return jax.jit(kernel)(*arrays)


@functools.cache
def _sources() -> str:
    """A hash of the kernels' source files: a jaxpr holds only their names."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
