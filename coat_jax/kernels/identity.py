"""Names partitioned kernels after what they compute, for JAX's compilation cache.

Under a mesh of several devices a kernel is a `CustomSPMDPartitioning` call until XLA partitions
the program. That call says where in memory its Python function is, and not what the function
does. The address differs in every process, so JAX's cache never finds the program again; and
without the address two programs that differ in a kernel only would have one key. So the call
stands in a function whose name has a hash of the kernel in it, and the trainer tells JAX to leave
the address out (`jax_remove_custom_partitioning_ptr_from_cache_key`).
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array


def call_by_name(
    partitioned: Callable[..., Any], run: Callable[..., Any], arrays: Sequence[Array]
) -> Any:
    """Calls `partitioned` on the arrays, under a name that says what `run` computes.

    Args:
        partitioned: `run` under custom_partitioning.
        run: the function whose program is hashed.
        arrays: the arguments.
    """

    def kernel(*arrays: Array) -> Any:
        return partitioned(*arrays)

    program = str(jax.make_jaxpr(run)(*arrays)) + _sources()
    kernel.__name__ = f"kernel_{hashlib.sha256(program.encode()).hexdigest()[:16]}"
    return jax.jit(kernel)(*arrays)


@functools.cache
def _sources() -> str:
    """A hash of the kernels' source files: a program's text has their names only."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
